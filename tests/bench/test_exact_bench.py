"""The exactness bench sees a difference where there is one, and none on the real model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import exact
from bench.workloads import Workload

pytestmark = pytest.mark.usefixtures("default_model", "weights_are_loaded_once")

SHORT = {
    "fewshot": lambda: Workload(
        "fewshot", tuple((f"{'Some words to share. ' * 30}Question {i}:",) for i in range(5)), max_tokens=3
    ),
    "agent": lambda: Workload("agent", (("Say a.", "Say a. Then b."), ("Say c.",)), max_tokens=2),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "WORKLOADS", SHORT)


@pytest.mark.parametrize("modes", [[0, 4, 5], pytest.param(range(len(exact.MODES)), marks=pytest.mark.full)])
def test_no_bit_differs_in_any_mode(modes: Sequence[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    chosen = tuple(exact.MODES[i] for i in modes)
    monkeypatch.setattr(exact, "MODES", chosen)
    out = tmp_path / "figures.json"
    assert exact.main(["--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["requests"] == {"fewshot": 5, "agent": 3}
    assert [row["mode"] for row in result["modes"]] == [mode.title for mode in chosen]
    assert "5 / 5" not in capsys.readouterr().out


def test_a_bit_that_depends_on_the_batch_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exact, "MODES", (exact.MODES[0], exact.MODES[3]))
    from radixkv.model.llama import Llama

    logits = Llama.logits

    def leaky(self: Llama, hidden: torch.Tensor) -> torch.Tensor:
        result = logits(self, hidden)
        result[:, 7] += 2.0**-12 * (len(result) > 1)
        return result

    monkeypatch.setattr(Llama, "logits", leaky)
    out = tmp_path / "figures.json"
    assert exact.main(["--json", str(out)]) == 1
    alone, together = json.loads(out.read_text())["modes"]
    assert alone["fewshot"]["bits"] == 0
    assert together["fewshot"]["bits"] == 5
