"""Whole requests against a cache, as an engine would make them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from radixkv.cache import Lease, PrefixCache

LONG = np.arange(16, dtype=np.int32)

explaining = partial(PrefixCache, attribution=True)
"""A cache as an engine has it: tests that don't say otherwise are of this one, which does more."""


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def joined(*parts: Any) -> np.ndarray:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def run(cache: PrefixCache, prompt: np.ndarray, namespace: str = "", **options: Any) -> Lease:
    """A whole request: acquire, compute, publish; still leased."""
    lease = cache.acquire(prompt, namespace=namespace, **options)
    assert lease is not None
    cache.take_copies()
    cache.publish(lease, prompt, len(prompt))
    cache.take_copies()
    return lease


def serve(cache: PrefixCache, prompt: np.ndarray, namespace: str = "", **options: Any) -> Lease:
    """A whole request, released at its end."""
    lease = run(cache, prompt, namespace, **options)
    cache.release(lease)
    return lease


def cached(num_blocks: int = 32, block_size: int = 4, *prompts: np.ndarray, **options: Any) -> PrefixCache:
    """A cache of ``num_blocks`` that has served ``prompts`` one after another."""
    cache = explaining(num_blocks, block_size, **options)
    for prompt in prompts:
        serve(cache, prompt)
    return cache


def held(cache: PrefixCache, prompt: np.ndarray, namespace: str = "") -> int:
    """Leading blocks of ``prompt`` that are cached."""
    return cache.match(prompt, namespace).num_blocks


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
