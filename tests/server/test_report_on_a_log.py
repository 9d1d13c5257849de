"""A server's request log reported on: its totals are the server's, and advice holds when clients follow it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from radixkv.report.source import report_on
from radixkv.report.workload import WorkloadReport

WORKER = [sys.executable, "-P", str(Path(__file__).parent / "caching_worker.py")]


def serve_all(start_server: Any, path: Path, prompts: list[list[int]], **config: int) -> tuple[WorkloadReport, dict[str, int]]:
    """Send prompts one after the other; the report on the log, and what the server itself counted."""
    server = start_server(
        request_log=str(path), log_tokens=True, worker_command=WORKER, config={"kv_cache_tokens": 16384, **config}
    ).wait_ready()
    with httpx.Client(base_url=f"{server.url}/v1", timeout=20) as client:
        for prompt in prompts:
            assert client.post("/completions", json={"prompt": prompt, "max_tokens": 1}).status_code == 200
    counted = server.wait_idle()
    server.stop()
    report = report_on(str(path))
    assert isinstance(report, WorkloadReport)
    return report, counted


@pytest.fixture
def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """With a date at token 37, and the same with the date below the tools."""
    draw = np.random.default_rng(0).integers(10, 300, (12, 40)).tolist()
    start, tools = draw[0][:37], [token for row in draw[1:9] for token in row]
    dates = [[20 + i, 40 + i, 60 + i, 5] for i in range(10)]
    questions = np.random.default_rng(1).integers(10, 300, (10, 20)).tolist()
    before = [start + date + tools + question for date, question in zip(dates, questions, strict=True)]
    after = [start + tools + date + question for date, question in zip(dates, questions, strict=True)]
    return before, after


def test_totals_are_the_servers_and_moving_the_date_saves_what_was_promised(
    start_server: Any, tmp_path: Path, prompts: tuple[list[list[int]], list[list[int]]]
) -> None:
    before, counted = serve_all(start_server, tmp_path / "before", prompts[0])
    assert before.saving.requests == counted["requests"] == 10
    assert before.saving.prompt_tokens == counted["prompt_tokens"]
    assert before.saving.cached_tokens == counted["cached_tokens"]
    first = before.advice[0]
    assert first.kind == "move_span"
    assert first.details["position"] == 37
    assert first.theirs is not None
    assert first.ours is not None
    assert " 20 40 60 5 " in first.theirs
    assert " 29 49 69 5 " in first.ours
    after, counted = serve_all(start_server, tmp_path / "after", prompts[1])
    # The 5 that ends every date is the first of what stays alike behind it; here it went along.
    assert abs(after.saving.cached_tokens - before.saving.cached_tokens - first.tokens_saved) <= 10
    assert first.tokens_saved >= 9 * 320
    assert counted["cached_tokens"] == after.saving.cached_tokens


def test_a_log_without_tokens_counts_alike_and_gives_no_text(start_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    server = start_server(request_log=str(path), worker_command=WORKER, config={"kv_cache_tokens": 4096}).wait_ready()
    with httpx.Client(base_url=f"{server.url}/v1", timeout=20) as client:
        for _ in range(3):
            assert client.post("/completions", json={"prompt": [*range(10, 74)], "max_tokens": 1}).status_code == 200
    counted = server.wait_idle()
    server.stop()
    report = report_on(str(path))
    assert isinstance(report, WorkloadReport)
    assert report.saving.cached_tokens == counted["cached_tokens"] == 126
    assert {miss.reason: miss.tokens for miss in report.misses} == {"new": 64, "last_token": 2}
    assert all(row.ours is None for row in report.places)
