"""Every Triton kernel compiles ahead of time, with no GPU present, for the GPUs it is meant for, and spills no register."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from bench.fresh_process import ChildError, run_fresh
from bench.triton_compile import OTHER_DTYPES, SHAPES, SHARED_MEMORY_LIMIT, amd_registers, nvidia_registers

pytest.importorskip("triton")

ATTENTION = {"decode_splits", "merge_splits", "prefill_tiles"}
OTHERS = {"scatter_rows", "copy_slice", "rotate_head", "norm_row", "gate_slice"}


def compile_for(target: str, attention: list[dict[str, Any]], rest: list[tuple[str, str]]) -> list[dict[str, Any]]:
    arguments = {"target": target, "attention": attention, "rest": rest}
    try:
        facts: list[dict[str, Any]] = run_fresh("bench.triton_compile:compile_kernels", arguments, lambda done, total: None)
    except ChildError as error:
        pytest.skip(str(error))
    return facts


def check(binaries: list[dict[str, Any]]) -> None:
    instructions = defaultdict(list)
    for binary in binaries:
        assert binary["is_elf"], binary
        assert binary["shared_bytes"] <= SHARED_MEMORY_LIMIT[binary["target"]], binary
        assert binary["spilled_bytes"] == 0, binary
        assert 0 < binary["registers"] <= (512 if binary["target"].startswith("gfx") else 255), binary
        if "ROWS" in binary["constants"]:
            instructions[binary["target"], binary["dtype"], str(binary["constants"])].append(binary["instructions"])
    for (target, dtype, _), (decode, prefill) in instructions.items():
        # One instruction for both is what lets a row have the same bits from either; float32 has none on NVIDIA.
        assert decode == prefill
        assert decode or (dtype == "float32" and target.startswith("sm_"))


@pytest.mark.parametrize(("target", "rest"), [("sm_90", OTHER_DTYPES[:1]), ("gfx942", [])])
def test_the_kernels_compile_for_a_gpu_of_each_kind(target: str, rest: list[tuple[str, str]]) -> None:
    binaries = compile_for(target, SHAPES[:1], rest)
    assert {binary["kernel"] for binary in binaries} == (ATTENTION | OTHERS if rest else ATTENTION)
    check(binaries)


@pytest.mark.full
@pytest.mark.parametrize("target", SHARED_MEMORY_LIMIT)
def test_every_kernel_compiles_for_every_target(target: str) -> None:
    binaries = compile_for(target, SHAPES, OTHER_DTYPES)
    assert {binary["kernel"] for binary in binaries} == ATTENTION | OTHERS
    narrow = {binary["kv_dtype"] for binary in binaries} & {"float8_e4m3fn", "float8_e5m2"}
    assert narrow == ({"float8_e5m2"} if target == "sm_80" else {"float8_e4m3fn", "float8_e5m2"})
    check(binaries)


def test_spills_are_read_from_what_the_compilers_say() -> None:
    usage = " Function decode_splits:\n  REG:255 STACK:16 SHARED:25088 LOCAL:8 CONSTANT[0]:624 TEXTURE:0 SURFACE:0 SAMPLER:0\n"
    assert nvidia_registers(usage) == {"registers": 255, "spilled_bytes": 24, "parked_scalars": 0}
    metadata = (
        "{}    .private_segment_fixed_size: {}\n    .sgpr_spill_count: 7\n    .vgpr_count:     96\n    .vgpr_spill_count: {}\n"
    )
    assert amd_registers(metadata.format("", 0, 2)) == {"registers": 96, "spilled_bytes": 8, "parked_scalars": 7}
    assert amd_registers(metadata.format("", 64, 2))["spilled_bytes"] == 64
