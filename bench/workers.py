"""What several workers hit of what one hits: the serving workloads against ``radixkv serve --workers N``, for each N."""

from __future__ import annotations

import asyncio
import json as jsonlib
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.command_line import run
from bench.local import RADIXKV, server
from bench.serving import STDERR, ask, connect, run_workload
from bench.workloads import WORKLOADS

Count = Annotated[int, Parameter(validator=Number(gte=1))]


async def measure(url: str, name: str, concurrency: int, progress: Progress) -> dict[str, Any]:
    """The figures of one cold pass, and the requests and hits of each worker."""
    async with connect(url) as (client, body):
        done = await run_workload(client, body, WORKLOADS[name](), concurrency, progress)
        if error := next((sample.error for sample in done.samples if sample.error), None):
            raise OSError(error)
        report = jsonlib.loads(await ask(client, "GET", "report"))
    each = report.get("workers", [report])
    return done.figures() | {"requests": [worker["requests"] for worker in each]}


app = App(name="python -m bench workers", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def workers(
    *,
    numbers: tuple[Count, ...] = (1, 2),
    workload: Literal["fewshot", "agent", "unique"] = "agent",
    concurrency: Count = 16,
    flags: str = "",
    json: Path | None = None,
) -> int:
    """Start a server with each number of workers, nothing cached, run a workload on it, and compare hit rates.

    Parameters
    ----------
    numbers
        How many workers; the first is what the others are compared with.
    workload
        What to send, as in `python -m bench serving`.
    concurrency
        Most requests in flight at once.
    flags
        Flags for radixkv serve, as in --flags='--kv-cache-tokens 32768'.
    json
        File to write the figures to.
    """
    table = Table("workers", *(Column(text, justify="right") for text in ("hit rate", "points", "wall s", "requests of each")))
    rows: dict[int, dict[str, Any]] = {}
    with Progress(console=STDERR, transient=True, disable=not sys.stderr.isatty()) as progress:
        for number in numbers:
            with server([*RADIXKV, "--workers", str(number), *shlex.split(flags)]) as url:
                rows[number] = row = asyncio.run(measure(url, workload, concurrency, progress))
            points = 100 * (row["cached_share"] - rows[numbers[0]]["cached_share"])
            each = ", ".join(map(str, row["requests"]))
            table.add_row(str(number), f"{row['cached_share']:.1%}", f"{points:+.1f}", f"{row['wall_s']:.1f}", each)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if json is not None:
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "workload": workload, "workers": rows}
        json.write_text(jsonlib.dumps(record, indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input, or where a server or a request failed; 130 after Ctrl-C."""
    return run(app, argv, (ValueError, OSError, aiohttp.ClientError))
