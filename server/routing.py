"""Which of several workers gets a request: the one that has most of its prompt cached, unless that one has too much to do.

The idea is that of SGLang's cache-aware router (2024) and of Preble (Srivatsa et al. 2024): to send a request away from its cached
prefix costs as much as computing the rest of the prefix, so it pays where another worker is ahead by more than that.  Pure policy:
no I/O, and nothing depends on it but speed.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np

from radixkv.server.prefix_hashes import PrefixHashes

SLACK = 1024
"""Tokens by which a worker may be behind the least loaded one and still get what it has cached: two steps of a prefill."""
EXPECTED_OUTPUT = 256
"""Most output tokens that a request counts for: few get all the ``max_tokens`` that they may."""


W = TypeVar("W", bound=Hashable)


class Router(Generic[W]):
    """Chooses workers, knowing what each holds in its cache and what it has to do.

    **Load** is in tokens: of every request of a worker, the prompt tokens that it has to compute, until its first output token, and
    ``max_tokens``, up to :data:`EXPECTED_OUTPUT`, until its end.

    **The rule.**  The worker with the longest cached prefix of the prompt gets it (of equals the least loaded) as long as it has at
    most :data:`SLACK` tokens more to do than the least loaded one.  Beyond that, the one that would be through with the prompt
    first does: that with the least load and uncached prompt tokens together.  So conversations stay where they are, also when those
    of one worker all go on in the same moment; prefixes that everybody shares spread to as many workers as they keep busy; and no
    worker gets a request while it is behind the least loaded one by more than :data:`SLACK`, or the prompt's length if that is
    more.

    **What is cached** is what the workers say (:meth:`cache_changed`), and the prompts of requests that have been sent and wait for
    their first token: they soon will be.  So a burst with a common prefix goes to one worker, until its load says otherwise.  It is
    kept as one name of 64 bits for each cached block (:class:`PrefixHashes`), so its memory is bounded by the workers' caches
    and the prompts that wait.  Prefixes of different namespaces have different names.
    """

    def __init__(self, block_size: int | None) -> None:
        """``block_size`` is that of the workers' caches, None where they cache nothing."""
        self.hashes = None if block_size is None else PrefixHashes(os.urandom(16), block_size)
        self._workers: dict[W, _Worker] = {}
        self._last: tuple[Sequence[int], str, list[int]] = (), "", []

    def attach(self, worker: W) -> None:
        """A worker that has nothing to do and nothing cached."""
        self._workers[worker] = _Worker()

    def detach(self, worker: W) -> None:
        """Forget a worker.  Its routes may still be ended."""
        del self._workers[worker]

    def cache_changed(self, worker: W, joined: bytes, left: bytes) -> None:
        """What :meth:`CacheNews.take` said in that worker."""
        cached = self._workers[worker].cached
        cached.update(np.frombuffer(joined, dtype=np.uint64).tolist())
        cached.difference_update(np.frombuffer(left, dtype=np.uint64).tolist())

    def load(self, worker: W) -> int:
        return self._workers[worker].load

    def route(self, tokens: Sequence[int], namespace: str, max_tokens: int, among: Collection[W]) -> Route[W]:
        """Choose a worker of ``among``, at least one, and count the request as its.

        ``tokens`` is what it will be asked to go on with.  O(tokens) in numpy, and O(log tokens) for each worker.
        """
        names = self._names(tokens, namespace)
        block_size = 1 if self.hashes is None else self.hashes.block_size
        least = min(self._workers[name].load for name in among)
        options = []
        for name in among:
            worker = self._workers[name]
            # At least one token is always computed.
            uncached = max(1, len(tokens) - block_size * worker.num_known(names))
            options.append((uncached, worker.load, name))
        uncached, load, chosen = min(options, key=lambda option: option[:2])
        if load > least + SLACK:
            uncached, load, chosen = min(options, key=lambda option: option[0] + option[1])
        return Route(chosen, self._workers[chosen], names, uncached, min(max_tokens, EXPECTED_OUTPUT))

    def _names(self, tokens: Sequence[int], namespace: str) -> list[int]:
        if self.hashes is None:
            return []
        if tokens is not self._last[0] or namespace != self._last[1]:  # the choices of a request have one prompt
            self._last = tokens, namespace, self.hashes(tokens, namespace).tolist()
        return self._last[2]


class Route(Generic[W]):
    """One request's way to the worker that was chosen, and what it counts for there."""

    __slots__ = ("_names", "_output", "_uncached", "_worker", "worker")

    def __init__(self, name: W, worker: _Worker, names: list[int], uncached: int, output: int) -> None:
        self.worker = name
        self._worker = worker
        self._names = names
        self._uncached = uncached
        self._output = output
        worker.load += uncached + output
        worker.coming.update(names)

    def began(self) -> None:
        """It has been given a token, so its prompt is computed, and the worker has said what is cached of it."""
        if self._uncached:
            self._worker.load -= self._uncached
            self._uncached = 0
            self._worker.no_longer_coming(self._names)

    def end(self) -> None:
        """It is over, or the worker runs it no more.  Later calls do nothing."""
        self.began()
        self._worker.load -= self._output
        self._output = 0


class _Worker:
    """What is known of a worker."""

    def __init__(self) -> None:
        self.load = 0
        self.cached: set[int] = set()
        self.coming: Counter[int] = Counter()
        """Prefixes of prompts that wait for their first token, and how many do."""

    def num_known(self, names: list[int]) -> int:
        """Leading blocks that are cached, or will be.  A prefix never is without all shorter ones, so it is found by halving."""
        return bisect_left(names, True, key=lambda name: name not in self.cached and name not in self.coming)

    def no_longer_coming(self, names: list[int]) -> None:
        self.coming.subtract(names)
        for name in names:
            if not self.coming[name]:
                del self.coming[name]
