"""The arithmetic that decode and prefill share, so that a row gets the same bits from either.

Keys are reduced in segments of ``SEGMENT`` at absolute positions; inside a segment, tile by tile with an online softmax
(FlashAttention); segments are merged in order of position (Flash-Decoding).  What else is in the batch, and where prefill was
cut into chunks, decides only which program does a row's work.  Both kernels have one tile shape, and so one matrix instruction.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 256
"""Keys per segment: enough of them to fill a GPU when one long sequence decodes, few enough that partial results stay small."""

LOG2_E = 1.4426950408889634

METADATA = ["query_start_loc", "seq_lens", "block_tables"]
"""Read one by one, so their alignment shouldn't select (and compile, while requests wait) another variant of a kernel."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """Compile-time shape of the attention tiles: it depends on the model and the block size, never on the batch."""

    head_dim: int
    padded_dim: int
    group: int
    block_size: int
    rows: int
    """Query rows, a row being one query head of one token: at least a token's whole group."""
    keys: int
    num_warps: int

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor) -> TileShape:
        """The shape for q ``[T, H, D]`` over blocks of ``k_cache``; key tiles hold 16 KB, which fits twice buffered into 64 KB."""
        block_size, num_kv_heads, head_dim = k_cache.shape[1:]
        padded_dim = max(16, triton.next_power_of_2(head_dim))
        size = q.element_size()
        group = q.shape[1] // num_kv_heads
        return cls(
            head_dim=head_dim,
            padded_dim=padded_dim,
            group=group,
            block_size=block_size,
            # float32 is summed without matrix units, where idle rows would cost a decode dear.
            rows=max(64 if size == 2 else 16, triton.next_power_of_2(group)),
            keys=min(64, 16384 // (padded_dim * size)),
            num_warps=8 if padded_dim > 128 else 4,
        )

    def constants(self) -> dict[str, int | bool]:
        """The kernels' compile-time arguments and launch options."""
        return {
            "HEAD_DIM": self.head_dim,
            "PADDED_DIM": self.padded_dim,
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
            "ROWS": self.rows,
            "KEYS": self.keys,
            "SEGMENT": SEGMENT,
            "num_warps": self.num_warps,
            "num_stages": 3,  # one for the block table, one for the keys and values it leads to, one for the products
            "enable_fp_fusion": False,  # or two kernels could round one formula differently
        }


def check_attention_inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError for what the kernels would silently misread."""
    if q.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()) or k_cache.shape != v_cache.shape:
        raise ValueError("q needs unit stride over head_dim; k_cache and v_cache need one shape, and to be contiguous")
    if not (q.dtype == k_cache.dtype == v_cache.dtype) or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q, k_cache and v_cache need one dtype of float16, bfloat16, float32; got {q.dtype}, {k_cache.dtype}")


@triton.jit
def attend_tile(
    q, acc, top, total, first, end, position, k_head, v_head, block_table, token_stride, scale_log2,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Fold keys ``first`` to ``first + KEYS`` into the running softmax: weighted sum acc ``[R, D]``, maximum and total ``[R]``.

    Row ``r`` sees keys up to ``position[r]``; keys from ``end`` on are not read.  A row that sees none keeps its bits.
    """
    key = first + tl.arange(0, KEYS)
    inside = key < end
    block = tl.load(block_table + key // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    token = (block * BLOCK_SIZE + key % BLOCK_SIZE) * token_stride
    dim = tl.arange(0, PADDED_DIM)
    k = tl.load(k_head + token[None, :] + dim[:, None], mask=inside[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scale_log2
    scores = tl.where(inside[None, :] & (key[None, :] <= position[:, None]), scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
    decay = tl.exp2(top - safe_top)
    weights = tl.exp2(scores - safe_top[:, None])
    total = total * decay + tl.sum(weights, 1)
    v = tl.load(v_head + token[:, None] + dim[None, :], mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def merge(acc, top, total, next_acc, next_top, next_total):
    """Append a segment's softmax to that of the segments before it.  A segment of which a row saw nothing changes no bit of it."""
    new_top = tl.maximum(top, next_top)
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    decay = tl.exp2(top - safe_top)
    weight = tl.exp2(next_top - safe_top)
    acc = acc * decay[:, None] + next_acc * weight[:, None]
    return acc, new_top, total * decay + next_total * weight


@triton.jit
def normalized(acc, total):
    """``acc / total``, and zero for a row that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
