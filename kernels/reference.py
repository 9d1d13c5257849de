"""Plain torch, written to be obviously right: the oracle that every other backend is tested against.

Runs on any device and in any float dtype; sums are taken in float32, or in float64 where the inputs are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from . import AttentionMetadata


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Zeroed K and V, each ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)


def pack_linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Nothing to prepare: weight ``[N, K]`` and bias ``[N]`` as they are."""
    return weight, bias


def linear(x: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
    """``x @ weight.T + bias``: ``[T, K] -> [T, N]``."""
    return functional.linear(x, *packed)


def logits(x: Tensor, packed: tuple[Tensor, Tensor | None]) -> Tensor:
    """:func:`linear` widened to float32."""
    return linear(x, packed).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension; rounded to ``x``'s dtype before the weight is applied, as Hugging Face's Llama does."""
    wide = x.to(_accumulator(x.dtype))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, then ``rms_norm(residual)``."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[T, 2 I] -> [T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q ``[T, H, D]`` and k ``[T, G, D]`` in place: element ``i`` pairs with ``i + D/2`` (RoFormer, halves convention)."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]: alike for every head
    for x in (q, k):
        first, second = x.to(_accumulator(x.dtype)).chunk(2, dim=-1)
        x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v ``[T, G, D]`` at their slots; a slot of -1 is skipped.  8-bit floats saturate."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    for x, cache in ((k, k_cache), (v, v_cache)):
        rows, stored = x[kept], cache
        if cache.element_size() == 1:
            limit = torch.finfo(cache.dtype).max
            rows, stored = rows.clamp(-limit, limit).to(cache.dtype).view(torch.uint8), cache.view(torch.uint8)
        stored.view(-1, *cache.shape[2:])[slots] = rows


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal grouped-query attention of q ``[T, H, D]`` through the block tables: ``[T, H, D]``.

    One sequence at a time: gather its blocks into dense K and V, then softmax over a full score matrix.  Rows that no
    sequence owns, and rows of a sequence of length zero, are zero.
    """
    wide = _accumulator(q.dtype)
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = metadata.query_start_loc.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        query = q[rows].to(wide)
        if length == 0 or query.shape[0] == 0:
            continue
        blocks = metadata.block_tables[s, : -(-length // block_size)].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].to(wide) for cache in (k_cache, v_cache))
        group = query.shape[1] // num_kv_heads
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        key_position = torch.arange(length, device=q.device)
        query_position = key_position[length - query.shape[0] :, None]
        hidden = key_position > query_position
        if window is not None:
            hidden |= key_position <= query_position - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def copy_blocks(k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
    """For each row ``(source block, target block, num_rows)`` of int64 ``[C, 3]``, in order, copy the leading token rows."""
    for source, target, num_rows in copies.tolist():
        for cache in (k_cache, v_cache):
            cache[target, :num_rows] = cache[source, :num_rows]
