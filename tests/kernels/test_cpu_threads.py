"""The CPU kernels' thread pool: right under oversubscription, from several callers at once, and after a fork."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radixkv.kernels import cpu
from radixkv.platform import torch_threads

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def many_threads() -> Iterator[None]:
    with torch_threads(8):
        yield


def test_thousands_of_short_calls_on_more_threads_than_cores_stay_right(many_threads: None) -> None:
    weight, x = torch.randn(640, 32), torch.randn(8, 32)
    packed = cpu.pack_linear(weight, None)
    expected = cpu.linear(x, packed)
    torch.testing.assert_close(expected, x @ weight.T)
    for _ in range(2000):
        assert torch.equal(cpu.linear(x, packed), expected)


def test_callers_in_several_threads_do_not_disturb_each_other(many_threads: None) -> None:
    packed = cpu.pack_linear(torch.randn(640, 64), None)
    inputs = [torch.randn(20, 64).bfloat16().float() for _ in range(3)]
    expected = [cpu.linear(x, packed) for x in inputs]
    right: list[bool] = []

    def call(i: int) -> None:
        torch.set_num_threads(8)  # torch keeps this for each thread
        right.extend(torch.equal(cpu.linear(inputs[i], packed), expected[i]) for _ in range(500))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive()
    assert right == [True] * 1500


def run(code: str) -> str:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_forked_child_computes_without_its_parents_threads() -> None:
    code = """
import os, torch
from radixkv.kernels import cpu
from radixkv.platform import torch_threads
torch.set_num_threads(3)
packed, x = cpu.pack_linear(torch.randn(640, 64), None), torch.randn(20, 64)
expected = cpu.linear(x, packed)
child = os.fork()
same = all(torch.equal(cpu.linear(x, packed), expected) for _ in range(50))
if child == 0:
    os._exit(0 if same else 1)
print(same, os.waitpid(child, 0)[1])
"""
    assert run(code).split() == ["True", "0"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_kernels_bring_no_second_openmp_runtime() -> None:
    code = """
import torch
from radixkv.kernels import cpu
from radixkv.platform import torch_threads
cpu.linear(torch.zeros(64, 64), cpu.pack_linear(torch.zeros(640, 64), None))
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "omp" in line.split("/")[-1]}))
"""
    (runtime,) = run(code).split()
    assert "torch" in runtime
