"""Fair shares: which namespace's turn it is, whatever the order within one."""

from __future__ import annotations

from collections.abc import Callable

from radixkv.cache import PrefixCache
from radixkv.scheduling.policy import WaitingQueue
from radixkv.scheduling.prompt_trie import Tokens
from radixkv.scheduling.request import Request

_KEPT = 1024
"""Namespaces with nothing waiting whose counts are kept in any case."""


class FairShares(WaitingQueue):
    """Gives namespaces that have requests waiting equal shares of the tokens computed; within each, the order is a policy's.

    Every token that is computed for a namespace, of a prompt or an output, counts for it; cached ones cost nothing.  The turn is
    that of the namespace with the least (virtual token counters; Sheng et al. 2024), but passes on only when another one is
    ``quantum`` tokens behind (as in deficit round robin; Shreedhar and Varghese 1995): so requests that share a prefix are still
    admitted together.  One that had nothing waiting begins with the least that any of the others has: idleness saves up nothing.
    What a namespace got counts until nobody waits, also while it has nothing waiting itself.

    **Shares.**  Of two namespaces that always have requests waiting, neither is ahead by more than ``quantum`` and what its running
    requests have yet to compute.  **Waiting.**  A namespace that begins to wait has its turn when each other one that waits has got
    ``quantum`` more and what its running requests had yet to compute.  With one namespace the order is the policy's.

    ``head`` is O(namespaces that wait) where there are several, beside the policy's own.
    """

    def __init__(self, new_queue: Callable[[], WaitingQueue], quantum: int) -> None:
        self._new_queue = new_queue
        self._quantum = quantum
        self._queues: dict[str, WaitingQueue] = {}
        """Of namespaces with requests waiting, those that have waited longest first."""
        self._sizes: dict[str, int] = {}
        self._served: dict[str, int] = {}
        """Tokens computed, from a common beginning, for these namespaces and others that got more than the least of these."""
        self._turn = ""

    def add(self, request: Request, cache: PrefixCache) -> None:
        namespace = request.namespace
        if namespace not in self._queues:
            least = self._least() if self._queues else 0
            self._forget_up_to(least)
            self._served[namespace] = max(self._served.get(namespace, 0), least)
            self._queues[namespace] = self._new_queue()
            self._sizes[namespace] = 0
        self._queues[namespace].add(request, cache)
        self._sizes[namespace] += 1

    def remove(self, request: Request) -> None:
        namespace = request.namespace
        if namespace not in self._queues:
            raise ValueError(f"request {request.request_id!r} does not wait")
        self._queues[namespace].remove(request)
        self._sizes[namespace] -= 1
        if not self._sizes[namespace]:
            del self._queues[namespace], self._sizes[namespace]
            if not self._queues:
                self._served.clear()

    def head(self, cache: PrefixCache) -> Request:
        if self._turn not in self._queues or (len(self._queues) > 1 and self._served[self._turn] > self._least() + self._quantum):
            self._turn = min(self._queues, key=self._served.__getitem__)
        return self._queues[self._turn].head(cache)

    def cached(self, tokens: Tokens, namespace: str, known: int = 0) -> None:
        if queue := self._queues.get(namespace):
            queue.cached(tokens, namespace, known)

    def computed(self, namespace: str, num_tokens: int) -> None:
        if namespace in self._served:
            self._served[namespace] += num_tokens

    def _least(self) -> int:
        return min([self._served[namespace] for namespace in self._queues])

    def _forget_up_to(self, least: int) -> None:
        """Whoever has no more than the least of those that wait would begin with that anyway."""
        if len(self._served) > 2 * len(self._queues) + _KEPT:
            self._served = {name: n for name, n in self._served.items() if name in self._queues or n > least}
