"""The server that a benchmark starts goes when the benchmark does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BENCH = f"""
import sys, time
from bench.local import server
with server([sys.executable, "-c", {SERVER!r}, "{{port}}"]) as url:
    print(url, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_benchmark_ends_the_server_it_started(number: int) -> None:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", BENCH]
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline().startswith("http://127.0.0.1:")
        (child,) = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text().split()
        os.kill(bench.pid, number)
        bench.communicate(timeout=30)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
