"""The GPU backend: Triton kernels for CUDA and ROCm; matrix products are torch's."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import AttentionMetadata, reference
from ..reference import linear, logits, pack_linear
from . import softmax_tiles
from .copy_blocks import copy_blocks
from .paged_decode import paged_decode
from .paged_prefill import paged_prefill
from .rms_norm import add_rms_norm, rms_norm
from .rope import rope
from .silu_mul import silu_mul
from .softmax_tiles import Scoring, TileShape, check_attention_inputs
from .write_kv import write_kv

__all__ = [
    "add_rms_norm",
    "allocate_kv",
    "copy_blocks",
    "linear",
    "logits",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]


def allocate_kv(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Zeroed K and V, each ``[num_blocks, block_size, num_kv_heads, head_dim]``; dtype float8_e4m3fn or e5m2 stores them narrowed.

    Raises ValueError for float8_e4m3fn on NVIDIA GPUs older than Ada (compute capability 8.9): Triton has no such type there.
    """
    gpu = softmax_tiles.architecture(device)
    if dtype == torch.float8_e4m3fn and gpu.startswith("sm_") and int(gpu[3:]) < 89:
        raise ValueError(f"K/V can be stored as float8_e4m3fn from compute capability 8.9 on, this is {gpu}; float8_e5m2 works")
    return reference.allocate_kv(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
    window: int | None = None, soft_cap: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal grouped-query attention of q ``[T, H, D]``, strided or not, through the block tables: ``[T, H, D]``, contiguous.

    Sequences with one query token go to the split decode kernel even in a mixed batch, so that a long context is spread over the
    GPU, and read what they share once (``tree_segments``); the others to the prefill kernel.  A row's bits depend on none of it
    (see ``softmax_tiles``).  Keys out of a ``window``'s reach are not read, up to a tile.  Nothing waits for the GPU, and grids
    follow shapes, ``max_query_len`` and ``max_seq_len``.  Rows that no sequence owns are left unset.
    """
    check_attention_inputs(q, k_cache, v_cache, metadata.tree_segments)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tiles, scoring = TileShape.of(q, k_cache), Scoring(scale, window, soft_cap)
    paged_decode(q, k_cache, v_cache, metadata, scoring, tiles, out)
    if metadata.max_query_len > 1:
        paged_prefill(q, k_cache, v_cache, metadata, scoring, tiles, out)
    return out
