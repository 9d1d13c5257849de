"""The command ``radixkv replay``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.types import ExistingFile
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress

from radixkv.cache.eviction import EvictionPolicyName
from radixkv.report.curve_plot import check_plot, write_plot
from radixkv.report.curve_report import CurveReport
from radixkv.report.kv_size import kv_size
from radixkv.report.replay import ReplayResult
from radixkv.report.replay import replay as simulate
from radixkv.report.stack_distance import hit_curve
from radixkv.report.trace import read_trace


def replay(
    trace: ExistingFile,
    /,
    *,
    capacity_blocks: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    policy: EvictionPolicyName = "lru",
    block_size: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    curve: Annotated[bool, Parameter(negative="")] = False,
    plot: Path | None = None,
    model: str | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Simulate the prefix cache over a recorded workload.

    Parameters
    ----------
    trace
        The trace or request log, a JSON-lines file.
    capacity_blocks
        Size of the cache in blocks of `--block-size`. Unbounded if not given.
    policy
        Order of eviction: `lru` is least recently used first, `lfu` least often used first with ageing, `cost` least saving first.
    block_size
        Tokens in a block: a number that divides the block size of the trace, or a multiple of it. The trace's own if not given.
    curve
        Compute the LRU hit rate at every capacity in one pass, and the knee: the capacity that reaches 80 % of the hits an
        unbounded cache has.
    plot
        Draw the curve into this file, whose name ends in `.html` or `.svg`. Implies `--curve`.
    model
        Model to say in GiB what a capacity of the curve takes: an alias, a Hugging Face folder or hub id, or a `.gguf` file.
    json
        Print JSON instead of text.
    """
    curve = curve or plot is not None
    if curve and capacity_blocks is not None:
        raise ValueError(f"--curve has every capacity: leave out --capacity-blocks {capacity_blocks}")
    if curve and policy != "lru":
        raise ValueError(f"--curve can be computed for --policy lru only, got {policy}")
    if model is not None and not curve:
        raise ValueError("--model says what the capacities of a curve take: add --curve")
    if plot is not None:
        check_plot(plot)  # before the simulation, not after it
    kv = None if model is None else kv_size(model)

    result: CurveReport | ReplayResult
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        reading, replaying = bar.add_task("reading"), bar.add_task("replaying", total=None)

        def read(done: int, total: int) -> None:
            bar.update(reading, completed=done, total=total)

        def replayed(done: int, total: int) -> None:
            bar.update(replaying, completed=done, total=total)

        requests = read_trace(trace, progress=read)
        if curve:
            result = CurveReport.from_curve(hit_curve(requests, block_size=block_size, progress=replayed), kv)
        else:
            result = simulate(requests, capacity_blocks, policy=policy, block_size=block_size, progress=replayed)
    if plot is not None:
        assert isinstance(result, CurveReport)
        write_plot(result, plot, title=f"Hit rate over cache size: {trace.name}")
    if json:
        print(msgspec.json.format(msgspec.json.encode(result)).decode())
        return
    Console().print(result)
    if isinstance(result, CurveReport) and result.knee is not None and model is None:
        Console().print("[dim]--model NAME says what that is in GiB.[/]")
