"""Scatter a step's keys and values into their blocks, narrowed where those are stored in 8 bits."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .softmax_tiles import STORAGE_DTYPES


@triton.jit
def narrowed(x, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """``x`` in ``dtype``, whose largest finite value is ``LIMIT``: larger ones become that, as infinities would poison a row."""
    x = x.to(tl.float32)
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x)).to(dtype)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def scatter_rows(
    k, v, k_cache, v_cache, slot_mapping, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    HEAD_DIM: tl.constexpr, ROW: tl.constexpr, PADDED_ROW: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program a token: all its KV heads, to slot ``slot_mapping[token]`` unless that is negative."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    element = tl.arange(0, PADDED_ROW)
    used = element < ROW
    head, dim = element // HEAD_DIM, element % HEAD_DIM
    keys = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=used)
    values = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=used)
    if LIMIT > 0:
        keys, values = narrowed(keys, k_cache.dtype.element_ty, LIMIT), narrowed(values, v_cache.dtype.element_ty, LIMIT)
    tl.store(k_cache + slot * ROW + element, keys, mask=used)
    tl.store(v_cache + slot * ROW + element, values, mask=used)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k and v ``[T, G, D]``, strided or not, at their slots; a slot of -1 is skipped.

    Caches of float8_e4m3fn or float8_e5m2 get each value rounded, and the dtype's largest for what lies beyond.  There is no scale:
    keys and values of language models stay well below 448, and these formats lose no precision to being far from it.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    row = num_kv_heads * head_dim
    scatter_rows[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        HEAD_DIM=head_dim, ROW=row, PADDED_ROW=triton.next_power_of_2(row),
        LIMIT=torch.finfo(k_cache.dtype).max if k_cache.dtype in STORAGE_DTYPES else 0.0,
    )  # fmt: skip
