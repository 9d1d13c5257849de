"""A thousand streams at once, clients that read nothing, and clients that say next to nothing: none of them holds up the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from radixkv.model.loader import ModelSource
from radixkv.server.launcher import WORKER_COMMAND
from radixkv.server.messages import HEADER

STREAMS = 1000


@contextlib.contextmanager
def few_open_files(number: int) -> Iterator[None]:
    """What is started in here may have so many open files at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def echoing(module_start: Any) -> Any:
    with few_open_files(512):
        return module_start(zmq="tcp://127.0.0.1:*", config={"kv_cache_tokens": 131072}).wait_ready()


def zmq_port(server: Any) -> int:
    return int(next(word for word in server.log.split() if word.startswith("tcp://")).rpartition(":")[2])


def post(body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(encoded), encoded)


async def open_streams(server: Any, body: dict[str, Any]) -> tuple[dict[str, int], Counter[str]]:
    """What the server reports once all streams are open, and the texts that came, and how often each."""
    opened, all_open = 0, asyncio.Event()
    port = int(server.url.rpartition(":")[2])

    async def stream() -> str:
        nonlocal opened
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(post(body | {"stream": True}))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            opened += 1
            if opened == STREAMS:
                all_open.set()
            text = ""
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    return text
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
            return f"cut off after {text!r}"
        finally:
            writer.close()

    async def report() -> dict[str, int]:
        await all_open.wait()
        return await asyncio.to_thread(server.report)  # type: ignore[no-any-return]

    report_then, *texts = await asyncio.gather(report(), *(stream() for _ in range(STREAMS)))
    return report_then, Counter(texts)


def test_a_thousand_streams_are_open_at_once_also_where_few_open_files_are_allowed_at_first(echoing: Any) -> None:
    # It gets no token for so many tenths of a second, in which all others come.
    report, texts = asyncio.run(open_streams(echoing, {"prompt": [6, 6, 40], "max_tokens": 6}))
    assert report["running"] == STREAMS
    assert len(texts) == 1
    assert texts.total() == STREAMS
    assert not next(iter(texts)).startswith("cut off")
    echoing.wait_idle()
    assert "Traceback" not in echoing.log


@pytest.mark.full
def test_a_thousand_streams_of_the_default_model_all_say_the_same(start_server: Any, default_model: ModelSource) -> None:
    server = start_server(worker_command=WORKER_COMMAND, config={"model": "smollm2-135m", "kv_cache_tokens": 32768}).wait_ready()
    body = {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    alone = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    report, texts = asyncio.run(open_streams(server, body | {"max_tokens": 6}))
    assert report["running"] + report["waiting"] >= STREAMS / 2
    assert texts == {alone: STREAMS}
    server.wait_idle()


# --- clients that read nothing -----------------------------------------------------------------------------------------------


def test_a_reader_that_takes_nothing_holds_no_block_once_its_answer_is_done(echoing: Any) -> None:
    with socket.create_connection(("127.0.0.1", int(echoing.url.rpartition(":")[2]))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(post({"prompt": "abc", "max_tokens": 500, "n": 40, "stream": True}))
        while not echoing.report()["running"]:
            time.sleep(0.01)
        echoing.wait_idle()
        # It is still there, and most of its answer has not been sent.
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert httpx.post(f"{echoing.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code == 200


@pytest.mark.full
def test_a_zeromq_client_that_leaves_too_much_unread_is_dropped_and_its_requests_with_it(echoing: Any) -> None:
    def aborted() -> float:
        lines = httpx.get(f"{echoing.url}/metrics").text.splitlines()
        ended = [line for line in lines if line.startswith("vllm:request_success_total{") and 'finished_reason="abort"' in line]
        return float(ended[0].split()[-1])

    before = aborted()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.connect(f"tcp://127.0.0.1:{zmq_port(echoing)}")
        params = {"max_tokens": 2000}
        dealer.send_multipart(
            [HEADER, msgspec.msgpack.encode({"type": "submit", "id": "1", "prompt": "abc", "n": 100, "params": params})]
        )
        while aborted() == before:
            assert echoing.report()["running"] == 100 or aborted() > before, "all was generated, and kept for nobody"
            time.sleep(0.05)
    echoing.wait_idle()


# --- clients that say next to nothing ----------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


@pytest.mark.full
def test_clients_that_send_a_byte_a_minute_cost_no_request_anything_and_are_cut(echoing: Any) -> None:
    """Over HTTP within ten seconds, over ZeroMQ within eight."""
    before = resident_bytes(echoing.process.pid)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    unfinished = {
        int(echoing.url.rpartition(":")[2]): [b"P", b"POST /v1/completions HTTP/1.1\r\n"],
        # In the handshake, and in the middle of a message that a heartbeat comes into.
        zmq_port(echoing): [b"\xff", greeting + ready + b"\x01\x0aradix"],
    }
    with contextlib.ExitStack() as stack:
        dawdlers = []
        for port, openings in unfinished.items():
            for opening in openings * 50:
                dawdlers.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
                dawdlers[-1].settimeout(20)
                dawdlers[-1].sendall(opening)
        began = time.monotonic()
        while time.monotonic() - began < 3:
            assert httpx.post(f"{echoing.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code == 200
            assert echoing.report()["blocks_locked"] == 0
        for dawdler in dawdlers:
            with contextlib.suppress(ConnectionResetError):
                while dawdler.recv(4096):  # fails where nobody hangs up in 20 seconds
                    pass
    assert resident_bytes(echoing.process.pid) - before < 20 * 2**20
    assert "Traceback" not in echoing.log
