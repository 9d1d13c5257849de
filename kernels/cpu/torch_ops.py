"""The operations in torch alone, for float16 and for machines without a C compiler.

Products are taken in shapes that don't depend on the batch, because in torch a row's bits can depend on the shape of the
product it is in: rows in whole groups, attention over tiles of a few query tokens and chunks of keys at absolute positions.
That makes them equal where it was tested; the library under torch promises nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .. import AttentionMetadata
from ..reference import add_rms_norm, allocate_kv, copy_blocks, pack_linear, rms_norm, rope, silu_mul, write_kv

__all__ = [
    "add_rms_norm", "allocate_kv", "copy_blocks", "linear", "pack_linear", "paged_attention", "rms_norm", "rope", "silu_mul",
    "write_kv",
]  # fmt: skip

ROW_GROUP = 8
QUERY_TILE = 4  # tokens
CHUNK = 64


def linear(x: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
    """``x @ weight.T + bias``: ``[T, K] -> [T, N]``, rows padded to whole groups."""
    rows = x.shape[0]
    return functional.linear(functional.pad(x, (0, 0, 0, -rows % ROW_GROUP)), *packed)[:rows]


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Causal grouped-query attention of q ``[T, H, D]`` through the block tables: ``[T, H, D]``.

    All tiles of queries advance together, a chunk of keys at a time, each chunk's partial result merged in order of position.
    """
    block_size, kv_heads, dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    starts, lengths = metadata.query_start_loc.long(), metadata.seq_lens.long()
    query_lens = torch.where(lengths > 0, starts.diff(), 0)
    tile_counts = (query_lens + QUERY_TILE - 1) // QUERY_TILE
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), tile_counts)  # of each tile
    first = (torch.arange(len(sequence)) - (tile_counts.cumsum(0) - tile_counts)[sequence]) * QUERY_TILE
    in_query = first[:, None] + torch.arange(QUERY_TILE)  # [tiles, QUERY_TILE]
    real = in_query < query_lens[sequence, None]
    token = torch.where(real, starts[sequence, None] + in_query, 0)
    limit = torch.where(real, (lengths - query_lens)[sequence, None] + in_query + 1, 0)
    # Longest tiles first, so that those which reach a chunk are a prefix.
    order = limit.amax(1).argsort(descending=True, stable=True) if len(sequence) else sequence
    sequence, token, limit, real = sequence[order], token[order], limit[order], real[order]
    reach = limit.amax(1).tolist() if len(sequence) else []

    rows = QUERY_TILE * group
    queries = q[token].view(-1, QUERY_TILE, kv_heads, group, dim).permute(0, 2, 1, 3, 4).reshape(-1, kv_heads, rows, dim).float()
    row_limit = limit.repeat_interleave(group, dim=1)[:, None, :, None]  # [tiles, 1, rows, 1]
    values = torch.zeros_like(queries)
    lowest = torch.finfo(torch.float32).min  # instead of -inf, so that rows which see nothing of a chunk make no NaN
    largest = torch.full((*queries.shape[:3], 1), lowest)
    total = torch.zeros_like(largest)
    positions = torch.arange(CHUNK)
    active = len(reach)
    for start in range(0, reach[0] if reach else 0, CHUNK):
        while active and reach[active - 1] <= start:
            active -= 1
        position = start + positions
        held = position < lengths[sequence[:active], None]  # [active, CHUNK]
        columns = (position // block_size).clamp(max=metadata.block_tables.shape[1] - 1)
        blocks = torch.where(held, metadata.block_tables[sequence[:active]][:, columns], 0).long()
        keys, chunk_values = (  # [active, kv_heads, CHUNK, dim]; rows that hold no token may hold anything, so they become 0
            torch.where(held[..., None, None], cache[blocks, position % block_size], 0).float().transpose(1, 2).contiguous()
            for cache in (k_cache, v_cache)
        )
        scores = (queries[:active] @ keys.transpose(2, 3)) * scale
        scores = scores.masked_fill(position >= row_limit[:active], float("-inf"))
        chunk_largest = scores.amax(-1, keepdim=True).clamp(min=lowest)
        new_largest = torch.maximum(largest[:active], chunk_largest)
        weights = (scores - chunk_largest).exp()
        old_factor, new_factor = (largest[:active] - new_largest).exp(), (chunk_largest - new_largest).exp()
        largest[:active] = new_largest
        total[:active] = total[:active] * old_factor + weights.sum(-1, keepdim=True) * new_factor
        values[:active] = values[:active] * old_factor + (weights @ chunk_values) * new_factor
    result = (values / total).view(-1, kv_heads, QUERY_TILE, group, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    out[token[real]] = result[real].to(q.dtype)
    return out
