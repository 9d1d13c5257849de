"""Attention of single-token sequences: every split of every sequence is its own program, then splits are merged in order.

Flash-Decoding over a block table, with splits at absolute positions instead of a number chosen by load.  A split that lies in a
segment of the radix tree is read once for the sequences that share it, their query rows packed into one tile (Hydragen,
ChunkAttention, DeFT).  A row's products don't depend on the tile's other rows, so sharing changes no bit of it.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import AttentionMetadata
from .softmax_tiles import METADATA, SPLIT, Scoring, TileShape, attend_tile, merge, normalized

PARTIAL_BYTES = 128 << 20
"""Bound on the memory for partial results; larger batches take several launches."""


@triton.jit
def sharing_run(tree_segments, num_tree_segments, s, first, SPLIT: tl.constexpr):
    """First and end of the sequences around ``s`` that hold keys ``first`` to ``first + SPLIT`` in the same blocks; O(segments).

    Only a segment that covers the whole split counts.  The segments of a sequence are disjoint, so at most one does.
    """
    run_first, run_end = s, s + 1
    for begin in range(0, num_tree_segments, 64):
        index = begin + tl.arange(0, 64)
        segment = tree_segments + index * 4
        known = index < num_tree_segments
        start = tl.load(segment, mask=known, other=0)
        stop = start + tl.load(segment + 1, mask=known, other=0)
        covers = (start <= s) & (s < stop)
        covers &= tl.load(segment + 2, mask=known, other=0) <= first
        covers &= tl.load(segment + 3, mask=known, other=0) >= first + SPLIT
        run_first = tl.minimum(run_first, tl.min(tl.where(covers, start, s), 0))
        run_end = tl.maximum(run_end, tl.max(tl.where(covers, stop, s + 1), 0))
    return run_first, run_end


@triton.jit(
    do_not_specialize=["table_stride", "num_tree_segments", "num_splits", "first_sequence"], do_not_specialize_on_alignment=METADATA
)
def decode_splits(
    q, k_cache, v_cache, accs, tops, totals, query_start_loc, seq_lens, block_tables, tree_segments,
    score_scale, q_token_stride, q_head_stride, kv_token_stride, table_stride, num_tree_segments, num_splits, num_heads,
    first_sequence,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP_LOG2: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split): the partial softmax of the group's query heads over the split's keys.

    Of a run of sequences that share the split, every ``ROWS // GROUP``-th computes it for itself and its followers, which stop.
    Row ``r`` of the tile is head ``r % GROUP`` of follower ``r // GROUP``.
    """
    FOLLOWERS: tl.constexpr = ROWS // GROUP
    place, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    s = first_sequence + place
    first = split * SPLIT
    if first >= tl.load(seq_lens + s):
        return
    run_first, run_end = sharing_run(tree_segments, num_tree_segments, s, first, SPLIT)
    # Sequences of other launches keep to themselves.
    run_first = tl.maximum(run_first, first_sequence)
    run_end = tl.minimum(run_end, first_sequence + tl.num_programs(0))
    if (s - run_first) % FOLLOWERS != 0:
        return

    row = tl.arange(0, ROWS)
    follower = row // GROUP
    head = kv_head * GROUP + row % GROUP
    used_row = (follower < FOLLOWERS) & (s + follower < run_end)
    query = tl.load(query_start_loc + s + follower, mask=used_row, other=0)
    used_row &= tl.load(query_start_loc + s + follower + 1, mask=used_row, other=0) == query + 1  # others are prefill's
    seq_len = tl.load(seq_lens + s + follower, mask=used_row, other=0)
    if WINDOW > 0:
        used_row &= first + SPLIT > seq_len - WINDOW
    end = tl.minimum(first + SPLIT, tl.max(tl.where(used_row, seq_len, 0), 0))
    if end == 0:
        return
    if WINDOW > 0:
        first = tl.maximum(first, (tl.min(tl.where(used_row, seq_len, end + WINDOW), 0) - WINDOW) // KEYS * KEYS)

    dim = tl.arange(0, PADDED_DIM)
    used = used_row[:, None] & (dim < HEAD_DIM)[None, :]
    queries = q + (query.to(tl.int64) * q_token_stride + head * q_head_stride)[:, None] + dim[None, :]
    queries = tl.load(queries, mask=used, other=0.0)
    acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    table = block_tables + s.to(tl.int64) * table_stride
    for tile in range(first, end, KEYS):
        acc, top, total = attend_tile(
            queries, acc, top, total, tile, end, seq_len - 1, k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table,
            kv_token_stride, score_scale, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, WINDOW, CAP_LOG2,
        )  # fmt: skip
    partial = ((place + follower).to(tl.int64) * num_splits + split) * num_heads + head
    tl.store(accs + partial[:, None] * HEAD_DIM + dim[None, :], acc, mask=used)
    tl.store(tops + partial, top, mask=used_row)
    tl.store(totals + partial, total, mask=used_row)


@triton.jit(do_not_specialize=["num_splits", "first_sequence"], do_not_specialize_on_alignment=METADATA)
def merge_splits(
    out, accs, tops, totals, query_start_loc, seq_lens, num_splits, num_heads, first_sequence,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (sequence, query head): its splits, merged in order of position."""
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
    seq_len = tl.load(seq_lens + s)
    first = tl.maximum(seq_len - WINDOW, 0) // SPLIT if WINDOW > 0 else 0
    for split in range(first, tl.cdiv(seq_len, SPLIT)):
        partial = (place * num_splits + split) * num_heads + head + one
        next_acc = tl.load(accs + partial[:, None] * HEAD_DIM + dim[None, :], mask=used, other=0.0)
        acc, top, total = merge(acc, top, total, next_acc, tl.load(tops + partial), tl.load(totals + partial))
    row = query.to(tl.int64) * num_heads + head + one
    tl.store(out + row[:, None] * HEAD_DIM + dim[None, :], normalized(acc, total).to(out.dtype.element_ty), mask=used)


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scoring: Scoring, tiles: TileShape, out: Tensor
) -> None:
    """Write to out ``[T, H, D]`` the rows of the sequences that have one query token, and no others.

    The grid depends on the batch's shape and ``max_seq_len`` alone, so a CUDA graph may replay it over shorter sequences, and over
    other tree segments where ``tree_segments`` keeps its place and number of rows (a row of zero sequences shares nothing).
    """
    num_heads, head_dim = q.shape[1:]
    num_sequences = metadata.seq_lens.shape[0]
    num_splits = max(1, -(-metadata.max_seq_len // SPLIT))
    segments, num_segments = metadata.tree_segments, 0
    if segments is None:
        segments = metadata.seq_lens  # never read
    else:
        num_segments = segments.shape[0]
    step = max(1, min(num_sequences, PARTIAL_BYTES // (4 * num_splits * num_heads * head_dim)))
    accs = torch.empty((step, num_splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
    tops, totals = torch.empty((2, step, num_splits, num_heads), dtype=torch.float32, device=q.device)
    for first in range(0, num_sequences, step):
        count = min(step, num_sequences - first)
        decode_splits[(count, num_heads // tiles.group, num_splits)](
            q, k_cache, v_cache, accs, tops, totals, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables, segments,
            scoring.factor, q.stride(0), q.stride(1), k_cache.stride(1), metadata.block_tables.stride(0), num_segments, num_splits,
            num_heads, first, **tiles.constants(), **scoring.constants(),
        )  # fmt: skip
        merge_splits[(count, num_heads)](
            out, accs, tops, totals, metadata.query_start_loc, metadata.seq_lens, num_splits, num_heads, first,
            HEAD_DIM=head_dim, PADDED_DIM=tiles.padded_dim, SPLIT=SPLIT, WINDOW=scoring.window or 0, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
