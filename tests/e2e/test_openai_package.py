"""The default model behind HTTP, used as people use it: the ``openai`` package, sync and async, and curl."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

from radixkv.model.loader import ModelSource
from radixkv.server.launcher import WORKER_COMMAND

pytestmark = pytest.mark.full

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "server" / "conftest.py"))
MODEL = "smollm2-135m"
PEOPLE: list[Any] = [{"role": "user", "content": "Invent a person: name, age and favourite colour."}]


class Person(BaseModel):
    name: str
    age: int
    colour: Literal["red", "green", "blue"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module")
def server(default_model: ModelSource) -> Iterator[Any]:
    with SUPPORT["starting"](Path(MODEL)) as start:
        server = start(config={"model": MODEL, "kv_cache_tokens": 16384, "num_threads": 1}, worker_command=WORKER_COMMAND)
        yield server.wait_ready()
        server.wait_idle()
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def openai(server: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def test_a_pydantic_model_comes_back_parsed(openai: OpenAI) -> None:
    answer = openai.chat.completions.parse(model=MODEL, messages=PEOPLE, response_format=Person, max_tokens=100, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_a_pydantic_model_is_streamed(openai: OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": PEOPLE, "max_tokens": 100, "temperature": 0}
    with openai.chat.completions.stream(**fields, response_format=Person) as stream:
        content = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion().choices[0].message
    assert isinstance(final.parsed, Person)
    assert final.content == content


@pytest.mark.parametrize("seed", range(4))
def test_sampled_json_is_json(openai: OpenAI, seed: int) -> None:
    tag = {"type": "string", "maxLength": 12}
    schema = {"type": "object", "properties": {"tags": {"type": "array", "items": tag, "maxItems": 3}},
              "required": ["tags"], "additionalProperties": False}  # fmt: skip
    answer = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tags for a photo of a dog?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "tags", "strict": True, "schema": schema}},
        max_tokens=120,
        seed=seed,
    )
    tags = json.loads(answer.choices[0].message.content or "")["tags"]
    assert len(tags) <= 3
    assert all(isinstance(tag, str) for tag in tags)


@pytest.mark.parametrize(
    ("outputs", "form"),
    [
        ({"regex": r"\d{4}-\d{2}-\d{2}"}, r"\d{4}-\d{2}-\d{2}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'start: "SELECT " NAME " FROM " NAME\nNAME: /[a-z]{1,8}/'}, r"SELECT [a-z]{1,8} FROM [a-z]{1,8}"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_other_forms_are_kept(openai: OpenAI, outputs: dict[str, Any], form: str) -> None:
    answer = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Answer in the form asked for."}],
        max_tokens=150,
        temperature=0,
        extra_body={"structured_outputs": outputs},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(form, answer.choices[0].message.content or "", re.DOTALL)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "GetWeather"}}])
def test_a_demanded_call_is_parsed_into_its_model(openai: OpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [pydantic_function_tool(GetWeather)]
    request: dict[str, Any] = {"model": MODEL, "tools": tools, "tool_choice": choice, "max_tokens": 200, "temperature": 0}
    answer = openai.chat.completions.parse(messages=messages, **request, parallel_tool_calls=False)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, GetWeather)
    # The loop goes on: the answer as it came, the tool's result, and now an answer in words.
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"}]
    more = openai.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="none", max_tokens=30)
    assert more.choices[0].message.tool_calls is None
    assert more.choices[0].message.content


def test_a_demanded_call_is_streamed(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[pydantic_function_tool(GetWeather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
        stream=True,
    )
    name, arguments, reasons = "", "", []
    for chunk in stream:
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.function is not None
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert name == "GetWeather"
    GetWeather.model_validate_json(arguments)
    assert reasons[-1] == "tool_calls"


def test_responses_are_parsed_and_call_tools(openai: OpenAI) -> None:
    parsed = openai.responses.parse(model=MODEL, input=PEOPLE, text_format=Person, max_output_tokens=100, temperature=0)
    assert isinstance(parsed.output_parsed, Person)
    assert parsed.status == "completed"
    tool: Any = {"type": "function", "name": "now", "parameters": None, "strict": True}
    answer = openai.responses.create(
        model=MODEL, input="What time is it?", tools=[tool], tool_choice={"type": "function", "name": "now"}
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("now", "{}")
    items: list[Any] = [{"role": "user", "content": "What time is it?"}, call]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
    more = openai.responses.create(model=MODEL, input=items, max_output_tokens=30)
    assert more.output_text


def test_an_echoed_text_has_the_logprobs_that_it_was_given_when_it_was_generated(openai: OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "temperature": 0, "logprobs": 2}
    prompt = "The capital of France is"
    answer = openai.completions.create(prompt=prompt, max_tokens=12, **request).choices[0]
    echo = openai.completions.create(prompt=prompt + answer.text, echo=True, max_tokens=0, **request).choices[0]
    assert echo.text == prompt + answer.text
    for logprobs in (answer.logprobs, echo.logprobs):
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
    generated, echoed = answer.logprobs.token_logprobs, echo.logprobs.token_logprobs  # type: ignore[union-attr]
    assert echoed[0] is None  # type: ignore[index]
    assert echoed[-12:] == pytest.approx(generated, abs=1e-4)  # type: ignore[index]


def test_usage_says_what_was_cached_and_why_the_rest_was_not(openai: OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": "You count sheep. " * 30}, {"role": "user", "content": "Begin."}]
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    retention = {"retention": {"priority": 2, "seconds": 60}}
    details = []
    for content in ("Begin.", "Begin.", "Stop."):
        messages[1]["content"] = content
        usage = openai.chat.completions.create(messages=messages, **request, extra_body=retention).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        reasons = usage.prompt_tokens_details.model_dump()["miss_reasons"]
        assert sum(reasons.values()) + (usage.prompt_tokens_details.cached_tokens or 0) == usage.prompt_tokens
        details.append((usage.prompt_tokens_details.cached_tokens, {*reasons}))
    assert details[1][1] <= {"last_token", "partial_block"}
    assert details[2][0] > 100
    assert "diverged" in details[2][1]


def test_many_forms_at_once_from_the_async_client(server: Any) -> None:
    async def ask(client: AsyncOpenAI, i: int) -> str:
        outputs = {"regex": rf"[a-z]{{3,8}} {i}"} if i % 2 else {"choice": [f"left {i}", f"right {i}"]}
        answer = await client.chat.completions.create(
            model=MODEL, messages=PEOPLE, max_tokens=30, extra_body={"structured_outputs": outputs}, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    for i, text in enumerate(asyncio.run(all_of_them())):
        assert re.fullmatch(rf"[a-z]{{3,8}} {i}", text), text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_streams_a_chat(server: Any) -> None:
    body = {"messages": PEOPLE, "max_tokens": 8, "stream": True}
    command = ["curl", "--silent", "--no-buffer", f"{server.url}/v1/chat/completions", "--data", json.dumps(body)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
