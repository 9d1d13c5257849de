"""The HTML report in a real browser, cut off from the network: it shows itself and asks nobody for anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.report.page_html import html_page
from radixkv.report.trace import read_records
from radixkv.report.workload import WorkloadReport
from radixkv.report.workload_page import workload_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")]


def opened(page: Path) -> str:
    """What a browser makes of ``page``.  It must ask for nothing but the page itself, and complain of nothing."""
    assert CHROMIUM is not None
    log = page.parent / "net.json"
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
        "--no-first-run", "--enable-logging=stderr",
        f"--user-data-dir={page.parent / 'profile'}", f"--log-net-log={log}", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=90, check=True)
    assert "CONSOLE" not in done.stderr
    text = log.read_text()
    events = json.loads(text if text.rstrip().endswith("}") else text.rstrip().rstrip(",") + "]}")["events"]
    params = [event["params"] for event in events if "params" in event]
    # What the browser itself asks its maker for has no origin; what a page asks for has the page's.
    asked = {p["url"] for p in params if p.get("initiator", "not an origin") != "not an origin"}
    assert asked <= {page.as_uri()}
    return done.stdout


def test_the_page_asks_for_nothing_but_itself(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    lines = [{"timestamp": i, "input_length": 1500, "output_length": 1, "hash_ids": [0, i % 3, i]} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    report = WorkloadReport.of(read_records(trace), "trace", capacity_blocks=8)
    page.write_text(html_page(workload_page(report)))
    shown = opened(page)
    assert f"{report.saving.cached_tokens:,} of {report.saving.prompt_tokens:,} prompt tokens" in shown
    assert "today: 8 blocks" in shown


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")
def test_the_command_makes_a_page_of_the_public_trace_that_does_so_too(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [
        sys.executable,
        "-P",
        "-m",
        "radixkv",
        "report",
        str(SHARED_TRACE),
        "--capacity-blocks",
        "10000",
        "--html",
        str(page),
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert page.stat().st_size < 2_000_000
    assert "today: 10,000 blocks" in opened(page)
