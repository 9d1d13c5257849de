"""Invariants of tree and leases, asserted one by one: what ``check()`` means."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache.block_pool import PackedIds, unpack
from radixkv.cache.eviction import is_evictable
from radixkv.cache.node import Node, Root
from radixkv.cache.siblings import Siblings

if TYPE_CHECKING:
    from radixkv.cache.prefix_cache import PrefixCache
    from radixkv.cache.radix_tree import RadixTree


def check_tree(tree: RadixTree) -> None:
    """Those of the tree alone.  O(tokens held)."""
    size = tree.block_size
    seen: list[PackedIds] = []
    num_nodes = num_unlocked = num_remembered = 0
    assert tree._nothing.children is None, "the empty root has grown"
    assert tree._nothing.lock_count == 0, "the empty root is locked"
    leaves = tree.order.leaves()
    remembering = tree.remembered.queued()
    for node in tree.nodes():
        _check_children(tree, node)
        if isinstance(node, Root):
            assert node.children or node.lock_count, "an empty namespace was kept"
            assert tree._roots.get(node.namespace) is node, "a namespace is filed under another name"
            continue
        num_remembered += tree.remembered.of(node)
        assert node.uses >= 0, "uses were handed up twice"
        assert node.num_tokens > 0, "a node is empty"
        assert node.num_tokens >= node.num_blocks * size, "a block has no tokens"
        assert len(node.blocks) == 4 * node.num_blocks, "a node's blocks were miscounted"
        assert node.evicted is None or node in remembering, "remembered tokens would never be forgotten"
        if not node.num_blocks:
            assert node.evicted is not None, "a node without blocks is kept for nothing"
            assert node.lock_count == 0, "a node without blocks is locked"
            continue
        num_nodes += 1
        seen.append(node.blocks)
        if node.evicted is None:
            assert node.num_tokens - node.num_blocks * size < size, "a whole block is remembered that was not evicted"
        if node.lock_count == 0:
            num_unlocked += node.num_blocks
        assert (node in leaves) == is_evictable(node), "the eviction order's leaves are not the unlocked leaves"
    blocks = unpack(*seen)
    assert len(np.unique(blocks)) == len(blocks), "the tree holds a block twice"
    counted = (num_nodes, len(blocks), num_unlocked, num_remembered)
    cached = (tree.num_nodes, tree.num_blocks, tree.num_unlocked_blocks, tree.remembered.num_blocks)
    assert cached == counted, f"cached sizes {cached} differ from recounted ones {counted}"
    assert num_remembered <= tree.remembered.most_blocks, "more is remembered than allowed"


def _check_children(tree: RadixTree, node: Node) -> None:
    size = tree.block_size
    children = list(node.all_children())
    assert node.children is None or children, "an empty dict of children was kept"
    assert node.lock_count >= sum(child.lock_count > 0 for child in children), "a locked node's parent is not locked"
    assert node.live_children == sum(child.num_blocks > 0 for child in children), "children with blocks were miscounted"
    if children:
        assert node.num_tokens % size == 0, "children hang behind an incomplete block"
    if node.live_children:
        assert node.num_tokens == node.num_blocks * size, "a block hangs below one that was evicted"
    for first, entry in (node.children or {}).items():
        for child in entry if isinstance(entry, Siblings) else (entry,):
            assert child.parent is node, "a child's parent is another node"
            assert child.start == node.start + node.num_tokens // size, "a node's start is wrong"
            assert child.tokens.dtype == np.int32, "tokens of another type compare as other bytes"
            assert child.num_tokens == len(child.tokens), "an edge's tokens were miscounted"
            assert child.first_token == first, "a child is filed under another key"
        if isinstance(entry, Siblings):
            entry.check()
    firsts = [child.tokens[:size].tobytes() for child in children]
    assert len(set(firsts)) == len(firsts), "siblings begin with the same block"


def check_leases(cache: PrefixCache) -> None:
    """That leases, tree and pool agree about every block and lock.  O(blocks)."""
    held = np.zeros(cache.pool.num_blocks, dtype=np.int64)
    ends: dict[int, int] = {}
    for lease in cache._leases:
        assert len(np.unique(lease.block_table)) == lease._num_blocks, "a lease holds a block twice"
        np.add.at(held, lease._table[lease._num_published : lease._num_blocks], 1)
        ends[id(lease._node)] = ends.get(id(lease._node), 0) + 1
        published = unpack(*(node.blocks for node in lease._node.path()))
        assert np.array_equal(published, lease._table[: lease._num_published]), (
            "a lease's table and the tree differ about its published blocks"
        )
    sources = {block: source.copies for block, source in cache._sources.items()}
    assert Counter(copy.source for copy in cache._copies.values()) == sources, "sources of copies were miscounted"
    for copy in cache._copies.values():
        held[copy.source] += 1
    for node in cache.tree.nodes():
        held[unpack(node.blocks)] += 1
        locked_children = sum(child.lock_count > 0 for child in node.all_children())
        assert node.lock_count == ends.get(id(node), 0) + locked_children, "a lock is held by nobody"
    wrong = np.flatnonzero(held != cache.pool.refcounts())
    assert not len(wrong), f"blocks {wrong[:5].tolist()} have other reference counts than holders"
    for lease in cache._prefilling:
        assert lease in cache._leases, "a prompt that is gone counts as being computed"
        assert lease._num_published < len(lease._prompt) // cache.block_size, "a computed prompt counts as being computed"
