"""The bench of shared prefixes on the real model: it times decode steps only, with and without tree attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench import tree_attention
from radixkv.kernels import cpu


@pytest.mark.usefixtures("default_model", "weights_are_loaded_once")
def test_every_prefix_is_timed_with_tree_attention_and_without(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--prefix", "20", "--prefix", "80", "--sequences", "3", "--steps", "4", "--rounds", "2", "--json", str(out)]
    assert tree_attention.main(arguments) == 0
    figures = json.loads(out.read_text())
    assert [(f["prefix"], f["tree"], len(f["seconds"])) for f in figures] == [
        (20, True, 8), (20, False, 8), (80, True, 8), (80, False, 8),
    ]  # fmt: skip
    assert "Medians of 2 rounds of 4 steps of 3 sequences" in capsys.readouterr().out


def test_weights_are_loaded_widened_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = cpu.pack_quantized
    loaded_as_stored: list[bool] = []

    def load(model: str, dtype: str) -> None:
        loaded_as_stored.append(cpu.pack_quantized is pack or cpu.pack_quantized(mock.Mock(), None, torch.bfloat16) is not None)
        raise ValueError("enough seen")

    monkeypatch.setattr("radixkv.LLM", load)
    assert [tree_attention.main(arguments) for arguments in ([], ["--widen"])] == [2, 2]
    assert loaded_as_stored == [True, False]
    assert cpu.pack_quantized is pack


def test_bad_input_is_named(capsys: Any) -> None:
    assert tree_attention.main(["--steps", "0"]) == 2
    assert "steps" in capsys.readouterr().err
