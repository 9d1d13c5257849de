"""The serving benchmark against a small server whose answers and delays are known."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import serving
from bench.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[2]
GAP = 0.02


class FakeServer(ThreadingHTTPServer):
    """Streams three chunks ``GAP`` apart, 9 of every 10 prompt tokens cached; refuses what it is told to."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.resets = 0
        self.running = 0
        self.most_running = 0
        self.lock = threading.Lock()
        self.knows_ignore_eos = True
        self.fail_on = "no prompt has this"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path == "/reset_prefix_cache":
            self.server.resets += 1
            self.answer(200, {})
        elif "ignore_eos" in body and not self.server.knows_ignore_eos:
            self.answer(400, {"error": {"message": "unknown field ignore_eos"}})
        elif self.server.fail_on in body["prompt"]:
            self.answer(500, {"error": {"message": "out of luck"}})
        elif not body.get("stream"):
            self.answer(200, {})
        else:
            self.stream(body)

    def stream(self, body: dict[str, Any]) -> None:
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for text in ("a", "b", "c"):
            time.sleep(GAP)
            self.event({"choices": [{"text": text}]})
        with self.server.lock:
            self.server.running -= 1
        usage = {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 90}}
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    workload = Workload("agent", tuple((f"{lane} first", f"{lane} first second") for lane in range(4)), max_tokens=3)
    monkeypatch.setitem(WORKLOADS, "agent", lambda: workload)
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


def bench(server: FakeServer, *flags: str) -> int:
    return serving.main(["--url", f"http://127.0.0.1:{server.server_port}/v1", "--workload", "agent", *flags])


def test_figures_and_raw_samples_tell_what_the_server_did(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server, "--json", str(tmp_path / "out.json")) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    (run,) = result["runs"]
    assert (result["model"], run["workload"], len(run["samples"])) == ("fake", "agent", 8)
    figures = run["figures"]
    assert figures["cached_share"] == 0.9
    assert figures["errors"] == 0
    assert figures["output_tokens_per_s"] == pytest.approx(24 / figures["wall_s"])
    assert figures["wall_s"] >= 2 * 3 * GAP
    assert GAP <= figures["ttft_p50"] <= figures["ttft_p90"]
    assert 0.5 * GAP <= figures["itl_p50"] <= figures["itl_p99"]
    assert run["samples"][0]["text"] == "abc"
    assert "90.0%" in capsys.readouterr().out


def test_requests_are_greedy_streamed_and_ignore_the_end_of_sequence(server: FakeServer) -> None:
    bench(server)
    for body in server.bodies:
        assert (body["temperature"], body["stream"], body["ignore_eos"], body["max_tokens"]) == (0, True, True, 3)


def test_a_server_that_refuses_ignore_eos_is_asked_without_it(server: FakeServer) -> None:
    server.knows_ignore_eos = False
    assert bench(server) == 0
    assert len(server.bodies) == 8
    assert not any("ignore_eos" in body for body in server.bodies)


def test_no_more_requests_run_at_once_than_asked_for(server: FakeServer) -> None:
    bench(server, "--concurrency", "3")
    assert server.most_running == 3


def test_turns_of_a_lane_come_one_after_the_other(server: FakeServer) -> None:
    bench(server)
    prompts = [body["prompt"] for body in server.bodies]
    assert all(prompts.index(f"{lane} first") < prompts.index(f"{lane} first second") for lane in range(4))


def test_cold_passes_empty_the_cache_before_each_and_a_warm_up_comes_first(server: FakeServer) -> None:
    bench(server, "--repeat", "2", "--cold", "--warmup")
    assert server.resets == 2
    assert len(server.bodies) == 3 * 8


def test_a_failing_request_is_counted_shown_and_fails_the_run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.fail_on = "2 first second"
    assert bench(server) == 1
    assert "HTTP 500" in capsys.readouterr().out


def test_no_server_is_exit_code_1_and_bad_flags_are_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--url", "http://127.0.0.1:9"]) == 1
    assert serving.main(["--workload", "nope"]) == 2
    assert serving.main(["--concurrency", "0"]) == 2
    assert "concurrency" in capsys.readouterr().err


@pytest.mark.parametrize(("q", "value"), [(0, 1), (1, 1), (50, 5), (90, 9), (91, 10), (99, 10), (100, 10)])
def test_a_percentile_is_the_smallest_value_that_covers_that_share(q: float, value: int) -> None:
    values = [7, 3, 10, 1, 9, 2, 8, 4, 6, 5]
    assert serving.percentile(values, q) == value
    assert sum(v <= value for v in values) >= q / 100 * len(values)


def test_nothing_has_no_percentile() -> None:
    assert serving.percentile([], 50) is None


def run_from_root(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_python_m_bench_lists_every_benchmark_and_refuses_others() -> None:
    listed = run_from_root("-m", "bench", "--help")
    assert listed.returncode == 0
    assert "serving" in listed.stdout
    assert "cpu-kernels" in listed.stdout
    refused = run_from_root("-m", "bench", "nope")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "'nope'" in refused.stderr


@pytest.mark.full
def test_under_python_m_bench_the_root_shadows_neither_transformers_nor_radixkv() -> None:
    code = (
        "import runpy, sys; sys.argv = ['bench', '--help']; sys.path.insert(0, '')\n"
        "try: runpy.run_module('bench', run_name='__main__', alter_sys=True)\n"
        "except SystemExit: pass\n"
        "import importlib.util, transformers, radixkv.kernels, bench.serving\n"
        "assert transformers.AutoTokenizer\n"
        "spec = importlib.util.find_spec('kernels')\n"
        f"assert spec is None or not str(spec.origin).startswith({str(ROOT)!r}), spec\n"
    )
    run = run_from_root("-c", code)
    assert run.returncode == 0, run.stderr


def test_the_local_benchmark_explains_its_own_options_and_those_of_the_server() -> None:
    shown = run_from_root("-m", "bench", "local", "--help")
    assert shown.returncode == 0
    assert "options of radixkv serve" in shown.stdout
    assert "--concurrency" in shown.stdout


@pytest.mark.full
def test_a_server_that_cannot_start_fails_the_local_benchmark_with_its_words() -> None:
    run = run_from_root("-m", "bench", "local", "--workload", "unique", "--", "--model", "/no/such/model")
    assert run.returncode == 1
    assert "did not come up" in run.stderr
    assert "/no/such/model" in run.stderr
