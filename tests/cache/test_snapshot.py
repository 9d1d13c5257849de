"""Snapshot: whatever is left out of the picture of a tree, its sums are the tree's."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixkv.cache import PrefixCache, Snapshot
from radixkv.cache import snapshot as snapshot_module

from .serving import LONG, cached, explaining, joined, run, serve

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def check(cache: PrefixCache, snapshot: Snapshot) -> None:
    nodes = snapshot.nodes
    assert sum(node.nodes for node in nodes) == snapshot.num_nodes == cache.tree.num_nodes
    assert sum(node.blocks for node in nodes) == snapshot.num_blocks == cache.tree.num_blocks
    below: Counter[int] = Counter()
    for place, node in reversed(list(enumerate(nodes))):
        assert node.parent < place
        assert (node.parent == -1) or node.kind in ("segment", "others")
        if node.kind in ("namespace", "segment") and nodes[-1].kind != "beyond":
            assert node.blocks_below == below[place]
        if node.parent >= 0:
            parent = nodes[node.parent]
            assert node.start == parent.start + parent.blocks * snapshot.block_size
            below[node.parent] += node.blocks + node.blocks_below if node.kind == "segment" else node.blocks
    assert len({node.id for node in nodes}) == len(nodes)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(prompts, st.sampled_from(["", "a", "b"]), st.booleans()), max_size=25),
    st.integers(1, 12),
    st.sampled_from([3, 10, 10_000]),
)
def test_nodes_and_blocks_of_a_snapshot_add_up_to_the_trees(
    requests: list[tuple[list[int], str, bool]], max_nodes: int, looked_at: int
):
    cache = explaining(40, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_module, "LOOKED_AT", looked_at)
        for prompt, namespace, stays in requests:
            lease = cache.acquire(prompt, namespace=namespace)
            if lease is None:
                continue
            cache.take_copies()
            cache.publish(lease, prompt, len(prompt))
            cache.take_copies()
            if not stays:
                cache.release(lease)
            snapshot = cache.snapshot(max_nodes)
            check(cache, snapshot)
            assert sum(node.kind in ("namespace", "segment") for node in snapshot.nodes) <= max_nodes


def test_a_segment_tells_where_it_is_what_begins_it_and_who_used_it_when():
    cache = cached(32, 4, joined(LONG[:8], [50] * 8), joined(LONG[:8], [60] * 4), joined([70] * 4))
    holder = run(cache, joined(LONG[:8], [60] * 4))
    root, shared, fifty, *others = cache.snapshot().nodes
    assert (root.kind, root.uses, root.age, root.locked) == ("namespace", 3, 0, True)
    assert (shared.start, shared.blocks, shared.uses, shared.age, shared.locked) == (0, 2, 2, 1, True)
    assert shared.first_tokens == LONG[:8].tolist()
    assert (fifty.start, fifty.blocks, fifty.uses, fifty.age, fifty.locked) == (8, 2, 1, 2, False)
    assert sorted((node.start, node.first_tokens[0], node.locked) for node in others) == [(0, 70, False), (8, 60, True)]
    cache.release(holder)


def test_what_is_too_small_to_be_shown_is_added_up_where_it_hangs():
    cache = cached(64, 4, *(joined(LONG[:8], [50 + i] * 4) for i in range(9)), joined(LONG[:8], [90] * 12))
    root, shared, largest, others = cache.snapshot(3).nodes
    assert (root.kind, shared.blocks, largest.blocks) == ("namespace", 2, 3)
    assert (others.kind, others.parent, others.start, others.nodes, others.blocks, others.uses, others.age) == (
        "others", 1, 8, 9, 9, 9, 1)  # fmt: skip


def test_a_node_keeps_its_id_while_the_tree_changes_below_it():
    cache = cached(64, 4, joined(LONG[:8], [50] * 8))
    before = {node.id for node in cache.snapshot().nodes}
    serve(cache, joined(LONG[:8], [60] * 4))
    after = cache.snapshot().nodes
    assert before <= {node.id for node in after}
    assert len(after) == 4


def test_of_a_tree_too_large_to_look_at_what_is_near_the_root_is_shown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(snapshot_module, "LOOKED_AT", 100)
    cache = cached(2000, 4, *(np.array([i // 30, 1, 1, 1, i, 2, 2, 2]) for i in range(900)))
    snapshot = cache.snapshot(50)
    check(cache, snapshot)
    assert sum(node.kind == "segment" and node.start == 0 for node in snapshot.nodes) == 30
    assert (snapshot.nodes[-1].kind, snapshot.nodes[-1].nodes) == ("beyond", 931 - 100)


def test_an_empty_cache_has_an_empty_snapshot():
    assert explaining(4).snapshot() == Snapshot(16, 0, 0, [])


def test_max_nodes_below_one_is_refused():
    with pytest.raises(ValueError, match="max_nodes must be at least 1, got 0"):
        explaining(4).snapshot(0)
