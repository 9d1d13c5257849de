"""Room: what an allocation counts as available is exact, and pending copies are safe until they are made."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache import BlockPool

from .serving import LONG, cached, explaining, joined, run, serve

SHARED = joined(LONG[:6], [99])
"""Leaves a cached ``LONG`` in the middle of its second block."""


@pytest.mark.parametrize(("blocks", "served"), [(4, True), (5, False)])
def test_a_match_over_several_nodes_is_not_counted_as_evictable(blocks: int, served: bool):
    """8 blocks: 4 of the match, over two nodes, 2 of another branch, 2 free."""
    one = joined(LONG[:8], LONG[:8] + 50)
    cache = cached(8, 4, one, joined(LONG[:8], LONG[:8] + 60))
    assert (cache.acquire(joined(one, np.arange(1000, 1000 + 4 * blocks))) is not None) == served
    cache.check()


def test_rows_are_copied_where_the_prefix_is_locked_by_another_sequence_anyway():
    """Nothing is locked away by locking it twice, so one block is left for the copy's source."""
    cache = explaining(8, 4)
    run(cache, LONG)
    lease = cache.acquire(joined(LONG[:6], np.arange(50, 60)))
    assert lease.num_cached_tokens == 6
    assert len(cache.take_copies()) == 1


def test_the_source_of_a_pending_copy_is_not_available():
    cache = cached(8, 4, LONG)
    lease = cache.acquire(SHARED)
    assert cache.num_available_blocks == 3 + 3 - 1
    assert cache.acquire(np.arange(100, 124)) is None
    cache.take_copies()
    assert cache.acquire(np.arange(100, 124)) is not None
    cache.check()
    cache.release(lease)


def test_no_copy_reads_what_another_copy_of_the_same_step_writes():
    """Engines make a step's copies all at once."""
    other = LONG + 200
    cache = cached(12, 4, LONG, other)
    first = cache.acquire(SHARED)
    second = cache.acquire(joined(other[:6], np.arange(300, 326)))
    assert first.num_cached_tokens == second.num_cached_tokens == 6
    copies = cache.take_copies()
    assert len(copies) == 2
    assert not {copy.source for copy in copies} & {copy.target for copy in copies}
    cache.check()


def test_a_released_sequence_takes_its_pending_copies_with_it():
    cache = cached(8, 4, LONG)
    kept, gone = cache.acquire(SHARED), cache.acquire(SHARED)
    cache.release(gone)
    assert [copy.target for copy in cache.take_copies()] == [kept.block_table[1]]
    cache.release(kept)
    assert cache.evict(99) == 4


def test_a_sequence_moved_onto_anothers_blocks_takes_its_pending_copies_with_it():
    """Their targets are free, and may be a third sequence's by the time they are made."""
    cache = cached(16, 4, LONG)
    prompt = joined(LONG[:6], [90, 91])
    first, second = cache.acquire(prompt), cache.acquire(prompt)
    cache.publish(first, prompt, 8, written=False)
    cache.publish(second, prompt, 8, written=False)
    assert [copy.target for copy in cache.take_copies()] == [first.block_table[1]]
    cache.check()


def test_a_fork_that_needs_every_block_left_is_served():
    cache = explaining(5, 4)
    lease = run(cache, LONG[:10])
    assert cache.fork(lease, 3) is None
    assert len(cache.fork(lease, 2)) == 2
    cache.take_copies()
    assert cache.num_available_blocks == 0
    cache.check()


def test_the_copies_of_a_fork_take_nothing_from_what_is_available():
    cache = explaining(8, 4)
    cache.fork(run(cache, LONG[:10]), 2)
    assert cache.num_available_blocks == cache.pool.num_free == 3
    assert cache.acquire(np.arange(100, 110)) is not None


def test_fewer_than_no_children_are_refused_by_name():
    cache = explaining(8, 4)
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        cache.fork(run(cache, LONG[:10]), -1)


def test_a_fork_of_a_wholly_cached_prompt_shares_all_of_it():
    """Its last token is yet to be computed, but the K/V are there."""
    cache = cached(8, 4, LONG)
    lease = cache.acquire(LONG)
    (child,) = cache.fork(lease, 1)
    assert cache.take_copies() == []
    assert child.block_table.tolist() == lease.block_table.tolist()
    assert (child.num_computed_tokens, child.write_start, child.num_tokens) == (15, 16, 16)
    cache.check()
    grown = joined(LONG, LONG[:4] + 100)
    for sequence in (lease, child):
        assert cache.extend(sequence, 4)
    cache.publish(child, grown, 20)
    cache.check()
    cache.release(lease)
    assert cache.evict(99) == 0
    assert cache.match(grown).num_blocks == 5
    cache.release(child)
    serve(cache, LONG)
    cache.check()


@pytest.mark.parametrize("operation", ["incref", "decref"])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_a_list_with_a_free_block_in_it_is_refused_whole(operation: str, n: int):
    pool = BlockPool(8)
    blocks = pool.allocate(n)
    pool.decref(blocks[-1:])
    with pytest.raises(ValueError, match="of a free block"):
        getattr(pool, operation)(blocks)
    assert [pool.refcount(block) for block in blocks] == [1] * (n - 1) + [0]
    pool.check()


def test_the_source_of_a_forks_copy_is_not_available_while_it_is_cached_and_unlocked():
    cache = explaining(8, 4)
    lease = run(cache, LONG[:10], max_new_tokens=2)
    cache.fork(lease, 1)
    cache.publish(lease, LONG, 12)
    cache.release(lease)
    assert cache.num_available_blocks == 8 - 2 - 1 - 1, "two blocks shared, one of the child's own, one to be copied"
    assert cache.acquire(np.arange(100, 117)) is None
    lease = cache.acquire(np.arange(100, 116))
    assert lease is not None
    cache.check()
    cache.take_copies()
    assert cache.num_available_blocks == 1
