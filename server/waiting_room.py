"""Bounds how many sequences wait for their first token, and shares that room among namespaces."""

from __future__ import annotations

import math
import time
from collections import Counter

from radixkv.server.errors import InvalidRequest, Overloaded

MAX_RETRY_AFTER = 60


class WaitingRoom:
    """Seats for sequences from their arrival until their first token.

    A namespace may have as many seats as are still free, of ``2 * limit`` in all (dynamic thresholds; Choudhury and Hahne 1998).
    So one that is alone has ``limit``, and half of what is free stays free for others whenever one fills up: after m of them, one
    after the other, ``2 * limit / 2**m``, so one with nothing waiting finds a seat while ``2**m <= limit``.  As sequences leave,
    those with more than their share, ``2 * limit / (m + 1)``, get no new seats before they have come down to it.

    All methods belong to one event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._taken: Counter[str] = Counter()
        self._last_wait = 0.0

    def check(self, namespace: str, count: int) -> None:
        """Raises ``Overloaded`` where ``count`` seats can't be had now, ``InvalidRequest`` where they never can."""
        if count > self.limit:
            raise InvalidRequest(f"n must be at most {self.limit} choices over all prompts (max-waiting), got {count}", param="n")
        free = 2 * self.limit - self._taken.total() - count
        if self._taken[namespace] + count > free:
            seconds = min(max(1, math.ceil(self._last_wait)), MAX_RETRY_AFTER)
            whose = f"in namespace {namespace!r} " if namespace else ""
            raise Overloaded(
                f"too many requests wait already: {self._taken[namespace]} {whose}and {self._taken.total()} in all "
                f"(max-waiting is {self.limit}); try again in {seconds} s",
                retry_after=seconds,
            )

    def enter(self, namespace: str, count: int) -> Seats:
        """Takes the seats, or raises as :meth:`check` does."""
        self.check(namespace, count)
        self._taken[namespace] += count
        return Seats(self, namespace, count)

    def leave(self, namespace: str, count: int, waited: float) -> None:
        self._last_wait = waited
        self._taken[namespace] -= count
        if not self._taken[namespace]:
            del self._taken[namespace]


class Seats:
    """One request's seats: its sequences leave one by one, and what is left when it ends is given back by :meth:`close`."""

    def __init__(self, room: WaitingRoom, namespace: str, count: int) -> None:
        self._room = room
        self._namespace = namespace
        self._count = count
        self._since = time.monotonic()

    def leave(self) -> None:
        self._give_back(min(1, self._count))

    def close(self) -> None:
        self._give_back(self._count)

    def _give_back(self, count: int) -> None:
        if count:
            self._count -= count
            self._room.leave(self._namespace, count, time.monotonic() - self._since)
