"""Read a GGUF file's header: metadata as plain Python values, tensors as slices of one memory map.

``gguf.GGUFReader`` keeps a numpy view of each vocabulary string and takes seconds to open a model; this takes about 0.1 s.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies: ``shape`` is row-major (rows first), ``offset`` in bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class GGUFFile:
    """An open GGUF file.  Raises ``ValueError`` naming the file where it isn't one, or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 4
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path} is damaged: its header can't be read ({error})") from error

    def _read_header(self) -> None:
        version, num_tensors, num_fields = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"{self.path} is GGUF version {version}; versions 2 and 3 are supported")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(self._unpack("<I")[0])
        infos = []
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._unpack("<I")
            *dims, kind, offset = self._unpack(f"<{num_dims}QIQ")
            try:
                infos.append((name, tuple(reversed(dims)), GGMLQuantizationType(kind), offset))
            except ValueError:
                raise ValueError(f"{self.path}: tensor {name} has the unknown GGUF type {kind}") from None
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: GGUFTensor(shape, kind, start + offset) for name, shape, kind, offset in infos}
        for name, tensor in self.tensors.items():
            if tensor.offset + self._num_bytes(tensor) > len(self._map):
                raise ValueError(f"{self.path} is cut short: it ends before tensor {name} does")

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """Tensor ``name`` as float32 in its row-major shape; raises ``ValueError`` for a type that ``gguf`` can't read."""
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, self._num_bytes(tensor), tensor.offset)
        # The package takes plain floats as such, and other types as bytes, 16 rows at a time.  Rows of whole quantisation blocks
        # that make such a group 2^18 values take 0.75 s for SmolLM2, where the tensors' own, shorter rows take 1.15 s.
        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(tensor.kind)
        values_per_block, _ = GGML_QUANT_SIZES[tensor.kind]
        num_values = math.prod(tensor.shape)
        num_rows = math.gcd(num_values // int(values_per_block), 16 * max(1, num_values >> 18))
        rows = raw.view(plain) if plain is not None else raw.reshape(num_rows, -1)
        try:
            values: NDArray[np.float32] = dequantize(rows, tensor.kind).reshape(tensor.shape)
        except NotImplementedError:
            raise ValueError(f"{self.path}: tensor {name} is of type {tensor.kind.name}, which gguf can't dequantise") from None
        return values

    def quantized(self, name: str) -> tuple[NDArray[np.float16], NDArray[np.float16] | None, NDArray[np.uint8 | np.int8]] | None:
        """Scales, offsets and codes of tensor ``name``, as :class:`radixkv.kernels.quantized.QuantizedWeight` has them.

        None for other types than Q4_0, Q4_1 and Q8_0, and where a scale or an offset isn't finite.
        """
        tensor = self.tensors[name]
        if tensor.kind not in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0):
            return None
        values_per_group, group_bytes = map(int, GGML_QUANT_SIZES[tensor.kind])
        rows, columns = tensor.shape
        raw = np.frombuffer(self._map, np.uint8, self._num_bytes(tensor), tensor.offset)
        groups = raw.reshape(rows, columns // values_per_group, group_bytes)

        def half(start: int) -> NDArray[np.float16]:
            return np.ascontiguousarray(groups[..., start : start + 2]).view(np.float16)[..., 0]

        scales, offsets = half(0), None
        if tensor.kind is GGMLQuantizationType.Q8_0:
            codes = np.ascontiguousarray(groups[..., 2:]).view(np.int8)
        else:
            with np.errstate(over="ignore"):  # a code of Q4_0 stands for 8 less; 8 times the scale is exact, or infinite
                offsets = half(2) if tensor.kind is GGMLQuantizationType.Q4_1 else scales * np.float16(-8)
            nibbles = groups[..., group_bytes - values_per_group // 2 :]
            codes = np.concatenate([nibbles & 15, nibbles >> 4], -1)  # inputs 0 .. 15, then the others
        if not np.isfinite(scales).all() or (offsets is not None and not np.isfinite(offsets).all()):
            return None
        return scales, offsets, codes.reshape(rows, columns)

    @staticmethod
    def _num_bytes(tensor: GGUFTensor) -> int:
        items, size = GGML_QUANT_SIZES[tensor.kind]
        return math.prod(tensor.shape) // int(items) * int(size)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._map, self._at)
        start = self._at + 8
        if start + length > len(self._map):
            raise struct.error("a string runs past the end")
        self._at = start + length
        return self._map[start : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._unpack("<IQ")
            if item in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[item]}"))
            return [self._value(item) for _ in range(count)]
        return self._unpack(f"<{_SCALARS[kind]}")[0]
