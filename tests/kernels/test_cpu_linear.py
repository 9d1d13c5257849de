"""The CPU backend's products, native and in torch: right, and with bits that don't depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixkv.kernels import cpu, reference
from radixkv.platform import torch_threads

EPS = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def make(rows: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return x, weight, bias


def check_against_float64(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    packed = cpu.pack_linear(weight, bias)
    got = cpu.linear(x, packed)
    wide_bias = None if bias is None else bias.double()
    expected = reference.linear(x.double(), (weight.double(), wide_bias))
    magnitude = x.double().abs() @ weight.double().abs().T + (0 if bias is None else bias.double().abs())
    # K roundings of the running sum in float32 and one of the result.
    bound = (x.shape[1] + 2) * 2**-24 * magnitude + EPS[x.dtype] * expected.abs()
    if x.dtype is torch.float16:
        bound += 8 * EPS[x.dtype] * magnitude  # torch may sum partial products in float16
    assert got.shape == expected.shape
    assert got.dtype is x.dtype
    assert ((got.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (15, 2), (16, 7), (17, 64), (40, 600), (100, 577), (130, 1200)])
def test_linear_agrees_with_float64_at_odd_shapes(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 29, 150):
        x, weight, bias = make(rows, outputs, inputs, dtype, seed=rows)
        check_against_float64(x, weight, bias)
        check_against_float64(x, weight, None)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["native-float32", "native-bfloat16"], indirect=True)  # torch_ops has no code of any one shape
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (3072, 576), (576, 1536), (49152, 576), (333, 4096)])
def test_linear_agrees_with_float64_at_model_shapes(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    for rows in (1, 4, 16) if outputs > 10000 else (1, 4, 16, 64, 512):
        check_against_float64(*make(rows, outputs, inputs, dtype))


@pytest.mark.parametrize("dtype", ["native-float32", "native-bfloat16"], indirect=True)  # torch promises nothing
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 576), (72, 1536)])
def test_a_rows_bits_depend_neither_on_the_number_of_rows_nor_on_its_place(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x, weight, bias = make(512, outputs, inputs, dtype)
    packed = cpu.pack_linear(weight, bias)
    whole = cpu.linear(x, packed)
    for rows in (*range(1, 41), 100, 145, 289):
        for first in (0, 7):
            assert torch.equal(cpu.linear(x[first : first + rows], packed), whole[first : first + rows]), (rows, first)


@pytest.mark.parametrize("dtype", ["native-float32", "native-bfloat16"], indirect=True)  # torch promises nothing
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    x, weight, bias = make(300, 333, 700, dtype)
    packed = cpu.pack_linear(weight, bias)
    results = []
    for count in (1, 2, 3):
        with torch_threads(count):
            results.append([cpu.linear(x[:rows], packed) for rows in (1, 5, 30, 300)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("dtype", ["native-float32", "native-bfloat16"], indirect=True)  # torch has none
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 40), (96, 64), (640, 576)])
def test_a_gated_product_has_the_bits_of_product_and_activation(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x, weight, bias = make(300, outputs, inputs, dtype)
    for packed in (cpu.pack_linear(weight, bias), cpu.pack_linear(weight, None)):
        assert isinstance(packed, cpu.PackedLinear)
        for rows in (1, 5, 16, 17, 31, 32, 33, 64, 100, 300):
            assert torch.equal(cpu.gated_linear(x[:rows], packed), cpu.silu_mul(cpu.linear(x[:rows], packed))), rows


def test_logits_are_the_product_widened(dtype: torch.dtype) -> None:
    x, weight, bias = make(40, 203, 64, dtype)
    packed = cpu.pack_linear(weight, bias)
    for rows in (1, 6, 16, 33, 40):
        widened = cpu.logits(x[:rows], packed)
        assert widened.dtype is torch.float32
        assert torch.equal(widened, cpu.linear(x[:rows], packed).float())


@pytest.mark.usefixtures("native")
def test_a_gated_product_that_is_not_of_whole_tiles_is_refused() -> None:
    _, weight, _ = make(1, 40, 64, torch.float32)
    packed = cpu.pack_linear(weight, None)
    assert isinstance(packed, cpu.PackedLinear)
    with pytest.raises(ValueError, match="multiple of 32 outputs, got 40"):
        cpu.gated_linear(torch.zeros(1, 64), packed)


def test_rows_that_are_not_contiguous_are_multiplied_alike(dtype: torch.dtype) -> None:
    x, weight, bias = make(9, 40, 64, dtype)
    packed = cpu.pack_linear(weight, bias)
    wide = torch.full((9, 100), float("nan"), dtype=dtype)
    wide[:, 3:67] = x
    assert torch.equal(cpu.linear(wide[:, 3:67], packed), cpu.linear(x, packed))


def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    _, weight, bias = make(1, 40, 64, dtype)
    assert cpu.linear(torch.empty(0, 64, dtype=dtype), cpu.pack_linear(weight, bias)).shape == (0, 40)


@pytest.mark.usefixtures("native")
def test_a_wrong_width_or_dtype_is_refused() -> None:
    _, weight, _ = make(1, 40, 64, torch.float32)
    packed = cpu.pack_linear(weight, None)
    with pytest.raises(ValueError, match="rows of 64"):
        cpu.linear(torch.zeros(1, 63), packed)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        cpu.linear(torch.zeros(1, 64, dtype=torch.bfloat16), packed)


@pytest.mark.usefixtures("native")
def test_bfloat16_weights_stay_bfloat16_in_memory() -> None:
    weight = torch.zeros(160, 64, dtype=torch.bfloat16)
    packed = cpu.pack_linear(weight, None)
    assert isinstance(packed, cpu.PackedLinear)
    assert packed.weight.nbytes == weight.nbytes
