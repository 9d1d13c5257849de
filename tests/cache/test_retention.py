"""Retention: a prefix is evicted after others for a while, and nobody is refused memory for it."""

from __future__ import annotations

from typing import Literal

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from radixkv.cache import PrefixCache, Retention

from .serving import LONG, Clock, explaining, held, joined, run, serve

PolicyName = Literal["lru", "lfu", "cost"]
every_policy = pytest.mark.parametrize("policy", ["lru", "lfu", "cost"])


def prompts(n: int) -> list[np.ndarray]:
    """Prompts of two blocks of 4 that share nothing."""
    return [LONG[:8] + 100 * i for i in range(n)]


def order_of_eviction(cache: PrefixCache, *candidates: np.ndarray) -> list[int]:
    """Evict everything block by block; the candidates' indices in the order in which their last blocks go."""
    order: list[int] = []
    while cache.evict(1):
        order += [i for i, prompt in enumerate(candidates) if i not in order and not held(cache, prompt)]
    return order


@every_policy
def test_a_retained_prefix_is_evicted_after_all_others_though_it_was_used_first(policy: PolicyName):
    cache = explaining(32, 4, policy=policy, clock=Clock())
    pinned, *others = prompts(4)
    serve(cache, pinned, retention=Retention(1, 60))
    for prompt in others:
        serve(cache, prompt)
        serve(cache, prompt)
    assert order_of_eviction(cache, pinned, *others) == [1, 2, 3, 0]
    cache.check()


@every_policy
def test_of_retained_prefixes_the_lowest_priority_goes_first_then_the_policy_decides(policy: PolicyName):
    cache = explaining(32, 4, policy=policy, clock=Clock())
    candidates = prompts(5)
    for prompt, priority in zip(candidates, (2, 1, 3, 1, 2), strict=True):
        serve(cache, prompt, retention=Retention(priority, 60))
    assert order_of_eviction(cache, *candidates) == [1, 3, 0, 4, 2]


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, [2, 1, 0]), (59.9, [2, 1, 0]), (60, [2, 0, 1]), (119.9, [2, 0, 1]), (120, [0, 2, 1])]
)
def test_a_priority_falls_by_one_whenever_its_seconds_pass_and_is_over_at_0(seconds: float, expected: list[int]):
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    falling, steady, plain = candidates = prompts(3)
    serve(cache, falling, retention=Retention(2, 60))
    serve(cache, steady, retention=Retention(1, 10_000))
    serve(cache, plain)
    clock.now += seconds
    assert order_of_eviction(cache, *candidates) == expected


def test_all_that_has_passed_since_the_last_eviction_decays_at_once():
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    pinned, plain = candidates = prompts(2)
    serve(cache, pinned, retention=Retention(100, 1))
    serve(cache, plain)
    clock.now += 99.5
    cache.evict(1)
    assert (held(cache, pinned), held(cache, plain)) == (2, 1)
    clock.now += 1
    assert order_of_eviction(cache, *candidates) == [0, 1]


@pytest.mark.parametrize("hit", ["whole", "longer", "deeper", "prefix"])
def test_a_hit_restores_priority_and_time_whatever_the_hitting_prompt_asks_for_itself(hit: str):
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    first, pinned, steady = candidates = prompts(3)
    serve(cache, first)
    serve(cache, pinned, retention=Retention(2, 60))
    if hit == "deeper":
        serve(cache, joined(pinned, LONG + 1000))
    clock.now += 119
    cache.evict(1)  # whoever looks for a victim sees that the priority is 1 by now
    serve(cache, {"whole": pinned, "prefix": pinned[:4]}.get(hit, joined(pinned, LONG + 1000)))
    serve(cache, steady, retention=Retention(1, 10_000))
    clock.now += 59
    assert order_of_eviction(cache, *candidates)[-2:] == [2, 1]


def test_a_hit_on_its_beginning_refreshes_only_that_beginning():
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    pinned, plain = prompts(2)
    serve(cache, pinned, retention=Retention(1, 60))
    clock.now += 40
    serve(cache, joined(pinned[:4], [1000]))
    serve(cache, plain)
    clock.now += 40
    cache.evict(1)
    assert (held(cache, pinned), held(cache, plain)) == (1, 2), "the second block's retention is over, and it was used first"
    cache.evict(2)
    assert (held(cache, pinned), held(cache, plain)) == (1, 0)
    clock.now += 20
    serve(cache, plain)
    cache.evict(1)
    assert (held(cache, pinned), held(cache, plain)) == (0, 2)


def test_a_running_sequences_retention_begins_when_it_ends():
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    pinned, plain = candidates = prompts(2)
    lease = run(cache, pinned, retention=Retention(1, 60))
    clock.now += 1000
    cache.release(lease)
    serve(cache, plain)
    clock.now += 59
    assert order_of_eviction(cache, *candidates) == [1, 0]


def test_a_retained_chat_that_goes_on_retained_alike_grows_in_place():
    cache = explaining(32, 4)
    for end in (8, 12, 16):
        serve(cache, LONG[:end], retention=Retention(2, 60))
    assert cache.stats().nodes == 1
    serve(cache, joined(LONG, LONG + 100), retention=Retention(1, 60))
    assert cache.stats().nodes == 2


def test_many_hits_leave_the_order_of_retained_prefixes_right():
    """Each leaves stale entries behind, which are swept out in between."""
    random = np.random.default_rng(3)
    clock = Clock()
    cache = explaining(200, 4, clock=clock)
    candidates = prompts(40)
    given = [Retention(int(random.integers(1, 4)), float(random.choice([50, 150, 400, 1e6]))) for _ in candidates]
    last_use = dict.fromkeys(range(40), (0, 0.0))
    for use in range(1000):
        i = use if use < 40 else int(random.integers(10, 40))  # the first ten are never used again
        clock.now += 0.25
        serve(cache, candidates[i], retention=given[i])
        last_use[i] = (use, clock.now)
    clock.now += 120
    left = {i: max(0, given[i].priority - int((clock.now - at) // given[i].seconds)) for i, (_, at) in last_use.items()}
    assert set(left.values()) == {0, 1, 2, 3}
    assert order_of_eviction(cache, *candidates) == sorted(left, key=lambda i: (left[i], last_use[i]))


def test_what_follows_a_retained_prefix_is_not_retained_with_it():
    """The next turn of a chat that asks for nothing lengthens no retained edge."""
    cache = explaining(32, 4, clock=Clock())
    pinned, plain = prompts(2)
    serve(cache, pinned, retention=Retention(1, 60))
    serve(cache, joined(pinned, LONG + 1000))
    serve(cache, plain)
    cache.evict(4)
    assert (held(cache, joined(pinned, LONG + 1000)), held(cache, plain)) == (2, 2)
    cache.evict(2)
    assert (held(cache, pinned), held(cache, plain)) == (2, 0)


def test_the_prefix_below_a_retained_sequence_stays_for_it():
    cache = explaining(32, 4, clock=Clock())
    shared, plain = prompts(2)
    one, other = joined(shared, LONG[:4] + 1000), joined(shared, LONG[:4] + 2000)
    serve(cache, one, retention=Retention(1, 60))
    serve(cache, other)
    serve(cache, plain)
    cache.evict(3)
    assert [held(cache, prompt) for prompt in (one, other, plain)] == [3, 2, 0]
    cache.check()


def test_a_prefix_that_lost_its_tail_is_still_retained():
    cache = explaining(8, 4, clock=Clock())
    pinned, plain = prompts(2)
    serve(cache, pinned, retention=Retention(1, 60))
    cache.evict(1)
    serve(cache, plain)
    cache.evict(1)
    assert (held(cache, pinned), held(cache, plain)) == (1, 1)


def test_a_prefix_that_comes_back_without_retention_has_none():
    cache = explaining(32, 4, clock=Clock())
    pinned, plain = candidates = prompts(2)
    serve(cache, pinned, retention=Retention(3, 1e6))
    cache.evict(2)
    serve(cache, pinned)
    serve(cache, plain)
    assert order_of_eviction(cache, *candidates) == [0, 1]


def test_a_prefix_cached_before_can_be_retained_later():
    cache = explaining(32, 4, clock=Clock())
    pinned, plain = candidates = prompts(2)
    serve(cache, pinned)
    serve(cache, pinned, retention=Retention(1, 60))
    serve(cache, plain)
    assert order_of_eviction(cache, *candidates) == [1, 0]


def test_a_fork_is_retained_as_its_parent_is():
    cache = explaining(32, 4, clock=Clock())
    pinned, plain = prompts(2)
    lease = run(cache, pinned, retention=Retention(1, 60))
    (child,) = cache.fork(lease, 1)
    grown = joined(pinned, LONG[:4] + 1000)
    cache.extend(child, 4)
    cache.publish(child, grown, 12)
    cache.release(lease)
    cache.release(child)
    serve(cache, plain)
    cache.evict(2)
    assert (held(cache, grown), held(cache, plain)) == (3, 0)


@every_policy
def test_a_cache_full_of_retained_prefixes_serves_whatever_fits(policy: PolicyName):
    cache = explaining(16, 4, policy=policy, clock=Clock())
    for prompt in prompts(8):
        serve(cache, prompt, retention=Retention(100, 1e9))
    assert cache.num_available_blocks == 16
    lease = cache.acquire(np.arange(5000, 5064))
    assert lease is not None
    assert len(lease.block_table) == 16
    cache.check()
    cache.release(lease)
    for prompt in prompts(8):
        serve(cache, prompt, retention=Retention(100, 1e9))
    assert cache.evict(16) == 16


requests = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "extend", "fork", "release", "wait"]),
        st.integers(1, 30),
        st.builds(Retention, priority=st.integers(1, 3), seconds=st.sampled_from([1, 1000])),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(requests)
@example([("acquire", 12, Retention(3, 1000)), ("release", 1, Retention(1, 1)), ("acquire", 30, Retention(1, 1))])
def test_no_allocation_fails_with_retention_that_succeeds_without(operations: list[tuple[str, int, Retention]]):
    """Twins in which nothing is shared, so that which blocks were evicted makes no other difference."""
    clock = Clock()
    twins = [(explaining(12, 4, clock=clock), retains, []) for retains in (False, True)]
    for i, (operation, n, retention) in enumerate(operations):
        if operation == "wait":
            clock.now += n / 3
        outcomes = []
        for cache, retains, leases in twins:
            outcome: object = None
            if operation == "acquire":
                prompt = np.arange(n) + 1000 * i
                lease = cache.acquire(prompt, retention=retention if retains else None)
                outcome = lease is not None
                if lease is not None:
                    cache.publish(lease, prompt, n)
                    leases.append(lease)
            elif leases and operation == "extend":
                outcome = cache.extend(leases[n % len(leases)], n)
            elif leases and operation == "fork":
                children = cache.fork(leases[n % len(leases)], n % 3)
                cache.take_copies()
                outcome = children is not None
                leases += children or []
            elif leases and operation == "release":
                cache.release(leases.pop(n % len(leases)))
            cache.check()
            outcomes.append((outcome, cache.num_available_blocks))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_harms_nothing(jump: float):
    clock = Clock()
    cache = explaining(8, 4, clock=clock)
    candidates = prompts(4)
    for prompt in candidates:
        serve(cache, prompt, retention=Retention(3, 10))
    clock.now += jump
    serve(cache, candidates[0])
    cache.check()
    assert order_of_eviction(cache, *candidates) == [1, 2, 3, 0]
    cache.check()


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        (Retention(0, 60), r"retention\.priority must be an integer from 1 to 100, got 0"),
        (Retention(101, 60), r"retention\.priority must be an integer from 1 to 100, got 101"),
        (Retention(1.5, 60), r"retention\.priority must be an integer from 1 to 100, got 1\.5"),
        (Retention(1, 0), r"retention\.seconds must be above 0 and at most 1e9, got 0"),
        (Retention(1, 2e9), r"retention\.seconds must be above 0 and at most 1e9"),
        (Retention(1, float("nan")), r"retention\.seconds must be above 0 and at most 1e9, got nan"),
        (Retention(1, "long"), r"retention\.seconds must be above 0 and at most 1e9, got 'long'"),
    ],
)
def test_a_retention_out_of_range_is_refused_by_name_and_changes_nothing(retention: Retention, message: str):
    cache = explaining(8, 4)
    before = cache.stats()
    with pytest.raises(ValueError, match=message):
        cache.acquire(LONG, retention=retention)
    assert cache.stats() == before
    assert Retention(1, 1e9).validate() == Retention(1, 1e9)
    assert Retention(100, 0.001).validate() == Retention(100, 0.001)


def test_retention_that_is_over_leaves_nothing_in_memory():
    clock = Clock()
    cache = explaining(8, 4, clock=clock)
    for i in range(1000):
        clock.now += 1
        serve(cache, LONG + 100 * i, retention=Retention(1, 0.5))
    order = cache.tree.order
    assert len(order._run) + len(order._heap) + len(order._retained) + len(order._deadlines) < 200


def test_a_leaf_that_is_queued_twice_under_one_hold_can_still_be_evicted_when_that_is_over():
    """A request that was there before the retained one ends on its leaf, and hands its last use up to it when it is evicted."""
    clock = Clock()
    cache = explaining(16, 4, clock=clock)
    head = [0, 1, 2, 3]
    retained = [*head, 10, 11, 12, 13]
    longer = np.array([*retained, 20, 21, 22, 23])
    serve(cache, head)
    lease = cache.acquire(longer)
    serve(cache, retained, retention=Retention(1, 10))
    cache.publish(lease, longer, 12)
    cache.release(lease)
    cache.evict(1)
    clock.now += 11
    lease = cache.acquire(np.arange(1000, 1060))
    assert len(lease.block_table) == 15
    cache.check()


def test_the_head_of_a_retained_sequence_is_retained_too_when_another_sequence_ends_there():
    cache = explaining(12, 4, clock=Clock())
    prompt = np.arange(32)
    lease = cache.acquire(prompt, retention=Retention(5, 1e6))
    cache.publish(lease, prompt, 16)
    other = cache.acquire(np.arange(16))
    cache.publish(lease, prompt, 32)
    cache.release(lease)
    cache.release(other)
    cache.evict(4)
    serve(cache, np.arange(100, 116))
    cache.evict(2)
    assert (cache.match(prompt).num_blocks, cache.match(np.arange(100, 116)).num_blocks) == (4, 2)


def test_a_weaker_retention_does_not_take_the_place_of_a_stronger_one():
    clock = Clock()
    cache = explaining(8, 4, clock=clock)
    serve(cache, LONG, retention=Retention(100, 1e6))
    serve(cache, LONG, retention=Retention(1, 0.001))
    serve(cache, LONG + 100)
    clock.now += 10
    cache.evict(4)
    assert cache.match(LONG).num_blocks == 4


def test_a_retention_that_was_over_is_not_restored():
    clock = Clock()
    cache = explaining(8, 4, clock=clock)
    serve(cache, LONG, retention=Retention(1, 10))
    clock.now += 100
    serve(cache, LONG)
    serve(cache, LONG + 100)
    cache.evict(4)
    assert cache.match(LONG + 100).num_blocks == 4


def test_priorities_that_fell_many_times_in_an_idle_hour_are_counted_down_at_once():
    hold = Retention(100, 1.0).hold(0.0)
    assert hold.at(0.5) is hold
    assert hold.at(1.0).priority == 99
    assert (hold.at(42.5).priority, hold.at(42.5).until) == (58, 43.0)
    assert hold.at(100.0) is None
    assert hold.at(-5.0) is hold
