"""What a curve says in numbers and sentences, and how it is drawn."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from radixkv.report.curve_html import html_page
from radixkv.report.curve_plot import write_plot
from radixkv.report.curve_report import CurveReport
from radixkv.report.curve_scales import Scales
from radixkv.report.curve_svg import svg_picture
from radixkv.report.kv_size import KVSize, kv_size
from radixkv.report.stack_distance import HitCurve

KV = KVSize(model="some/<model>", dtype="bfloat16", bytes_per_token=131072)
SVG = "{http://www.w3.org/2000/svg}"


def curve_of(hit_blocks: list[int], block_size: int = 512) -> HitCurve:
    hits = np.array([0, *hit_blocks])
    prompt_blocks = max(2 * hits[-1], 1)
    return HitCurve(
        requests=10,
        block_size=block_size,
        prompt_blocks=int(prompt_blocks),
        prompt_tokens=int(prompt_blocks) * block_size,
        distinct_blocks=int(prompt_blocks - hits[-1]),
        hit_blocks=hits,
        hit_tokens=hits * block_size,
        seconds=0.5,
    )


RISING = curve_of([10 * n for n in range(1, 1001)])
LATE = curve_of([0] * 999 + [5000])
EARLY = curve_of([7])
NOTHING = curve_of([])
# The last number is all hits, so that its capacity is the smallest with all of them.
curves = st.lists(st.integers(0, 100), max_size=40).map(lambda steps: curve_of(list(np.cumsum([*steps, 1]))))


def test_the_knee_is_the_smallest_capacity_with_four_fifths_of_the_hits() -> None:
    report = CurveReport.from_curve(RISING)
    assert report.knee is not None
    assert (report.knee.capacity_blocks, report.knee.hit_rate_blocks) == (800, 0.4)
    assert (report.reachable.capacity_blocks, report.reachable.hit_rate_blocks) == (1000, 0.5)


def test_the_knee_is_said_in_blocks_and_in_the_memory_of_the_model() -> None:
    assert CurveReport.from_curve(RISING).summary() == (
        "80 % of the reachable hits need 800 blocks of 512 tokens = 409,600 tokens."
    )
    assert CurveReport.from_curve(RISING, KV).summary() == (
        "80 % of the reachable hits need 800 blocks of 512 tokens = 50.0 GiB for some/<model> (131,072 bytes a token in bfloat16)."
    )


@pytest.mark.parametrize(
    ("bytes_per_token", "words"), [(1, "0.39 MiB"), (512, "0.20 GiB"), (23040, "8.79 GiB"), (262144, "100 GiB")]
)
def test_memory_is_written_with_about_three_digits(bytes_per_token: int, words: str) -> None:
    assert CurveReport.from_curve(RISING, KVSize(model="m", dtype="float16", bytes_per_token=bytes_per_token)).size(800) == words


def test_the_table_has_round_capacities_the_knee_and_all_that_can_be_hit() -> None:
    rows = CurveReport.from_curve(RISING).rows
    assert [row.capacity_blocks for row in rows] == [2, 5, 10, 20, 50, 100, 200, 500, 800, 1000]


def test_a_trace_that_repeats_nothing_has_no_knee_and_says_so() -> None:
    report = CurveReport.from_curve(NOTHING, KV)
    assert (report.knee, report.rows, report.points) == (None, [], [])
    assert "no cache of any size would hit" in report.summary()
    assert "no cache of any size would hit" in svg_picture(report, "t")


@given(curve=curves)
def test_points_and_rows_rise_from_the_first_block_to_all_hits(curve: HitCurve) -> None:
    report = CurveReport.from_curve(curve)
    assert report.points[-1] == report.rows[-1] == report.reachable
    assert report.points[0].capacity_blocks == 1
    for listed in (report.points, report.rows):
        capacities = [point.capacity_blocks for point in listed]
        assert capacities == sorted(set(capacities))
        assert [point.hit_rate_blocks for point in listed] == [curve.hit_rate_blocks(c) for c in capacities]


def test_a_curve_of_millions_of_blocks_is_told_in_a_few_hundred_points() -> None:
    assert 150 <= len(CurveReport.from_curve(curve_of(list(range(1, 1_000_001)))).points) <= 250


def test_json_has_the_knee_the_rows_and_the_points() -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(CurveReport.from_curve(RISING, KV)))
    assert decoded["knee"]["capacity_blocks"] == 800
    assert decoded["kv"]["bytes_per_token"] == 131072
    assert len(decoded["points"]) > 100


def test_text_marks_the_knee_and_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(CurveReport.from_curve(RISING, KV))
    lines = console.export_text().splitlines()
    assert any("800" in line and "80.0 %" in line and "knee" in line for line in lines)
    assert any("some/<model>" in line for line in lines)


REPORTS = [CurveReport.from_curve(curve, kv) for curve in (RISING, LATE, EARLY, NOTHING) for kv in (None, KV)]


@pytest.mark.parametrize("report", REPORTS)
def test_the_picture_is_xml_with_a_text_alternative_and_lies_within_its_frame(report: CurveReport) -> None:
    picture = ET.fromstring(svg_picture(report, "t & <t>"))  # noqa: S314 (our own)
    assert picture.get("role") == "img"
    labels = picture.get("aria-labelledby", "").split()
    texts = {element.get("id"): element.text for element in picture.iter() if element.get("id")}
    assert [texts[label] for label in labels] == ["t & <t>", report.in_words()]
    _, _, width, height = map(float, picture.get("viewBox", "").split())
    for element in picture.iter():
        for name, end in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("y1", height), ("cy", height)):
            assert 0 <= float(element.get(name, 0)) <= end
        for point in element.get("points", "").split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


@pytest.mark.parametrize("report", REPORTS)
def test_no_two_labels_of_the_picture_overlap(report: CurveReport) -> None:
    picture = ET.fromstring(svg_picture(report, "t"))  # noqa: S314 (our own)
    boxes = []
    for text in picture.iter(f"{SVG}text"):
        if text.get("transform"):
            continue
        x, y, width = float(text.get("x", 0)), float(text.get("y", 0)), 7.0 * len(text.text or "")
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
        boxes.append((left, left + width, y - 10, y + 3, text.text))
    for n, (left, right, top, bottom, words) in enumerate(boxes):
        for other_left, other_right, other_top, other_bottom, other in boxes[:n]:
            apart = right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
            assert apart, (words, other)


@pytest.mark.parametrize("report", REPORTS)
def test_the_page_loads_nothing_and_has_the_table_and_both_colour_schemes(report: CurveReport) -> None:
    page = html_page(report, "t & <t>")
    tags: list[str] = []
    cells: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            assert not {"src", "href", "srcset", "onload"} & {name for name, _ in attrs}

        def handle_data(self, data: str) -> None:
            cells.append(data)

    Reader().feed(page)
    assert not {"script", "link", "img", "iframe"} & set(tags)
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert report.summary() in cells
    for row in report.rows:
        assert set(report.cells(row)) - {""} <= set(cells)


@given(curve=curves)
def test_ticks_lie_within_what_is_shown_and_are_few(curve: HitCurve) -> None:
    scales = Scales.of(CurveReport.from_curve(curve))
    assert all(0 <= scales.rate_share(tick) <= 1 and tick <= 1 for tick in scales.rate_ticks())
    assert 3 <= len(scales.rate_ticks()) <= 8
    for units in (1, 512, 1 / 1024):
        ticks = scales.capacity_ticks(units)
        assert 3 <= len(ticks) <= 13
        assert all(-1e-9 <= scales.capacity_share(tick / units) <= 1 + 1e-9 for tick in ticks)


@pytest.mark.parametrize("suffix", [".html", ".svg", ".SVG"])
def test_the_suffix_says_what_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"curve{suffix}"
    write_plot(REPORTS[0], path, title="t")
    assert path.read_text().startswith("<!DOCTYPE html>" if suffix == ".html" else "<svg")


def test_of_a_hub_id_only_the_configuration_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    asked = []

    def download(repo_id: str, filename: str) -> str:
        asked.append((repo_id, filename))
        return str(tmp_path / filename)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert kv_size("owner/name") == KVSize(model="owner/name", dtype="float32", bytes_per_token=2 * 3 * 32 * 4)
    assert asked == [("owner/name", "config.json")]


def test_a_hub_id_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, filename: str) -> str:
        raise RuntimeError("no such repository")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(OSError, match=r"couldn't fetch the configuration of owner/name .*: no such repository"):
        kv_size("owner/name")
