"""Tools, structured output, the Responses API and tokens through the ``openai`` package, with an engine that echoes.

What the user says comes back, after the template's words, so a user who writes a call gets that call.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": PARAMETERS}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(openai: OpenAI) -> str:
    return openai.models.list().data[0].id


def chat(model: str, content: str = CALL, **fields: Any) -> dict[str, Any]:
    """A request whose echo begins with ``content``, and goes on with what the model is told of the tools."""
    return {"model": model, "messages": [{"role": "system", "content": content}], "tools": TOOLS, "max_tokens": 120} | fields


def prompt_length(http: httpx.Client, messages: list[Any]) -> int:
    return int(http.post("/tokenize", json={"messages": messages}).json()["count"])


def test_calls_are_parsed_and_the_rest_is_content(openai: OpenAI, model: str) -> None:
    answer = openai.chat.completions.create(**chat(model))
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"x": 1})
    content = answer.choices[0].message.content or ""
    assert content.startswith("system\n\n# Tools\n\nYou may call"), "the call is cut out of the echo"
    assert answer.choices[0].finish_reason == "length"


def test_a_stream_adds_up_to_the_same_calls_and_content(openai: OpenAI, model: str) -> None:
    whole = openai.chat.completions.create(**chat(model)).choices[0].message
    with openai.chat.completions.stream(**chat(model)) as stream:
        events = list(stream)
        assert any(event.type == "tool_calls.function.arguments.delta" for event in events)
        snapshot = stream.current_completion_snapshot.choices[0].message
    assert snapshot.content == whole.content
    (call,), (streamed,) = whole.tool_calls or (), snapshot.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    assert streamed.id.startswith("call_")


def test_without_tools_or_with_none_to_choose_a_call_is_text(openai: OpenAI, model: str) -> None:
    for body in (chat(model, tools=[]), chat(model, tool_choice="none")):
        message = openai.chat.completions.create(**body).choices[0].message
        assert message.tool_calls is None
        assert CALL in (message.content or "")
        assert "# Tools" not in (message.content or "")


def test_without_parallel_calls_the_answer_ends_with_the_first(openai: OpenAI, model: str) -> None:
    answer = openai.chat.completions.create(**chat(model, CALL + "\n" + CALL, parallel_tool_calls=False))
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert json.loads(call.function.arguments) == {"x": 1}  # type: ignore[union-attr]


def test_a_loop_of_calls_and_results_goes_through_the_template(openai: OpenAI, http: httpx.Client, model: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Call f."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "forty-two"},
    ]
    count = prompt_length(http, messages)
    content = openai.chat.completions.create(model=model, messages=messages, max_tokens=count).choices[0].message.content or ""
    assert content.startswith("system\nBe brief.\nuser\nCall f.\nassistant\n" + CALL)
    assert "<tool_response>\nforty-two\n</tool_response>" in content


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type", "custom"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "tools is empty"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "custom"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function", "1 to 64 letters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "wizard"}}}}}],
      "tool_choice": "required"}, "tools", "wizard"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"tools": [], "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "wizard"}}}},
     "response_format", "wizard"),
    ({"tools": [], "structured_outputs": {"regex": "a(b"}}, "structured_outputs", "unclosed group"),
    ({"tools": [], "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs", "left out"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "left out"),
    ({"structured_outputs": {"gramar": "a"}}, "structured_outputs.gramar", "not a field"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": ""}}]}]},
     "messages[0]", "tool_calls"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "required"),
    ({"retention": {"priority": 0, "seconds": 1}}, "retention", "from 1 to 100"),
    ({"retention": {"priority": 1}}, "retention.seconds", "required"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "must be left out"),
    ({"store": True}, "store", "must be left out"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"audio": {}}, "audio", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda value: str(value)[:40])
def test_what_can_not_be_is_refused_before_a_stream_begins(
    http: httpx.Client, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True} | fields
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_null_is_a_field_left_out(http: httpx.Client) -> None:
    fields = ("tools", "tool_choice", "response_format", "parallel_tool_calls", "retention", "structured_outputs", "seed", "stop")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | dict.fromkeys(fields)
    assert http.post("/v1/chat/completions", json=body).status_code == 200


# --- tokens ------------------------------------------------------------------------------------------------------------------


def test_text_becomes_tokens_and_text_again(http: httpx.Client, tiny_model_tools: dict[str, Any]) -> None:
    text = "the quick brown fox 🙂<|im_end|>"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tiny_model_tools["make_tokenizer"]().encode(text).ids
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"].startswith("<|im_end")
    assert "<|im_start|>" in info["chat_template"]


def test_a_chat_is_tokenised_as_it_is_answered(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    usage = http.post("/v1/chat/completions", json={"messages": messages, "tools": TOOLS, "max_tokens": 1}).json()["usage"]
    answer = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()
    assert answer["count"] == usage["prompt_tokens"]
    shorter = http.post("/tokenize", json={"messages": messages, "tools": TOOLS, "add_generation_prompt": False}).json()
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": 3}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": []}, "prompt"),
        ("tokenize", {"prompt": "x", "pad": True}, "pad"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [320]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_input_of_the_token_paths_is_named(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(f"/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# --- responses ---------------------------------------------------------------------------------------------------------------


def test_a_response_has_text_status_and_usage(openai: OpenAI, model: str) -> None:
    answer = openai.responses.create(
        model=model, input="hello", instructions="Be brief.", max_output_tokens=20, metadata={"k": "v"}
    )
    assert answer.output_text.startswith("system\nBe brief.")
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (20, answer.usage.input_tokens + 20)
    assert answer.metadata == {"k": "v"}
    again = openai.responses.create(model=model, input="hello", instructions="Be brief.", max_output_tokens=20)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1


def test_the_events_of_a_streamed_response_add_up(openai: OpenAI, model: str) -> None:
    request: dict[str, Any] = {"model": model, "instructions": CALL, "input": "hi", "max_output_tokens": 120}
    request["tools"] = [{"type": "function", **TOOLS[0]["function"], "strict": False}]
    with openai.responses.stream(**request) as stream:
        events: list[Any] = list(stream)
    final = events[-1].response
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert kinds[-1] == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert text == final.output_text
    call = next(item for item in final.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("f", {"x": 1})
    assert arguments == call.arguments
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == len(final.output)
    whole = openai.responses.create(**request)
    assert [item.type for item in whole.output] == [item.type for item in final.output]
    assert whole.output_text == text


def test_an_answer_goes_back_as_input(openai: OpenAI, model: str) -> None:
    first = openai.responses.create(model=model, input="hello", max_output_tokens=5)
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        *first.output,
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    answer = openai.responses.create(model=model, input=items, max_output_tokens=300)
    assert answer.output_text.startswith(f"user\nhello\nassistant\n{first.output_text}\n{CALL}\nuser\n<tool_response>\n42\n")


def test_response_logprobs_come_where_they_are_asked_for(openai: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "input": "日本", "max_output_tokens": 12}
    answer = openai.responses.create(**fields, include=["message.output_text.logprobs"], top_logprobs=1)
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr]
    assert len(part.logprobs) == 12
    assert len(part.logprobs[0].top_logprobs) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "wizard"}}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
    ],
)
def test_bad_input_of_a_response_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = http.post("/v1/responses", json={"input": "x", "stream": True} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_the_async_client_streams_chats_and_responses_at_once(server: Any, model: str) -> None:
    async def chat_text(client: AsyncOpenAI) -> str:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model=model, messages=messages, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def response_text(client: AsyncOpenAI) -> str:
        stream = await client.responses.create(model=model, input="hi", max_output_tokens=20, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    async def both() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            return await asyncio.gather(chat_text(client), response_text(client))

    texts = asyncio.run(both())
    assert texts[0] == texts[1] != ""
