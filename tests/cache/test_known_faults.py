"""What users of other engines have reported of their prefix caches: each a way to be wrong that this one must not repeat."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from radixkv.cache import Lease, PrefixCache, Retention

from .serving import LONG, cached, explaining, held, joined, run, serve


class Memory:
    """K/V as an engine would keep them: a row holds what real K/V depend on, the tokens up to it, hashed."""

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.rows = np.zeros((cache.pool.num_blocks, cache.block_size), dtype=np.int64)

    def compute(self, lease: Lease, prompt: np.ndarray) -> list[int]:
        """Do the copies, compute what was not cached, publish it, and read it all as attention would."""
        for copy in self.cache.take_copies():
            self.rows[copy.target, : copy.num_rows] = self.rows[copy.source, : copy.num_rows]
        for position in range(lease.write_start, len(prompt)):
            block, row = lease.block_table[position // self.cache.block_size], position % self.cache.block_size
            self.rows[block, row] = hash(prompt[: position + 1].tobytes())
        self.cache.publish(lease, prompt, len(prompt))
        return self.read(lease, len(prompt))

    def read(self, lease: Lease, n: int) -> list[int]:
        return self.rows[lease.block_table].reshape(-1)[:n].tolist()


def computed(prompt: np.ndarray) -> list[int]:
    return [hash(prompt[: position + 1].tobytes()) for position in range(len(prompt))]


def test_a_page_table_never_points_at_blocks_that_were_freed_as_duplicates():
    """mini-sglang, pull request 142."""
    cache = explaining(16, 4)
    memory = Memory(cache)
    first, second = cache.acquire(LONG), cache.acquire(LONG)
    duplicates = second.block_table.tolist()
    memory.compute(first, LONG)
    assert memory.compute(second, LONG) == computed(LONG)
    assert second.block_table.tolist() == first.block_table.tolist()
    assert [cache.pool.refcount(block) for block in duplicates] == [0] * 4, "the duplicates are free"
    # A third sequence overwrites the duplicates, and the second goes on reading what it wrote.
    third = cache.acquire(np.arange(500, 548))
    memory.compute(third, np.arange(500, 548))
    assert set(duplicates) <= set(third.block_table.tolist())
    assert memory.read(second, 16) == computed(LONG)
    cache.release(first)
    assert memory.read(second, 16) == computed(LONG)
    cache.check()


def test_a_page_table_is_right_where_only_its_beginning_was_a_duplicate():
    """mini-sglang, pull request 142, within an edge."""
    cache = explaining(32, 4)
    memory = Memory(cache)
    ours = joined(LONG[:8], LONG + 50)
    first, second = cache.acquire(LONG), cache.acquire(ours)
    memory.compute(first, LONG)
    assert memory.compute(second, ours) == computed(ours)
    assert second.block_table[:2].tolist() == first.block_table[:2].tolist()
    cache.check()


def test_a_match_that_ends_inside_an_edge_locks_only_what_it_uses_and_unlocks_it_again():
    """A port of SGLang's scheduler to Rust locked the whole edge, and lost the lock where the edge was split."""
    cache = cached(32, 4, LONG)
    for _ in range(3):
        leases = [cache.acquire(joined(LONG[: 4 * n], [99])) for n in (3, 1, 2)]
        cache.take_copies()
        cache.check()
        assert cache.evict(99) in (0, 1), "no more than the fourth block is free to go"
        assert held(cache, LONG) == 3
        for lease in leases:
            cache.release(lease)
            cache.check()
    assert cache.stats().blocks_locked == 0
    assert cache.evict(99) == 3


def test_what_can_be_evicted_is_counted_once_however_many_share_it():
    """SGLang, issue 35270: shared pages counted twice made the idle scheduler's memory check fail."""
    cache = explaining(32, 4)
    leases = [run(cache, joined(LONG, [100 * i, 1, 2, 3])) for i in range(4)]
    leases += [run(cache, LONG) for _ in range(3)]
    children = cache.fork(leases[0], 3)
    cache.take_copies()
    for lease in (*leases, *children):
        assert cache.pool.num_free == 32 - 8
        cache.release(lease)
        stats = cache.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_locked == 32
        cache.check()
    assert cache.stats().blocks_cached == 8
    assert cache.evict(99) == 8
    assert cache.pool.num_free == 32


@pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])
def test_what_is_read_is_the_same_with_the_cache_on_and_off(policy: Literal["lru", "lfu", "cost"]):
    """SGLang, issue 4175: of 1,000 requests a tenth came out otherwise with the radix cache on."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 2, random.integers(1, 40)).astype(np.int32) for _ in range(1000)]
    hits = 0
    for enabled in (True, False):
        cache = explaining(40, 4, policy=policy, enable_prefix_caching=enabled)
        memory = Memory(cache)
        running: list[tuple[Lease, np.ndarray]] = []
        for prompt in prompts:
            while (lease := cache.acquire(prompt)) is None:
                cache.release(running.pop(0)[0])
            assert memory.compute(lease, prompt) == computed(prompt)
            running.append((lease, prompt))
            for other, tokens in running:
                assert memory.read(other, len(tokens)) == computed(tokens), "a later request wrote over it"
            if len(running) > 3:
                cache.release(running.pop(0)[0])
        hits += cache.stats().total.cached_tokens
    assert hits > 1000, "the cache was on and was used"


def test_nothing_shared_looks_otherwise_than_less_than_a_block_shared():
    """vLLM, issue 54607: both were reported as `hits = 0`."""
    nothing = cached(64, 16, LONG[:12]).acquire(LONG + 100)
    little = cached(64, 16, LONG[:12]).acquire(joined(LONG[:12], LONG + 100))
    assert (nothing.num_cached_tokens, little.num_cached_tokens) == (0, 0)
    assert (nothing.miss.new, nothing.miss.partial_block) == (16, 0)
    assert (little.miss.new, little.miss.partial_block) == (16, 12)


def test_less_than_a_block_shared_with_a_full_block_is_a_hit():
    """vLLM, issue 54607: here the rows are copied, whatever the block's size."""
    assert cached(64, 16, LONG).acquire(joined(LONG[:12], LONG + 100)).num_cached_tokens == 12


def test_pinned_prefixes_cannot_wedge_memory():
    """vLLM, issues 8333 and 23083 ask for pins; SGLang merged hard ones (18941) and took them out again (21045)."""
    cache = explaining(16, 4)
    for i in range(40):
        serve(cache, LONG + 100 * i, retention=Retention(100, 1e9))
    assert cache.num_available_blocks == 16
    big = np.arange(9000, 9064)
    lease = run(cache, big, retention=Retention(100, 1e9))
    assert cache.acquire([1]) is None, "what runs is not evicted"
    cache.release(lease)
    assert cache.acquire([1]) is not None
    assert held(cache, big) == 15
    cache.check()


def test_one_more_prompt_shape_costs_a_long_prompt_only_the_tail_that_was_needed():
    """llama.cpp, issue 10993: the long prompt's whole cache was gone."""
    long = np.arange(400, dtype=np.int32)
    cache = cached(104, 4, long)
    for i in range(1, 4):
        serve(cache, np.arange(16) + 1000 * i)
        assert held(cache, long) == 100 - 4 * (i - 1), "four blocks were free, then four more were needed each time"
    lease = cache.acquire(joined(long, [1]))
    assert lease.num_cached_tokens == 4 * 92
    assert lease.miss.evicted == 4 * 8


# SGLang 31954 (longest prefix first starves cold requests) is the scheduler's to avoid: see tests/scheduling.
