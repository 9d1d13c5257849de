"""Attention of prefill chunks over their paged prefixes: a variable-length batch, a KV head's query heads packed into one tile."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import AttentionMetadata
from .softmax_tiles import METADATA, Scoring, TileShape, attend_tile, merge, normalized


@triton.jit(do_not_specialize=["table_stride", "num_sequences"], do_not_specialize_on_alignment=METADATA)
def prefill_tiles(
    q, k_cache, v_cache, out, query_start_loc, seq_lens, block_tables,
    score_scale, q_token_stride, q_head_stride, kv_token_stride, table_stride, num_sequences, num_heads,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP_LOG2: tl.constexpr,
):  # fmt: skip
    """Program (query tile, KV head).  Row ``r`` of a tile is head ``r % GROUP`` of the tile's token ``r // GROUP``."""
    TOKENS: tl.constexpr = ROWS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)

    # Sequence s owns the tiles from query_start_loc[s] // TOKENS + s on: room for its last, partial tile and for any query
    # length, with a grid that needs no lengths on the host (the numbering of vLLM's unified kernel).  Find s by bisection.
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        below = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    s = low
    query_start = tl.load(query_start_loc + s)
    query_len = tl.load(query_start_loc + s + 1) - query_start
    first_token = (tile - query_start // TOKENS - s) * TOKENS
    if (query_len <= 1) | (first_token >= query_len):  # single tokens are decode's
        return

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    used_row = (row < TOKENS * GROUP) & (token < query_len)
    dim = tl.arange(0, PADDED_DIM)
    used = used_row[:, None] & (dim < HEAD_DIM)[None, :]
    query = (query_start + token).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    queries = tl.load(q + (query * q_token_stride + head * q_head_stride)[:, None] + dim[None, :], mask=used, other=0.0)
    seq_len = tl.load(seq_lens + s)
    position = seq_len - query_len + token
    end = seq_len - query_len + tl.minimum(first_token + TOKENS, query_len)
    table = block_tables + tl.cast(s, tl.int64) * table_stride

    acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    split_acc, split_top, split_total = acc, top, total
    begin = tl.maximum(seq_len - query_len + first_token - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else 0
    for first in range(begin, end, KEYS):
        split_acc, split_top, split_total = attend_tile(
            queries, split_acc, split_top, split_total, first, end, position,
            k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, table,
            kv_token_stride, score_scale, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, KEYS, WINDOW, CAP_LOG2,
        )  # fmt: skip
        if (first + KEYS) % SPLIT == 0:
            acc, top, total = merge(acc, top, total, split_acc, split_top, split_total)
            split_acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
            split_top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
            split_total = tl.zeros([ROWS], dtype=tl.float32)
    acc, top, total = merge(acc, top, total, split_acc, split_top, split_total)
    result = normalized(acc, total).to(out.dtype.element_ty)
    tl.store(out + ((query * num_heads + head) * HEAD_DIM)[:, None] + dim[None, :], result, mask=used)


def paged_prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scoring: Scoring, tiles: TileShape, out: Tensor
) -> None:
    """Write to out ``[T, H, D]`` the rows of the sequences that have two query tokens or more, and no others."""
    num_tokens, num_heads = q.shape[:2]
    num_sequences = metadata.seq_lens.shape[0]
    num_tiles = num_tokens // (tiles.rows // tiles.group) + num_sequences
    prefill_tiles[(num_tiles, num_heads // tiles.group)](
        q, k_cache, v_cache, out, metadata.query_start_loc, metadata.seq_lens, metadata.block_tables,
        scoring.factor, q.stride(0), q.stride(1), k_cache.stride(1), metadata.block_tables.stride(0), num_sequences, num_heads,
        **tiles.constants(), **scoring.constants(),
    )  # fmt: skip
