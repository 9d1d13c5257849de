"""check(): every assertion that pool, tree and cache make of themselves, broken on purpose."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest

from radixkv.cache import BlockPool, Node, invariants
from radixkv.cache.block_pool import unpack
from radixkv.cache.node import Root
from radixkv.cache.siblings import Siblings

from .serving import LONG, cached, joined, run, serve

HEAD = LONG[:8]
HALF_GONE = LONG + 300
GONE = LONG + 400


class Victim:
    """A cache with something of every kind in it, to be damaged.

    Below ``HEAD`` hang four leaves: two begin with the same token, one has a running lease.  The tail of ``HALF_GONE``
    and all of ``GONE`` were evicted and are remembered.  The prompt of another namespace is being computed.
    """

    def __init__(self) -> None:
        self.cache = cached(64, 4, GONE, HALF_GONE)
        self.cache.evict(6)
        for tail in (LONG[8:], [8, 99, 99, 99], LONG + 50):
            serve(self.cache, joined(HEAD, tail))
        self.lease = run(self.cache, joined(HEAD, LONG + 200))
        prefilling = self.cache.acquire(LONG + 500, namespace="tenant")
        assert prefilling is not None
        self.prefilling = prefilling
        self.pool, self.tree = self.cache.pool, self.cache.tree
        self.head, self.half_gone = self.node(HEAD), self.node(HALF_GONE)
        self.leaf = self.node(joined(HEAD, LONG + 50))
        self.siblings = self.node(joined(HEAD, LONG[8:])), self.node(joined(HEAD, [8, 99, 99, 99]))
        (self.remembering,) = [node for node in self.tree.nodes() if node.evicted and not node.num_blocks]
        self.cache.check()

    def node(self, prompt: np.ndarray) -> Node:
        return self.cache.match(prompt).node


Damage = Callable[[Victim], None]
DAMAGES: list[tuple[str, Damage]] = []


def caught_as(message: str) -> Callable[[Damage], Damage]:
    """``check()`` must say ``message`` of the damage that the decorated function does."""

    def register(damage: Damage) -> Damage:
        DAMAGES.append((message, damage))
        return damage

    return register


# -- free + referenced = all blocks


@caught_as("a block is free twice")
def break_the_free_list(victim: Victim) -> None:
    victim.pool._free[1] = victim.pool._free[0]


@caught_as("a reference count is negative")
def break_a_count_below_zero(victim: Victim) -> None:
    victim.pool._refcounts[victim.pool._free[0]] -= 1


@caught_as("a free block is referenced")
def break_the_count_of_a_free_block(victim: Victim) -> None:
    victim.pool._refcounts[victim.pool._free[0]] += 1


@caught_as("free != ")
def break_the_number_of_free_blocks(victim: Victim) -> None:
    victim.pool.num_free -= 1


# -- a block's reference count = the leases holding it + 1 if the tree does


@caught_as("have other reference counts than holders")
def break_the_count_of_a_cached_block(victim: Victim) -> None:
    victim.pool._refcounts[victim.lease.block_table[0]] += 1


@caught_as("have other reference counts than holders")
def break_the_count_of_a_block_of_its_own(victim: Victim) -> None:
    victim.pool._refcounts[victim.prefilling.block_table[0]] += 1


@caught_as("have other reference counts than holders")
def break_a_pending_copy(victim: Victim) -> None:
    assert victim.cache.acquire(joined(HEAD[:6], [77])) is not None
    victim.cache._copies.clear()
    victim.cache._sources.clear()


@caught_as("sources of copies were miscounted")
def break_the_count_of_sources(victim: Victim) -> None:
    assert victim.cache.acquire(joined(HEAD[:6], [77])) is not None
    next(iter(victim.cache._sources.values())).copies += 1


@caught_as("a sibling with blocks would not be found")
def break_which_siblings_have_blocks(victim: Victim) -> None:
    victim.siblings[0].siblings()._with_blocks.clear()


@caught_as("a sibling that left was kept")
def break_a_sibling_that_left(victim: Victim) -> None:
    victim.siblings[0].siblings()._with_blocks[b"gone"] = victim.siblings[0]


@caught_as("a lease holds a block twice")
def break_a_table_with_one_block_twice(victim: Victim) -> None:
    victim.prefilling._table[1] = victim.prefilling._table[0]


@caught_as("differ about its published blocks")
def break_the_order_of_a_table(victim: Victim) -> None:
    victim.lease._table[[0, 1]] = victim.lease._table[[1, 0]]


# -- a locked node's ancestors are locked


@caught_as("a locked node's parent is not locked")
def break_the_lock_of_a_parent(victim: Victim) -> None:
    victim.head.lock_count = 0


@caught_as("a locked node's parent is not locked")
def break_the_lock_of_a_root(victim: Victim) -> None:
    root = victim.head.parent
    assert root is not None
    root.lock_count = 0


@caught_as("a lock is held by nobody")
def break_a_lock_that_leaks(victim: Victim) -> None:
    victim.lease._node.lock_count += 1


@caught_as("a lock is held by nobody")
def break_a_lock_on_a_root_that_leaks(victim: Victim) -> None:
    root = victim.head.parent
    assert root is not None
    root.lock_count += 1


@caught_as("the empty root is locked")
def break_the_empty_root_by_a_lock(victim: Victim) -> None:
    victim.tree.lock(victim.tree._nothing)


# -- no locked block is evicted


@caught_as("differ about its published blocks")
def break_into_a_locked_leaf(victim: Victim) -> None:
    node, tree = victim.lease._node, victim.tree
    node.lock_count -= 1
    tree.order.push(node)
    (taken,) = tree.evict(1)
    assert unpack(taken).tolist() == victim.lease.block_table[-1:].tolist()
    node.lock_count += 1
    tree.num_unlocked_blocks += 1
    victim.pool.decref(unpack(taken))


@caught_as("the eviction order's leaves are not the unlocked leaves")
def break_the_eviction_order(victim: Victim) -> None:
    victim.tree.order._run.clear()
    victim.tree.order._heap.clear()


@caught_as("the eviction order's leaves are not the unlocked leaves")
def break_one_entry_of_the_eviction_order(victim: Victim) -> None:
    victim.leaf.last_use += 1


# -- the tree holds no block twice


@caught_as("the tree holds a block twice")
def break_a_node_with_one_block_twice(victim: Victim) -> None:
    victim.leaf.blocks = victim.leaf.blocks[4:8] + victim.leaf.blocks[4:]


@caught_as("the tree holds a block twice")
def break_two_nodes_with_the_same_block(victim: Victim) -> None:
    victim.leaf.blocks = victim.head.blocks[:4] + victim.leaf.blocks[4:]


# -- sizes cached in counters equal sizes recounted


@caught_as("differ from recounted ones")
def break_the_number_of_nodes(victim: Victim) -> None:
    victim.tree.num_nodes += 1


@caught_as("differ from recounted ones")
def break_the_number_of_blocks(victim: Victim) -> None:
    victim.tree.num_blocks -= 1


@caught_as("differ from recounted ones")
def break_the_number_of_unlocked_blocks(victim: Victim) -> None:
    victim.tree.num_unlocked_blocks += 1


@caught_as("differ from recounted ones")
def break_the_number_of_remembered_blocks(victim: Victim) -> None:
    victim.tree.remembered.num_blocks -= 1


@caught_as("a node's blocks were miscounted")
def break_the_number_of_a_nodes_blocks(victim: Victim) -> None:
    victim.leaf.blocks = victim.leaf.blocks[:-4]


@caught_as("an edge's tokens were miscounted")
def break_the_number_of_an_edges_tokens(victim: Victim) -> None:
    victim.leaf.num_tokens = 0


@caught_as("children with blocks were miscounted")
def break_the_number_of_children_with_blocks(victim: Victim) -> None:
    victim.head.live_children -= 1


@caught_as("uses were handed up twice")
def break_the_number_of_uses(victim: Victim) -> None:
    victim.leaf.uses = -1


# -- what the tree's shape promises


@caught_as("the empty root has grown")
def break_the_empty_root_by_a_child(victim: Victim) -> None:
    victim.tree._nothing.children = {}


@caught_as("an empty namespace was kept")
def break_the_namespaces_by_an_empty_one(victim: Victim) -> None:
    victim.tree._roots["other"] = Root("other")


@caught_as("a namespace is filed under another name")
def break_a_namespaces_name(victim: Victim) -> None:
    victim.tree._roots["tenant"].namespace = "other"


@caught_as("an empty dict of children was kept")
def break_the_children_of_a_leaf(victim: Victim) -> None:
    victim.leaf.children = {}


@caught_as("children hang behind an incomplete block")
def break_an_inner_edge_by_a_token(victim: Victim) -> None:
    victim.head.tokens = joined(victim.head.tokens, [1])


@caught_as("a block hangs below one that was evicted")
def break_an_inner_edge_by_a_block_too_many(victim: Victim) -> None:
    victim.head.tokens = joined(victim.head.tokens, [1, 2, 3, 4])


@caught_as("a block has no tokens")
def break_a_leaf_by_a_token_too_few(victim: Victim) -> None:
    victim.leaf.tokens = victim.leaf.tokens[:-1]


@caught_as("a child's parent is another node")
def break_a_parent(victim: Victim) -> None:
    victim.leaf.parent = victim.half_gone


@caught_as("a node's start is wrong")
def break_a_start(victim: Victim) -> None:
    victim.leaf.start += 1


@caught_as("tokens of another type compare as other bytes")
def break_the_tokens_type(victim: Victim) -> None:
    victim.leaf.edge = victim.leaf.tokens.astype(np.int64)


@caught_as("a child is filed under another key")
def break_a_first_token(victim: Victim) -> None:
    victim.leaf.tokens = victim.leaf.tokens + np.int32(1)


@caught_as("a child is filed under another key")
def break_a_first_block_among_siblings(victim: Victim) -> None:
    one, other = victim.siblings
    one.tokens = joined(other.tokens[:4], one.tokens[4:])


# -- what is remembered


@caught_as("remembered tokens would never be forgotten")
def break_the_queue_of_what_is_remembered(victim: Victim) -> None:
    victim.tree.remembered._queue.clear()


@caught_as("a node without blocks is kept for nothing")
def break_a_node_without_blocks_by_forgetting_it(victim: Victim) -> None:
    victim.remembering.evicted = None


@caught_as("a node without blocks is locked")
def break_a_node_without_blocks_by_a_lock(victim: Victim) -> None:
    victim.tree.lock(victim.remembering)
    assert victim.remembering.parent is not None
    victim.remembering.parent.lock_count += 1


@caught_as("a whole block is remembered that was not evicted")
def break_a_node_with_blocks_by_forgetting_its_eviction(victim: Victim) -> None:
    victim.half_gone.evicted = None


@caught_as("more is remembered than allowed")
def break_the_bound_of_what_is_remembered(victim: Victim) -> None:
    victim.tree.remembered.most_blocks = 1


# -- prompts that are being computed


@caught_as("a prompt that is gone counts as being computed")
def break_what_is_being_computed_by_a_released_lease(victim: Victim) -> None:
    victim.cache.release(victim.prefilling)
    victim.cache._prefilling[victim.prefilling] = None


@caught_as("a computed prompt counts as being computed")
def break_what_is_being_computed_by_a_computed_prompt(victim: Victim) -> None:
    victim.cache._prefilling[victim.lease] = None


@pytest.mark.parametrize(("message", "damage"), DAMAGES, ids=[damage.__name__ for _, damage in DAMAGES])
def test_check_catches(message: str, damage: Damage):
    victim = Victim()
    damage(victim)
    with pytest.raises(AssertionError) as caught:
        victim.cache.check()
    assert message in str(caught.value)


def test_check_catches_a_sibling_filed_under_the_key_of_a_block_that_nobody_has():
    victim = Victim()
    one, _ = victim.siblings
    one.tokens = joined(one.tokens[:1], [98], one.tokens[2:])
    with pytest.raises(AssertionError, match="filed under another key"):
        victim.cache.check()


UNREACHABLE = {
    "a node is empty",  # its parent's check of its number of tokens, or of its key, fails first
    "siblings begin with the same block",  # so does that of one of the two
}


def asserted(check: Callable[..., None] | ModuleType) -> Iterator[str]:
    """The messages of a function's assertions; of those with figures in them, their constant parts."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(check)))):
        if isinstance(node, ast.Assert):
            assert node.msg is not None, f"{ast.unparse(node)} does not say what it means"
            yield "".join(
                part.value for part in ast.walk(node.msg) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def test_every_assertion_of_check_is_broken_by_one_of_these():
    known = {message for message, _ in DAMAGES} | UNREACHABLE
    for check in (BlockPool.check, invariants, Siblings.check):
        for message in asserted(check):
            assert any(part in message for part in known), f"nothing breaks {message!r}"
