"""The prefix cache's benchmark: what it serves, what it grows, and whom it times; never how fast."""

from __future__ import annotations

import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import cache, cache_growth, cache_trace
from bench.cache_peers import SlotRing
from bench.cost_plot import Panel, cost_svg
from bench.fresh_process import ChildError, run_fresh
from bench.stand_ins import import_only
from radixkv.report.trace import TraceRequest

SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"


def no_progress(done: int, total: int) -> None:
    assert 0 <= done <= total


# -- the trace


@st.composite
def requests(draw: st.DrawFn) -> list[TraceRequest]:
    """Of two namespaces, whose last, partial block may have no id."""
    size, drawn = draw(st.sampled_from([16, 512])), []
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 4 * size))
        blocks = draw(st.sampled_from([length // size, -(-length // size)]))
        ids = draw(st.lists(st.sampled_from([7, 2**40, "a"]), min_size=blocks, max_size=blocks))
        drawn.append(TraceRequest(0, length, 1, ids, namespace=draw(st.sampled_from(["", "b"])), block_tokens=size))
    return drawn


@settings(deadline=None)
@given(requests=requests())
def test_prompts_agree_exactly_where_their_block_ids_do(requests: list[TraceRequest]) -> None:
    prompts = cache_trace.expand(requests)
    assert [len(prompt) for prompt in prompts] == [request.input_length for request in requests]

    def blocks(number: int) -> list[object]:
        """What tells each token's block from every other, by token."""
        request = requests[number]
        names: list[object] = [(request.namespace, block) for block in request.hash_ids]
        names.append(("no id", number))
        return [names[i // request.block_tokens] for i in range(request.input_length)]

    for one, p in enumerate(prompts):
        for other, q in enumerate(prompts):
            same = [a == b for a, b in zip(blocks(one), blocks(other), strict=False)]
            assert (p[: len(same)] == q[: len(same)]).tolist() == same


def test_prompts_are_read_only_int32() -> None:
    (prompt,) = cache_trace.expand([TraceRequest(0, 700, 1, [5, 6])])
    assert prompt.dtype == np.int32
    assert not prompt.flags.writeable


def naive_hits(prompts: list[cache_trace.Tokens]) -> int:
    """Tokens that prompts share with the full blocks of one before them; the last token of each never counts."""
    hits = 0
    for number, prompt in enumerate(prompts):
        longest = 0
        for earlier in prompts[:number]:
            published = earlier[: len(earlier) // 16 * 16]
            shortest = min(len(published), len(prompt))
            differs = np.flatnonzero(published[:shortest] != prompt[:shortest])
            longest = max(longest, int(differs[0]) if len(differs) else shortest)
        hits += min(longest, len(prompt) - 1)
    return hits


@pytest.mark.parametrize("by_operation", [False, True])
def test_a_round_hits_what_a_search_through_all_earlier_prompts_finds(by_operation: bool) -> None:
    prompts = cache_trace.expand(cache_trace.synthetic_requests(40))
    tokens = sum(map(len, prompts))
    result = cache_trace.time_trace(
        name="radixkv", folder=None, trace=None, requests=40, capacity_tokens=tokens + 16 * 40, by_operation=by_operation,
        progress=no_progress,
    )  # fmt: skip
    assert result["hit_share"] == naive_hits(prompts) / tokens
    assert len(result["microseconds"]) == 40
    assert result["cpu_us"] > 0
    if by_operation:
        assert list(result["operations"]) == ["acquire", "publish", "release"]
        assert 0 < sum(result["operations"].values()) <= np.mean(result["microseconds"])


def test_the_synthetic_trace_is_the_same_each_time_and_shaped_as_it_says() -> None:
    requests = cache_trace.synthetic_requests(1500)
    assert requests == cache_trace.synthetic_requests(1500)
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in requests)
    assert 11_000 < np.mean([r.input_length for r in requests]) < 13_000
    going_on = sum(r.hash_ids[1] in earlier for r, earlier in with_earlier_ids(requests) if len(r.hash_ids) > 1)
    assert 0.15 < going_on / len(requests) < 0.25


def with_earlier_ids(requests: list[TraceRequest]) -> Iterator[tuple[TraceRequest, set[int]]]:
    seen: set[int] = set()
    for request in requests:
        yield request, seen
        seen.update(request.hash_ids)


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")
def test_the_recorded_trace_hits_what_was_measured_of_two_other_block_caches() -> None:
    result = cache_trace.time_trace(
        name="radixkv", folder=None, trace=str(SHARED_TRACE), requests=1500, capacity_tokens=3_000_000, by_operation=False,
        progress=no_progress,
    )  # fmt: skip
    assert result["hit_share"] >= 0.1406  # vLLM 0.32: 0.1407; SGLang 0.5.23: 0.1405


# -- growth


@pytest.mark.parametrize("edge_blocks", [1, 3])
def test_a_forest_has_the_nodes_asked_for_each_with_an_edge_of_its_own(edge_blocks: int) -> None:
    forest = cache_growth.Forest(edge_blocks, 1100)
    forest.grow(1000, no_progress)
    forest.cache.check()
    stats = forest.cache.stats()
    assert 1000 <= stats.nodes <= 1000 + cache_growth.SYSTEM_PROMPTS
    systems = cache_growth.SYSTEM_PROMPTS
    assert stats.blocks_cached == (stats.nodes - systems) * edge_blocks + systems * cache_growth.SYSTEM_BLOCKS
    forest.time_match(50)  # raises where a prompt is not found whole
    forest.time_evict(30)  # raises where a leaf is not an edge
    forest.time_turn(30)
    assert forest.cache.stats().blocks_cached == stats.blocks_cached
    forest.cache.check()


@given(
    places=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4), st.booleans()), min_size=2, max_size=2, unique=True),
)
def test_two_places_in_a_forest_share_a_prompt_as_far_as_their_chats_do(places: list[tuple[int, int, bool]]) -> None:
    forest = cache_growth.Forest(1, 1000)
    one, other = (forest.prompt(chat, turns, regenerated=regenerated) for chat, turns, regenerated in places)
    (chat, turns, regenerated), (other_chat, other_turns, other_regenerated) = places
    shared = 0
    if chat % cache_growth.SYSTEM_PROMPTS == other_chat % cache_growth.SYSTEM_PROMPTS:
        shared = cache_growth.SYSTEM_BLOCKS * 16
    if chat == other_chat:
        kept = min(turns - (not regenerated), other_turns - (not other_regenerated))  # turns as the chat went on from them
        shared += 16 * kept
        if turns == other_turns and regenerated == other_regenerated:
            shared = len(one)
    shortest = min(len(one), len(other))
    differs = np.flatnonzero(one[:shortest] != other[:shortest])
    assert (int(differs[0]) if len(differs) else shortest) == shared


def test_growth_has_a_row_a_size_and_ratios_to_the_smallest() -> None:
    rows = cache_growth.grow_tree(sizes=[1000, 1500], progress=no_progress)
    assert [row["nodes"] // 100 for row in rows] == [10, 15]
    for row in rows:
        assert all(row[f"{name}_us"] > 0 and row[f"{name}_ratio"] > 0 for name in cache_growth.OPERATIONS)


def test_a_tree_too_small_for_a_whole_chat_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes must be at least 960 nodes, got 10"):
        cache_growth.grow_tree(sizes=[10, 2000], progress=no_progress)


@pytest.mark.parametrize("one_buffer", [False, True])
def test_a_chat_is_told_at_its_milestones_and_turn_20_is_what_they_are_measured_by(one_buffer: bool) -> None:
    result = cache_growth.long_chats(turns=60, chats=2, one_buffer=one_buffer, progress=no_progress)
    assert [row["turn"] for row in result["curve"]] == [10, 20, 50, 60]
    assert result["curve"][1]["ratio"] == 1.0
    for row in result["curve"]:
        assert row["turn_us"] > max(row["acquire_us"], row["publish_us"], row["release_us"])


@given(turns=st.integers(1, 10**6))
def test_milestones_grow_to_the_last_turn(turns: int) -> None:
    milestones = cache_growth.milestones(turns)
    assert milestones[-1] == turns
    assert milestones == sorted(set(milestones))


# -- peers


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of which one module works and the rest is not there or must not run."""
    inner = tmp_path / "big_engine" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise RuntimeError('the whole engine was imported')")
    (inner / "cache.py").write_text(
        "import big_engine.metrics as metrics\n"
        "from big_engine.inner.helper import double\n"
        "from big_engine.kernels.gpu import Kernel, jit, compile\n"
        "from big_engine import config\n"
        "logger = metrics.init_logger(__name__)\n"
        "class Cache(Kernel):\n"
        "    kind: Kernel[int] | None = None\n"
        "    @jit\n"
        "    def get(self):\n"
        "        logger.info('unheard')\n"
        "        return double(21)\n"
        "    @compile(level=3)\n"
        "    def put(self):\n"
        "        return bool(config.debug)\n"
    )
    (inner / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "big_engine"]:
        del sys.modules[name]


def test_a_module_runs_among_stand_ins_without_the_rest_of_its_package(package: Path) -> None:
    module, helper = import_only("big_engine", package, ["big_engine.inner.cache", "big_engine.inner.helper"])
    made: Any = module.Cache()
    assert (made.get(), made.put()) == (42, False)
    assert helper.double(2) == 4


def test_a_package_is_not_mixed_with_stand_ins_of_it(package: Path) -> None:
    import_only("big_engine", package, ["big_engine.inner.helper"])
    with pytest.raises(ValueError, match="big_engine was imported before"):
        import_only("big_engine", package, ["big_engine.inner.helper"])


def test_a_folder_without_the_module_is_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no unpacked sglang wheel"):
        import_only("sglang", tmp_path, ["sglang.srt.mem_cache.radix_cache"])


@settings(deadline=None)
@given(size=st.integers(1, 12), choices=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_a_ring_of_slots_hands_out_each_slot_to_one_holder_at_a_time(size: int, choices: list[tuple[bool, int]]) -> None:
    ring, held, rng = SlotRing(size), list[list[int]](), random.Random(0)
    for allocate, n in choices:
        free = size - sum(map(len, held))
        assert ring.available_size() == free
        if allocate:
            slots = ring.alloc(n)
            assert (slots is None) == (n > free)
            if slots is not None:
                held.append(slots.tolist())
        elif held:
            ring.free_segment(as_slots(held.pop(rng.randrange(len(held)))), start_pos=0)
        everything = [slot for slots in held for slot in slots]
        assert len(set(everything)) == len(everything)
        assert set(everything) <= set(range(size))


def as_slots(slots: list[int]) -> Any:
    import torch

    return torch.tensor(slots, dtype=torch.int64)


# -- the command line


def test_quick_parts_print_tables_and_write_figures_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    assert cache.main(["--part", "chat", "--quick", "--json", str(figures), "--plot", str(plot)]) == 0
    assert "10 chats of 200 turns of 64 tokens" in capsys.readouterr().out
    assert json.loads(figures.read_text())["chat"]["turns"] == 200
    assert "length of a chat" in plot.read_text()

    assert cache.main(["--part", "trace", "--quick", "--rounds", "1", "--json", str(figures)]) == 0
    out = capsys.readouterr().out
    assert "a synthetic trace" in out
    trace = json.loads(figures.read_text())["trace"]
    assert trace["requests"] == 150
    assert trace["contenders"]["radixkv"]["mean_us"] > 0
    assert f"{trace['contenders']['radixkv']['hit_share']:.4f}" in out


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--peer", "llama=."], "--peer must be sglang=FOLDER or vllm=FOLDER, got 'llama=.'"),
        (["--peer", "sglang"], "--peer must be sglang=FOLDER or vllm=FOLDER, got 'sglang'"),
        (["--peer", "vllm=nowhere"], "--peer vllm: there is no folder 'nowhere'"),
        (["--peer", "vllm=.", "--part", "chat"], "--peer is timed over the trace, which --part chat leaves out"),
        (["--part", "trace", "--plot", "x.svg"], "--plot shows cost against size; --part trace has one size"),
        (["--part", "chat", "--plot", "x.png"], "--plot must name a .svg file, got 'x.png'"),
        (["--part", "trace", "--trace", "nowhere"], "nowhere"),
        (["--rounds", "0"], "rounds"),
    ],
)
def test_bad_input_is_named(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(flags) == 2
    assert error in capsys.readouterr().err


def test_a_folder_that_is_no_wheel_is_named_by_the_process_that_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache.main(["--part", "trace", "--quick", "--rounds", "1", "--peer", f"sglang={tmp_path}"]) == 2
    assert "is no unpacked sglang wheel" in capsys.readouterr().err


def test_radixkv_without_attribution_is_timed_beside_it(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    flags = ["--part", "trace", "--quick", "--requests", "100", "--rounds", "1", "--no-attribution", "--json", str(figures)]
    assert cache.main(flags) == 0
    assert set(json.loads(figures.read_text())["trace"]["contenders"]) == {"radixkv", "radixkv-no-attribution"}


def test_an_error_in_a_fresh_process_reaches_its_caller() -> None:
    with pytest.raises(ChildError, match="ValueError: sizes must be at least 960 nodes, got 5"):
        run_fresh("bench.cache_growth:grow_tree", {"sizes": [5]}, no_progress)


# -- the plot


def test_a_plot_shows_every_line_and_larger_values_higher_and_further_right() -> None:
    panel = Panel("cost & size", "nodes", "us", {"match": [(10, 5), (1000, 50)], "evict": [(10, 7), (1000, 3)]})
    root = ElementTree.fromstring(cost_svg([panel, panel]))  # noqa: S314 (our own)
    lines = [line.attrib["points"] for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert len(lines) == 4
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in lines[0].split())
    assert x1 < x2
    assert y1 > y2
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("cost & size") == 2
    assert {"match", "evict", "nodes", "us", "1,000"} <= set(texts)


@pytest.mark.parametrize("line", [[], [(0.0, 1.0)], [(1.0, -2.0)]])
def test_a_plot_without_logarithms_is_refused(line: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="must have points, and their coordinates be above 0"):
        cost_svg([Panel("cost", "x", "y", {"match": line})])
