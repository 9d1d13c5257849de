"""``python -m bench kernels`` on a machine without a GPU, and the cases that it would time on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_kernels, kernels
from radixkv.kernels import reference

FACT = {
    "kernel": "decode_splits", "target": "sm_90", "dtype": "bfloat16", "kv_dtype": "float8_e5m2", "registers": 168,
    "constants": {"HEAD_DIM": 128, "GROUP": 4, "BLOCK_SIZE": 16, "ROWS": 64, "KEYS": 32, "WINDOW": 4096, "CAP_LOG2": 72.1},
    "spilled_bytes": 0, "shared_bytes": 58112, "shared_limit": 232448,
}  # fmt: skip


def test_without_a_gpu_the_bench_says_so_and_reports_every_binary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def compile_instead(function: str, arguments: dict[str, Any], progress: Any) -> list[dict[str, Any]]:
        asked.append(arguments)
        progress(1, 2)
        return [FACT | {"target": arguments["target"], "spilled_bytes": 8 * (arguments["target"] == "sm_80")}]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "run_fresh", compile_instead)
    file = tmp_path / "kernels.json"
    assert kernels.main(["--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "no GPU" in printed
    assert "4 binaries, 1 of them spill" in printed
    for words in ("sm_80", "gfx942", "decode_splits", "float8_e5m2", "dim 128, group 4", "window 4096, capped", "168", "25%"):
        assert words in printed
    assert [arguments["target"] for arguments in asked] == ["sm_80", "sm_90", "sm_100", "gfx942"]
    assert len(json.loads(file.read_text())["binaries"]) == 4


def test_the_quick_report_of_one_target_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    assert kernels.main(["--compile", "--quick", "--targets", "sm_90"]) == 0
    printed = capsys.readouterr().out
    assert "0 of them spill" in printed
    assert all(name in printed for name in ("decode_splits", "prefill_tiles", "copy_slice"))


@pytest.mark.parametrize("arguments", [["--targets", "sm_1"], ["--dtype", "float8"], ["--nonsense"]])
def test_bad_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(arguments) == 2
    assert arguments[0].lstrip("-") in capsys.readouterr().err.lower()


def test_torch_and_the_kernels_are_timed_on_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with the reference in Triton's place: the two calls of each case must give the same numbers."""
    monkeypatch.setattr(gpu_kernels, "load_backend", lambda name: reference)
    cpu, torch_dtype = torch.device("cpu"), torch.float32
    for sequences, shared, tree in (
        ([(1, 50)], 0, False),
        ([(1, 64)] * 3, 48, True),
        ([(1, 40), (1, 64)], 32, False),
        ([(33, 33)], 0, False),
        ([(16, 50)], 0, False),
    ):
        case = gpu_kernels.attention_case("", sequences, shared, tree, torch_dtype, cpu)
        assert case.torch_run is not None
        ours, theirs = case.run(), case.torch_run()
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        torch.testing.assert_close(theirs.transpose(1, 2).flatten(0, 1), ours, rtol=1e-4, atol=1e-4)
    assert gpu_kernels.attention_case("", [(4, 40), (1, 40)], 0, False, torch_dtype, cpu).torch_run is None


def test_a_tree_is_charged_its_shared_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "load_backend", lambda name: reference)
    plain, tree = (
        gpu_kernels.attention_case("", [(1, 64)] * 3, 48, tree, torch.float32, torch.device("cpu")) for tree in (False, True)
    )
    assert plain.flops == tree.flops
    assert plain.num_bytes - tree.num_bytes == 2 * (2 * 48) * gpu_kernels.KV_HEADS * gpu_kernels.HEAD_DIM * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_every_case_is_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_kernels, "REPEATS", 2)
    assert kernels.main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("tree", "prefill", "mixed", "write_kv", "rms_norm"))
