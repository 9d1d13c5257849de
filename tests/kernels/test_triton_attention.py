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


def assert_as_exact_as_its_dtype_allows(out: Tensor, batch: Any, **options: Any) -> None:
    """Weights and result are each rounded once to the dtype; all else is float32: so bound the error by sum(weight * |v|)."""
    batch.q, batch.k_cache, batch.v_cache = batch.q.double(), batch.k_cache.double(), batch.v_cache.double()
    expected = batch.attend(reference, **options)
    batch.v_cache = batch.v_cache.abs()
    bound = batch.attend(reference, **options) * (torch.finfo(out.dtype).eps + 1e-5)
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
    stored = (None, torch.float8_e4m3fn, torch.float8_e5m2)[index % 3]
    if stored is not None and dtype != torch.float32:
        batch.k_cache, batch.v_cache = batch.k_cache.to(stored), batch.v_cache.to(stored)
    options = {"window": (None, 70, 5)[index % 4 % 3], "soft_cap": (None, 4.0)[index // 2 % 2]}
    assert_as_exact_as_its_dtype_allows(batch.attend(triton_backend, **options), batch, **options)


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (40, 3.0), (300, None), (None, 30.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_window_and_soft_cap_equal_the_reference(
    triton_backend: Any, paged_batch: Callable[..., Any], window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    batch = paged_batch([1, 30, 1], [330, 290, 20], 16, 1, 3, 64, dtype, DEVICE)
    options = {"window": window, "soft_cap": soft_cap, "scale": 3.0}  # so that scores reach the cap
    assert_as_exact_as_its_dtype_allows(batch.attend(triton_backend, **options), batch, **options)


def test_what_no_window_reaches_is_not_read(triton_backend: Any, paged_batch: Callable[..., Any]) -> None:
    batch = paged_batch([1, 5], [600, 600], 16, 1, 2, 64, torch.bfloat16, DEVICE)
    expected = batch.attend(triton_backend, window=20)
    poisoned = batch.metadata.block_tables[0, -1]
    batch.metadata.block_tables[:, : 576 // 16] = poisoned  # keys from 576 on are seen, in tiles of up to 64
    assert torch.equal(batch.attend(triton_backend, window=20), expected)


@pytest.mark.parametrize(("stored", "dtype"), [(torch.float8_e4m3fn, torch.bfloat16), (torch.float8_e5m2, torch.float16)])
def test_keys_and_values_stored_in_8_bits_are_widened_exactly(
    triton_backend: Any, paged_batch: Callable[..., Any], stored: torch.dtype, dtype: torch.dtype
) -> None:
    batch = paged_batch([1, 7, 1], [270, 60, 33], 16, 2, 3, 80, dtype, DEVICE)
    batch.k_cache, batch.v_cache = batch.k_cache.to(stored), batch.v_cache.to(stored)
    assert_as_exact_as_its_dtype_allows(batch.attend(triton_backend), batch)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.full) for dtype in (torch.float16, torch.float32))]
)
@pytest.mark.parametrize("options", [{}, {"window": 50, "soft_cap": 20.0}])
def test_a_row_has_the_same_bits_alone_in_a_mixed_batch_and_however_prefill_was_chunked(
    triton_backend: Any, paged_batch: Callable[..., Any], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    batch = paged_batch([1, 24, 3], [65, 274, 3], 16, 1, 3, 64, dtype, DEVICE)
    mixed = batch.attend(triton_backend, **options)
    # Row 5 of sequence 1 sits at position 255, the last of its split; chunks of one token take the decode kernel.
    for s, start, stop in [(0, 0, 1), (2, 0, 3), (1, 0, 24), (1, 0, 5), (1, 5, 6), (1, 6, 7), (1, 7, 24), (1, 23, 24)]:
        assert torch.equal(batch.part(s, start, stop).attend(triton_backend, **options), mixed[batch.rows(s)][start:stop])


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
    batch = paged_batch([1], [5], 4, 1, 2, 64, torch.float32, DEVICE)
    batch.metadata.tree_segments = torch.zeros(2, 4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="int32"):
        batch.attend(triton_backend)
    for options in ({"window": 0}, {"soft_cap": 0.0}):
        with pytest.raises(ValueError, match="at least 1"):
            paged_batch([1], [5], 4, 1, 2, 64, torch.float32, DEVICE).attend(triton_backend, **options)


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
