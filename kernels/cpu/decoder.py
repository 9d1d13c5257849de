"""All decoder layers of a step in one call of C: see decoder.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import AttentionMetadata, DecoderLayer, DecoderShape
from .build import library

_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


class _Product(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), *((name, _LONG) for name in ("outputs", "inputs", "bits"))]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Product) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _POINTER) for name in ("post_norm", "next_norm", "q_norm", "k_norm", "k_cache", "v_cache")),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, _LONG) for name in ("hidden", "q_heads", "kv_heads", "head_dim", "block_size")),
        ("cos_sin", _POINTER), ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("half", ctypes.c_int),
    ]  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, _LONG) for name in ("tokens", "sequences", "table_stride", "segment_count", "sampled")),
        *(
            (name, _POINTER)
            for name in ("positions", "slots", "starts", "lengths", "tables", "segments", "sampled_rows", "sampled_starts")
        ),
    ]


class NativeDecoder:
    """The layers of a model over the K/V storage it writes into.

    Called with the first layer's normed input ``x`` and the residual, both ``[T, hidden]`` and overwritten; gives ``[T, hidden]``
    after the last norm, or ``[n, hidden]`` of the int64 ``rows`` alone, each the last of its sequence.
    """

    def __init__(self, layers: Sequence[DecoderLayer], kv: Sequence[tuple[Tensor, Tensor]], shape: DecoderShape) -> None:
        self._kept = list(layers), list(kv), shape  # what the pointers point to
        self._layers = (_Layer * len(layers))(*(_layer(layer, *caches) for layer, caches in zip(layers, kv, strict=True)))
        k_cache = kv[0][0]
        self._dtype = k_cache.dtype
        self._shape = _Shape(
            shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, k_cache.shape[2] * k_cache.shape[4],
            shape.cos_sin.data_ptr(), shape.eps, shape.scale, self._dtype is torch.bfloat16,
        )  # fmt: skip
        first = layers[0]
        self._row_elements = (
            first.qkv.num_outputs + shape.num_heads * shape.head_dim + shape.hidden_size + first.gate_up.num_outputs // 2
        )

        self._scratch = torch.empty(0, dtype=self._dtype)
        """Grows only: memory fresh from the system is cleared page by page, which takes longer than some of the layers."""

    def __call__(self, x: Tensor, residual: Tensor, metadata: AttentionMetadata, rows: Tensor | None, num_threads: int) -> Tensor:
        tokens, kept = len(x), []

        def pointer(tensor: Tensor, dtype: torch.dtype) -> int:
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                raise TypeError(f"decoder layers take contiguous {dtype}, got {tensor.dtype} with strides {tensor.stride()}")
            kept.append(tensor)
            return tensor.data_ptr()

        int32, int64 = torch.int32, torch.int64
        segments = metadata.tree_segments
        batch = _Batch(tokens, len(metadata.seq_lens), metadata.block_tables.shape[1])
        batch.positions, batch.slots = pointer(metadata.positions, int64), pointer(metadata.slot_mapping, int64)
        batch.starts, batch.lengths = pointer(metadata.query_start_loc, int32), pointer(metadata.seq_lens, int32)
        batch.tables = pointer(metadata.block_tables, int32)
        if segments is not None:
            batch.segments, batch.segment_count = pointer(segments, int32), len(segments)
        if rows is not None:
            batch.sampled_rows, batch.sampled = pointer(rows, int64), len(rows)
            batch.sampled_starts = pointer(metadata.of_last_tokens(rows).query_start_loc, int32)
        if len(self._scratch) < tokens * self._row_elements:
            self._scratch = torch.empty(tokens * self._row_elements, dtype=self._dtype)
        library().radixkv_decoder_layers(
            self._layers, len(self._layers), ctypes.byref(self._shape), ctypes.byref(batch), pointer(x, self._dtype),
            pointer(residual, self._dtype), self._scratch.data_ptr(), num_threads,
        )  # fmt: skip
        return x if rows is None else x[: len(rows)]


def _layer(layer: DecoderLayer, k_cache: Tensor, v_cache: Tensor) -> _Layer:
    products = (_product(packed) for packed in (layer.qkv, layer.o, layer.gate_up, layer.down))
    norms = (None if norm is None else norm.data_ptr() for norm in (layer.post_norm, layer.next_norm, layer.q_norm, layer.k_norm))
    return _Layer(*products, *norms, k_cache.data_ptr(), v_cache.data_ptr())


def _product(packed: Any) -> _Product:
    return _Product(packed.weight_pointer, packed.bias_pointer, packed.num_outputs, packed.num_inputs, packed.bits)
