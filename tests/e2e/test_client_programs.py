"""The default model behind HTTP, used by the programs that people have: LangChain, Pydantic AI, ``llm``, curl, GuideLLM.

Each is configured as its own documentation says for an OpenAI-compatible server, and by nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, Tool, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider
from pydantic_ai.usage import UsageLimits

from radixkv import Client, SamplingParams
from radixkv.model.loader import ModelSource
from radixkv.server.launcher import WORKER_COMMAND

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SUPPORT = runpy.run_path(str(ROOT / "tests" / "server" / "conftest.py"))
MODEL = "smollm2-135m"
QUESTION = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"


class City(BaseModel):
    name: str = Field(max_length=20)
    continent: Literal["Africa", "America", "Asia", "Europe", "Oceania"]


@pytest.fixture(scope="module")
def server(default_model: ModelSource) -> Iterator[Any]:
    with SUPPORT["starting"](Path(MODEL)) as start:
        config = {"model": MODEL, "kv_cache_tokens": 16384, "num_threads": 1}
        server = start(config=config, zmq="tcp://127.0.0.1:*", worker_command=WORKER_COMMAND)
        yield server.wait_ready()
        server.wait_idle()
        assert "Traceback" not in server.log


# --- LangChain ---------------------------------------------------------------------------------------------------------------


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}, 21 degrees {unit}"


@pytest.fixture(params=["chat", "responses"])
def langchain(server: Any, request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=100, max_retries=0, timeout=60,
        stream_usage=True, use_responses_api=request.param == "responses",
    )  # fmt: skip


def test_langchain_invokes_streams_and_batches(langchain: ChatOpenAI) -> None:
    answer = langchain.invoke(QUESTION)
    assert "Paris" in answer.text
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    streamed = AIMessageChunk("")
    for chunk in langchain.stream(QUESTION):
        streamed += chunk
    assert streamed.text == answer.text
    assert streamed.usage_metadata is not None
    assert streamed.usage_metadata["input_tokens"] == answer.usage_metadata["input_tokens"]
    assert [message.text for message in langchain.batch([QUESTION] * 3)] == [answer.text] * 3


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_langchain_runs_a_tool_that_is_bound(langchain: ChatOpenAI, choice: str) -> None:
    bound = langchain.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
    question = HumanMessage(WEATHER)
    called = bound.invoke([question])
    (call,) = called.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert result.content.startswith("sunny in ")
    assert langchain.bind_tools([get_weather], tool_choice="none").invoke([question, called, result]).text
    streamed = AIMessageChunk("")
    for chunk in bound.stream([question]):
        streamed += chunk
    assert [call["args"] for call in streamed.tool_calls] == [call["args"]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_structured_output(langchain: ChatOpenAI, method: Any) -> None:
    assert isinstance(langchain.with_structured_output(City, method=method).invoke("Describe Paris."), City)


def test_langchain_streams_to_many_at_once_on_an_event_loop(server: Any) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0)

    async def read(question: str) -> str:
        return "".join([chunk.text async for chunk in chat.astream(question)])

    async def read_all() -> list[str]:
        return await asyncio.gather(*(read(QUESTION) for _ in range(4)))

    (text,) = {*asyncio.run(read_all())}
    assert "Paris" in text


def test_langchain_completes_prompts_without_a_chat(server: Any) -> None:
    completion = OpenAI(model=MODEL, base_url=f"{server.url}/v1", api_key="none", temperature=0, max_tokens=8, max_retries=0)
    text = completion.invoke("The capital of France is")
    assert text.startswith(" Paris")
    assert "".join(completion.stream("The capital of France is")) == text
    generations = completion.generate(["The capital of France is", "Once upon a time"]).generations
    assert [len(each) for each in generations] == [1, 1]
    assert generations[0][0].text == text


# --- Pydantic AI -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def pydantic_model(server: Any, request: pytest.FixtureRequest) -> Any:
    provider = OpenAICompatibleProvider("radixkv", base_url=f"{server.url}/v1", api_key="none")
    return request.param(MODEL, provider=provider, settings={"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False})


def test_pydantic_ai_runs_a_tool_loop_to_its_end(pydantic_model: Any) -> None:
    asked_for = []

    def weather(city: str) -> str:
        """The weather of a city."""
        asked_for.append(city)
        return "sunny, 21 degrees"

    async def once(_: Any, definition: Any) -> Any:
        return None if asked_for else definition

    async def afterwards(_: Any, definitions: Any) -> Any:
        return definitions if asked_for else []

    # The model is too small to decide: first it must call the tool, then it must answer by the output tool.
    agent = Agent(
        pydantic_model,
        output_type=ToolOutput(City),
        tools=[Tool(weather, prepare=once)],
        capabilities=[PrepareOutputTools(afterwards)],
    )
    result = agent.run_sync(WEATHER, usage_limits=UsageLimits(request_limit=3))
    assert isinstance(result.output, City)
    assert len(asked_for) == 1
    parts = [type(part).__name__ for message in result.all_messages() for part in message.parts]
    assert parts == ["UserPromptPart", "ToolCallPart", "ToolReturnPart", "ToolCallPart", "ToolReturnPart"]
    assert result.usage.requests == 2
    assert result.usage.cache_read_tokens > 0


def test_pydantic_ai_gets_native_structured_output(pydantic_model: Any) -> None:
    assert isinstance(Agent(pydantic_model, output_type=NativeOutput(City)).run_sync("Describe Paris.").output, City)


def test_pydantic_ai_streams(pydantic_model: Any) -> None:
    async def stream() -> list[str]:
        async with Agent(pydantic_model).run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(stream())
    assert len(pieces) > 1
    assert "Paris" in "".join(pieces)


# --- our own clients ---------------------------------------------------------------------------------------------------------


def test_radixkvs_client_runs_a_tool_loop(server: Any) -> None:
    endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tools = [{"name": "weather", "description": "The weather of a city.", "parameters": schema}]
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    params = SamplingParams(max_tokens=60, temperature=0)
    with Client(endpoint, timeout=60) as client:
        (answer,) = client.generate(messages, params, tools=tools, tool_choice="weather").choices
        text, (call,) = answer.without_calls()
        assert (text, call.function.name) == ("", "weather")
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        messages += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        more = client.generate(messages, params, tools=tools, tool_choice="none", retention=(1, 60))
        assert more.text
        assert more.usage.cached_tokens > 0


# --- llm ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs Simon Willison's ``llm`` in a home of its own."""
    home = tmp_path_factory.mktemp("llm")
    kinds = {"chat": "", "responses": "responses: true", "completion": "completion: true"}
    models = [
        f"- model_id: {name}\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n  supports_schema: true\n"
        f"  supports_tools: true\n  {kind}\n"
        for name, kind in kinds.items()
    ]
    (home / "extra-openai-models.yaml").write_text("".join(models))

    def run(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "llm", *arguments, "-o", "temperature", "0"]
        environment = os.environ | {"LLM_USER_PATH": str(home)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_llm_answers_and_goes_on_with_the_conversation(llm: Any) -> None:
    assert "Paris" in llm("-m", "chat", QUESTION)
    assert "Paris" in llm("-m", "chat", "--no-stream", QUESTION)
    assert llm("-c", "Say that again.").strip()


def test_llm_uses_the_other_endpoints(llm: Any) -> None:
    assert "Paris" in llm("-m", "responses", QUESTION)
    assert llm("-m", "completion", "-o", "max_tokens", "4", "The capital of France is").startswith(" Paris")


def test_llm_takes_schemas_and_tools(llm: Any) -> None:
    City.model_validate_json(llm("-m", "chat", "--schema", json.dumps(City.model_json_schema()), "Describe Paris."))
    assert json.loads(llm("-m", "chat", "--schema", "name, capital bool", "Describe Paris.")).keys() == {"name", "capital"}
    function = 'def multiply(a: int, b: int) -> int:\n    "Multiply two numbers."\n    return a * b\n'
    assert llm("-m", "chat", "--functions", function, "-o", "max_tokens", "40", "What is 12 times 13?").strip()


# --- curl --------------------------------------------------------------------------------------------------------------------

CURL_LINES = [
    line
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for line in re.findall(r"^curl [^\n]*127\.0\.0\.1:8000[^\n]*$", path.read_text(), re.MULTILINE)
]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("line", CURL_LINES, ids=range(len(CURL_LINES)))
def test_what_the_documentation_does_with_curl_works(server: Any, line: str) -> None:
    command = re.sub("^curl", "curl --fail --silent --show-error", line.replace("http://127.0.0.1:8000", server.url))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout


# --- GuideLLM ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm_measures_the_server(server: Any, tmp_path: Path, route: str) -> None:
    prompts = [{"prompt": f"Say something about number {i}.", "output_tokens_count": 6} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    command = [
        sys.executable, "-P", "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={server.url},request_format={route}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=4",
        "--data", "kind=json_file,path=prompts.jsonl",
        "--output", "kind=json,path=report.json",
        "--disable-console",
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == 4 * 6
    assert benchmark["metrics"]["prompt_token_count"]["successful"]["total_sum"] > 0
