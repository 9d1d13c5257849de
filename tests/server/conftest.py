from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

HERE = Path(__file__).parent
SERVE = """
import json, sys
sys.modules["torch"] = None  # a frontend has no need of torch, whose import takes seconds
from radixkv.config import EngineConfig
from radixkv.server import launcher
from radixkv.server.launcher import serve
arguments = json.loads(sys.argv[1])
for name, value in arguments.pop("constants", {}).items():
    setattr(launcher, name, value)
try:
    serve(EngineConfig(**arguments.pop("config")), **arguments)
except (ValueError, OSError) as error:
    sys.exit(f"radixkv: {error}")
"""


class Server:
    """A server in processes of its own, its temporary files in a directory of its own."""

    def __init__(self, folder: Path, model: Path, *, tmpdir: Path | None = None, **arguments: object) -> None:
        self.folder = folder
        self.log_path = folder / "log"
        arguments = {
            "config": {"model": str(model), "kv_cache_tokens": 4096} | arguments.pop("config", {}),  # type: ignore[operator]
            "port": 0,
            "worker_command": [sys.executable, "-P", str(HERE / "echo_worker.py")],
            **arguments,
        }
        environment = os.environ | {"TMPDIR": str(tmpdir or folder), "OMP_NUM_THREADS": "1"}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", SERVE, json.dumps(arguments)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.url = ""

    def wait_ready(self) -> Server:
        for _ in range(1200):
            if "(Ctrl-C stops)" in self.log:
                line = next(line for line in self.log.splitlines() if "Serving on" in line)
                self.url = line.split()[2].removesuffix("/v1")
                return self
            assert self.process.poll() is None, self.log
            time.sleep(0.05)
        raise AssertionError(f"not ready: {self.log}")

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def worker_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def report(self) -> dict[str, int]:
        return httpx.get(f"{self.url}/report").json()  # type: ignore[no-any-return]

    def wait_idle(self) -> dict[str, int]:
        """Wait until no request runs and all blocks are back or cached; fail after five seconds."""
        for _ in range(100):
            report = self.report()
            if report["running"] + report["waiting"] + report["blocks_locked"] == 0:
                assert report["blocks_free"] + report["blocks_cached"] == report["blocks_total"]
                return report
            time.sleep(0.05)
        raise AssertionError(f"still busy: {report}")

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_tools: dict[str, Any]) -> Path:
    return tiny_model_tools["make_folder"](tmp_path_factory.mktemp("model"), weights=False)  # type: ignore[no-any-return]


@contextlib.contextmanager
def starting(model: Path) -> Iterator[StartServer]:
    with contextlib.ExitStack() as stack:

        def start(**arguments: object) -> Server:
            # A short path: a socket's may have 107 characters at most.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rkv", dir="/tmp")))
            server = Server(folder, model, **arguments)
            stack.callback(server.kill)
            return server

        yield start


@pytest.fixture
def start_server(model_folder: Path) -> Iterator[StartServer]:
    """Starts servers that end with the test."""
    with starting(model_folder) as start:
        yield start


@pytest.fixture(scope="module")
def module_start(model_folder: Path) -> Iterator[StartServer]:
    """Starts servers that end with the tests of a module."""
    with starting(model_folder) as start:
        yield start


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    with starting(model_folder) as start:
        server = start(zmq="tcp://127.0.0.1:*").wait_ready()
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture(scope="session")
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
