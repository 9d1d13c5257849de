"""The study of queue policies: its optimum against trying every order, and what the engine's default reaches of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from bench import order
from bench.order_forests import FORESTS, burst, depth_first, most_hits
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig

AGING = EngineConfig.aging_tokens_per_second
# Of one token too, where the last token counts most; and with prompts that end where others fork, or that come twice.
prompts_of_two_tokens = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=5)


def hits_in_order(prompts: list[np.ndarray], num_blocks: int, block_size: int) -> int:
    cache = PrefixCache(num_blocks, block_size)
    hits = 0
    for tokens in prompts:
        lease = cache.acquire(tokens)
        cache.publish(lease, tokens, len(tokens))
        cache.take_copies()
        cache.release(lease)
        hits += lease.num_cached_tokens
    return hits


@settings(max_examples=60, deadline=None)
@given(prompts=prompts_of_two_tokens, block_size=st.sampled_from([1, 2, 4]), spare_blocks=st.integers(0, 20))
def test_no_order_hits_more_than_the_stated_optimum_and_a_roomy_cache_lets_the_best_order_reach_it(
    prompts, block_size, spare_blocks
):
    arrays = [np.array(tokens, dtype=np.int32) for tokens in prompts]
    longest = -(-max(map(len, prompts)) // block_size)
    optimum = most_hits(arrays, block_size)
    orders = list(itertools.permutations(arrays))
    assert max(hits_in_order(o, longest + spare_blocks, block_size) for o in orders) <= optimum
    assert max(hits_in_order(o, 100, block_size) for o in orders) == optimum


@pytest.mark.parametrize("shape", FORESTS)
def test_the_depth_first_order_needs_only_room_for_the_longest_prompt(shape: str):
    """And a block to copy rows from.  A last token more or less is lost where a prompt ends in the middle of another."""
    prompts = burst(shape, 60, seed=1)
    optimum = most_hits(prompts, order.BLOCK_SIZE)
    blocks = order.cache_blocks(prompts, 0.0, 0) + 1
    assert optimum - len(prompts) <= hits_in_order(depth_first(prompts), blocks, order.BLOCK_SIZE) <= optimum


@pytest.mark.parametrize("shape", FORESTS)
def test_a_burst_is_the_same_for_the_same_seed_and_another_for_another(shape: str):
    first, again, other = (burst(shape, 40, seed) for seed in (1, 1, 2))
    assert len(first) == 40
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("shape", FORESTS)
def test_lpm_hits_99_percent_of_the_optimum_one_by_one_and_of_the_depth_first_order_in_the_scheduler(shape: str):
    for running, fraction in itertools.product((None, 8), (0.0, 0.25)):
        case = order.Case(shape=shape, requests=60, fraction=fraction, running=running, spread=order.SPREAD, seed=3)
        outcome = order.run_case(case, AGING)
        assert max(outcome.hits.values()) <= outcome.optimum
        reached = outcome.share("lpm", of="depth-first" if running else None)
        assert reached >= 0.99, f"{case}: {reached:.2%}"


@pytest.mark.parametrize("shape", FORESTS)
def test_of_all_orders_of_a_small_burst_none_beats_depth_first(shape: str):
    case = order.Case(shape=shape, requests=5, fraction=0.5, running=None, spread=order.SPREAD, seed=4)
    small = order.run_small_case(case, AGING)
    assert small.orders == 120
    assert small.outcome.hits["lpm"] <= small.best <= small.outcome.optimum
    assert small.outcome.hits["depth-first"] >= small.best - len(case.prompts)


def test_the_bench_prints_its_tables_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setattr(order, "FORESTS", {"few-shot": FORESTS["few-shot"]})
    monkeypatch.setattr(order, "TIMING_SECONDS", 0.01)
    file = tmp_path / "order.json"
    assert order.main(["--requests", "8", "--waiting", "16", "--each", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("depth-first", *order.POLICIES))
    figures = json.loads(file.read_text())
    assert len(figures["outcomes"]) == 12
    assert set(figures["outcomes"][0]["hits"]) == set(order.ORDERS)
    assert set(figures["ordering_us"]) == set(order.POLICIES)


@pytest.mark.parametrize(
    "arguments", [["--aging", "0"], ["--requests", "1"], ["--spread", "-1"], ["--waiting", "0"], ["--nonsense"]]
)
def test_bad_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    assert order.main(arguments) == 2
    assert arguments[0].lstrip("-") in capsys.readouterr().err.lower()
