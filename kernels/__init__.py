"""Kernels, installed as ``radixkv.kernels``: one function per operation, the backend chosen by device.

A backend is a module with the functions of :class:`Backend`.  ``reference`` is plain torch and the oracle of the others;
``cpu`` is native code; ``triton`` runs on GPUs.  No backend knows requests or the radix tree: it gets block tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """Shape of a packed batch of ``S`` sequences and ``T`` query tokens (decodes and prefill chunks alike).

    Sequence ``s`` owns query rows ``query_start_loc[s]`` to ``query_start_loc[s + 1]``; they are its last tokens, so row ``i``
    of ``q`` rows sits at position ``seq_lens[s] - q + i`` and attends to positions up to its own.
    """

    query_start_loc: Tensor
    """int32 ``[S + 1]``"""
    seq_lens: Tensor
    """int32 ``[S]``: tokens of each sequence, those of this step included."""
    block_tables: Tensor
    """int32 ``[S, max_blocks]``: physical block ids; entries past a sequence's last block are never read."""
    slot_mapping: Tensor
    """int64 ``[T]``: ``block * block_size + offset`` where each token's K/V goes; -1 writes nothing."""
    positions: Tensor
    """int64 ``[T]``"""
    max_query_len: int
    max_seq_len: int
    tree_segments: Tensor | None = None
    """int32 ``[P, 4]``: first sequence, number of sequences, first token, end token.  These neighbouring sequences hold the tokens
    in the same blocks, so their K/V need be read only once.  Both ends are multiples of the block size.  The segments of a
    sequence are disjoint; those nearer to the root come first and are shared by all that share a later one.  A row of zero
    sequences is padding.  None or left out: nothing is known to be shared."""

    def of_last_tokens(self, rows: Tensor) -> AttentionMetadata:
        """The batch's queries ``rows`` alone, int64 ``[n]`` in order: the last ones of some sequences; the others have none."""
        starts = torch.searchsorted(rows, self.query_start_loc.to(rows.dtype), out_int32=True)
        positions, slots = self.positions[rows], self.slot_mapping[rows]
        return replace(self, query_start_loc=starts, positions=positions, slot_mapping=slots, max_query_len=1)


class DecoderLayer(NamedTuple):
    """One decoder layer's weights; ``next_norm`` is the input norm of the layer after it, or the model's last norm."""

    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    post_norm: Tensor
    next_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class DecoderShape(NamedTuple):
    """What all layers of a model have in common; ``cos_sin`` as :meth:`Backend.rope` takes it."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    cos_sin: Tensor


FusedLayers = Callable[[Tensor, Tensor, AttentionMetadata, Tensor | None], Tensor]
"""All layers as one call: normed input, residual, batch and rows wanted, as in ``Llama.forward``, to the last norm's output."""


class Backend(Protocol):
    """What a backend module provides.  Shapes: T tokens, H query heads, G KV heads, D head dim, N x K weights.

    One that runs all layers of a model in one call has ``fuse_layers(layers, kv, shape) -> FusedLayers | None``, too; one that
    multiplies quantized weights as they are, ``pack_quantized(weight, bias, dtype)``, None where it can't: see ``cpu``.
    """

    def allocate_kv(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Zeroed K and V storage of one layer, in the layout this backend reads fastest; dimension 0 is the block."""
        ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Any:
        """Prepare a weight ``[N, K]`` and bias ``[N]`` for :meth:`linear`, once, at load time."""
        ...

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """``x @ weight.T + bias``: ``[T, K] -> [T, N]`` in ``x``'s dtype."""
        ...

    def logits(self, x: Tensor, packed: Any) -> Tensor:
        """:meth:`linear` widened to float32."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dimension, computed in float32."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, then ``rms_norm(residual)``."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``[T, 2 I]`` holding gate then up: ``[T, I]``."""
        ...

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate q ``[T, H, D]`` and k ``[T, G, D]`` in place (halves convention, as Hugging Face Llama).

        q and k may be strided views into one fused QKV tensor; ``cos_sin`` is float32 ``[max_positions, D]``: D/2 cosines, then
        sines.
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store k and v ``[T, G, D]`` at their slots; a slot of -1 is skipped."""
        ...

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
        window: int | None = None, soft_cap: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Causal grouped-query attention of q ``[T, H, D]`` through the block tables: ``[T, H, D]``, contiguous.

        A row sees the last ``window`` keys up to its own, all of them by default.  Scores ``s = q . k * scale`` become
        ``soft_cap * tanh(s / soft_cap)`` if that is given (Gemma 2).  Raises ValueError where a backend has no such thing.
        """
        ...

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
        """For each row ``(source block, target block, num_rows)`` of int64 ``[C, 3]``, in order, copy the leading token rows."""
        ...


def backend_for(device: torch.device) -> Backend:
    """The backend that runs on ``device``: ``triton`` on CUDA and ROCm, ``cpu`` (native code, or torch) elsewhere.

    Raises ``ValueError`` that says what to install where Triton is missing.
    """
    try:
        return load_backend("triton" if device.type == "cuda" else "cpu")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError("device must be 'cpu' here, or Triton be installed for the GPU: pip install 'radixkv[gpu]'") from None


def load_backend(name: str) -> Backend:
    """The backend called ``name``: ``reference``, ``cpu`` or ``triton``."""
    return cast(Backend, importlib.import_module(f"radixkv.kernels.{name}"))
