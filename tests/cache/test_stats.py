"""stats(): what is counted adds up, and by reason."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given, settings

from radixkv.cache import HitCounts, Lease, PrefixCache

from .serving import LONG, cached, explaining, joined, run, serve

Step = tuple[str, list[int], str]


def steps(*kinds: str) -> st.SearchStrategy[list[Step]]:
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    return st.lists(st.tuples(st.sampled_from(kinds), prompts, st.sampled_from(["a", "b", "c"])), max_size=30)


def count_along(attribution: bool, taken: list[Step]) -> None:
    """Take steps, and assert after each that the counters are those of a list of all requests."""
    cache = PrefixCache(24, 4, attribution=attribution)
    running: list[Lease] = []
    expected: dict[str, list[int]] = {}
    for step, values, namespace in taken:
        prompt = np.array(values)
        if step == "evict":
            cache.evict(len(values))
        elif step == "end":
            if running:
                cache.release(running.pop(0))
        elif lease := cache.acquire(prompt, namespace=namespace, resumed=step == "resume"):
            running.append(lease)
            cache.take_copies()
            if step == "serve":
                cache.publish(lease, prompt, len(prompt))
            if step != "resume":
                counts = expected.setdefault(namespace, [0, 0, 0])
                for i, count in enumerate((1, len(prompt), lease.num_cached_tokens)):
                    counts[i] += count
        stats = cache.stats()
        assert {name: [c.requests, c.prompt_tokens, c.cached_tokens] for name, c in stats.namespaces.items()} == expected
        for counted in (stats.total, *stats.namespaces.values()):
            assert min(counted.missed.values()) >= 0
            assert sum(counted.missed.values()) == (counted.prompt_tokens - counted.cached_tokens if attribution else 0)
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_locked == stats.blocks_total


@settings(deadline=None)
@given(st.booleans(), steps("serve", "abort", "end", "evict"))
def test_every_uncached_token_is_counted_under_one_reason_at_all_times(attribution: bool, taken: list[Step]):
    count_along(attribution, taken)


@settings(deadline=None)
@given(st.booleans(), steps("serve", "abort", "resume", "end", "evict"))
@example(True, [("serve", [0] * 4, "a"), ("resume", [0] * 4, "b"), ("end", [0], "a"), ("end", [0], "a")])
def test_every_uncached_token_is_counted_under_one_reason_when_prompts_are_resumed(attribution: bool, taken: list[Step]):
    count_along(attribution, taken)


def test_no_counter_is_negative_when_a_namespace_was_long_silent():
    cache = explaining(4096, 4)
    waiting = cache.acquire(LONG, namespace="slow")
    for i in range(1100):
        cache.release(cache.acquire([i], namespace=str(i)))
    serve(cache, LONG, "last")
    cache.release(waiting)
    for counts in cache.stats().namespaces.values():
        assert min(counts.missed.values()) >= 0


def test_a_namespace_of_any_name_keeps_its_own_counters():
    cache = explaining(4096, 4)
    for i in range(1100):
        cache.release(cache.acquire([i], namespace=str(i)))
    serve(cache, LONG, "(others)")
    assert sum(counts.requests for counts in cache.stats().namespaces.values()) == 1101


def test_of_many_namespaces_those_in_use_keep_their_own_counters():
    cache = explaining(32, 4)
    for i in range(1500):
        cache.release(cache.acquire(LONG, namespace=str(i)))
        if i % 100 == 0:
            cache.release(cache.acquire(LONG, namespace="steady"))
    assert cache.stats().namespaces["steady"].requests == 15


def test_counts_by_reason_are_those_of_the_leases():
    cache = cached(64, 4, LONG)
    leases = [run(cache, prompt) for prompt in (joined(LONG[:6], [99]), LONG + 100, joined(LONG, LONG + 100), LONG)]
    missed = cache.stats().total.missed
    misses = [lease.miss for lease in leases]
    for reason in ("in_flight", "evicted", "partial_block", "diverged", "last_token"):
        assert missed[reason] == sum(getattr(miss, reason) for miss in misses), reason
    assert missed["new"] == sum(miss.new for miss in misses) + len(LONG)


def test_stats_are_a_picture_that_later_requests_do_not_change():
    cache = cached(32, 4, LONG)
    stats = cache.stats()
    serve(cache, LONG)
    assert (stats.total.requests, stats.namespaces[""].requests) == (1, 1)


def test_blocks_are_free_cached_or_locked():
    cache = cached(16, 4, LONG)
    lease = cache.acquire(joined(LONG[:8], [99]))
    cache.take_copies()
    stats = cache.stats()
    assert (stats.blocks_total, stats.blocks_free, stats.blocks_cached, stats.blocks_locked) == (16, 11, 2, 3)
    assert (stats.nodes, stats.evicted_blocks) == (2, 0)
    cache.release(lease)
    cache.evict(3)
    stats = cache.stats()
    assert (stats.blocks_free, stats.blocks_cached, stats.blocks_locked, stats.nodes) == (15, 1, 0, 1)
    assert stats.evicted_blocks == 3


def test_the_hit_rate_is_a_share_of_prompt_tokens_and_0_before_there_are_any():
    assert explaining(8, 4).stats().total.hit_rate == 0
    assert HitCounts(requests=2, prompt_tokens=40, cached_tokens=10).hit_rate == 0.25
    cache = cached(32, 4, LONG, LONG)
    assert cache.stats().total.hit_rate == 15 / 32


def test_stats_are_plain_types_a_table_and_html_for_notebooks():
    cache = PrefixCache(64, 16, attribution=True)
    for namespace in ("", "<i>tenant"):
        for _ in range(2):
            lease = cache.acquire(list(range(32)), namespace=namespace)
            cache.publish(lease, list(range(32)), 32)
            cache.release(lease)
    stats = cache.stats()
    plain = json.loads(json.dumps(stats.to_dict()))
    assert plain["total"]["cached_tokens"] == 62
    assert plain["namespaces"]["<i>tenant"]["requests"] == 2
    rows = stats.rows()
    assert [(row["namespace"], row["cached_tokens"]) for row in rows] == [("", 31), ("<i>tenant", 31)]
    assert rows[0]["hit_rate"] == 31 / 64
    html = stats._repr_html_()
    assert "48.4%" in html
    assert "&lt;i&gt;tenant" in html
    assert "<i>" not in html
