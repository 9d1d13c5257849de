"""What several workers hit of what one hits, in real processes with the real scheduler and cache, and a model that only echoes."""

from __future__ import annotations

import asyncio
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from bench.workers import measure
from radixkv.model.loader import ModelSource

AREA = Path(__file__).parents[1] / "server"
SUPPORT = runpy.run_path(str(AREA / "conftest.py"))


@pytest.mark.full
def test_two_workers_hit_within_two_points_of_what_one_hits_on_the_agent_workload(
    default_model: ModelSource, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """The agents' prompts in the default model's tokens, at about its pace on two cores."""
    monkeypatch.setenv("STEP_SECONDS", "0.01")
    monkeypatch.setenv("TOKEN_SECONDS", "0.0002")
    rows = {}
    with SUPPORT["starting"](Path("smollm2-135m")) as start:
        for number in (1, 2):
            command = [sys.executable, "-P", str(AREA / "caching_worker.py")]
            server = start(workers=number, worker_command=command, config={"kv_cache_tokens": 65536}).wait_ready()
            rows[number] = asyncio.run(measure(server.url, "agent", 16, Progress(disable=True)))
            server.wait_idle()
            assert server.stop() == 0
    one, two = rows[1]["cached_share"], rows[2]["cached_share"]
    record_property("finding", f"agent workload: one worker hits {one:.1%}, two hit {two:.1%} with requests {rows[2]['requests']}")
    assert two >= one - 0.02
    assert min(rows[2]["requests"]) >= 10, "one of them had next to nothing to do"
