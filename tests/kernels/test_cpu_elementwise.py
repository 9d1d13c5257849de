"""The CPU backend's norms, SwiGLU and rotary embedding, native and in torch, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from radixkv.kernels import cpu, reference

# Relative error: a few float32 roundings, or two roundings to the storage type.
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(got: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected, rtol=RTOL[got.dtype], atol=atol)


@pytest.mark.parametrize("dim", [1, 7, 16, 63, 64, 576, 2050])
def test_rms_norm_agrees_with_float64(dtype: torch.dtype, dim: int) -> None:
    x, weight = randn(19, dim, dtype=dtype), randn(dim, dtype=dtype, seed=1)
    check(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))


def test_rms_norm_takes_heads_as_rows(dtype: torch.dtype) -> None:
    x, weight = randn(5, 3, 64, dtype=dtype), randn(64, dtype=dtype, seed=1)
    check(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6))


def test_add_rms_norm_adds_in_place_and_norms_the_sum_as_stored(dtype: torch.dtype) -> None:
    x, residual, weight = randn(9, 577, dtype=dtype), randn(9, 577, dtype=dtype, seed=1), randn(577, dtype=dtype, seed=2)
    total = residual + x
    got = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    check(got, reference.rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dim", [1, 8, 21, 1536])
def test_silu_mul_agrees_with_float64(dtype: torch.dtype, dim: int) -> None:
    gate_up = 4 * randn(11, 2 * dim, dtype=dtype)
    check(cpu.silu_mul(gate_up), reference.silu_mul(gate_up.double()))


def test_silu_is_accurate_over_the_whole_range(dtype: torch.dtype) -> None:
    extremes = torch.tensor([0.0, -0.0, 6e4, -6e4, -87.0, -88.5, 87.5, 1e-30])
    gate = torch.cat((torch.linspace(-80, 80, 20001), extremes)).to(dtype)
    got = cpu.silu_mul(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    expected = torch.nn.functional.silu(gate.double())
    rtol, atol = {torch.float32: (5e-7, 1e-35), torch.bfloat16: (2**-8, 1e-35), torch.float16: (2**-10, 2**-24)}[dtype]
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol)


def test_a_nan_is_not_hidden(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 3] = float("nan")
    assert cpu.silu_mul(x)[0, 3].isnan()
    assert cpu.rms_norm(x, torch.ones(64, dtype=dtype), 1e-5).isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 80), (2, 2, 6), (2, 1, 256)])
def test_rope_rotates_views_of_a_fused_tensor_and_leaves_the_rest(dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    tokens = 13
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    before = qkv.clone()
    q, k, v = (part.view(tokens, -1, dim) for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    positions = torch.randint(0, 500, (tokens,), generator=torch.Generator().manual_seed(3))
    angles = torch.arange(500)[:, None] / 10000 ** (torch.arange(dim // 2) * 2 / dim)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    wide_q, wide_k = q.double(), k.double()
    reference.rope(wide_q, wide_k, positions, cos_sin.double())
    cpu.rope(q, k, positions, cos_sin)
    check(q, wide_q, atol=RTOL[dtype])
    check(k, wide_k, atol=RTOL[dtype])
    assert torch.equal(v.flatten(1), before[:, -kv_heads * dim :])


def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    x, residual, weight = randn(600, 576, dtype=dtype), randn(600, 576, dtype=dtype, seed=1), randn(576, dtype=dtype, seed=2)
    operations: list[Callable[[slice], Tensor]] = [
        lambda rows: cpu.rms_norm(x[rows], weight, 1e-5),
        lambda rows: cpu.add_rms_norm(x[rows], residual[rows].clone(), weight, 1e-5),
        lambda rows: cpu.silu_mul(x[rows]),
    ]
    for operation in operations:
        whole = operation(slice(None))
        for rows in (slice(0, 1), slice(5, 8), slice(599, 600), slice(0, 17), slice(100, 300)):
            assert torch.equal(operation(rows), whole[rows])


@pytest.mark.usefixtures("native")
def test_layouts_the_kernels_cannot_read_are_refused() -> None:
    q = torch.zeros(4, 64, 9).transpose(1, 2)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        cpu.rope(q, torch.zeros(4, 3, 64), torch.zeros(4, dtype=torch.int64), torch.zeros(4, 64))
    with pytest.raises(ValueError, match="residual must be contiguous"):
        cpu.add_rms_norm(torch.zeros(2, 8), torch.zeros(8, 2).T, torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match=r"weight is torch\.float32"):
        cpu.rms_norm(torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-5)


@pytest.mark.parametrize("columns", [1, 15, 64, 1023, 1024, 5000, 49152])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_highest_finds_the_first_of_equals_as_numpy_does(rows: int, columns: int) -> None:
    x = randn(rows, columns, dtype=torch.bfloat16).float()  # so short that many are equal
    x[:, ::7] = -torch.inf
    x[0] = x[0].clamp(max=-0.0) if rows > 1 else 0.0
    x[-1, columns // 2] = -0.0
    at, values = cpu.highest(x)
    assert at.tolist() == x.numpy().argmax(-1).tolist()
    assert values.tolist() == x.amax(-1).tolist()


def test_highest_tells_nan_infinity_and_rows_of_nothing_apart() -> None:
    x = randn(5, 3000, dtype=torch.float32)
    x[0, [2900, 1500, 1501]] = torch.nan
    x[1, 40], x[1, 2999] = torch.inf, torch.nan
    x[2] = -torch.inf
    x[3, 2050] = torch.inf
    at, values = cpu.highest(x)
    assert at[:4].tolist() == x[:4].numpy().argmax(-1).tolist() == [1500, 2999, 0, 2050]
    assert values.isnan().tolist() == [True, True, False, False, False]
    assert values[2:4].tolist() == [-torch.inf, torch.inf]


def test_highest_takes_float32_rows_and_strided_ones() -> None:
    x = randn(4, 300, dtype=torch.float32)
    assert cpu.highest(x[:, ::3])[0].tolist() == x[:, ::3].argmax(-1).tolist()
    if cpu.is_native(torch.float32):
        with pytest.raises(TypeError, match="float32"):
            cpu.highest(x.bfloat16())
