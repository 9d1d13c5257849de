"""RadixTree, as PrefixCache shows it: longest prefixes, splits, siblings, growth in place, and keys that are views."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from radixkv.cache import PrefixCache

from .serving import LONG, cached, explaining, held, joined, run, serve, tokens

# -- the longest prefix

BEGIN = 1
"""Every prompt begins with it, as with a tokenizer that adds a begin-of-sequence token."""
# Little-endian bytes order these otherwise than numbers do.
AWKWARD = [0, 1, 255, 256, 65536, -1, -(2**31), 2**31 - 1]

awkward_prompts = st.lists(st.sampled_from(AWKWARD), min_size=0, max_size=9).map(lambda rest: [BEGIN, *rest])
few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)


def longest_prefix(prompt: list[int], earlier: list[list[int]], block_size: int) -> int:
    """Tokens that ``prompt`` shares with the full blocks of any earlier one; the naive way."""
    best = 0
    for other in earlier:
        n = 0
        for ours, theirs in zip(prompt, other[: len(other) // block_size * block_size], strict=False):
            if ours != theirs:
                break
            n += 1
        best = max(best, n)
    return best


@pytest.mark.parametrize("attribution", [True, False])
@settings(deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.one_of(awkward_prompts, few_tokens), max_size=25))
@example(4, [[1, 9, 9, 9], [1, 2], [1, 8, 8, 8], [1, 2, 3]])
@example(4, [[1, 2], [1, 9, 9, 9], [1, 2, 3]])
def test_a_match_is_the_longest_prefix_that_a_naive_search_finds(attribution: bool, block_size: int, prompts: list[list[int]]):
    cache = PrefixCache(1000, block_size, attribution=attribution)
    for i, prompt in enumerate(prompts):
        expected = longest_prefix(prompt, prompts[:i], block_size)
        match = cache.match(prompt)
        assert match.num_blocks == expected // block_size == len(match.block_ids())
        lease = serve(cache, np.array(prompt))
        assert match.num_tokens(block_size) == lease.num_matched_tokens == expected
        assert lease.num_cached_tokens == min(expected, len(prompt) - 1)
        cache.check()


@pytest.mark.parametrize("position", [0, 1, 511, 512, 513, 2047, 2048, 2049, 8191, 8192, 9999])
def test_long_prompts_are_compared_to_the_token(position: int):
    """They are compared piece by piece, in pieces that grow."""
    long = np.arange(10_000, dtype=np.int32)
    other = long.copy()
    other[position] = -1
    lease = cached(1500, 16, long).acquire(other)
    assert lease.num_matched_tokens == position


def test_a_match_changes_nothing_not_even_the_order_of_eviction():
    cache = cached(32, 4, LONG, LONG + 100)
    before = cache.stats()
    for _ in range(3):
        cache.match(LONG)
        cache.match(joined(LONG[:6], [99]), "nobody")
    assert cache.stats() == before
    cache.evict(4)
    assert (held(cache, LONG), held(cache, LONG + 100)) == (0, 4)


def test_a_prompt_shorter_than_a_block_finds_its_rows():
    assert cached(32, 4, LONG).acquire(LONG[:3]).num_matched_tokens == 3
    assert cached(32, 4, LONG).acquire(LONG[:1]).num_matched_tokens == 1


# -- splits


@pytest.mark.parametrize("position", range(1, 20))
def test_an_edge_is_split_at_a_block_wherever_a_sequence_leaves_it(position: int):
    one = np.arange(20, dtype=np.int32)
    other = joined(one[:position], np.arange(100, 112))
    cache = explaining(32, 4)
    first = run(cache, one)
    table = first.block_table.tolist()
    second = run(cache, other)
    assert first.block_table.tolist() == table, "the blocks of a running sequence stay where they are"
    assert second.block_table[: position // 4].tolist() == table[: position // 4]
    assert cache.stats().nodes == (2 if position < 4 else 3)
    assert cache.match(one).block_ids().tolist() == table
    assert cache.match(other).block_ids().tolist() == second.block_table[: len(other) // 4].tolist()
    cache.check()
    cache.release(first)
    assert cache.evict(99) == 5 - position // 4, "what the second runs on stays"
    assert held(cache, other) == len(other) // 4
    cache.release(second)
    cache.check()


def test_one_edge_can_be_split_many_times_while_sequences_run_on_all_of_it():
    long = np.arange(80, dtype=np.int32)
    cache = explaining(200, 4)
    leases = [run(cache, long)]
    for end in (40, 72, 8, 24, 56, 4, 76):
        leases.append(run(cache, joined(long[:end], LONG[:4] + 1000 + end)))
        cache.check()
    for lease in leases[::2] + leases[1::2]:
        assert lease.block_table[: lease.num_computed_tokens // 4].tolist() == lease.block_table.tolist()
        cache.release(lease)
        cache.check()
    assert cache.evict(999) == 20 + 7


def test_a_split_edge_keeps_its_age():
    cache = cached(64, 4, LONG, LONG + 100)
    cache.release(cache.acquire(joined(LONG[:8], [99])))
    cache.evict(2)
    assert (held(cache, LONG), held(cache, LONG + 100)) == (2, 4), "the lower part is as old as the whole was"
    cache.evict(4)
    assert (held(cache, LONG), held(cache, LONG + 100)) == (2, 0), "the upper part was used"


# -- siblings


def test_many_children_that_begin_with_the_same_token_come_and_go():
    cache = explaining(2000, 4)
    random = np.random.default_rng(1)
    prompts = [joined([BEGIN], random.choice(AWKWARD, 11)) for _ in range(300)]
    for prompt in prompts:
        serve(cache, prompt)
    cache.check()
    for prompt in prompts:
        assert held(cache, prompt) == 3
    while cached_now := cache.stats().blocks_cached:
        cache.evict(7)
        cache.check()
        left = {tuple(prompt[: 4 * end].tolist()) for prompt in prompts for end in range(1, held(cache, prompt) + 1)}
        assert len(left) == max(cached_now - 7, 0)
    assert not any(held(cache, prompt) for prompt in prompts)


@pytest.mark.parametrize("attribution", [True, False])
def test_of_two_siblings_either_can_go_and_come_back(attribution: bool):
    one, other = tokens(BEGIN, 2, 3, 4), tokens(BEGIN, 5, 6, 7)
    cache = cached(32, 4, one, other, attribution=attribution)
    cache.evict(1)
    assert (held(cache, one), held(cache, other)) == (0, 1)
    serve(cache, one)
    cache.check()
    cache.evict(1)
    assert (held(cache, one), held(cache, other)) == (1, 0)
    serve(cache, other)
    cache.check()
    assert (held(cache, one), held(cache, other)) == (1, 1)


def test_a_first_block_can_be_split_off_among_siblings():
    cache = cached(64, 4, joined([BEGIN, 2, 3, 4], LONG), joined([BEGIN, 5, 6, 7], LONG), joined([BEGIN, 2, 3, 4], LONG + 50))
    cache.check()
    for rest, base in (((2, 3, 4), 0), ((5, 6, 7), 0), ((2, 3, 4), 50)):
        assert held(cache, joined([BEGIN, *rest], LONG + base)) == 5
    assert cache.stats().nodes == 4


def test_long_siblings_are_split_off_too():
    """Their edges are kept as arrays, and not as bytes."""
    long = [joined([BEGIN, i], np.arange(600) + 1000 * i) for i in range(5)]
    cache = cached(2000, 4, *long)
    for i, prompt in enumerate(long):
        serve(cache, joined(prompt[: 300 + i], LONG))
        cache.check()
    for i, prompt in enumerate(long):
        assert cache.acquire(joined(prompt[:400], [7])).num_cached_tokens == 400
        assert cache.acquire(joined(prompt[: 300 + i], LONG, [7])).num_cached_tokens == (316 + i) // 4 * 4


# -- growth in place


def test_a_sequence_grows_in_place_block_by_block():
    cache = explaining(64, 4)
    text = np.arange(200, dtype=np.int32)
    lease = run(cache, text[:10])
    for end in range(11, 200):
        assert cache.extend(lease, 1)
        cache.publish(lease, text[:end], end)
        assert cache.stats().nodes == 1
    cache.check()
    assert cache.match(text).block_ids().tolist() == lease.block_table[:49].tolist()


def test_the_next_turn_of_a_chat_grows_the_same_edge():
    cache = explaining(64, 4)
    text = np.arange(200, dtype=np.int32)
    for end in (10, 24, 61, 100, 163):
        lease = serve(cache, text[:end])
        cache.check()
    assert lease.num_cached_tokens == 100
    assert cache.stats().nodes == 1


def test_an_edge_that_others_end_on_does_not_grow_over_them():
    cache = explaining(64, 4)
    first, second = run(cache, LONG), run(cache, LONG)
    one, other = joined(LONG, LONG + 100), joined(LONG, LONG + 200)
    for lease, grown in ((first, one), (second, other)):
        assert cache.extend(lease, 16)
        cache.publish(lease, grown, 32)
        cache.check()
    assert cache.stats().nodes == 3
    cache.release(first)
    assert cache.evict(99) == 4, "what only the first grew"
    assert (held(cache, one), held(cache, other)) == (4, 8)


def test_what_grew_over_a_remembered_tail_is_found():
    """The tail of a finished prompt, shorter than a block, is no block's and in nobody's way."""
    cache = explaining(64, 4)
    serve(cache, LONG[:10])
    serve(cache, joined(LONG[:10], [50, 51, 52]))
    cache.check()
    serve(cache, joined(LONG[:9], [60, 61, 62]))
    cache.check()
    assert held(cache, joined(LONG[:10], [50, 51])) == 3
    assert held(cache, joined(LONG[:9], [60, 61, 62])) == 3


def test_blocks_come_back_to_a_remembered_edge_only_where_the_tokens_are_the_same():
    """The edge was cached, and lost its tail, while the sequence that parts from it there was computed."""
    cache = explaining(64, 4)
    ours = joined(LONG[:12], LONG[:4] + 50)
    lease = cache.acquire(ours)
    serve(cache, LONG)
    cache.evict(1)
    cache.publish(lease, ours, 16)
    cache.check()
    assert (held(cache, ours), held(cache, LONG)) == (4, 3)
    assert cache.match(ours).block_ids().tolist() == lease.block_table.tolist()


@pytest.mark.parametrize("attribution", [True, False])
@pytest.mark.parametrize(("served", "kept"), [(4, 0), (4, 1), (16, 0), (16, 1), (16, 2), (16, 3), (16, 4)])
@pytest.mark.parametrize("parts", [5, 8, 9, 15, 16])
@pytest.mark.parametrize("computed", [8, 9, 16, 20])
def test_a_remembered_prompt_comes_back_as_far_as_the_sequence_goes_on_like_it(
    attribution: bool, served: int, kept: int, parts: int, computed: int
):
    """Whether it parts from what is remembered within its prompt or in what it generates."""
    cache = PrefixCache(64, 4, attribution=attribution)
    serve(cache, LONG[:served])
    cache.evict(served // 4 - kept)
    sequence = joined(LONG[:parts], np.arange(900, 924 - parts))
    for prompt in (sequence[:3], sequence[:7], sequence[:14], sequence):
        lease = cache.acquire(prompt)
        assert cache.extend(lease, 24 - len(prompt))
        cache.take_copies()
        cache.publish(lease, sequence, computed)
        cache.check()
        assert cache.match(sequence).num_blocks >= computed // 4
        cache.publish(lease, sequence, 24)
        cache.check()
        assert cache.match(sequence).block_ids().tolist() == lease.block_table.tolist()
        cache.release(lease)
        cache.evict(64 - cache.pool.num_free - kept)


# -- keys


def kept(cache: PrefixCache, prompt: np.ndarray) -> np.ndarray:
    """What the tree keeps of a prompt that is one edge."""
    return cache.match(prompt).node.tokens


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_a_read_only_prompt_is_kept_without_copying():
    prompt = read_only(np.arange(1024, dtype=np.int32))
    cache = cached(256, 4, prompt)
    assert np.shares_memory(kept(cache, prompt), prompt)


def test_most_of_a_read_only_buffer_is_kept_as_a_view_and_a_small_part_copied():
    buffer = read_only(np.arange(2048, dtype=np.int32))
    for n, shares in ((2048, True), (1024, True), (1020, False), (8, False)):
        cache = cached(512, 4, buffer[:n])
        assert np.shares_memory(kept(cache, buffer[:n]), buffer) == shares, n


def test_a_small_part_of_a_large_buffer_does_not_keep_it_in_memory():
    buffer = read_only(np.arange(1_000_000, dtype=np.int32))
    alive = weakref.ref(buffer)
    cache = cached(200, 4, buffer[:16], buffer[500:517], buffer[1000:1502])
    del buffer
    gc.collect()
    assert alive() is None
    assert held(cache, LONG) == 4


def test_a_writable_prompt_is_copied_so_that_changing_it_harms_nothing():
    cache = explaining(128, 4)
    buffer = LONG.copy()
    lease = cache.acquire(buffer)
    cache.publish(lease, buffer, 10)
    buffer[:] = 77
    assert (held(cache, LONG[:8]), held(cache, buffer)) == (2, 0)
    buffer[:] = LONG
    cache.publish(lease, buffer, 16)
    cache.release(lease)
    buffer[:] = 88
    assert held(cache, LONG) == 4
    long = np.arange(1000, 1400, dtype=np.int32)
    serve(cache, long)
    long[:] = 77
    assert held(cache, np.arange(1000, 1400)) == 100
    assert not kept(cache, np.arange(1000, 1400)).flags.writeable
    assert buffer.flags.writeable, "the caller's array is the caller's"
    cache.check()


class Frame(bytearray):
    """A received message, say; its like can be watched, which a plain bytearray can't."""


def test_a_small_part_of_a_large_message_does_not_keep_it_in_memory():
    message = Frame(4_000_000)
    alive = weakref.ref(message)
    prompt = read_only(np.frombuffer(message, dtype=np.int32, count=400))
    cache = cached(100, 4, prompt)
    del message, prompt
    gc.collect()
    assert alive() is None
    assert cache.stats().blocks_cached == 100


@pytest.mark.parametrize(
    "prompt",
    [
        np.stack((LONG, LONG + 50), axis=1)[:, 0],
        np.repeat(LONG, 3)[::3],
        LONG[::-1].copy()[::-1],
        LONG.astype(">i4"),
        LONG.astype(np.uint8),
        LONG.astype(np.uint64),
        range(16),
        tuple(range(16)),
    ],
    ids=["column", "stride", "reversed", "big-endian", "uint8", "uint64", "range", "tuple"],
)
def test_arrays_of_any_layout_and_integer_type_are_the_same_tokens(prompt: Any):
    cache = explaining(32, 4)
    lease = cache.acquire(prompt)
    cache.publish(lease, prompt, 16)
    cache.release(lease)
    assert held(cache, LONG) == 4
    assert cache.match(prompt).num_blocks == 4
    assert cache.acquire(prompt).num_matched_tokens == 16
    cache.check()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (5, r"tokens must be a flat sequence of integers, got shape \(\)"),
        (LONG.reshape(4, 4), r"tokens must be a flat sequence of integers, got shape \(4, 4\)"),
        ([[1, 2]], r"tokens must be a flat sequence of integers, got shape \(1, 2\)"),
        ([1.0, 2.0], "tokens must be a flat sequence of integers, got .* float64"),
        (LONG.astype(np.float32), "tokens must be a flat sequence of integers, got .* float32"),
        ([True, False], "tokens must be a flat sequence of integers, got .* bool"),
        (["1"], "tokens must be a flat sequence of integers"),
        ("text", "tokens must be a flat sequence of integers"),
        (None, "tokens must be a flat sequence of integers"),
        ([1, None], "tokens must be a flat sequence of integers"),
        ([2**31], "tokens must be 32-bit integers, got 2147483648 to 2147483648"),
        ([0, -(2**31) - 1], "tokens must be 32-bit integers, got -2147483649 to 0"),
        (np.array([2**64 - 1], dtype=np.uint64), "tokens must be 32-bit integers"),
        ([2**100], "tokens must be"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name_and_changes_nothing(prompt: Any, message: str):
    cache = explaining(32, 4)
    lease = cache.acquire(LONG)
    before = cache.stats()
    for use in (cache.match, cache.acquire, lambda prompt: cache.publish(lease, prompt, 0)):
        with pytest.raises(ValueError, match=message):
            use(prompt)
    assert cache.stats() == before
    cache.check()


def test_the_least_and_the_greatest_token_are_tokens():
    prompt = [-(2**31), 2**31 - 1] * 8
    cache = cached(32, 4, np.array(prompt))
    assert cache.match(prompt).num_tokens(4) == 16
