"""Eviction: which unlocked leaf gives up its tail blocks first."""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import log2
from typing import Literal, Protocol, get_args

from radixkv.cache.node import Node
from radixkv.cache.retention import Hold

EvictionPolicyName = Literal["lru", "lfu", "cost"]


class EvictionPolicy(Protocol):
    """Gives a leaf its value when it becomes evictable: the least is evicted first, of equals the one used longest ago."""

    uses_history: bool
    """Whether evicted blocks should be remembered for a while, so that their uses count when they come back."""

    def value(self, leaf: Node) -> float: ...

    def evicted(self, value: float) -> None:
        """A leaf of this value has been chosen for eviction."""
        ...


class LRU:
    """Least recently used first."""

    uses_history = False

    def value(self, leaf: Node) -> float:
        return leaf.last_use

    def evicted(self, value: float) -> None:
        pass


class LFU:
    """Least frequently used first, with dynamic ageing (LFU-DA; Arlitt et al., Performance Evaluation Review 27(4), 2000).

    A leaf is worth the logarithm of its uses plus the value of the leaf evicted last: what was popular once sinks as newer ones
    rise past it.  The logarithm, because a second use foretells a third better than an eleventh a twelfth.
    """

    uses_history = True

    def __init__(self) -> None:
        self._age = 0.0

    def value(self, leaf: Node) -> float:
        return self._age + log2(1 + leaf.uses)

    def evicted(self, value: float) -> None:
        if value > self._age:
            self._age = value


class Cost:
    """Least expected saving first (GreedyDual-Size-Frequency; Cherkasova, HP Labs HPL-98-69, 1998), the size being one block.

    A leaf is worth the logarithm of its uses times what its last block costs to compute again, plus the value of the leaf evicted
    last.  A block costs its matrix products, the same for each, and its attention, which grows with its position: both cost the
    same about 65,536 tokens into a sequence (2 * parameters = 4 * layers * hidden size * position: 30,000 for a Llama of 8B, 53,000
    for one of 70B).
    """

    uses_history = True

    def __init__(self, block_size: int, equal_at: int = 65536) -> None:
        self._age = 0.0
        self._blocks = equal_at / block_size

    def value(self, leaf: Node) -> float:
        return self._age + log2(1 + leaf.uses) * (1.0 + (leaf.start + leaf.num_blocks) / self._blocks)

    def evicted(self, value: float) -> None:
        if value > self._age:
            self._age = value


def eviction_policy(name: object, block_size: int) -> EvictionPolicy:
    """A new policy.  Raises ``ValueError`` naming the known ones."""
    if name == "lru":
        return LRU()
    if name == "lfu":
        return LFU()
    if name == "cost":
        return Cost(block_size)
    raise ValueError(f"policy must be one of {', '.join(get_args(EvictionPolicyName))} or an EvictionPolicy, got {name!r}")


def is_evictable(node: Node) -> bool:
    """Whether a node is an unlocked leaf with blocks."""
    return node.num_blocks > 0 and not node.lock_count and not node.live_children


class EvictionOrder:
    """The evictable leaves in order of value, retained ones last.

    Leaves are pushed when they become evictable.  Nothing is removed when a leaf is used or locked: its entry is then stale, is
    skipped when it comes up, and is swept out when stale ones are the majority.  An entry that is worth no less than the one pushed
    before it, as nearly all are under LRU, is in order where it is: only the others go to a heap.  So a push is O(1) or O(log
    leaves), and so is a victim, amortised.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self._value = policy.value
        self._evicted = None if isinstance(policy, LRU) else policy.evicted  # LRU has no use for it
        self._run: deque[tuple[float, int, Node]] = deque()
        """Entries in the order they were pushed in, which is theirs."""
        self._heap: list[tuple[float, int, Node]] = []
        """Those that were less than the run's last one."""
        self._retained: list[tuple[int, float, int, Node, Hold]] = []
        self._deadlines: list[tuple[float, int, Node, Hold]] = []
        self._sweep_at = 64

    def push(self, leaf: Node) -> None:
        hold = leaf.retention
        if hold is None:
            entry = (self._value(leaf), leaf.last_use, leaf)
            run, heap = self._run, self._heap
            if run and entry < run[-1]:
                heappush(heap, entry)
            else:
                run.append(entry)
            if len(run) + len(heap) > self._sweep_at:
                self._sweep()
        else:
            heappush(self._retained, (hold.priority, self._value(leaf), leaf.last_use, leaf, hold))
            heappush(self._deadlines, (hold.until, leaf.last_use, leaf, hold))
            if len(self._retained) > self._sweep_at:
                self._sweep()

    def victim(self, now: float) -> Node | None:
        """The least valuable leaf at ``now`` seconds; it stays until its blocks are gone.  None where there is none."""
        if self._deadlines:
            self._decay(now)
        run, heap = self._run, self._heap
        while run or heap:
            in_run = not heap or (run and run[0] < heap[0])
            value, last_use, leaf = run[0] if in_run else heap[0]
            # is_evictable(leaf), written out: this runs for every leaf that is evicted
            if leaf.last_use == last_use and leaf.num_blocks and not (leaf.lock_count or leaf.live_children or leaf.retention):
                if self._evicted is not None:
                    self._evicted(value)
                return leaf
            if in_run:
                run.popleft()
            else:
                heappop(heap)
        retained = self._retained
        while retained:
            _, value, last_use, leaf, hold = retained[0]
            if leaf.last_use == last_use and is_evictable(leaf) and leaf.retention is hold:
                self.policy.evicted(value)
                return leaf
            heappop(retained)
        return None

    def _decay(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, _, leaf, hold = heappop(deadlines)
            if leaf.retention is hold:
                leaf.retention = hold.decayed(now)
                if is_evictable(leaf):  # its entry among the retained is void now
                    self.push(leaf)

    def _sweep(self) -> None:
        """Drop the stale entries, until there are twice as many as the valid ones again."""
        self._run = deque(filter(_is_valid, self._run))
        self._heap = list(filter(_is_valid, self._heap))
        self._retained = [e for e in self._retained if e[3].last_use == e[2] and is_evictable(e[3]) and e[3].retention is e[4]]
        self._deadlines = [e for e in self._deadlines if e[3] is e[2].retention]
        heapify(self._heap)
        heapify(self._retained)
        heapify(self._deadlines)
        self._sweep_at = 2 * max(len(self._run) + len(self._heap), len(self._retained)) + 64

    def leaves(self) -> set[Node]:
        """Every leaf that has a valid entry.  O(entries); for checks."""
        plain = {entry[2] for entry in (*self._run, *self._heap) if _is_valid(entry)}
        return plain | {e[3] for e in self._retained if e[3].last_use == e[2] and is_evictable(e[3]) and e[3].retention is e[4]}


def _is_valid(entry: tuple[float, int, Node]) -> bool:
    """Whether the leaf of an entry that is not of the retained ones is as it was when it was pushed."""
    _, last_use, leaf = entry
    return leaf.last_use == last_use and is_evictable(leaf) and leaf.retention is None
