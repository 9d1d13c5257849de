"""Root-mean-square norm, alone or fused with the residual addition before it."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def norm_row(
    x, residual, weight, out, eps, x_outer_stride, x_inner_stride, inner,
    ADD: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program a row.  Row ``r`` of x starts at ``(r // inner) * x_outer_stride + (r % inner) * x_inner_stride``.

    Rounds to the storage dtype wherever a chain of torch operations would: Hugging Face's Llama does so before the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED)
    used = dim < WIDTH
    dtype = out.dtype.element_ty
    start = (row // inner) * x_outer_stride + (row % inner) * x_inner_stride
    values = tl.load(x + start + dim, mask=used, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * WIDTH + dim, mask=used, other=0.0).to(tl.float32)
        values = values.to(dtype).to(tl.float32)
        tl.store(residual + row * WIDTH + dim, values.to(dtype), mask=used)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = normed.to(dtype).to(tl.float32) * tl.load(weight + dim, mask=used, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + dim, scaled.to(dtype), mask=used)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if x.stride(-1) != 1 or x.dim() not in (2, 3) or not (residual is None or residual.is_contiguous()):
        raise ValueError("rms_norm takes two or three dimensions with unit stride over the last, and a contiguous residual")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    outer_stride, inner_stride, inner = (x.stride(0), x.stride(1), x.shape[1]) if x.dim() == 3 else (x.stride(0), 0, 1)
    width = x.shape[-1]
    padded = triton.next_power_of_2(width)
    norm_row[(x.numel() // width,)](
        x, residual, weight, out, eps, outer_stride, inner_stride, inner,
        ADD=residual is not None, WIDTH=width, PADDED=padded, num_warps=min(8, max(1, padded // 256)),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in float32; x may be a strided view ``[T, H, D]`` of a fused projection."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``residual += x`` in place (contiguous), then ``rms_norm(residual)``."""
    return _launch(x, residual, weight, eps)
