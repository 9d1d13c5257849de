"""Snapshot: a picture of the radix tree, small enough to be drawn and cheap enough to be taken between two engine steps."""

from __future__ import annotations

import heapq
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Literal

from radixkv.cache.node import Node, Root
from radixkv.cache.radix_tree import RadixTree

LOOKED_AT = 4096
"""Nodes looked at, the nearest to the root first, so that the engine waits for 10 ms at most."""

FIRST_TOKENS = 24
"""Tokens of an edge that a picture has."""

_KEY = secrets.token_bytes(16)


@dataclass(slots=True)
class SnapshotNode:
    """A namespace's root, a segment (an edge of the tree), or what is left out, added up."""

    kind: Literal["namespace", "segment", "others", "beyond"]
    """``others`` are segments below ``parent`` that are too small to be shown; ``beyond``, which has no parent, are those too far
    from the root to have been looked at."""
    id: str
    """The same in every snapshot of this process, as long as the edge begins where it does.  Tells nothing about its tokens."""
    parent: int
    """Its place in :attr:`Snapshot.nodes`, before this one's; -1 for namespaces and ``beyond``."""
    start: int
    """Tokens before it, from the namespace's root on."""
    nodes: int
    """Nodes of the tree that it stands for: 0 for a root, 1 for a segment."""
    blocks: int
    """Blocks of those."""
    nodes_below: int
    blocks_below: int
    """Of what is below it, shown or added up."""
    uses: int
    """Sequences that ended here or below.  0 of ``beyond``."""
    age: int | None
    """Sequences that have ended since the last of those; None where none has, or it is not known."""
    locked: bool
    """Whether a sequence that runs now holds it; False for what is left out."""
    namespace: str
    first_tokens: list[int]
    """Up to 24 of a segment's tokens."""
    idle_seconds: float | None = None
    """The same as ``age`` in seconds, about.  For whoever knows when sequences ended: the cache does not look at a clock then."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The nodes with blocks of a tree; their ``nodes`` and ``blocks`` add up to all there are."""

    block_size: int
    num_nodes: int
    num_blocks: int
    nodes: list[SnapshotNode]
    """Parents come before their children, larger subtrees before smaller ones, what is added up behind them."""


class _Seen:
    """Nodes that were looked at, and the sums over what was looked at below each, itself included.

    Columns of numbers instead of an object a node: objects by the thousand would have the garbage collector walk all of the tree.
    """

    def __init__(self, tree: RadixTree, budget: int) -> None:
        """Look at ``budget`` nodes: level by level, and larger nodes' children first."""
        self.node: list[Node] = list(islice(tree.roots(), budget))
        self.roots = range(len(self.node))
        self.children: dict[int, range] = {}
        node = self.node
        budget -= len(node)
        parents = [-1] * len(node)
        level = self.roots
        while level and budget > 0:
            following = len(node)
            for i in sorted(level, key=self._promise, reverse=True):
                if not node[i].live_children:
                    continue
                first = len(node)
                looked_at = list(islice(node[i].all_children(), budget))
                budget -= len(looked_at)
                node += [child for child in looked_at if child.num_blocks]
                self.children[i] = range(first, len(node))
                parents += [i] * (len(node) - first)
                if budget <= 0:
                    break
            level = range(following, len(node))
        self.nodes = [1] * len(node)
        for root in self.roots:
            self.nodes[root] = 0
        self.blocks = [each.num_blocks for each in node]
        self.uses = [each.uses for each in node]
        self.last_use = [each.last_use for each in node]
        nodes, blocks, uses, last_use = self.nodes, self.blocks, self.uses, self.last_use
        for i in range(len(node) - 1, len(self.roots) - 1, -1):
            parent = parents[i]
            nodes[parent] += nodes[i]
            blocks[parent] += blocks[i]
            uses[parent] += uses[i]
            if last_use[i] > last_use[parent]:
                last_use[parent] = last_use[i]

    def largest(self, those: Sequence[int], count: int) -> Sequence[int]:
        """``count`` of ``those``, with the most blocks in and below them."""
        return those if len(those) <= count else sorted(those, key=self.blocks.__getitem__, reverse=True)[:count]

    def _promise(self, i: int) -> int:
        return self.node[i].num_blocks + self.node[i].live_children


def take_snapshot(tree: RadixTree, max_nodes: int) -> Snapshot:
    """What :meth:`PrefixCache.snapshot` says."""
    seen = _Seen(tree, LOOKED_AT)
    size = tree.block_size
    shown: list[SnapshotNode] = []
    place = {-1: -1}
    """Where those looked at are shown, by their number; namespaces hang below -1."""
    below = {-1: seen.roots} | seen.children
    # What there is to show, the largest first; with its parent.
    heap = [(-seen.blocks[i], i, -1) for i in seen.largest(seen.roots, max_nodes)]
    heapq.heapify(heap)
    while heap and len(shown) < max_nodes:
        _, i, above = heapq.heappop(heap)
        place[i] = len(shown)
        shown.append(_shown(seen, i, place[above], shown[place[above]] if above >= 0 else None, tree))
        for child in seen.largest(below.get(i, ()), max_nodes - len(shown)):
            heapq.heappush(heap, (-seen.blocks[child], child, i))
    for above, at in list(place.items()):
        if hidden := [i for i in below.get(above, ()) if i not in place]:
            shown.append(_others(seen, hidden, at, shown[at] if at >= 0 else None, tree))
    nodes = tree.num_nodes - sum(seen.nodes[i] for i in seen.roots)
    blocks = tree.num_blocks - sum(seen.blocks[i] for i in seen.roots)
    if nodes:
        shown.append(SnapshotNode("beyond", "beyond", -1, 0, nodes, blocks, 0, 0, 0, None, False, "", []))
    return Snapshot(size, tree.num_nodes, tree.num_blocks, shown)


def _shown(seen: _Seen, i: int, parent: int, above: SnapshotNode | None, tree: RadixTree) -> SnapshotNode:
    node, size = seen.node[i], tree.block_size
    if isinstance(node, Root):
        kind, namespace, id = "namespace", node.namespace, _id("", node.namespace.encode(errors="surrogatepass"))
    else:
        assert above is not None
        kind, namespace, id = "segment", above.namespace, _id(above.id, node.tokens[:size].tobytes())
    return SnapshotNode(
        kind=kind,  # type: ignore[arg-type]
        id=id,
        parent=parent,
        start=node.start * size,
        nodes=1 if node.num_blocks else 0,
        blocks=node.num_blocks,
        nodes_below=seen.nodes[i] - (1 if node.num_blocks else 0),
        blocks_below=seen.blocks[i] - node.num_blocks,
        uses=seen.uses[i],
        age=tree.tick - seen.last_use[i] if seen.last_use[i] else None,
        locked=node.lock_count > 0,
        namespace=namespace,
        first_tokens=node.tokens[: min(FIRST_TOKENS, node.num_blocks * size)].tolist(),
    )


def _others(seen: _Seen, hidden: list[int], parent: int, above: SnapshotNode | None, tree: RadixTree) -> SnapshotNode:
    """One node for several that are not shown, and all below them; they are namespaces where there is none ``above``."""
    last_use = max([seen.last_use[i] for i in hidden])
    return SnapshotNode(
        kind="others",
        id=_id("" if above is None else above.id, b"others"),
        parent=parent,
        start=0 if above is None else above.start + above.blocks * tree.block_size,
        nodes=sum([seen.nodes[i] for i in hidden]),
        blocks=sum([seen.blocks[i] for i in hidden]),
        nodes_below=0,
        blocks_below=0,
        uses=sum([seen.uses[i] for i in hidden]),
        age=tree.tick - last_use if last_use else None,
        locked=False,
        namespace="" if above is None else above.namespace,
        first_tokens=[],
    )


def _id(parent: str, what: bytes) -> str:
    return blake2b(parent.encode() + b"/" + what, digest_size=8, key=_KEY).hexdigest()
