"""Two servers timed in turn: which commands run, what is compared, and how it is summed up."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.workloads import WORKLOADS


def figures(wall: float, first: float, between: float, cached: float | None = None) -> dict[str, Any]:
    return {"wall_s": wall, "ttft_p50": first, "itl_p50": between, "cached_share": cached}


def test_ratios_are_taken_round_by_round_and_are_the_other_servers_over_ours() -> None:
    ours = [
        {"w, cold": figures(2, 0.1, 0.02, 0.5)},
        {"w, cold": figures(4, 0.2, 0.03, 0.7)},
        {"w, cold": figures(3, 0.1, 0.02, 0.6)},
    ]
    theirs = [{"w, cold": figures(6, 0.4, 0.02)}, {"w, cold": figures(8, 0.2, 0.06)}, {"w, cold": figures(12, 0.3, 0.04)}]
    rows = peers.summary({"radixkv": ours, "other": theirs})["w, cold"]
    assert rows["radixkv"] == {"wall_s": 3, "ttft_p50": 0.1, "itl_p50": 0.02, "cached_share": 0.6}
    assert {name: round(value, 6) for name, value in rows["other"].items()} == {
        "wall_s": 8, "ttft_p50": 0.3, "itl_p50": 0.04, "wall_s_ratio": 3, "ttft_p50_ratio": 3, "itl_p50_ratio": 2,
    }  # fmt: skip


def test_one_stream_is_three_prompts_one_after_the_other() -> None:
    ((workload, concurrency),) = peers.workloads([peers.ONE_STREAM], 16)
    assert (workload.num_requests, concurrency) == (3, 1)
    others = [lane[0] for lane in WORKLOADS["unique"]().lanes]
    assert all(lane[0].endswith(other) for lane, other in zip(workload.lanes, others, strict=False))
    assert not any(other.startswith(lane[0][:5]) for lane in workload.lanes for other in others)
    assert [c for _, c in peers.workloads(["fewshot", "agent"], 5)] == [5, 5]


def test_each_round_starts_both_servers_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    started: list[str] = []

    @contextlib.contextmanager
    def server(command: Sequence[str]) -> Iterator[str]:
        started.append(command[-1])
        yield f"http://{len(started)}"

    async def measure(url: str, chosen: Any, progress: Any) -> dict[str, Any]:
        return {"unique, cold": figures(float(url[-1]), 0.1, 0.01)}

    monkeypatch.setattr(peers, "server", server)
    monkeypatch.setattr(peers, "measure", measure)
    out = tmp_path / "figures.json"
    arguments = ["--peer", "serve it --port {port}", "--flags=--dtype float32", "--rounds", "2", "--workload", "unique"]
    assert peers.main([*arguments, "--json", str(out)]) == 0
    assert started == ["float32", "{port}", "float32", "{port}"]
    assert "2.00" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["rounds"]["peer"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--peer", "serve"], "{port}"), ([], "--peer"), (["--peer", "{port}", "--rounds", "0"], "rounds")],
)
def test_bad_input_is_named(arguments: list[str], message: str, capsys: Any) -> None:
    assert peers.main(arguments) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_a_server_that_does_not_come_up_is_an_error_with_what_it_said(capsys: Any) -> None:
    assert peers.main(["--peer", "echo sorry {port}", "--flags=--no-such-flag", "--rounds", "1"]) == 1
    assert "did not come up" in capsys.readouterr().err
