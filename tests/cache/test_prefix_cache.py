"""PrefixCache: each promise of its contract, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache import BlockCopy
from radixkv.cache.eviction import LRU

from .serving import LONG, cached, explaining, run, tokens


def test_a_prompt_is_found_by_the_next_one_that_begins_alike():
    cache = cached(32, 4, LONG)
    lease = cache.acquire(np.concatenate((LONG, tokens(99, 98))))
    assert lease.num_cached_tokens == 16
    assert cache.take_copies() == []
    cache.check()


def test_one_token_is_always_left_to_compute_and_its_row_is_not_written_again():
    cache = cached(32, 4, LONG)
    before = cache.pool.num_free
    lease = cache.acquire(LONG)
    assert (lease.num_cached_tokens, lease.num_matched_tokens, lease.write_start) == (15, 16, 16)
    assert cache.pool.num_free == before, "a wholly cached prompt needs no block of its own"


def test_where_a_prompt_leaves_a_cached_block_in_the_middle_its_shared_rows_are_copied():
    cache = cached(32, 4, LONG)
    source = int(cache.match(LONG).block_ids()[2])
    lease = cache.acquire(np.concatenate((LONG[:10], tokens(77, 78, 79))))
    assert lease.num_cached_tokens == 10
    assert cache.take_copies() == [BlockCopy(source, int(lease.block_table[2]), 2)]
    cache.check()


def test_the_closest_of_many_siblings_gives_the_rows_to_copy():
    """Enough children for the sorted index."""
    prompts = [tokens(1, 2, 3, 4, 10 * i, 5, 6, 7) for i in range(40)]
    cache = cached(400, 4, *prompts)
    lease = cache.acquire(tokens(1, 2, 3, 4, 170, 5, 8, 8, 9))
    assert lease.num_cached_tokens == 6


def test_a_failed_acquire_changes_nothing():
    cache = cached(8, 4, LONG)
    holder = run(cache, np.arange(100, 116, dtype=np.int32))
    before = cache.stats()
    assert cache.acquire(np.concatenate((LONG[:6], np.arange(50, 80, dtype=np.int32)))) is None
    assert cache.stats() == before
    cache.check()
    cache.release(holder)


def test_headroom_is_left_for_the_running():
    cache = explaining(8, 4)
    assert cache.acquire(LONG, headroom=5) is None
    assert cache.acquire(LONG, headroom=4) is not None


def test_eviction_takes_only_as_many_blocks_as_needed_from_the_tail_of_the_least_recently_used():
    old, new = LONG, LONG + 100
    cache = cached(8, 4, old, new)
    assert cache.evict(2) == 2
    assert cache.match(old).num_tokens(4) == 8
    assert cache.match(new).num_tokens(4) == 16


def test_a_use_makes_a_prefix_young_again():
    cache = cached(12, 4, LONG, LONG + 100, LONG + 200)
    cache.release(run(cache, LONG))
    cache.evict(8)
    assert [cache.match(LONG + base).num_tokens(4) for base in (0, 100, 200)] == [16, 0, 0]


def test_blocks_in_use_are_never_evicted():
    cache = explaining(8, 4)
    lease = run(cache, LONG)
    assert cache.evict(8) == 0
    assert cache.acquire(np.arange(200, 220, dtype=np.int32)) is None
    cache.release(lease)
    assert cache.evict(8) == 4


def test_a_match_inside_an_edge_locks_only_the_part_it_uses():
    """A port of another engine's scheduler locked the whole edge, and leaked the lock."""
    cache = cached(8, 4, LONG)
    lease = cache.acquire(np.concatenate((LONG[:8], tokens(50))))
    assert cache.evict(8) == 2
    cache.release(lease)
    cache.check()
    assert cache.evict(8) == 2


def test_the_later_publisher_of_the_same_tokens_moves_onto_the_first_ones_blocks():
    """Another engine's cached request kept pointing at blocks that were freed as duplicates."""
    cache = explaining(16, 4)
    first, second = cache.acquire(LONG), cache.acquire(LONG)
    assert not set(first.block_table) & set(second.block_table)
    cache.publish(first, LONG, 16)
    cache.publish(second, LONG, 16)
    assert first.block_table.tolist() == second.block_table.tolist()
    assert second.write_start == 16
    assert cache.pool.num_free == 12
    cache.check()


def test_a_growing_sequence_stays_one_node():
    cache = explaining(64, 4)
    lease = run(cache, LONG)
    grown = LONG
    for token in range(100, 200):
        grown = np.append(grown, np.int32(token))
        assert cache.extend(lease, 1)
        cache.publish(lease, grown, len(grown))
    assert cache.tree.num_nodes == 1
    cache.check()
    cache.release(lease)
    assert cache.match(grown).num_tokens(4) == 116


def test_a_fork_shares_full_blocks_and_copies_the_partial_one():
    cache = explaining(32, 4)
    lease = run(cache, LONG[:10])
    children = cache.fork(lease, 2)
    assert all(child.block_table[:2].tolist() == lease.block_table[:2].tolist() for child in children)
    source = int(lease.block_table[2])
    assert cache.take_copies() == [BlockCopy(source, int(child.block_table[2]), 2) for child in children]
    cache.release(lease)
    cache.check()
    for child in children:
        cache.release(child)
    assert cache.stats().blocks_locked == 0


def test_another_namespace_finds_nothing_and_an_empty_one_costs_nothing():
    cache = explaining(32, 4)
    cache.release(run(cache, LONG, namespace="a"))
    assert cache.match(LONG, "b").num_tokens(4) == 0
    assert cache.match(LONG, "a").num_tokens(4) == 16
    for i in range(100):
        cache.release(cache.acquire(LONG[:3], namespace=f"tenant-{i}"))
    assert len(cache.tree._roots) == 1
    cache.reset()
    assert len(cache.tree._roots) == 0


def test_with_caching_off_nothing_is_kept():
    cache = explaining(32, 4, enable_prefix_caching=False)
    cache.release(run(cache, LONG))
    assert cache.match(LONG).num_tokens(4) == 0
    assert cache.pool.num_free == 32


def test_the_source_of_a_pending_copy_outlives_its_eviction():
    cache = cached(5, 4, LONG)
    lease = cache.acquire(np.concatenate((LONG[:6], tokens(90))))
    (pending,) = cache._copies.values()
    assert cache.evict(3) == 2, "the third is evicted too, but free only when it has been copied"
    assert cache.pool.refcount(pending.source) == 1
    cache.take_copies()
    cache.check()
    cache.release(lease)


def test_a_prompt_that_needs_every_block_is_served_without_the_copy():
    cache = cached(4, 4, LONG)
    lease = cache.acquire(np.concatenate((LONG[:6], np.arange(50, 60, dtype=np.int32))))
    assert lease is not None
    assert (lease.num_cached_tokens, cache.take_copies()) == (4, [])
    cache.check()


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, lease: cache.release(lease),
        lambda cache, lease: cache.extend(lease, 1),
        lambda cache, lease: cache.publish(lease, LONG, 16),
        lambda cache, lease: cache.fork(lease, 1),
    ],
    ids=["release", "extend", "publish", "fork"],
)
def test_a_lease_that_was_released_is_refused(use):
    cache = explaining(8, 4)
    lease = cache.acquire(LONG)
    cache.release(lease)
    with pytest.raises(ValueError, match="released before"):
        use(cache, lease)
    cache.check()
    assert cache.pool.num_free == 8


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda cache, lease: cache.publish(lease, LONG[:10], 16), "num_computed must be from 0 to 10"),
        (lambda cache, lease: cache.publish(lease, np.tile(LONG, 2), 21), "num_computed must be from 0 to 20"),
        (lambda cache, lease: cache.publish(lease, LONG, -1), "num_computed must be from 0 to 16"),
        (lambda cache, lease: cache.extend(lease, -1), "n must be at least 0"),
        (lambda cache, lease: cache.acquire(LONG, max_new_tokens=-20), "must be at least 0"),
        (lambda cache, lease: cache.acquire(LONG, headroom=-1), "must be at least 0"),
        (lambda cache, lease: cache.acquire([]), "tokens must hold at least 1"),
        (lambda cache, lease: cache.pool.allocate(-1), "n must be at least 0"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(use, message: str):
    cache = explaining(8, 4)
    lease = cache.acquire(LONG, max_new_tokens=4)
    with pytest.raises(ValueError, match=message):
        use(cache, lease)
    cache.check()
    assert (cache.pool.num_free, lease.num_computed_tokens) == (3, 0)


@pytest.mark.parametrize("convert", [list, np.int64, np.int16], ids=["list", "int64", "int16"])
def test_tokens_may_be_any_integers(convert):
    tokens = LONG.tolist() if convert is list else LONG.astype(convert)
    cache = explaining(8, 4)
    lease = cache.acquire(tokens)
    cache.publish(lease, tokens, 16)
    cache.release(lease)
    assert cache.match(tokens).num_blocks == 4
    assert cache.acquire(LONG).num_cached_tokens == 15
    cache.check()


def test_stats_count_hits_by_namespace_and_a_resumed_prompt_not_again():
    cache = explaining(32, 4)
    for namespace in ("a", "a", "b"):
        cache.release(run(cache, LONG, namespace))
    cache.release(cache.acquire(LONG, namespace="a", resumed=True))
    stats = cache.stats()
    assert {name: (c.requests, c.prompt_tokens, c.cached_tokens) for name, c in stats.namespaces.items()} == {
        "a": (2, 32, 15),
        "b": (1, 16, 0),
    }
    assert (stats.total.requests, stats.total.cached_tokens) == (3, 15)
    assert stats.blocks_free + stats.blocks_cached + stats.blocks_locked == stats.blocks_total


def test_the_counters_of_many_namespaces_stay_bounded():
    cache = explaining(32, 4)
    for i in range(1500):
        cache.release(cache.acquire(LONG, namespace=str(i)))
    stats = cache.stats()
    assert len(stats.namespaces) == 1001
    assert sum(c.requests for c in stats.namespaces.values()) == stats.total.requests == 1500


def test_a_lease_whose_copy_is_yet_to_be_made_is_not_forked():
    """Its children would copy rows that were never filled."""
    cache = cached(16, 4, LONG)
    lease = cache.acquire(np.array([0, 1, 2, 3, 4, 5, 90, 91]))
    with pytest.raises(ValueError, match="take_copies"):
        cache.fork(lease, 1)
    cache.take_copies()
    assert len(cache.fork(lease, 2)) == 2
    cache.check()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda cache, lease: cache.acquire(LONG, max_new_tokens=4.0), TypeError, "float"),
        (lambda cache, lease: cache.acquire(LONG, headroom=0.5), TypeError, "float"),
        (lambda cache, lease: cache.acquire(LONG, retention=(1, 2)), ValueError, "retention must be a Retention"),
        (lambda cache, lease: cache.publish(lease, LONG, 8.0), TypeError, "float"),
        (lambda cache, lease: cache.extend(lease, 1.5), TypeError, "float"),
        (lambda cache, lease: cache.fork(lease, -3), ValueError, "n must be at least 0"),
        (lambda cache, lease: cache.evict(-1), ValueError, "n must be at least 0"),
    ],
)
def test_a_wrong_type_is_refused_before_anything_changes(use, error: type[Exception], message: str):
    cache = cached(32, 4, LONG)
    lease = cache.acquire(LONG + 100)
    before = cache.stats()
    with pytest.raises(error, match=message):
        use(cache, lease)
    assert cache.stats() == before
    assert lease.num_computed_tokens == 0
    cache.check()


@pytest.mark.parametrize("policy", [5, LRU, "fifo", None])
def test_what_is_no_policy_is_refused(policy: object):
    with pytest.raises(ValueError, match="policy must be one of lru, lfu, cost or an EvictionPolicy"):
        explaining(8, 4, policy=policy)
