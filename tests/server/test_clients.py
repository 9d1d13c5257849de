"""Both clients against a server that the test plays itself, and against one that is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from radixkv.sampling_params import SamplingParams
from radixkv.server.client import AsyncClient, AsyncStream, Client, Options, Stream
from radixkv.server.errors import InvalidRequest, ServerError, Unavailable, UnknownModel, UnsupportedVersion
from radixkv.server.messages import HEADER

USAGE = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
LONG = SamplingParams(max_tokens=2000)
SHORT = SamplingParams(max_tokens=6)


class FakeServer:
    """Says what the test says."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._client = b""
        self.request: dict[str, Any] = {}
        """As it came last."""

    def take(self) -> str:
        """The next request's id."""
        assert self._socket.poll(5000), "no request"
        self._client, _, body = self._socket.recv_multipart()
        self.request = msgspec.msgpack.decode(body)
        return str(self.request["id"])

    def say(self, type: str, **fields: object) -> None:
        self.say_bytes(msgspec.msgpack.encode({"type": type, **fields}))

    def say_bytes(self, body: bytes, header: bytes = HEADER) -> None:
        self._socket.send_multipart([self._client, header, body])

    def answer(self, id: str) -> None:
        self.say("chunk", id=id, delta={"index": 0, "text": "a", "token_ids": [1], "finish_reason": "length"})
        self.say("finished", id=id, usage=USAGE)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind("tcp://127.0.0.1:*")
        yield FakeServer(router)


class Blocking:
    """The blocking client, as these tests use it."""

    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint, timeout=30)

    def stream(self, prompt: str, params: SamplingParams = LONG, **fields: Any) -> Any:
        return self._client.stream(prompt, params, **fields)

    def info(self) -> Any:
        return self._client.info()

    def text(self, stream: Stream) -> str:
        return "".join(delta.text for delta in stream)

    def close(self) -> None:
        self._client.close()


class OnALoop:
    """The async client, whose event loop runs only while something is asked of it here."""

    def __init__(self, endpoint: str) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._opened(endpoint))

    @staticmethod
    async def _opened(endpoint: str) -> AsyncClient:
        return await AsyncClient(endpoint, timeout=30).__aenter__()

    def stream(self, prompt: str, params: SamplingParams = LONG, **fields: Any) -> Any:
        async def start() -> AsyncStream:
            return self._client.stream(prompt, params, **fields)

        return self._runner.run(start())

    def info(self) -> Any:
        return self._runner.run(self._client.info())

    def text(self, stream: AsyncStream) -> str:
        async def read() -> str:
            return "".join([delta.text async for delta in stream])

        return self._runner.run(read())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


def zmq_endpoint(server: Any) -> str:
    return next(word for word in server.log.split() if word.startswith("tcp://"))


@pytest.fixture(params=[Blocking, OnALoop])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def client(kind: Any, fake: FakeServer) -> Iterator[Any]:
    with contextlib.closing(kind(fake.endpoint)) as client:
        yield client


def test_an_answer_that_cannot_be_read_fails_its_request_and_no_other(client: Any, fake: FakeServer) -> None:
    first, second = client.stream("x"), client.stream("y")
    a, b = fake.take(), fake.take()
    fake.say("chunk", id=a, delta="nonsense")
    fake.answer(b)
    with pytest.raises(ServerError, match=r"can't be read.*delta"):
        client.text(first)
    assert client.text(second) == "a"


@pytest.mark.parametrize("body", [b"\xc1", msgspec.msgpack.encode({"type": "news"})])
def test_one_that_names_no_request_fails_all_that_are_open_and_none_later(client: Any, fake: FakeServer, body: bytes) -> None:
    streams = [client.stream("x"), client.stream("y")]
    for _ in streams:
        fake.take()
    fake.say_bytes(body)
    for stream in streams:
        with pytest.raises(ServerError, match="can't be read"):
            client.text(stream)
        fake.take()  # the client cancels it
    later = client.stream("z")
    fake.answer(fake.take())
    assert client.text(later) == "a"


def test_a_request_that_the_server_no_longer_names_is_lost_and_one_that_it_names_is_not(
    client: Any, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.server.client.SILENCE_SECONDS", 0.5)
    lost, known = client.stream("x"), client.stream("y")
    fake.take()
    id = fake.take()

    def name_one_until_it_is_done() -> None:
        for _ in range(20):
            fake.say("alive", ids=[id])
            time.sleep(0.1)
        fake.answer(id)

    server = threading.Thread(target=name_one_until_it_is_done)
    server.start()
    with pytest.raises(Unavailable, match="no sign of life"):
        client.text(lost)
    assert server.is_alive(), "it was noticed only when nothing was heard about any request"
    assert client.text(known) == "a"
    server.join()


def test_a_request_that_is_still_on_its_way_is_not_taken_for_lost(client: Any, fake: FakeServer) -> None:
    client.stream("x")
    other = fake.take()
    stream = client.stream("y")
    fake.say("alive", ids=[other])
    fake.answer(fake.take())
    assert client.text(stream) == "a"


def test_a_request_open_while_the_server_is_killed_and_started_again_fails_though_others_are_served(
    kind: Any, start_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"ipc://{tmp_path}/door"
    server = start_server(zmq=endpoint).wait_ready()
    with contextlib.closing(kind(endpoint)) as client:
        lost = client.stream("abc")
        while server.report()["running"] != 1:
            time.sleep(0.01)
        server.kill()
        meanwhile = client.stream("mno", SHORT)
        server = start_server(zmq=endpoint).wait_ready()
        assert client.text(meanwhile) == "mnomno"
        other = client.stream("xyz", SHORT)
        monkeypatch.setattr("radixkv.server.client.SILENCE_SECONDS", 1.0)
        with pytest.raises(Unavailable, match="no sign of life"):
            client.text(lost)
        assert client.text(other) == "xyzxyz"
        server.wait_idle()


class Wire:
    """A TCP connection to ``port`` through which bytes go until it is cut, when neither end hears of it."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        self.cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        self._listener.close()
        far = socket.create_connection(("127.0.0.1", self._target))
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.cut.is_set():
                    sink.sendall(data)


def test_a_connection_whose_other_end_has_vanished_is_made_anew(
    kind: Any, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.server.client.HEARTBEAT_MS", 100)
    wire = Wire(int(fake.endpoint.rpartition(":")[2]))
    with contextlib.closing(kind(f"tcp://127.0.0.1:{wire.port}")) as client:
        first = client.stream("x")
        fake.answer(fake.take())
        assert client.text(first) == "a"
        wire.cut.set()
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(f"tcp://127.0.0.1:{wire.port}")  # what comes in its place
            replacement = FakeServer(router)
            time.sleep(0.5)
            later = client.stream("y")
            if not router.poll(2000):  # what was on its way when the line was cut is lost
                later = client.stream("z")
            replacement.answer(replacement.take())
            assert client.text(later) == "a"


@pytest.mark.parametrize("version", [b"radixkv/0", b"radixkv/2"])
def test_a_client_of_another_version_is_told_both_versions(
    kind: Any, server: Any, monkeypatch: pytest.MonkeyPatch, version: bytes
) -> None:
    monkeypatch.setattr("radixkv.server.messages.HEADER", version)
    with contextlib.closing(kind(zmq_endpoint(server))) as client:
        with pytest.raises(UnsupportedVersion, match=rf"radixkv/1 is spoken here.*the message is {version.decode()}"):
            client.info()
        monkeypatch.undo()
        assert client.info().versions == ["radixkv/1"]


def test_a_server_of_another_version_is_named_with_both_versions(client: Any, fake: FakeServer) -> None:
    stream = client.stream("x")
    body = {"type": "failed", "id": fake.take(), "kind": "unsupported_version", "message": "only radixkv/2", "more": 1}
    fake.say_bytes(msgspec.msgpack.encode(body), b"radixkv/2")
    with pytest.raises(UnsupportedVersion, match="only radixkv/2"):
        client.text(stream)
    fake.take()  # the client cancels it
    stream = client.stream("x")
    fake.say_bytes(msgspec.msgpack.encode({"type": "piece", "id": fake.take()}), b"radixkv/2")
    with pytest.raises(UnsupportedVersion, match=r"radixkv/1 is spoken here.*the message is radixkv/2"):
        client.text(stream)


def test_a_request_carries_every_field_and_no_default(client: Any, fake: FakeServer) -> None:
    client.stream("x")
    fake.take()
    assert fake.request == {"type": "submit", "id": fake.request["id"], "prompt": "x", "params": {"max_tokens": 2000}}
    options = {"n": 2, "namespace": "a", "model": "m", "retention": [2, 60.0], "tools": [{"name": "now"}], "tool_choice": "now",
               "parallel_tool_calls": False}  # fmt: skip
    assert options.keys() == Options.__annotations__.keys()
    client.stream([{"role": "user", "content": "x"}], **options)
    fake.take()
    assert options.items() <= fake.request.items()
    with pytest.raises(TypeError, match="'namespaces' is no option of a request"):
        client.stream("x", namespaces="a")


def test_a_bad_retention_or_model_is_refused_by_name(kind: Any, server: Any) -> None:
    with contextlib.closing(kind(zmq_endpoint(server))) as client:
        with pytest.raises(InvalidRequest, match="retention: Expected `array` of length 2, got 1"):
            client.stream("x", retention=(1,))
        with pytest.raises(InvalidRequest, match=r"retention\.priority must be an integer from 1 to 100"):
            client.text(client.stream("x", retention=(0, 60)))
        with pytest.raises(UnknownModel, match="gpt-5"):
            client.text(client.stream("x", model="gpt-5"))
        assert client.text(client.stream("x", SHORT, retention=(1, 60), namespace="kept")) == "xxxxxx"
