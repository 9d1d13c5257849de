"""The arithmetic that decode and prefill share, so that a row gets the same bits from either.

Keys are reduced in splits of ``SPLIT`` at absolute positions; inside a split, tile by tile with an online softmax
(FlashAttention); splits are merged in order of position (Flash-Decoding).  What else is in the batch, what it shares, and where
prefill was cut into chunks decide only which program does a row's work.  Both kernels have one tile shape, and so one matrix
instruction.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 256
"""Keys per split: enough of them to fill a GPU when one long sequence decodes, few enough that partial results stay small."""

LOG2_E = math.log2(math.e)
STORAGE_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What K and V may be stored in beside q's dtype."""

METADATA = ["query_start_loc", "seq_lens", "block_tables", "tree_segments"]
"""Read one by one, so their alignment shouldn't select (and compile, while requests wait) another variant of a kernel."""


@functools.cache
def architecture(device: torch.device) -> str:
    """What Triton compiles for, ``sm_90`` or ``gfx942`` for example; ``cpu`` where it interprets."""
    if device.type != "cuda":
        return "cpu"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@dataclass(frozen=True, slots=True)
class TileShape:
    """Compile-time shape of the attention tiles: it depends on the model, the block size and the GPU, never on the batch.

    Rows, warps and stages are such that no register is spilled to memory on the GPUs that ``python -m bench kernels`` compiles for.
    """

    head_dim: int
    padded_dim: int
    group: int
    block_size: int
    rows: int
    """Query rows, a row being one query head of one token: at least a token's whole group."""
    keys: int
    options: dict[str, int]

    @classmethod
    def of(cls, q: Tensor, k_cache: Tensor) -> TileShape:
        """The shape for q ``[T, H, D]`` over blocks of ``k_cache``; key tiles hold 16 KB, which fits twice buffered into 64 KB."""
        block_size, num_kv_heads, head_dim = k_cache.shape[1:]
        padded_dim = max(16, triton.next_power_of_2(head_dim))
        size = q.element_size()
        group = q.shape[1] // num_kv_heads
        gpu = architecture(q.device)
        amd, latest = gpu.startswith("gfx"), gpu.startswith(("sm_9", "sm_10"))
        # The latest GPUs' instructions take 64 rows at a time, but leave too few registers to widen wide heads in.
        rows = 64 if padded_dim <= 128 or (latest and k_cache.element_size() == size) else 32
        if size == 4:  # summed without matrix units, where idle rows would cost a decode dear
            rows = 16
        if amd:  # twice as many threads a warp
            options = {"num_warps": 4, "num_stages": 2}
        else:  # three stages: the block table, the keys and values it leads to, and the products
            options = {"num_warps": 4 if size == 2 and padded_dim <= 64 else 8, "num_stages": 3}
            options["maxnreg"] = 255  # as many as there are: left to itself, ptxas spills a few to fit one more program in
        return cls(
            head_dim=head_dim,
            padded_dim=padded_dim,
            group=group,
            block_size=block_size,
            rows=max(rows, triton.next_power_of_2(group)),
            keys=min(32 if amd else 64, 16384 // (padded_dim * size)),
            options=options,
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
            "SPLIT": SPLIT,
            "enable_fp_fusion": False,  # or two kernels could round one formula differently
            **self.options,
        }


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a row scores its keys: ``q . k * scale``, soft-capped or not, over all keys up to its own or the last ``window``."""

    scale: float
    window: int | None
    soft_cap: float | None

    def __post_init__(self) -> None:
        if (self.window is not None and self.window < 1) or (self.soft_cap is not None and not self.soft_cap > 0):
            raise ValueError(f"window must be at least 1 and soft_cap more than 0, or None; got {self.window}, {self.soft_cap}")

    @property
    def factor(self) -> float:
        """From a dot product to the exponent of two of its weight, or with a cap to that of ``tanh``'s ``exp(2 x)``."""
        return self.scale * LOG2_E if self.soft_cap is None else self.scale * LOG2_E * 2 / self.soft_cap

    def constants(self) -> dict[str, int | float]:
        """The kernels' compile-time arguments; zero is none.  The cap is in units of log2."""
        return {"WINDOW": self.window or 0, "CAP_LOG2": (self.soft_cap or 0.0) * LOG2_E}


def check_attention_inputs(q: Tensor, k_cache: Tensor, v_cache: Tensor, tree_segments: Tensor | None) -> None:
    """Raise ValueError for what the kernels would silently misread."""
    if tree_segments is not None and (
        tree_segments.dtype != torch.int32 or tree_segments.dim() != 2 or tree_segments.stride() != (4, 1)
    ):
        raise ValueError(f"tree_segments must be contiguous int32 [P, 4], got {tree_segments.dtype} {tuple(tree_segments.shape)}")
    if q.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()) or k_cache.shape != v_cache.shape:
        raise ValueError("q needs unit stride over head_dim; k_cache and v_cache need one shape, and to be contiguous")
    stored = k_cache.dtype
    if (
        stored != v_cache.dtype
        or stored not in (q.dtype, *STORAGE_DTYPES)
        or q.dtype not in (torch.float16, torch.bfloat16, torch.float32)
    ):
        raise ValueError(
            "q, k_cache and v_cache need one dtype of float16, bfloat16, float32, or the caches float8_e4m3fn or float8_e5m2; "
            f"got {q.dtype}, {stored}, {v_cache.dtype}"
        )


@triton.jit
def attend_tile(
    q, acc, top, total, first, end, position, k_head, v_head, block_table, token_stride, score_scale,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, CAP_LOG2: tl.constexpr,
):  # fmt: skip
    """Fold keys ``first`` to ``first + KEYS`` into the running softmax: weighted sum acc ``[R, D]``, maximum and total ``[R]``.

    Row ``r`` sees keys up to ``position[r]``, and no more than ``WINDOW`` of them unless that is 0; ``end`` lies behind them
    all, and from there on nothing is read.  A row that sees no key keeps its bits.  K and V are widened to q's dtype, exactly.
    """
    key = first + tl.arange(0, KEYS)
    dim = tl.arange(0, PADDED_DIM)
    readable = tl.minimum(key, end - 1)  # rather than a mask: those of a whole tile take more registers than there are
    block = tl.load(block_table + readable // BLOCK_SIZE).to(tl.int64)
    token = (block * BLOCK_SIZE + readable % BLOCK_SIZE) * token_stride
    k = tl.load(k_head + token[None, :] + dim[:, None], mask=(dim < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
    if CAP_LOG2 > 0:
        power = tl.exp2(-tl.abs(scores))  # tanh(x) is (1 - p) / (1 + p), where p is exp(-2 x), and can't overflow
        bounded = CAP_LOG2 * ((1.0 - power) / (1.0 + power))
        scores = tl.where(scores < 0, -bounded, bounded)
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen &= key[None, :] > position[:, None] - WINDOW
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key seen yet: -inf - -inf would be NaN
    decay = tl.exp2(top - safe_top)
    weights = tl.exp2(scores - safe_top[:, None])
    total = total * decay + tl.sum(weights, 1)
    v = tl.load(v_head + token[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return acc, new_top, total


@triton.jit
def merge(acc, top, total, next_acc, next_top, next_total):
    """Append a split's softmax to that of the splits before it.  A split of which a row saw nothing changes no bit of it."""
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
