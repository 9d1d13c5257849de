"""CPU kernels: small C routines compiled where they run, for float32 and bfloat16; torch for the rest and without a compiler.

A row's bits don't depend on the rows computed with it, nor on the number of threads.  A decode step makes hundreds of these
calls, so each costs a few microseconds: no temporaries, and only pointers and integers pass to C.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import AttentionMetadata, DecoderLayer, DecoderShape, FusedLayers
from ..quantized import GROUP, QuantizedWeight
from . import memory, torch_ops
from .build import library
from .decoder import NativeDecoder

_TILE = 16  # as in gemm.h
_DEPTH = 32  # a bfloat16 weight is padded to a multiple of it
_MIN_HEAD_DIM = 16
_num_threads: int | None = None
_PLAIN_DIMS = 4  # of a cache that torch computes on; the tiled ones have 5 or 6


@functools.cache
def is_native(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` are computed by the C kernels here."""
    return dtype in (torch.float32, torch.bfloat16) and library() is not None


@dataclass(slots=True, frozen=True)
class PackedLinear:
    """A weight ``[N, K]`` in tiles of 16 outputs, K in order, and its bias in float32, both padded to whole tiles."""

    weight: Tensor
    bias: Tensor
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    """Of the rows that it multiplies, and of the product."""
    bits: int
    """Of a quantized weight, whose tiles are widened to ``dtype`` where they are multiplied; else 0."""
    weight_pointer: int
    bias_pointer: int


def num_threads() -> int:
    """Threads that the C kernels share their work between: torch's number, unless :func:`set_num_threads` gave another."""
    return _num_threads or torch.get_num_threads()


def set_num_threads(count: int) -> None:
    """Give the C kernels a number of threads of their own, so that torch's can be another."""
    global _num_threads
    _num_threads = count


def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Zeroed K and V of one layer in tiles of ``t = min(block_size, 16)`` tokens, K with the token varying fastest.

    float32: K ``[blocks, heads, block_size / t, head_dim, t]``, V ``[blocks, heads, block_size, head_dim]``. bfloat16 comes in
    pairs: K ``[blocks, heads, block_size / t, head_dim / 2, t, 2]``, V ``[blocks, heads, block_size / 2, head_dim, 2]``.
    See kv.h. Where torch computes: as ``reference`` has it.
    """
    if not is_native(dtype) or head_dim < _MIN_HEAD_DIM or head_dim % 2:
        return torch_ops.allocate_kv(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
    tile = min(block_size, _TILE)
    pairs = (2,) if dtype is torch.bfloat16 else ()
    k_shape = (num_blocks, num_kv_heads, block_size // tile, head_dim // (2 if pairs else 1), tile, *pairs)
    in_pair = pairs if block_size > 1 else ()
    v_shape = (num_blocks, num_kv_heads, block_size // (2 if in_pair else 1), head_dim, *in_pair)
    return memory.empty(k_shape, dtype).zero_(), memory.empty(v_shape, dtype).zero_()


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear | tuple[Tensor, Tensor | None]:
    """Weight ``[N, K]`` and bias ``[N]`` rearranged into tiles, as large as before up to padding; O(N K)."""
    if not is_native(weight.dtype):
        return torch_ops.pack_linear(weight, bias)
    outputs, inputs = weight.shape
    half = weight.dtype is torch.bfloat16
    tiles = -(-outputs // _TILE)
    packed = memory.empty((tiles * _TILE * (-(-inputs // _DEPTH) * _DEPTH if half else inputs),), weight.dtype)
    padded_bias = _padded_bias(bias, outputs)
    weight = weight.contiguous()
    library().radixkv_pack_weight(weight.data_ptr(), packed.data_ptr(), outputs, inputs, half)
    return PackedLinear(packed, padded_bias, outputs, inputs, weight.dtype, 0, packed.data_ptr(), padded_bias.data_ptr())


def pack_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> PackedLinear | None:
    """The same for a quantized weight, with the bits that :func:`pack_linear` would give for it widened to ``dtype`` beforehand.

    A third (or half) of the bytes in memory, so a step of few rows takes less time.  None where it would take more: where torch
    computes, and in float32.
    """
    if dtype is not torch.bfloat16 or not is_native(dtype):
        return None
    outputs, inputs = weight.codes.shape
    tiles, header = -(-outputs // _TILE), 2 * _TILE * (1 if weight.offsets is None else 2)
    packed = memory.empty((tiles * (inputs // GROUP) * (header + GROUP * _TILE * weight.bits // 8),), torch.uint8)
    padded_bias = _padded_bias(bias, outputs)
    parts = [None if part is None else part.contiguous() for part in weight]
    library().radixkv_pack_quantized(
        *(None if part is None else part.data_ptr() for part in parts), packed.data_ptr(), outputs, inputs, weight.bits
    )
    return PackedLinear(packed, padded_bias, outputs, inputs, dtype, weight.bits, packed.data_ptr(), padded_bias.data_ptr())


def _padded_bias(bias: Tensor | None, outputs: int) -> Tensor:
    padded = torch.zeros(-(-outputs // _TILE) * _TILE)
    if bias is not None:
        padded[:outputs] = bias
    return padded


def linear(x: Tensor, packed: PackedLinear | tuple[Tensor, Tensor | None]) -> Tensor:
    """``x @ weight.T + bias``: ``[T, K] -> [T, N]``; summed in float32, K in order. Raises ValueError on another K or dtype."""
    if not isinstance(packed, PackedLinear):
        return torch_ops.linear(x, packed)
    return _product(library().radixkv_linear, x, packed, packed.num_outputs)


def logits(x: Tensor, packed: PackedLinear | tuple[Tensor, Tensor | None]) -> Tensor:
    """:func:`linear` in float32, ``[T, K] -> [T, N]``, rounded to ``x``'s dtype first."""
    if not isinstance(packed, PackedLinear):
        return torch_ops.linear(x, packed).float()
    return _product(library().radixkv_wide_linear, x, packed, packed.num_outputs, torch.float32)


def highest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of float32 ``[T, N]`` where its highest value is, the first of equals, int64 ``[T]``, and that value, ``[T]``.

    NaN is taken for the highest of all.
    """
    if not is_native(torch.float32) or not logits.is_contiguous():  # numpy uses SIMD: a twentieth of torch's time
        at = torch.from_numpy(logits.numpy().argmax(-1))
        return at, logits.gather(1, at.unsqueeze(1)).squeeze(1)
    if logits.dtype is not torch.float32 or not logits.shape[1]:
        raise TypeError(f"highest takes float32 rows that are not empty, got {logits.dtype} {tuple(logits.shape)}")
    rows, columns = logits.shape
    at, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    library().radixkv_highest(logits.data_ptr(), rows, columns, at.data_ptr(), values.data_ptr(), num_threads())
    return at, values


def gated_linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """``silu_mul(linear(x, packed))`` in one pass and to the bit, for a number of outputs that is a multiple of 32."""
    if packed.num_outputs % (2 * _TILE):
        raise ValueError(f"gated_linear takes a multiple of {2 * _TILE} outputs, got {packed.num_outputs}")
    return _product(library().radixkv_gated_linear, x, packed, packed.num_outputs // 2)


def _product(function: Any, x: Tensor, packed: PackedLinear, outputs: int, dtype: torch.dtype | None = None) -> Tensor:
    rows, inputs = x.shape
    if inputs != packed.num_inputs or x.dtype is not packed.dtype:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, the weight takes {packed.dtype} rows of {packed.num_inputs}")
    if not x.is_contiguous():
        x = x.contiguous()
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype)
    function(
        x.data_ptr(), inputs, packed.weight_pointer, packed.bias_pointer, out.data_ptr(), rows, outputs, inputs,
        x.dtype is torch.bfloat16, packed.bits, num_threads(),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in float32 and rounded to ``x``'s dtype before the weight is applied."""
    if not is_native(x.dtype):
        return torch_ops.rms_norm(x, weight, eps)
    return _norm(x.contiguous(), None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place, then ``rms_norm(residual)``, in one pass; ``residual`` must be contiguous."""
    if not is_native(x.dtype):
        return torch_ops.add_rms_norm(x, residual, weight, eps)
    if not residual.is_contiguous() or residual.dtype is not x.dtype or residual.shape != x.shape:
        raise ValueError(f"residual must be contiguous {x.dtype} {tuple(x.shape)}")
    return _norm(x.contiguous(), residual.data_ptr(), weight, eps)


def _norm(x: Tensor, residual: int | None, weight: Tensor, eps: float) -> Tensor:
    dim = x.shape[-1]
    if weight.dtype is not x.dtype or weight.numel() != dim:
        raise ValueError(f"weight is {weight.dtype} {tuple(weight.shape)}, x has {x.dtype} rows of {dim}")
    out = torch.empty_like(x)
    library().radixkv_rms_norm(
        x.data_ptr(), residual, weight.data_ptr(), out.data_ptr(), x.numel() // dim, dim, eps,
        x.dtype is torch.bfloat16, num_threads(),
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``[T, 2 I]`` holding gate then up: ``[T, I]``; in bfloat16 silu is rounded first, as in torch."""
    if not is_native(gate_up.dtype):
        return torch_ops.silu_mul(gate_up)
    if not gate_up.is_contiguous():
        gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    dtype, dim = gate_up.dtype, width // 2
    out = torch.empty((rows, dim), dtype=dtype)
    library().radixkv_silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, dim, dtype is torch.bfloat16, num_threads())
    return out


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q ``[T, H, D]`` and k ``[T, G, D]`` in place (halves convention); a token's heads must lie side by side."""
    dtype = q.dtype
    if not is_native(dtype):
        torch_ops.rope(q, k, positions, cos_sin)
        return
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    if k.dtype is not dtype or positions.dtype is not torch.int64 or cos_sin.dtype is not torch.float32:
        raise TypeError("rope takes k in q's dtype, positions int64 and cos_sin float32")
    library().radixkv_rope(
        q.data_ptr(), _row_stride(q, q_heads, dim), k.data_ptr(), _row_stride(k, kv_heads, dim), positions.data_ptr(),
        cos_sin.data_ptr(), tokens, q_heads, kv_heads, dim, dtype is torch.bfloat16, num_threads(),
    )  # fmt: skip


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v ``[T, G, D]`` at their slots; a slot of -1 is skipped."""
    cache_shape = k_cache.shape
    if len(cache_shape) == _PLAIN_DIMS:
        torch_ops.write_kv(k, v, k_cache, v_cache, slot_mapping)
        return
    tokens, heads, dim = k.shape
    dtype = k_cache.dtype
    if k.dtype is not dtype or v.dtype is not dtype or slot_mapping.dtype is not torch.int64:
        raise TypeError("write_kv takes k and v in the cache's dtype and slots int64")
    library().radixkv_write_kv(
        k.data_ptr(), _row_stride(k, heads, dim), v.data_ptr(), _row_stride(v, heads, dim), k_cache.data_ptr(), v_cache.data_ptr(),
        slot_mapping.data_ptr(), tokens, heads, dim, cache_shape[2] * cache_shape[4], dtype is torch.bfloat16,
        num_threads(),
    )  # fmt: skip


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal grouped-query attention of q ``[T, H, D]`` through the block tables: ``[T, H, D]``.

    Reads only blocks that hold tokens; K/V of ``tree_segments`` is read once for all short queries that share it.  Raises
    ValueError for a window or a soft cap.
    """
    if window is not None or soft_cap is not None:
        raise ValueError("paged_attention on the CPU knows no window and no soft_cap")
    cache_shape = k_cache.shape
    if len(cache_shape) == _PLAIN_DIMS:
        return torch_ops.paged_attention(q, k_cache, v_cache, metadata, scale)
    tokens, q_heads, dim = q.shape
    kv_heads, dtype = cache_shape[1], q.dtype
    tables, starts, lengths = metadata.block_tables, metadata.query_start_loc, metadata.seq_lens
    int32 = torch.int32
    if k_cache.dtype is not dtype or tables.dtype is not int32 or starts.dtype is not int32 or lengths.dtype is not int32:
        raise TypeError("paged_attention takes q in the cache's dtype and block tables, starts and lengths int32")
    segments = metadata.tree_segments
    if segments is not None and (segments.dtype is not int32 or not segments.is_contiguous()):
        raise TypeError("tree_segments must be int32 and contiguous")
    pointer, num_segments = (None, 0) if segments is None else (segments.data_ptr(), len(segments))
    out = torch.empty((tokens, q_heads, dim), dtype=dtype)
    library().radixkv_paged_attention(
        q.data_ptr(), _row_stride(q, q_heads, dim), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), starts.data_ptr(),
        lengths.data_ptr(), tables.data_ptr(), tables.stride(0), len(lengths), tokens, kv_heads, q_heads // kv_heads, dim,
        cache_shape[2] * cache_shape[4], pointer, num_segments, scale, dtype is torch.bfloat16, num_threads(),
    )  # fmt: skip
    return out


def fuse_layers(layers: Sequence[DecoderLayer], kv: Sequence[tuple[Tensor, Tensor]], shape: DecoderShape) -> FusedLayers | None:
    """All layers over their K/V storage as one call of C, a :class:`.NativeDecoder`; None where torch computes."""
    gate_up = layers[0].gate_up
    if kv[0][0].dim() == _PLAIN_DIMS or not isinstance(gate_up, PackedLinear) or gate_up.num_outputs % (2 * _TILE):
        return None
    decoder = NativeDecoder(layers, kv, shape)
    return lambda x, residual, metadata, rows: decoder(x, residual, metadata, rows, num_threads())


def copy_blocks(k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
    """For each row ``(source block, target block, num_rows)`` of int64 ``[C, 3]``, in order, copy the leading token rows."""
    shape = k_cache.shape
    if len(shape) == _PLAIN_DIMS:
        torch_ops.copy_blocks(k_cache, v_cache, copies)
        return
    if copies.dtype is not torch.int64:
        raise TypeError("copy_blocks takes copies int64")
    pairs = 2 if k_cache.dtype is torch.bfloat16 else 1
    library().radixkv_copy_blocks(
        k_cache.data_ptr(), v_cache.data_ptr(), copies.contiguous().data_ptr(), len(copies), shape[1], shape[3] * pairs,
        shape[2] * shape[4], pairs == 2,
    )  # fmt: skip


def _row_stride(x: Tensor, heads: int, dim: int) -> int:
    """Elements from one token of ``[T, heads, dim]`` to the next."""
    row, head, element = x.stride()
    if element != 1 or (head != dim and heads > 1):
        raise ValueError(f"heads must be contiguous: shape {tuple(x.shape)}, strides {x.stride()}")
    return row
