"""radixkv: an LLM inference engine whose prompts share their key-value cache through a radix tree."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.cache import BlockPool, PrefixCache, RadixTree
    from radixkv.config import EngineConfig
    from radixkv.llm import LLM
    from radixkv.sampling_params import SamplingParams
    from radixkv.server.client import AsyncClient, Client
    from radixkv.structured_outputs import StructuredOutputs

__version__ = "0.1.0"

# Imported on first use, so that `from radixkv import PrefixCache` loads no torch.
_HOMES = {
    "AsyncClient": "radixkv.server.client",
    "BlockPool": "radixkv.cache",
    "Client": "radixkv.server.client",
    "EngineConfig": "radixkv.config",
    "LLM": "radixkv.llm",
    "PrefixCache": "radixkv.cache",
    "RadixTree": "radixkv.cache",
    "SamplingParams": "radixkv.sampling_params",
    "StructuredOutputs": "radixkv.structured_outputs",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "BlockPool",
    "Client",
    "EngineConfig",
    "PrefixCache",
    "RadixTree",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'radixkv' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
