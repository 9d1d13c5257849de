"""What a longer shared prefix costs a decode step: 16 sequences behind 100 tokens and behind 1,600, read once or sixteen times."""

from __future__ import annotations

import json as jsonlib
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Column, Table

from bench.command_line import run

Count = Annotated[int, Parameter(validator=Number(gte=1))]


def decode_steps(engine: Any, prefix: int, sequences: int, own: int, steps: int) -> list[float]:
    """Seconds of each decode step of ``sequences`` prompts of ``prefix`` shared tokens and ``own`` different ones."""
    from radixkv import SamplingParams

    rng = np.random.default_rng(prefix)
    shared = rng.integers(1000, 40000, prefix)
    params = SamplingParams(max_tokens=steps + 1, temperature=0, ignore_eos=True)
    for i in range(sequences):
        engine.add(f"{i}", np.concatenate((shared, rng.integers(1000, 40000, own))), params)
    while engine.scheduler.waiting or any(request.num_output_tokens == 0 for request in engine.scheduler.running):
        engine.step()
    seconds = []
    while engine.has_unfinished:
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    engine.reset_cache()
    return seconds


app = App(name="python -m bench tree-attention", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def tree_attention(
    *,
    model: str = "smollm2-135m",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    prefix: tuple[int, ...] = (100, 1600),
    sequences: Count = 16,
    own: Count = 20,
    steps: Count = 32,
    rounds: Count = 5,
    widen: bool = False,
    json: Path | None = None,
) -> int:
    """Time decode steps of sequences that share a prefix, with tree attention and without it, in turn.

    Parameters
    ----------
    model
        As for `radixkv serve`.
    dtype
        As for `radixkv serve`.
    prefix
        Shared tokens; the first is what the others are compared with.
    sequences
        Sequences that decode together.
    own
        Prompt tokens of each that no other has.
    steps
        Decode steps of each round.
    rounds
        Rounds of every prefix, with and without.
    widen
        Hold the file's 4 and 8 bit weights in memory as the dtype that they stand for, as engines without kernels for them do.
        The step computes the same from 2 to 3 times the bytes of weights, and the prefix is a smaller part of it.
    json
        File to write the seconds of every step to.
    """
    from radixkv import LLM, PrefixCache
    from radixkv.cache.tree_order import tree_order
    from radixkv.kernels import cpu

    widened = mock.patch.object(cpu, "pack_quantized", return_value=None)
    with widened if widen else nullcontext():
        engine = LLM(model, dtype=dtype).engine
    off = mock.patch.object(PrefixCache, "tree_order", return_value=tree_order((), 1))  # nothing is shared
    seconds: dict[tuple[int, bool], list[float]] = {}
    for _ in range(rounds):
        for length in prefix:
            for tree in (True, False):
                with nullcontext() if tree else off:
                    seconds.setdefault((length, tree), []).extend(decode_steps(engine, length, sequences, own, steps))
    table = Table(*(Column(name, justify="right") for name in ("shared tokens", "ms a step", "x", "each reads its own, ms", "x")))
    median = {key: statistics.median(values) for key, values in seconds.items()}
    for length in prefix:
        cells = [text for tree in (True, False) for text in (
            f"{median[length, tree] * 1e3:.1f}", f"{median[length, tree] / median[prefix[0], tree]:.2f}")]  # fmt: skip
        table.add_row(f"{length:,}", *cells)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(f"Medians of {rounds} rounds of {steps} steps of {sequences} sequences; x: over the first line.")
    if json is not None:
        json.write_text(
            jsonlib.dumps([{"prefix": p, "tree": t, "seconds": values} for (p, t), values in seconds.items()], indent=1)
        )
    return 0


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 2 for bad input; 130 after Ctrl-C."""
    return run(app, argv)
