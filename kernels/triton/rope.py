"""Rotary position embedding of q and k, in place and in one launch."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rotate_head(
    q, k, positions, cos_sin, q_token_stride, q_head_stride, k_token_stride, k_head_stride, num_heads,
    HALF: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the first ``num_heads`` heads are q's, the others k's."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, PADDED)
    used = dim < HALF
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + dim
    cos = tl.load(angles, mask=used, other=0.0)
    sin = tl.load(angles + HALF, mask=used, other=0.0)
    if head < num_heads:
        x = q + token * q_token_stride + head * q_head_stride + dim
    else:
        x = k + token * k_token_stride + (head - num_heads) * k_head_stride + dim
    first = tl.load(x, mask=used, other=0.0).to(tl.float32)
    second = tl.load(x + HALF, mask=used, other=0.0).to(tl.float32)
    tl.store(x, (first * cos - second * sin).to(q.dtype.element_ty), mask=used)
    tl.store(x + HALF, (second * cos + first * sin).to(q.dtype.element_ty), mask=used)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate q ``[T, H, D]`` and k ``[T, G, D]`` in place: element ``i`` pairs with ``i + D/2`` (RoFormer, halves convention)."""
    num_tokens, num_heads, head_dim = q.shape
    rotate_head[(num_tokens, num_heads + k.shape[1])](
        q, k, positions, cos_sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), num_heads,
        HALF=head_dim // 2, PADDED=triton.next_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip
