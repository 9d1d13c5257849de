"""PrefixCache against a simulated KV memory and a naive model: a row read is the row that was meant, a block held is one that was
stored.

``RADIXKV_FUZZ_EXAMPLES=N`` runs N times 40 operations instead of the few of the quick suite (``make fuzz``).
"""

from __future__ import annotations

import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from radixkv.cache import Lease, PrefixCache, Retention

from .naive_cache import NaiveCache

Prefix = tuple[object, ...]
# Few token values and short prompts: sequences must often share beginnings for the interesting things to happen.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=22)
namespaces = st.sampled_from(["", "tenant"])
retentions = st.none() | st.builds(Retention, priority=st.integers(1, 3), seconds=st.sampled_from([0.5, 10]))


class Sequence:
    """A lease, its tokens, and how many of them have K/V in the simulated memory."""

    def __init__(self, lease: Lease, tokens: list[int]) -> None:
        self.lease = lease
        self.tokens = tokens
        self.computed = lease.num_computed_tokens


class CacheMachine(RuleBasedStateMachine):
    """The K/V of a position is modelled as (namespace, all tokens up to it): what real K/V depend on, and nothing else."""

    live = Bundle("live")

    @initialize(
        num_blocks=st.integers(2, 24),
        block_size=st.sampled_from([1, 2, 4]),
        attribution=st.booleans(),
        policy=st.sampled_from(["lru", "lfu", "cost"]),
    )
    def start(self, num_blocks: int, block_size: int, attribution: bool, policy: str) -> None:
        self.now = 0.0
        self.cache = PrefixCache(num_blocks, block_size, attribution=attribution, policy=policy, clock=lambda: self.now)
        self.model = NaiveCache(block_size)
        self.cache.subscribe(self.model.hear)
        self.memory: dict[tuple[int, int], Prefix] = {}
        self.sequences: list[Sequence] = []
        self.prompts: set[tuple[str, tuple[int, ...]]] = set()
        self.was_reset = False

    # -- helpers

    def content(self, seq: Sequence, position: int) -> Prefix:
        return (seq.lease.namespace, *seq.tokens[: position + 1])

    def slot(self, seq: Sequence, position: int) -> tuple[int, int]:
        size = self.cache.block_size
        return int(seq.lease.block_table[position // size]), position % size

    def do_copies(self) -> None:
        for copy in self.cache.take_copies():
            for row in range(copy.num_rows):
                self.memory[copy.target, row] = self.memory[copy.source, row]

    def compute(self, seq: Sequence, end: int) -> None:
        """Write K/V as an engine would, then read all of them as attention would."""
        for position in range(seq.computed, end):
            if position >= seq.lease.write_start:
                self.memory[self.slot(seq, position)] = self.content(seq, position)
        seq.computed = end
        for position in range(end):
            assert self.memory[self.slot(seq, position)] == self.content(seq, position), f"wrong K/V at position {position}"

    def explain(self, lease: Lease, tokens: list[int]) -> None:
        """What the lease says of its misses is true, as far as blocks that were stored, evicted or are being computed can tell."""
        self.prompts.add((lease.namespace, tuple(tokens)))
        miss = lease.miss
        if miss is None:
            assert not self.cache.attribution
            return
        assert miss.num_tokens == len(tokens) - lease.num_cached_tokens, "not every uncached token has one reason"
        flying = lease.num_cached_tokens + miss.in_flight
        gone = flying + miss.evicted
        known = gone + miss.partial_block
        if miss.in_flight:
            assert any(
                seq.lease.namespace == lease.namespace and seq.tokens[:flying] == tokens[:flying] for seq in self.sequences
            ), "nobody is computing this"
        if miss.evicted:
            assert self.model.was_stored(lease.namespace, tuple(tokens[:gone])), "what was evicted was never there"
            assert miss.evicted_seconds_ago is not None
            assert miss.evicted_blocks_since is not None
            assert miss.evicted_seconds_ago >= 0
            assert miss.evicted_blocks_since > 0
        if miss.diverged:
            position, ours, theirs = miss.parting
            assert position == known > 0
            assert ours.tolist() == tokens[max(0, position - 8) : position + 8]
            other = (*tokens[: position - min(position, 8)], *theirs.tolist())
            assert other[:position] == tuple(tokens[:position])
            assert other[position : position + 1] != tuple(tokens[position : position + 1]), "the prompts go on alike"
            assert any(name == lease.namespace and prompt[: len(other)] == other for name, prompt in self.prompts), (
                "the other prompt never was"
            )
        if self.model.num_evicted <= self.cache.pool.num_blocks and not self.was_reset:  # nothing had to be forgotten yet
            unknown = miss.diverged + miss.new
            assert len(tokens) - unknown >= self.model.longest_known(lease.namespace, tuple(tokens)), (
                "an evicted prefix was forgotten"
            )

    # -- rules

    @rule(
        target=live, tokens=prompts, namespace=namespaces, room=st.integers(0, 5), headroom=st.integers(0, 3), retention=retentions
    )
    def acquire(self, tokens: list[int], namespace: str, room: int, headroom: int, retention: Retention | None) -> object:
        cache, size = self.cache, self.cache.block_size
        before = cache.stats()
        match = cache.match(np.array(tokens), namespace)
        kept = sum(node.num_blocks for node in match.path() if not node.lock_count)
        if not match.node.lock_count:
            kept -= match.node.num_blocks - match.offset
        lease = cache.acquire(tokens, namespace=namespace, max_new_tokens=room, headroom=headroom, retention=retention)
        if lease is None:
            assert cache.stats() == before, "a refusal changed something"
            missing = -(-(len(tokens) + room) // size) - match.num_blocks
            assert missing + headroom > before.blocks_free + before.blocks_cached - kept, "refused what could be had by evicting"
            return multiple()
        assert lease.num_cached_tokens <= len(tokens) - 1, "no token is left to compute"
        assert len(lease.block_table) * size >= len(tokens) + room
        self.explain(lease, tokens)
        self.do_copies()
        seq = Sequence(lease, tokens)
        self.compute(seq, lease.num_cached_tokens)
        self.sequences.append(seq)
        return seq

    @rule(first=prompts, tails=st.lists(prompts, min_size=1, max_size=3), retention=retentions)
    def schedule_together(self, first: list[int], tails: list[list[int]], retention: Retention | None) -> None:
        """One step: each sequence is published before any K/V is written, so that the later ones share the first one's blocks."""
        scheduled = []
        for tokens in (first, *(first + tail for tail in tails)):
            lease = self.cache.acquire(np.array(tokens, dtype=np.int32), retention=retention)
            if lease is not None:
                self.explain(lease, tokens)
                self.cache.publish(lease, np.array(tokens, dtype=np.int32), len(tokens), written=False)
                scheduled.append(Sequence(lease, tokens))
        size = self.cache.block_size
        for seq in scheduled[1:] if len(scheduled) > len(tails) else []:
            assert seq.lease.num_matched_tokens >= len(first) // size * size, "a prefix of the same step was not shared"
        self.do_copies()
        for seq in scheduled:
            seq.computed = seq.lease.num_cached_tokens
            for position in range(max(seq.computed, seq.lease.write_start), len(seq.tokens)):
                self.memory[self.slot(seq, position)] = self.content(seq, position)
        for seq in scheduled:
            self.compute(seq, len(seq.tokens))
            self.sequences.append(seq)

    @rule(seq=live, n=st.integers(1, 9))
    def compute_and_publish(self, seq: Sequence, n: int) -> None:
        if seq not in self.sequences:
            return
        end = min(seq.computed + n, len(seq.tokens))
        self.compute(seq, end)
        self.cache.publish(seq.lease, np.array(seq.tokens, dtype=np.int32), end)
        self.do_copies()
        self.compute(seq, end)
        self.prompts.add((seq.lease.namespace, tuple(seq.tokens)))

    @rule(seq=live, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def decode(self, seq: Sequence, tokens: list[int]) -> None:
        if seq not in self.sequences:
            return
        room = seq.lease.num_tokens - len(seq.tokens)
        before = self.cache.pool.num_free
        missing = len(tokens) - room
        if missing > 0 and not self.cache.extend(seq.lease, missing):
            assert self.cache.pool.num_free == before
            return
        seq.tokens = seq.tokens + tokens

    @rule(target=live, seq=live, n=st.integers(1, 3))
    def fork(self, seq: Sequence, n: int) -> object:
        if seq not in self.sequences:
            return multiple()
        seq.lease.num_computed_tokens = seq.computed
        leases = self.cache.fork(seq.lease, n)
        if leases is None:
            return multiple()
        self.do_copies()
        children = [Sequence(lease, seq.tokens[: lease.num_tokens]) for lease in leases]
        for child in children:
            self.compute(child, child.computed)
        self.sequences.extend(children)
        return multiple(*children)

    @rule(seq=consumes(live))
    def release(self, seq: Sequence) -> None:
        if seq in self.sequences:
            self.sequences.remove(seq)
            self.cache.release(seq.lease)

    @rule(tokens=prompts)
    def abort_before_the_copies_are_made(self, tokens: list[int]) -> None:
        lease = self.cache.acquire(np.array(tokens, dtype=np.int32))
        if lease is not None:
            self.explain(lease, tokens)
            self.cache.release(lease)

    @precondition(lambda self: self.cache.tree.num_unlocked_blocks)
    @rule(n=st.integers(1, 5))
    def evict(self, n: int) -> None:
        evictable = self.cache.tree.num_unlocked_blocks
        assert self.cache.evict(n) == min(n, evictable)

    @rule(seconds=st.sampled_from([-5.0, 0.3, 1.0, 20.0]))
    def let_time_pass_or_go_back(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.was_reset = True
        assert self.cache.stats().blocks_cached == 0

    @rule(tokens=prompts, namespace=namespaces)
    def look_up(self, tokens: list[int], namespace: str) -> None:
        match = self.cache.match(tokens, namespace)
        assert match.block_ids().tolist() == self.model.match(namespace, tuple(tokens)), "found other blocks than were stored"

    # -- always

    @invariant()
    def nothing_is_out_of_order(self) -> None:
        self.cache.check()

    @invariant()
    def the_tree_holds_what_was_stored_and_not_evicted(self) -> None:
        assert self.cache.tree.num_blocks == len(self.model.blocks)

    @invariant()
    def every_live_sequence_reads_its_own_kv(self) -> None:
        for seq in self.sequences:
            self.compute(seq, seq.computed)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for seq in self.sequences:
                self.cache.release(seq.lease)
            self.cache.check()
            assert self.cache.num_available_blocks == self.cache.pool.num_blocks, "a block leaked"
            self.cache.reset()
            assert self.cache.pool.num_free == self.cache.pool.num_blocks
            assert not list(self.cache.tree.nodes())


TestCache = CacheMachine.TestCase
EXAMPLES = int(os.environ.get("RADIXKV_FUZZ_EXAMPLES", "0"))
TestCache.settings = settings(
    max_examples=EXAMPLES or 150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCache.pytestmark = [pytest.mark.timeout(0)] if EXAMPLES else []
