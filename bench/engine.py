"""What the engine does beside the model: microseconds a step, by part."""

from __future__ import annotations

import json as jsonlib
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Column, Table

from bench.cache import Flag, fresh, steps
from bench.cache_growth import LEAST_NODES
from bench.command_line import run
from bench.fresh_process import ChildError

RUNNING = (1, 16, 64, 256)
PARTS = ("receive", "schedule", "batch", "sample", "outputs", "send", "rest")


def print_steps(console: Console, figures: dict[str, Any]) -> None:
    """A row a number of running sequences, warm and cold."""
    names = ("running", *PARTS, "sum p50", "p90", "p99", "with arrivals", "cache", "argmax")
    for cold in (False, True):
        title = (
            "caches cold: the logits are read in each step, as by a model on a CPU"
            if cold
            else ("caches warm: the logits' highest were found beforehand, as if on a GPU")
        )
        table = Table(*(Column(name, justify="right") for name in names), title_justify="left", title=title)
        for row in figures["rows"]:
            if row["cold"] == cold:
                keys = [f"{part}_us" for part in PARTS] + ["p50_us", "p90_us", "p99_us", "mean_of_all_us", "cache_us"]
                highest = f"{row['highest_us']:,.0f}" if cold else "-"
                table.add_row(str(row["running"]), *(f"{row[key]:,.0f}" for key in keys), highest)
        console.print(table)
    before, after = figures["nodes"]
    console.print(
        f"Microseconds a step. The cache held {before:,} nodes before and {after:,} after, no block free. Parts and percentiles "
        "are of steps that only decode; medians of parts need not add up to the sum's. receive: the socket drained. schedule: who "
        "runs, with room in the cache, and what is new published. batch: block tables, positions and token ids as tensors. "
        "sample: all but the argmax. outputs: tokens appended, ended sequences released. send: MessagePack and the socket. rest: "
        "polling, and memory given back."
    )
    console.print(
        "with arrivals: the mean of all steps; at 256 sequences about one request a step arrives, and one is admitted. cache: the "
        "calls of the cache within schedule and outputs, timed in a run of its own. argmax: the search of float32 logits, "
        f"running x {figures['vocab']:,}, in all threads: the device's arithmetic, bound by memory, and not in the sum."
    )


app = App(name="python -m bench engine", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def engine(
    *,
    nodes: Annotated[int, Parameter(validator=Number(gte=LEAST_NODES))] = 115_000,
    quick: Flag = False,
    json: Path | None = None,
) -> int:
    """Time what the engine does beside the model.

    The worker's own loop runs, with its socket, engine, scheduler, prefix cache and sampler. Only the model's layers are replaced,
    by nothing, and its logits by random ones that were drawn beforehand. The prefix cache is full of chats before the first
    request. 1, 16, 64 and 256 sequences decode; each goes on from a cached chat of 1,088 to 2,304 tokens behind one of 8 system
    prompts, with 64 tokens of its own and 256 tokens of output. As one ends, the next is admitted; 8 always wait.

    What a step costs depends on what is in the processor's caches when it begins, so each number is timed twice: with the logits
    searched beforehand, and with 50 MB of logits (at 256 sequences) read in every step.

    Parameters
    ----------
    nodes
        Of the cache's tree before the first request.
    quick
        A tenth of the size and of the steps: says whether all works, not how fast.
    json
        File to write the figures to.
    """
    console = Console(width=None if sys.stdout.isatty() else 130)
    scale = 10 if quick else 1
    arguments = {"nodes": max(nodes // scale, LEAST_NODES), "running": RUNNING, "turns": 400 // scale}
    with steps(Console(stderr=True)) as bars:
        figures = fresh(bars, "engine", "bench.engine_steps:time_steps", **arguments)
    print_steps(console, figures)
    if json is not None:
        about = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version()}
        json.write_text(jsonlib.dumps({**about, **figures}, indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input; 130 after Ctrl-C."""
    return run(app, argv, (ChildError, ValueError, OSError))
