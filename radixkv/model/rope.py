"""The rotary embedding's table of cosines and sines, with the context-extension schemes that Llama-family models ship with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixkv.model.config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """float32 ``[max_positions, head_dim]``: ``head_dim / 2`` cosines, then as many sines, times yarn's attention factor.

    RoPE: Su et al. 2021.  Computed in float32 step by step as transformers does, so that outputs agree with it.
    """
    inv_freq, attention_factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * attention_factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """float32 ``[head_dim / 2]``, and the factor for cosines and sines.  ``ValueError`` names a missing parameter."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq: Tensor = 1.0 / (rope.theta**exponents)
    if rope.frequency_factors:
        if len(rope.frequency_factors) != head_dim // 2:
            raise ValueError(f"rope_freqs has {len(rope.frequency_factors)} factors, the model needs {head_dim // 2}")
        return inv_freq / torch.tensor(rope.frequency_factors), 1.0
    try:
        if rope.kind == "linear":  # position interpolation: Chen et al. 2023
            return inv_freq / rope.scaling["factor"], 1.0
        if rope.kind == "llama3":
            return _llama3(rope, inv_freq), 1.0
        if rope.kind == "yarn":
            return _yarn(rope, head_dim, inv_freq)
    except KeyError as error:
        raise ValueError(f"rope scaling {rope.kind!r} lacks the parameter {error}") from None
    # "dynamic" changes nothing up to max_position_embeddings, where the engine stops anyway.
    return inv_freq, 1.0


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, those between blended."""
    factor, low, high = (rope.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    rotations = rope.scaling["original_max_position_embeddings"] / (2 * math.pi / inv_freq)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = (1 - blend) * inv_freq / factor + blend * inv_freq
    return scaled


def _yarn(rope: RopeConfig, head_dim: int, inv_freq: Tensor) -> tuple[Tensor, float]:
    """YaRN: Peng et al. 2023.  Interpolates pairs by how often they turn within the original context."""
    scaling = rope.scaling
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.get("beta_fast") or 32), pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _attention_factor(factor, scaling)


def _attention_factor(factor: float, scaling: Mapping[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)
