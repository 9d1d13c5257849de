"""Retention: soft pinning that decays, so that it can delay an eviction but never prevent one."""

from __future__ import annotations

from typing import NamedTuple


class Retention(NamedTuple):
    """Evict this prefix after those without retention, for a while.

    It starts at ``priority`` and falls by one whenever ``seconds`` pass without a hit; a hit restores it, at 0 it is over.  While
    other blocks can be evicted those go first; of retained ones the lowest priority goes first, then whatever the policy says.
    """

    priority: int
    seconds: float

    def validate(self) -> Retention:
        """Self.  Raises ``ValueError`` naming the field and its limit."""
        if not (isinstance(self.priority, int) and not isinstance(self.priority, bool) and 1 <= self.priority <= 100):
            raise ValueError(f"retention.priority must be an integer from 1 to 100, got {self.priority!r}")
        if not (isinstance(self.seconds, int | float) and 0 < self.seconds <= 1e9):
            raise ValueError(f"retention.seconds must be above 0 and at most 1e9, got {self.seconds!r}")
        return self

    def hold(self, now: float) -> Hold:
        return Hold(self, self.priority, now + self.seconds)


class Hold(NamedTuple):
    """A node's retention now: its present priority, and when that falls by one."""

    retention: Retention
    priority: int
    until: float

    def at(self, now: float) -> Hold | None:
        """What is left of it at ``now``."""
        return self if now < self.until else self.decayed(now)

    def decayed(self, now: float) -> Hold | None:
        """What is left of it at ``now``, when ``until`` has passed."""
        seconds = self.retention.seconds
        periods = 1 + int((now - self.until) // seconds)
        if periods >= self.priority:
            return None
        return Hold(self.retention, self.priority - periods, self.until + periods * seconds)

    def outlasts(self, other: Hold | None) -> bool:
        """Whether it protects better than ``other``: by priority, then by the time left."""
        return other is None or (self.priority, self.until) > (other.priority, other.until)
