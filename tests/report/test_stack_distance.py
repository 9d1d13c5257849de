"""The one-pass curve against a separate simulation of every capacity, by the real cache and by an ordered dict."""

from __future__ import annotations

from collections import OrderedDict
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.report.replay import replay
from radixkv.report.stack_distance import hit_curve
from radixkv.report.trace import TraceRequest, read_trace

SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
needs_trace = pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")


def naive_lru_hits(trace: list[TraceRequest], capacity: int) -> tuple[int, int]:
    """Hit blocks and hit tokens of LRU over paths from the root, a request's deeper blocks older."""
    cached: OrderedDict[tuple[object, ...], None] = OrderedDict()
    hit_blocks = hit_tokens = 0
    for request in trace:
        paths = [(request.namespace, *request.hash_ids[: n + 1]) for n in range(len(request.hash_ids))][:capacity]
        hits = next((n for n, path in enumerate(paths) if path not in cached), len(paths))
        hit_blocks += hits
        hit_tokens += min(hits * 512, request.input_length)
        for path in reversed(paths):
            cached[path] = None
            cached.move_to_end(path)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hit_blocks, hit_tokens


# Ids that mean different blocks after different prefixes, which no real trace has: only the path to a block says what it is.
traces = st.lists(
    st.builds(
        lambda ids, partial, namespace: TraceRequest(0, 512 * len(ids) - partial, 1, ids, namespace),
        st.lists(st.integers(0, 1), min_size=1, max_size=9),
        st.integers(0, 511),
        st.sampled_from(["", "", "tenant"]),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=300)
@given(trace=traces)
def test_the_curve_is_what_separate_simulations_hit_at_every_capacity(trace: list[TraceRequest]) -> None:
    curve = hit_curve(trace)
    for capacity in range(1, curve.distinct_blocks + 2):
        assert curve.hits_at(capacity) == naive_lru_hits(trace, capacity)


@settings(deadline=None)
@given(trace=traces, capacity=st.none() | st.integers(1, 60), block_size=st.sampled_from([128, 256, 512, 1024, 1536]))
def test_the_curve_is_what_the_real_cache_hits_at_any_capacity_and_block_size(
    trace: list[TraceRequest], capacity: int | None, block_size: int
) -> None:
    curve, result = hit_curve(trace, block_size=block_size), replay(trace, capacity, block_size=block_size)
    assert curve.hits_at(capacity) == (result.hit_blocks, result.hit_tokens)
    assert (curve.prompt_blocks, curve.prompt_tokens) == (result.prompt_blocks, result.prompt_tokens)
    assert curve.hit_rate_blocks(capacity) == result.hit_rate_blocks
    assert curve.hit_rate_tokens(capacity) == result.hit_rate_tokens
    if capacity is None:
        assert curve.distinct_blocks == result.resident_blocks


@settings(deadline=None)
@given(trace=traces, percent=st.integers(0, 100))
def test_the_capacity_for_a_share_of_the_hits_is_the_smallest_that_reaches_it(trace: list[TraceRequest], percent: int) -> None:
    curve = hit_curve(trace)
    wanted = Fraction(percent, 100) * curve.hits_at(None)[0]
    capacity = curve.capacity_for(percent / 100)
    assert curve.hits_at(capacity)[0] >= wanted
    assert capacity == 0 or curve.hits_at(capacity - 1)[0] < wanted


def test_a_trace_without_repetition_has_a_curve_of_nought() -> None:
    curve = hit_curve([TraceRequest(0, 512, 1, [n]) for n in range(3)])
    assert (curve.enough_blocks, curve.hit_rate_blocks(), curve.capacity_for(0.8), curve.distinct_blocks) == (0, 0.0, 0, 3)


def test_an_empty_trace_has_a_curve_of_nought() -> None:
    curve = hit_curve([])
    assert (curve.hit_rate_blocks(), curve.hit_rate_tokens(5), curve.enough_blocks) == (0.0, 0.0, 0)


def test_progress_ends_at_the_number_of_requests() -> None:
    calls: list[tuple[int, int]] = []
    hit_curve([TraceRequest(0, 1, 1, [1])] * 300, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 300), (256, 300), (300, 300)]


@needs_trace
def test_the_curve_of_the_conversation_trace_passes_through_the_published_table() -> None:
    curve = hit_curve(read_trace(SHARED_TRACE))
    published = {None: 0.3664, 100_000: 0.3637, 50_000: 0.3546, 30_000: 0.3257, 10_000: 0.2116, 1_000: 0.0445}
    assert {capacity: round(curve.hit_rate_blocks(capacity), 4) for capacity in published} == published
    assert round(curve.hit_rate_tokens(), 4) == 0.3736
    assert curve.distinct_blocks == 182_790


@needs_trace
@pytest.mark.full
@pytest.mark.parametrize("capacity", [10, 100, 1_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000, 150_000])
def test_the_curve_of_the_conversation_trace_agrees_with_a_separate_simulation(capacity: int) -> None:
    trace = list(read_trace(SHARED_TRACE))
    curve, result = hit_curve(trace), replay(trace, capacity)
    assert abs(curve.hit_rate_blocks(capacity) - result.hit_rate_blocks) <= 0.005
    assert curve.hits_at(capacity) == (result.hit_blocks, result.hit_tokens)


@needs_trace
@pytest.mark.full
def test_the_curve_of_the_conversation_trace_in_blocks_of_16_agrees_with_a_separate_simulation() -> None:
    trace = list(read_trace(SHARED_TRACE))
    curve, result = hit_curve(trace, block_size=16), replay(trace, 500_000, block_size=16)
    assert curve.hits_at(500_000) == (result.hit_blocks, result.hit_tokens)
