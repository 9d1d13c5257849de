"""Remembered: tokens of evicted blocks that stay in the tree for a while, to say what was evicted and what was never there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from radixkv.cache.node import EvictionStamp, Node, Root
from radixkv.cache.tokens import Tokens

_new = tuple.__new__  # what EvictionStamp(...) does in the end, at half the time


class Remembered:
    """Keeps no more than ``most_blocks`` blocks' tokens on the edges of a tree, and forgets those evicted first.

    Every operation is O(1), or O(nodes forgotten), amortised.  ``drop_if_empty`` is called with a root that has lost a child.
    """

    def __init__(self, block_size: int, most_blocks: int, drop_if_empty: Callable[[Root], None]) -> None:
        self._size = block_size
        self.most_blocks = most_blocks
        self.num_blocks = 0
        """Remembered now, incomplete ones among them."""
        self._drop_if_empty = drop_if_empty
        self._queue: deque[tuple[Node, EvictionStamp]] = deque()
        """Nodes with evicted blocks, those evicted first in front, with their stamps; void where a node has another stamp now."""
        self._num_void = 0
        """Entries of the queue that are void, at most."""

    def keep(self, leaf: Node, lost: int, stamp: EvictionStamp) -> None:
        """``leaf`` has just lost ``lost`` blocks, whose tokens are on its edge still."""
        if leaf.evicted is None:
            self._queue.append((leaf, stamp))
            lost = -(-leaf.num_tokens // self._size) - leaf.num_blocks  # its incomplete block, if any, too
            leaf.evicted = stamp
        else:
            leaf.evicted = _new(EvictionStamp, (stamp.time, stamp.evicted_before, leaf.evicted.first or leaf.evicted))
        self.num_blocks += lost

    def of(self, node: Node) -> int:
        """Evicted blocks whose tokens the node's edge remembers, an incomplete last one among them."""
        return -(-node.num_tokens // self._size) - node.num_blocks if node.evicted is not None else 0

    def recount(self, node: Node, before: int) -> None:
        """Keep the count of remembered blocks right: ``before`` were the node's before a change."""
        if node.evicted is not None:
            if node.num_tokens == node.num_blocks * self._size:
                node.evicted = None
                self._void(1)
            elif node.num_blocks:  # those that are left may have gone long before those that came back
                node.evicted = node.evicted.oldest
            self.num_blocks += self.of(node) - before

    def set_tokens(self, node: Node, tokens: Tokens) -> None:
        before = self.of(node)
        node.tokens = tokens
        self.recount(node, before)

    def split(self, node: Node, offset: int) -> None:
        """Cut ``node``'s edge after ``offset`` blocks, where its remembered ones begin or later; ``node`` keeps the upper part."""
        cut = offset * self._size
        lower = Node(node, node.start + offset, node.tokens[cut:], b"")
        lower.uses = node.uses  # all went up to ``node``, which keeps them
        lower.children = node.children
        for child in lower.all_children():
            child.parent = lower
        assert node.evicted is not None
        lower.evicted = node.evicted.oldest
        self._queue.append((lower, lower.evicted))
        self.num_blocks += self.of(lower)
        self.set_tokens(node, node.tokens[:cut])
        node.children = {lower.first_token: lower}

    def add_tail(self, node: Node, tokens: Tokens) -> None:
        """Remember ``tokens``, fewer than a block, as having followed ``node``, whose blocks the caller has locked."""
        if node.num_tokens > node.num_blocks * self._size or node.child_like(tokens) is not None:
            return  # something else that begins alike is remembered there: that will do
        tail = Node(node, node.start + node.num_blocks, tokens, b"")
        tail.evicted = EvictionStamp(0.0, 0)
        self._queue.append((tail, tail.evicted))
        self.num_blocks += 1
        node.add_child(tail, self._size)
        self.trim()

    def trim(self) -> None:
        """Forget until no more is remembered than allowed."""
        most = self.most_blocks
        while self.num_blocks > most:
            node, stamp = self._queue.popleft()  # forgetting may sweep the queue
            evicted = node.evicted
            if evicted is not stamp and (evicted is None or evicted.first is not stamp):
                continue
            if node.children or node.num_blocks or isinstance(node.parent, Root):
                self.forget(node)
            else:  # the usual case
                node.evicted = None
                self.num_blocks -= -(-node.num_tokens // self._size)
                node.leave_parent()

    def forget(self, node: Node) -> None:
        """Forget the remembered tokens of a node and all below it."""
        below = [node]
        if node.children:
            for step in below:
                below.extend(step.all_children())
            below.reverse()
        for step in below:
            live = step.num_blocks
            if step.evicted is not None:
                self.num_blocks -= -(-step.num_tokens // self._size) - live
                step.evicted = None
            if live:
                step.tokens = step.tokens[: live * self._size]
                continue
            parent = step.parent
            step.leave_parent()
            if parent.__class__ is Root:
                self._drop_if_empty(parent)
        self._void(len(below))

    def _void(self, entries: int) -> None:
        """``entries`` of the queue have become void: sweep them out when they are as many as may be valid."""
        self._num_void += entries
        if self._num_void > self.most_blocks + 16:
            self._queue = deque(entry for entry in self._queue if _is_remembered(*entry))
            self._num_void = 0

    def forget_all(self) -> None:
        """Forget every token that has no block."""
        while self._queue:
            node, stamp = self._queue.popleft()
            if _is_remembered(node, stamp):
                self.forget(node)

    def queued(self) -> set[Node]:
        """The nodes that will be forgotten some day.  O(nodes); for checks."""
        return {node for node, stamp in self._queue if _is_remembered(node, stamp)}


def _is_remembered(node: Node, stamp: EvictionStamp) -> bool:
    """Whether a node still has tokens that were first remembered with this stamp."""
    return node.evicted is not None and node.evicted.oldest is stamp
