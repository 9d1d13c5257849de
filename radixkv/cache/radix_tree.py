"""RadixTree: token sequences to the KV blocks that hold them (RadixAttention, Zheng et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import unpack_from
from typing import NamedTuple

from radixkv.cache.block_pool import BlockIds, PackedIds, unpack
from radixkv.cache.eviction import EvictionOrder, EvictionPolicy
from radixkv.cache.invariants import check_tree
from radixkv.cache.node import EvictionStamp, Node, Root
from radixkv.cache.remembered import Remembered
from radixkv.cache.retention import Retention
from radixkv.cache.siblings import Siblings
from radixkv.cache.tokens import Edge, Tokens, common_prefix

_new = tuple.__new__  # what Match(...) does in the end, at half the time


class Match(NamedTuple):
    """The longest cached prefix of a prompt."""

    node: Node
    """Where its last whole block is, or the namespace's root."""
    offset: int
    """Whole blocks of ``node``'s edge that belong to the match."""
    blocks: list[PackedIds]
    """Ids of its whole blocks, a piece for each node, first to last."""
    num_blocks: int
    partial_block: int
    """A block whose first ``partial_rows`` tokens go on as the prompt does, where the prompt leaves the tree inside it, else -1."""
    partial_rows: int
    edge: Node | None
    """The node whose tokens the prompt was compared with last; None where no edge goes on with the prompt's next token."""
    common: int
    """Leading tokens of ``edge`` that the prompt shares, remembered ones included."""

    def num_tokens(self, block_size: int) -> int:
        return self.num_blocks * block_size + self.partial_rows

    def block_ids(self) -> BlockIds:
        """The whole blocks' ids, int32 ``[num_blocks]``."""
        return unpack(*self.blocks)

    def path(self) -> list[Node]:
        """The nodes from the namespace's root down to ``node``."""
        return self.node.path()


class RadixTree:
    """One radix tree a namespace over int32 tokens cut at block boundaries, with one eviction order for all.

    Siblings differ in their first block.  The tree knows no reference counts: who inserts blocks, or takes them by eviction,
    keeps those.  Costs: ``match`` and ``insert`` O(tokens shared) compared as memory, plus O(1) a node and O(log) where children
    begin with the same token; ``lock`` and ``unlock`` O(nodes whose state changes); ``evict`` O(log leaves) a leaf, amortised.

    With ``remember_blocks`` the tokens of up to that many evicted blocks stay in the tree, so that it can tell what was evicted
    from what was never there.
    """

    def __init__(self, block_size: int, policy: EvictionPolicy, remember_blocks: int = 0) -> None:
        self.block_size = block_size
        self.order = EvictionOrder(policy)
        self.remembered = Remembered(block_size, remember_blocks, self._drop_if_empty)
        self._roots: dict[str, Root] = {}
        self._nothing = Root("")
        self.tick = 0
        """Uses so far: what :attr:`Node.last_use` counts in."""
        self.num_nodes = 0
        """Nodes with blocks."""
        self.num_blocks = 0
        self.num_unlocked_blocks = 0
        self.num_evicted_blocks = 0
        """Since the start."""
        self.num_splits = 0
        """Since the start: while it stays the same, so does all that is above a locked node."""

    # -- looking up ----------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest cached prefix.  Changes nothing, not even the order of eviction."""
        size = self.block_size
        node: Node = self._roots.get(namespace, self._nothing)
        end = len(tokens)
        pieces: list[PackedIds] = []
        position = offset = common = rows = 0
        partial = -1
        edge: Node | None = None
        while position < end:
            children = node.children
            entry = children.get(tokens.item(position)) if children else None
            if entry is None:
                edge = None
                break
            rest = tokens[position:] if position else tokens
            edge = entry.closest(rest) if isinstance(entry, Siblings) else entry
            common = common_prefix(edge.edge, rest)
            whole, live = common // size, edge.num_blocks
            if whole < live:  # the prompt leaves the tree inside this edge
                rows = common - whole * size
                if rows:
                    (partial,) = unpack_from("i", edge.blocks, 4 * whole)
                if whole:
                    pieces.append(edge.blocks[: 4 * whole])
                    node, offset = edge, whole
                    position += whole * size
                break
            if live:
                pieces.append(edge.blocks)
                node, offset = edge, live
                position += live * size
            if edge.num_tokens > live * size:  # what comes next is remembered at most
                if not live and isinstance(entry, Siblings):
                    other = entry.closest_with_blocks(rest)
                    if other is not None:
                        rows = common_prefix(other.edge, rest[:size])
                        (partial,) = unpack_from("i", other.blocks)
                break
            edge = None
        return _new(Match, (node, offset, pieces, position // size, partial, rows, edge, common if edge is not None else 0))

    def recall(self, edge: Node, tokens: Tokens) -> tuple[Node, int]:
        """Follow remembered tokens on from the end of ``edge``: the node where they part from ``tokens``, and what they share of
        its edge."""
        common = edge.num_tokens
        while edge.children:
            rest = tokens[edge.start * self.block_size + common :]
            child = edge.children.get(rest.item(0)) if len(rest) else None
            if isinstance(child, Siblings):
                child = child.closest(rest)
            if child is None:
                break
            edge, common = child, common_prefix(child.edge, rest)
            if common < edge.num_tokens:
                break
        return edge, common

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def namespaces(self) -> Iterator[str]:
        """Namespaces with blocks, leases or remembered tokens, the newest first."""
        return reversed(self._roots)

    def roots(self) -> Iterator[Root]:
        """One for each of those namespaces, the newest first."""
        return reversed(self._roots.values())

    # -- changing ------------------------------------------------------------------------------------------------

    def lock_match(self, match: Match, namespace: str) -> Node:
        """Lock the path to where ``match`` ends, splitting an edge it ends inside of; return the node that ends there."""
        node = match.node
        if node is self._nothing:
            node = self._roots.setdefault(namespace, Root(namespace))
        elif match.offset < node.num_blocks:
            node = self._split(node, match.offset)
        self.lock(node)
        return node

    def lock(self, node: Node) -> None:
        """Keep ``node`` and its ancestors from eviction, until :meth:`unlock`."""
        step: Node | None = node
        while step is not None:
            locks = step.lock_count
            step.lock_count = locks + 1
            if locks:
                break
            self.num_unlocked_blocks -= step.num_blocks
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`."""
        step: Node | None = node
        while step is not None:
            locks = step.lock_count - 1
            step.lock_count = locks
            if locks:
                assert locks > 0, "unlock of a node that is not locked"
                break
            self.num_unlocked_blocks += step.num_blocks
            if not step.live_children:
                self._became_leaf(step)
            step = step.parent

    def touch(self, node: Node) -> None:
        """Count a use that ends at ``node``, which is locked.

        Its ancestors' order matters only when all below them is gone: :meth:`evict` hands it up then.  So this is O(1).
        """
        self.tick += 1
        node.last_use = self.tick
        node.uses += 1

    def refresh_retention(self, node: Node, now: float) -> None:
        """Restore the retention of every node on the path to ``node``, which is locked.  O(depth)."""
        step: Node | None = node
        while step is not None:
            if step.retention is not None:
                left = step.retention.at(now)
                step.retention = left and left.retention.hold(now)
            step = step.parent

    def retain(self, node: Node, retention: Retention, now: float) -> None:
        """Retain every node on the path to ``node``, which is locked, but those that are retained better.  O(depth)."""
        hold = retention.hold(now)
        step: Node | None = node
        while step is not None and step.num_blocks:
            if hold.outlasts(step.retention and step.retention.at(now)):
                step.retention = hold
            step = step.parent

    def _became_leaf(self, node: Node) -> None:
        """``node`` is unlocked and nothing with blocks is left below it."""
        if node.num_blocks:
            self.order.push(node)
        elif node.parent is None:
            self._drop_if_empty(node)

    def _drop_if_empty(self, root: Node) -> None:
        # Namespaces come and go with tenants and salts: an empty one must cost nothing.
        if not root.children and not root.lock_count:
            assert isinstance(root, Root)
            del self._roots[root.namespace]

    def insert(
        self,
        node: Node,
        tokens: Tokens,
        first: int,
        last: int,
        end: int,
        blocks: PackedIds,
        retention: Retention | None = None,
        compared: tuple[Edge | None, int] = (None, 0),
    ) -> tuple[Node, list[PackedIds]]:
        """Add blocks ``first`` to ``last`` of a sequence below ``node``, which ends at ``first`` and which the caller has locked.

        ``tokens[:end]`` are the sequence's; those beyond the last block are remembered.  ``blocks`` are their ids.  ``compared``
        is an edge, and how many tokens of it the sequence is known to share.
        Returns the node where the blocks end, onto which the caller's lock has moved, and the ids of the leading blocks that were
        there already, which take the place of the caller's own.
        """
        if node.evicted is None:  # nothing is remembered here, but for less than a block perhaps
            children = node.children
            if not children:
                if self._is_growable(node, 1, retention):
                    self._grow(node, tokens, end, blocks)
                    return node, []
                if node.num_tokens > node.num_blocks * self.block_size:
                    node.tokens = node.tokens[: node.num_blocks * self.block_size]
            elif tokens.item(first * self.block_size) in children:
                return self._merge(node, tokens, first, last, end, blocks, retention, compared)
            leaf = self._add_leaf(node, tokens, first, end, blocks)
            leaf.lock_count = 1  # and the caller's lock on the parent is now this child's
            return leaf, []
        return self._merge(node, tokens, first, last, end, blocks, retention, compared)

    def _merge(
        self,
        caller: Node,
        tokens: Tokens,
        first: int,
        last: int,
        end: int,
        blocks: PackedIds,
        retention: Retention | None,
        compared: tuple[Edge | None, int],
    ) -> tuple[Node, list[PackedIds]]:
        """:meth:`insert` where some of the tokens may be in the tree or remembered."""
        size = self.block_size
        node, at = caller, first
        edge, shared = compared
        # Tokens from block ``at`` on that the node's remembered ones share with the sequence's; -1: not compared yet
        ahead = min(shared, end - node.start * size) - node.num_blocks * size if node.edge is edge else -1
        known: list[PackedIds] = []
        while at < last:
            own_locks = 1 if node is caller else 0
            if node.num_tokens > node.num_blocks * size:
                at += self._revive(node, own_locks, tokens, at, last, end, blocks[4 * (at - first) :], retention, ahead)
                if at == last:
                    break
            rest = tokens[at * size : end]
            child = node.child_like(rest)
            common = 0
            if child is not None:
                common = min(shared, len(rest)) if child.edge is edge else common_prefix(child.edge, rest)
            if child is None or common < size:
                if child is not None and child.num_tokens < size:
                    self.remembered.forget(child)  # less than a block, and in the way of one that begins alike
                if not node.children and self._is_growable(node, own_locks, retention):
                    self._grow(node, tokens, end, blocks[4 * (at - first) :])
                else:
                    node = self._add_leaf(node, tokens, at, end, blocks[4 * (at - first) :])
                    self.num_unlocked_blocks += last - at
                break
            if child.num_blocks:
                whole = min(common // size, child.num_blocks, last - at)
                known.append(child.blocks[: 4 * whole])
                at += whole
                if whole < child.num_blocks:
                    child = self._split(child, whole)
                common -= whole * size
            node, ahead = child, common
        if node is not caller:
            self.lock(node)
            self.unlock(caller)
        return node, known

    def _revive(
        self,
        node: Node,
        own_locks: int,
        tokens: Tokens,
        at: int,
        last: int,
        end: int,
        blocks: PackedIds,
        retention: Retention | None,
        ahead: int,
    ) -> int:
        """Give remembered blocks of ``node``'s edge their K/V again where the sequence goes on as they do; return how many blocks.

        Afterwards the edge remembers nothing, or the sequence ends inside of what it remembers.
        """
        size = self.block_size
        live = node.num_blocks
        length = node.num_tokens - live * size
        if live and not self._is_growable(node, own_locks, retention):
            common = whole = 0  # other sequences end here: their locks must not cover more blocks
        else:
            common = ahead if ahead >= 0 else common_prefix(node.tokens[live * size :], tokens[at * size : end])
            whole = min(common // size, last - at)
        if whole:
            self._append(node, blocks[: 4 * whole])
        if at + whole == last:
            pass  # the sequence ends on this edge
        elif common == length and not node.children:
            self.remembered.set_tokens(node, tokens[node.start * size : end])
            self._append(node, blocks[4 * whole :])
            return last - at
        elif length - whole * size < size:
            self.remembered.set_tokens(node, node.tokens[: (live + whole) * size])
        else:
            self.remembered.split(node, live + whole)
        return whole

    def _is_growable(self, node: Node, own_locks: int, retention: Retention | None) -> bool:
        """Whether a sequence that ends at ``node`` may lengthen its edge: nobody else ends there, and it is retained alike."""
        if node.lock_count != own_locks or node.live_children or node.parent is None:
            return False
        hold = node.retention
        return hold is None or hold.retention == retention

    def _grow(self, node: Node, tokens: Tokens, end: int, blocks: PackedIds) -> None:
        """Lengthen a leaf's edge: a growing sequence stays one node, however many blocks it publishes."""
        node.tokens = tokens[node.start * self.block_size : end]
        self._append(node, blocks)

    def _append(self, node: Node, blocks: PackedIds) -> None:
        """Give ``blocks`` to the next tokens of ``node``'s edge."""
        remembered = self.remembered.of(node)
        revived = not node.num_blocks
        if revived:
            assert node.parent is not None
            node.parent.live_children += 1
            node.parent.uses -= node.uses  # they went up to it when the blocks were evicted
            self.num_nodes += 1
        count = len(blocks) // 4
        node.blocks += blocks
        node.num_blocks += count
        self.num_blocks += count
        if not node.lock_count:
            self.num_unlocked_blocks += count
        if revived and (siblings := node.siblings()):
            siblings.got_blocks(node)
        self.remembered.recount(node, remembered)

    def _add_leaf(self, parent: Node, tokens: Tokens, first: int, end: int, blocks: PackedIds) -> Node:
        leaf = Node(parent, first, tokens[first * self.block_size : end], blocks)
        parent.add_child(leaf, self.block_size)
        parent.live_children += 1
        self.num_nodes += 1
        self.num_blocks += leaf.num_blocks
        return leaf

    def _split(self, node: Node, offset: int) -> Node:
        """Cut ``node``'s edge after ``offset`` of its blocks; ``node`` keeps the lower part, its identity and its leases."""
        parent, cut = node.parent, offset * self.block_size
        assert parent is not None
        upper = Node(parent, node.start, node.tokens[:cut], node.blocks[: 4 * offset])
        upper.last_use = node.last_use
        upper.lock_count = 1 if node.lock_count else 0
        upper.live_children = 1
        upper.retention = node.retention
        assert parent.children is not None
        first = node.first_token
        entry = parent.children[first]
        if isinstance(entry, Siblings):
            entry.add(upper)  # begins with the same block, so it takes the place of ``node``
        else:
            parent.children[first] = upper
        node.parent = upper
        node.start += offset
        node.tokens = node.tokens[cut:]
        node.blocks = node.blocks[4 * offset :]
        node.num_blocks -= offset
        upper.children = {node.first_token: node}
        self.num_nodes += 1
        self.num_splits += 1
        return upper

    # -- evicting and remembering ----------------------------------------------------------------------------------

    def evict(self, n: int, now: float = 0.0, tell: Callable[[Node, PackedIds], None] | None = None) -> list[PackedIds]:
        """Take ``n`` blocks, or as many as can be had, off the tails of the least valuable unlocked leaves.

        ``tell`` is called with each leaf, after its blocks were taken, and those blocks.
        """
        taken: list[PackedIds] = []
        stamp = _new(EvictionStamp, (now, self.num_evicted_blocks, None))
        remembered = self.remembered
        remembers = remembered.most_blocks > 0
        missing = n
        while missing > 0:
            leaf = self.order.victim(now)
            if leaf is None:
                break
            live, blocks = leaf.num_blocks, leaf.blocks
            if live > missing:
                left = live - missing
                taken.append(blocks[4 * left :])
                leaf.blocks, leaf.num_blocks = blocks[: 4 * left], left
                live, missing = missing, 0
            else:
                taken.append(blocks)
                leaf.blocks, leaf.num_blocks = b"", 0
                missing -= live
            if tell is not None:
                tell(leaf, taken[-1])
            if remembers:
                remembered.keep(leaf, live, stamp)
            elif leaf.num_blocks:
                leaf.tokens = leaf.tokens[: leaf.num_blocks * self.block_size]
            if not leaf.num_blocks:
                self._emptied(leaf)
        count = n - missing
        self.num_blocks -= count
        self.num_unlocked_blocks -= count
        self.num_evicted_blocks += count
        if remembered.num_blocks > remembered.most_blocks:
            remembered.trim()
        return taken

    def _emptied(self, leaf: Node) -> None:
        """``leaf`` has lost its last block: its order and uses go up to its parent, which may be a leaf now."""
        parent = leaf.parent
        assert parent is not None
        leaf.retention = None
        self.num_nodes -= 1
        parent.live_children -= 1
        parent.uses += leaf.uses
        if leaf.last_use > parent.last_use:
            parent.last_use = leaf.last_use
        if not self.remembered.most_blocks:
            leaf.leave_parent()
        if not (parent.live_children or parent.lock_count):
            self._became_leaf(parent)

    # -- looking at all of it -------------------------------------------------------------------------------------------

    def nodes(self) -> Iterator[Node]:
        """Every node, the roots and those that only remember too."""
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.all_children())

    def check(self) -> None:
        """Assert every invariant of the tree alone.  O(tokens held); for tests."""
        check_tree(self)
