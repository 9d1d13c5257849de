"""Tree order: sequences that share blocks as neighbours, and what neighbours share, for attention that reads shared K/V once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.lease import Lease
from radixkv.cache.node import Node


class TreeOrder(NamedTuple):
    """An order of leases, and the pieces of their paths through the tree that several of them share."""

    order: NDArray[np.intp]
    """Indices of the leases, depth first: ``[n]``."""
    segments: NDArray[np.int32]
    """int32 ``[P, 4]``: first lease in that order, number of leases, first token, end token.  Ends are multiples of the block size;
    a lease's segments are disjoint, and those nearer to the root come first."""


_FEW_NODES = 256
_NODES_A_LEASE = 32


def tree_order(leases: Sequence[Lease], block_size: int) -> TreeOrder:
    """Walk the part of the tree that the leases' published blocks lie in: O(leases).

    Where that part has more than 256 nodes and 32 a lease, it is given up: the order is the given one, nothing counts as shared.
    """
    left = _FEW_NODES + _NODES_A_LEASE * len(leases)
    ending: dict[Node, list[int]] = {}
    for i, lease in enumerate(leases):
        node = lease._node
        while node.lock_count == 1 and node.parent is not None and left:  # no other lease ends here or below
            node = node.parent
            left -= 1
        ending.setdefault(node, []).append(i)
    below: dict[Node, list[Node]] = {}  # of each node on a path, those right below it that are on one
    stack: list[Node | list[int]] = []
    for end in ending:
        child: Node | None = None
        step: Node | None = end
        while step is not None:
            if (children := below.get(step)) is not None:
                if child is not None:
                    children.append(child)
                break
            below[step] = [] if child is None else [child]
            if step.parent is None:
                stack.append(step)
            left -= 1
            if left < 0:
                return TreeOrder(np.arange(len(leases)), np.empty((0, 4), dtype=np.int32))
            child, step = step, step.parent
    order: list[int] = []
    rows: list[list[int]] = []
    while stack:
        item = stack.pop()
        if isinstance(item, list):  # all below that node is done
            item[1] = len(order) - item[0]
            continue
        row = [len(order), 0, item.start * block_size, (item.start + item.num_blocks) * block_size]
        rows.append(row)
        order += ending.get(item, ())
        stack.append(row)
        stack += below[item]
    segments: list[list[int]] = []
    for row in rows:
        if row[1] < 2 or row[3] == row[2]:
            continue
        if segments and segments[-1][:2] == row[:2] and segments[-1][3] == row[2]:
            segments[-1][3] = row[3]  # a node and its only child on a path
        else:
            segments.append(row)
    return TreeOrder(np.array(order, dtype=np.intp), np.array(segments, dtype=np.int32).reshape(-1, 4))
