"""The sampler against a naive numpy oracle that follows the documented order one row at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.model.sampler import sample
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import Request

Row = NDArray[np.float64]


def request(prompt: list[int], output: list[int] = [], **params: Any) -> Request:  # noqa: B006
    made = Request("r", prompt, SamplingParams(max_tokens=len(output) + 4, **params).validate())
    for token in output:
        made.append(token)
    return made


def processed_logits(logits: Row, r: Request) -> Row:
    logits = logits.copy()
    for token, bias in (r.params.logit_bias or {}).items():
        if token < len(logits):
            logits[token] += bias
    for token in set(r.tokens.tolist()):
        p = r.params.repetition_penalty
        logits[token] = logits[token] / p if logits[token] > 0 else logits[token] * p
    for token, count in Counter(r.output_token_ids.tolist()).items():
        logits[token] -= r.params.presence_penalty + count * r.params.frequency_penalty
    return logits


def distribution(logits: Row, r: Request) -> Row:
    """Probabilities after every filter, by sorting the whole vocabulary."""
    scaled = processed_logits(logits, r) / r.params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    threshold = 0.0
    order = np.sort(probs)[::-1]
    if 0 < r.params.top_k < len(probs):
        order = order[: r.params.top_k]
        threshold = order[-1]
    if r.params.top_p < 1:
        cumulative = np.cumsum(order) / order.sum()
        threshold = max(threshold, order[min(np.searchsorted(cumulative, r.params.top_p), len(order) - 1)])
    threshold = max(threshold, r.params.min_p * probs.max())
    probs[probs < threshold * (1 - 1e-6)] = 0
    return probs / probs.sum()


def draw(logits: Row, requests: list[Request]) -> list[int]:
    rows = torch.tensor(np.broadcast_to(logits, (len(requests), logits.shape[-1])).copy(), dtype=torch.float32)
    return sample(rows, requests)[0]


LOGITS = np.array([2.0, 1.0, 0.5, 3.0, -1.0, 0.0, 2.5, -4.0, 1.5, 0.25])
FILTERS: list[dict[str, Any]] = [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_k": 1}, {"top_k": 100}, {"top_p": 0.7}, {"top_p": 0.05},
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_k": 5, "top_p": 0.8}, {"top_k": 6, "top_p": 0.9, "min_p": 0.15, "temperature": 1.7},
    {"logit_bias": {3: -100.0, 5: 4.0}}, {"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}, {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9}, {"frequency_penalty": -0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_draws_follow_the_oracle_distribution(params: dict[str, Any]) -> None:
    draws = 2000
    requests = [request([3, 3, 1], [0, 6, 6], seed=seed, **params) for seed in range(draws)]
    expected = distribution(LOGITS, requests[0])
    counts = np.bincount(draw(LOGITS, requests), minlength=len(LOGITS))
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum()
    # Seeds are fixed, so this can't flake; 35 is beyond the 0.9999 quantile for 9 degrees of freedom.
    assert chi_square < 35


def test_unseeded_draws_follow_the_distribution_and_differ() -> None:
    requests = [request([1]) for _ in range(4000)]
    first, second = draw(LOGITS, requests), draw(LOGITS, requests)
    assert first != second
    counts = np.bincount(first, minlength=len(LOGITS))
    # Six standard deviations.
    expected = 4000 * distribution(LOGITS, requests[0])
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected) + 6).all()


ROW_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0, 100.0]),
        "top_k": st.integers(0, 80),
        "top_p": st.floats(0.01, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100.0, 100.0), max_size=4),
        "logprobs": st.integers(0, 20),
        "seed": st.integers(-(2**63), 2**63 - 1),
    },
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(ROW_PARAMS, min_size=1, max_size=5),
    outputs=st.lists(st.lists(st.integers(0, 63), max_size=8), min_size=5, max_size=5),
    noise=st.integers(0, 2**32 - 1),
)
def test_each_row_of_a_mixed_batch_is_the_oracles(rows: list[dict[str, Any]], outputs: list[list[int]], noise: int) -> None:
    logits = np.random.default_rng(noise).normal(0, 3, (len(rows), 64)).astype(np.float32).astype(np.float64)
    requests = [request([1, 2], output, **params) for params, output in zip(rows, outputs, strict=False)]
    tokens, logprobs = sample(torch.tensor(logits, dtype=torch.float32), requests)
    for row, r, token, logprob in zip(logits, requests, tokens, logprobs, strict=True):
        processed = processed_logits(row, r)
        if r.params.temperature == 0:
            assert processed[token] >= processed.max() - 1e-4
        else:
            cdf = np.cumsum(distribution(row, r))
            if r.params.seed is not None:
                key = r.params.seed % 2**64
                u = np.random.Generator(np.random.Philox(key=key, counter=r.num_output_tokens)).random()
                # The oracle may cut one token more or less where rounding decides, hence a token's width.
                wide = _plausible(row, r)
                assert any(np.searchsorted(c, u - 1e-5) <= token <= np.searchsorted(c, u + 1e-5) for c in wide)
            else:
                assert any(c[token] - (c[token - 1] if token else 0) > 0 for c in [cdf, *_plausible(row, r)])
        if r.params.logprobs is None:
            assert logprob is None
            continue
        assert logprob is not None
        own = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(own[token], abs=1e-4)
        best = np.argsort(-own, kind="stable")[: r.params.logprobs]
        assert [i for i, _ in logprob.top] == best.tolist()
        assert [v for _, v in logprob.top] == pytest.approx(own[best].tolist(), abs=1e-4)


def _plausible(row: Row, r: Request) -> list[Row]:
    """Distribution functions for top_p and min_p a rounding error apart: float32 may fall on either side of a cut."""
    from msgspec.structs import replace

    found = []
    for shift in (0.0, -1e-5, 1e-5):
        near = request(r.prompt_token_ids.tolist(), r.output_token_ids.tolist())
        p = r.params
        top_p = min(max(p.top_p + shift, 1e-9), 1.0) if p.top_p < 1 else 1.0
        near.params = replace(p, top_p=top_p, min_p=min(max(p.min_p * (1 + 10 * shift), 0.0), 1.0))
        found.append(np.cumsum(distribution(row, near)))
    return found


@settings(max_examples=60, deadline=None)
@given(target=ROW_PARAMS, others=st.lists(ROW_PARAMS, max_size=4), place=st.integers(0, 4), noise=st.integers(0, 2**32 - 1))
def test_a_seeded_row_does_not_depend_on_its_batch(
    target: dict[str, Any], others: list[dict[str, Any]], place: int, noise: int
) -> None:
    target = {"logprobs": 5, **target, "seed": 11}
    # bfloat16 logits have many equals, which sorting may order in any way.
    rng = np.random.default_rng(noise)
    logits = torch.tensor(rng.normal(0, 2, (6, 2000))).bfloat16().float()
    alone = sample(logits[:1].clone(), [request([5], [1, 2], **target)])
    batch = [request([5], [3], **params) for params in others]
    place = min(place, len(batch))
    batch.insert(place, request([5], [1, 2], **target))
    rows = [1, 2, 3, 4, 5][: len(others)]
    rows.insert(place, 0)
    tokens, logprobs = sample(logits[rows].clone(), batch)
    assert (tokens[place], logprobs[place]) == (alone[0][0], alone[1][0])


def test_a_seed_gives_another_number_at_each_position() -> None:
    flat = np.zeros(1000)
    tokens = draw(flat, [request([1], [1] * n, seed=9) for n in range(50)])
    assert len(set(tokens)) > 40
    assert tokens == draw(flat, [request([1], [1] * n, seed=9) for n in range(50)])
    assert tokens != draw(flat, [request([1], [1] * n, seed=10) for n in range(50)])


def test_greedy_ties_go_to_the_lowest_token() -> None:
    logits = torch.zeros(3, 50000)
    logits[0, [7, 40000]] = 5.0
    logits[2, [49999, 3]] = 1.0
    assert sample(logits.clone(), [request([1], temperature=0.0)] * 3)[0] == [7, 0, 3]
    mixed = [request([1], temperature=0.0), request([1], seed=1), request([1], temperature=0.0)]
    tokens = sample(logits.clone(), mixed)[0]
    assert (tokens[0], tokens[2]) == (7, 3)


def test_a_nucleus_wider_than_the_candidates_is_cut_where_a_full_sort_cuts_it() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 0.5, 6000).astype(np.float32).astype(np.float64)
    narrow = np.where(np.arange(6000) < 4, 12.0, logits)
    requests = [request([1], seed=s, top_p=0.9) for s in range(400)]
    expected = distribution(logits, requests[0])
    assert (expected > 0).sum() > 3000
    # In one batch with rows that the candidates settle.
    rows = torch.tensor(np.stack([logits, narrow] * 200), dtype=torch.float32)
    tokens = sample(rows, requests)[0]
    assert all(expected[t] > 0 for t in tokens[0::2])
    assert len(set(tokens[0::2])) > 150
    assert all(t < 4 for t in tokens[1::2])


def test_tokens_as_probable_as_the_last_kept_are_kept() -> None:
    tokens = draw(np.array([1.0, 0.0, 1.0, 1.0, -3.0]), [request([4], top_k=2, seed=s) for s in range(200)])
    assert set(tokens) == {0, 2, 3}


def test_the_smallest_temperature_picks_the_maximum_and_the_largest_is_nearly_flat() -> None:
    for temperature in (1e-50, 1e-45, 1e-6, 2e-5):
        assert set(draw(LOGITS, [request([1], temperature=temperature, seed=s) for s in range(50)])) == {3}
    counts = np.bincount(draw(LOGITS, [request([1], temperature=100.0, seed=s) for s in range(4000)]), minlength=10)
    assert counts.min() > 300


def test_biases_beyond_the_vocabulary_change_nothing() -> None:
    biased = request([1], temperature=0.0, logit_bias={5000: 100.0, 4: 50.0})
    assert draw(LOGITS, [biased]) == [4]


def test_bias_and_penalties_reach_greedy_rows_and_leave_logprobs_the_models_own() -> None:
    r = request([3], [3], temperature=0.0, logit_bias={5: 9.0}, frequency_penalty=2.0, logprobs=1)
    tokens, logprobs = sample(torch.tensor(LOGITS[None], dtype=torch.float32), [r])
    assert tokens == [5]
    assert logprobs[0] is not None
    own = LOGITS - np.log(np.exp(LOGITS).sum())
    assert logprobs[0].logprob == pytest.approx(own[5], abs=1e-5)
    assert logprobs[0].top == [(3, pytest.approx(own[3], abs=1e-5))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_overflowed_gives_minus_one_and_leaves_the_others_alone(temperature: float, bad: float) -> None:
    logits = torch.tensor(np.stack([LOGITS, LOGITS]), dtype=torch.float32)
    logits[0, 4] = bad
    requests = [request([1], temperature=temperature), request([1], temperature=0.0)]
    assert sample(logits, requests)[0] == [-1, 3]


def test_penalties_on_an_empty_output_are_harmless() -> None:
    assert draw(LOGITS, [request([1], temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)]) == [3]


def test_a_step_in_which_nothing_samples_gives_nothing() -> None:
    assert sample(torch.empty(0, 10), []) == ([], [])
