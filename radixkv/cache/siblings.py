"""Children of one node that begin with the same token, kept in order so that the closest to a prompt is found without a scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from radixkv.cache.tokens import Tokens, common_prefix

if TYPE_CHECKING:
    from radixkv.cache.node import Node


class Siblings:
    """Two or more nodes by the bytes of their first block.  Every operation is O(log siblings)."""

    __slots__ = ("_by_block", "_size", "_with_blocks")

    def __init__(self, block_size: int, *nodes: Node) -> None:
        self._size = block_size
        self._by_block: SortedDict = SortedDict()
        self._with_blocks: SortedDict = SortedDict()
        for node in nodes:
            self.add(node)

    def __len__(self) -> int:
        return len(self._by_block)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._by_block.values())

    def _key(self, node: Node) -> bytes:
        edge = node.edge
        return edge[: 4 * self._size] if isinstance(edge, bytes) else edge[: self._size].tobytes()

    def add(self, node: Node) -> None:
        """File ``node``, in place of one that begins with the same block."""
        key = self._key(node)
        self._by_block[key] = node
        if node.num_blocks:
            self._with_blocks[key] = node

    def remove(self, node: Node) -> None:
        key = self._key(node)
        del self._by_block[key]
        self._with_blocks.pop(key, None)

    def got_blocks(self, node: Node) -> None:
        """``node`` had none.  That a node lost them need not be told: most are never looked for again."""
        self._with_blocks[self._key(node)] = node

    def closest(self, tokens: Tokens) -> Node:
        """The node that shares the most leading tokens with ``tokens``, as far as its first block tells."""
        node = self._closest(self._by_block, tokens)
        assert node is not None
        return node

    def closest_with_blocks(self, tokens: Tokens) -> Node | None:
        """The same of the nodes that have blocks.  O(log siblings), amortised over those that lost theirs."""
        while (node := self._closest(self._with_blocks, tokens)) is not None and not node.num_blocks:
            del self._with_blocks[self._key(node)]
        return node

    def _closest(self, by_block: SortedDict, tokens: Tokens) -> Node | None:
        key = tokens[: self._size].tobytes()
        exact: Node | None = by_block.get(key)
        if exact is not None or not by_block:
            return exact
        # In byte-wise order the longest common prefix is always with a neighbour.
        at = by_block.bisect_left(key)
        nodes = by_block.values()
        before: Node = nodes[max(at - 1, 0)]
        after: Node = nodes[min(at, len(by_block) - 1)]
        first = tokens[: self._size]
        return after if common_prefix(after.edge, first) > common_prefix(before.edge, first) else before

    def check(self) -> None:
        """Assert that each node is filed under its own first block, and which of them have blocks."""
        assert all(key == self._key(node) for key, node in self._by_block.items()), "a child is filed under another key"
        assert all(self._by_block.get(key) is node for key, node in self._with_blocks.items()), "a sibling that left was kept"
        assert all(key in self._with_blocks for key, node in self._by_block.items() if node.num_blocks), (
            "a sibling with blocks would not be found"
        )
