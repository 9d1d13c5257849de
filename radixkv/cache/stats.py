"""What the cache has done: counters by namespace, and a picture of the blocks now."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

MAX_NAMESPACES = 1000
"""Namespaces counted one by one; those used longest ago are added up under ``OTHERS`` (salts may be as many as requests)."""

OTHERS = "(others)"


@dataclass(slots=True)
class HitCounts:
    """Prompts looked up and what was found of them."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, requests: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.requests += requests
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens served from the cache; 0 before the first request."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class Recorder:
    """Counts admissions in O(1) time and bounded memory."""

    total: HitCounts = field(default_factory=HitCounts)
    by_namespace: OrderedDict[str, HitCounts] = field(default_factory=OrderedDict)
    others: HitCounts = field(default_factory=HitCounts)
    evicted_blocks: int = 0

    def record(self, namespace: str, prompt_tokens: int, cached_tokens: int) -> None:
        self.total.add(1, prompt_tokens, cached_tokens)
        self.by_namespace.setdefault(namespace, HitCounts()).add(1, prompt_tokens, cached_tokens)
        self.by_namespace.move_to_end(namespace)
        if len(self.by_namespace) > MAX_NAMESPACES:
            _, oldest = self.by_namespace.popitem(last=False)
            self.others.add(oldest.requests, oldest.prompt_tokens, oldest.cached_tokens)

    def namespaces(self) -> dict[str, HitCounts]:
        return {**self.by_namespace, OTHERS: self.others} if self.others.requests else dict(self.by_namespace)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Blocks now, and counters since the start.  ``blocks_cached`` are unlocked and can be evicted."""

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_locked: int
    nodes: int
    evicted_blocks: int
    total: HitCounts
    namespaces: dict[str, HitCounts]
