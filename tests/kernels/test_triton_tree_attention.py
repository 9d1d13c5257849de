"""Tree attention in Triton: what sequences share is read once, and no bit of a row knows."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixkv.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPLIT = 64
Segments = list[tuple[int, int, int, int]]


@pytest.fixture
def backend(triton_backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend with splits of one key tile, so that short sequences have several, and with NaN in memory that it leaves unset.

    Without that, memory that a call without sharing left behind could hold just what a call with sharing forgot.
    """
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        memory = empty(*args, **options)
        return memory.fill_(float("nan")) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(importlib.import_module("radixkv.kernels.triton.paged_decode"), "SPLIT", SPLIT)
    monkeypatch.setattr(triton_backend.softmax_tiles, "SPLIT", SPLIT)
    return triton_backend


def share(batch: Any, segments: Segments) -> torch.Tensor:
    """Let the sequences of each segment hold its first sequence's blocks; returns the segments as a tensor."""
    block_size = batch.k_cache.shape[1]
    for first, count, start, end in segments:
        blocks = slice(start // block_size, end // block_size)
        batch.metadata.block_tables[first : first + count, blocks] = batch.metadata.block_tables[first, blocks].clone()
    return torch.tensor(segments, dtype=torch.int32, device=DEVICE)


def random_tree(rng: random.Random, seq_lens: list[int], block_size: int) -> Segments:
    """Nested segments of random lengths over neighbouring sequences; gaps, and segments shorter than a block's worth of splits."""
    segments = []

    def grow(first: int, count: int, start: int) -> None:
        room = (min(seq_lens[first : first + count], default=0) - start) // block_size
        if count < 2 or room < 1:
            return
        end = start + rng.randint(1, room) * block_size
        if rng.random() < 0.9:
            segments.append((first, count, start, end))
        cut = rng.randint(0, count)
        grow(first, cut, end)
        grow(first + cut, count - cut, end)

    grow(0, len(seq_lens), 0)
    return segments


def assert_sharing_changes_no_bit(backend: Any, batch: Any, **options: Any) -> torch.Tensor:
    segments, batch.metadata.tree_segments = batch.metadata.tree_segments, None
    alone = batch.attend(backend, **options)
    batch.metadata.tree_segments = segments
    shared = batch.attend(backend, **options)
    assert torch.equal(shared, alone)
    return shared


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 40))])
def test_sharing_changes_no_bit_of_a_random_tree(backend: Any, paged_batch: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    block_size, group = rng.choice([8, 16, 64]), rng.choice([1, 3, 16, 24])
    seq_lens = [rng.randint(1, 330) for _ in range(6)] if seed % 4 == 0 else [rng.randint(200, 330) for _ in range(6)]
    query_lens = [rng.choice([1, 1, 1, 2]) if length > 1 else 1 for length in seq_lens]
    dtype = rng.choice([torch.bfloat16, torch.float16])
    batch = paged_batch(query_lens, seq_lens, block_size, 1, group, 64, dtype, DEVICE)
    segments = random_tree(rng, seq_lens, block_size)
    batch.metadata.tree_segments = share(batch, [*segments, (0, 0, 0, 0)])
    options = rng.choice([{}, {"window": 100}, {"soft_cap": 4.0}])
    out = assert_sharing_changes_no_bit(backend, batch, **options)
    # And the reference, which knows no trees, finds the same numbers.
    torch.testing.assert_close(out, batch.attend(reference, **options), rtol=0.01, atol=0.01)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter, of what it should find
def test_what_is_shared_is_read_through_one_sequence_only(backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1] * 6, [200, 210, 330, 300, 290, 260], 16, 1, 3, 64, torch.bfloat16, DEVICE)
    # Splits 0 and 1 are shared by five; split 2 is cut by the segments' border, so nobody's; 3 is shared by the last three of them.
    # The sixth sequence shares nothing.
    batch.metadata.tree_segments = share(batch, [(0, 5, 0, 144), (0, 2, 144, 192), (2, 3, 144, 288)])
    expected = assert_sharing_changes_no_bit(backend, batch)
    tables = batch.metadata.block_tables
    poisoned = tables[0, -1].item()
    tables[1:5, : 128 // 16] = poisoned
    tables[3:5, 192 // 16 : 256 // 16] = poisoned
    assert torch.equal(batch.attend(backend), expected)
    batch.metadata.tree_segments = None
    assert batch.attend(backend).isnan().any(-1).any(-1).tolist() == [False, True, True, True, True, False]


def test_a_prefill_among_the_sequences_neither_reads_nor_stops_the_sharing(backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([3, 1, 2, 1], [140, 150, 130, 128], 16, 1, 4, 64, torch.bfloat16, DEVICE)
    batch.metadata.tree_segments = share(batch, [(0, 4, 0, 128)])
    expected = assert_sharing_changes_no_bit(backend, batch)
    batch.metadata.block_tables[3, :8] = batch.metadata.block_tables[0, -1]
    assert torch.equal(batch.attend(backend), expected)


@pytest.mark.parametrize("launches", [1, 3])
def test_more_sequences_than_a_tile_holds_share_tile_by_tile(
    backend: Any, paged_batch: Callable[..., Any], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = paged_batch([1] * 7, [130] * 7, 16, 1, 8, 64, torch.float32, DEVICE)  # two sequences to 16 rows
    batch.metadata.tree_segments = share(batch, [(1, 6, 0, 128)])
    expected = assert_sharing_changes_no_bit(backend, batch)
    if launches == 3:
        partials = 3 * (4 * 3 * 8 * 64)  # of three sequences: 0-2, 3-5, 6
        monkeypatch.setattr(importlib.import_module("radixkv.kernels.triton.paged_decode"), "PARTIAL_BYTES", partials)
    leaders = [0, 1, 3, 5] if launches == 1 else [0, 1, 3, 5, 6]
    followers = [s for s in range(7) if s not in leaders]
    batch.metadata.block_tables[followers, :8] = batch.metadata.block_tables[0, -1]
    assert torch.equal(batch.attend(backend), expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_cuda_graph_replays_over_another_tree(triton_backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1] * 4, [900, 800, 600, 700], 16, 2, 4, 128, torch.bfloat16, DEVICE)
    batch.metadata.tree_segments = share(batch, [(0, 4, 0, 256), (2, 2, 256, 512)])
    expected = batch.attend(triton_backend)
    segments = batch.metadata.tree_segments
    wanted = segments.clone()
    segments.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.attend(triton_backend)
    segments.copy_(wanted)
    batch.metadata.block_tables[1:, :16] = batch.metadata.block_tables[0, -1]
    graph.replay()
    assert torch.equal(out, expected)
