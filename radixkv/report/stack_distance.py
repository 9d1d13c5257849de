"""The LRU hit rate at every capacity in one pass over a trace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import Progress, TraceRequest

_PROGRESS_REQUESTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """What an LRU prefix cache hits at every capacity, exactly as :func:`~radixkv.report.replay.replay` counts it."""

    requests: int
    block_size: int
    """Tokens in a block."""
    prompt_blocks: int
    prompt_tokens: int
    distinct_blocks: int
    """Blocks that differ: the capacity that never evicts."""
    hit_blocks: NDArray[np.int64]
    """Hits of a cache of c blocks at ``[c]``, from 0 to the smallest capacity that reaches all hits an unbounded one has."""
    hit_tokens: NDArray[np.int64]
    seconds: float
    """Time the pass took, reading the trace not included when it came as a list."""

    @property
    def enough_blocks(self) -> int:
        """The smallest capacity that hits as much as an unbounded cache."""
        return len(self.hit_blocks) - 1

    def hits_at(self, capacity_blocks: int | None) -> tuple[int, int]:
        """Hit blocks and hit tokens of a cache of that size; None is unbounded.  O(1)."""
        at = self.enough_blocks if capacity_blocks is None else min(capacity_blocks, self.enough_blocks)
        return int(self.hit_blocks[at]), int(self.hit_tokens[at])

    def hit_rate_blocks(self, capacity_blocks: int | None = None) -> float:
        """Share of all prompt blocks."""
        return self.hits_at(capacity_blocks)[0] / max(self.prompt_blocks, 1)

    def hit_rate_tokens(self, capacity_blocks: int | None = None) -> float:
        """Share of all prompt tokens."""
        return self.hits_at(capacity_blocks)[1] / max(self.prompt_tokens, 1)

    def capacity_for(self, share: float) -> int:
        """The smallest capacity in blocks that reaches ``share`` (0 to 1) of the blocks an unbounded cache hits.  O(log blocks)."""
        wanted = math.ceil(round(share * int(self.hit_blocks[-1]), 6))  # 0.8 is a little more than four fifths
        return int(np.searchsorted(self.hit_blocks, wanted))


def hit_curve(trace: Iterable[TraceRequest], *, block_size: int | None = None, progress: Progress | None = None) -> HitCurve:
    """Simulate LRU prefix caches of all sizes at once.

    LRU is a stack algorithm (Mattson et al., 1970): a cache of c blocks holds the c most recently used, so one that hits at a
    capacity hits at every larger one, and the least is the block's stack distance, the number of different blocks used since, its
    own included.  A request uses its deepest block first, so that the blocks before a cached one are cached too: its hits at
    capacity c are those of its blocks whose distance is at most c, always a leading run.  That holds below the length of
    the longest prompt as well, where a request fills the cache with its beginning.

    The blocks that a request was the last to use are what later requests have left of the tail of its path, so that counting
    them needs one number a request.  A Fenwick tree over requests (Fenwick, 1994) sums those numbers: a run of blocks
    with the same last user costs O(log requests), however many they are, and in all a pass is O(blocks + runs * log requests).

    Parameters
    ----------
    block_size
        Tokens in a block; None is the trace's own.  See :class:`~radixkv.report.prefix_paths.PrefixPaths`.
    progress
        Called with (requests done, requests in all).

    Raises
    ------
    ValueError
        As :class:`~radixkv.report.prefix_paths.PrefixPaths`.
    """
    requests = list(trace)
    started = time.perf_counter()
    paths = PrefixPaths(requests, block_size)
    size = paths.block_size
    last_user = np.full(paths.num_numbers, -1, np.int32)
    # At [d]: hits at distance d, less those at d - 1; and the tokens that hits at distance d lack of whole blocks.
    rises = np.zeros(paths.num_numbers + 2, np.int64)
    lacking = np.zeros(paths.num_numbers + 2, np.int64)
    left = _FenwickTree(len(requests))
    for user, (request, path) in enumerate(zip(requests, paths, strict=True)):
        if progress is not None and user % _PROGRESS_REQUESTS == 0:
            progress(user, len(requests))
        users = last_user[path]  # falls along the path: who used a block used all before it
        num_known = int(np.count_nonzero(users >= 0))
        ends = (np.flatnonzero(np.diff(users[:num_known])) + 1).tolist()
        start = 0
        for end in (*ends, num_known) if num_known else ():
            previous = int(users[start])
            # Used since: what later users left, and this path down to here, which was theirs until this very request.
            nearest = left.total - left.sum_to(previous) + start + 1
            rises[nearest] += 1
            rises[nearest + end - start] -= 1
            for i in range(max(start, request.input_length // size), end):  # the partial last block, if it is hit
                lacking[nearest + i - start] += (i + 1) * size - max(request.input_length, i * size)
            left.add(previous, start - end)
            start = end
        left.add(user, len(path))
        last_user[path] = user
    if progress is not None:
        progress(len(requests), len(requests))
    hits = np.cumsum(rises)
    enough = int(hits.nonzero()[0][-1]) if hits.any() else 0
    hit_blocks = np.cumsum(hits[: enough + 1])
    return HitCurve(
        requests=len(requests),
        block_size=size,
        prompt_blocks=sum(paths.lengths),
        prompt_tokens=sum(request.input_length for request in requests),
        distinct_blocks=left.total,
        hit_blocks=hit_blocks,
        hit_tokens=hit_blocks * size - np.cumsum(lacking[: enough + 1]),
        seconds=time.perf_counter() - started,
    )


class _FenwickTree:
    """Prefix sums over ``n`` integers, all 0 at first; both operations are O(log n)."""

    def __init__(self, n: int) -> None:
        self._sums = [0] * (n + 1)
        self.total = 0

    def add(self, index: int, amount: int) -> None:
        self.total += amount
        at = index + 1
        while at < len(self._sums):
            self._sums[at] += amount
            at += at & -at

    def sum_to(self, index: int) -> int:
        """Sum of the numbers at 0 to ``index``."""
        at, result = index + 1, 0
        while at:
            result += self._sums[at]
            at &= at - 1
        return result
