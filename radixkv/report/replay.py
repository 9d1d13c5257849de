"""Trace-driven simulation: the real prefix cache, fed with a recorded workload, no model."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from radixkv.cache import PrefixCache
from radixkv.cache.eviction import EvictionPolicyName, eviction_policy
from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import Progress, TraceRequest

if TYPE_CHECKING:
    from rich.table import Table


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache of ``capacity_blocks`` would have hit."""

    capacity_blocks: int | None
    block_size: int
    """Tokens in a block."""
    policy: str
    requests: int
    prompt_blocks: int
    hit_blocks: int
    hit_rate_blocks: float
    """Share of all prompt blocks that a request's leading run of cached blocks covered."""
    prompt_tokens: int
    hit_tokens: int
    hit_rate_tokens: float
    evicted_blocks: int
    resident_blocks: int
    """Blocks in the cache at the end."""
    seconds: float
    """Time the simulation took, reading the trace not included when it came as a list."""

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        bounded = self.capacity_blocks is not None
        size = f"{self.capacity_blocks:,} blocks of {self.block_size} tokens, {self.policy}" if bounded else "unbounded"
        for name, value in (
            ("cache", size),
            ("requests", f"{self.requests:,} in {self.seconds:.2f} s ({self.requests / max(self.seconds, 1e-9):,.0f} a second)"),
            ("hit rate", f"[bold]{self.hit_rate_blocks:.2%}[/] of {self.prompt_blocks:,} prompt blocks"),
            ("", f"{self.hit_rate_tokens:.2%} of {self.prompt_tokens:,} prompt tokens"),
            ("evicted", f"{self.evicted_blocks:,} blocks"),
            ("in cache", f"{self.resident_blocks:,} blocks at the end"),
        ):
            table.add_row(f"[dim]{name}[/]", value)
        return table


def replay(
    trace: Iterable[TraceRequest],
    capacity_blocks: int | None = None,
    *,
    policy: EvictionPolicyName = "lru",
    block_size: int | None = None,
    progress: Progress | None = None,
) -> ReplayResult:
    """Run the requests of ``trace`` one after the other, in order, through a :class:`~radixkv.cache.PrefixCache`.

    A block becomes one token of a cache with blocks of one token, so hits count whole blocks.  A request keeps its blocks cached
    when it ends.  Of a request that is larger than the cache, only the first ``capacity_blocks`` blocks are looked up and
    kept: the rest are misses, as if its deepest blocks had been the first to be evicted.

    Parameters
    ----------
    capacity_blocks
        Size of the cache in blocks of ``block_size``; None never evicts.
    policy
        Order of eviction: see :mod:`radixkv.cache.eviction`.
    block_size
        Tokens in a block; None is the trace's own.  See :class:`~radixkv.report.prefix_paths.PrefixPaths`.
    progress
        Called with (requests done, requests in all).

    Raises
    ------
    ValueError
        ``capacity_blocks`` is below 1, ``policy`` is unknown, or ``block_size`` does not go with the trace's.
    """
    if capacity_blocks is not None and capacity_blocks < 1:
        raise ValueError(f"capacity_blocks must be at least 1, got {capacity_blocks}")
    requests = list(trace)
    started = time.perf_counter()
    paths = PrefixPaths(requests, block_size)
    # A cache with room for every block of the trace never evicts, so a larger one is not worth its memory.
    capacity = max(paths.num_numbers, 1)
    if capacity_blocks is not None:
        capacity = min(capacity, capacity_blocks)
    # The cache leaves at least the last token of a request uncached.  So each request asks for one token more than its prompt, as
    # one that goes on to write an answer would; its block, the extra one here, is not published and is free again after release.
    # The policy gets the true block size: what a block costs to compute again depends on its position in tokens.
    cache = PrefixCache(capacity + 1, block_size=1, policy=eviction_policy(policy, paths.block_size))
    answer = np.int32(paths.num_numbers)
    prompt_tokens = hit_blocks = hit_tokens = 0
    for done, (request, path) in enumerate(zip(requests, paths, strict=True)):
        if progress is not None and done % 256 == 0:
            progress(done, len(requests))
        tokens = np.append(path[:capacity], answer)
        lease = cache.acquire(tokens, namespace=request.namespace)
        if lease is None:
            raise RuntimeError(f"request {done} of {len(tokens)} blocks refused by an idle cache of {capacity + 1}")
        hits = lease.num_matched_tokens
        cache.publish(lease, tokens, num_computed=len(tokens) - 1)
        cache.release(lease)
        hit_blocks += hits
        hit_tokens += min(hits * paths.block_size, request.input_length)
        prompt_tokens += request.input_length
    if progress is not None:
        progress(len(requests), len(requests))
    prompt_blocks = sum(paths.lengths)
    stats = cache.stats()
    return ReplayResult(
        capacity_blocks=capacity_blocks,
        block_size=paths.block_size,
        policy=policy,
        requests=len(requests),
        prompt_blocks=prompt_blocks,
        hit_blocks=hit_blocks,
        hit_rate_blocks=hit_blocks / max(prompt_blocks, 1),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        hit_rate_tokens=hit_tokens / max(prompt_tokens, 1),
        evicted_blocks=stats.evicted_blocks,
        resident_blocks=stats.blocks_cached,
        seconds=time.perf_counter() - started,
    )
