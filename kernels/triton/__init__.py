"""The GPU backend: Triton kernels for CUDA and ROCm; matrix products are torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import AttentionMetadata
from ..reference import allocate_kv, linear, pack_linear
from .copy_blocks import copy_blocks
from .paged_decode import paged_decode
from .paged_prefill import paged_prefill
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope
from .silu_mul import silu_mul
from .softmax_tiles import TileShape, check_attention_inputs
from .write_kv import write_kv

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "copy_blocks",
    "linear",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Causal grouped-query attention of q ``[T, H, D]``, strided or not, through the block tables: ``[T, H, D]``, contiguous.

    Sequences with one query token go to the split decode kernel even in a mixed batch, so that a long context is spread over the
    GPU; the others to the prefill kernel.  A row's bits depend on neither (see ``softmax_tiles``).  Nothing waits for the GPU, and
    grids follow shapes, ``max_query_len`` and ``max_seq_len``.  Rows that no sequence owns are left unset.
    """
    check_attention_inputs(q, k_cache, v_cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles = TileShape.of(q, k_cache)
    paged_decode(q, k_cache, v_cache, metadata, scale, tiles, out)
    if metadata.max_query_len > 1:
        paged_prefill(q, k_cache, v_cache, metadata, scale, tiles, out)
    return out
