"""The README's pictures: that the command makes them, small enough, and says what is missing where it can't."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import pytest

from bench import pictures

ROOT = Path(__file__).parents[2]
LIMIT = 300_000
"""Bytes of a picture: the README loads them all."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [0, i % 3]} for i in range(9)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_the_readme_shows_pictures_that_are_there_and_small() -> None:
    shown = re.findall(r'<img src="([^"]+)"', (ROOT / "README.md").read_text())
    assert shown
    for name in shown:
        assert 0 < (ROOT / name).stat().st_size < LIMIT


def test_only_the_night_shift_begins_every_prompt_otherwise() -> None:
    first_words = {team.namespace: {prompt[:20] for lane in team.lanes for prompt in lane} for team in pictures.teams()}
    numbers = {team.namespace: sum(map(len, team.lanes)) for team in pictures.teams()}
    assert {namespace: len(words) for namespace, words in first_words.items()} == {
        "support": 1, "homework": 1, "night-shift": numbers["night-shift"],
    }  # fmt: skip


def test_without_chromium_it_says_what_to_install(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures.shutil, "which", lambda name: None)
    assert pictures.main(["--trace", str(trace)]) == 2
    assert "apt install chromium chromium-driver" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert pictures.main(["--trace", "/no/such/trace"]) == 2
    assert "/no/such/trace" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(None in map(shutil.which, ("chromium", "chromedriver")), reason="chromium and chromedriver are not installed")
def test_both_pictures_are_made_of_a_server_at_work(
    default_model: object, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "FOLDER", tmp_path / "images")
    monkeypatch.setattr(pictures, "WORK_SECONDS", 6.0)
    assert pictures.main(["--trace", str(trace)]) == 0
    page = (tmp_path / "images" / "live-page.png").read_bytes()
    width, height = struct.unpack(">II", page[16:24])
    assert page[:8] == b"\x89PNG\r\n\x1a\n"
    assert width == pictures.WIDTH * pictures.SCALE
    assert height > width
    assert LIMIT / 10 < len(page) < LIMIT
    assert "knee: 4 blocks" in (tmp_path / "images" / "capacity-curve.svg").read_text()
