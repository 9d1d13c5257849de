"""What paging KV memory gains: waste, sequences that fit, table bytes and speed, by block size, beside contiguous reservation."""

from __future__ import annotations

import json as jsonlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.cache import Flag, steps
from bench.command_line import run
from bench.cost_plot import Panel, cost_svg
from bench.memory_serving import MAX_MODEL_LEN, MOST_RUNNING, Engines, Layout, Tokens, occupancy, speed
from bench.workloads import WORKLOADS, Workload
from radixkv.config import EngineConfig
from radixkv.model.loader import resolve_model
from radixkv.model.tokenizer import load_tokenizer

BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
CONTIGUOUS = Layout(None, shares_prefixes=False)
SAMPLE = 8
"""Without sharing every prompt is computed whole: one request in so many is enough to time."""
Figures = dict[str, Any]


def prompts_of(workload: Workload, encode: Callable[[str], list[int]]) -> list[Tokens]:
    """Every prompt of a workload, turn by turn, as the model's tokens."""
    turns = max(map(len, workload.lanes))
    texts = [lane[turn] for turn in range(turns) for lane in workload.lanes if turn < len(lane)]
    return [np.array(encode(text), dtype=np.int32) for text in texts]


def measure(
    workload: Workload, prompts: Sequence[Tokens], budget: int, most_running: int, engines: Engines, bars: Progress
) -> Figures:
    """All layouts over one workload."""
    name = workload.name
    layouts = [CONTIGUOUS, *(Layout(size, shares) for shares in (False, True) for size in BLOCK_SIZES)]
    rows: list[Figures] = []
    outputs: list[dict[int, list[int]]] = []
    overall = bars.add_task(f"{name}: speed by layout", total=len(BLOCK_SIZES) + 1)
    for layout in layouts:
        row: Figures = {"layout": layout.name, "shares_prefixes": layout.shares_prefixes}
        row |= occupancy(prompts, workload.max_tokens, budget, layout, most_running)._asdict()
        if layout.shares_prefixes or layout is CONTIGUOUS:
            stride = SAMPLE if layout is CONTIGUOUS and len(prompts) > SAMPLE else 1
            bar = bars.add_task(f"{name}, {layout.name}", total=None)
            run = speed(
                engines.make(budget, layout), prompts[::stride], workload.max_tokens,
                lambda done, total, bar=bar: bars.update(bar, completed=done, total=total),  # type: ignore[misc]
            )  # fmt: skip
            bars.remove_task(bar)
            bars.advance(overall)
            outputs.append({i * stride: ids for i, ids in enumerate(run.outputs)})
            row |= {
                "tokens_per_second": run.tokens_per_second,
                "seconds": run.seconds,
                "requests_timed": len(run.outputs),
                "computed_prompt_tokens": run.computed_prompt_tokens,
            }
        rows.append(row)
    bars.remove_task(overall)
    differing = sum(any(run[i] != outputs[-1][i] for run in outputs if i in run) for i in range(len(prompts)))
    return {
        "workload": name,
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": workload.max_tokens,
        "requests_with_differing_outputs": differing,
        "rows": rows,
    }


def print_workload(console: Console, figures: Figures) -> None:
    """A row a layout."""
    contiguous, *paged = figures["rows"]
    names = ("waste", "sequences", "x", "table bytes", "preempted", "waste, shared", "of all", "sequences", "x", "tokens/s")
    table = Table(
        Column("blocks of", justify="right"), *(Column(name, justify="right") for name in names), title_justify="left",
        title=f"{figures['workload']}: {figures['requests']} requests at once, mean "
        f"{figures['prompt_tokens'] / figures['requests']:,.0f} tokens, {figures['max_tokens']} out",
    )  # fmt: skip

    def sequences(row: Figures) -> tuple[str, str]:
        fit = "all " if row["running"] == figures["requests"] else ""
        return f"{fit}{row['running']}", f"{row['running'] / contiguous['running']:.1f}"

    table.add_row(
        contiguous["layout"], f"{contiguous['waste']:.2%}", *sequences(contiguous), "-", str(contiguous["preemptions"]),
        "-", "-", "-", "-", f"{contiguous['tokens_per_second']:.0f}",
    )  # fmt: skip
    for alone, shared in zip(paged[: len(BLOCK_SIZES)], paged[len(BLOCK_SIZES) :], strict=True):
        table.add_row(
            alone["layout"], f"{alone['waste']:.2%}", *sequences(alone), f"{alone['table_bytes']:,}", str(alone["preemptions"]),
            f"{shared['waste']:.2%}", f"{shared['waste_of_all']:.2%}", *sequences(shared), f"{shared['tokens_per_second']:.0f}",
        )  # fmt: skip
    console.print(table)


def panels(workloads: Sequence[Figures]) -> list[Panel]:
    """Waste, sequences and speed against the block size; contiguous reservation is in the table."""

    def lines(key: str, shares: bool) -> dict[str, list[tuple[float, float]]]:
        points = {
            figures["workload"]: [
                (float(row["layout"]), row[key]) for row in figures["rows"][1:] if row["shares_prefixes"] == shares and row[key] > 0
            ]
            for figures in workloads
        }
        return points if key != "waste" else {name: [(x, 100 * y) for x, y in line] for name, line in points.items()}

    return [
        Panel("KV waste, nothing shared", "tokens in a block", "% of reserved slots", lines("waste", False)),
        Panel("Sequences at once, nothing shared", "tokens in a block", "sequences", lines("running", False)),
        Panel("Speed, prefixes shared", "tokens in a block", "output tokens/s", lines("tokens_per_second", True)),
    ]


app = App(name="python -m bench memory", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def memory(
    *,
    workload: Literal["fewshot", "agent", "unique", "all"] = "all",
    budget: Annotated[int, Parameter(validator=Number(gte=MAX_MODEL_LEN))] = 4 * MAX_MODEL_LEN,
    running: Annotated[int, Parameter(validator=Number(gte=1, lte=MOST_RUNNING))] = MOST_RUNNING,
    model: str = EngineConfig.model,
    quick: Flag = False,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Serve the few-shot, agent and unique workloads out of one KV budget, in blocks of 1 to 128 tokens and contiguously.

    PagedAttention's claim is that KV memory handed out in blocks wastes at most the end of each sequence's last block, so that more
    sequences run at once than if each has the longest sequence's length set aside, as Orca and FasterTransformer did. Here both are
    the same scheduler: contiguous reservation is held to budget / 4,096 sequences, with nothing shared.

    Waste is the share of reserved slots (a token's K/V each) that no token of a prompt, or of the output so far, uses: the mean
    over all steps. The second figure of waste with sharing is of all blocks in use, those of finished requests among them, which
    stay cached and are full; the first is of those that running sequences hold. Waste, the most sequences that ran at once, and the
    bytes of their block tables come from the real scheduler and cache without a model, first with prefix sharing off, which is
    paging's gain alone, then with it on. Tokens a second are of the real engine on the real model, prefixes shared; for contiguous
    reservation nothing is, and one request in 8 is timed.

    All requests wait from the start, an agent's turns too: their histories are scripted. Small blocks waste less, large ones make
    shorter tables; what a block size costs in speed is the last column.

    Parameters
    ----------
    workload
        What to serve.
    budget
        KV memory in tokens.
    running
        Most sequences at once, where waste and sequences are counted.
    model
        What to run; its tokenizer cuts the prompts. Fetched if need be.
    quick
        A tenth of the requests: says whether all works, not how much fits.
    json
        File to write the figures to.
    plot
        SVG file to plot waste, sequences and speed against the block size to.
    """
    if plot is not None and plot.suffix != ".svg":
        raise ValueError(f"--plot must name a .svg file, got {str(plot)!r}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    result: Figures = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "python": platform.python_version(), "model": model,
        "budget_tokens": budget, "workloads": [],
    }  # fmt: skip
    console.print(f"{budget:,} tokens of KV memory: {budget // MAX_MODEL_LEN} sequences of {MAX_MODEL_LEN:,} contiguously")
    engines, encode = Engines(model), load_tokenizer(resolve_model(model)).encode
    with steps(Console(stderr=True)) as bars:
        for name in WORKLOADS if workload == "all" else [workload]:
            served = WORKLOADS[name]()
            prompts = prompts_of(served, encode)[:: 10 if quick else 1]
            figures = measure(served, prompts, budget, running, engines, bars)
            result["workloads"].append(figures)
            print_workload(console, figures)
    differing = {figures["workload"]: figures["requests_with_differing_outputs"] for figures in result["workloads"]}
    console.print(
        "x: sequences over contiguous. shared: prefix sharing on, a shared block counted once; left of it, off. of all: as a share "
        "of cached blocks too. tokens/s: of output. Requests whose greedy output depends on the layout: "
        + ", ".join(f"{name} {count}" for name, count in differing.items())
    )
    if json is not None:
        json.write_text(jsonlib.dumps(result, indent=1))
    if plot is not None:
        plot.write_text(cost_svg(panels(result["workloads"])))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input; 130 after Ctrl-C."""
    return run(app, argv)
