"""Children of one node that begin with the same token, kept in order so that the closest to a prompt is found without a scan."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from sortedcontainers import SortedDict

from radixkv.cache.tokens import Tokens, common_prefix

if TYPE_CHECKING:
    from radixkv.cache.node import Node


class Siblings:
    """Two or more nodes by the bytes of their first block.  Every operation is O(log siblings)."""

    __slots__ = ("_by_block", "_size")

    def __init__(self, block_size: int, *nodes: Node) -> None:
        self._size = block_size
        self._by_block: SortedDict = SortedDict()
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
        self._by_block[self._key(node)] = node

    def remove(self, node: Node) -> None:
        del self._by_block[self._key(node)]

    def closest(self, tokens: Tokens) -> Node:
        """The node that shares the most leading tokens with ``tokens``, as far as its first block tells."""
        key = tokens[: self._size].tobytes()
        by_block = self._by_block
        exact: Node | None = by_block.get(key)
        if exact is not None:
            return exact
        # In byte-wise order the longest common prefix is always with a neighbour.
        at = by_block.bisect_left(key)
        nodes = by_block.values()
        if at == 0:
            after: Node = nodes[0]
            return after
        before: Node = nodes[at - 1]
        if at == len(by_block):
            return before
        after = nodes[at]
        first = tokens[: self._size]
        return after if common_prefix(after.edge, first) > common_prefix(before.edge, first) else before

    def closest_with_blocks(self, tokens: Tokens) -> tuple[Node | None, int]:
        """The same of the nodes that have blocks, and the leading tokens shared; looks at no more than 64 on each side."""
        first = tokens[: self._size]
        key = first.tobytes()
        by_block = self._by_block
        best, longest = None, 0
        for keys in (by_block.irange(minimum=key), by_block.irange(maximum=key, reverse=True)):
            for candidate in islice(keys, 64):
                node: Node = by_block[candidate]
                if node.num_blocks:
                    common = common_prefix(node.edge, first)
                    if common > longest:
                        best, longest = node, common
                    break  # the others on this side share less
        return best, longest

    def check(self) -> None:
        """Assert that each node is filed under its own first block."""
        assert all(key == self._key(node) for key, node in self._by_block.items()), "a child is filed under another key"
