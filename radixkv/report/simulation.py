"""What the real prefix cache finds and why it misses, for workloads that nobody has recorded that of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import Progress, TraceRequest

Prompt = tuple[str, NDArray[np.int32]]
"""Namespace and tokens."""


def as_logged(trace: Iterable[TraceRequest], capacity_blocks: int | None, progress: Progress | None = None) -> list[LoggedRequest]:
    """The requests as a server with a cache of that many blocks would have logged them, but for times; None is unbounded.

    They run one after the other, as :func:`~radixkv.report.replay.replay` runs them, and blocks are found whole.
    """
    requests = list(trace)
    paths = PrefixPaths(requests)
    size = paths.block_size
    capacity = max(paths.num_numbers, 1) if capacity_blocks is None else min(capacity_blocks, max(paths.num_numbers, 1))
    cache = PrefixCache(capacity + 1, block_size=1, attribution=True)
    answer = np.int32(paths.num_numbers)  # as in replay(): one more block than the prompt's, so that all of these can be found
    logged = []
    for number, (request, path) in enumerate(zip(requests, paths, strict=True)):
        if progress is not None and number % 256 == 0:
            progress(number, len(requests))
        tokens = np.append(path[:capacity], answer)
        lease = cache.acquire(tokens, namespace=request.namespace)
        assert lease is not None, "an idle cache refused a request that is not larger"
        finding = lease.miss
        assert finding is not None
        length = request.input_length
        ends = np.cumsum((lease.num_matched_tokens, finding.evicted + finding.partial_block)) * size
        cached, known = (min(int(end), length) for end in ends)
        unknown = "diverged" if finding.diverged > 1 or (finding.diverged and known < length) else "new"
        missed = {"evicted": known - cached, unknown: length - known}
        cache.publish(lease, tokens, num_computed=len(tokens) - 1)
        cache.release(lease)
        logged.append(
            LoggedRequest(
                time=request.timestamp / 1000,
                namespace=request.namespace,
                prompt_tokens=length,
                cached_tokens=cached,
                missed={reason: count for reason, count in missed.items() if count},
                output_tokens=request.output_length,
                block_size=size,
                cache_blocks=capacity_blocks,
                block_hashes=list(request.hash_ids),
            )
        )
    if progress is not None:
        progress(len(requests), len(requests))
    return logged


def cached_tokens(prompts: Sequence[Prompt], num_blocks: int | None, block_size: int) -> list[int]:
    """What a server's cache of ``num_blocks`` finds of each prompt, where they come one after the other; None never evicts."""
    if num_blocks is None:
        num_blocks = sum(-(-len(tokens) // block_size) for _, tokens in prompts) + 1
    cache = PrefixCache(max(num_blocks, 1), block_size)
    found = []
    for namespace, tokens in prompts:
        lease = cache.acquire(tokens, namespace=namespace)
        if lease is None:  # larger than the cache
            found.append(0)
            continue
        cache.take_copies()
        cache.publish(lease, tokens, len(tokens))
        found.append(lease.num_cached_tokens)
        cache.release(lease)
    return found
