from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.cache.retention import Retention
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import RequestOutput, TokenLogprobs
from radixkv.server.errors import InvalidRequest, ServerError, Unavailable, UnsupportedVersion, error_of
from radixkv.server.messages import (
    HEADER,
    Abort,
    Alive,
    Cancel,
    ChatMessage,
    Chunk,
    Delta,
    Failed,
    Finished,
    FromWorker,
    Generate,
    GetStats,
    Message,
    Parser,
    Ready,
    Request,
    Submit,
    TextPart,
    ToClient,
    ToFrontend,
    Tokens,
    ToWorker,
    Usage,
    frames,
    id_of,
)
from radixkv.structured_outputs import StructuredOutputs

PARSERS: list[Parser[Any]] = [Parser(ToWorker), Parser(FromWorker), Parser(ToFrontend)]


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (ToWorker, Generate(request_id="a", token_ids=[1, 2], params=SamplingParams(temperature=0, stop=("x",)), namespace="n")),
        (ToWorker, Abort(request_ids=["a", "b"])),
        (ToWorker, GetStats(id="1")),
        (FromWorker, Ready(stats={"a": 1, "b": {"c": 0.5}})),
        (
            FromWorker,
            Tokens(
                outputs=[
                    RequestOutput(
                        request_id="a",
                        token_ids=[3],
                        logprobs=[TokenLogprobs(3, -0.5, [(3, -0.5), (4, -float("inf"))])],
                        finish_reason="stop",
                        num_prompt_tokens=2,
                        num_cached_tokens=1,
                    )
                ]
            ),
        ),
        (ToFrontend, Submit(id="7", prompt="grüße", n=2)),
        (ToFrontend, Submit(id="7", messages=[ChatMessage(role="user", content=[TextPart("a"), TextPart("b")])])),
        (ToFrontend, Cancel(id="7")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_arrives_as_it_was_sent(union: Any, message: Any) -> None:
    assert Parser(union)(frames(message)) == message


@given(st.lists(st.binary(max_size=64), max_size=4) | st.binary(max_size=256).map(lambda body: [HEADER, body]))
@settings(max_examples=100, deadline=None)
def test_garbage_is_refused_with_an_invalid_request_and_nothing_else(received: list[bytes]) -> None:
    for parse in PARSERS:
        with pytest.raises(InvalidRequest):
            parse(received)
    assert isinstance(id_of(received), str)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["generate", "abort", "submit", "cancel", "get_stats", "ready", "tokens", "failed", "nonsense"]),
    st.dictionaries(st.sampled_from(["id", "request_id", "prompt", "token_ids", "params", "n", "outputs", "x"]), values),
)
@settings(max_examples=100, deadline=None)
def test_a_message_of_wrong_types_is_refused_or_means_what_it_says(tag: str, fields: dict[str, Any]) -> None:
    received = [HEADER, msgspec.msgpack.encode({"type": tag, **fields})]
    for parse in PARSERS:
        try:
            message = parse(received)
        except InvalidRequest:
            continue
        assert message.__struct_config__.tag == tag
        assert not isinstance(message, Request) or set(fields) <= set(message.__struct_fields__)


def test_a_message_nested_beyond_reason_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="recursion"):
        PARSERS[1]([HEADER, b"\x83\xa4type\xa5stats\xa2id\xa11\xa5stats\x81\xa1a" + b"\x91" * 100_000])


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="temprature"):
        PARSERS[2]([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "1", "params": {"temprature": 0}})])


@pytest.mark.parametrize(
    ("union", "message"),
    [
        (ToClient, Alive(ids=["1"])),
        (ToClient, Chunk(id="1", delta=Delta(index=0, text="a", token_ids=[3]))),
        (ToClient, Finished(id="1", usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1))),
        (ToClient, Failed(id="1", kind="internal", message="x")),
        (FromWorker, Ready(stats={})),
        (FromWorker, Tokens(outputs=[RequestOutput(request_id="1", token_ids=[3], num_prompt_tokens=2, num_cached_tokens=1)])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_newer_server_adds_to_an_answer_is_ignored(union: Any, message: Message) -> None:
    def grown(value: Any) -> Any:
        """With a field more in every map."""
        if isinstance(value, list):
            return [grown(item) for item in value]
        return {key: grown(item) for key, item in value.items()} | {"new": 1} if isinstance(value, dict) else value

    body = msgspec.msgpack.encode(grown(msgspec.to_builtins(message)))
    parsed = Parser(union)([HEADER, body])
    assert parsed == (Ready(stats={"new": 1}) if isinstance(message, Ready) else message)


def test_a_message_of_another_version_is_refused() -> None:
    with pytest.raises(UnsupportedVersion, match=r"radixkv/1 is spoken here, by radixkv [0-9.]+, and the message is radixkv/2"):
        PARSERS[0]([b"radixkv/2", msgspec.msgpack.encode({"type": "get_stats", "id": "1"})])


def test_the_id_of_a_message_that_does_not_parse_is_found() -> None:
    assert id_of([HEADER, msgspec.msgpack.encode({"type": "submit", "id": "42", "prompt": 3.5})]) == "42"
    assert id_of([HEADER, msgspec.msgpack.encode({"type": "submit", "id": 42})]) == ""
    assert id_of([]) == ""


def test_an_error_keeps_its_kind_over_the_wire() -> None:
    sent = Unavailable("gone", param="p")
    received = Parser[Any](FromWorker)(frames(Failed.of(sent, "1"))).error
    assert (type(received), received.message, received.param) == (Unavailable, "gone", "p")
    assert type(error_of("a kind from the future", "x")) is ServerError


def test_an_invalid_request_names_the_field_that_its_text_begins_with() -> None:
    assert InvalidRequest.of(ValueError("max_tokens must be at least 1, got 0")).param == "max_tokens"
    assert InvalidRequest.of(ValueError("logit_bias[7] must be between -100 and 100, got 1000")).param == "logit_bias"
    assert InvalidRequest.of(ValueError("Oops")).param is None


def test_a_submission_carries_a_form_and_a_retention() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "null"}}}))
    message = Submit(id="1", prompt="x", params=params, retention=Retention(2, 5.0))
    assert Parser(ToFrontend)(frames(message)) == message
    assert msgspec.msgpack.decode(frames(message)[1])["retention"] == [2, 5.0]
