"""The trie of waiting prompts against comparing every prompt with every other."""

from __future__ import annotations

import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.prompt_trie import PromptTrie
from radixkv.scheduling.request import Request

prompts = st.lists(st.integers(0, 2) | st.sampled_from([255, 256, 70000]), min_size=1, max_size=12)
named_prompts = st.tuples(st.sampled_from(["", "a"]), prompts)


def make(name: int, namespace: str, tokens: list[int]) -> Request:
    return Request(str(name), tokens, SamplingParams(max_tokens=1), namespace=namespace)


def common(request: Request, namespace: str, tokens: list[int]) -> int:
    if request.namespace != namespace:
        return 0
    return len(os.path.commonprefix([request.tokens.tolist(), tokens]))  # noqa: RUF071 (it takes any sequences)


@given(arrivals=st.lists(named_prompts, max_size=40), query=named_prompts, data=st.data())
def test_it_tells_what_every_prompt_shares_with_others_and_with_any_tokens(arrivals, query, data):
    trie = PromptTrie(num_columns=1)
    here: list[Request] = []
    for i, (namespace, tokens) in enumerate(arrivals):
        request = make(i, namespace, tokens)
        trie.add(request, i)
        here.append(request)
        if data.draw(st.booleans()):
            leaving = here.pop(data.draw(st.integers(0, len(here) - 1)))
            trie.remove(leaving)
            with pytest.raises(ValueError, match="list"):
                trie.remove(leaving)
        trie.check()
    assert set(trie.requests) == set(here)
    assert trie.columns[0].tolist() == [int(request.request_id) for request in trie.requests]
    namespace, tokens = query
    shared = trie.shared_with(np.array(tokens, dtype=np.int32), namespace)
    assert shared.tolist() == [common(request, namespace, tokens) for request in trie.requests]
    for n in range(len(tokens)):
        assert trie.any_shares_more(np.array(tokens, dtype=np.int32), namespace, n) == (max(shared, default=0) > n)
    if not here:
        return
    at, depth = data.draw(st.integers(0, len(here) - 1)), data.draw(st.integers(1, 8))
    start, stop = trie.subtree(at, depth)
    chosen = trie.requests[at]
    alike = [common(request, chosen.namespace, chosen.tokens.tolist()) >= depth for request in trie.requests]
    alike[at] = True
    assert [start <= i < stop for i in range(len(here))] == alike


@given(arrivals=st.lists(named_prompts, min_size=2, max_size=40))
def test_branches_differ_in_the_first_token_after_what_all_share(arrivals):
    trie = PromptTrie(num_columns=0)
    for i, (namespace, tokens) in enumerate(arrivals):
        trie.add(make(i, namespace, tokens))
    depth = trie.common(0, len(trie))
    first = trie.requests[0]
    assert depth == min(common(request, first.namespace, first.tokens.tolist()) for request in trie.requests[1:])
    starts = trie.branches(0, len(trie)).tolist()
    assert len(starts) >= 2
    for start, stop in zip(starts, [*starts[1:], len(trie)], strict=True):
        assert stop - start == 1 or trie.common(start, stop) > depth
