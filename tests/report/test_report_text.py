"""The live report: its arithmetic, its text, and what it says when there is no server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from radixkv.cli import main
from radixkv.report.report import Report, fetch_report

STATS: dict[str, Any] = {
    "model": "tiny[bold]", "uptime_s": 125.0, "requests": 10, "prompt_tokens": 2000, "cached_tokens": 1500, "generated_tokens": 70,
    "preemptions": 1, "steps": 99, "prefill_tokens_computed": 500, "prefill_seconds": 2.0, "block_size": 16, "max_model_len": 8192,
    "kv_bytes_per_token": 65536, "blocks_total": 100, "blocks_free": 20, "blocks_cached": 70, "blocks_locked": 10,
    "namespaces": {"": {"requests": 4, "prompt_tokens": 800, "cached_tokens": 700},
                   "tenant-b": {"requests": 6, "prompt_tokens": 1200, "cached_tokens": 800}},
}  # fmt: skip
RECENT: dict[str, Any] = {"over_time": [], "recent": None}


def test_hit_rates_and_seconds_saved_follow_from_the_counters() -> None:
    report = Report.from_stats(STATS)
    assert report.hit_rate == 0.75
    assert {name: n.hit_rate for name, n in report.namespaces.items()} == {"": 0.875, "tenant-b": pytest.approx(2 / 3)}
    assert report.blocks.bytes_each == 2**20
    assert report.prefill_tokens_per_second == 250
    assert report.seconds_saved == 6.0


def test_a_fresh_engine_has_nothing_to_estimate_from() -> None:
    counters = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "prefill_tokens_computed", "prefill_seconds"), 0)
    report = Report.from_stats({**STATS, **counters, "namespaces": {}})
    assert (report.hit_rate, report.seconds_saved) == (0.0, None)
    assert "not known yet" in str(report)


def test_text_shows_rate_saving_blocks_and_each_namespace() -> None:
    text = str(Report.from_stats(STATS))
    for words in (
        "tiny[bold], up 2 min 5 s",
        "75.0%",
        "about 6.0 s of prefill",
        "80 of 100 in use (80%, 80 MiB)",
        "(default)",
        "66.7%",
    ):
        assert words in text
    assert "\x1b" not in text


def test_one_namespace_needs_no_table() -> None:
    assert "namespace" not in str(Report.from_stats({**STATS, "namespaces": {"": STATS["namespaces"][""]}}))


def test_statistics_with_a_missing_field_are_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="prefill_seconds"):
        Report.from_stats({key: value for key, value in STATS.items() if key != "prefill_seconds"})


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bodies = {
                "/report": json.dumps(STATS),
                "/report/recent": json.dumps(RECENT),
                "/other/report": "<html>",
                "/third/report": "{}",
            }
            body = bodies.get(self.path)
            self.send_response(200 if body else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_report_is_found_from_the_base_with_or_without_v1(server: HTTPServer, suffix: str) -> None:
    assert fetch_report(f"http://127.0.0.1:{server.server_port}{suffix}").hit_rate == 0.75


@pytest.mark.parametrize("path", ["/other", "/third"])
def test_something_else_at_the_address_is_told_apart_from_no_server(server: HTTPServer, path: str) -> None:
    with pytest.raises(ValueError, match="is no radixkv server"):
        fetch_report(f"http://127.0.0.1:{server.server_port}{path}")


def test_a_server_without_a_report_is_named_with_its_status(server: HTTPServer) -> None:
    with pytest.raises(ConnectionError, match="404"):
        fetch_report(f"http://127.0.0.1:{server.server_port}/nothing")


def test_no_server_is_said_with_the_address_that_was_tried() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"no server answers at {url}/report"):
            fetch_report(url)


def test_an_address_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        fetch_report("file:///etc/passwd")


def test_many_namespaces_are_cut_to_the_largest_with_a_count_of_the_rest() -> None:
    many = {f"tenant-{i}": {"requests": 1, "prompt_tokens": i, "cached_tokens": 0} for i in range(1, 31)}
    text = str(Report.from_stats({**STATS, "namespaces": many}))
    assert "tenant-30 " in text
    assert "tenant-10 " not in text
    assert "and 10 smaller namespaces" in text


def test_names_can_not_command_the_terminal() -> None:
    namespaces = {"a\x1b[31m": STATS["namespaces"][""], "tenant-b": STATS["namespaces"]["tenant-b"]}
    text = str(Report.from_stats({**STATS, "model": "m\x1b]0;title\x07", "namespaces": namespaces}))
    assert not {"\x1b", "\x07"} & set(text)
    assert r"a\x1b[31m" in text


def test_misses_by_reason_are_shown_the_largest_first() -> None:
    report = Report.from_stats({**STATS, "missed_tokens": {"new": 100, "evicted": 400, "in_flight": 0}})
    assert "400 evicted, 100 new" in str(report)
    assert report.to_dict()["missed_tokens"] == {"new": 100, "evicted": 400, "in_flight": 0}


def test_a_report_is_plain_types_a_table_and_html_for_notebooks() -> None:
    namespaces = {"<b>": STATS["namespaces"][""], "tenant-b": STATS["namespaces"]["tenant-b"]}
    report = Report.from_stats({**STATS, "missed_tokens": {"namespace": 500}, "namespaces": namespaces})
    assert json.loads(json.dumps(report.to_dict()))["hit_tokens"] == 1500
    assert report.rows()[1] == {
        "namespace": "tenant-b", "requests": 6, "prompt_tokens": 1200, "hit_tokens": 800, "hit_rate": pytest.approx(2 / 3),
    }  # fmt: skip
    html = report._repr_html_()
    assert "75.0 %" in html
    assert "another namespace has it" in html
    assert "<b>" not in html


def test_the_page_of_a_server_has_what_its_counters_say(server: HTTPServer, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", f"http://127.0.0.1:{server.server_port}", "--html", str(page)]) == 0
    text = page.read_text()
    assert "1,500 of 2,000 prompt tokens of 10 requests" in text
    assert "<h2>By namespace" in text
