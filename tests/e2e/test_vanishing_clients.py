"""Clients that vanish without a word, at random points and over both doors: within two seconds all their blocks are back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from radixkv.server.launcher import WORKER_COMMAND
from radixkv.server.messages import HEADER

AREA = Path(__file__).parents[1] / "server"
SUPPORT = runpy.run_path(str(AREA / "conftest.py"))
CACHING_WORKER = [sys.executable, "-P", str(AREA / "caching_worker.py")]
SHARED = "You are one of many who will leave without a word. " * 30
SECONDS = 2.0

HTTP_STAGES = ("in the head", "in the body", "sent", "a while after", "at the first token", "in the answer")
ZMQ_STAGES = HTTP_STAGES[2:]
AT_ONCE = "wherever it is then"
"""Half of the clients stay, and vanish in one moment, with those that have not come to their point."""


class Crowd:
    """Clients of one server; half of them vanish each at a point of its own, the others all at once in the end."""

    def __init__(self, server: Any, seed: int, stay: float) -> None:
        self.server = server
        self.stay = stay
        self.port = int(server.url.rpartition(":")[2])
        self.endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
        self.random = random.Random(seed)
        self.vanished: Counter[tuple[str, str]] = Counter()

    async def run(self, number: int) -> dict[str, Any]:
        """What the server reported just before the last vanished."""
        self.end = time.monotonic() + self.stay
        with zmq.asyncio.Context() as context:
            clients = asyncio.gather(*(self._client(context, i) for i in range(number)))
            await asyncio.sleep(self.stay - 0.3)
            report = await asyncio.to_thread(self.server.report)
            await clients
        return report  # type: ignore[no-any-return]

    async def _client(self, context: zmq.asyncio.Context, i: int) -> None:
        door = self.random.choice(["streamed", "whole", "zmq"])
        stage = self.random.choice(ZMQ_STAGES if door == "zmq" else HTTP_STAGES)
        if door == "whole" and stage == "at the first token":  # which it does not see
            stage = "a while after"
        if i % 2:
            stage = AT_ONCE
        prompt = f"{SHARED} I am number {i}. " + f"{self.random.random()} " * self.random.randint(0, 20)
        start, patience, tokens = self.random.uniform(0, self.stay / 2), self.random.uniform(0, 1.5), self.random.randint(2, 25)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.end - time.monotonic()):
                await asyncio.sleep(start)
                if door == "zmq":
                    await self._over_zmq(context, prompt, stage, patience, tokens)
                else:
                    await self._over_http(prompt, stage, patience, tokens, stream=door == "streamed")
        self.vanished[door, stage] += 1

    async def _over_http(self, prompt: str, stage: str, patience: float, tokens: int, *, stream: bool) -> None:
        fields = {"prompt": prompt, "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": stream}
        body = json.dumps(fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            if stage == "in the head":
                writer.write(head[: len(head) // 2])
                await asyncio.sleep(patience / 4)
                return
            writer.write(head + (body[: len(body) // 2] if stage == "in the body" else body))
            if stage == AT_ONCE:
                await asyncio.sleep(self.stay)
            elif stage in ("in the body", "a while after") or (stage == "in the answer" and not stream):
                await asyncio.sleep(patience)
            elif stage != "sent":
                for _ in range(1 if stage == "at the first token" else tokens):
                    await reader.readuntil(b"data: ")
        finally:
            writer.transport.abort()

    async def _over_zmq(self, context: zmq.asyncio.Context, prompt: str, stage: str, patience: float, tokens: int) -> None:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self.endpoint)
            params = {"max_tokens": 900, "temperature": 0.0, "ignore_eos": True}
            submit = {"type": "submit", "id": "1", "prompt": prompt, "params": params}
            await socket.send_multipart([HEADER, msgspec.msgpack.encode(submit)])
            if stage in ("sent", "a while after"):
                await asyncio.sleep(patience if stage == "a while after" else 0.01)
                return
            if stage == AT_ONCE:
                await asyncio.sleep(self.stay)
                return
            seen = 0
            while seen < (1 if stage == "at the first token" else tokens):
                _, reply = await socket.recv_multipart()
                seen += msgspec.msgpack.decode(reply)["type"] == "chunk"


def seconds_until_all_is_back(server: Any, began: float) -> float:
    """No more than twice what is allowed."""
    while (took := time.monotonic() - began) < 2 * SECONDS:
        report = server.report()
        if report["running"] + report["waiting"] + report["blocks_locked"] == 0:
            assert report["blocks_free"] + report["blocks_cached"] == report["blocks_total"]
            return took
        time.sleep(0.02)
    raise AssertionError(f"still held: {report}")


def vanish_in_prefill(server: Any) -> None:
    """Send a prompt of several steps to an idle server, and go when it has begun."""
    before = server.report()
    body = {"prompt": "".join(f"{i} and " for i in random.Random(1).sample(range(9999), 500)), "max_tokens": 5}
    connection = httpx.Client(base_url=server.url)
    with connection, pytest.raises(httpx.ReadTimeout):  # after which the connection is closed
        connection.post("/v1/completions", json=body, timeout=0.05)
    after = server.report()
    assert after["generated_tokens"] == before["generated_tokens"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "workers", "real"),
    [
        pytest.param(200, 2, False, id="two workers that echo"),
        pytest.param(200, 1, True, id="the default model"),
    ],
)
def test_two_seconds_after_the_last_client_has_vanished_no_block_is_held(
    request: pytest.FixtureRequest,
    tiny_model_tools: Any,
    tmp_path: Path,
    record_property: Any,
    number: int,
    workers: int,
    real: bool,
) -> None:
    if real:
        request.getfixturevalue("default_model")
    model = Path("smollm2-135m") if real else tiny_model_tools["make_folder"](tmp_path, weights=False)
    with SUPPORT["starting"](model) as start:
        server = start(
            worker_command=WORKER_COMMAND if real else CACHING_WORKER,
            workers=workers,
            zmq="tcp://127.0.0.1:*",
            config={"kv_cache_tokens": 65536, "max_num_seqs": 32},
        ).wait_ready()
        if real:
            vanish_in_prefill(server)
            seconds_until_all_is_back(server, time.monotonic())
        crowd = Crowd(server, seed=number, stay=6 if real else 2)
        report = asyncio.run(crowd.run(number))
        took = seconds_until_all_is_back(server, crowd.end)
        assert report["running"] >= number / 8
        busy = f"{report['running']} of them running, {report['waiting']} waiting in the last moment"
        record_property(
            "finding",
            f"{number} clients of {workers} worker(s) vanished, {busy}: all blocks were back after {took:.2f} s",
        )
        assert took <= SECONDS
        assert crowd.vanished.total() == number
        metrics = httpx.get(f"{server.url}/metrics").text
        aborted = next(line for line in metrics.splitlines() if 'finished_reason="abort"' in line)
        assert float(aborted.split()[-1]) > number / 3
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 2}).status_code == 200
        assert "Traceback" not in server.log
        assert server.stop() == 0
