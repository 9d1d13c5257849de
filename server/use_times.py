"""UseTimes: when cached prefixes were used last, in seconds, where the cache only counts how many sequences have ended since."""

from __future__ import annotations

from bisect import bisect_left

from radixkv.cache import Snapshot

EVERY_SECONDS = 1.0
EXACTNESS = 0.02
"""Samples closer together than this share of their age are one."""
THINNED = 1024
"""Samples from which on they are thinned; of a year there are left some 700."""


class UseTimes:
    """Pairs of a count of ended sequences and a time, about one a second while sequences end.

    So an age in seconds is too small by up to a second, a step, and 2 % of the age.  O(1) a step, amortised.
    """

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []

    def note(self, num_ended: int, now: float, *, idle: bool) -> None:
        """So many sequences have ended until ``now``; where the engine goes ``idle``, there may be no step for long."""
        samples = self._samples
        if samples:
            ended, time = samples[-1]
            if num_ended == ended or (now - time < EVERY_SECONDS and not idle and num_ended > ended):
                return
            if num_ended < ended:  # the engine has begun anew
                samples.clear()
            elif len(samples) > 1 and now - samples[-2][1] < EVERY_SECONDS:
                samples.pop()
        samples.append((num_ended, now))
        if len(samples) > THINNED:
            self._thin(now)

    def _thin(self, now: float) -> None:
        kept = self._samples[:1]
        for sample, following in zip(self._samples[1:], self._samples[2:], strict=False):
            if following[1] - kept[-1][1] > EXACTNESS * (now - following[1]):
                kept.append(sample)
        self._samples = [*kept, self._samples[-1]]

    def fill(self, snapshot: Snapshot, num_ended: int, now: float) -> None:
        """Put seconds beside ages that are counted in sequences."""
        for node in snapshot.nodes:
            if node.age is not None:
                at = bisect_left(self._samples, (num_ended - node.age, 0.0))
                node.idle_seconds = max(0.0, now - self._samples[at][1]) if at < len(self._samples) else 0.0
