"""The ZeroMQ door over real processes, through its clients and through sockets that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from radixkv.sampling_params import SamplingParams
from radixkv.server.client import AsyncClient, Client
from radixkv.server.errors import InvalidRequest, Unavailable, UnknownModel
from radixkv.server.messages import HEADER, Alive, Cancel, Chunk, Failed, Finished, Parser, Submit, ToClient, frames
from radixkv.server.zmq_api import check_endpoint

PROMPT = "the quick brown fox, grüße 🙂 日本語"
LONG = SamplingParams(max_tokens=2000)


@pytest.fixture(scope="module")
def endpoint(server: Any) -> str:
    return next(word for word in server.log.split() if word.startswith("tcp://"))


@pytest.fixture
def client(endpoint: str) -> Iterator[Client]:
    with Client(endpoint, timeout=20) as client:
        yield client


@pytest.fixture
def dealer(endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        yield dealer


def message(dealer: zmq.Socket[bytes]) -> Any:
    assert dealer.poll(5000), "no answer"
    return Parser[Any](ToClient)(dealer.recv_multipart())


def reply(dealer: zmq.Socket[bytes]) -> Any:
    """The next message but for those that come once a second, whatever is asked."""
    while isinstance(answer := message(dealer), Alive):
        pass
    return answer


def reply_or_none(dealer: zmq.Socket[bytes]) -> Any:
    """None once nothing came for a while."""
    while dealer.poll(50):
        if not isinstance(answer := message(dealer), Alive):
            return answer
    return None


def test_a_text_is_continued_whole_or_streamed(client: Client, tiny_model_tools: dict[str, Any]) -> None:
    count = len(tiny_model_tools["make_tokenizer"]().encode(PROMPT).ids)
    whole = client.generate(PROMPT, SamplingParams(max_tokens=2 * count, logprobs=1))
    assert whole.text == PROMPT * 2
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].token_ids) == len(whole.choices[0].logprobs or ()) == whole.usage.completion_tokens == 2 * count
    stream = client.stream(PROMPT, SamplingParams(max_tokens=2 * count))
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert not any("\ufffd" in delta.text for delta in deltas)
    assert stream.usage is not None
    assert stream.usage.cached_tokens == count - 1


def test_token_ids_and_chats_are_taken_too(client: Client) -> None:
    for ids in ([65, 66, 67], [np.int32(65), np.int64(66), 67], np.array([65, 66, 67])):
        assert client.generate(ids, SamplingParams(max_tokens=4)).choices[0].token_ids == [65, 66, 67, 65]  # type: ignore[arg-type]
    answer = client.generate([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=12))
    assert answer.text.startswith("user\nhi")


NOW: dict[str, Any] = {"name": "now", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("choice", ["auto", "none", "required", "now"])
def test_a_chat_is_told_of_its_tools_and_what_it_calls_is_found(client: Client, choice: str) -> None:
    messages = [{"role": "user", "content": f"a{CALL}b"}]
    (answer,) = client.generate(messages, SamplingParams(max_tokens=300), tools=[NOW], tool_choice=choice).choices
    assert ('{"type": "function", "function": {"name": "now"' in answer.text) is (choice != "none")
    text, calls = answer.without_calls()
    assert CALL not in text
    assert [(call.function.name, call.function.arguments) for call in calls] == [("now", "{}")] * answer.text.count(CALL)
    turns = [*messages, {"role": "assistant", "content": text, "tool_calls": calls},
             *({"role": "tool", "tool_call_id": call.id, "content": "noon"} for call in calls)]  # fmt: skip
    assert client.generate(turns, SamplingParams(max_tokens=500)).text.count("<tool_response>\nnoon") >= bool(calls)


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ("x", {"tools": [NOW]}, "tools"),
        ([{"role": "user", "content": "x"}], {"tools": [NOW], "tool_choice": "later"}, "tool_choice"),
        ([{"role": "user", "content": "x"}], {"tools": [NOW, NOW]}, "tools"),
        ([{"role": "user", "content": "x"}], {"tools": [{"name": "no spaces"}]}, "tools"),
        ([{"role": "user", "content": "x"}], {"tools": [NOW | {"strict": True, "parameters": {"type": "x"}}]}, "tools"),
        ([{"role": "user", "content": "x"}], {"tool_choice": "required"}, "tool_choice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_tools_are_refused_by_name(client: Client, prompt: Any, options: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, **options)
    assert caught.value.param == param


def test_n_and_stop_strings_work_as_over_http(client: Client) -> None:
    answer = client.generate("abcdefgh", SamplingParams(max_tokens=500, seed=0, stop=("ef",)), n=2)
    assert [choice.text for choice in answer.choices] == ["abcd", "bcd"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]


def test_streams_of_one_client_may_be_read_in_any_order(client: Client) -> None:
    first, second = client.stream("abc", SamplingParams(max_tokens=30)), client.stream("xyz", SamplingParams(max_tokens=30))
    assert "".join(delta.text for delta in second) == "xyz" * 10
    assert "".join(delta.text for delta in first) == "abc" * 10


def test_a_cancelled_stream_ends_and_its_blocks_are_back(client: Client, server: Any) -> None:
    with client.stream("abc", LONG) as stream:
        next(iter(stream))
        assert client.stats()["running"] == 1
    assert list(stream) == []
    began = time.monotonic()
    server.wait_idle()
    assert time.monotonic() - began < 3


def test_a_client_that_hangs_up_gets_its_requests_aborted(endpoint: str, server: Any) -> None:
    with Client(endpoint) as client:
        next(iter(client.stream("abc", LONG)))
        client.stream("abcd", LONG)
    began = time.monotonic()
    server.wait_idle()
    assert time.monotonic() - began < 3


def test_a_request_that_takes_longer_than_the_timeout_is_given_up(endpoint: str, server: Any) -> None:
    with Client(endpoint, timeout=0.3) as client, pytest.raises(TimeoutError, match=r"0\.3 s"):
        client.generate("abc", LONG)
    server.wait_idle()


def test_a_server_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.server.client.SILENCE_SECONDS", 0.3)
    with Client("tcp://127.0.0.1:9") as client, pytest.raises(Unavailable, match="no sign of life"):
        client.stats()

    async def ask() -> None:
        async with AsyncClient("tcp://127.0.0.1:9") as client:
            await client.generate("x")

    with pytest.raises(Unavailable, match="no sign of life"):
        asyncio.run(ask())


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("timeout", "error"), [(0.3, TimeoutError), (None, Unavailable)])
def test_a_server_that_takes_no_more_messages_blocks_nobody_for_longer_than_an_answer_would(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, error: type[Exception]
) -> None:
    monkeypatch.setattr("radixkv.server.client.SILENCE_SECONDS", 0.3)
    with Client("tcp://127.0.0.1:9", timeout=timeout) as client:
        streams = [client.stream("x") for _ in range(1000)]  # as many as libzmq keeps for a peer that is not there
        with pytest.raises(error):
            client.stream("x")
        streams[0].cancel()


def test_closing_an_async_client_leaves_the_event_loop_free() -> None:
    async def close() -> int:
        client = AsyncClient("tcp://127.0.0.1:9")
        client.stream("x")  # something that the socket lingers for
        closing = asyncio.create_task(client.close())
        turns = 0
        while not closing.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    assert asyncio.run(close()) > 5


def test_the_async_client_runs_many_requests_at_once(endpoint: str, server: Any) -> None:
    async def work() -> None:
        async with AsyncClient(endpoint, timeout=20) as client:
            prompts = [f"request {i:03}." for i in range(40)]
            answers = await asyncio.gather(*(client.generate(prompt, SamplingParams(max_tokens=30)) for prompt in prompts))
            assert all((prompt * 9).startswith(answer.text) for prompt, answer in zip(prompts, answers, strict=True))
            assert (await client.stats())["running"] == 0
            await client.reset_cache()
            # Cancelling the task that waits cancels the request.
            task = asyncio.create_task(client.generate("abc", LONG))
            await asyncio.sleep(0.2)
            assert (await client.stats())["running"] == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            async with client.stream("abc", LONG) as stream:
                async for _ in stream:
                    break
            with pytest.raises(InvalidRequest, match="max_tokens"):
                await client.generate("x", SamplingParams(max_tokens=0))

    asyncio.run(work())
    server.wait_idle()


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ("", {}, "prompt"),
        ([], {}, "prompt"),
        ([10**30], {}, None),
        ("\ud800", {}, None),
        ([2**63], {}, "prompt"),
        (b"Hello", {}, "prompt"),
        (None, {}, "prompt"),
        ([65, "x"], {}, "prompt"),
        ([0.5], {}, "prompt"),
        ([-1], {}, "prompt"),
        ("x " * 3000, {}, "prompt"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"max_tokens": 5000}, "max_tokens"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"stop": ("",)}, "stop"),
        ([{"role": "wizard", "content": "x"}], {}, "messages"),
        ([{"role": "user"}], {}, "messages"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_input_is_refused_naming_the_field(client: Client, prompt: Any, fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate(prompt, SamplingParams(**fields))
    assert caught.value.param == param
    assert client.generate("abc", SamplingParams(max_tokens=3)).text == "abc"


def test_an_unknown_model_is_refused(dealer: zmq.Socket[bytes]) -> None:
    dealer.send_multipart(frames(Submit(id="1", prompt="x", model="gpt-5")))
    assert isinstance(reply(dealer).error, UnknownModel)


@pytest.mark.parametrize(
    ("parts", "id"),
    [
        ([b"garbage"], ""),
        ([b"a", b"b", b"c"], ""),
        ([HEADER, b"\xc1\xff\x00"], ""),
        ([HEADER, b""], ""),
        ([HEADER, msgspec.msgpack.encode({"type": "launch_missiles", "id": "7"})], "7"),
        ([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "8", "prompt": 3.5})], "8"),
        ([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "9", "prompt": "x", "surprise": 1})], "9"),
        ([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "10"})], "10"),
        ([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "", "prompt": "x"})], ""),
        ([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "11", "prompt": b"\xff"})], "11"),
        ([HEADER, b"\x83\xa4type\xa6submit\xa2id\xa212\xa6prompt\xa2\xff\xfe"], ""),
        ([b"radixkv/", msgspec.msgpack.encode({"type": "get_stats", "id": "13"})], "13"),
    ],
)
def test_a_message_that_makes_no_sense_gets_an_error_reply(dealer: zmq.Socket[bytes], parts: list[bytes], id: str) -> None:
    dealer.send_multipart(parts)
    answer = reply(dealer)
    assert isinstance(answer, Failed)
    assert (answer.kind, answer.id) == ("invalid_request", id)


def test_while_requests_are_open_the_server_names_them_all_once_a_second(dealer: zmq.Socket[bytes], server: Any) -> None:
    for id in ("1", "2"):
        dealer.send_multipart(frames(Submit(id=id, prompt="abc", params=LONG)))
    # The first may still be without the second.
    while not isinstance(answer := message(dealer), Alive) or sorted(answer.ids) != ["1", "2"]:
        pass
    for id in answer.ids:
        dealer.send_multipart(frames(Cancel(id=id)))
    server.wait_idle()


def test_the_id_of_an_open_request_is_refused(dealer: zmq.Socket[bytes], server: Any) -> None:
    for _ in range(2):
        dealer.send_multipart(frames(Submit(id="1", prompt="abc", params=LONG)))
    while not isinstance(answer := reply(dealer), Failed):
        pass
    assert "id '1' must not be that of an open request" in answer.message


def test_an_id_is_free_again_once_its_request_is_cancelled(dealer: zmq.Socket[bytes], server: Any) -> None:
    for _ in range(20):  # in the same breath: some are cancelled before they have begun
        dealer.send_multipart(frames(Submit(id="1", prompt="abc", params=LONG)))
        dealer.send_multipart(frames(Cancel(id="1")))
        while isinstance(answer := reply_or_none(dealer), Chunk):
            pass
        assert answer is None
    server.wait_idle()


def test_an_id_may_be_used_again_in_the_same_breath_as_it_is_cancelled(dealer: zmq.Socket[bytes], server: Any) -> None:
    for round in range(20):
        dealer.send_multipart(frames(Submit(id="1", prompt="abc", params=LONG)))
        if round % 2:  # half of them have begun when they are cancelled
            while not isinstance(reply(dealer), Chunk):
                pass
        dealer.send_multipart(frames(Cancel(id="1")))
        dealer.send_multipart(frames(Submit(id="1", prompt="xyz", params=SamplingParams(max_tokens=6))))
        text = ""
        while not isinstance(answer := reply(dealer), Finished):
            assert isinstance(answer, Chunk), answer
            text += answer.delta.text
        assert text.lstrip("abc") == "xyzxyz"  # the first request's last words may come before
    server.wait_idle()


def test_a_message_too_large_costs_its_sender_the_connection_and_nobody_else(endpoint: str, client: Client) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([HEADER, b"x" * (2**24 + 1)])
        assert not dealer.poll(300)
    assert client.generate("abc", SamplingParams(max_tokens=3)).text == "abc"


def test_bytes_that_are_no_zeromq_harm_nobody(endpoint: str, client: Client) -> None:
    host, port = endpoint.removeprefix("tcp://").split(":")
    for garbage in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\xff" + b"\x00" * 8 + b"\x7f" + b"\xff" * 100):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
    assert client.generate("abc", SamplingParams(max_tokens=3)).text == "abc"


@pytest.mark.parametrize(
    ("endpoint", "error", "text"),
    [
        ("tcp://0.0.0.0:5555", ValueError, "loopback"),
        ("tcp://*:5555", ValueError, "loopback"),
        ("tcp://10.0.0.1:5555", ValueError, "loopback"),
        ("tcp://example.org:5555", ValueError, "loopback"),
        ("tcp://127.0.0.1:99999", ValueError, "port must be between 0 and 65535, .* got tcp://127.0.0.1:99999"),
        ("tcp://127.0.0.1:65536", ValueError, "between 0 and 65535"),
        ("tcp://127.0.0.1:-1", ValueError, "between 0 and 65535"),
        ("tcp://127.0.0.1", ValueError, "between 0 and 65535"),
        ("tcp://[::1]:http", ValueError, "between 0 and 65535"),
        ("udp://127.0.0.1:5555", ValueError, "endpoint like"),
        ("ipc://", ValueError, "endpoint like"),
        ("ipc://@radixkv", ValueError, "ipc://@radixkv: an abstract socket has no permissions"),
        ("5555", ValueError, "endpoint like"),
        ("ipc:///no/such/directory/socket", OSError, "no directory"),
    ],
)
def test_an_endpoint_that_must_not_be_served_is_refused(endpoint: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_endpoint(endpoint)


def test_an_ipc_endpoint_never_deletes_a_file_nor_takes_a_socket_in_use(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(OSError, match="no socket"):
        check_endpoint(f"ipc://{precious}")
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(tmp_path / "taken"))
        taken.listen()
        with pytest.raises(OSError, match="taken"):
            check_endpoint(f"ipc://{tmp_path}/taken")
    check_endpoint(f"ipc://{tmp_path}/taken")  # left behind by a server that was killed


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555", "tcp://127.0.0.1:*", "tcp://127.0.0.1:65535"]
)
def test_loopback_endpoints_are_fine(endpoint: str) -> None:
    check_endpoint(endpoint)
