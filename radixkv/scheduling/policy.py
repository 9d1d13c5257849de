"""Queue policies: which waiting request is admitted next."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedKeyList

from radixkv.cache import PrefixCache
from radixkv.config import Policy
from radixkv.scheduling.prompt_trie import PromptTrie, Tokens
from radixkv.scheduling.request import Request


class WaitingQueue(ABC):
    """Requests that were never admitted yet, and whose turn it is."""

    @abstractmethod
    def add(self, request: Request, cache: PrefixCache) -> None:
        """A request arrives."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """A request leaves: it is admitted, or aborted.  Raises ``ValueError`` if it does not wait."""

    @abstractmethod
    def head(self, cache: PrefixCache) -> Request:
        """Whose turn it is; it stays until it is removed.  At least one request must wait."""

    def cached(self, tokens: Tokens, namespace: str, known: int = 0) -> None:  # noqa: B027 (most policies need not know)
        """The cache holds all of ``tokens`` now, until it evicts them; the first ``known`` of them it held before.

        A policy may need to be told of all that comes in.
        """

    def computed(self, namespace: str, num_tokens: int) -> None:  # noqa: B027 (most policies need not know)
        """So many tokens have been scheduled for requests of ``namespace``; outputs are told of a block at a time."""


class FirstComeFirstServed(WaitingQueue):
    """In order of arrival.  Every operation is O(log n)."""

    def __init__(self) -> None:
        self._requests = SortedKeyList(key=lambda request: request.arrival_time)

    def add(self, request: Request, cache: PrefixCache) -> None:
        self._requests.add(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def head(self, cache: PrefixCache) -> Request:
        request: Request = self._requests[0]
        return request


class LongestPrefixMatch(WaitingQueue):
    """Longest cached prefix first (RadixAttention, Zheng et al. 2023), as long as nobody waits too long for it.

    The rule: a request may overtake the one that has waited longest only while its cached prefix, in tokens, is worth more than its
    later arrival, at ``aging_tokens_per_second``.  Of the requests that may, the one with the longest cached prefix is next; of
    equals, the one that shares most with the last head, and then the oldest.

    **Hits.**  Once a request is admitted, those that share most with it have the longest cached prefixes.  So the order goes
    through the trie of the waiting prompts depth first and finishes a subtree before it begins another, whereby each edge is
    computed once if the cache holds the longest prompt: no order hits more (their theorem).  Arrival times play no part in that,
    unless they are further apart than the shared prefix is worth.

    **Waiting.**  Nobody is overtaken by a request that arrives more than (its cached prefix / rate) seconds later, so by none
    that arrives more than (longest prompt / rate) later, however many hot ones there are.

    **What is known of the cache.**  Of each request the queue holds a number that is never below its cached prefix: it is matched
    when it arrives, and :meth:`cached` raises the number to what it shares with anything that comes in.  Eviction may have made
    the prefix shorter.  So the request that is chosen is matched again; where it has lost something, the number falls for all of
    the subtree that shares what was lost, and the choice is made anew.  The head is therefore exact, as if the whole queue were
    matched each time, while the other numbers may be too high.

    Costs, with n waiting: ``head`` O(n) in numpy and one match, and one more for each evicted subtree that it comes upon;
    ``cached`` O(n) in numpy; ``add`` one match and O(log n) comparisons.
    """

    def __init__(self, aging_tokens_per_second: float) -> None:
        self._rate = aging_tokens_per_second
        self._trie = PromptTrie(num_columns=2)  # most tokens that may be cached, arrival in seconds
        self._last: Request | None = None

    def add(self, request: Request, cache: PrefixCache) -> None:
        self._trie.add(request, _num_cached(request, cache), request.arrival_time)

    def remove(self, request: Request) -> None:
        self._trie.remove(request)

    def cached(self, tokens: Tokens, namespace: str, known: int = 0) -> None:
        if self._trie.any_shares_more(tokens, namespace, known):  # hardly ever: what comes in is mostly output
            most_cached = self._trie.columns[0]
            np.maximum(most_cached, self._trie.shared_with(tokens, namespace), out=most_cached)

    def head(self, cache: PrefixCache) -> Request:
        most_cached, arrival = self._trie.columns
        lateness = (arrival - arrival.min()) * self._rate
        while True:
            merit = np.where(most_cached >= lateness, most_cached, -1)
            longest = merit.max()
            at = self._closest(np.flatnonzero(merit == longest), longest)
            request = self._trie.requests[at]
            num_cached = _num_cached(request, cache)
            if num_cached >= most_cached[at]:
                self._last = request
                return request
            # A prompt that goes on with this one beyond its match has the same match.
            start, stop = self._trie.subtree(at, num_cached + 1)
            most_cached[start:stop] = num_cached

    def _closest(self, equals: NDArray[np.intp], depth: float) -> int:
        """Of requests with ``depth`` tokens cached the one that shares most with the last head, then the oldest."""
        # Mostly they go on from one prefix, and so share equally much with the last head.
        if self._last is not None and len(equals) > 1 and self._trie.common(int(equals[0]), int(equals[-1]) + 1) < depth:
            shared = self._trie.shared_with(self._last.tokens, self._last.namespace)[equals]
            equals = equals[shared == shared.max()]
        return int(equals[self._trie.columns[1, equals].argmin()])


class DepthFirstByWeight(WaitingQueue):
    """Depth first through the trie of the waiting prompts, at each fork the branch with most requests first.

    SGLang's order for offline batches, but over the prompts that wait instead of the cache's tree, so that it needs to know nothing
    of the cache, and a branch that was begun is finished even when its rest weighs less than another.  Among equal branches the
    one with the oldest request goes first.  No aging: a request waits until the branch in progress is empty, for ever if that
    never happens.

    ``head`` is O(n) in numpy for each fork on the way down from where the last request left the trie, O(1) forks amortised over a
    batch; ``add`` and ``remove`` O(log n) comparisons.
    """

    def __init__(self) -> None:
        self._trie = PromptTrie(num_columns=1)  # arrival in seconds
        self._last: Request | None = None

    def add(self, request: Request, cache: PrefixCache) -> None:
        self._trie.add(request, request.arrival_time)

    def remove(self, request: Request) -> None:
        self._trie.remove(request)
        if not len(self._trie):
            self._last = None

    def head(self, cache: PrefixCache) -> Request:
        start, stop = 0, len(self._trie)
        if self._last is not None:
            shared = self._trie.shared_with(self._last.tokens, self._last.namespace)
            nearest = int(shared.argmax())
            if shared[nearest]:
                start, stop = self._trie.subtree(nearest, int(shared[nearest]))
        arrival = self._trie.columns[0]
        while stop - start > 1:
            starts = self._trie.branches(start, stop)
            weights = np.diff(starts, append=stop)
            oldest = np.minimum.reduceat(arrival[:stop], starts)
            chosen = int(np.lexsort((oldest, -weights))[0])
            start, stop = int(starts[chosen]), int(starts[chosen] + weights[chosen])
        self._last = self._trie.requests[start]
        return self._last


def _num_cached(request: Request, cache: PrefixCache) -> int:
    return cache.match(request.tokens, request.namespace).num_tokens(cache.block_size)


def queue_policy(name: Policy, aging_tokens_per_second: float) -> WaitingQueue:
    """A new, empty queue with the policy called ``name``."""
    if name == "lpm":
        return LongestPrefixMatch(aging_tokens_per_second)
    return FirstComeFirstServed() if name == "fcfs" else DepthFirstByWeight()
