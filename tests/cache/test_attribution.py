"""Miss attribution: each uncached prompt token has one reason, and the reason is true."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from radixkv.cache import Lease, Miss, PrefixCache

from .naive_cache import NaiveCache
from .serving import LONG, Clock, cached, explaining, held, joined, run, serve, tokens

REASONS = ("in_flight", "evicted", "partial_block", "diverged", "new", "last_token")


def reasons(lease: Lease | None) -> dict[str, int]:
    """Those that apply."""
    assert lease is not None
    assert lease.miss is not None
    return {reason: count for reason in REASONS if (count := getattr(lease.miss, reason))}


def miss_of(lease: Lease | None) -> Miss:
    assert lease is not None
    assert lease.miss is not None
    return lease.miss


# -- new


def test_all_of_the_first_prompt_is_new():
    assert reasons(explaining(32, 4).acquire(LONG)) == {"new": 16}


def test_a_prompt_that_shares_nothing_is_new_and_not_diverged():
    lease = cached(32, 4, LONG).acquire(LONG + 100)
    assert reasons(lease) == {"new": 16}
    assert miss_of(lease).parting is None


def test_what_follows_the_end_of_an_earlier_sequence_is_new():
    assert reasons(cached(32, 4, LONG).acquire(joined(LONG, LONG + 100))) == {"new": 16}


def test_what_follows_the_end_of_an_earlier_sequence_within_a_block_is_new():
    cache = cached(32, 4, LONG[:10])
    assert reasons(cache.acquire(joined(LONG[:10], LONG + 100))) == {"partial_block": 2, "new": 16}


# -- diverged


def test_a_prompt_that_parts_from_an_earlier_one_has_both_texts_around_that_place():
    earlier, ours = joined(LONG, LONG + 100), joined(LONG, LONG + 200)
    lease = cached(32, 4, earlier).acquire(ours)
    assert reasons(lease) == {"diverged": 16}
    parting = miss_of(lease).parting
    assert parting is not None
    assert (parting.position, parting.ours.tolist(), parting.theirs.tolist()) == (
        16,
        ours[8:24].tolist(),
        earlier[8:24].tolist(),
    )


@pytest.mark.parametrize("position", [1, 3, 4, 7, 8, 9, 15, 20])
def test_the_place_where_prompts_part_is_exact_to_the_token(position: int):
    earlier = joined(LONG, LONG + 100)
    ours = earlier.copy()
    ours[position] = 999
    lease = cached(32, 4, earlier).acquire(ours)
    assert lease.num_cached_tokens == position
    assert reasons(lease) == {"diverged": 32 - position}
    parting = miss_of(lease).parting
    assert parting.position == position
    assert parting.ours.tolist() == ours[max(0, position - 8) : position + 8].tolist()
    assert parting.theirs.tolist() == earlier[max(0, position - 8) : position + 8].tolist()


def test_texts_are_those_of_the_prompt_as_it_was():
    cache = cached(32, 4, LONG)
    buffer = joined(LONG[:6], [60, 61])
    lease = cache.acquire(buffer)
    buffer[:] = 7
    assert miss_of(lease).parting.ours.tolist() == [0, 1, 2, 3, 4, 5, 60, 61]


def test_texts_end_where_the_prompts_end():
    lease = cached(32, 4, joined(LONG[:6], [50, 51])).acquire(joined(LONG[:6], [60]))
    parting = miss_of(lease).parting
    assert (parting.ours.tolist(), parting.theirs.tolist()) == ([0, 1, 2, 3, 4, 5, 60], [0, 1, 2, 3, 4, 5, 50, 51])


def test_a_prompt_parts_from_the_one_it_shares_most_with():
    cache = cached(64, 4, joined(LONG[:4], LONG + 100), joined(LONG[:6], LONG + 200), joined(LONG[:5], LONG + 300))
    parting = miss_of(cache.acquire(joined(LONG[:6], [999, 998]))).parting
    assert (parting.position, parting.theirs[6:].tolist()) == (6, list(range(200, 208)))


def test_a_prompt_that_ends_a_prefix_parts_from_one_of_those_that_go_on():
    """Where an inner node ends, every child goes on otherwise."""
    cache = cached(64, 4, joined(LONG, LONG + 100), joined(LONG, LONG + 200))
    lease = cache.acquire(joined(LONG, LONG + 300))
    assert reasons(lease) == {"diverged": 16}
    assert miss_of(lease).parting.theirs[8:].tolist() in ([*range(100, 108)], [*range(200, 208)])


def test_a_prompt_can_part_from_one_that_was_evicted():
    cache = cached(64, 4, joined(LONG, LONG + 100))
    cache.evict(5)
    lease = cache.acquire(joined(LONG[:14], [999, 998]))
    assert (lease.num_cached_tokens, reasons(lease)) == (12, {"evicted": 2, "diverged": 2})
    assert miss_of(lease).parting.theirs.tolist() == [*range(6, 16), *range(100, 106)]


# -- evicted


def test_evicted_tells_how_long_ago_and_how_much_larger_the_cache_had_to_be():
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    serve(cache, LONG)
    cache.evict(3)
    clock.now += 30
    serve(cache, LONG + 100)
    cache.evict(99)
    clock.now += 12
    lease = cache.acquire(LONG)
    assert (lease.num_cached_tokens, reasons(lease)) == (0, {"evicted": 15, "last_token": 1})
    miss = miss_of(lease)
    assert (miss.evicted_seconds_ago, miss.evicted_blocks_since) == (12, 5), "of the first block that is missing"


def test_evicted_counts_only_what_is_gone():
    cache = cached(32, 4, LONG)
    cache.evict(1)
    lease = cache.acquire(joined(LONG, [99]))
    assert (lease.num_cached_tokens, reasons(lease)) == (12, {"evicted": 4, "new": 1})


def test_what_was_evicted_and_is_computed_again_is_a_hit():
    cache = cached(32, 4, LONG)
    cache.evict(2)
    serve(cache, LONG)
    lease = cache.acquire(joined(LONG, [99]))
    assert (lease.num_cached_tokens, reasons(lease)) == (16, {"new": 1})


def test_a_hit_has_no_time_of_eviction():
    cache = cached(32, 4, LONG, LONG + 100)
    cache.evict(4)
    miss = miss_of(cache.acquire(joined(LONG + 100, [1])))
    assert (miss.evicted, miss.evicted_seconds_ago, miss.evicted_blocks_since) == (0, None, None)


def test_a_clock_that_goes_back_makes_no_negative_ages():
    clock = Clock()
    cache = explaining(32, 4, clock=clock)
    serve(cache, LONG)
    cache.evict(4)
    clock.now -= 500
    assert miss_of(cache.acquire(LONG)).evicted_seconds_ago == 0


def test_evicted_branches_are_told_apart_below_an_evicted_prefix():
    cache = cached(64, 4, joined(LONG, LONG + 100), joined(LONG, LONG + 200))
    cache.evict(99)
    for base in (100, 200):
        lease = cache.acquire(joined(LONG, LONG + base, [7]))
        assert reasons(lease) == {"evicted": 32, "new": 1}
        cache.release(lease)
    lease = cache.acquire(joined(LONG, LONG + 300))
    assert reasons(lease) == {"evicted": 16, "diverged": 16}


def test_what_was_evicted_longest_ago_is_forgotten_first_and_memory_is_bounded_by_the_cache():
    cache = explaining(8, 4)
    for i in range(50):
        serve(cache, LONG + 100 * i)
        cache.check()
        assert cache.tree.remembered.num_blocks <= 8
    cache.evict(99)
    assert reasons(cache.acquire(LONG + 4900)) == {"evicted": 15, "last_token": 1}
    cache = explaining(8, 4)
    for i in range(50):
        serve(cache, LONG + 100 * i)
    assert reasons(cache.acquire(LONG)) == {"new": 16}


def test_namespaces_that_are_evicted_and_forgotten_leave_nothing():
    cache = explaining(8, 4)
    for i in range(100):
        serve(cache, LONG, f"salt-{i}")
        cache.check()
    assert cache.tree.num_namespaces <= 8


def test_what_is_evicted_and_comes_back_again_and_again_does_not_grow_what_is_remembered():
    cache = explaining(8, 4)
    for _ in range(500):
        serve(cache, LONG)
        cache.evict(99)
    assert len(cache.tree.remembered._queue) < 100


def test_a_reset_forgets_what_was_evicted_too():
    cache = cached(32, 4, LONG)
    cache.evict(99)
    cache.reset()
    assert reasons(cache.acquire(LONG)) == {"new": 16}
    assert cache.tree.remembered.num_blocks == 0


# -- partial_block


def test_a_tail_shorter_than_a_block_is_known_but_not_cached():
    cache = cached(32, 4, LONG[:11])
    lease = cache.acquire(joined(LONG[:11], [99]))
    assert (lease.num_cached_tokens, reasons(lease)) == (8, {"partial_block": 3, "new": 1})


def test_a_prompt_shorter_than_a_block_is_known_when_it_comes_again():
    for prompt, expected in (
        (joined(LONG[:3], [99]), {"partial_block": 3, "new": 1}),
        (LONG[:3], {"partial_block": 2, "last_token": 1}),
        (joined(LONG[:2], [99]), {"partial_block": 2, "diverged": 1}),
    ):
        assert reasons(cached(32, 4, LONG[:3]).acquire(prompt)) == expected


def test_rows_that_there_is_no_room_to_copy_from_are_a_partial_block():
    cache = cached(4, 4, LONG)
    lease = cache.acquire(joined(LONG[:6], np.arange(50, 60)))
    assert (lease.num_cached_tokens, reasons(lease)) == (4, {"partial_block": 2, "diverged": 10})


def test_rows_that_there_is_no_room_to_copy_from_are_not_evicted_though_the_tail_behind_them_was():
    cache = cached(4, 4, LONG)
    cache.evict(1)
    lease = cache.acquire(joined(LONG[:6], np.arange(50, 60)))
    assert (lease.num_cached_tokens, reasons(lease)) == (4, {"partial_block": 2, "diverged": 10})


def test_only_what_was_computed_of_a_prompt_is_known():
    cache = explaining(32, 4)
    lease = cache.acquire(LONG[:3])
    cache.publish(lease, LONG[:3], 2)
    cache.release(lease)
    assert reasons(cache.acquire(joined(LONG[:3], [99]))) == {"partial_block": 2, "new": 2}


def test_rows_of_a_block_that_is_not_written_yet_are_a_partial_block():
    cache = explaining(32, 4)
    cache.publish(cache.acquire(LONG), LONG, 16, written=False)
    lease = cache.acquire(joined(LONG[:6], [99]))
    assert (lease.num_cached_tokens, reasons(lease)) == (4, {"partial_block": 2, "diverged": 1})
    cache.take_copies()  # the step is over, and they are written
    lease = cache.acquire(joined(LONG[:6], [98]))
    assert (lease.num_cached_tokens, reasons(lease)) == (6, {"diverged": 1})


# -- in_flight


def test_what_another_sequence_is_computing_is_in_flight():
    cache = explaining(32, 4)
    cache.acquire(LONG)
    assert reasons(cache.acquire(joined(LONG, [99]))) == {"in_flight": 16, "new": 1}
    assert reasons(cache.acquire(LONG)) == {"in_flight": 15, "last_token": 1}


def test_what_has_been_published_is_in_flight_no_more():
    cache = explaining(32, 4)
    first = cache.acquire(LONG)
    cache.publish(first, LONG, 8)
    lease = cache.acquire(LONG)
    assert (lease.num_cached_tokens, reasons(lease)) == (8, {"in_flight": 7, "last_token": 1})
    cache.publish(first, LONG, 16)
    assert reasons(cache.acquire(joined(LONG, [99]))) == {"new": 1}
    cache.check()


def test_a_sequence_that_gave_up_is_computing_nothing():
    cache = explaining(32, 4)
    cache.release(cache.acquire(LONG))
    assert reasons(cache.acquire(LONG)) == {"new": 16}


def test_a_prompt_can_part_from_one_in_flight():
    cache = explaining(32, 4)
    cache.acquire(LONG)
    lease = cache.acquire(joined(LONG[:10], [99, 98]))
    assert reasons(lease) == {"in_flight": 10, "diverged": 2}
    parting = miss_of(lease).parting
    assert (parting.position, parting.ours.tolist(), parting.theirs.tolist()) == (
        10,
        [*range(2, 10), 99, 98],
        [*range(2, 16)],
    )


def test_of_several_in_flight_the_one_that_shares_most_counts():
    cache = explaining(64, 4)
    for shared in (4, 13, 9):
        cache.acquire(joined(LONG[:shared], LONG + 100 * shared))
    assert reasons(cache.acquire(joined(LONG, [99]))) == {"in_flight": 13, "diverged": 4}


def test_what_is_known_beyond_what_is_in_flight_was_evicted():
    cache = cached(32, 4, LONG)
    cache.evict(99)
    cache.acquire(joined(LONG[:8], LONG + 50))
    assert reasons(cache.acquire(joined(LONG, [99]))) == {"in_flight": 8, "evicted": 8, "new": 1}


def test_in_flight_in_another_namespace_is_no_business_of_ours():
    cache = explaining(32, 4)
    cache.acquire(LONG, namespace="a")
    assert reasons(cache.acquire(LONG, namespace="b")) == {"new": 16}


def test_what_follows_the_end_of_a_prompt_in_flight_is_new_whatever_else_is_cached():
    cache = cached(32, 4, tokens(99, 99, 99, 99))
    cache.acquire(LONG)
    lease = cache.acquire(joined(LONG, LONG + 100))
    assert reasons(lease) == {"in_flight": 16, "new": 16}


# -- namespace


def test_what_another_namespace_has_is_told_when_the_request_ends_and_never_to_the_request():
    cache = explaining(64, 4)
    serve(cache, LONG, "a")
    lease = run(cache, joined(LONG, [99, 98]), "b")
    assert reasons(lease) == {"new": 18}
    assert cache.stats().namespaces["b"].missed["namespace"] == 0
    cache.release(lease)
    missed = cache.stats().namespaces["b"].missed
    assert (missed["namespace"], missed["new"]) == (16, 2)
    assert reasons(lease) == {"new": 18}, "a request must not learn what others ask"


def test_what_has_diverged_here_may_be_cached_there():
    cache = explaining(64, 4)
    serve(cache, LONG, "a")
    serve(cache, joined(LONG[:4], LONG + 50), "b")
    serve(cache, LONG, "b")
    missed = cache.stats().namespaces["b"].missed
    assert (missed["namespace"], missed["diverged"], missed["new"]) == (4 + 12, 0, 16)


def test_less_than_a_block_elsewhere_is_not_looked_for():
    cache = explaining(64, 4)
    serve(cache, LONG, "a")
    serve(cache, LONG[:3], "b")
    assert cache.stats().namespaces["b"].missed["namespace"] == 0


def test_a_preempted_prompt_is_found_in_another_namespace_once():
    cache = explaining(64, 4)
    serve(cache, LONG, "a")
    cache.release(cache.acquire(LONG, namespace="b"))
    cache.release(cache.acquire(LONG, namespace="b", resumed=True))
    missed = cache.stats().namespaces["b"].missed
    assert (missed["namespace"], missed["new"]) == (16, 0)


# -- last_token, and all of it together


def test_the_last_token_of_a_wholly_cached_prompt_is_the_only_miss():
    assert reasons(cached(32, 4, LONG).acquire(LONG)) == {"last_token": 1}
    assert reasons(cached(32, 4, LONG).acquire(LONG[:7])) == {"last_token": 1}


def test_the_last_token_is_taken_off_the_reason_that_it_would_have_had():
    cache = cached(32, 4, LONG[:10])
    cache.evict(99)
    assert reasons(cache.acquire(LONG[:10])) == {"evicted": 8, "partial_block": 1, "last_token": 1}


def test_a_cache_that_was_not_asked_to_explain_remembers_nothing_and_gives_no_reason():
    cache = PrefixCache(32, 4)
    serve(cache, LONG)
    cache.evict(2)
    assert cache.acquire(LONG).miss is None
    assert not any(cache.stats().total.missed.values())
    assert cache.tree.remembered.num_blocks == 0


def test_without_prefix_caching_there_is_nothing_to_explain():
    cache = cached(32, 4, LONG, enable_prefix_caching=False)
    assert cache.acquire(LONG).miss is None


def test_a_fork_has_missed_nothing():
    cache = explaining(32, 4)
    (child,) = cache.fork(run(cache, LONG), 1)
    assert child.miss is None


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=16)


@settings(deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(0, 4)), max_size=25))
def test_reasons_are_those_of_a_model_that_forgets_nothing(steps: list[tuple[list[int], int]]):
    """One sequence at a time, and no more evicted than is remembered: then the reasons are exact in whole blocks."""
    cache, model = explaining(400, 4), NaiveCache(4)
    cache.subscribe(model.hear)
    history: list[tuple[int, ...]] = []
    for values, evicted in steps:
        prompt = tuple(values)
        lease = cache.acquire(np.array(prompt))
        miss = miss_of(lease)
        first = lease.num_matched_tokens
        known = first + miss.evicted + miss.partial_block + (1 if miss.last_token and first < len(prompt) else 0)
        assert miss.num_tokens == len(prompt) - lease.num_cached_tokens
        assert miss.in_flight == 0
        assert miss.last_token == (known == len(prompt)), "the last token is the reason when all else was known"
        assert any(earlier[:known] == prompt[:known] for earlier in history) or not known
        stored = model.longest_known("", prompt)
        assert first + miss.evicted + miss.last_token >= stored, "whole blocks that were stored and are gone were evicted"
        assert model.was_stored("", prompt[: first + miss.evicted]) or not miss.evicted
        assert not (miss.diverged and miss.new)
        if any(len(key) > known and key[:known] == prompt[:known] for _, key in model.ever_stored) and known:
            assert not miss.new, "a stored sequence goes on otherwise"
        if miss.diverged:
            assert known == miss.parting.position
        cache.take_copies()
        cache.publish(lease, np.array(prompt), len(prompt))
        cache.release(lease)
        history.append(prompt)
        cache.evict(evicted)


@settings(deadline=None)
@given(st.integers(4, 10), st.lists(prompts, min_size=2, max_size=30))
def test_a_cache_larger_by_the_blocks_evicted_since_would_have_had_the_first_that_is_missing(
    num_blocks: int, requests: list[list[int]]
):
    cache = explaining(num_blocks, 4)
    for i, values in enumerate(requests):
        lease = serve(cache, np.array(values))
        miss = miss_of(lease)
        whole = lease.num_matched_tokens // 4 * 4 + 4
        if lease.num_matched_tokens + miss.evicted >= whole:
            larger = explaining(num_blocks + miss.evicted_blocks_since, 4)
            for earlier in requests[:i]:
                serve(larger, np.array(earlier))
            assert held(larger, np.array(values)) >= whole // 4


@settings(deadline=None)
@given(st.lists(st.tuples(prompts, st.integers(0, 3)), max_size=20))
@example([([0, 1, 2, 2], 0), ([0, 1, 1, 1], 1), ([0, 1, 2, 0, 0], 0)])
@example([([0, 1, 1, 1], 0), ([0, 1, 1, 2], 0), ([0, 0, 0, 0], 1), ([0, 1, 1, 1, 0], 0)])
def test_attribution_changes_nothing_about_what_is_found(steps: list[tuple[list[int], int]]):
    explained, plain = PrefixCache(16, 4, attribution=True), PrefixCache(16, 4, attribution=False)
    for values, evicted in steps:
        found = [serve(cache, np.array(values)).num_matched_tokens for cache in (explained, plain)]
        assert found[0] == found[1]
        assert explained.evict(evicted) == plain.evict(evicted)


def test_a_bound_on_what_was_missing_holds_for_blocks_that_were_evicted_long_before_the_ones_around_them():
    """The edge loses its tail, much later its head, and then the head comes back: the tail's own time counts."""
    now = [0.0]
    cache = explaining(100, 1, clock=lambda: now[0])
    serve(cache, np.arange(6))
    cache.evict(3)
    for i in range(80):
        serve(cache, [1000 + i])
        cache.evict(1)
    now[0] = 1000.0
    cache.evict(99)
    now[0] = 1001.0
    serve(cache, np.arange(3))
    miss = cache.acquire(np.arange(10)).miss
    assert miss.evicted == 3
    assert miss.evicted_blocks_since >= 83
    assert miss.evicted_seconds_ago == 1001.0


def test_many_evicted_siblings_do_not_hide_the_rows_of_a_cached_one():
    for attribution in (True, False):
        cache = PrefixCache(400, 4, attribution=attribution)
        for i in range(200):
            serve(cache, [5, 6, 8, i])
        cache.evict(200)
        serve(cache, [5, 6, 7, 0])
        assert cache.acquire([5, 6, 8, 150, 1]).num_cached_tokens == 2
        cache.check()


def test_a_prompt_in_flight_is_seen_beyond_what_another_sequence_has_published_of_it():
    cache = explaining(64, 4)
    computing = cache.acquire(np.arange(32))
    serve(cache, joined(np.arange(16), [90, 91, 92, 93]))
    miss = cache.acquire(joined(np.arange(32), [99])).miss
    assert (miss.in_flight, miss.diverged, miss.new) == (16, 0, 1)
    cache.release(computing)


def test_what_came_back_and_was_evicted_again_is_forgotten_last():
    """Eight blocks are remembered: four that were evicted twice, the last time latest, four that were evicted between."""
    cache = explaining(8, 4)
    often, once = LONG, LONG + 100
    serve(cache, often)
    cache.evict(8)
    serve(cache, once)
    serve(cache, often)
    cache.evict(4)
    cache.evict(4)
    serve(cache, LONG[:4] + 300)
    cache.evict(8)  # one block more to remember than there is room for
    lease = cache.acquire(joined(often, [7]))
    assert miss_of(lease).evicted == 16
    cache.release(lease)
    assert miss_of(cache.acquire(joined(once, [7]))).evicted == 0


def test_releasing_a_prompt_looks_into_no_other_namespace(monkeypatch: pytest.MonkeyPatch):
    """Else the time of a tenant's request would tell what others have cached."""
    cache = explaining(64, 4)
    serve(cache, LONG, "a")
    looked_up: list[str] = []
    real = cache.tree.match
    monkeypatch.setattr(cache.tree, "match", lambda tokens, namespace="": looked_up.append(namespace) or real(tokens, namespace))
    serve(cache, LONG, "b")
    assert set(looked_up) == {"b"}
    assert cache.stats().namespaces["b"].missed["namespace"] == 16
    assert "a" in looked_up
