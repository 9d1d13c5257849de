"""Whether anything but a request's own tokens changes a bit of its logits: every request of the workloads, run in many ways."""

from __future__ import annotations

import hashlib
import json as jsonlib
import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from unittest import mock

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from bench.command_line import run
from bench.serving import STDERR
from bench.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from radixkv import LLM

Count = Annotated[int, Parameter(validator=Number(gte=1))]


@dataclass(frozen=True)
class Mode:
    """A way to run the same requests."""

    title: str
    caching: bool = True
    concurrency: int = 16
    max_batch_tokens: int = 512
    passes: int = 1
    """The last one counts; before a second one the cache is warm."""
    tree_attention: bool = True


MODES = (
    Mode("alone, no cache", caching=False, concurrency=1),
    Mode("alone, cold", concurrency=1),
    Mode("16 at once, no cache", caching=False),
    Mode("16 at once, cold"),
    Mode("16 at once, warm", passes=2),
    Mode("16 at once, chunks of 16 to 31", max_batch_tokens=31),
    Mode("16 at once, chunks of 84 to 100", max_batch_tokens=100),
    Mode("16 at once, tree attention off", tree_attention=False),
    Mode("16 at once, warm, tree attention off", passes=2, tree_attention=False),
)
"""The first is what the others are compared with."""


@contextmanager
def recorded_logits(llm: LLM) -> Iterator[dict[str, Any]]:
    """A digest of all logits of each request, by id, as steps compute them."""
    digests: dict[str, Any] = {}
    runner = llm.engine.runner
    forward = runner.forward

    def record(batch: Any) -> Any:
        logits = forward(batch)
        sampled = [seq.request.request_id for seq in batch.sequences if seq.samples]
        for request_id, row in zip(sampled, logits.numpy(), strict=True):
            digests.setdefault(request_id, hashlib.blake2b(digest_size=16)).update(row.tobytes())
        return logits

    with mock.patch.object(runner, "forward", record):
        yield digests


def run_mode(
    mode: Mode, model: str, dtype: str, lanes: dict[str, list[list[str]]], progress: Progress
) -> dict[str, list[tuple[Any, str]]]:
    """For each workload, each request's tokens and the digest of its logits, a lane's requests one after the other."""
    from radixkv import LLM, PrefixCache, SamplingParams
    from radixkv.cache.tree_order import tree_order

    results: dict[str, list[tuple[Any, str]]] = {}
    off = mock.patch.object(PrefixCache, "tree_order", return_value=tree_order((), 1))  # nothing is shared
    llm = LLM(
        model,
        dtype=dtype,
        enable_prefix_caching=mode.caching,
        max_batch_tokens=mode.max_batch_tokens,
        max_num_seqs=mode.concurrency,
    )
    task = progress.add_task(mode.title, total=mode.passes * sum(len(lane) for each in lanes.values() for lane in each))
    for name, each in lanes.items():
        params = SamplingParams(max_tokens=WORKLOADS[name]().max_tokens, temperature=0, ignore_eos=True)
        for _ in range(mode.passes):
            results[name] = []
            for turn in range(max(map(len, each))):
                prompts = [lane[turn] for lane in each if turn < len(lane)]
                with recorded_logits(llm) as digests, nullcontext() if mode.tree_attention else off:
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                in_order = sorted(digests, key=lambda request_id: int(request_id.removeprefix("llm-")))
                results[name] += [(o.token_ids, digests[key].hexdigest()) for o, key in zip(outputs, in_order, strict=True)]
                progress.advance(task, len(prompts))
    progress.remove_task(task)
    return results


app = App(name="python -m bench exact", print_error=False, exit_on_error=False, result_action="return_value")


@app.default
def exact(
    *,
    model: str = "smollm2-135m",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    every: Count = 1,
    json: Path | None = None,
) -> int:
    """Run every request of the serving workloads alone without a cache, and again in eight other ways, and compare.

    Greedy tokens are compared, and the bits of all logits they were chosen from. Exits with 1 if anything differs.

    Parameters
    ----------
    model
        As for `radixkv serve`.
    dtype
        As for `radixkv serve`.
    every
        Only every n-th lane of each workload, to be done sooner.
    json
        File to write the counts to.
    """
    lanes = {name: [list(lane) for lane in make().lanes[::every]] for name, make in WORKLOADS.items()}
    requests = {name: sum(map(len, each)) for name, each in lanes.items()}
    counts = [Column(f"{name} ({n})", justify="right") for name, n in requests.items()]
    table = Table("requests that differ from those run " + MODES[0].title, *counts, Column("seconds", justify="right"))
    figures: list[dict[str, Any]] = []
    expected: dict[str, list[tuple[Any, str]]] = {}
    with Progress(console=STDERR, transient=True, disable=not sys.stderr.isatty()) as progress:
        for mode in MODES:
            began = time.perf_counter()
            got = run_mode(mode, model, dtype, lanes, progress)
            seconds = time.perf_counter() - began
            expected = expected or got
            row: dict[str, Any] = {"mode": mode.title, "seconds": seconds}
            for name, each in got.items():
                pairs = list(zip(each, expected[name], strict=True))
                row[name] = {"tokens": sum(a[0] != b[0] for a, b in pairs), "bits": sum(a[1] != b[1] for a, b in pairs)}
            figures.append(row)
            cells = [f"{row[name]['tokens']} / {row[name]['bits']}" for name in lanes]
            table.add_row(mode.title, *cells, f"{seconds:.0f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print("Of each workload, requests whose greedy tokens differ / whose logits differ in any bit at any token.")
    if json is not None:
        json.write_text(jsonlib.dumps({"dtype": dtype, "requests": requests, "modes": figures}, indent=1))
    return int(any(row[name][what] for row in figures for name in lanes for what in ("tokens", "bits")))


def main(argv: Sequence[str]) -> int:
    """Exit code: 0; 1 if anything differs; 2 for bad input; 130 after Ctrl-C."""
    return run(app, argv)
