"""Eviction policies: which unlocked leaf gives up its tail blocks first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from sortedcontainers import SortedDict

if TYPE_CHECKING:
    from radixkv.cache.radix_tree import Node

EvictionPolicyName = Literal["lru"]


class EvictionPolicy(Protocol):
    """Keeps the tree's unlocked leaves in order of value.  The tree tells of every leaf that comes, goes or is used."""

    def add(self, leaf: Node) -> None: ...

    def remove(self, leaf: Node) -> None: ...

    def victim(self) -> Node:
        """The least valuable leaf; it stays until it is removed.  Raises ``IndexError`` when there is none."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, leaf: Node) -> bool: ...


class LRU:
    """Least recently used first.  Every operation is O(log leaves).

    ``last_use`` ticks are a valid key: all nodes with one tick lie on one path from the root, and of a path only the
    deepest node can be a leaf.
    """

    def __init__(self) -> None:
        self._leaves: SortedDict = SortedDict()

    def add(self, leaf: Node) -> None:
        self._leaves[leaf.last_use] = leaf

    def remove(self, leaf: Node) -> None:
        del self._leaves[leaf.last_use]

    def victim(self) -> Node:
        leaf: Node = self._leaves.peekitem(0)[1]
        return leaf

    def __len__(self) -> int:
        return len(self._leaves)

    def __contains__(self, leaf: Node) -> bool:
        return self._leaves.get(leaf.last_use) is leaf


def eviction_policy(name: str) -> EvictionPolicy:
    """A new, empty policy.  Raises ``ValueError`` naming the known ones."""
    if name != "lru":
        raise ValueError(f"eviction policy must be 'lru', got {name!r}")
    return LRU()
