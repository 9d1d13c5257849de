"""Products of quantized weights have the bits of the same products with the weight widened to bfloat16 beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from radixkv.kernels import cpu
from radixkv.kernels.quantized import QuantizedWeight, concatenate

pytestmark = pytest.mark.usefixtures("native")
# Around the rows of a panel, of one matrix tile, of two and four (then the weight is another operand), and of an item of work.
ROWS = (1, 2, 4, 6, 7, 16, 17, 31, 32, 33, 48, 64, 65, 150, 300)


def make(bits: int, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    """Scales of all sizes that float16 has, denormal ones among them, and both signs."""
    generator = torch.Generator().manual_seed(seed)

    def scales() -> Tensor:
        size = torch.randint(-24, 5, (outputs, inputs // 32), generator=generator)
        return (torch.randn(size.shape, generator=generator) * 2.0**size).half()

    if bits == 8:
        return QuantizedWeight(scales(), None, torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8))
    return QuantizedWeight(
        scales(), scales(), torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    )  # fmt: skip


def rows_of(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()


def packed_both_ways(weight: QuantizedWeight, bias: Tensor | None = None) -> tuple[Any, Any]:
    as_stored = cpu.pack_quantized(weight, bias, torch.bfloat16)
    assert as_stored is not None
    return as_stored, cpu.pack_linear(weight.dequantize().bfloat16(), bias)


def assert_same_bits(weight: QuantizedWeight, rows: tuple[int, ...]) -> None:
    outputs, inputs = weight.codes.shape
    as_stored, widened = packed_both_ways(weight, torch.randn(outputs).bfloat16())
    x = rows_of(max(rows), inputs)
    for count in rows:
        for product in (cpu.linear, cpu.logits, *([cpu.gated_linear] if outputs % 32 == 0 else [])):
            got, expected = product(x[:count], as_stored), product(x[:count], widened)
            assert got.dtype is expected.dtype
            assert torch.equal(got, expected), (product.__name__, count)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (17, 64), (48, 96), (96, 576), (160, 1536), (33, 640)])
def test_a_quantized_product_has_the_bits_of_the_widened_one(bits: int, outputs: int, inputs: int) -> None:
    assert_same_bits(make(bits, outputs, inputs), ROWS)


@pytest.mark.full
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("flags", [
    ("-DVBYTES=16", "-DMATRIX_TILES=0"),
    ("-DVBYTES=32", "-DMATRIX_TILES=0"),
    ("-DVBYTES=64", "-DMATRIX_TILES=0"),
    ("-DVBYTES=64", "-DMATRIX_TILES=0", "-DDOT_PAIRS=1"),
    ("-DVBYTES=64", "-DEMULATE_TILES", "-DDOT_PAIRS=1"),
    ("-DVBYTES=32", "-DEMULATE_TILES", "-DDOT_PAIRS=1"),
])  # fmt: skip
def test_the_same_at_every_vector_width_and_on_matrix_tiles(
    bits: int, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = cpu.build.load(cpu.build.build(flags))
    monkeypatch.setattr(cpu, "library", lambda: library)
    for outputs, inputs in ((17, 64), (96, 576), (33, 640)):
        assert_same_bits(make(bits, outputs, inputs), (1, 6, 7, 17, 33, 150))


def test_a_quantized_weight_is_as_small_in_memory_as_in_its_file() -> None:
    for bits, bytes_a_group in ((4, 20), (8, 34)):
        as_stored, _ = packed_both_ways(make(bits, 160, 64))
        assert as_stored.weight.nbytes == 160 * 2 * bytes_a_group


def test_the_number_of_threads_changes_no_bit_of_a_quantized_product(monkeypatch: pytest.MonkeyPatch) -> None:
    as_stored, _ = packed_both_ways(make(4, 333, 640))
    x = rows_of(300, 640)
    results = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(cpu, "_num_threads", threads)
        results.append([cpu.linear(x[:rows], as_stored) for rows in (1, 5, 30, 300)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_quantized_weights_are_left_to_torch_where_it_computes_and_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make(4, 32, 64)
    assert cpu.pack_quantized(weight, None, torch.float32) is None
    monkeypatch.setattr(cpu, "is_native", lambda dtype: False)
    assert cpu.pack_quantized(weight, None, torch.bfloat16) is None


def test_weights_are_concatenated_where_all_have_the_same_number_of_bits() -> None:
    weights = [make(4, 3, 64), make(4, 5, 64, seed=1)]
    together = concatenate(weights)
    assert together is not None
    assert torch.equal(together.dequantize(), torch.cat([weight.dequantize() for weight in weights]))
    assert concatenate([*weights, make(8, 5, 64)]) is None
    assert concatenate([*weights, None]) is None
