"""Memory that weights and K/V are taken from: aligned, disjoint, side by side, and given back."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from radixkv.kernels import cpu
from radixkv.kernels.cpu import memory

pytestmark = pytest.mark.skipif(not cpu.is_native(torch.float32), reason="needs a C compiler")


@pytest.fixture(autouse=True)
def fresh_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_rest", torch.empty(0, dtype=torch.uint8))


def bytes_of(tensor: Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def test_tensors_have_their_shape_are_aligned_and_share_no_byte() -> None:
    wanted = [
        ((3, 5), torch.float32),
        ((7,), torch.bfloat16),
        ((0, 4), torch.int64),
        ((1, 1), torch.uint8),
        ((1000, 33), torch.float32),
    ]
    tensors = [memory.empty(shape, dtype).fill_(i) for i, (shape, dtype) in enumerate(wanted)]
    for i, (tensor, (shape, dtype)) in enumerate(zip(tensors, wanted, strict=True)):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert (tensor == i).all()


def test_small_ones_lie_side_by_side_from_a_huge_page_on() -> None:
    first, second = (memory.empty((100_001,), torch.uint8) for _ in range(2))
    assert first.data_ptr() % 2**21 == 0
    assert second.data_ptr() == first.data_ptr() + 100_032


def test_one_larger_than_a_chunk_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CHUNK", 4096)
    small = memory.empty((4000,), torch.uint8)
    large = memory.empty((3, 2**20), torch.float32).fill_(2)
    after = memory.empty((10,), torch.float32).fill_(3)
    spans = sorted((bytes_of(tensor) for tensor in (small, large, after)), key=lambda span: span.start)
    assert all(a.stop <= b.start for a, b in pairwise(spans))
    assert large.data_ptr() % 2**21 == 0
    assert (large == 2).all()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what is resident from /proc")
def test_a_chunk_is_given_back_with_the_last_tensor_in_it() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    first, second = (memory.empty((24 * 2**20,), torch.uint8).fill_(1) for _ in range(2))
    last = memory.empty((24 * 2**20,), torch.uint8)  # of the next chunk
    before = resident()
    del first
    assert resident() > before - 2**20
    del second
    assert resident() < before - 40 * 2**20
    del last


def test_memory_taken_in_inference_mode_may_be_written_outside_it() -> None:
    with torch.inference_mode():
        memory.empty((10,), torch.float32)
    memory.empty((10,), torch.float32).zero_()
