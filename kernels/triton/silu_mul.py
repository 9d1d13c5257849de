"""The gated activation of Llama's feed-forward layer."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gate_slice(gate_up, out, width, SLICE: tl.constexpr):
    """Program (token, slice of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    used = column < width
    gate = tl.load(gate_up + token * (2 * width) + column, mask=used, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * width) + width + column, mask=used, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)  # rounded before the product, as two torch operations would
    tl.store(out + token * width + column, (silu.to(tl.float32) * up).to(out.dtype.element_ty), mask=used)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for contiguous ``[T, 2 I]`` holding gate then up: ``[T, I]``."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    gate_slice[(num_tokens, triton.cdiv(width, 1024))](gate_up, out, width, SLICE=1024)
    return out
