"""Triton's paged attention against the reference, in the interpreter where there is no GPU."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def assert_as_exact_as_its_dtype_allows(out: Tensor, batch: Any) -> None:
    """Weights and result are each rounded once to the dtype; all else is float32: so bound the error by sum(weight * |v|)."""
    batch.q, batch.k_cache, batch.v_cache = batch.q.double(), batch.k_cache.double(), batch.v_cache.double()
    expected = batch.attend(reference)
    batch.v_cache = batch.v_cache.abs()
    bound = batch.attend(reference) * (torch.finfo(out.dtype).eps + 1e-5)
    assert out.is_contiguous()
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("dtype", "group", "block_size", "head_dim", "query_lens", "seq_lens"),
    [
        (torch.bfloat16, 3, 16, 64, [1, 7, 30, 1], [257, 7, 270, 1]),
        (torch.float16, 1, 8, 80, [65, 2, 1], [65, 130, 65]),
        (torch.float32, 5, 1, 96, [4, 1], [30, 20]),
        (torch.float32, 4, 64, 128, [5, 1], [6, 100]),
        (torch.bfloat16, 16, 128, 256, [1, 5], [33, 129]),
        (torch.float16, 8, 32, 128, [1, 1], [100, 33]),
        (torch.float32, 32, 16, 64, [1, 3], [40, 70]),
        (torch.float32, 24, 8, 80, [2, 1], [9, 300]),
        (torch.bfloat16, 71, 16, 64, [1, 3], [40, 20]),
    ],
)
def test_attention_equals_the_reference(
    triton_backend: Any, paged_batch: Callable[..., Any], dtype: torch.dtype, group: int, block_size: int, head_dim: int,
    query_lens: list[int], seq_lens: list[int],
) -> None:  # fmt: skip
    batch = paged_batch(query_lens, seq_lens, block_size, 2, group, head_dim, dtype, DEVICE)
    assert_as_exact_as_its_dtype_allows(batch.attend(triton_backend), batch)


GROUPS = (1, 2, 3, 5, 7, 8, 12, 16, 24, 32, 71)
GRID = list(enumerate(itertools.product(range(3), DTYPES, (64, 80, 96, 128, 256))))


@pytest.mark.full
@pytest.mark.parametrize(("index", "point"), GRID)
def test_attention_equals_the_reference_over_the_grid(
    triton_backend: Any, paged_batch: Callable[..., Any], index: int, point: tuple[int, torch.dtype, int]
) -> None:
    _, dtype, head_dim = point
    group, block_size = GROUPS[index % len(GROUPS)], 2 ** (index // 5 % 8)
    query_lens, seq_lens = [1 + index % 2, 1, block_size % 40 + 1, 1], [2 + index % 3, 64 + index, block_size * 2, 256 + index % 2]
    batch = paged_batch(query_lens, seq_lens, block_size, 1, group, head_dim, dtype, DEVICE)
    assert_as_exact_as_its_dtype_allows(batch.attend(triton_backend), batch)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.float16, torch.float32))]
)
def test_a_row_has_the_same_bits_alone_in_a_mixed_batch_and_however_prefill_was_chunked(
    triton_backend: Any, paged_batch: Callable[..., Any], dtype: torch.dtype
) -> None:
    batch = paged_batch([1, 24, 3], [65, 274, 3], 16, 1, 3, 64, dtype, DEVICE)
    mixed = batch.attend(triton_backend)
    # Row 5 of sequence 1 sits at position 255, the last of its segment; chunks of one token take the decode kernel.
    for s, start, stop in [(0, 0, 1), (2, 0, 3), (1, 0, 24), (1, 0, 5), (1, 5, 6), (1, 6, 7), (1, 7, 24), (1, 23, 24)]:
        assert torch.equal(batch.part(s, start, stop).attend(triton_backend), mixed[batch.rows(s)][start:stop])


def test_max_seq_len_and_the_memory_bound_change_no_bit(
    triton_backend: Any, paged_batch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = paged_batch([1, 1, 1], [260, 5, 30], 16, 1, 2, 64, torch.bfloat16, DEVICE)
    expected = batch.attend(triton_backend)
    batch.metadata.max_seq_len = 1000
    monkeypatch.setattr(importlib.import_module("radixkv.kernels.triton.paged_decode"), "PARTIAL_BYTES", 1)
    assert torch.equal(batch.attend(triton_backend), expected)


def test_padding_sequences_get_zeros_or_no_row(triton_backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1, 1, 2], [5, 3, 6], 4, 1, 2, 64, torch.float32, DEVICE)
    expected = batch.attend(triton_backend)
    batch.metadata.seq_lens[1] = 0  # as in a CUDA graph captured for more sequences
    out = batch.attend(triton_backend)
    assert not out[1].any()
    assert torch.equal(out[[0, 2, 3]], expected[[0, 2, 3]])
    batch.metadata.query_start_loc[3] = 2  # sequence 2 has no rows
    assert torch.equal(batch.attend(triton_backend)[0], expected[0])


def test_wrong_inputs_are_refused(triton_backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1], [5], 4, 1, 2, 64, torch.float32, DEVICE)
    batch.q = batch.q.double()
    with pytest.raises(ValueError, match="one dtype"):
        batch.attend(triton_backend)
    batch.q = batch.q.float().transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="unit stride"):
        batch.attend(triton_backend)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_cuda_graph_replays_over_other_lengths(triton_backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1, 1], [600, 300], 16, 2, 4, 128, torch.bfloat16, DEVICE)
    batch.attend(triton_backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = batch.attend(triton_backend)
    batch.metadata.seq_lens.copy_(torch.tensor([257, 1]))
    graph.replay()
    assert torch.equal(out, batch.attend(triton_backend))
