"""The memory benchmark: that waste, sequences and tables are what arithmetic says; never how fast anything is."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from bench import memory
from bench.memory_serving import MAX_MODEL_LEN, Engines, Layout, Tokens, occupancy, speed

BUDGET = 2 * MAX_MODEL_LEN


def prompts(count: int, shared: int, own: int) -> list[Tokens]:
    """``count`` prompts that begin with the same ``shared`` tokens and go on with ``own`` of their own."""
    system = np.arange(shared, dtype=np.int32)
    return [np.concatenate((system, np.full(own, 10_000 + i, dtype=np.int32))) for i in range(count)]


@pytest.mark.parametrize(("block_size", "waste"), [(1, 0.0), (8, 0.0), (16, 8 / 208), (128, 56 / 256)])
def test_of_one_sequence_the_waste_is_the_empty_end_of_its_last_block(block_size: int, waste: float) -> None:
    result = occupancy(prompts(1, 0, 200), 1, BUDGET, Layout(block_size, shares_prefixes=False))
    assert result.waste == pytest.approx(waste)
    assert (result.running, result.table_bytes) == (1, 4 * -(-200 // block_size))


def test_contiguous_reservation_wastes_all_but_what_the_sequence_has_come_to() -> None:
    result = occupancy(prompts(1, 0, 200), 11, BUDGET, Layout(None, shares_prefixes=False))
    assert result.waste == pytest.approx(1 - (200 + 5) / MAX_MODEL_LEN)  # 200 to 210 tokens, over 11 steps


def test_contiguous_reservation_runs_as_many_as_have_room_for_the_longest_sequence() -> None:
    many = prompts(20, 0, 200)
    assert occupancy(many, 30, BUDGET, Layout(None, shares_prefixes=False)).running == 2
    assert occupancy(many, 30, BUDGET, Layout(16, shares_prefixes=False)).running > 15


def test_a_shared_prefix_takes_its_blocks_once() -> None:
    many = prompts(60, 1600, 32)
    alone = occupancy(many, 40, BUDGET, Layout(16, shares_prefixes=False))
    shared = occupancy(many, 40, BUDGET, Layout(16, shares_prefixes=True))
    assert alone.running <= BUDGET // 1632
    assert shared.running == 60
    assert shared.waste > alone.waste, "the same last blocks are a larger part of less memory"


def test_what_stays_cached_of_finished_requests_is_in_use_and_full() -> None:
    one_by_one = occupancy(prompts(8, 0, 200), 1, BUDGET, Layout(16, shares_prefixes=True), most_running=1)
    assert one_by_one.running == 1
    assert (one_by_one.waste, one_by_one.empty_end) == (pytest.approx(8 / 208), pytest.approx(8))
    assert one_by_one.waste_of_all == pytest.approx(np.mean([8 / (208 + 192 * done) for done in range(8)]))
    alone = occupancy(prompts(8, 0, 200), 1, BUDGET, Layout(16, shares_prefixes=False), most_running=1)
    assert alone.waste_of_all == alone.waste


def test_outputs_are_the_same_in_every_layout(tiny_model: Path) -> None:
    engines = Engines(str(tiny_model))
    many = [prompt % 250 for prompt in prompts(5, 64, 9)]
    layouts = [Layout(None, False), Layout(1, True), Layout(16, True), Layout(128, False)]
    runs = [speed(engines.make(BUDGET, layout), many, 4, lambda done, total: None) for layout in layouts]
    assert all(run.outputs == runs[0].outputs for run in runs)
    assert [run.output_tokens for run in runs] == [20] * 4
    assert runs[0].computed_prompt_tokens == runs[3].computed_prompt_tokens == 5 * 73
    assert runs[2].computed_prompt_tokens < 3 * 73


def test_a_quick_run_prints_every_layout_and_writes_figures_and_a_plot(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "prompts_of", lambda workload, encode: [p % 250 for p in prompts(50, 80, 20)])
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    flags = ["--workload", "unique", "--quick", "--model", str(tiny_model), "--json", str(figures), "--plot", str(plot)]
    assert memory.main(flags) == 0
    out = capsys.readouterr().out
    (workload,) = json.loads(figures.read_text())["workloads"]
    assert workload["requests_with_differing_outputs"] == 0
    layouts = [(row["layout"], row["shares_prefixes"]) for row in workload["rows"]]
    sizes = [str(size) for size in memory.BLOCK_SIZES]
    assert layouts == [("contiguous", False), *((size, False) for size in sizes), *((size, True) for size in sizes)]
    assert all(f"{row['waste']:.2%}" in out for row in workload["rows"])
    assert len(ElementTree.fromstring(plot.read_text()).findall("{*}g")) == 3  # noqa: S314 (our own file)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--budget", "4000"], "budget"),
        (["--plot", "x.png"], "--plot must name a .svg file, got 'x.png'"),
        (["--workload", "x"], "workload"),
    ],
)
def test_bad_input_is_named(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memory.main(flags) == 2
    assert error in capsys.readouterr().err
