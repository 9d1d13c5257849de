"""Clients that dawdle, over real sockets, with limits short enough to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from radixkv.server import http_protocol
from radixkv.server.http_api import EventStream
from radixkv.server.http_protocol import MAX_HEAD_BYTES, TimedProtocol


class Generation:
    """What an event stream owns, and must let go."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None:
        self.closed.set()


class App:
    """``/stream`` sends for ever, ``/late`` answers late, all else answers with the body it got."""

    def __init__(self) -> None:
        self.generation = Generation()
        self.disconnects = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/stream":
            await EventStream(self._for_ever(), self.generation)(scope, receive, send)  # type: ignore[arg-type]
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.disconnects += 1
                return
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/late":
            await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def _for_ever(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield b"data: " + b"x" * 4096 + b"\n\n"


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def port(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    for name, seconds in (("HEAD_SECONDS", 0.3), ("BODY_SECONDS", 0.4), ("WRITE_SECONDS", 0.3)):
        monkeypatch.setattr(http_protocol, name, seconds)
    config = uvicorn.Config(
        app, http=TimedProtocol, ws="none", lifespan="off", log_config=None, port=0, h11_max_incomplete_event_size=MAX_HEAD_BYTES
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    connection.settimeout(10)
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server hangs up, which it must."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def wait_for_disconnect(app: App) -> None:
    for _ in range(100):
        if app.disconnects:
            return
        time.sleep(0.05)
    raise AssertionError("the application never heard that its client is gone")


def refusal(received: bytes) -> tuple[int, str]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=repr)
def test_a_head_that_does_not_come_in_time_costs_the_connection(port: int, sent: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(sent)
        status, message = refusal(everything(connection))
    assert (status, message) == (408, "a request's line and headers must be sent within 0.3 s")


def test_a_byte_now_and_then_gains_no_time(port: int, app: App) -> None:
    for head in (b"", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"):
        with connect(port) as connection:
            connection.sendall(head)
            connection.settimeout(0.1)
            for _ in range(100):
                connection.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")
                    break
            else:
                raise AssertionError("the connection is still open after ten seconds")
    wait_for_disconnect(app)


def test_a_body_that_does_not_come_in_time_ends_the_request(port: int, app: App) -> None:
    with connect(port) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
        assert refusal(everything(connection)) == (408, "a request's body must be sent within 0.4 s")
    wait_for_disconnect(app)


@pytest.mark.full
def test_an_answer_may_take_longer_than_a_request_and_the_next_request_has_its_full_time(port: int) -> None:
    with connect(port) as connection:
        for _ in range(2):
            connection.sendall(b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n12")
            time.sleep(0.1)
            connection.sendall(b"345")
            assert connection.recv(65536).endswith(b"12345")


def test_a_reader_that_takes_nothing_is_cut_off_and_its_generation_let_go(port: int, app: App) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        assert app.generation.closed.wait(10)


@pytest.mark.full
def test_a_reader_that_takes_what_comes_is_not_cut_off(port: int, app: App) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        began = time.monotonic()
        while time.monotonic() - began < 0.9:
            assert connection.recv(65536)
        assert not app.generation.closed.is_set()
    assert app.generation.closed.wait(10)


def test_a_head_too_large_and_bytes_that_are_no_http_get_openai_shaped_errors(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1))
        assert refusal(everything(connection)) == (431, "headers must be at most 16384 bytes with the request line")
    with connect(port) as connection:
        connection.sendall(b"\x00\xff\r\n\r\n")
        status, message = refusal(everything(connection))
    assert status == 400
    assert message.startswith("this is no HTTP/1.1 request: ")
