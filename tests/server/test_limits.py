"""What is refused at the door, and how a full or slow server says so."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from radixkv.sampling_params import SamplingParams
from radixkv.server.client import Client
from radixkv.server.errors import InvalidRequest, Overloaded, TimedOut
from radixkv.server.frontend import MAX_MESSAGES, Frontend
from radixkv.server.messages import ChatMessage
from radixkv.server.openai.depth import MAX_DEPTH
from radixkv.server.openai.schema import CompletionRequest, parse

LONG = {"prompt": "abc", "max_tokens": 2000}


def refused(server: Any, content: bytes | str, path: str = "completions", **headers: str) -> tuple[int, str]:
    response = httpx.post(f"{server.url}/v1/{path}", content=content, headers=headers)
    return response.status_code, response.json()["error"]["message"]


# --- sizes -------------------------------------------------------------------------------------------------------------------


def test_headers_have_a_limit_in_number_and_in_bytes(server: Any) -> None:
    many = {f"x-{i}": "y" for i in range(100)}
    assert refused(server, b"{}", **many)[0] == 431
    assert "headers must be at most 100, got" in refused(server, b"{}", **many)[1]
    status, message = refused(server, b"{}", x="y" * 17_000)
    assert status == 431
    assert "headers must be at most 16384 bytes" in message
    assert httpx.get(f"{server.url}/v1/models?{'x' * 17_000}").status_code == 431


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"]": '], ids=repr)
def test_a_body_nested_too_deep_is_refused_unparsed(opening: bytes) -> None:
    per_level = opening.replace(b'"]"', b"").count(b"[") + opening.count(b"{")
    with pytest.raises(InvalidRequest, match=f"body must be JSON nested at most {MAX_DEPTH} deep"):
        parse(b'{"prompt": ' + opening * (MAX_DEPTH // per_level) + b"1", CompletionRequest)
    with pytest.raises(InvalidRequest, match="nested at most"):
        parse(opening * 3_000_000, CompletionRequest)


@pytest.mark.parametrize("text", ["[" * 500, '"\\"[' * 200, "{}" * 200, "]" * 99 + "[" * 99])
def test_brackets_in_texts_and_side_by_side_are_not_depth(text: str) -> None:
    assert parse(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text
    assert parse(json.dumps({"prompt": [[1]] * 500}).encode(), CompletionRequest).prompt == [[1]] * 500


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("completions", {"prompt": "x", "stop": ["y"] * 17}, "stop must be at most 16 strings"),
        ("completions", {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids must be at most 1024 token ids"),
        ("completions", {"prompt": "x", "logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias must be at most 1024 entries"),
        ("completions", {"prompt": [1] * 100_000}, "prompt must be at most 2047 tokens"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}] * (MAX_MESSAGES + 1)}, "messages must be at most 4096"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 999}] * 99}, "messages must be at most 2047 tokens"),
        ("chat/completions", {"messages": []}, "messages must be at least one"),
        ("../tokenize", {"messages": []}, "messages must be at least one"),
        (
            "completions",
            {"prompt": [[1] * 2000] * 2, "n": 7, "echo": True, "logprobs": 20},
            "logprobs must be at most 524288 for all prompts, choices and alternatives together, got 588000",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_body_may_hold_has_limits(server: Any, path: str, body: dict[str, Any], problem: str) -> None:
    status, message = refused(server, json.dumps(body), path)
    assert status == 400
    assert problem in message


# --- load --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(module_start: Any) -> Any:
    """A server with room for four requests of a namespace, and a second for each."""
    return module_start(max_waiting=4, request_timeout=1.0, zmq="tcp://127.0.0.1:*").wait_ready()


def test_beyond_max_waiting_http_says_429_and_when_to_come_again_and_a_new_namespace_still_gets_in(slow: Any) -> None:
    silent = {"prompt": [5, 5, 5]}
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(httpx.post, f"{slow.url}/v1/completions", json=silent, timeout=20) for _ in range(4)]
        while slow.report()["running"] < 4:
            time.sleep(0.01)
        response = httpx.post(f"{slow.url}/v1/completions", json=silent)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "overloaded"
        assert "max-waiting is 4" in response.json()["error"]["message"]
        endpoint = next(word for word in slow.log.split() if word.startswith("tcp://"))
        with Client(endpoint, timeout=20) as client:
            with pytest.raises(Overloaded, match="too many requests wait already"):
                client.generate([5, 5, 5])
            # Another namespace is not kept out by the one that fills the room.
            assert client.generate("abc", SamplingParams(max_tokens=3), namespace="other").text == "abc"
        # Those that waited are ended by the request timeout, and their seats and blocks are free again.
        for request in waiting:
            assert request.result().status_code == 504
            assert request.result().json()["error"]["code"] == "timeout"
            assert "not done within 1 s" in request.result().json()["error"]["message"]
    slow.wait_idle()
    assert httpx.post(f"{slow.url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code == 200


@pytest.mark.full
def test_a_stream_that_takes_too_long_ends_in_an_error_and_its_blocks_are_back(slow: Any) -> None:
    lines = httpx.post(f"{slow.url}/v1/completions", json=LONG | {"stream": True}, timeout=20).text.split("\n\n")
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "timeout"
    assert lines[-2] == "data: [DONE]"
    endpoint = next(word for word in slow.log.split() if word.startswith("tcp://"))
    with Client(endpoint, timeout=20) as client, pytest.raises(TimedOut, match="not done within 1 s"):
        client.generate("abc", SamplingParams(max_tokens=2000))
    slow.wait_idle()


def test_a_request_with_more_choices_than_may_ever_wait_is_refused_for_good(slow: Any) -> None:
    status, message = refused(slow, json.dumps(LONG | {"n": 5}))
    assert status == 400
    assert "n must be at most 4 choices" in message


# --- templates and logs ------------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch OWNED') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ''|attr('__class__') }}{{ (''|attr('__class__')).mro() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('OWNED', 'w') }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% set _ = messages.append(messages[0]) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.listdir('.') }}",
    "{{ messages[0]",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_malicious_chat_template_is_held_in_its_sandbox(
    tiny_model_tools: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_model_tools["make_tokenizer"](), chat_template=template)
    frontend = Frontend("tiny", tokenizer, 320)
    frontend.max_model_len = 2048
    with contextlib.suppress(InvalidRequest):  # or Jinja's other answer to what may not be reached: no text at all
        assert asyncio.run(frontend.render_chat([ChatMessage(role="user", content="hi")], None)) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs", "documents", "add_generation_prompt"])
def test_no_request_brings_a_template(server: Any, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: "{{ 7 * 7 }}"}
    status, message = refused(server, json.dumps(body), "chat/completions")
    assert (status, message) == (400, f"{field} is not a field that this server supports")


def test_a_message_is_text_to_the_template_and_never_code(server: Any) -> None:
    text = "{{ 7 * 7 }}{% raw %}{# no #}"
    body = {"messages": [{"role": "user", "content": text, "name": text}], "max_tokens": 60}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert f"user\n{text}\n" in answer


def test_no_prompt_is_ever_in_the_log(slow: Any) -> None:
    server = slow
    secret = "a-secret-that-only-the-prompt-holds"  # noqa: S105
    message = {"role": "user", "content": secret}
    bodies: list[Any] = [
        {"prompt": secret}, {"prompt": secret, "stream": True}, {"prompt": secret, "max_tokens": 10**6},
        {"prompt": secret, secret: 1},
        {"prompt": [secret, 3]}, {"prompt": secret * 9999}, {"prompt": "x", "stop": [secret]}, {"prompt": "x", "namespace": secret},
        secret, [secret],
    ]  # fmt: skip
    for body in bodies:
        httpx.post(f"{server.url}/v1/completions", json=body)
    for bad in (f'{{"prompt": "{secret}', f'{{"prompt": "{secret}\\ud800"}}'):
        httpx.post(f"{server.url}/v1/completions", content=bad)
    for chat in ([message], [message | {"role": secret}], [message | {secret: 1}]):
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": chat})
    endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
    with Client(endpoint, timeout=20) as client:
        client.generate(secret, SamplingParams(max_tokens=2))
        with pytest.raises(InvalidRequest):
            client.generate(secret, SamplingParams(max_tokens=0))
    assert secret not in server.log
