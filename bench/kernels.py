"""The Triton kernels: timed where there is a GPU, else compiled for GPUs that aren't there."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from bench import gpu_kernels
from bench.command_line import run
from bench.fresh_process import ChildError, run_fresh
from bench.triton_compile import OTHER_DTYPES, SHAPES, SHARED_MEMORY_LIMIT

Target = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
Facts = list[dict[str, Any]]


def bars() -> Progress:
    """On standard error, gone when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def compile_report(targets: Sequence[str], quick: bool) -> Facts:
    """Facts about every kernel's binary for every target that can be compiled for here."""
    shapes, rest = (SHAPES[:1], OTHER_DTYPES[:1]) if quick else (SHAPES, OTHER_DTYPES)
    facts: Facts = []
    with bars() as progress:
        for target in targets:
            bar = progress.add_task(target, total=None)
            arguments = {"target": target, "attention": shapes, "rest": rest}

            def update(done: int, total: int, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done, total=total)

            try:
                facts += run_fresh("bench.triton_compile:compile_kernels", arguments, update)
            except ChildError as error:  # older Tritons link for AMD with a tool of ROCm's
                progress.console.print(f"{target} is left out: {error}", markup=False)
    return facts


def shape_of(constants: dict[str, Any]) -> str:
    """What sets one variant of a kernel apart from others, in words."""
    words = {"HEAD_DIM": "dim", "GROUP": "group", "BLOCK_SIZE": "block", "ROWS": "rows", "KEYS": "keys"}
    parts = [f"{word} {constants[name]}" for name, word in words.items() if name in constants]
    parts += [f"window {constants['WINDOW']}"] if constants.get("WINDOW") else []
    parts += ["capped"] if constants.get("CAP_LOG2") else []
    return ", ".join(parts)


def print_compile_report(console: Console, facts: Facts) -> None:
    """A row a binary, and a last line that sums up."""
    right = {"justify": "right"}
    table = Table(
        "kernel", "target", "dtype", "K/V", "shape", Column("registers", **right), Column("spilled", **right),  # type: ignore[arg-type]
        Column("shared", **right), Column("of limit", **right),  # type: ignore[arg-type]
    )  # fmt: skip
    for fact in facts:
        table.add_row(
            fact["kernel"], fact["target"], fact["dtype"], fact["kv_dtype"] or "", shape_of(fact["constants"]),
            str(fact["registers"]), str(fact["spilled_bytes"]), str(fact["shared_bytes"]),
            f"{fact['shared_bytes'] / fact['shared_limit']:.0%}",
        )  # fmt: skip
    console.print(table)
    spilling = sum(fact["spilled_bytes"] > 0 for fact in facts)
    console.print(f"{len(facts)} binaries, {spilling} of them spill registers.")


def time_kernels(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Rates of the machine, and the time of every case."""
    rates = gpu_kernels.machine_rates(device, dtype)
    cases = []
    with bars() as progress:
        bar = progress.add_task("kernels", total=None)
        for make in (gpu_kernels.attention_cases, gpu_kernels.other_cases):
            for case in make(dtype, device):
                cases.append(gpu_kernels.time_case(case, rates, device))
                progress.advance(bar)
    return {"device": torch.cuda.get_device_name(device), "dtype": str(dtype), "rates": rates, "cases": cases}


def print_times(console: Console, figures: dict[str, Any]) -> None:
    """A row a case."""
    rates = figures["rates"]
    console.print(
        f"{figures['device']}, {figures['dtype'].removeprefix('torch.')}: copies {rates['copy_bytes_per_second'] / 1e9:.0f} GB/s, "
        f"multiplies {rates['matrix_flops'] / 1e12:.0f} TFLOP/s"
    )
    names = ("us", "of copy", "of matrix", "torch us", "torch / ours")
    table = Table("Llama-3-8B's layer", *(Column(name, justify="right") for name in names))
    for case in figures["cases"]:
        seconds, theirs = case["seconds"], case["torch_seconds"]
        table.add_row(
            case["case"], f"{seconds * 1e6:.1f}", f"{case['share_of_copy']:.0%}",
            f"{case['share_of_matrix']:.0%}" if case["share_of_matrix"] else "",
            *(("", "") if theirs is None else (f"{theirs * 1e6:.1f}", f"{theirs / seconds:.2f}")),
        )  # fmt: skip
    console.print(table)


app = App(name="python -m bench kernels", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def kernels(
    *,
    dtype: Literal["bfloat16", "float16"] = "bfloat16",
    compile_only: Annotated[bool, Parameter(name="--compile", negative="")] = False,
    targets: Annotated[list[Target] | None, Parameter(consume_multiple=True, negative="")] = None,
    quick: Annotated[bool, Parameter(negative="")] = False,
    json: Path | None = None,
) -> int:
    """The Triton kernels, timed where there is a GPU, else compiled for GPUs that aren't there.

    On a GPU: attention (decode, the same with its shared prefix read once, prefill, mixed batches, 8-bit storage) and the kernels
    that only move memory, at Llama-3-8B's shapes. Each is a share of what this GPU reaches in a large copy and in a large matrix
    product: a kernel that the memory limits should come near 100 % of the copy, one that the products limit near 100 % of those.
    Attention stands beside torch's scaled_dot_product_attention, which gets its keys and values dense, gathered beforehand. Medians
    of CUDA events around a replayed graph, with the L2 cache overwritten before each.

    Without a GPU: what the compiler made of every kernel for sm_80 (A100), sm_90 (H100), sm_100 (B200) and gfx942 (MI300X):
    registers of a thread, bytes of them spilled to memory, and shared memory as a share of what a program may have. Takes two
    minutes the first time; Triton keeps what it compiled.

    Parameters
    ----------
    dtype
        Of activations and K/V, while timing.
    compile_only
        Print the compile report even where there is a GPU.
    targets
        GPUs to compile for; all four if not given.
    quick
        Compile one shape of each kernel only.
    json
        File to write all figures to.
    """
    console = Console(width=None if sys.stdout.isatty() else 180)
    figures: dict[str, Any]
    if torch.cuda.is_available() and not compile_only:
        figures = time_kernels(getattr(torch, dtype), torch.device("cuda"))
        print_times(console, figures)
    else:
        if not compile_only:
            console.print("There is no GPU here to time the kernels on. What the compiler makes of them for GPUs that aren't here:")
        figures = {"binaries": compile_report(targets or list(SHARED_MEMORY_LIMIT), quick)}
        print_compile_report(console, figures["binaries"])
    if json is not None:
        json.write_text(jsonlib.dumps(figures, indent=1))
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input; 130 after Ctrl-C."""
    return run(app, argv)
