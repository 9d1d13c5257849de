"""Replay against a model that is nothing but an ordered dict, and against the published table of a production trace."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache import PrefixCache
from radixkv.cache.eviction import EvictionPolicyName
from radixkv.report import command
from radixkv.report.replay import replay
from radixkv.report.trace import TraceRequest, read_trace

SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")


def naive_lru(trace: list[TraceRequest], capacity: int | None) -> tuple[int, int, int, int]:
    """Hit blocks, hit tokens, evicted blocks, resident blocks of LRU over block ids, a request's deeper blocks older."""
    cached: OrderedDict[int, None] = OrderedDict()
    hit_blocks = hit_tokens = evicted = 0
    for request in trace:
        ids = request.hash_ids[:capacity]
        hits = next((n for n, i in enumerate(ids) if i not in cached), len(ids))
        hit_blocks += hits
        hit_tokens += min(hits * 512, request.input_length)
        for i in reversed(ids):
            cached[i] = None
            cached.move_to_end(i)
        while capacity is not None and len(cached) > capacity:
            cached.popitem(last=False)
            evicted += 1
    return hit_blocks, hit_tokens, evicted, len(cached)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts over two symbols, so that many begin alike; a block's id stands for all that led to it, as in real traces."""
    ids: dict[tuple[int, ...], int] = {}
    trace = []
    for symbols in draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=25)):
        hashes = [ids.setdefault(tuple(symbols[: n + 1]), 2**40 + 7 * len(ids)) for n in range(len(symbols))]
        trace.append(TraceRequest(0, 512 * len(hashes) - draw(st.integers(0, 511)), 1, hashes))
    return trace


@settings(deadline=None, max_examples=200)
@given(trace=traces(), capacity=st.none() | st.integers(1, 20))
def test_replay_hits_and_evicts_exactly_what_an_ordered_dict_would(trace: list[TraceRequest], capacity: int | None) -> None:
    result = replay(trace, capacity)
    assert (result.hit_blocks, result.hit_tokens, result.evicted_blocks, result.resident_blocks) == naive_lru(trace, capacity)
    assert result.prompt_blocks == sum(len(r.hash_ids) for r in trace)
    assert result.prompt_tokens == sum(r.input_length for r in trace)
    assert result.requests == len(trace)


@settings(deadline=None, max_examples=200)
@given(trace=traces(), capacity=st.integers(1, 12), policy=st.sampled_from(get_args(EvictionPolicyName)))
def test_under_any_policy_replay_hits_what_a_cache_of_whole_blocks_does(
    trace: list[TraceRequest], capacity: int, policy: EvictionPolicyName
) -> None:
    cache, hits = PrefixCache(capacity + 1, 512, policy=policy), 0
    for request in trace:
        blocks = np.array([i - 2**40 for i in request.hash_ids[:capacity]], np.int32)
        tokens = np.append(np.repeat(blocks, 512), np.int32(-1))
        lease = cache.acquire(tokens)
        assert lease is not None
        hits += lease.num_matched_tokens // 512
        cache.publish(lease, tokens, len(tokens) - 1)
        cache.release(lease)
    assert replay(trace, capacity, policy=policy).hit_blocks == hits


def test_a_hit_on_a_partial_last_block_counts_only_the_tokens_it_holds() -> None:
    result = replay([TraceRequest(0, 700, 1, [1, 2])] * 2)
    assert (result.hit_blocks, result.hit_tokens) == (2, 700)
    assert result.hit_rate_tokens == 0.5


def test_a_request_larger_than_the_cache_keeps_its_beginning_and_misses_the_rest() -> None:
    result = replay([TraceRequest(0, 512 * 6, 1, list(range(6)))] * 2, 4)
    assert (result.hit_blocks, result.prompt_blocks, result.resident_blocks) == (4, 12, 4)


@pytest.mark.parametrize("capacity", [3_000_000_000, 10**12, 10**30])
def test_a_capacity_beyond_any_memory_hits_what_an_unbounded_cache_does(capacity: int) -> None:
    trace = [TraceRequest(0, 512 * 3, 1, [1, 2, 3])] * 2
    result = replay(trace, capacity)
    assert (result.hit_blocks, result.evicted_blocks, result.resident_blocks) == (3, 0, 3)
    assert result.capacity_blocks == capacity


def test_blocks_of_another_size_are_counted_whole_and_with_their_own_tokens() -> None:
    trace = [TraceRequest(0, 700, 1, [1, 2])] * 2
    small, large = replay(trace, block_size=64), replay(trace, block_size=1024)
    assert (small.block_size, small.hit_blocks, small.prompt_blocks, small.hit_tokens) == (64, 10, 20, 640)
    assert (large.block_size, large.hit_blocks, large.prompt_blocks, large.hit_tokens) == (1024, 0, 0, 0)


def test_a_prompt_shorter_than_a_block_hits_nothing_and_is_counted() -> None:
    result = replay([TraceRequest(0, 700, 1, [1, 2]), TraceRequest(0, 10, 1, [3])], 3, block_size=128)
    assert (result.requests, result.prompt_blocks, result.hit_blocks, result.prompt_tokens) == (2, 5, 0, 710)


def test_namespaces_share_no_blocks() -> None:
    one, other = TraceRequest(0, 1024, 1, [1, 2], "a"), TraceRequest(0, 1024, 1, [1, 2], "b")
    assert replay([one, other]).hit_blocks == 0
    assert replay([one, other, one]).hit_blocks == 2


def test_an_empty_trace_has_a_hit_rate_of_nought() -> None:
    assert replay([]).hit_rate_blocks == 0.0


def test_progress_ends_at_the_number_of_requests() -> None:
    calls: list[tuple[int, int]] = []
    replay([TraceRequest(0, 1, 1, [1])] * 300, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 300), (256, 300), (300, 300)]


def test_a_capacity_of_nought_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="capacity_blocks must be at least 1, got 0"):
        replay([], 0)


def test_the_command_line_offers_every_eviction_policy_of_the_cache() -> None:
    assert get_args(get_type_hints(command.replay)["policy"]) == get_args(EvictionPolicyName)


@needs_trace
def test_an_unbounded_cache_reaches_the_published_rates_of_the_conversation_trace() -> None:
    result = replay(read_trace(SHARED_TRACE))
    assert round(result.hit_rate_blocks, 4) == 0.3664
    assert round(result.hit_rate_tokens, 4) == 0.3736
    assert result.evicted_blocks == 0


@needs_trace
@pytest.mark.full
@pytest.mark.parametrize(
    ("capacity", "share"), [(100_000, 0.3637), (50_000, 0.3546), (30_000, 0.3257), (10_000, 0.2116), (1_000, 0.0445)]
)
def test_a_bounded_cache_reaches_the_published_rate_of_the_conversation_trace(capacity: int, share: float) -> None:
    trace = list(read_trace(SHARED_TRACE))
    result = replay(trace, capacity)
    assert round(result.hit_rate_blocks, 4) == share
    assert (result.hit_blocks, result.hit_tokens, result.evicted_blocks, result.resident_blocks) == naive_lru(trace, capacity)
