"""Which sequences share which blocks: told by the tree, checked against block tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import Lease, PrefixCache

from .serving import LONG, explaining, joined, run


def shared_by_table(leases: Sequence[Lease], block_size: int) -> list[int]:
    """Leading tokens that each lease has in the same published blocks as the one before it."""
    shared = [0] * min(len(leases), 1)
    for one, other in pairwise(leases):
        n = min(one._num_published, other._num_published)
        differ = one.block_table[:n] != other.block_table[:n]
        shared.append((int(differ.argmax()) if differ.any() else n) * block_size)
    return shared


def assert_right(cache: PrefixCache, leases: Sequence[Lease]) -> None:
    order, segments = cache.tree_order(leases)
    assert sorted(order) == list(range(len(leases)))
    told = [0] * len(leases)
    for first, count, start, end in segments.tolist():
        assert count >= 2
        assert start < end
        assert all(told[s] == start for s in range(first + 1, first + count)), "a segment does not begin where those before it end"
        told[first + 1 : first + count] = [end] * (count - 1)
    assert told == shared_by_table([leases[i] for i in order], cache.block_size)
    # In this order no two share more than those between them.
    pairs = [(i, j) for i in range(len(leases)) for j in range(i + 2, len(leases))]
    for i, j in pairs:
        _, far = shared_by_table([leases[order[i]], leases[order[j]]], cache.block_size)
        assert far == min(told[i + 1 : j + 1])


@pytest.mark.parametrize("block_size", [1, 4])
@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=10), data=st.data())
def test_neighbours_share_what_their_block_tables_share(block_size: int, prompts: list[list[int]], data: st.DataObject) -> None:
    cache = explaining(400, block_size)
    leases = []
    for prompt in prompts:
        leases.append(run(cache, np.array(prompt, dtype=np.int32), namespace=data.draw(st.sampled_from(["", "", "", "other"]))))
        assert_right(cache, leases)
        assert_right(cache, leases)  # from memory
        if data.draw(st.integers(0, 3)) == 0:
            cache.release(leases.pop(data.draw(st.integers(0, len(leases) - 1))))
            assert_right(cache, leases)


def test_levels_of_a_tree_are_segments_and_what_only_one_has_is_none() -> None:
    cache = explaining(64, 4)
    ends = ([1, 2, 3, 4], [5, 6, 7, 8, 1, 1, 1, 1], [5, 6, 7, 8, 2, 2, 2, 2, 9])
    leases = [run(cache, joined(LONG[:8], end)) for end in ends]
    order, segments = cache.tree_order(leases)
    assert segments.tolist() in ([[0, 3, 0, 8], [0, 2, 8, 12]], [[0, 3, 0, 8], [1, 2, 8, 12]])
    assert {order[i] for i in range(segments[1, 0], segments[1, 0] + 2)} == {1, 2}


def test_an_edge_split_under_running_sequences_is_noticed() -> None:
    cache = explaining(64, 4)
    one, other = run(cache, LONG), run(cache, LONG)
    assert cache.tree_order([one, other]).segments.tolist() == [[0, 2, 0, 16]]
    third = run(cache, joined(LONG[:8], [9, 9, 9, 9]))
    assert cache.tree_order([one, other]).segments.tolist() == [[0, 2, 0, 16]]
    assert_right(cache, [one, third, other])
    cache.release(third)
    assert_right(cache, [one, other])


def test_nothing_is_shared_without_prefix_caching() -> None:
    cache = explaining(64, 4, enable_prefix_caching=False)
    leases = [run(cache, LONG), run(cache, LONG)]
    order, segments = cache.tree_order(leases)
    assert (sorted(order), len(segments)) == ([0, 1], 0)


def test_long_paths_are_given_up_rather_than_walked() -> None:
    cache = explaining(1000, 1)
    leases = [run(cache, np.array([1] * n + [2], dtype=np.int32)) for n in range(1, 400)]
    order, segments = cache.tree_order(leases[-2:])
    assert (order.tolist(), len(segments)) == ([0, 1], 0)
    assert len(cache.tree_order(leases[:20]).segments)


def test_many_nodes_that_one_sequence_has_for_itself_hide_nothing_that_it_shares() -> None:
    cache = explaining(1000, 1)
    leases = [run(cache, np.array([1] * n + [2], dtype=np.int32)) for n in range(1, 300)]
    for lease in leases[3:-1]:
        cache.release(lease)  # the nodes stay, but end nobody's sequence any more
    assert_right(cache, [*leases[:3], leases[-1]])
    assert cache.tree_order([leases[2], leases[-1]]).segments.tolist() == [[0, 2, 0, 3]]
