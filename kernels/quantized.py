"""A weight of 4 or 8 bits as GGUF's Q4_0, Q4_1 and Q8_0 have it: codes, and a scale for each 32 inputs of an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""


class QuantizedWeight(NamedTuple):
    """A weight ``[N, K]``: ``scale * code + offset``, in float32, each scale and offset for 32 inputs of one output."""

    scales: Tensor
    """float16 ``[N, K / 32]``, finite"""
    offsets: Tensor | None
    """float16 ``[N, K / 32]``, finite, with codes of 4 bits; None with codes of 8 bits, which have none."""
    codes: Tensor
    """uint8 ``[N, K]`` from 0 to 15, or int8 ``[N, K]``"""

    @property
    def bits(self) -> int:
        """4 or 8"""
        return 8 if self.offsets is None else 4

    def dequantize(self) -> Tensor:
        """float32 ``[N, K]``: what the ``gguf`` package makes of the same bytes, to the bit."""
        scales = self.scales.float().repeat_interleave(GROUP, 1)
        values = scales * self.codes
        return values if self.offsets is None else values + self.offsets.float().repeat_interleave(GROUP, 1)


def concatenate(weights: Sequence[QuantizedWeight | None]) -> QuantizedWeight | None:
    """One under the other, or None where they aren't all quantized to the same number of bits."""
    known = [weight for weight in weights if weight is not None]
    if not known or len(known) < len(weights) or len({weight.bits for weight in known}) > 1:
        return None
    scales, offsets, codes = zip(*known, strict=True)
    return QuantizedWeight(torch.cat(scales), torch.cat(offsets) if known[0].offsets is not None else None, torch.cat(codes))
