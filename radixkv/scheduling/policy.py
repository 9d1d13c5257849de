"""Queue policies: in which order waiting requests are admitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from radixkv.cache import Node, PrefixCache
from radixkv.config import Policy
from radixkv.scheduling.request import Request

Order = Callable[[Iterable[Request], PrefixCache, float], list[Request]]
"""``(waiting, cache, now in seconds) -> waiting in order of admission``.  Changes neither."""


def fcfs(waiting: Iterable[Request], cache: PrefixCache, now: float) -> list[Request]:
    """First come, first served."""
    return sorted(waiting, key=lambda request: request.arrival_time)


def lpm(aging_tokens_per_second: float) -> Order:
    """Longest cached prefix first (RadixAttention, Zheng et al. 2023), with aging.

    A second of waiting counts as ``aging_tokens_per_second`` cached tokens.  So a request can only be overtaken by those that
    arrive within (longest cached prefix / rate) seconds after it, however many hot ones there are.
    """

    def order(waiting: Iterable[Request], cache: PrefixCache, now: float) -> list[Request]:
        def merit(request: Request) -> float:
            cached = cache.match(request.tokens, request.namespace).num_tokens(cache.block_size)
            return cached + aging_tokens_per_second * (now - request.arrival_time)

        merits = {request.request_id: merit(request) for request in waiting}
        return sorted(waiting, key=lambda request: (-merits[request.request_id], request.arrival_time))

    return order


def dfs_weight(waiting: Iterable[Request], cache: PrefixCache, now: float) -> list[Request]:
    """Depth first through the tree, the branch with most waiting requests first (SGLang's order for offline batches).

    Requests below one branch run one after another, so its blocks are used up before they are evicted.  No aging: a request in a
    small branch waits until the larger ones are empty.
    """
    paths: dict[str, list[Node]] = {}
    weights: Counter[int] = Counter()
    for request in waiting:
        path = cache.match(request.tokens, request.namespace).path()
        paths[request.request_id] = path
        weights.update(id(node) for node in path)
    return sorted(
        waiting,
        key=lambda request: (
            [(-weights[id(node)], id(node)) for node in paths[request.request_id]],
            request.arrival_time,
        ),
    )


def queue_policy(name: Policy, aging_tokens_per_second: float) -> Order:
    """The policy called ``name``."""
    return {"fcfs": fcfs, "lpm": lpm(aging_tokens_per_second), "dfs-weight": dfs_weight}[name]
