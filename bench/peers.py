"""The serving workloads against radixkv and another server in turn: the ratios of what their clients see."""

from __future__ import annotations

import asyncio
import json as jsonlib
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.local import RADIXKV, server
from bench.serving import STDERR, connect, run_workload
from bench.workloads import WORKLOADS, Workload

ONE_STREAM = "one stream"
METRICS = {"wall_s": ("wall s", 1), "ttft_p50": ("TTFT p50 ms", 1000), "itl_p50": ("ITL p50 ms", 1000)}
"""What is compared: heading, and factor to its unit."""

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Figures = dict[str, float | int | None]


def workloads(names: Sequence[str], concurrency: int) -> list[tuple[Workload, int]]:
    """The workloads of those names and how many requests of each are in flight at once."""
    chosen = [(WORKLOADS[name](), concurrency) for name in names if name != ONE_STREAM]
    if ONE_STREAM in names:
        prompts = WORKLOADS["unique"]()
        lanes = tuple((f"{place}. {lane[0]}",) for place, lane in zip(("First", "Second", "Third"), prompts.lanes, strict=False))
        chosen.append((Workload(ONE_STREAM, lanes, prompts.max_tokens), 1))  # begun otherwise, or unique's would be cached
    return chosen


async def measure(url: str, chosen: Sequence[tuple[Workload, int]], progress: Progress) -> dict[str, Figures]:
    """Each workload twice: first nothing of it is cached, then all that the server kept is."""
    figures: dict[str, Figures] = {}
    async with connect(url) as (client, body):
        for workload, concurrency in chosen:
            for temperature in ("cold", "warm"):
                run = await run_workload(client, body, workload, concurrency, progress)
                if error := next((sample.error for sample in run.samples if sample.error), None):
                    raise OSError(f"{workload.name}, {temperature}: {error}")
                figures[f"{workload.name}, {temperature}"] = run.figures()
    return figures


def summary(rounds: dict[str, list[dict[str, Figures]]]) -> dict[str, dict[str, dict[str, float]]]:
    """``[workload][server][metric]``: medians over the rounds, and for each metric a ``ratio``: the median over rounds of the other
    server's over ours in the same round."""
    ours, *others = rounds
    result: dict[str, dict[str, dict[str, float]]] = {}
    for workload in rounds[ours][0]:
        result[workload] = {}
        for name, each in rounds.items():
            row = {metric: statistics.median(float(figures[workload][metric] or 0) for figures in each) for metric in METRICS}
            cached = [figures[workload]["cached_share"] for figures in each]
            if None not in cached:
                row["cached_share"] = statistics.median(float(share or 0) for share in cached)
            if name in others:
                for metric in METRICS:
                    pairs = zip(each, rounds[ours], strict=True)
                    ratios = [(theirs[workload][metric] or 0) / (mine[workload][metric] or 1) for theirs, mine in pairs]
                    row[f"{metric}_ratio"] = statistics.median(ratios)
            result[workload][name] = row
    return result


def print_summary(console: Console, result: dict[str, dict[str, dict[str, float]]], rounds: int) -> None:
    """Two rows a workload."""
    columns = [Column(text, justify="right") for heading, _ in METRICS.values() for text in (heading, "x ours")]
    table = Table("workload", "server", *columns, Column("cached", justify="right"))
    for workload, rows in result.items():
        for name, row in rows.items():
            cells = []
            for metric, (_, factor) in METRICS.items():
                ratio = row.get(f"{metric}_ratio")
                cells += [f"{row[metric] * factor:.{2 if factor == 1 else 0}f}", "" if ratio is None else f"{ratio:.2f}"]
            table.add_row(workload, name, *cells, f"{row['cached_share']:.1%}" if "cached_share" in row else "-")
    console.print(table)
    console.print(
        f"Medians of {rounds} rounds; in each the servers in turn, started anew; x ours: the median of the rounds' own ratios. "
        "cold: nothing of the workload is cached; warm: the same again."
    )


app = App(name="python -m bench peers", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def peers(
    *,
    peer: str,
    name: str = "peer",
    flags: str = "",
    workload: Literal["fewshot", "agent", "unique", "one stream", "all"] = "all",
    concurrency: Count = 16,
    rounds: Count = 3,
    json: Path | None = None,
) -> int:
    """Time radixkv and another OpenAI-compatible server in turn, over the workloads of `python -m bench serving`.

    Each round starts radixkv, runs every workload cold and warm, stops it, and does the same with the other server. vLLM, for
    example (docs/tuning.md says how to set it up):

        python -m bench peers --name vLLM --peer 'vllm serve FOLDER --dtype bfloat16 --max-model-len 8192 --port {port}'

    Parameters
    ----------
    peer
        Command that starts the other server; {port} in it becomes a free port.
    name
        What to call it.
    flags
        Flags for radixkv serve, as in --flags='--dtype float32'.
    workload
        What to send; one stream is three prompts of unique, one after the other.
    concurrency
        Most requests in flight at once.
    rounds
        How often to time each server.
    json
        File to write the figures of every round to.
    """
    if "{port}" not in peer:
        raise ValueError("--peer must say where {port} goes")
    chosen = workloads([*WORKLOADS, ONE_STREAM] if workload == "all" else [workload], concurrency)
    commands = {"radixkv": [*RADIXKV, *shlex.split(flags)], name: shlex.split(peer)}
    done: dict[str, list[dict[str, Figures]]] = {title: [] for title in commands}
    with Progress(console=STDERR, transient=True, disable=not sys.stderr.isatty()) as progress:
        for number in range(rounds):
            for title, command in commands.items():
                task = progress.add_task(f"{title}, round {number + 1} of {rounds}", total=None)
                with server(command) as url:
                    done[title].append(asyncio.run(measure(url, chosen, progress)))
                progress.remove_task(task)
    result = summary(done)
    print_summary(Console(width=None if sys.stdout.isatty() else 120), result, rounds)
    if json is not None:
        record: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpus": os.cpu_count()}
        json.write_text(jsonlib.dumps({**record, "commands": commands, "rounds": done, "summary": result}, indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 1 if a server or a request failed; 2 for bad input; 130 after Ctrl-C."""
    try:
        code: int = app(argv) or 0
    except KeyboardInterrupt:
        return 130
    except (CycloptsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except (aiohttp.ClientError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return code
