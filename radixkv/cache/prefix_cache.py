"""PrefixCache: pool, tree and namespaces behind one door; the only way to KV memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from radixkv.cache.block_pool import BlockIds, BlockPool
from radixkv.cache.eviction import EvictionPolicyName, eviction_policy
from radixkv.cache.radix_tree import Match, Node, RadixTree, Tokens
from radixkv.cache.stats import CacheStats, Recorder


class BlockCopy(NamedTuple):
    """Copy the first ``num_rows`` token rows of block ``source`` to block ``target``."""

    source: int
    target: int
    num_rows: int


class Lease:
    """A sequence's hold on its blocks, from ``acquire`` or ``fork`` until ``release``.  Only the cache changes it."""

    __slots__ = (
        "_node", "_num_blocks", "_num_published", "_released", "_table", "namespace", "num_cached_tokens", "num_computed_tokens",
        "num_matched_tokens", "num_tokens", "write_start",
    )  # fmt: skip

    def __init__(self, node: Node, namespace: str, table: BlockIds, num_tokens: int) -> None:
        self._node = node
        self._table = table
        self._num_blocks = len(table)
        self._num_published = 0
        self._released = False
        self.namespace = namespace
        self.num_tokens = num_tokens
        """Tokens there is room for, as promised by ``acquire`` and ``extend``."""
        self.num_matched_tokens = 0
        """Leading tokens whose K/V were found in the cache."""
        self.num_cached_tokens = 0
        """The same, less the last token of the prompt, which is always computed for its logits."""
        self.num_computed_tokens = 0
        """As last told by ``publish``."""
        self.write_start = 0
        """K/V at positions before this are there already, mostly in blocks of another sequence: never write them."""

    @property
    def block_table(self) -> BlockIds:
        """Block ids in order of position: int32 ``[num_blocks]``, a view.  ``publish`` and ``extend`` may change it."""
        return self._table[: self._num_blocks]


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

    ``publish`` may also run before the K/V are computed, if they are computed before anyone reads them and before the next
    copies are taken: sequences scheduled in one step can so share a prefix that one of them computes in that step.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, policy: EvictionPolicyName = "lru", enable_prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = RadixTree(block_size, eviction_policy(policy))
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._leases: set[Lease] = set()
        self._copies: list[tuple[Lease, BlockCopy]] = []
        self._unwritten: set[int] = set()
        self._recorder = Recorder()

    # -- a sequence's life ----------------------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """The longest cached prefix of ``tokens``, int32 ``[n]``.  Changes nothing.  O(n) compared as memory."""
        return self.tree.match(np.asarray(tokens, dtype=np.int32), namespace)

    def acquire(
        self, tokens: Tokens, *, namespace: str = "", max_new_tokens: int = 0, headroom: int = 0, resumed: bool = False
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
        headroom
            Blocks that must be left free or evictable, so that running sequences can grow.
        resumed
            A preempted sequence comes back: its prompt is not counted again.
        """
        if not len(tokens):
            raise ValueError("tokens must hold at least 1 token, got none")
        if max_new_tokens < 0 or headroom < 0:
            raise ValueError(f"max_new_tokens and headroom must be at least 0, got {max_new_tokens} and {headroom}")
        tokens = np.asarray(tokens, dtype=np.int32)
        size = self.block_size
        match = self.tree.match(tokens, namespace)
        num_tokens = len(tokens) + max_new_tokens
        needed = -(-num_tokens // size) - match.num_blocks
        available = self.num_available_blocks - _unlocked_blocks(match)
        if needed + headroom > available:
            return None
        copies_rows = match.partial_rows > 0 and match.partial_block not in self._unwritten
        # The source of a copy is held until the copy is made, and may be the very block that the last allocation needs.
        copies_rows = copies_rows and needed + headroom < available

        node = self.tree.lock_match(match, namespace)
        shared = match.block_ids()
        self.pool.incref(shared)
        if copies_rows:
            source = np.array([match.partial_block], dtype=np.int32)
            self.pool.incref(source)
        fresh = self._allocate(needed)
        lease = Lease(node, namespace, np.concatenate((shared, fresh)), num_tokens)
        if copies_rows:
            self._copies.append((lease, BlockCopy(match.partial_block, int(fresh[0]), match.partial_rows)))
        lease.num_matched_tokens = match.num_blocks * size + (match.partial_rows if copies_rows else 0)
        lease.num_cached_tokens = min(lease.num_matched_tokens, len(tokens) - 1)
        lease.num_computed_tokens = lease.num_cached_tokens
        lease.write_start = lease.num_matched_tokens
        lease._num_published = match.num_blocks
        self.tree.touch(node)
        self._leases.add(lease)
        if not resumed:
            self._recorder.record(namespace, len(tokens), lease.num_cached_tokens)
        return lease

    def extend(self, lease: Lease, n: int = 1) -> bool:
        """Make room for ``n`` more tokens.  False, having changed nothing, when there are no blocks for them now."""
        self._require_held(lease)
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        needed = -(-(lease.num_tokens + n) // self.block_size) - lease._num_blocks
        if needed > 0:
            if needed > self.num_available_blocks:
                return False
            fresh = self._allocate(needed)
            end = lease._num_blocks + needed
            if end > len(lease._table):
                lease._table = np.concatenate((lease.block_table, np.empty(end, dtype=np.int32)))
            lease._table[lease._num_blocks : end] = fresh
            lease._num_blocks = end
        lease.num_tokens += n
        return True

    def publish(self, lease: Lease, tokens: Tokens, num_computed: int) -> None:
        """Offer the full blocks among the first ``num_computed`` of ``tokens`` to the tree.

        Where another sequence published the same tokens first, the lease moves onto that sequence's block and its own is freed:
        ``block_table`` and ``write_start`` may change.  O(new blocks) and one look-up.
        """
        self._require_held(lease)
        tokens = np.asarray(tokens, dtype=np.int32)
        most = min(lease.num_tokens, len(tokens))
        if not 0 <= num_computed <= most:
            raise ValueError(
                f"num_computed must be from 0 to {most} ({len(tokens)} tokens, room for {lease.num_tokens}), got {num_computed}"
            )
        lease.num_computed_tokens = num_computed
        first, last = lease._num_published, num_computed // self.block_size
        if last <= first or not self.enable_prefix_caching:
            return
        own = lease._table[first:last].copy()
        node, known = self.tree.insert(lease._node, tokens[first * self.block_size : last * self.block_size], own)
        if len(known):
            self._drop_copies(lease)
            self.pool.incref(known)
            self.pool.decref(own[: len(known)])
            lease._table[first : first + len(known)] = known
            lease.write_start = max(lease.write_start, (first + len(known)) * self.block_size)
        added = own[len(known) :]
        self.pool.incref(added)
        self._unwritten.update(added.tolist())
        lease._num_published = last
        self._move(lease, node)

    def fork(self, lease: Lease, n: int) -> list[Lease] | None:
        """``n`` copies of a sequence that go their own ways: they share its computed full blocks and copy its partial one.

        Room beyond the computed tokens is not inherited.  ``None``, having changed nothing, when there are no blocks for the
        partial copies now.  Call it between steps, when the K/V that ``publish`` was told of are computed.
        """
        self._require_held(lease)
        full, rows = divmod(lease.num_computed_tokens, self.block_size)
        if full < lease._num_published:  # the whole prompt was cached: its last token is yet to be computed, but not its K/V
            full, rows = lease._num_published, 0
        if rows and n > self.num_available_blocks:
            return None
        children = []
        for _ in range(n):
            shared = lease._table[:full].copy()
            self.pool.incref(shared)
            fresh = self._allocate(1 if rows else 0)
            child = Lease(lease._node, lease.namespace, np.concatenate((shared, fresh)), full * self.block_size + rows)
            self.tree.lock(child._node)
            child.num_matched_tokens = child.write_start = child.num_tokens
            child.num_cached_tokens = child.num_computed_tokens = lease.num_computed_tokens
            child._num_published = lease._num_published
            if rows:
                source = lease._table[full : full + 1]
                self.pool.incref(source)
                self._copies.append((child, BlockCopy(int(source[0]), int(fresh[0]), rows)))
            self._leases.add(child)
            children.append(child)
        return children

    def release(self, lease: Lease) -> None:
        """End a lease: its published blocks stay cached, the others are free at once."""
        self._require_held(lease)
        lease._released = True
        self._leases.remove(lease)
        self._drop_copies(lease)
        self.tree.touch(lease._node)
        self.tree.unlock(lease._node)
        self.pool.decref(lease.block_table)

    def take_copies(self) -> list[BlockCopy]:
        """The copies that sequences acquired since the last call need, in order.  Carry them out before any K/V is written."""
        copies = [copy for _, copy in self._copies]
        for copy in copies:
            self.pool.decref(np.array([copy.source], dtype=np.int32))
        self._copies.clear()
        self._unwritten.clear()
        return copies

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free or could be after evicting."""
        # A block that a pending copy reads may be unlocked in the tree, yet evicting it frees nothing until the copy is made.
        return self.pool.num_free + self.tree.num_unlocked_blocks - len(self._copies)

    def evict(self, n: int) -> int:
        """Free ``n`` blocks, or as many as can be, by dropping the least valuable cached ones; return how many."""
        before = self.pool.num_free
        while (missing := n - (self.pool.num_free - before)) > 0 and len(self.tree.policy):
            blocks = self.tree.evict_tail(missing)
            self._recorder.evicted_blocks += len(blocks)
            self.pool.decref(blocks)
        return self.pool.num_free - before

    def reset(self) -> None:
        """Forget every cached prefix that no lease holds."""
        self.evict(self.pool.num_blocks)

    def stats(self) -> CacheStats:
        """Counters since the start, and blocks now.  O(namespaces)."""
        cached = self.tree.num_unlocked_blocks
        return CacheStats(
            blocks_total=self.pool.num_blocks,
            blocks_free=self.pool.num_free,
            blocks_cached=cached,
            blocks_locked=self.pool.num_blocks - self.pool.num_free - cached,
            nodes=self.tree.num_nodes,
            evicted_blocks=self._recorder.evicted_blocks,
            total=self._recorder.total,
            namespaces=self._recorder.namespaces(),
        )

    def check(self) -> None:
        """Assert every invariant of pool, tree and leases.  O(blocks + tokens held); for tests."""
        self.pool.check()
        self.tree.check()
        held = np.zeros(self.pool.num_blocks, dtype=np.int64)
        ends: dict[int, int] = {}
        for lease in self._leases:
            assert len(np.unique(lease.block_table)) == lease._num_blocks, "a lease holds a block twice"
            np.add.at(held, lease.block_table, 1)
            ends[id(lease._node)] = ends.get(id(lease._node), 0) + 1
            path = [lease._node]
            while path[-1].parent is not None:
                path.append(path[-1].parent)
            published = np.concatenate([node.blocks for node in reversed(path)])
            if self.enable_prefix_caching:
                assert np.array_equal(published, lease._table[: lease._num_published]), (
                    "a lease's table and the tree differ about its published blocks"
                )
        for _, copy in self._copies:
            held[copy.source] += 1
        for node in self.tree.nodes():
            held[node.blocks] += 1
            locked_children = sum(child.lock_count > 0 for child in (node.children or {}).values())
            assert node.lock_count == ends.get(id(node), 0) + locked_children, "a lock is held by nobody"
        wrong = np.flatnonzero(held != self.pool.refcounts())
        assert not len(wrong), f"blocks {wrong[:5].tolist()} have other reference counts than holders"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _require_held(self, lease: Lease) -> None:
        if lease._released:
            raise ValueError("the lease was released before")

    def _allocate(self, n: int) -> BlockIds:
        """Blocks that are known to be available, evicting for those that are not free."""
        if n > self.pool.num_free:
            self.evict(n - self.pool.num_free)
        return self.pool.allocate(n)

    def _move(self, lease: Lease, node: Node) -> None:
        if node is not lease._node:
            self.tree.lock(node)
            self.tree.unlock(lease._node)
            lease._node = node

    def _drop_copies(self, lease: Lease) -> None:
        """Forget the lease's pending copies: their target is no longer its own."""
        for owner, copy in self._copies:
            if owner is lease:
                self.pool.decref(np.array([copy.source], dtype=np.int32))
        self._copies = [(owner, copy) for owner, copy in self._copies if owner is not lease]


def _unlocked_blocks(match: Match) -> int:
    """Blocks along a match that count as evictable now and will not once it is locked."""
    node, total, offset = match.node, 0, match.offset
    while node.parent is not None and node.lock_count == 0:
        total += offset
        node = node.parent
        offset = node.num_blocks
    return total
