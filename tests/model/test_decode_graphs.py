"""The buffers and padding of CUDA-graph decode, with graphs that run their step again instead of replaying kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.model.runner import DecodeGraphs, prepare_inputs


class RerunGraph:
    """Stands in for torch.cuda.CUDAGraph where there is no GPU: replay runs the captured step and overwrites its output."""

    capturing: RerunGraph | None = None
    run: Callable[[], torch.Tensor]
    logits: torch.Tensor

    def pool(self) -> object:
        return "pool"

    def replay(self) -> None:
        self.logits.copy_(self.run())


@pytest.fixture
def rerun_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def capture(graph: RerunGraph, pool: object = None) -> Iterator[None]:
        RerunGraph.capturing = graph
        yield
        RerunGraph.capturing = None

    step = DecodeGraphs._step

    def recorded(self: DecodeGraphs, *arguments: Any) -> torch.Tensor:
        logits = step(self, *arguments)
        if RerunGraph.capturing is not None:
            RerunGraph.capturing.run = lambda: step(self, *arguments)
            RerunGraph.capturing.logits = logits
        return logits

    monkeypatch.setattr(torch.cuda, "CUDAGraph", RerunGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(DecodeGraphs, "_step", recorded)


@torch.inference_mode()
def test_padded_decode_equals_unpadded_and_writes_only_its_own_rows(
    rerun_graphs: None, tmp_path: Path, kit: SimpleNamespace
) -> None:
    kit.make_model("Llama").save_pretrained(tmp_path)
    driver = kit.Driver(str(tmp_path))
    graphs = DecodeGraphs(driver.model, driver.kv, 6, 64)
    assert all(not k.any() and not v.any() for k, v in driver.kv.layers), "capturing must write no block"
    rng = np.random.default_rng(5)
    requests = [driver.request(rng.integers(0, 160, n).tolist(), 4) for n in (3, 17, 8, 30, 5, 12)]
    for request in requests:
        driver.runner.forward(kit.batch_of((request, 0, request.num_tokens)))
        request.append(int(rng.integers(160)))
    # From large to small and back, so that what a larger batch left in the buffers must not be read.
    for size in (6, 3, 1, 5, 2, 6):
        batch = kit.batch_of(*((r, r.num_tokens - 1, 1) for r in requests[:size]))
        expected = driver.runner.forward(batch)
        inputs = prepare_inputs(batch, kit.BLOCK_SIZE)
        caches = [cache.flatten(0, 1) for layer in driver.kv.layers for cache in layer]  # as rows, one a slot
        before = [rows.clone() for rows in caches]
        for rows in caches:
            rows[inputs.slot_mapping] = float("nan")  # or rows that replay fails to write would hold the right values already
        got = graphs.replay(inputs)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        for rows, old in zip(caches, before, strict=True):
            torch.testing.assert_close(rows, old, atol=1e-4, rtol=0)  # the same K and V again, and nothing elsewhere
