"""What reporting costs: the few-shot workload against servers with and without each part of it, a pass on each in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json as jsonlib
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import aiohttp
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench import unattributed
from bench.command_line import run
from bench.local import RADIXKV, server
from bench.serving import STDERR, ask, connect, run_workload
from bench.workloads import WORKLOADS

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Passes = dict[str, list[float]]
"""Tokens a second of each pass, by setting."""

ASKED = {"dashboard/data": 1.0, "snapshot?max_nodes=500": 3.0}
"""What the page asks for, and how many seconds after an answer it asks again (``server/web/app.js``)."""


class Setting(NamedTuple):
    """How a pass is run: on which of the servers, and whether somebody looks at its page."""

    server: str
    watched: bool = False


SETTINGS = {
    "no attribution": Setting("no attribution"),
    "as it comes": Setting("as it comes"),
    "log": Setting("log"),
    "log with tokens": Setting("log with tokens"),
    "page": Setting("as it comes", watched=True),
    "all": Setting("log with tokens", watched=True),
}
COSTS = {
    "attribution of misses": ("as it comes", "no attribution"),
    "request log": ("log", "as it comes"),
    "request log with --log-tokens": ("log with tokens", "as it comes"),
    "live page, looked at": ("page", "as it comes"),
    "all of these": ("all", "no attribution"),
}
"""What is switched on, and the settings that differ in it: with and without."""


def commands(folder: Path, flags: Sequence[str]) -> dict[str, list[str]]:
    """Of each server.  Their request logs are ``folder``'s files."""
    plain = [*RADIXKV, *flags]
    return {
        "no attribution": [*unattributed.COMMAND, *plain[plain.index("serve") :]],
        "as it comes": plain,
        "log": [*plain, "--request-log", str(folder / "log.jsonl")],
        "log with tokens": [*plain, "--request-log", str(folder / "tokens.jsonl"), "--log-tokens"],
    }


@contextlib.asynccontextmanager
async def watching(client: aiohttp.ClientSession) -> AsyncIterator[None]:
    """Ask what the live page asks, as often, until the block ends, which raises ``aiohttp.ClientError`` if an answer was none."""

    async def again(path: str, every: float) -> None:
        while True:
            await ask(client, "GET", path)
            await asyncio.sleep(every)

    tasks = [asyncio.create_task(again(path, every)) for path, every in ASKED.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def measure(url: str, concurrency: int, *, watched: bool, progress: Progress) -> float:
    """Tokens generated a second over a pass on an empty cache.  Raises ``OSError`` where a request failed."""
    async with connect(url) as (client, body):
        await ask(client, "POST", "reset_prefix_cache")
        async with watching(client) if watched else contextlib.nullcontext():
            done = await run_workload(client, body, WORKLOADS["fewshot"](), concurrency, progress)
    if error := next((sample.error for sample in done.samples if sample.error), None):
        raise OSError(error)
    return float(done.figures()["output_tokens_per_s"] or 0)


@contextlib.contextmanager
def servers(flags: Sequence[str]) -> Iterator[dict[str, str]]:
    """All of them, side by side; gives their URLs.  Raises ``OSError`` where one logged nothing though it was to."""
    with tempfile.TemporaryDirectory(prefix="radixkv-reporting-") as folder:
        with contextlib.ExitStack() as stack:
            yield {name: stack.enter_context(server(command)) for name, command in commands(Path(folder), flags).items()}
        for name in ("log.jsonl", "tokens.jsonl"):
            if not (Path(folder) / name).stat().st_size:
                raise OSError(f"{name} is empty")


def time_round(flags: Sequence[str], passes: int, concurrency: int, progress: Progress) -> Passes:
    """Servers started anew, a pass on each for warming up, then ``passes`` over all settings: there, back, there, ..."""
    done: Passes = {name: [] for name in SETTINGS}
    with servers(flags) as urls:
        for url in urls.values():
            asyncio.run(measure(url, concurrency, watched=False, progress=progress))
        for number in range(passes):
            for name in list(SETTINGS)[:: 1 if number % 2 == 0 else -1]:
                setting = SETTINGS[name]
                speed = asyncio.run(measure(urls[setting.server], concurrency, watched=setting.watched, progress=progress))
                done[name].append(speed)
    return done


def summary(rounds: Sequence[Passes]) -> dict[str, dict[str, float]]:
    """By what is switched on: medians over all passes of the speed without and with it (tokens a second), and the quartiles of its
    cost, the share of the speed without it that is lost with it, over the pairs of passes that were run in the same turn."""
    result = {}
    for what, (on, off) in COSTS.items():
        pairs = [pair for done in rounds for pair in zip(done[on], done[off], strict=True)]
        costs = [1 - with_it / without for with_it, without in pairs]
        low, median, high = statistics.quantiles(costs, n=4, method="inclusive") if len(costs) > 1 else costs * 3
        with_it, without = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
        result[what] = {"off": without, "on": with_it, "cost": median, "cost_low": low, "cost_high": high}
    return result


def print_summary(console: Console, result: Mapping[str, Mapping[str, float]], pairs: int) -> None:
    table = Table("switched on", *(Column(text, justify="right") for text in ("off, tok/s", "on, tok/s", "cost", "quartiles")))
    for what, row in result.items():
        spread = f"{row['cost_low']:+.1%} to {row['cost_high']:+.1%}"
        table.add_row(what, f"{row['off']:.1f}", f"{row['on']:.1f}", f"{row['cost']:+.1%}", spread)
    console.print(table)
    console.print(
        "Generated tokens a second of the few-shot workload, nothing cached before: medians. Costs are taken from pairs of passes "
        f"in the same turn, one with it and one without: {pairs} of them."
    )


app = App(name="python -m bench reporting", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def reporting(*, rounds: Count = 4, passes: Count = 6, concurrency: Count = 16, flags: str = "", json: Path | None = None) -> int:
    """Time what each kind of reporting takes of a server's throughput on the few-shot workload.

    Each round starts four servers side by side (no attribution of misses, as it comes, with a request log, with a log of tokens),
    of which one works at a time, and runs the workload on each in turn, there and back; on two of them also while the live page's
    data are asked for as often as a browser asks. A round takes about four minutes on two cores.

    Parameters
    ----------
    rounds
        How often the servers are started anew.
    passes
        How often each setting is timed in a round.
    concurrency
        Most requests in flight at once.
    flags
        Flags for radixkv serve, as in --flags='--dtype float32'.
    json
        File to write the speed of every pass to.
    """
    done: list[Passes] = []
    with Progress(console=STDERR, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("rounds", total=rounds)
        for _ in range(rounds):
            done.append(time_round(shlex.split(flags), passes, concurrency, progress))
            progress.advance(task)
    result = summary(done)
    print_summary(Console(width=None if sys.stdout.isatty() else 120), result, rounds * passes)
    if json is not None:
        record: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpus": os.cpu_count()}
        json.write_text(jsonlib.dumps({**record, "rounds": done, "summary": result}, indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input, or where a server or a request failed; 130 after Ctrl-C."""
    return run(app, argv, (ValueError, OSError, aiohttp.ClientError))
