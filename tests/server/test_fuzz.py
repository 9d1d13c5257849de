"""Inputs that nobody in his right mind would send: each is answered or refused, none is a 5xx, and afterwards all is as before."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixkv.server.messages import HEADER, MAX_MESSAGE_BYTES, Failed, GetStats, Parser, Stats, ToClient, frames

BATCH = 10
EXAMPLES = pytest.mark.parametrize(
    "examples", [pytest.param(25, id="quick"), pytest.param(1000, id="many", marks=pytest.mark.full)]
)

ODD_TEXTS = st.sampled_from(["", "x", "\x00", "é🙂", "{{ 7 }}", "<|im_end|>", "a" * 5000]) | st.text(max_size=20)
ODD_NUMBERS = st.sampled_from([-1, 0, 1, 2, 3.5, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, float("nan"), float("inf")])
SCALARS = st.none() | st.booleans() | ODD_NUMBERS | ODD_TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ODD_TEXTS, inner, max_size=4), max_leaves=8
)

PLAUSIBLE = st.sampled_from([0, 1, 2, 0.5, True, False, None, "x", ["x"], [1, 2], {}, [], {"1": 1}]) | VALUES
PROMPTS = st.sampled_from(["abc", "é🙂", ["a", "b"], [1, 2], [[1], [2, 3]]])
MESSAGE = st.sampled_from([{"role": "user", "content": "hi"}, {"role": "system", "content": [{"type": "text", "text": "x"}]}])
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=3) | st.lists(
    st.builds(
        lambda message, odd: message | odd, MESSAGE, st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), PLAUSIBLE)
    ),
    max_size=3,
)


def mutated(valid: st.SearchStrategy[dict[str, Any]], fields: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """What is valid, with up to two fields set to something else."""
    return st.builds(lambda known, odd: known | odd, valid, st.dictionaries(st.sampled_from(fields), PLAUSIBLE, max_size=2))


def broken(encoded: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """What is encoded, whole, cut off, or with a byte changed."""
    cut = st.builds(lambda data, end: data[:-end], encoded, st.integers(1, 30))
    flipped = st.builds(
        lambda data, at, byte: data[: at % len(data)] + bytes([byte]) + data[at % len(data) + 1 :],
        encoded,
        st.integers(0, 999),
        st.integers(0, 255),
    )
    return encoded | encoded | cut | flipped


# --- HTTP --------------------------------------------------------------------------------------------------------------------

FIELDS = ("model", "prompt", "messages", "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty",
          "logit_bias", "stream", "stream_options", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos",
          "namespace", "cache_salt", "logprobs", "prompt_logprobs", "top_logprobs", "echo", "best_of", "suffix",
          "tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "retention", "user")  # fmt: skip
LIMITS = st.sampled_from([1, 1, 1, 2, 0, 2**31, 2**63, 10**30, 1.5, "1"])  # never none: a chat would go on for a thousand tokens
COMPLETIONS = mutated(st.fixed_dictionaries({"prompt": PROMPTS, "max_tokens": LIMITS}), FIELDS)
CHATS = mutated(st.fixed_dictionaries({"messages": MESSAGES, "max_tokens": LIMITS}), FIELDS)
ODD_BODIES = st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode())


def to(path: str, requests: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[tuple[str, bytes]]:
    encoded = requests.map(lambda body: json.dumps(body).encode())
    return st.tuples(st.just(path), broken(encoded) | broken(encoded) | ODD_BODIES)


ITEMS = st.sampled_from([
    {"role": "user", "content": "hi"}, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
])  # fmt: skip
RESPONSES = mutated(
    st.fixed_dictionaries({"input": st.just("hi") | st.lists(ITEMS, max_size=3), "max_output_tokens": LIMITS}),
    ("input", "instructions", "text", "tools", "tool_choice", "include", "top_logprobs", "metadata", "stream", "stream_options",
     "reasoning", "store", "truncation", "temperature", "namespace", "structured_outputs"),
)  # fmt: skip
TOKENIZES = mutated(
    st.fixed_dictionaries({"prompt": PROMPTS}) | st.fixed_dictionaries({"messages": MESSAGES}),
    ("model", "prompt", "messages", "tools", "add_generation_prompt", "add_special_tokens", "return_token_strs"),
)
DETOKENIZES = mutated(st.fixed_dictionaries({"tokens": PLAUSIBLE}), ("model", "tokens"))

HTTP_INPUTS = (
    to("/v1/completions", COMPLETIONS)
    | to("/v1/chat/completions", CHATS)
    | to("/v1/responses", RESPONSES)
    | to("/tokenize", TOKENIZES)
    | to("/detokenize", DETOKENIZES)
)

# --- ZeroMQ ------------------------------------------------------------------------------------------------------------------

IDS = st.sampled_from(["1", "2", "3", "", "x" * 129])
PARAMS = st.just({"max_tokens": 1}) | st.dictionaries(st.sampled_from(FIELDS), PLAUSIBLE, max_size=2).map(
    lambda odd: odd | {"max_tokens": 2}
)
SUBMITS = mutated(
    st.fixed_dictionaries({"type": st.just("submit"), "id": IDS, "prompt": PROMPTS, "params": PARAMS})
    | st.fixed_dictionaries({"type": st.just("submit"), "id": IDS, "messages": MESSAGES, "params": PARAMS}),
    ("n", "namespace", "model", "prompt", "messages", "id", "tools", "tool_choice", "parallel_tool_calls", "retention", "surprise"),
)
OTHERS = mutated(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["cancel", "get_info", "get_stats", "reset_cache", "generate", "chunk", ""]), "id": IDS}
    ),
    ("id", "type", "surprise"),
)


def packed(value: object) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # an integer that MessagePack can't carry
        return b"\xc1"


PACKED = broken((SUBMITS | OTHERS).map(packed)) | st.binary(max_size=100) | VALUES.map(packed)
ZMQ_INPUTS = PACKED.map(lambda body: [HEADER, body]) | st.lists(st.binary(max_size=50), min_size=1, max_size=4)


def fuzz(examples: int, inputs: st.SearchStrategy[Any], check: Callable[[list[Any]], None]) -> int:
    """Have ``check`` look at batches of inputs; returns how many inputs there were."""
    count = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(inputs, min_size=BATCH, max_size=BATCH))
    def run(batch: list[Any]) -> None:
        nonlocal count
        count += len(batch)
        check(batch)

    run()
    return count


def megabytes(server: Any) -> float:
    """Resident memory of the frontend."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture
def unharmed(server: Any) -> Iterator[Any]:
    """A server that must be as before afterwards: the same processes, nothing held, nothing in the log."""
    logged = len(server.log)
    pids = [server.process.pid, *server.worker_pids]
    yield server
    server.wait_idle()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "abc"
    assert [server.process.pid, *server.worker_pids] == pids
    assert "Traceback" not in server.log[logged:]
    assert "ERROR" not in server.log[logged:]


def warm(server: Any, examples: int, inputs: st.SearchStrategy[Any], check: Callable[[list[Any]], None]) -> tuple[int, float]:
    """Fuzz a tenth, then the rest; the count of inputs, and what memory grew by in the rest, in MB."""
    count = fuzz(examples // 10, inputs, check)
    before = megabytes(server)
    count += fuzz(examples - examples // 10, inputs, check)
    return count, megabytes(server) - before


@EXAMPLES
def test_no_http_body_is_answered_with_a_5xx(unharmed: Any, examples: int, record_property: Any) -> None:
    statuses: dict[int, int] = {}

    def check(batch: list[tuple[str, bytes]]) -> None:
        # Another for each batch: the server closes one that is idle while hypothesis thinks.
        connection = http.client.HTTPConnection(unharmed.url.removeprefix("http://"), timeout=20)
        for path, body in batch:
            connection.request("POST", path, body)
            response = connection.getresponse()
            answer = response.read()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert response.status < 500, answer
            if response.status >= 400:
                assert json.loads(answer)["error"]["message"]
        connection.close()

    count, growth = warm(unharmed, examples, HTTP_INPUTS, check)
    record_property("finding", f"fuzzing: {count:,} HTTP bodies, answers {statuses}, memory {growth:+.1f} MB")
    assert statuses[200] > count / 20
    assert statuses[400] > count / 4
    assert growth < 32


@EXAMPLES
def test_no_zeromq_message_is_answered_with_an_internal_error(unharmed: Any, examples: int, record_property: Any) -> None:
    endpoint = next(word for word in unharmed.log.split() if word.startswith("tcp://"))
    parse: Parser[Any] = Parser(ToClient)
    kinds: dict[str, int] = {}
    numbers = itertools.count()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)

        def check(batch: list[list[bytes]]) -> None:
            for parts in batch:
                dealer.send_multipart(parts)
            last = f"the last of batch {next(numbers)}"
            dealer.send_multipart(frames(GetStats(id=last)))
            while True:
                assert dealer.poll(20_000), "no answer"
                message = parse(dealer.recv_multipart())
                kind = message.kind if isinstance(message, Failed) else type(message).__name__.lower()
                kinds[kind] = kinds.get(kind, 0) + 1
                assert kind != "internal", message
                if isinstance(message, Stats) and message.id == last:
                    return

        count, growth = warm(unharmed, examples, ZMQ_INPUTS, check)
    record_property("finding", f"fuzzing: {count:,} ZeroMQ messages, answers {kinds}, memory {growth:+.1f} MB")
    assert kinds["invalid_request"] > count / 4
    assert kinds["finished"] > count / 100
    assert growth < 32


def test_oversized_messages_and_bytes_that_are_no_protocol_harm_nobody(unharmed: Any) -> None:
    endpoint = next(word for word in unharmed.log.split() if word.startswith("tcp://"))
    for extra in (1, 2**20):
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(endpoint)
            dealer.send_multipart([HEADER, b"x" * (MAX_MESSAGE_BYTES + extra)])
            assert not dealer.poll(200)
    response = httpx.post(f"{unharmed.url}/v1/completions", content=b'"' + b"x" * 2**24 + b'"')
    assert response.status_code == 413
    ports = [int(address.rpartition(":")[2]) for address in (unharmed.url, endpoint)]

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.sampled_from(ports), st.binary(min_size=1, max_size=300))
    def send(port: int, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(data)

    send()
