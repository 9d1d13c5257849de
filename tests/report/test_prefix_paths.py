"""Cutting a trace's prompts into blocks of another size, against the tokens that its ids stand for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import TraceRequest

OWN = 12


def request(tokens: list[int], whole_only: bool, ids: dict[tuple[int, ...], int], namespace: str = "") -> TraceRequest:
    """As a recorder would write it: an id a block, for all tokens up to its end; the last, partial block's or not."""
    ends = range(OWN, len(tokens) + 1, OWN) if whole_only else range(OWN, len(tokens) + OWN, OWN)
    hashes = [ids.setdefault(tuple(tokens[:end]), len(ids)) for end in ends]
    return TraceRequest(0, len(tokens), 1, hashes, namespace, OWN)


# Runs of equal tokens, so that many prompts share some blocks and differ in the others.
prompts = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 12, 24])), min_size=1, max_size=5).map(
        lambda runs: [token for token, length in runs for _ in range(length)]
    ),
    min_size=1,
    max_size=8,
)


@given(prompts=prompts, block_size=st.sampled_from([12, 24, 36]), whole_only=st.booleans())
def test_two_prompts_share_as_many_large_blocks_as_their_tokens_do(
    prompts: list[list[int]], block_size: int, whole_only: bool
) -> None:
    ids: dict[tuple[int, ...], int] = {}
    partial_too = block_size == OWN and not whole_only
    paths = list(PrefixPaths([request(tokens, whole_only, ids) for tokens in prompts], block_size))

    def blocks(tokens: list[int]) -> list[tuple[int, ...]]:
        ends = range(block_size, len(tokens) + (block_size if partial_too else 1), block_size)
        return [tuple(tokens[:end]) for end in ends]

    for tokens, path in zip(prompts, paths, strict=True):
        assert len(path) == len(blocks(tokens))
        for other, other_path in zip(prompts, paths, strict=True):
            both = zip(blocks(tokens), blocks(other), strict=False)
            assert [a == b for a, b in zip(path, other_path, strict=False)] == [a == b for a, b in both]


@given(prompts=prompts, block_size=st.sampled_from([1, 3, 4, 6]), whole_only=st.booleans())
def test_small_blocks_are_whole_ones_and_shared_where_the_block_of_the_trace_is(
    prompts: list[list[int]], block_size: int, whole_only: bool
) -> None:
    ids: dict[tuple[int, ...], int] = {}
    requests = [request(tokens, whole_only, ids) for tokens in prompts]
    for a, path in zip(requests, PrefixPaths(requests, block_size), strict=True):
        covered = a.input_length // OWN * OWN if whole_only else a.input_length
        assert len(path) == covered // block_size
        for b, other in zip(requests, PrefixPaths(requests, block_size), strict=True):
            same_ids = next((n for n, (x, y) in enumerate(zip(a.hash_ids, b.hash_ids, strict=False)) if x != y), None)
            same_ids = min(len(a.hash_ids), len(b.hash_ids)) if same_ids is None else same_ids
            shared = next((n for n, (x, y) in enumerate(zip(path, other, strict=False)) if x != y), min(len(path), len(other)))
            assert shared == min(same_ids * OWN // block_size, len(path), len(other))


def test_numbers_stay_below_the_bound_that_is_told() -> None:
    paths = PrefixPaths([TraceRequest(0, 1000, 1, ["a", "b"]), TraceRequest(0, 512, 1, ["c"])], 128)
    assert [path.tolist() for path in paths] == [[0, 1, 2, 3, 4, 5, 6], [8, 9, 10, 11]]
    assert (paths.num_numbers, paths.lengths, paths.block_size) == (12, [7, 4], 128)


def test_equal_ids_in_two_namespaces_are_different_blocks() -> None:
    one, other, again = PrefixPaths([TraceRequest(0, 512, 1, [7], name) for name in ("a", "b", "a")])
    assert one.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize("block_size", [0, -512, 100, 513, 768])
def test_a_block_size_that_does_not_go_with_the_trace_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size must divide the trace's blocks of 512 tokens .* got {block_size}"):
        PrefixPaths([TraceRequest(0, 512, 1, [7])], block_size)


def test_requests_with_blocks_of_different_size_are_refused() -> None:
    with pytest.raises(ValueError, match="one block size, got 512 and 16 tokens"):
        PrefixPaths([TraceRequest(0, 512, 1, [7]), TraceRequest(0, 16, 1, [7], "", 16)])


def test_more_blocks_than_can_be_numbered_are_refused() -> None:
    huge = TraceRequest(0, 2**31, 1, [1], "", 2**31)
    with pytest.raises(ValueError, match="block_size 1 cuts the trace into up to 2,147,483,648 different blocks"):
        PrefixPaths([huge], 1)
