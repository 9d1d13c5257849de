"""What the cache has done: counters by namespace, and a picture of the blocks now."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, fields, replace
from html import escape
from typing import Any, get_args

from radixkv.cache.miss import Finding, MissReason

MAX_NAMESPACES = 1000
"""Namespaces counted one by one; those used longest ago are added up under ``OTHERS`` (salts may be as many as requests)."""

OTHERS = "(others)"


@dataclass(slots=True)
class HitCounts:
    """Prompts looked up, what was found of them, and why the rest was not, in tokens (see :class:`~radixkv.cache.miss.Miss`)."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new: int = 0
    diverged: int = 0
    evicted: int = 0
    partial_block: int = 0
    in_flight: int = 0
    last_token: int = 0
    namespace: int = 0
    """New or diverged here, but cached in another namespace; known when a request ends, and never part of ``Lease.miss``."""

    def add(self, other: HitCounts) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def move_to_namespace(self, tokens: int, finding: Finding) -> None:
        """``tokens`` of those that ``finding`` calls new or diverged turn out to be cached in another namespace."""
        self.namespace += tokens
        if finding.diverged:
            self.diverged -= tokens
        else:
            self.new -= tokens

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens served from the cache; 0 before the first request."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def missed(self) -> dict[MissReason, int]:
        """Uncached prompt tokens by reason; all 0 without attribution."""
        return {reason: getattr(self, reason) for reason in get_args(MissReason)}


class Recorder:
    """Counts admissions in O(1) time and bounded memory."""

    def __init__(self) -> None:
        self._by_namespace: OrderedDict[str, HitCounts] = OrderedDict()
        self._others = HitCounts()
        self._last: str | None = None
        self._counts = HitCounts()
        """Those of namespace ``_last``."""

    def _switch(self, namespace: str) -> HitCounts:
        """The counters of a namespace other than the last one's."""
        by_namespace = self._by_namespace
        counts = by_namespace.get(namespace)
        if counts is None:
            counts = by_namespace[namespace] = HitCounts()
            if len(by_namespace) > MAX_NAMESPACES:
                self._others.add(by_namespace.popitem(last=False)[1])
        else:
            by_namespace.move_to_end(namespace)
        self._last, self._counts = namespace, counts
        return counts

    def record(self, namespace: str, prompt_tokens: int, cached_tokens: int, finding: Finding | None) -> HitCounts:
        """Count a prompt; returns where."""
        counts = self._counts if namespace == self._last else self._switch(namespace)
        counts.requests += 1
        counts.prompt_tokens += prompt_tokens
        counts.cached_tokens += cached_tokens
        if finding is None:
            return counts
        unknown = finding.unknown
        if finding.diverged:
            counts.diverged += unknown
        elif unknown:
            counts.new += unknown
        else:
            counts.last_token += 1
        if finding.evicted:
            counts.evicted += finding.evicted
        if finding.partial_block:
            counts.partial_block += finding.partial_block
        if finding.in_flight:
            counts.in_flight += finding.in_flight
        return counts

    def total(self) -> HitCounts:
        total = HitCounts()
        total.add(self._others)
        for counts in self._by_namespace.values():
            total.add(counts)
        return total

    def namespaces(self) -> dict[str, HitCounts]:
        """Copies of the counters."""
        namespaces = {name: replace(counts) for name, counts in self._by_namespace.items()}
        if self._others.requests:
            namespaces.setdefault(OTHERS, HitCounts()).add(self._others)
        return namespaces


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

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)

    def rows(self) -> list[dict[str, str | int | float]]:
        """A row for each namespace, missed tokens by reason among its columns: ``pandas.DataFrame(cache.stats().rows())``."""
        return [_row(name, counts) for name, counts in self.namespaces.items()]

    def _repr_html_(self) -> str:
        """In notebooks: all namespaces together and each by itself."""
        rows = [_row("all", self.total), *self.rows()]
        head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in rows[0])
        body = ""
        for row in rows:
            cells = (f"{value:.1%}" if isinstance(value, float) else escape(f"{value}") or "(default)" for value in row.values())
            body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>\n"
        blocks = (
            f"{self.blocks_total:,} blocks: {self.blocks_free:,} free, {self.blocks_cached:,} cached, {self.blocks_locked:,} "
            f"locked; {self.nodes:,} nodes, {self.evicted_blocks:,} blocks evicted so far"
        )
        return f"<p>{blocks}</p>\n<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _row(name: str, counts: HitCounts) -> dict[str, str | int | float]:
    return {
        "namespace": name,
        "requests": counts.requests,
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "hit_rate": counts.hit_rate,
        **{f"missed_{reason}": tokens for reason, tokens in counts.missed.items()},
    }
