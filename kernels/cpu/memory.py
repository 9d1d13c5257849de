"""Memory in huge pages for what a step reads from end to end: weights and K/V."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from .build import library

_HUGE_PAGE = 2 * 2**20
_CHUNK = 64 * 2**20  # bytes asked for at a time; what nobody touches is never given
_ALIGNMENT = 64
_lock = threading.Lock()
_rest = torch.empty(0, dtype=torch.uint8)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Untouched memory, aligned to 64 bytes, in huge pages where the system grants them.

    Tensors lie side by side in chunks of 64 MiB.  Each alone, a weight of less than 2 MiB would have small pages, and a decode
    step would miss the TLB for every 4 KiB that it reads.  A chunk is given back when the last tensor in it is.
    """
    global _rest
    size = math.prod(shape) * dtype.itemsize
    taken = -(-size // _ALIGNMENT) * _ALIGNMENT
    with _lock:
        if taken > len(_rest):
            _rest = _chunk(max(taken, _CHUNK))
        memory, _rest = _rest[:size], _rest[taken:]
    return memory.view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    with torch.inference_mode(False):  # whoever comes first, others may write into their part
        memory = torch.empty(size + _HUGE_PAGE, dtype=torch.uint8)
    library().radixkv_advise_huge_pages(memory.data_ptr(), memory.nbytes)
    first = -memory.data_ptr() % _HUGE_PAGE
    return memory[first : first + size]
