"""Copy the leading token rows of blocks to other blocks: how a prompt that leaves the tree inside a block keeps what it shares."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_copies"], do_not_specialize_on_alignment=["copies"])
def copy_slice(k_cache, v_cache, copies, num_copies, block_elements, row_elements, SLICE: tl.constexpr):
    """Program (slice): one slice of every copy.  It does the copies in order, so one may read what another wrote."""
    element = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    for copy in range(num_copies):
        source = tl.load(copies + copy * 3) * block_elements + element
        target = tl.load(copies + copy * 3 + 1) * block_elements + element
        used = element < tl.load(copies + copy * 3 + 2) * row_elements
        tl.store(k_cache + target, tl.load(k_cache + source, mask=used), mask=used)
        tl.store(v_cache + target, tl.load(v_cache + source, mask=used), mask=used)
        tl.debug_barrier()  # the next copy's loads may be spread over other threads than these stores


def copy_blocks(k_cache: Tensor, v_cache: Tensor, copies: Tensor) -> None:
    """For each row ``(source block, target block, num_rows)`` of int64 ``[C, 3]``, in order, copy the leading token rows."""
    if k_cache.element_size() == 1:  # not every GPU knows every 8-bit float
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    block_elements = k_cache.stride(0)
    slice_elements = min(1024, triton.next_power_of_2(block_elements))
    copy_slice[(triton.cdiv(block_elements, slice_elements),)](
        k_cache, v_cache, copies, copies.shape[0], block_elements, k_cache.stride(1), SLICE=slice_elements
    )
