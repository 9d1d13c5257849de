"""Token arrays: what is taken as it is, what is copied, and how two are compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache.tokens import as_edge, as_tokens, common_prefix, edge_tokens, keep


@given(
    length=st.sampled_from([1, 2, 5, 127, 128, 129, 511, 512, 513, 1025, 8191, 8192, 8193, 20001]),
    longer=st.integers(0, 3),
    differences=st.lists(st.integers(0, 20004), max_size=3),
    swap=st.booleans(),
    start=st.integers(0, 1),
)
def test_the_common_prefix_ends_at_the_first_difference(
    length: int, longer: int, differences: list[int], swap: bool, start: int
) -> None:
    buffer = np.arange(length + start, dtype=np.int32)
    a = buffer[start:]  # from 1 on, pairs of tokens are not aligned
    b = np.concatenate((a, np.arange(longer, dtype=np.int32)))
    for at in differences:
        b[at % len(b)] ^= 1
    expected = next((i for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=False)) if x != y), length)
    edge, tokens = (b, a) if swap else (a, b)
    assert common_prefix(edge, tokens) == expected
    assert common_prefix(as_edge(edge.copy()), tokens) == expected


def test_views_of_one_buffer_share_as_much_as_where_they_begin_tells() -> None:
    buffer = np.arange(40_000, dtype=np.int32) // 20_000  # the same tokens over and over
    for start, end in ((0, 40_000), (0, 9_000), (1, 39_000), (10_001, 40_000)):
        expected = min(end - start, 20_000 - start)  # where the view, 0 tokens on, meets its first 1
        assert common_prefix(buffer, buffer[start:end]) == (end if start == 0 else expected)
        assert common_prefix(buffer[start:], buffer[start:end]) == end - start


def test_a_read_only_array_is_kept_as_it_is_and_a_writable_one_copied() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    assert as_tokens(tokens) is tokens
    copy = keep(tokens)
    tokens[0] = 7
    assert copy[0] == 0
    tokens.flags.writeable = False
    assert keep(tokens) is tokens
    assert as_edge(tokens[200:]).base is tokens, "most of a buffer was copied"


def test_a_small_part_of_a_large_buffer_is_copied_so_as_not_to_keep_all_of_it() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    tokens.flags.writeable = False
    assert keep(tokens[600:]).base is None
    assert isinstance(as_edge(tokens[:16]), bytes)
    assert edge_tokens(as_edge(tokens[:16])).tolist() == list(range(16))


@pytest.mark.parametrize(
    "tokens",
    [
        np.zeros((2, 2), np.int32),
        [[1], [2]],
        [1.5],
        ["a"],
        [2**31],
        [-(2**31) - 1],
        np.array([2**40]),
        None,
        [None],
        [[1], [2, 3]],
        [10**30],
    ],
)
def test_what_is_no_flat_sequence_of_32_bit_integers_is_refused(tokens: object) -> None:
    with pytest.raises(ValueError, match="tokens must be"):
        as_tokens(tokens)


def test_an_array_with_gaps_is_copied() -> None:
    assert as_tokens(np.arange(10, dtype=np.int32)[::2]).tolist() == [0, 2, 4, 6, 8]
