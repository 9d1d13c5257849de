"""PrefixCache: pool, tree and namespaces behind one door; the only way to KV memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import index
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import ArrayLike

from radixkv.cache.attribution import attribute, found_elsewhere
from radixkv.cache.block_pool import BlockIds, BlockPool, PackedIds, unpack
from radixkv.cache.events import Event, Evicted, Hit, Listener, Stored
from radixkv.cache.eviction import EvictionPolicy, EvictionPolicyName, eviction_policy
from radixkv.cache.invariants import check_leases
from radixkv.cache.lease import Lease
from radixkv.cache.node import Node, Root
from radixkv.cache.radix_tree import Match, RadixTree
from radixkv.cache.retention import Retention
from radixkv.cache.snapshot import Snapshot, take_snapshot
from radixkv.cache.stats import CacheStats, Recorder
from radixkv.cache.tokens import Tokens, as_tokens, keep
from radixkv.cache.tree_order import TreeOrder, tree_order

_INT32 = np.dtype(np.int32)

_LOOKED_UP_ELSEWHERE = 64
"""Prompts that :meth:`PrefixCache.stats` looks up in other namespaces."""


class BlockCopy(NamedTuple):
    """Copy the first ``num_rows`` token rows of block ``source`` to block ``target``."""

    source: int
    target: int
    num_rows: int


class _Source:
    """A block that copies yet to be made will read."""

    __slots__ = ("copies", "node")

    def __init__(self, node: Node | None) -> None:
        self.node = node
        """Where it is in the tree, or was before a split or an eviction; None while it is a sequence's own."""
        self.copies = 0


class PrefixCache:
    """Keeps the K/V blocks of finished and running sequences in a radix tree, so that prompts that begin alike share them.

    The cache hands out block ids and says which K/V are in them; its user owns the memory, computes the K/V and does the
    copies that :meth:`take_copies` returns.  One thread at a time.

    A sequence's life::

        lease = cache.acquire(prompt)             # None: no room now; try again when another sequence has gone
        copies = cache.take_copies()              # do these before writing any K/V
        ...                                       # compute positions lease.num_cached_tokens .. len(prompt)
        cache.publish(lease, tokens, len(prompt)) # others can share its full blocks from here on
        cache.extend(lease, 1)                    # room for one more token; False: no room now
        cache.release(lease)                      # full blocks stay cached until they are evicted

    Tokens may be any integers in a flat sequence.  An int32 array that is read-only (``array.flags.writeable = False``) is kept
    without copying: its owner promises that these tokens don't change any more.

    Parameters
    ----------
    policy
        Which blocks are evicted first: ``lru``, ``lfu``, ``cost``, or a policy of your own.
    enable_prefix_caching
        False only hands out blocks: nothing is found again.
    attribution
        Say why prompts missed (:attr:`Lease.miss`, :meth:`stats`).  Remembers the tokens of as many evicted blocks as the cache
        has, and takes a fifth more time: nothing beside a model, so that radixkv's engine asks for it.
    clock
        Seconds; for retention and for how long ago something was evicted.  It may jump.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        policy: EvictionPolicyName | EvictionPolicy = "lru",
        enable_prefix_caching: bool = True,
        attribution: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.attribution = attribution and enable_prefix_caching
        if isinstance(policy, str | type) or not hasattr(policy, "uses_history"):
            policy = eviction_policy(policy, block_size)
        remembers = self.attribution or (enable_prefix_caching and policy.uses_history)
        self.tree = RadixTree(block_size, policy, remember_blocks=num_blocks if remembers else 0)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._clock = clock
        self._leases: set[Lease] = set()
        self._prefilling: dict[Lease, None] = {}
        """Leases with whole blocks of their prompts yet to be published, the newest last."""
        self._ended: deque[Lease] = deque(maxlen=_LOOKED_UP_ELSEWHERE)
        """Leases released lately whose prompts were partly unknown in their namespace."""
        self._copies: dict[Lease, BlockCopy] = {}
        """Copies yet to be made, by the lease that needs them; each holds a reference to its source."""
        self._sources: dict[int, _Source] = {}
        """Sources of those copies, by block."""
        self._unwritten: list[BlockIds] = []
        self._retains = False
        self._recorder = Recorder()
        self._listeners: list[Listener] = []
        self._tree_order: tuple[list[object], TreeOrder] = [], tree_order((), block_size)
        """The last answer, and what it was the answer to."""

    # -- a sequence's life ----------------------------------------------------------------------------------------

    def match(self, tokens: ArrayLike, namespace: str = "") -> Match:
        """The longest cached prefix of ``tokens``, int32 ``[n]``.  Changes nothing.  O(tokens matched) compared as memory."""
        return self.tree.match(as_tokens(tokens), namespace)

    def acquire(
        self,
        tokens: ArrayLike,
        *,
        namespace: str = "",
        max_new_tokens: int = 0,
        retention: Retention | None = None,
        headroom: int = 0,
        resumed: bool = False,
    ) -> Lease | None:
        """Lock the longest cached prefix of ``tokens`` and reserve blocks for the rest, evicting if need be.

        Returns ``None``, having changed nothing, when that many blocks can't be had now.

        Parameters
        ----------
        tokens
            The prompt, int32 ``[n]``, n at least 1.
        namespace
            Tenant or salt; prefixes are only found in the namespace that published them.
        max_new_tokens
            Reserve room for this many tokens after the prompt.
        retention
            Evict this sequence's whole path after blocks without retention, for a while, counted from its release.
        headroom
            Blocks that must be left free or evictable, so that running sequences can grow.
        resumed
            A preempted sequence comes back: its prompt is not counted again.

        Raises ``ValueError``, or ``TypeError`` for a number that is no integer, naming the argument; then nothing has changed.
        O(nodes on the path + tokens found, compared as memory), and O(log leaves) for each leaf that eviction empties.
        """
        tokens = as_tokens(tokens)
        end = len(tokens)
        if not end:
            raise ValueError("tokens must hold at least 1 token, got none")
        if max_new_tokens or headroom:
            max_new_tokens, headroom = index(max_new_tokens), index(headroom)
            if max_new_tokens < 0 or headroom < 0:
                raise ValueError(f"max_new_tokens and headroom must be at least 0, got {max_new_tokens} and {headroom}")
        if retention is not None:
            if not isinstance(retention, Retention):
                raise ValueError(f"retention must be a Retention, got {retention!r}")
            retention.validate()
        size, tree = self.block_size, self.tree
        match = tree.match(tokens, namespace)
        cached_blocks = match.num_blocks
        needed = -(-(end + max_new_tokens) // size) - cached_blocks
        available = self.num_available_blocks
        spare = available - cached_blocks - needed - headroom
        if spare < 1:  # count exactly: blocks that are locked already are not locked away by this sequence
            spare = available - _unlocked_blocks(match) - needed - headroom
            if spare < 0:
                return None
        matched = cached_blocks * size
        # The source of a copy is held until the copy is made, and may be the very block that the last allocation needs.
        rows = match.partial_rows if match.partial_rows and spare and not self._is_unwritten(match.partial_block) else 0
        matched += rows

        now = self._clock()
        finding = None
        if self.attribution:  # before locking splits the edge where the match ends, and eviction changes what is there
            finding = attribute(tree, match, tokens, namespace, matched, self._prefilling, now)

        node = tree.lock_match(match, namespace)
        if rows:
            self._hold_source(match.partial_block, match.edge)
        fresh = self._take(needed, now)
        table = np.frombuffer(bytearray().join(match.blocks + fresh), _INT32)
        assert len(table) == cached_blocks + needed, "fewer blocks could be had than were counted"
        lease = Lease(node, namespace, table, cached_blocks, end + max_new_tokens, matched, matched if matched < end else end - 1)
        if rows:
            self._copies[lease] = BlockCopy(match.partial_block, table.item(cached_blocks), rows)
        if retention is not None:
            lease._retention = retention
            self._retains = True
        if self._retains:
            tree.refresh_retention(node, now)
        if finding is not None:
            lease._prompt = tokens.copy() if tokens.flags.writeable else tokens
            lease._finding = finding
            if end // size > cached_blocks:
                self._prefilling[lease] = None
        if not resumed:
            lease._counts = self._recorder.record(namespace, end, lease.num_cached_tokens, finding)
        self._leases.add(lease)
        if self._listeners and cached_blocks:
            self._tell(Hit(namespace, keep(tokens[: cached_blocks * size]), 0, match.block_ids()))
        return lease

    def extend(self, lease: Lease, n: int = 1) -> bool:
        """Make room for ``n`` more tokens.  False, having changed nothing, when there are no blocks for them now."""
        if lease._released:
            _refuse_released()
        n = index(n)
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        needed = -(-(lease.num_tokens + n) // self.block_size) - lease._num_blocks
        if needed > 0:
            if needed > self.num_available_blocks:
                return False
            fresh = self._take(needed, self._clock())
            end = lease._num_blocks + needed
            if end > len(lease._table):
                lease._table = np.concatenate((lease.block_table, np.empty(end, dtype=np.int32)))
            lease._table[lease._num_blocks : end] = unpack(*fresh)
            lease._num_blocks = end
            lease.block_table = lease._table[:end]
        lease.num_tokens += n
        return True

    def publish(self, lease: Lease, tokens: ArrayLike, num_computed: int, *, written: bool = True) -> None:
        """Offer the full blocks among the first ``num_computed`` of ``tokens`` to the tree.

        Where another sequence published the same tokens first, the lease moves onto that sequence's block and its own is freed:
        ``block_table`` and ``write_start`` may change.  O(new blocks) and one look-up.

        ``written=False`` publishes blocks whose K/V are not computed yet.  They must be before anyone reads them and before the
        next copies are made: so sequences scheduled in one step share a prefix that one of them computes in that step.
        """
        if lease._released:
            _refuse_released()
        if tokens is not lease._prompt:
            tokens = as_tokens(tokens)
        num_computed = index(num_computed)
        most = min(lease.num_tokens, len(tokens))
        if not 0 <= num_computed <= most:
            raise ValueError(
                f"num_computed must be from 0 to {most} ({len(tokens)} tokens, room for {lease.num_tokens}), got {num_computed}"
            )
        lease.num_computed_tokens = num_computed
        first, last = lease._num_published, num_computed // self.block_size
        if last <= first or not self.enable_prefix_caching:
            return
        own = lease._table[first:last]
        finding = lease._finding
        # Where the prompt parted from an edge before its end, so does the sequence.
        compared = (finding.theirs, finding.theirs_before) if finding is not None and finding.unknown else (None, 0)
        node, known = self.tree.insert(lease._node, tokens, first, last, num_computed, own.tobytes(), lease._retention, compared)
        if known:
            own = self._move_onto(lease, known, own)
        if not written:
            self._unwritten.append(own.copy())
        lease._node = node
        lease._num_published = last
        if self._sources:
            for block, source in self._sources.items():
                if source.node is None and (own == block).any():
                    source.node = node
        if self._prefilling and lease in self._prefilling and last >= len(lease._prompt) // self.block_size:
            del self._prefilling[lease]
        if self._listeners and len(own):
            start = (last - len(own)) * self.block_size
            self._tell(Stored(lease.namespace, keep(tokens[: last * self.block_size]), start, own.copy()))

    def fork(self, lease: Lease, n: int) -> list[Lease] | None:
        """``n`` copies of a sequence that go their own ways: they share its computed full blocks and copy its partial one.

        Room beyond the computed tokens is not inherited.  ``None``, having changed nothing, when there are no blocks for the
        partial copies now.  Call it between steps, when the K/V that ``publish`` was told of are computed and the lease's copies
        made: before that it raises ``ValueError``.  O(n * blocks).
        """
        if lease._released:
            _refuse_released()
        n = index(n)
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if lease in self._copies:
            raise ValueError("a lease whose copies were not taken yet can't be forked: call take_copies and make them first")
        full, rows = divmod(lease.num_computed_tokens, self.block_size)
        if full < lease._num_published:  # the whole prompt was cached: its last token is yet to be computed, but not its K/V
            full, rows = lease._num_published, 0
        if rows and n > self.num_available_blocks:
            return None
        children = []
        num_tokens = full * self.block_size + rows
        for _ in range(n):
            self.pool.incref(lease._table[lease._num_published : full])
            fresh = self._take(1 if rows else 0, self._clock())
            table = np.concatenate((lease._table[:full], unpack(*fresh)))
            child = Lease(
                lease._node, lease.namespace, table, lease._num_published, num_tokens, num_tokens, lease.num_computed_tokens
            )
            child._retention = lease._retention
            self.tree.lock(child._node)
            if rows:
                source = lease._table.item(full)
                self._hold_source(source, None)
                self._copies[child] = BlockCopy(source, table.item(full), rows)
            self._leases.add(child)
            children.append(child)
        return children

    def release(self, lease: Lease) -> None:
        """End a lease: its published blocks stay cached, the others are free.  O(nodes that it alone locked + log leaves)."""
        if lease._released:
            _refuse_released()
        lease._released = True
        self._leases.remove(lease)
        if self._copies:
            self._drop_copy(lease)
        node, published = lease._node, lease._num_published
        finding = lease._finding
        if finding is not None:
            if self._prefilling:
                self._prefilling.pop(lease, None)
            size = self.block_size
            if node.num_tokens == node.num_blocks * size and published * size < lease.num_computed_tokens:
                # The last tokens fill no block; whoever comes with them again will want to know that they were here.
                tail = lease._prompt[published * size : min(lease.num_computed_tokens, (published + 1) * size - 1)]
                if len(tail):
                    self.tree.remembered.add_tail(node, tail)
            if self.tree.num_namespaces > 1 and finding.unknown >= size and lease._counts is not None:
                self._ended.append(lease)
        self.tree.touch(node)
        if lease._retention is not None:
            self.tree.retain(node, lease._retention, self._clock())
        self.tree.unlock(node)
        if lease._num_blocks > published:
            self.pool.decref(lease._table[published : lease._num_blocks])

    def take_copies(self) -> list[BlockCopy]:
        """The copies that sequences acquired since the last call need, in order.  Carry them out before any K/V is written."""
        self._unwritten.clear()
        if not self._copies:
            return []
        copies = list(self._copies.values())
        self._copies.clear()
        for copy in copies:
            self._let_go_of_source(copy.source)
        return copies

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free or could be after evicting."""
        available = self.pool.num_free + self.tree.num_unlocked_blocks
        if self._sources:  # one may be unlocked in the tree, yet evicting it frees nothing until the copy is made
            available -= sum(source.node is not None and not source.node.lock_count for source in self._sources.values())
        return available

    def evict(self, n: int) -> int:
        """Free ``n`` blocks, or as many as can be, by dropping the least valuable cached ones; return how many."""
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        before = self.pool.num_free
        while (missing := n - (self.pool.num_free - before)) > 0:
            taken = self._evict(missing, self._clock())
            if not taken:
                break
            self.pool.decref(unpack(*taken))
        return self.pool.num_free - before

    def reset(self) -> None:
        """Forget every cached prefix that no lease holds, and all that was remembered of evicted ones."""
        self.evict(self.pool.num_blocks)
        self.tree.remembered.forget_all()

    # -- looking ----------------------------------------------------------------------------------------------------

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each :class:`Stored`, :class:`Evicted` and :class:`Hit` from now on; returns what ends it.

        It is called within the cache's own operations, so it must not use the cache, nor raise.  Costs nothing while nobody
        listens.
        """
        self._listeners.append(listener)

        def stop() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop

    def stats(self) -> CacheStats:
        """Counters since the start, and blocks now.  O(namespaces)."""
        self._look_elsewhere()
        cached = self.tree.num_unlocked_blocks
        return CacheStats(
            blocks_total=self.pool.num_blocks,
            blocks_free=self.pool.num_free,
            blocks_cached=cached,
            blocks_locked=self.pool.num_blocks - self.pool.num_free - cached,
            nodes=self.tree.num_nodes,
            evicted_blocks=self.tree.num_evicted_blocks,
            total=self._recorder.total(),
            namespaces=self._recorder.namespaces(),
        )

    @property
    def num_ended(self) -> int:
        """Sequences that have ended so far, in which the ages of a snapshot are counted."""
        return self.tree.tick

    def snapshot(self, max_nodes: int = 500) -> Snapshot:
        """The radix tree to be drawn: its ``max_nodes`` largest nodes, and the others added up where they hang.

        Looks at 4,096 nodes at most, the nearest to the root, and adds up all beyond in one: about 6 ms for 100,000 nodes.
        """
        max_nodes = index(max_nodes)
        if max_nodes < 1:
            raise ValueError(f"max_nodes must be at least 1, got {max_nodes}")
        return take_snapshot(self.tree, max_nodes)

    def tree_order(self, leases: Sequence[Lease]) -> TreeOrder:
        """``leases`` put so that those which share blocks are neighbours, and which blocks those are.

        O(leases), and far less where neither these leases nor the tree above them have changed since the last call.  Where their
        paths through the tree are long, several nodes a lease, nothing counts as shared.
        """
        key: list[object] = [lease._node for lease in leases]
        key.append(self.tree.num_splits)
        if key != self._tree_order[0]:
            self._tree_order = key, tree_order(leases, self.block_size)
        return self._tree_order[1]

    def check(self) -> None:
        """Assert every invariant of pool, tree and leases.  O(blocks + tokens held); for tests."""
        self.pool.check()
        self.tree.check()
        check_leases(self)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _is_unwritten(self, block: int) -> bool:
        return any((blocks == block).any() for blocks in self._unwritten)

    def _take(self, n: int, now: float) -> list[PackedIds]:
        """``n`` blocks that are known to be available, in pieces; evicted ones are passed on as they are, counted once already."""
        pool = self.pool
        free = pool.num_free
        if n <= free:
            return [pool.allocate_packed(n)]
        if self._copies:  # an evicted block may be the source of a copy, and so not free yet
            self.evict(n - free)
            return [pool.allocate_packed(n)]
        taken = self._evict(n - free, now)
        if free:
            taken.append(pool.allocate_packed(free))
        return taken

    def _evict(self, n: int, now: float) -> list[PackedIds]:
        return self.tree.evict(n, now, self._tell_evicted if self._listeners else None)

    def _move_onto(self, lease: Lease, known: list[PackedIds], own: BlockIds) -> BlockIds:
        """Put blocks that the tree has already in the place of the lease's own; returns those of its own that remain."""
        self._drop_copy(lease)
        theirs = unpack(*known)
        count, first = len(theirs), lease._num_published
        self.pool.decref(own[:count])
        lease._table[first : first + count] = theirs
        lease.write_start = max(lease.write_start, (first + count) * self.block_size)
        return own[count:]

    def _hold_source(self, block: int, node: Node | None) -> None:
        self.pool.incref(np.array([block], dtype=np.int32))
        source = self._sources.setdefault(block, _Source(node))
        source.copies += 1

    def _let_go_of_source(self, block: int) -> None:
        self.pool.decref(np.array([block], dtype=np.int32))
        source = self._sources[block]
        source.copies -= 1
        if not source.copies:
            del self._sources[block]

    def _drop_copy(self, lease: Lease) -> None:
        """Forget the lease's pending copy, if it has one: the target is no longer its own."""
        if self._copies and (copy := self._copies.pop(lease, None)):
            self._let_go_of_source(copy.source)

    def _look_elsewhere(self) -> None:
        """Of prompts that ended lately, find what other namespaces have that was unknown in their own."""
        while self._ended:
            lease = self._ended.popleft()
            finding, counts = lease._finding, lease._counts
            assert finding is not None
            assert counts is not None
            elsewhere = found_elsewhere(self.tree, lease.namespace, lease._prompt, finding.position)
            counts.move_to_namespace(elsewhere, finding)

    def _tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    def _tell_evicted(self, leaf: Node, packed: PackedIds) -> None:
        path = leaf.path()
        root = path[0]
        assert isinstance(root, Root)
        size = self.block_size
        start = (leaf.start + leaf.num_blocks) * size
        blocks = unpack(packed)
        tokens: Tokens = np.concatenate([node.tokens for node in path])[: start + len(blocks) * size]
        self._tell(Evicted(root.namespace, tokens, start, blocks))


def _refuse_released() -> NoReturn:
    raise ValueError("the lease was released before")


def _unlocked_blocks(match: Match) -> int:
    """Blocks along a match that count as evictable now and will not once it is locked."""
    node, total, offset = match.node, 0, match.offset
    while node.parent is not None and node.lock_count == 0:
        total += offset
        node = node.parent
        offset = node.num_blocks
    return total
