"""Whose turn it is among namespaces: equal shares, bounded waiting, and the policy's own order within each."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from radixkv.cache import PrefixCache
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.policy import queue_policy
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler

BLOCK = 4


class Simulation:
    """A scheduler whose every step is computed, and how many tokens each namespace got."""

    def __init__(self, *, quantum: int = 16, num_blocks: int = 4000, max_num_seqs: int = 4, policy: str = "lpm") -> None:
        self.cache = PrefixCache(num_blocks, BLOCK)
        self.queue = FairShares(lambda: queue_policy(policy, 256.0), quantum)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.cache, self.queue, max_batch_tokens=quantum, max_num_seqs=max_num_seqs)
        self.computed: Counter[str] = Counter()
        self.admitted: list[str] = []
        self.steps = 0
        self._known: set[Request] = set()

    def add(self, name: str, namespace: str, tokens: list[int], max_tokens: int = 3) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(name, tokens, params, namespace=namespace, arrival_time=self.steps * 0.01)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.steps += 1
        for request in self.scheduler.running:
            if request not in self._known:
                self._known.add(request)
                self.admitted.append(request.request_id)
        for sequence in batch.sequences:
            self.computed[sequence.request.namespace] += sequence.num_tokens
            if sequence.samples and sequence.request.append(7):
                self.scheduler.remove(sequence.request)

    def waiting(self, namespace: str) -> int:
        return sum(request.namespace == namespace for request in self.scheduler.waiting)


def prompt(i: int, n: int) -> list[int]:
    return [1000 + i] * n


def test_the_queue_is_told_of_every_computed_token_also_of_a_last_block_that_is_not_full() -> None:
    sim = Simulation()
    told: Counter[str] = Counter()
    with mock.patch.object(sim.queue, "computed", side_effect=lambda namespace, count: told.update({namespace: count})):
        for i in range(6):
            sim.add(str(i), f"n{i % 2}", prompt(i, 5 + i), max_tokens=1 + i)
        while sim.scheduler.waiting or sim.scheduler.running:
            sim.step()
    assert told == sim.computed


lengths = st.tuples(st.integers(1, 60), st.integers(1, 12))


@settings(max_examples=25, deadline=None)
@given(
    greedy=st.lists(lengths, min_size=1, max_size=4),
    modest=st.lists(lengths, min_size=1, max_size=4),
    backlog=st.integers(1, 40),
    quantum=st.sampled_from([8, 16, 64]),
    max_num_seqs=st.integers(1, 6),
    policy=st.sampled_from(["lpm", "fcfs", "dfs-weight"]),
)
def test_of_two_namespaces_that_always_wait_neither_gets_ahead_by_more_than_the_bound(
    greedy, modest, backlog, quantum, max_num_seqs, policy
):
    """However many requests one has waiting for each of the other's, and however long its prompts and outputs are."""
    sim = Simulation(quantum=quantum, max_num_seqs=max_num_seqs, policy=policy)
    sizes = {"greedy": greedy, "modest": modest}
    added = 0
    longest = max(n + output for sizes_of in sizes.values() for n, output in sizes_of)
    # Whoever is ahead by the quantum may have all its running requests still to come, and those of a step.
    bound = quantum + longest * max_num_seqs + quantum
    for _ in range(100):
        for namespace, least in (("greedy", 10 * backlog), ("modest", 1 + quantum)):
            while sim.waiting(namespace) < least:
                n, output = sizes[namespace][added % len(sizes[namespace])]
                sim.add(str(added), namespace, prompt(added, n), output)
                added += 1
        sim.step()
        assert abs(sim.computed["greedy"] - sim.computed["modest"]) <= bound
    assert min(sim.computed.values()) > 0


@settings(max_examples=30, deadline=None)
@given(
    flooders=st.integers(1, 4),
    flood=st.lists(lengths, min_size=1, max_size=4),
    quantum=st.sampled_from([8, 16, 64]),
    max_num_seqs=st.integers(1, 6),
    before=st.integers(0, 60),
)
def test_a_lone_request_of_another_namespace_waits_a_bounded_time_however_many_wait_already(
    flooders, flood, quantum, max_num_seqs, before
):
    sim = Simulation(quantum=quantum, max_num_seqs=max_num_seqs)
    for i in range(400):
        n, output = flood[i % len(flood)]
        sim.add(str(i), f"flood-{i % flooders}", prompt(i, n), output)
    for _ in range(before):
        sim.step()
    lone = sim.add("lone", "lone", prompt(9999, 5))
    so_far = sim.computed.copy()
    longest = max(n + output for n, output in flood)
    while lone.request_id not in sim.admitted:
        sim.step()
        got = sim.computed - so_far
        assert all(tokens <= 2 * quantum + 2 * longest * max_num_seqs for tokens in got.values())


def test_a_request_comes_first_that_hundreds_of_another_namespace_were_before() -> None:
    sim = Simulation(max_num_seqs=4)
    for i in range(300):
        sim.add(f"flood-{i}", "flood", prompt(i, 8))
    for _ in range(5):
        sim.step()
    before = len(sim.admitted)
    sim.add("lone", "lone", prompt(999, 8))
    while "lone" not in sim.admitted:
        sim.step()
    assert len(sim.admitted) - before <= 6


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.lists(st.integers(0, 1), min_size=1, max_size=24)), min_size=1, max_size=20
    ),
    policy=st.sampled_from(["lpm", "fcfs", "dfs-weight"]),
    quantum=st.sampled_from([8, 32]),
)
def test_within_a_namespace_order_and_hits_are_those_it_would_have_alone(prompts, policy, quantum):
    """One at a time and with room for all, so that nothing but the order decides."""
    together = Simulation(quantum=quantum, max_num_seqs=1, policy=policy)
    requests = [together.add(str(i), namespace, tokens, 1) for i, (namespace, tokens) in enumerate(prompts)]
    while together.scheduler.waiting or together.scheduler.running:
        together.step()
    for namespace in "abc":
        mine = [request for request in requests if request.namespace == namespace]
        alone = Simulation(quantum=quantum, max_num_seqs=1, policy=policy)
        again = [alone.add(request.request_id, namespace, request.prompt_token_ids.tolist(), 1) for request in mine]
        while alone.scheduler.waiting or alone.scheduler.running:
            alone.step()
        names = {request.request_id for request in mine}
        assert [name for name in together.admitted if name in names] == alone.admitted
        assert [request.num_cached_tokens for request in mine] == [request.num_cached_tokens for request in again]


def test_a_prefix_shared_within_a_namespace_is_computed_once_while_others_wait() -> None:
    sim = Simulation(quantum=64, max_num_seqs=8)
    shared = list(range(40))
    mine = [sim.add(f"mine-{i}", "mine", [*shared, 100 + i], 1) for i in range(20)]
    for i in range(100):
        sim.add(f"other-{i}", "other", prompt(i, 30), 1)
    while any(request.request_id not in sim.admitted for request in mine):
        sim.step()
    assert sum(request.num_prompt_tokens - request.num_cached_tokens for request in mine) == 41 + 19


def test_idleness_saves_up_no_share_and_a_namespace_that_got_more_is_not_forgiven_by_a_pause() -> None:
    cache, queue = PrefixCache(100, BLOCK), FairShares(lambda: queue_policy("fcfs", 1.0), quantum=10)
    newest = []

    def serve() -> str:
        request = queue.head(cache)
        queue.remove(request)
        queue.computed(request.namespace, 20)
        newest.append(Request("next", [1], SamplingParams(), namespace=request.namespace))
        queue.add(newest[-1], cache)
        return request.namespace

    for name in ("a", "another"):
        queue.add(Request(name, [1], SamplingParams(), namespace="a"), cache)
    for _ in range(50):
        assert serve() == "a"
    late = Request("late", [1], SamplingParams(), namespace="late")
    queue.add(late, cache)
    assert [serve() for _ in range(8)].count("a") == 4
    while serve() != "late":
        pass
    queue.computed("late", 400)
    queue.remove(newest[-1])
    queue.add(Request("again", [1], SamplingParams(), namespace="late"), cache)
    assert [serve() for _ in range(20)] == ["a"] * 20


def test_what_is_kept_of_namespaces_that_have_gone_is_bounded() -> None:
    cache, queue = PrefixCache(100, BLOCK), FairShares(lambda: queue_policy("fcfs", 1.0), quantum=10)
    queue.add(Request("stays", [1], SamplingParams(), namespace="stays"), cache)
    for i in range(5000):
        request = Request(str(i), [1], SamplingParams(), namespace=f"passes-{i}")
        queue.add(request, cache)
        queue.remove(request)
        queue.computed(request.namespace, 5)
        queue.computed("stays", 5)
    assert len(queue._served) < 1100
    with pytest.raises(ValueError, match="does not wait"):
        queue.remove(request)
