from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.grammar import check_grammar
from radixkv.server.access import ANYONE
from radixkv.server.errors import InvalidRequest
from radixkv.server.openai.responses import ResponsesRequest
from radixkv.server.openai.schema import ChatRequest, CompletionRequest, parse
from radixkv.structured_outputs import StructuredOutputs

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps(CHAT | fields).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ([], []), ([[]], [[]])],
)
def test_a_prompt_may_be_text_texts_token_ids_or_lists_of_them(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_a_prompt_of_mixed_kinds_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt") as caught:
        _ = completion(prompt=["a", 1]).prompts
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"n": True}, "n"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"stream": "yes"}, "stream"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2.5}, "best_of"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"temprature": 1}, "temprature"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


def test_a_missing_prompt_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt is required") as caught:
        parse(b"{}", CompletionRequest)
    assert caught.value.param == "prompt"


def test_what_changes_nothing_is_accepted() -> None:
    completion(
        user="me", best_of=1, echo=False, suffix="", logit_bias=None, metadata={"a": "b"},
        service_tier="auto", prompt_cache_key="k",
    )  # fmt: skip
    request = chat(
        response_format={"type": "text"}, tools=[], tool_choice="none", store=False, seed=None, stream_options=None,
        messages=[{"role": "assistant", "content": "x", "refusal": None, "tool_calls": [], "annotations": [], "audio": None}],
    )  # fmt: skip
    assert request.messages[0].text == "x"


def test_an_answer_that_the_openai_package_parsed_goes_back_as_it_came() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}}}
    request = chat(messages=[{"role": "assistant", "content": None, "parsed": {"a": 1}, "tool_calls": [call]}])
    assert request.messages[0].tool_calls is not None
    assert request.messages[0].tool_calls[0].function.name == "f"


def test_sampling_fields_reach_the_engine_under_their_names() -> None:
    params = completion(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, seed=-5, stop="end", logprobs=3, stop_token_ids=[4], ignore_eos=True, logit_bias={"12": -1.5},
    ).sampling_params  # fmt: skip
    assert msgspec.structs.asdict(params) == {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": -5, "stop": ("end",), "logprobs": 3, "stop_token_ids": (4,),
        "ignore_eos": True, "logit_bias": {12: -1.5}, "structured_outputs": None, "prompt_logprobs": None,
    }  # fmt: skip


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
    assert chat().sampling_params.logprobs is None
    assert chat(logprobs=True).sampling_params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling_params.logprobs == 5
    with pytest.raises(InvalidRequest, match="top_logprobs"):
        _ = chat(top_logprobs=5).sampling_params


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_completion_tokens=3, max_tokens=9).sampling_params.max_tokens == 3
    assert chat(max_tokens=9).sampling_params.max_tokens == 9


def test_a_cache_salt_keeps_caches_apart_and_itself_secret() -> None:
    one, other = completion(cache_salt="secret").cache_namespace(ANYONE), completion(cache_salt="other").cache_namespace(ANYONE)
    assert one != other
    assert "secret" not in one
    assert completion(namespace="tenant").cache_namespace(ANYONE) == "tenant"
    with pytest.raises(InvalidRequest, match="cache_salt"):
        _ = completion(namespace="tenant", cache_salt="x").cache_namespace(ANYONE)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_reaches_the_check_that_names_its_field(text: str) -> None:
    request = parse(b'{"prompt": "x", "temperature": %s}' % text.encode(), CompletionRequest)
    with pytest.raises(ValueError, match="temperature must be between 0 and 100"):
        request.sampling_params.validate()


@pytest.mark.parametrize(
    "body",
    [b"", b"garbage", b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": "x"', b"\xff\xfe", b"[]",
     b'"x"', b"1" * 5000],
    ids=lambda body: repr(body[:16]),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="body"):
        parse(body, CompletionRequest)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS: list[Any] = [CompletionRequest, ChatRequest, ResponsesRequest]
names = st.sampled_from([*(name for kind in KINDS for name in kind.__struct_fields__), "user", "store", "reasoning"])


@given(st.dictionaries(names, json_values, max_size=6))
@settings(max_examples=100, deadline=None)
def test_no_body_raises_anything_but_an_invalid_request(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    for kind in KINDS:
        try:
            request: Any = parse(body, kind)
            if isinstance(request, ResponsesRequest):
                request = request.chat
            _ = request.sampling_params, request.cache_namespace(ANYONE), request.usage_chunks
            if isinstance(request, CompletionRequest):
                _ = request.prompts
        except InvalidRequest as error:
            msgspec.json.encode(error.message)


def test_schemas_nested_beyond_reason_are_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(400):
        schema = {"type": "array", "items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    fields: list[dict[str, Any]] = [
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
    ]
    for each in fields:
        with pytest.raises(InvalidRequest, match="nested at most 64 deep"):
            chat(**each)
    with pytest.raises(ValueError, match="structured_outputs"):  # a library's and a ZeroMQ client's come another way
        check_grammar(StructuredOutputs(json=schema))
