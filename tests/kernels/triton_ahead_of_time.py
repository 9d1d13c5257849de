"""Compile what the Triton backend launches for GPUs that aren't there; prints one JSON line per binary.

Run by test_triton_compile.py in a process of its own, as Triton decides between compiling and interpreting when it is imported.
The backend's own functions run on CPU tensors, the launch replaced by a recorder, so what is compiled is what would be launched.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from radixkv.kernels import AttentionMetadata, load_backend

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
MATRIX_INSTRUCTION = re.compile(r"\b(wgmma\.mma_async\S*|tcgen05\.mma\.\S*|mma\.sync\S*|v_mfma_\w+)")

launches: list[tuple[JITFunction, dict[str, Any]]] = []


def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    launches.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))


def compile_launch(kernel: JITFunction, arguments: dict[str, Any], target: GPUTarget) -> Any:
    """Compile as the launch would: types, constants and 16-byte alignment derived from the arguments."""
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
            signature[parameter.name] = TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = aligned and isinstance(value, int) and value % 16 == 0
        if aligned and signature[parameter.name] not in ("constexpr", "fp32"):
            attributes[index,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=arguments)


def launch_attention(dtype: torch.dtype, head_dim: int, group: int, block_size: int) -> None:
    """Record decode, its merge, and prefill for two KV heads and q as a view into fused QKV."""
    backend = load_backend("triton")
    k_cache, v_cache = backend.allocate_kv(4, block_size, 2, head_dim, dtype, torch.device("cpu"))
    tokens = torch.zeros(2, dtype=torch.int64)
    metadata = AttentionMetadata(
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), torch.zeros(1, 16, dtype=torch.int32),
        tokens, tokens, max_query_len=2, max_seq_len=1024,
    )  # fmt: skip
    q = torch.zeros(2, 2 * group + 4, head_dim, dtype=dtype)[:, : 2 * group]
    backend.paged_attention(q, k_cache, v_cache, metadata, head_dim**-0.5)


def launch_the_rest(dtype: torch.dtype) -> None:
    """Record every other kernel, at the shapes of SmolLM2-135M."""
    backend = load_backend("triton")
    k_cache, v_cache = backend.allocate_kv(4, 16, 3, 64, dtype, torch.device("cpu"))
    tokens = torch.zeros(2, dtype=torch.int64)
    qkv = torch.zeros(2, 15, 64, dtype=dtype)
    q, k, v = qkv.split((9, 3, 3), dim=1)
    backend.write_kv(k, v, k_cache, v_cache, tokens)
    backend.copy_blocks(k_cache, v_cache, torch.zeros(1, 3, dtype=torch.int64))
    backend.rope(q, k, tokens, torch.zeros(8, 64))
    x = torch.zeros(2, 576, dtype=dtype)
    backend.rms_norm(q, x[0, :64], 1e-5)
    backend.add_rms_norm(x, x.clone(), x[0], 1e-5)
    backend.silu_mul(torch.zeros(2, 3072, dtype=dtype))


def main(target: str, attention: list[list[Any]], rest: list[str]) -> None:
    """Compile for the target: attentions by dtype, head dim, group and block size; the other kernels by dtype."""
    JITFunction.run = record
    for dtype, *shape in attention:
        launch_attention(getattr(torch, dtype), *shape)
    for dtype in rest:
        launch_the_rest(getattr(torch, dtype))
    for kernel, arguments in launches:
        compiled = compile_launch(kernel, arguments, TARGETS[target])
        binary, assembly = ("hsaco", "amdgcn") if TARGETS[target].backend == "hip" else ("cubin", "ptx")
        facts = {
            "kernel": kernel.__name__,
            "target": target,
            "dtype": str(next(a.dtype for a in arguments.values() if isinstance(a, torch.Tensor))),
            "head_dim": arguments.get("HEAD_DIM"),
            "is_elf": compiled.asm[binary][:4] == b"\x7fELF",
            "shared_bytes": compiled.metadata.shared,
            "instructions": sorted(set(MATRIX_INSTRUCTION.findall(compiled.asm[assembly]))),
        }
        print(json.dumps(facts))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
