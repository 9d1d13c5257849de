"""A client written from docs/protocol.md alone: ZeroMQ, MessagePack, and nothing of radixkv."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

VERSION = b"radixkv/1"


class RawClient:
    """What somebody would write in another language."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, version: bytes = VERSION, **message: Any) -> None:
        self._socket.send_multipart([version, msgspec.msgpack.encode(message)])

    def receive(self) -> dict[str, Any]:
        """The next message that is not ``alive``."""
        while True:
            assert self._socket.poll(5000), "no answer"
            version, body = self._socket.recv_multipart()
            assert version == VERSION
            message: dict[str, Any] = msgspec.msgpack.decode(body)
            if message["type"] != "alive":
                return message

    def silent_for(self, seconds: float) -> bool:
        """Whether nothing comes but ``alive``."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._socket.poll(int(1000 * left) + 1):
                _, body = self._socket.recv_multipart()
                if msgspec.msgpack.decode(body)["type"] != "alive":
                    return False
        return True

    def text(self, id: str) -> tuple[str, dict[str, Any]]:
        """All of one answer of one choice, and its usage."""
        text = ""
        while (message := self.receive())["type"] == "chunk":
            assert message["id"] == id
            assert message["delta"]["index"] == 0
            text += message["delta"]["text"]
        assert (message["type"], message["id"]) == ("finished", id)
        return text, message["usage"]


@pytest.fixture
def client(server: Any) -> Iterator[RawClient]:
    endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        yield RawClient(socket)


def test_it_learns_who_serves_what(client: RawClient) -> None:
    client.send(type="get_info", id="hello")
    info = client.receive()
    assert (info["type"], info["id"]) == ("info", "hello")
    assert VERSION.decode() in info["versions"]
    assert info["max_model_len"] == 2048
    assert {"server", "model"} <= info.keys()


def test_it_generates_from_text_tokens_and_chats(client: RawClient) -> None:
    client.send(type="submit", id="1", prompt="xyz", params={"max_tokens": 6, "temperature": 0.0})
    text, usage = client.text("1")
    assert text == "xyz" * 2
    assert sum(usage.pop("missed").values()) == 3 - usage["cached_tokens"]
    assert usage == {"prompt_tokens": 3, "cached_tokens": usage["cached_tokens"], "completion_tokens": 6}
    client.send(type="submit", id="1", prompt=[65, 66], params={"max_tokens": 2, "logprobs": 1})
    chunk = client.receive()
    assert chunk["delta"]["token_ids"] == [65]
    assert chunk["delta"]["logprobs"] == [{"token_id": 65, "logprob": 0.0, "top": [[65, 0.0]]}]
    last = client.receive()
    assert last["delta"]["finish_reason"] == "length"
    assert client.receive()["type"] == "finished"
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    client.send(type="submit", id="2", messages=messages, params={"max_tokens": 7})
    assert client.text("2")[0] == "user\nhi"


def test_it_streams_several_requests_and_choices_at_once(client: RawClient) -> None:
    client.send(type="submit", id="a", prompt="abc", n=2, params={"max_tokens": 30, "seed": 0}, namespace="x", retention=[2, 60.0])
    client.send(type="submit", id="b", prompt="xyz", params={"max_tokens": 30, "stop": ["yz"]})
    texts: dict[tuple[str, int], str] = {}
    reasons = {}
    finished = set()
    while len(finished) < 2:
        message = client.receive()
        if message["type"] == "finished":
            finished.add(message["id"])
            continue
        delta = message["delta"]
        choice = message["id"], delta["index"]
        texts[choice] = texts.get(choice, "") + delta["text"]
        if "finish_reason" in delta:
            reasons[choice] = delta["finish_reason"]
    assert texts == {("a", 0): "abc" * 10, ("a", 1): "bca" * 10, ("b", 0): "x"}
    assert reasons == {("a", 0): "length", ("a", 1): "length", ("b", 0): "stop"}


def test_it_cancels(client: RawClient, server: Any) -> None:
    client.send(type="submit", id="1", prompt="abc", params={"max_tokens": 2000})
    assert client.receive()["type"] == "chunk"
    client.send(type="cancel", id="1")
    client.send(type="submit", id="2", prompt="x", params={"max_tokens": 1})
    while (message := client.receive())["id"] == "1":
        assert message["type"] == "chunk"
    assert (message["type"], message["delta"]["text"]) == ("chunk", "x")
    assert client.receive()["type"] == "finished"
    assert client.silent_for(0.2)
    server.wait_idle()


def test_it_gets_stats_and_empties_the_cache(client: RawClient) -> None:
    client.send(type="get_stats", id="1")
    assert client.receive()["stats"]["max_model_len"] == 2048
    client.send(type="reset_cache", id="2")
    assert client.receive() == {"type": "done", "id": "2"}


@pytest.mark.parametrize(
    ("message", "kind", "param"),
    [
        ({"type": "submit", "id": "7", "prompt": "x", "params": {"max_tokens": 0}}, "invalid_request", "max_tokens"),
        ({"type": "submit", "id": "7", "prompt": "x", "model": "gpt-5"}, "model_not_found", "model"),
        ({"type": "submit", "id": "7", "prompt": "x", "of_the_future": 1}, "invalid_request", None),
        ({"type": "of_the_future", "id": "7"}, "invalid_request", None),
    ],
    ids=lambda value: str(value)[:60],
)
def test_it_is_told_what_is_wrong(client: RawClient, message: dict[str, Any], kind: str, param: str | None) -> None:
    client.send(**message)
    failed = client.receive()
    assert (failed["type"], failed["id"], failed["kind"], failed.get("param")) == ("failed", "7", kind, param)
    if param is None:  # the server may be the older one
        assert "of_the_future" in failed["message"]
        assert "radixkv 0." in failed["message"]


@pytest.mark.parametrize("version", [b"radixkv/0", b"radixkv/2"])
def test_another_version_is_refused_naming_both(client: RawClient, version: bytes) -> None:
    client.send(version, type="get_info", id="1")
    failed = client.receive()
    assert (failed["type"], failed["id"], failed["kind"]) == ("failed", "1", "unsupported_version")
    assert version.decode() in failed["message"]
    assert VERSION.decode() in failed["message"]
