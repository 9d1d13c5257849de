"""The engine's benchmark: that the loop it times is the worker's own, and busy; never how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import engine, engine_steps
from bench.cache_growth import LEAST_NODES


def no_progress(done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(scope="module")
def loop() -> engine_steps.Loop:
    return engine_steps.Loop(LEAST_NODES, 8, no_progress)


def test_the_cache_is_full_of_nodes_before_the_first_request(loop: engine_steps.Loop) -> None:
    fresh = engine_steps.Loop(LEAST_NODES, 1, no_progress)
    stats = fresh.engine.cache.stats()
    assert stats.nodes >= LEAST_NODES
    assert stats.blocks_free < engine_steps.CHAT_TURN_BLOCKS * engine_steps.SYSTEM_PROMPTS * 2
    fresh.engine.cache.check()


@pytest.mark.parametrize("cold", [False, True])
def test_every_turn_decodes_all_that_run_and_its_parts_are_the_whole(loop: engine_steps.Loop, cold: bool) -> None:
    before = loop.engine.stats()
    turns = loop.time(8, 300, cold=cold, cache_too=True)
    after = loop.engine.stats()
    assert len(turns) == 300
    assert after["generated_tokens"] - before["generated_tokens"] >= 8 * 300
    assert after["evicted_blocks"] > before["evicted_blocks"], "new blocks were free"
    assert all(min(turn.receive, turn.schedule, turn.batch, turn.outputs, turn.send, turn.rest) > 0 for turn in turns)
    assert all(turn.cache < turn.schedule + turn.outputs for turn in turns)
    assert 0 < sum(turn.only_decodes for turn in turns) < 300, "no request came or went, or one did in every step"
    loop.engine.cache.check()


def test_the_sequences_go_on_from_prompts_that_are_cached(loop: engine_steps.Loop) -> None:
    before = loop.engine.stats()
    loop.time(4, 50)
    after = loop.engine.stats()
    cached, prompts = (after[name] - before[name] for name in ("cached_tokens", "prompt_tokens"))
    assert cached >= 0.8 * prompts
    assert not loop.engine.has_unfinished


def test_a_quick_run_prints_a_row_each_warm_and_cold_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RUNNING", (1, 16))
    figures = tmp_path / "figures.json"
    assert engine.main(["--quick", "--nodes", str(10 * LEAST_NODES), "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["running"], row["cold"]) for row in rows] == [(n, cold) for cold in (False, True) for n in engine.RUNNING]
    assert all(row["p50_us"] <= row["p90_us"] <= row["p99_us"] for row in rows)
    out = capsys.readouterr().out
    assert all(f"{row['p50_us']:,.0f}" in out for row in rows)


def test_too_few_nodes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main(["--nodes", "10"]) == 2
    assert "nodes" in capsys.readouterr().err


def test_a_step_that_fails_ends_the_bench_instead_of_waiting_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = engine_steps.Loop(2000, 4, lambda done, total: None)

    def fail(*_: object) -> None:
        raise RuntimeError("the model broke")

    monkeypatch.setattr(loop.engine.runner.model, "forward", fail)
    with pytest.raises(ValueError, match="a step failed"):
        loop.time(2, 3)
