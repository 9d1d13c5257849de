"""Triton's smaller kernels against the reference, in the interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.kernels import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param  # type: ignore[no-any-return]


def close(actual: Tensor, expected: Tensor) -> None:
    """To a unit in the last place at each of two roundings, of a float32 result that may differ in its own last places."""
    torch.testing.assert_close(actual, expected, rtol=max(2 * torch.finfo(actual.dtype).eps, 2e-6), atol=1e-6)


def fused_qkv(dtype: torch.dtype, head_dim: int = 80) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(5, 10, head_dim, device=DEVICE).to(dtype).split((6, 2, 2), dim=1)
    return q, k, v


@pytest.mark.parametrize("width", [576, 80])
def test_norms_equal_the_reference(triton_backend: Any, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = torch.randn(3, 4, width, device=DEVICE).to(dtype)
    close(triton_backend.rms_norm(x, weight[0], 1e-5), reference.rms_norm(x, weight[0], 1e-5))
    residual_too = residual.clone()
    close(triton_backend.add_rms_norm(x, residual, weight[0], 1e-5), reference.add_rms_norm(x, residual_too, weight[0], 1e-5))
    assert torch.equal(residual, residual_too)


def test_rms_norm_of_strided_heads_equals_the_reference(triton_backend: Any, dtype: torch.dtype) -> None:
    _, k, _ = fused_qkv(dtype)
    weight = torch.randn(80, device=DEVICE).to(dtype)
    close(triton_backend.rms_norm(k, weight, 1e-5), reference.rms_norm(k, weight, 1e-5))
    with pytest.raises(ValueError, match="unit stride"):
        triton_backend.rms_norm(k.transpose(1, 2), weight, 1e-5)


def test_silu_mul_equals_the_reference(triton_backend: Any, dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 1500, device=DEVICE).to(dtype) * 4
    close(triton_backend.silu_mul(gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("head_dim", [64, 80])
def test_rope_equals_the_reference_in_place_and_leaves_the_values_alone(
    triton_backend: Any, dtype: torch.dtype, head_dim: int
) -> None:
    q, k, v = fused_qkv(dtype, head_dim)
    expected = [x.clone() for x in (q, k, v)]
    positions = torch.tensor([0, 3, 99, 4, 1], device=DEVICE)
    angles = torch.rand(100, head_dim // 2, device=DEVICE) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    reference.rope(expected[0], expected[1], positions, cos_sin)
    triton_backend.rope(q, k, positions, cos_sin)
    for actual, wanted in zip((q, k), expected, strict=False):
        close(actual, wanted)
    assert torch.equal(v, expected[2])


@pytest.mark.parametrize("block_size", [1, 4])
def test_write_kv_stores_at_its_slots_and_a_slot_of_minus_one_writes_nothing(
    triton_backend: Any, dtype: torch.dtype, block_size: int
) -> None:
    _, k, v = fused_qkv(dtype)
    caches, expected = torch.randn(2, 2, 8, block_size, 2, 80, device=DEVICE).to(dtype)
    expected.copy_(caches)
    slots = torch.tensor([7, -1, 0, -1, 5], device=DEVICE)
    triton_backend.write_kv(k, v, *caches, slots)
    reference.write_kv(k, v, *expected, slots)
    assert torch.equal(caches, expected)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_write_kv_rounds_to_8_bits_and_saturates(triton_backend: Any, dtype: torch.dtype, stored: torch.dtype) -> None:
    caches, expected = (triton_backend.allocate_kv(8, 4, 2, 80, stored, torch.device(DEVICE)) for _ in range(2))
    k, v = torch.randn(2, 30, 2, 80, device=DEVICE).mul(300).to(dtype)
    if dtype != torch.float16:
        k[0] *= 1000  # beyond e5m2's largest
    v[0, 0, 0] = float("nan")
    slots = torch.arange(30, device=DEVICE)
    triton_backend.write_kv(k, v, *caches, slots)
    reference.write_kv(k, v, *expected, slots)
    limit = torch.finfo(stored).max
    for cache, wanted, x in zip(caches, expected, (k, v), strict=True):
        rounded = x.clamp(-limit, limit).to(stored).float()
        torch.testing.assert_close(cache.float().view(-1, 2, 80)[:30], rounded, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(cache.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def test_a_gpu_without_a_float8_type_is_refused_it_at_the_door(triton_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device(DEVICE)
    for gpu, known in (("sm_80", False), ("sm_89", True), ("sm_90", True), ("sm_100", True), ("gfx942", True)):
        monkeypatch.setattr(triton_backend.softmax_tiles, "architecture", lambda device, gpu=gpu: gpu)
        triton_backend.allocate_kv(1, 4, 1, 64, torch.float8_e5m2, device)
        if known:
            triton_backend.allocate_kv(1, 4, 1, 64, torch.float8_e4m3fn, device)
        else:
            with pytest.raises(ValueError, match="float8_e5m2 works"):
                triton_backend.allocate_kv(1, 4, 1, 64, torch.float8_e4m3fn, device)


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
def test_copies_are_made_in_order_and_only_the_leading_rows(
    triton_backend: Any, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    caches, expected = torch.randn(2, 2, 6, 16, 3, 64, device=DEVICE).to(stored or dtype)
    expected.copy_(caches)
    copies = torch.tensor([[0, 1, 9], [1, 2, 16], [4, 5, 0], [2, 3, 1]], device=DEVICE)
    triton_backend.copy_blocks(*caches, copies)
    reference.copy_blocks(*expected, copies)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))
