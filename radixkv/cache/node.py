"""Node: one edge of the radix tree, and what hangs below it."""

from __future__ import annotations

from collections.abc import Iterator
from struct import unpack_from
from typing import NamedTuple

from radixkv.cache.block_pool import PackedIds
from radixkv.cache.retention import Hold
from radixkv.cache.siblings import Siblings
from radixkv.cache.tokens import NO_TOKENS, Tokens, as_edge, edge_tokens


class EvictionStamp(NamedTuple):
    """When an eviction took place, on the cache's clock in seconds, and how many blocks had been evicted before it."""

    time: float
    evicted_before: int
    first: EvictionStamp | None = None
    """Of an edge that lost its blocks in several evictions, the first one's stamp: its last blocks went then."""

    @property
    def oldest(self) -> EvictionStamp:
        return self.first or self


class Node:
    """An edge: its tokens, the blocks that hold the K/V of the first of them, and its children.

    Blocks are evicted from the tail.  The tokens of evicted blocks stay on the edge for a while, and a leaf's tokens may end with
    some that don't fill a block: these *remembered* tokens have no K/V, and only serve to say why a prompt missed.  Children hang
    where the edge's tokens end, so a node that remembers tokens has only children that remember too.
    """

    __slots__ = (
        "blocks", "children", "edge", "evicted", "last_use", "live_children", "lock_count", "num_blocks", "num_tokens", "parent",
        "retention", "start", "uses",
    )  # fmt: skip

    def __init__(self, parent: Node | None, start: int, tokens: Tokens, blocks: PackedIds) -> None:
        self.parent = parent
        self.start = start
        """Blocks before this edge on the way from the root."""
        self.edge = as_edge(tokens)
        self.num_tokens = len(tokens)
        """Of the edge: at least ``num_blocks * block_size``."""
        self.blocks = blocks
        self.num_blocks = len(blocks) // 4
        self.children: dict[int, Node | Siblings] | None = None
        """By first token."""
        self.live_children = 0
        """Children with blocks."""
        self.lock_count = 0
        """Leases that end here, plus children that are locked."""
        self.last_use = 0
        """Tick of the last release that ended here, or, once their blocks are gone, below."""
        self.uses = 0
        """Releases that ended here, or, once their blocks are gone, below."""
        self.evicted: EvictionStamp | None = None
        """When the first remembered block was evicted, or those behind it."""
        self.retention: Hold | None = None

    @property
    def tokens(self) -> Tokens:
        """The edge's tokens, int32 ``[num_tokens]``, read-only."""
        return edge_tokens(self.edge)

    @tokens.setter
    def tokens(self, tokens: Tokens) -> None:
        self.edge = as_edge(tokens)
        self.num_tokens = len(tokens)

    @property
    def first_token(self) -> int:
        """What the parent files this node under."""
        edge = self.edge
        first: int = unpack_from("i", edge)[0] if isinstance(edge, bytes) else edge.item(0)
        return first

    def __lt__(self, other: Node) -> bool:
        """Nodes whose keys are equal in an eviction order may be evicted in any order."""
        return False

    def all_children(self) -> Iterator[Node]:
        for child in (self.children or {}).values():
            if isinstance(child, Siblings):
                yield from child
            else:
                yield child

    def siblings(self) -> Siblings | None:
        """The children of its parent that begin with the same token, if there are others."""
        assert self.parent is not None
        assert self.parent.children is not None
        entry = self.parent.children[self.first_token]
        return entry if isinstance(entry, Siblings) else None

    def child_like(self, tokens: Tokens) -> Node | None:
        """The child that shares the most leading tokens with ``tokens``, at least one; None if there is none."""
        child = self.children.get(tokens.item(0)) if self.children else None
        return child.closest(tokens) if isinstance(child, Siblings) else child

    def add_child(self, child: Node, block_size: int) -> None:
        """Put ``child`` among the children, none of which begins with the same block."""
        if self.children is None:
            self.children = {}
        first = child.first_token
        present = self.children.get(first)
        if present is None:
            self.children[first] = child
        elif isinstance(present, Siblings):
            present.add(child)
        else:
            self.children[first] = Siblings(block_size, present, child)

    def leave_parent(self) -> None:
        """Be no child any more."""
        parent = self.parent
        assert parent is not None
        assert parent.children is not None
        first = self.first_token
        present = parent.children[first]
        if isinstance(present, Siblings):
            present.remove(self)
            if len(present) == 1:
                (parent.children[first],) = present
        else:
            del parent.children[first]
            if not parent.children:
                parent.children = None
        self.parent = None

    def any_child(self) -> Node:
        """One of the children; there must be some."""
        assert self.children is not None
        # The newest one: a dict is slow to find its oldest entry behind many deleted ones.
        child = next(reversed(self.children.values()))
        return next(iter(child)) if isinstance(child, Siblings) else child

    def path(self) -> list[Node]:
        """The nodes from the namespace's root down to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


class Root(Node):
    """Where a namespace begins; holds no blocks and is never evicted."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, 0, NO_TOKENS, b"")
        self.namespace = namespace
