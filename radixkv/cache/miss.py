"""Miss: why a prompt's uncached tokens were not cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from radixkv.cache.node import EvictionStamp
from radixkv.cache.tokens import Edge, Tokens, edge_tokens

MissReason = Literal["new", "diverged", "evicted", "partial_block", "in_flight", "last_token", "namespace"]

WINDOW = 8
"""Tokens shown on each side of the place where prompts part."""


class Parting(NamedTuple):
    """Where a prompt left all that the cache knows, and what both say there."""

    position: int
    """Tokens that the prompt shares with an earlier one."""
    ours: Tokens
    """The prompt's tokens around ``position``: up to 8 before it and up to 8 from it on."""
    theirs: Tokens
    """The same of an earlier prompt."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The uncached tokens of one prompt by reason; each has exactly one, in this order along the prompt.

    ``in_flight``: another running sequence is computing them now.  ``evicted``: they were cached and have been evicted.
    ``partial_block``: an earlier sequence had them, in a block that was not full or could not be copied.  ``diverged``: an
    earlier sequence goes on otherwise from there.  ``new``: nothing known goes on from there.  ``last_token``: all was known, but
    the last token is always computed, for its logits.
    """

    in_flight: int
    evicted: int
    partial_block: int
    diverged: int
    new: int
    last_token: int
    parting: Parting | None
    """Of ``diverged`` tokens."""
    evicted_seconds_ago: float | None
    """Of ``evicted`` tokens."""
    evicted_blocks_since: int | None
    """Of ``evicted`` tokens: under LRU a cache larger by about this many blocks would still have held the first of them."""

    @property
    def num_tokens(self) -> int:
        return self.in_flight + self.evicted + self.partial_block + self.diverged + self.new + self.last_token


class Finding(NamedTuple):
    """What ``acquire`` found out about a miss, at the least cost; most are never looked at."""

    in_flight: int
    evicted: int
    partial_block: int
    diverged: int
    unknown: int
    """Tokens beyond the known ones: all of them are diverged, or all are new; if there are none, the last token is computed
    anyway."""
    position: int
    """Tokens of the prompt that were known."""
    theirs: Edge
    """What an earlier sequence has from its token ``position - theirs_before`` on."""
    theirs_before: int
    stamp: EvictionStamp | None
    time: float
    evicted_blocks: int
    """In all, when the prompt was looked up."""

    def by_reason(self) -> dict[str, int]:
        """The tokens of :meth:`miss` by reason, those with none left out; a fraction of its cost."""
        counts = {
            "in_flight": self.in_flight,
            "evicted": self.evicted,
            "partial_block": self.partial_block,
            "diverged": self.diverged,
        }
        counts["new"] = self.unknown - self.diverged
        counts["last_token"] = 0 if self.unknown else 1
        return {reason: count for reason, count in counts.items() if count}

    def parting(self, prompt: Tokens) -> Parting | None:
        """That of :meth:`miss`."""
        if not self.diverged:
            return None
        at, before = self.position, min(self.position, WINDOW)
        theirs = edge_tokens(self.theirs)[self.theirs_before : self.theirs_before + WINDOW]
        return Parting(at, prompt[at - before : at + WINDOW], np.concatenate((prompt[at - before : at], theirs)))

    def miss(self, prompt: Tokens) -> Miss:
        stamp = self.stamp if self.evicted else None
        return Miss(
            in_flight=self.in_flight,
            evicted=self.evicted,
            partial_block=self.partial_block,
            diverged=self.diverged,
            new=self.unknown - self.diverged,
            last_token=0 if self.unknown else 1,
            parting=self.parting(prompt),
            evicted_seconds_ago=max(0.0, self.time - stamp.time) if stamp else None,
            evicted_blocks_since=self.evicted_blocks - stamp.evicted_before if stamp else None,
        )
