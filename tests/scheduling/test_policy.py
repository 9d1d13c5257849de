"""Queue policies against matching the whole queue each time, and against their promises under endless streams."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixkv.cache import PrefixCache
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.policy import DepthFirstByWeight, LongestPrefixMatch, WaitingQueue, queue_policy
from radixkv.scheduling.request import Request

RATE = 10.0
BLOCK_SIZE = 2


def make(name: str, tokens: list[int], arrival_time: float = 0.0, namespace: str = "") -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=1), namespace=namespace, arrival_time=arrival_time)


def num_cached(request: Request, cache: PrefixCache) -> int:
    return cache.match(request.tokens, request.namespace).num_tokens(cache.block_size)


def admit(queue: WaitingQueue, cache: PrefixCache) -> Request:
    """Serve the head from its first token to its last."""
    request = queue.head(cache)
    queue.remove(request)
    compute(request.tokens, request.namespace, queue, cache)
    return request


def compute(tokens: np.ndarray, namespace: str, queue: WaitingQueue, cache: PrefixCache) -> None:
    lease = cache.acquire(tokens, namespace=namespace)
    cache.publish(lease, tokens, len(tokens))
    cache.take_copies()
    cache.release(lease)
    queue.cached(tokens[: len(tokens) // cache.block_size * cache.block_size], namespace)


short_prompts = st.lists(st.integers(0, 1), min_size=1, max_size=16)


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(8, 30),
    events=st.lists(
        st.one_of(
            st.tuples(st.just("arrive"), short_prompts, st.sampled_from(["", "tenant"]), st.floats(0, 1)),
            st.tuples(st.just("admit")),
            st.tuples(st.just("abort"), st.integers(0, 99)),
            st.tuples(st.just("compute"), short_prompts),
            st.tuples(st.just("evict"), st.integers(1, 20)),
        ),
        max_size=60,
    ),
)
def test_the_head_under_lpm_is_the_one_that_matching_the_whole_queue_would_choose(blocks, events):
    """With evictions, aborts and tokens of others in between, none of which the queue is told of unless the cache grows."""
    cache, queue = PrefixCache(blocks, BLOCK_SIZE), LongestPrefixMatch(RATE)
    waiting: list[Request] = []
    now = 0.0
    for i, (event, *arguments) in enumerate(events):
        if event == "arrive":
            tokens, namespace, gap = arguments
            now += gap
            waiting.append(make(str(i), tokens, now, namespace))
            queue.add(waiting[-1], cache)
        elif event == "compute":
            compute(np.array(arguments[0], dtype=np.int32), "", queue, cache)
        elif event == "evict":
            cache.evict(arguments[0])
        elif event == "abort" and waiting:
            queue.remove(waiting.pop(arguments[0] % len(waiting)))
        elif event == "admit" and waiting:
            oldest = min(request.arrival_time for request in waiting)
            eligible = [r for r in waiting if num_cached(r, cache) >= RATE * (r.arrival_time - oldest)]
            longest = max(num_cached(request, cache) for request in eligible)
            assert num_cached(queue.head(cache), cache) == longest
            assert queue.head(cache) in eligible
            waiting.remove(admit(queue, cache))


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    hot=st.lists(st.integers(4, 40), min_size=1, max_size=3),
    rate=st.floats(20, 400),
    step=st.floats(0.05, 0.3),
    per_step=st.integers(1, 2),
    seed=st.integers(0, 999),
)
def test_a_request_is_only_overtaken_within_its_bound_in_an_endless_hot_stream(data, hot, rate, step, per_step, seed):
    """One request is served each step while one or two hot ones arrive, for as long as the cold ones wait.

    The bound: nobody is overtaken by one that arrives more than (its cached prefix / rate) later.  So a request waits at most
    for those that waited before it and those that arrive within (longest prompt / rate) seconds after it.
    """
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(100 * i, 100 * i + 100, n).tolist() for i, n in enumerate(hot)]
    cache, queue = PrefixCache(400, BLOCK_SIZE), LongestPrefixMatch(rate)
    for prefix in prefixes:
        compute(np.array([*prefix, 1], dtype=np.int32), "", queue, cache)
    longest = max(hot) + 2
    last_step_of_bound = longest / rate / step
    waiting: dict[str, Request] = {}
    cold: dict[str, int] = {}  # the step by which it must have been served
    now, t, backlog = 0.0, 0, data.draw(st.integers(0, 10))
    while t < 3 or cold:
        arriving = [[*prefixes[rng.integers(len(prefixes))], 5000 + t] for _ in range(per_step + (backlog if t == 0 else 0))]
        if t < 3:
            arriving.append([9000 + t] * 3)
        for i, tokens in enumerate(arriving):
            request = make(f"{t}-{i}", tokens, now)
            waiting[request.request_id] = request
            queue.add(request, cache)
        if t < 3:
            within = per_step * (last_step_of_bound + 1) + 3
            cold[request.request_id] = t + len(waiting) + int(within) + 1
        head = queue.head(cache)
        overtaking = num_cached(head, cache)
        for other in waiting.values():
            assert head.arrival_time <= other.arrival_time + overtaking / rate + 1e-9, "a request was overtaken beyond its bound"
        admit(queue, cache)
        del waiting[head.request_id]
        cold.pop(head.request_id, None)
        assert all(t <= latest for latest in cold.values()), "a cold request waited longer than its bound"
        now += step
        t += 1


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.sampled_from(["", "tenant"]), st.lists(st.integers(0, 2), min_size=1, max_size=8)), min_size=1),
    policy=st.sampled_from(["lpm", "dfs-weight"]),
)
def test_a_burst_runs_depth_first_so_a_subtree_is_finished_before_another_begins(prompts, policy):
    cache, queue = PrefixCache(400, 1), queue_policy(policy, RATE)
    for i, (namespace, tokens) in enumerate(prompts):
        queue.add(make(str(i), tokens, 0.0, namespace), cache)
    ordered = [admit(queue, cache) for _ in prompts]
    keys = [[request.namespace, *request.tokens.tolist()] for request in ordered]
    for prefix in {tuple(key[:n]) for key in keys for n in range(2, len(key) + 1)}:
        inside = [i for i, key in enumerate(keys) if tuple(key[: len(prefix)]) == prefix]
        assert inside == list(range(inside[0], inside[-1] + 1)), "a subtree was left and entered again"


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6, unique=True), data=st.data())
def test_dfs_weight_runs_the_fullest_branch_first_and_finishes_it_though_its_rest_weighs_less(sizes, data):
    cache, queue = PrefixCache(400, 1), DepthFirstByWeight()
    requests = [make(f"{b}-{i}", [b, b, i], 0.0) for b, size in enumerate(sizes) for i in range(size)]
    for request in data.draw(st.permutations(requests)):
        queue.add(request, cache)
    branches = [sizes[int(admit(queue, cache).tokens[0])] for _ in requests]
    assert branches == [size for size in sorted(sizes, reverse=True) for _ in range(size)]


def test_among_equals_lpm_stays_in_the_tree_it_is_in_and_takes_the_oldest_there():
    cache, queue = PrefixCache(400, 1), LongestPrefixMatch(RATE)
    trees = {"a": [1] * 8, "b": [2] * 8}
    for prefix in trees.values():
        compute(np.array(prefix, dtype=np.int32), "", queue, cache)
    for i, tree in enumerate("abbaba"):
        queue.add(make(f"{tree}{i}", [*trees[tree], 90 - i], i / 100), cache)
    assert [admit(queue, cache).request_id for _ in range(6)] == ["a0", "a3", "a5", "b1", "b2", "b4"]


def test_what_eviction_took_from_one_request_is_not_taken_from_one_that_branches_off_where_the_loss_begins():
    cache, queue = PrefixCache(400, 1), LongestPrefixMatch(RATE)
    for tokens in ([1, 1, 2, 2], [5, 5, 5], [1, 1, 3, 3]):
        compute(np.array(tokens, dtype=np.int32), "", queue, cache)
    for i, (name, tokens) in enumerate({"lost": [1, 1, 2, 2, 9], "other": [5, 5, 5, 9], "whole": [1, 1, 3, 3, 9]}.items()):
        queue.add(make(name, tokens, i / 100), cache)
    assert queue.head(cache).request_id == "lost"
    cache.evict(2)  # the tail of the least recently used
    assert [admit(queue, cache).request_id for _ in range(3)] == ["whole", "other", "lost"]


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "dfs-weight"])
def test_a_request_that_does_not_wait_cannot_be_removed(policy):
    cache, queue = PrefixCache(8, 1), queue_policy(policy, RATE)
    here, gone = make("here", [1, 2]), make("gone", [1, 2])
    queue.add(here, cache)
    with pytest.raises(ValueError, match=r"not in|list"):
        queue.remove(gone)
    assert queue.head(cache) is here


def test_equal_prompts_leave_in_order_of_arrival_and_each_once():
    for policy in ("lpm", "fcfs", "dfs-weight"):
        cache, queue = PrefixCache(64, 4), queue_policy(policy, RATE)
        for i in range(5):
            queue.add(make(str(i), [1, 2, 3, 4, 5], i / 100), cache)
        assert [admit(queue, cache).request_id for _ in range(5)] == list("01234")


def test_prompts_of_other_namespaces_are_other_tries():
    cache, queue = PrefixCache(64, 1), LongestPrefixMatch(RATE)
    queue.add(make("theirs", list(range(8)), 0.0, "theirs"), cache)
    queue.add(make("mine", list(range(8)), 0.1, "mine"), cache)
    compute(np.arange(8, dtype=np.int32), "mine", queue, cache)
    assert queue.head(cache).request_id == "mine"
