"""What the Triton backend launches, compiled for GPUs that aren't there: registers, spills, shared memory, matrix instructions.

The backend's own functions run on CPU tensors, the launch replaced by a recorder, so what is compiled is what would be launched.
Triton decides between compiling and interpreting when it is imported, so call :func:`compile_kernels` through ``run_fresh``.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from radixkv.kernels import AttentionMetadata, load_backend

SHARED_MEMORY_LIMIT = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes that one program may have, by the targets we compile for."""

E4M3, E5M2 = {"kv_dtype": "float8_e4m3fn"}, {"kv_dtype": "float8_e5m2"}
GEMMA = {"window": 4096, "soft_cap": 50.0}
SHAPES: list[dict[str, Any]] = [
    {"dtype": dtype, "head_dim": head_dim, "group": group, "block_size": block_size, **options}
    for dtype, head_dim, group, block_size, options in (
        ("bfloat16", 64, 3, 16, {}),
        ("float16", 64, 16, 128, GEMMA),
        ("bfloat16", 80, 1, 8, {}),
        ("float16", 96, 5, 64, {}),
        ("bfloat16", 128, 4, 16, {}),
        ("bfloat16", 128, 8, 32, GEMMA),
        ("bfloat16", 256, 16, 16, {}),
        ("float16", 256, 2, 16, GEMMA),
        ("float32", 64, 32, 16, {}),
        ("float32", 128, 4, 16, {}),
        ("float32", 256, 1, 8, GEMMA),
        ("float16", 64, 7, 16, E4M3),
        ("float16", 80, 3, 16, E4M3),
        ("bfloat16", 128, 12, 16, E4M3 | GEMMA),
        ("float16", 128, 4, 32, E5M2),
        ("bfloat16", 256, 8, 16, E4M3),
        ("bfloat16", 256, 4, 16, E5M2 | GEMMA),
    )
]
"""Attention over every head dim, storage dtype, kind of score, and the spread of group and block sizes."""

OTHER_DTYPES = [("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float8_e5m2"), ("bfloat16", "float8_e4m3fn")]
"""Dtypes of activations and of K/V to compile the other kernels for."""

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_MATRIX_INSTRUCTION = re.compile(r"\b(wgmma\.mma_async\S*|tcgen05\.mma\.\S*|mma\.sync\S*|v_mfma_\w+)")

Launches = list[tuple[Any, dict[str, Any]]]


def compile_kernels(
    target: str, attention: Sequence[dict[str, Any]], rest: Sequence[Sequence[str]], progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Facts about each binary: attention's by the arguments of ``_launch_attention``, the other kernels' by dtype and that of K/V.

    What ``allocate_kv`` refuses on the target is left out.

    Raises ValueError where this version of Triton can't link for the target.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9's default, which it warns about unless it is said
    from triton.runtime.jit import JITFunction

    from radixkv.kernels.triton import softmax_tiles

    softmax_tiles.architecture = lambda device: target  # type: ignore[assignment]
    launches: Launches = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | options))

    JITFunction.run = record
    for shape in attention:
        if _stores(shape.get("kv_dtype", shape["dtype"])):
            _launch_attention(**shape)
    for dtype, kv_dtype in rest:
        if _stores(kv_dtype):
            _launch_the_rest(getattr(torch, dtype), getattr(torch, kv_dtype))
    facts = []
    for done, (kernel, arguments) in enumerate(launches):
        progress(done, len(launches))
        try:
            compiled = _compile(kernel, arguments, target)
        except Exception as error:
            if "ROCm linker" not in str(error):
                raise
            raise ValueError(f"this version of Triton needs a linker that isn't installed here: {error}") from None
        facts.append(_describe(kernel, arguments, compiled, target))
    return facts


def _stores(kv_dtype: str) -> bool:
    """Whether the backend agrees to store K and V so on the target."""
    try:
        load_backend("triton").allocate_kv(1, 16, 1, 64, getattr(torch, kv_dtype), torch.device("cpu"))
    except ValueError:
        return False
    return True


def _describe(kernel: Any, arguments: dict[str, Any], compiled: Any, target: str) -> dict[str, Any]:
    cuda = target.startswith("sm_")
    binary, assembly = compiled.asm["cubin" if cuda else "hsaco"], compiled.asm["ptx" if cuda else "amdgcn"]
    tensors = [str(a.dtype).removeprefix("torch.") for a in arguments.values() if isinstance(a, torch.Tensor)]
    cache = arguments.get("k_cache")
    return {
        "kernel": kernel.__name__,
        "target": target,
        "dtype": tensors[0],
        "kv_dtype": None if cache is None else str(cache.dtype).removeprefix("torch."),
        "constants": {name: value for name, value in arguments.items() if name.isupper()},
        "num_warps": compiled.metadata.num_warps,
        "is_elf": binary[:4] == b"\x7fELF",
        "shared_bytes": compiled.metadata.shared,
        "shared_limit": SHARED_MEMORY_LIMIT[target],
        "instructions": sorted(set(_MATRIX_INSTRUCTION.findall(assembly))),
        **(nvidia_registers(_resource_usage(binary)) if cuda else amd_registers(assembly)),
    }


def _resource_usage(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout


def nvidia_registers(usage: str) -> dict[str, int]:
    """From ``cuobjdump -res-usage``: a thread's registers, and bytes of stack, where ptxas spills to and nothing else lies."""
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {"registers": found["REG"], "spilled_bytes": found["STACK"] + found["LOCAL"], "parked_scalars": 0}


def amd_registers(assembly: str) -> dict[str, int]:
    """From the assembly's metadata: a thread's vector registers, bytes of them spilled, and scalar registers without a place.

    Those are parked in lanes of vector registers, never in memory.
    """
    found = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s*(\d+)$", assembly, re.MULTILINE)}
    return {
        "registers": found["vgpr_count"],
        "spilled_bytes": max(found["private_segment_fixed_size"], 4 * found["vgpr_spill_count"]),
        "parked_scalars": found["sgpr_spill_count"],
    }


def _compile(kernel: Any, arguments: dict[str, Any], target: str) -> Any:
    """Compile as the launch would: types, constants and 16-byte alignment derived from the arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = dict(arguments)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        specialize = not parameter.do_not_specialize
        aligned = specialize and not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or value is None or (specialize and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = aligned and isinstance(value, int) and value % 16 == 0
        if aligned and signature[parameter.name] not in ("constexpr", "fp32"):
            attributes[index,] = [["tt.divisibility", 16]]
    gpu = GPUTarget("cuda", int(target[3:]), 32) if target.startswith("sm_") else GPUTarget("hip", target, 64)
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=gpu, options=arguments)


def _launch_attention(
    dtype: str, head_dim: int, group: int, block_size: int, kv_dtype: str | None = None, window: int | None = None,
    soft_cap: float | None = None,
) -> None:  # fmt: skip
    """Record decode, its merge, and prefill for two KV heads and q as a view into fused QKV."""
    backend = load_backend("triton")
    item, stored = getattr(torch, dtype), getattr(torch, kv_dtype or dtype)
    k_cache, v_cache = backend.allocate_kv(4, block_size, 2, head_dim, stored, torch.device("cpu"))
    tokens = torch.zeros(2, dtype=torch.int64)
    metadata = AttentionMetadata(
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.zeros(1, 16, dtype=torch.int32),
        tokens, tokens, max_query_len=2, max_seq_len=1024,
    )  # fmt: skip
    q = torch.zeros(2, 2 * group + 4, head_dim, dtype=item)[:, : 2 * group]
    backend.paged_attention(q, k_cache, v_cache, metadata, head_dim**-0.5, window=window, soft_cap=soft_cap)


def _launch_the_rest(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Record every other kernel, at the shapes of SmolLM2-135M."""
    backend = load_backend("triton")
    k_cache, v_cache = backend.allocate_kv(4, 16, 3, 64, kv_dtype, torch.device("cpu"))
    tokens = torch.zeros(2, dtype=torch.int64)
    qkv = torch.zeros(2, 15, 64, dtype=dtype)
    q, k, v = torch.split(qkv, [9, 3, 3], dim=1)
    backend.write_kv(k, v, k_cache, v_cache, tokens)
    backend.copy_blocks(k_cache, v_cache, torch.zeros(1, 3, dtype=torch.int64))
    backend.rope(q, k, tokens, torch.zeros(8, 64))
    x = torch.zeros(2, 576, dtype=dtype)
    backend.rms_norm(q, x[0, :64], 1e-5)
    backend.add_rms_norm(x, x.clone(), x[0], 1e-5)
    backend.silu_mul(torch.zeros(2, 3072, dtype=dtype))
