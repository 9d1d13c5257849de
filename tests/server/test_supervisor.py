"""How a worker's end is noticed."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv.config import EngineConfig
from radixkv.server.launcher import Supervisor


class Worker:
    """A process that lives until it is killed, and a client of it."""

    def __init__(self, run: Any) -> None:
        self._ended = asyncio.Event()
        self.process = SimpleNamespace(wait=self._wait, kill=self._ended.set)
        self.client = SimpleNamespace(run=run, hung=lambda seconds: asyncio.Event().wait())

    async def _wait(self) -> int:
        await self._ended.wait()
        return -9


def test_a_worker_whose_message_the_server_fails_on_is_killed_so_that_its_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise KeyError("a reason nobody knows")

    async def death() -> str:
        supervisor = Supervisor(None, EngineConfig(), [], 60.0, 0, "")  # type: ignore[arg-type]
        return await asyncio.wait_for(supervisor._death_of(Worker(fail)), 10)  # type: ignore[arg-type]

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(death()) == "said what the server failed on, so it was killed"
    assert "a reason nobody knows" in caplog.text
