"""The demo end to end: real server, real model, and nothing left behind however it ends."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", str(ROOT / "examples" / "demo.py")]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="the demo needs the openai package"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds leftover processes through /proc"),
]


@pytest.fixture
def mark() -> dict[str, str]:
    """An environment that every process started from it carries, however many sessions away."""
    return {**os.environ, "RADIXKV_TEST_MARK": uuid.uuid4().hex}


def processes(mark: dict[str, str]) -> list[str]:
    """Command lines of the living processes that carry ``mark``."""
    wanted = f"RADIXKV_TEST_MARK={mark['RADIXKV_TEST_MARK']}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return found


def wait_for(what: str, mark: dict[str, str], limit: float) -> None:
    deadline = time.monotonic() + limit
    while not any(what in command for command in processes(mark)):
        assert time.monotonic() < deadline, f"no process of {what!r} came up in {limit} s"
        time.sleep(0.1)


def test_the_demo_computes_the_shared_prefix_once_and_leaves_nothing_running(mark: dict[str, str]) -> None:
    run = subprocess.run(COMMAND, env=mark, capture_output=True, text=True, timeout=1100, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    computed = re.search(r"few-shot: ([\d,]+) of ([\d,]+) prompt tokens were computed; .* = ([\d,]+) \+ ([\d,]+) =", run.stdout)
    assert computed is not None, run.stdout
    own, all_, prefix, tails = (int(group.replace(",", "")) for group in computed.groups())
    assert 1000 <= prefix <= own <= prefix + tails + 32 * 16
    assert 1 - own / all_ > 0.9
    shares = {name: float(share) for name, share in re.findall(r"│ ([a-z -]+?) +│.* ([\d.]+)% │", run.stdout)}
    assert shares["few-shot batch"] > 90
    assert shares["all"] > 90
    assert "32 of 32 answers are the same with the cache on and off" in run.stdout
    assert processes(mark) == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupting_the_demo_stops_its_server_and_worker(mark: dict[str, str], name: str) -> None:
    with subprocess.Popen(COMMAND, env=mark, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        wait_for("radixkv.server.worker", mark, limit=120)
        time.sleep(1)
        demo.send_signal(signal.Signals[name])
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, output
    assert "Traceback" not in output
    assert processes(mark) == []


def test_killing_the_server_under_the_demo_fails_it_with_a_message(mark: dict[str, str]) -> None:
    with subprocess.Popen(COMMAND, env=mark, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        wait_for("radixkv.server.worker", mark, limit=120)
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes()
                ours = mark["RADIXKV_TEST_MARK"].encode() in (folder / "environ").read_bytes()
            except OSError:
                continue
            if ours and b"radixkv.cli" in command:
                os.kill(int(folder.name), signal.SIGKILL)
        output, _ = demo.communicate(timeout=120)
    assert demo.returncode == 1, output
    assert "failed:" in output
    assert "Traceback" not in output
    # A worker that was still importing when its parent was killed finds that out a little later.
    deadline = time.monotonic() + 10
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(mark) == []
