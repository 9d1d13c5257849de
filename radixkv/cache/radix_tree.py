"""RadixTree: token sequences to the KV blocks that hold them (RadixAttention, Zheng et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.eviction import EvictionPolicy

Tokens = NDArray[np.int32]

# Above this many children a node keeps them sorted, so that the closest one is found without looking at all.
_SORT_CHILDREN_ABOVE = 8


class Node:
    """An edge of one or more whole blocks, and what hangs below it.

    ``tokens`` and ``blocks`` are slices ``[start, stop)``, counted in blocks, of buffers that a split shares between the two
    halves.  A leaf owns its buffers from ``start`` to their ends, so it can grow in place.
    """

    __slots__ = ("_blocks", "_tokens", "block_size", "children", "last_use", "lock_count", "parent", "start", "stop")

    def __init__(self, parent: Node | None, tokens: Tokens, blocks: BlockIds, start: int, stop: int, block_size: int) -> None:
        self.parent = parent
        self.children: dict[bytes, Node] | None = None
        """By the first block's tokens; a ``SortedDict`` when there are many."""
        self._tokens = tokens
        self._blocks = blocks
        self.start = start
        self.stop = stop
        self.block_size = block_size
        self.lock_count = 0
        """Leases that end here, plus children that are locked."""
        self.last_use = 0

    @property
    def tokens(self) -> Tokens:
        """int32 ``[num_blocks * block_size]``, a view."""
        return self._tokens[self.start * self.block_size : self.stop * self.block_size]

    @property
    def blocks(self) -> BlockIds:
        """int32 ``[num_blocks]``, a view."""
        return self._blocks[self.start : self.stop]

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> bytes:
        """What the parent files this node under."""
        first = self.start * self.block_size
        return self._tokens[first : first + self.block_size].tobytes()

    def grow(self, tokens: Tokens, blocks: BlockIds) -> None:
        """Append whole blocks to a leaf's edge, in amortised O(blocks)."""
        needed = self.stop + len(blocks)
        if needed > len(self._blocks):
            kept, capacity = self.num_blocks, max(needed - self.start, 2 * self.num_blocks)
            all_tokens = np.empty(capacity * self.block_size, dtype=np.int32)
            all_blocks = np.empty(capacity, dtype=np.int32)
            all_tokens[: kept * self.block_size] = self.tokens
            all_blocks[:kept] = self.blocks
            self._tokens, self._blocks, self.start, self.stop = all_tokens, all_blocks, 0, kept
            needed = kept + len(blocks)
        self._tokens[self.stop * self.block_size : needed * self.block_size] = tokens
        self._blocks[self.stop : needed] = blocks
        self.stop = needed


class Root(Node):
    """The top of a namespace: no edge of its own, never a leaf, gone when nothing is below it and no lease ends at it."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, block_size: int) -> None:
        empty = np.empty(0, dtype=np.int32)
        super().__init__(None, empty, empty, 0, 0, block_size)
        self.namespace = namespace


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens: it ends ``offset`` blocks into ``node``'s edge."""

    node: Node
    offset: int
    blocks: list[BlockIds]
    """Block ids of the whole blocks, in pieces, first to last."""
    num_blocks: int
    partial_block: int
    """A block whose first ``partial_rows`` tokens go on as the query does, where the match leaves the tree inside it."""
    partial_rows: int

    def num_tokens(self, block_size: int) -> int:
        return self.num_blocks * block_size + self.partial_rows

    def block_ids(self) -> BlockIds:
        """The whole blocks' ids, int32 ``[num_blocks]``, a copy."""
        return np.concatenate(self.blocks) if self.blocks else np.empty(0, dtype=np.int32)

    def path(self) -> list[Node]:
        """The nodes from the namespace's root down to ``node``."""
        nodes = [self.node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


class RadixTree:
    """One radix tree a namespace over int32 tokens cut at block boundaries, with one eviction order for all.

    Siblings differ in their first block.  The tree knows no reference counts: who inserts blocks, or takes them by eviction,
    keeps those.  Costs: ``match`` and ``insert`` O(query tokens) compared as memory, plus O(log children) a node; ``lock`` and
    ``unlock`` O(nodes whose state changes); ``evict_tail`` O(log leaves).
    """

    def __init__(self, block_size: int, policy: EvictionPolicy) -> None:
        self.block_size = block_size
        self.policy = policy
        self._roots: dict[str, Root] = {}
        self._nothing = Root("", block_size)
        self._tick = 0
        self.num_nodes = 0
        self.num_blocks = 0
        self.num_unlocked_blocks = 0

    # -- looking up ----------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest cached prefix.  Changes nothing, not even the order of eviction."""
        return self._descend(self._roots.get(namespace, self._nothing), tokens)

    def _descend(self, node: Node, tokens: Tokens) -> Match:
        """Follow ``tokens`` down from the end of ``node``'s edge."""
        size = self.block_size
        pieces: list[BlockIds] = []
        position, offset = 0, node.num_blocks
        while node.children:
            rest = tokens[position:]
            child = node.children.get(rest[:size].tobytes())
            if child is None:
                sibling = _closest(node.children, rest[:size])
                rows = 0 if sibling is None else _common_prefix(sibling.tokens[:size], rest)
                if sibling is None or not rows:
                    break
                return Match(node, offset, pieces, position // size, int(sibling.blocks[0]), rows)
            common = _common_prefix(child.tokens, rest)
            whole = common // size
            blocks = child.blocks
            pieces.append(blocks[:whole])
            position += whole * size
            node, offset = child, whole
            if whole < child.num_blocks:
                return Match(node, offset, pieces, position // size, int(blocks[whole]), common - whole * size)
        return Match(node, offset, pieces, position // size, -1, 0)

    # -- changing ------------------------------------------------------------------------------------------------

    def lock_match(self, match: Match, namespace: str) -> Node:
        """Lock the path to where ``match`` ends, splitting an edge it ends inside of; return the node that ends there."""
        if match.node is self._nothing:
            node: Node = self._roots.setdefault(namespace, Root(namespace, self.block_size))
        else:
            node = self._end_of(match)
        self.lock(node)
        return node

    def _end_of(self, match: Match) -> Node:
        return match.node if match.offset == match.node.num_blocks else self._split(match.node, match.offset)

    def insert(self, node: Node, tokens: Tokens, blocks: BlockIds) -> tuple[Node, BlockIds]:
        """Add whole blocks below ``node``, which the caller has locked.

        Returns the node where ``tokens`` now end, and the ids of the leading blocks that were there already, which take the
        place of the caller's own.
        """
        match = self._descend(node, tokens)
        end, known = self._end_of(match), match.block_ids()
        self.touch(end)
        new_tokens, new_blocks = tokens[len(known) * self.block_size :], blocks[len(known) :]
        if not len(new_blocks):
            return end, known
        self.num_blocks += len(new_blocks)
        if end is node and node.lock_count == 1 and not node.children and node.parent is not None:
            # Nobody but the caller ends at this leaf: a growing sequence stays one node, however many blocks it publishes.
            node.grow(new_tokens, new_blocks)
            return node, known
        return self._add_leaf(end, new_tokens, new_blocks), known

    def _add_leaf(self, parent: Node, tokens: Tokens, blocks: BlockIds) -> Node:
        if _is_evictable(parent):
            self.policy.remove(parent)
        leaf = Node(parent, tokens.copy(), blocks.copy(), 0, len(blocks), self.block_size)
        leaf.last_use = parent.last_use  # just touched
        if parent.children is None:
            parent.children = {}
        elif len(parent.children) == _SORT_CHILDREN_ABOVE:
            parent.children = SortedDict(parent.children)
        parent.children[leaf.key] = leaf
        self.num_nodes += 1
        self.num_unlocked_blocks += len(blocks)
        self.policy.add(leaf)
        return leaf

    def _split(self, node: Node, offset: int) -> Node:
        """Cut ``node``'s edge after ``offset`` blocks; ``node`` keeps the lower part, its identity and its leases."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        upper = Node(parent, node._tokens, node._blocks, node.start, node.start + offset, self.block_size)
        upper.last_use = node.last_use
        upper.lock_count = 1 if node.lock_count else 0
        parent.children[node.key] = upper
        node.parent = upper
        node.start += offset
        upper.children = {node.key: node}
        self.num_nodes += 1
        return upper

    def touch(self, node: Node) -> None:
        """Mark the path to ``node`` as just used.  O(depth)."""
        self._tick += 1
        evictable = _is_evictable(node)
        if evictable:
            self.policy.remove(node)
        step: Node | None = node
        while step is not None:
            step.last_use = self._tick
            step = step.parent
        if evictable:
            self.policy.add(node)

    def lock(self, node: Node) -> None:
        """Keep ``node`` and its ancestors from eviction, until :meth:`unlock`."""
        step: Node | None = node
        while step is not None:
            step.lock_count += 1
            if step.lock_count > 1:
                return
            self.num_unlocked_blocks -= step.num_blocks
            if not step.children and step.parent is not None:
                self.policy.remove(step)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        step: Node | None = node
        while step is not None:
            assert step.lock_count > 0, "unlock of a node that is not locked"
            step.lock_count -= 1
            if step.lock_count:
                return
            self.num_unlocked_blocks += step.num_blocks
            if _is_evictable(step):
                self.policy.add(step)
            elif not step.children:
                self._drop_root(step)
            step = step.parent

    def evict_tail(self, most: int) -> BlockIds:
        """Take up to ``most`` blocks, at least one, off the tail of the least valuable unlocked leaf.

        Raises ``IndexError`` when every leaf is locked or there is none.
        """
        leaf = self.policy.victim()
        taken = min(most, leaf.num_blocks)
        blocks = leaf.blocks[leaf.num_blocks - taken :].copy()
        key = leaf.key
        leaf.stop -= taken
        self.num_blocks -= taken
        self.num_unlocked_blocks -= taken
        if leaf.num_blocks == 0:
            self._remove(leaf, key)
        return blocks

    def _remove(self, leaf: Node, key: bytes) -> None:
        parent = leaf.parent
        assert parent is not None
        assert parent.children is not None
        self.policy.remove(leaf)
        del parent.children[key]
        leaf.parent = None
        self.num_nodes -= 1
        if not parent.children:
            parent.children = None
            if _is_evictable(parent):
                self.policy.add(parent)
            elif parent.lock_count == 0:
                self._drop_root(parent)

    def _drop_root(self, root: Node) -> None:
        # Namespaces come and go with tenants and salts: an empty one must cost nothing.
        assert isinstance(root, Root)
        del self._roots[root.namespace]

    # -- checking ------------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, the roots too."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend((node.children or {}).values())

    def check(self) -> None:
        """Assert every invariant of the tree alone.  O(tokens held)."""
        seen: list[BlockIds] = []
        num_nodes = num_unlocked = num_leaves = 0
        assert self._nothing.children is None, "the empty root has grown"
        assert self._nothing.lock_count == 0, "the empty root is locked"
        for node in self.nodes():
            self._check_children(node)
            if isinstance(node, Root):
                assert node.children or node.lock_count, "an empty namespace was kept"
                continue
            num_nodes += 1
            assert node.num_blocks > 0, "a node is empty"
            assert len(node.tokens) == node.num_blocks * self.block_size, "tokens and blocks differ in length"
            seen.append(node.blocks)
            assert node.parent is not None
            assert node.parent.last_use >= node.last_use, "a node was used after its parent"
            if node.lock_count == 0:
                num_unlocked += node.num_blocks
            num_leaves += _is_evictable(node)
            assert (node in self.policy) == _is_evictable(node), "the policy's leaves are not the unlocked leaves"
        blocks = np.concatenate(seen) if seen else np.empty(0, dtype=np.int32)
        assert len(np.unique(blocks)) == len(blocks), "the tree holds a block twice"
        assert (self.num_nodes, self.num_blocks, self.num_unlocked_blocks) == (num_nodes, len(blocks), num_unlocked), (
            "cached sizes differ from recounted ones"
        )
        assert len(self.policy) == num_leaves, "the policy holds a leaf that is gone"

    def _check_children(self, node: Node) -> None:
        children = node.children or {}
        assert node.children is None or children, "an empty dict of children was kept"
        assert node.lock_count >= sum(child.lock_count > 0 for child in children.values()), "a locked node's parent is not locked"
        for key, child in children.items():
            assert child.parent is node, "a child's parent is another node"
            assert child.tokens.dtype == np.int32, "tokens of another type compare as other bytes"
            assert child.key == key, "a child is filed under another key"


def _is_evictable(node: Node) -> bool:
    """Whether a node is an unlocked leaf.  Roots are none: they hold no blocks."""
    return not node.children and not node.lock_count and node.parent is not None


def _common_prefix(a: Tokens, b: Tokens) -> int:
    """Leading tokens that two arrays share."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


def _closest(children: dict[bytes, Node], tokens: Tokens) -> Node | None:
    """The child whose first block shares the most leading tokens with ``tokens``.

    In byte-wise order the longest common prefix is always with a neighbour, so many children cost O(log n).
    """
    if not len(tokens):
        return None
    if isinstance(children, SortedDict):
        at = children.bisect_left(tokens.tobytes())
        keys = children.keys()
        candidates: list[Node] = [children[keys[i]] for i in (at - 1, at) if 0 <= i < len(keys)]
    else:
        candidates = list(children.values())
    size = len(tokens)
    return max(candidates, key=lambda child: _common_prefix(child.tokens[:size], tokens))
