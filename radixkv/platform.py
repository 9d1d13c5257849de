"""What this machine computes on, and in which type."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from radixkv.config import Device, Dtype


def choose_device(device: Device) -> torch.device:
    """Resolve ``auto``.  Raises ``ValueError`` when a GPU is asked for and there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be 'cpu' or 'auto' here: torch finds no CUDA or ROCm device")
    return torch.device(device)


def choose_dtype(dtype: Dtype, saved: str, device: torch.device) -> torch.dtype:
    """Resolve ``auto``: the type the model was saved in where the hardware computes in it, otherwise float32."""
    if dtype != "auto":
        resolved: torch.dtype = getattr(torch, dtype)
        return resolved
    if device.type == "cuda":
        return torch.float16 if saved == "float16" else torch.bfloat16
    return torch.bfloat16 if saved != "float32" and _cpu_has_bfloat16() else torch.float32


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated.  On a CPU whose system does not tell, all there are."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Have torch use ``count`` threads within a block.  Costs about a microsecond."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
