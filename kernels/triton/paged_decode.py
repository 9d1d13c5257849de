"""Attention of single-token sequences: every segment of every sequence is its own program, then segments are merged in order.

Flash-Decoding over a block table, with segments at absolute positions instead of a split chosen by load.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import AttentionMetadata
from .softmax_tiles import LOG2_E, METADATA, SEGMENT, TileShape, attend_tile, merge, normalized

PARTIAL_BYTES = 128 << 20
"""Bound on the memory for partial results; larger batches take several launches."""


@triton.jit(do_not_specialize=["table_stride", "num_segments", "first_sequence"], do_not_specialize_on_alignment=METADATA)
def decode_segments(
    q, k_cache, v_cache, accs, tops, totals, query_start_loc, seq_lens, block_tables,
    scale_log2, q_token_stride, q_head_stride, kv_token_stride, table_stride, num_segments, num_heads, first_sequence,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, segment): that segment's partial softmax for the group's query heads."""
    place, kv_head, segment = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    s = first_sequence + place
    query = tl.load(query_start_loc + s)
    seq_len = tl.load(seq_lens + s)
    first = segment * SEGMENT
    if (tl.load(query_start_loc + s + 1) - query != 1) | (first >= seq_len):
        return
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_DIM)
    used = (row < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    queries = tl.load(q + query.to(tl.int64) * q_token_stride + head[:, None] * q_head_stride + dim[None, :], mask=used, other=0.0)
    acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    position = tl.zeros([ROWS], dtype=tl.int32) + (seq_len - 1)
    end = tl.minimum(first + SEGMENT, seq_len)
    table = block_tables + s * table_stride
    for tile in range(first, end, KEYS):
        acc, top, total = attend_tile(
            queries, acc, top, total, tile, end, position, k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table,
            kv_token_stride, scale_log2, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS,
        )  # fmt: skip
    partial = (place * num_segments + segment) * num_heads + head
    tl.store(accs + partial[:, None] * HEAD_DIM + dim[None, :], acc, mask=used)
    tl.store(tops + partial, top, mask=row < GROUP)
    tl.store(totals + partial, total, mask=row < GROUP)


@triton.jit(do_not_specialize=["num_segments", "first_sequence"], do_not_specialize_on_alignment=METADATA)
def merge_segments(
    out, accs, tops, totals, query_start_loc, seq_lens, num_segments, num_heads, first_sequence,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head): its segments, merged in order of position."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = first_sequence + place
    query = tl.load(query_start_loc + s)
    if tl.load(query_start_loc + s + 1) - query != 1:
        return
    one = tl.arange(0, 1)
    dim = tl.arange(0, PADDED_DIM)
    used = (one == 0)[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros([1, PADDED_DIM], dtype=tl.float32)
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    for segment in range(tl.cdiv(tl.load(seq_lens + s), SEGMENT)):
        partial = (place * num_segments + segment) * num_heads + head + one
        next_acc = tl.load(accs + partial[:, None] * HEAD_DIM + dim[None, :], mask=used, other=0.0)
        acc, top, total = merge(acc, top, total, next_acc, tl.load(tops + partial), tl.load(totals + partial))
    row = query.to(tl.int64) * num_heads + head + one
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], normalized(acc, total).to(out.dtype.element_ty), mask=used)


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, tiles: TileShape, out: Tensor
) -> None:
    """Write to out ``[T, H, D]`` the rows of the sequences that have one query token, and no others.

    The grid depends on the batch's shape and ``max_seq_len`` alone, so a CUDA graph may replay it over shorter sequences.
    """
    num_heads, head_dim = q.shape[1:]
    num_sequences = metadata.seq_lens.shape[0]
    num_segments = max(1, -(-metadata.max_seq_len // SEGMENT))
    step = max(1, min(num_sequences, PARTIAL_BYTES // (4 * num_segments * num_heads * head_dim)))
    accs = torch.empty((step, num_segments, num_heads, head_dim), dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, step, num_segments, num_heads), dtype=torch.float32, device=q.device)
    for first in range(0, num_sequences, step):
        count = min(step, num_sequences - first)
        decode_segments[(count, num_heads // tiles.group, num_segments)](
            q, k_cache, v_cache, accs, tops, totals, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
            scale * LOG2_E, q.stride(0), q.stride(1), k_cache.stride(1), metadata.block_tables.stride(0), num_segments,
            num_heads, first, **tiles.constants(),
        )  # fmt: skip
        merge_segments[(count, num_heads)](
            out, accs, tops, totals, metadata.query_start_loc, metadata.seq_lens, num_segments, num_heads, first,
            HEAD_DIM=head_dim, PADDED_DIM=tiles.padded_dim, SEGMENT=SEGMENT, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
