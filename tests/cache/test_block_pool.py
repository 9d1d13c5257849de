"""BlockPool."""

from __future__ import annotations

import numpy as np
import pytest

from radixkv.cache import BlockPool, OutOfBlocks


def test_an_allocation_that_does_not_fit_changes_nothing():
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()
    assert pool.decref(held) == 3


def test_a_block_is_free_when_its_last_reference_goes():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.incref(blocks)
    assert (pool.refcount(int(blocks[0])), pool.decref(blocks), pool.num_free) == (2, 0, 1)
    assert (pool.decref(blocks), pool.num_free) == (1, 2)
    pool.check()


def test_blocks_handed_out_are_distinct():
    pool = BlockPool(10)
    first, second = pool.allocate(6), pool.allocate(4)
    assert sorted([*first, *second]) == list(range(10))


@pytest.mark.parametrize("operation", ["incref", "decref"])
def test_a_free_block_has_no_references_to_change(operation: str):
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.decref(blocks)
    with pytest.raises(ValueError, match="free block"):
        getattr(pool, operation)(blocks)
    pool.check()


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "field"), [(0, 16, "num_blocks"), (4, 12, "block_size"), (4, 0, "block_size")]
)
def test_bad_sizes_are_refused_by_name(num_blocks: int, block_size: int, field: str):
    with pytest.raises(ValueError, match=field):
        BlockPool(num_blocks, block_size)


def test_check_catches_a_block_that_is_free_and_referenced():
    pool = BlockPool(4)
    pool.allocate(2)
    pool._refcounts[int(pool._free[0])] = 1
    with pytest.raises(AssertionError, match="a free block is referenced"):
        pool.check()


def test_check_catches_a_lost_block():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool._refcounts[blocks[:1]] = np.int32(0)
    with pytest.raises(AssertionError, match="!= 4 blocks"):
        pool.check()
