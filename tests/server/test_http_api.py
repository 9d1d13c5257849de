"""The HTTP door over real processes, with an engine whose every answer is foreseeable."""

from __future__ import annotations

import gzip
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI

PROMPT = "the quick brown fox, grüße 🙂 日本語"


@pytest.fixture(scope="module")
def tokens(tiny_model_tools: dict[str, Any]) -> Any:
    tokenizer = tiny_model_tools["make_tokenizer"]()
    return lambda text: tokenizer.encode(text).ids


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_model_is_listed_and_described(openai: OpenAI, model_folder: Any) -> None:
    (model,) = openai.models.list().data
    assert model.id == str(model_folder)
    assert openai.models.retrieve(model.id).id == model.id
    assert model.max_model_len == 2048  # type: ignore[attr-defined]


def test_a_completion_has_text_reason_and_usage(openai: OpenAI, model_folder: Any, tokens: Any) -> None:
    count = len(tokens(PROMPT))
    answer = openai.completions.create(model=str(model_folder), prompt=PROMPT, max_tokens=2 * count)
    assert answer.choices[0].text == PROMPT * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (count, 2 * count, 3 * count)


def test_max_tokens_defaults_to_16_and_a_model_need_not_be_named(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "abc"}).json()
    assert answer["usage"]["completion_tokens"] == 16


def test_a_chat_without_max_tokens_gets_what_the_context_has_room_for(http: httpx.Client) -> None:
    message = {"role": "user", "content": "z" * 1900}
    usage = http.post("/v1/chat/completions", json={"messages": [message]}).json()["usage"]
    assert usage["total_tokens"] == 2048


def test_streamed_text_is_the_text_not_streamed_and_no_delta_splits_a_character(openai: OpenAI) -> None:
    request: dict[str, Any] = {"model": openai.models.list().data[0].id, "prompt": PROMPT, "max_tokens": 100}
    whole = openai.completions.create(**request)
    chunks = list(openai.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == whole.choices[0].text
    assert len(texts) > 50
    assert not any("\ufffd" in text for text in texts[:-1])
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 100
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_so_far_is_in_every_chunk_if_asked_for(http: httpx.Client, path: str) -> None:
    prompt = {"prompt": "abc"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = prompt | {"max_tokens": 20, "stream": True, "stream_options": options}
    lines = [line for line in http.post(f"/v1/{path}", json=body).text.split("\n\n") if line.startswith("data: {")]
    counts = [json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"] for line in lines]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == 20


def test_a_streamed_chat_names_its_role_once_and_adds_up(openai: OpenAI) -> None:
    request: dict[str, Any] = {
        "model": openai.models.list().data[0].id,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "max_completion_tokens": 60,
    }
    whole = openai.chat.completions.create(**request)
    chunks = list(openai.chat.completions.create(**request, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    # The echo of the prompt without its special tokens.
    assert (whole.choices[0].message.content or "").startswith("system\nBe brief.\nuser\nhi\nassistant\n")
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_cached_tokens_are_reported_and_a_namespace_does_not_share_them(http: httpx.Client) -> None:
    def cached(**fields: Any) -> int:
        body = {"prompt": "cached tokens test", "max_tokens": 1} | fields
        usage = http.post("/v1/completions", json=body).json()["usage"]
        assert usage["prompt_tokens"] > 2
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    first, second = cached(), cached()
    assert first == 0
    assert second > 0
    assert cached(namespace="tenant") == 0
    assert cached(cache_salt="pepper") == 0
    assert cached(cache_salt="pepper") == second
    assert http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_n_choices_draw_with_consecutive_seeds(http: httpx.Client, tokens: Any) -> None:
    count = len(tokens("abcdefgh"))
    answer = http.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": count, "n": 4, "seed": 2}).json()
    # The echo engine begins at the token that the seed says.
    texts = [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    alone = [
        http.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": count, "seed": 2 + i}).json()["choices"][0]["text"]
        for i in range(4)
    ]
    assert texts == alone
    assert len(set(texts)) == 4
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["completion_tokens"] == 4 * count


def test_several_prompts_give_choices_in_their_order(http: httpx.Client, tokens: Any) -> None:
    body = {"prompt": ["abc", "xyz"], "max_tokens": 3, "n": 2}
    answer = http.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][:1] for choice in answer["choices"]] == ["a", "a", "x", "x"]
    ids = http.post("/v1/completions", json={"prompt": [tokens("abc"), tokens("xyz")], "max_tokens": 3}).json()
    assert [choice["text"][:1] for choice in ids["choices"]] == ["a", "x"]
    assert ids["usage"]["prompt_tokens"] == len(tokens("abc")) + len(tokens("xyz"))


@pytest.mark.parametrize("stop", ["fox", ["brown fox,", "grüße"], "🙂", "ick br", " "])
def test_a_stop_string_ends_the_text_before_it_streamed_or_not(http: httpx.Client, server: Any, stop: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop
    expected = PROMPT[: min(PROMPT.index(text) for text in stops)]
    body = {"prompt": PROMPT, "max_tokens": 1500, "stop": stop}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < len(PROMPT.encode())
    chunks = events(http.post("/v1/completions", json=body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    server.wait_idle()


def test_completion_logprobs_name_each_token_and_where_it_begins(http: httpx.Client, tokens: Any) -> None:
    prompt = PROMPT + "λ"  # a letter that the tokenizer has no token for
    count = len(tokens(prompt))
    body = {"prompt": prompt, "max_tokens": count, "logprobs": 1}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == count
    assert logprobs["token_logprobs"][:3] == [0, -1, -2]
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -1}
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert logprobs["tokens"][-2:] == ["bytes:\\xce", "bytes:\\xbb"]
    chunks = events(http.post("/v1/completions", json=body | {"stream": True}))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {key: [entry for part in parts for entry in part[key]] for key in logprobs} == logprobs


@pytest.mark.parametrize("stream", [True, False])
def test_echo_puts_each_prompt_before_its_choices(http: httpx.Client, tokens: Any, stream: bool) -> None:
    body = {"prompt": ["abc 🙂", "xyz"], "max_tokens": 2, "n": 2, "stream": stream}
    for prompt in (body["prompt"], [tokens("abc 🙂"), tokens("xyz")]):
        response = http.post("/v1/completions", json=body | {"prompt": prompt, "echo": True})
        texts = ["", "", "", ""]
        for chunk in events(response) if stream else [response.json()]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["abc 🙂ab", "abc 🙂ab", "xyzxy", "xyzxy"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echoed_prompts_tokens_have_logprobs_but_for_the_first(http: httpx.Client, stream: bool, max_tokens: int) -> None:
    body = {"prompt": "abc", "max_tokens": max_tokens, "echo": True, "logprobs": 1, "stream": stream}
    response = http.post("/v1/completions", json=body | ({"stream_options": {"include_usage": True}} if stream else {}))
    text, parts, usage, reason = "", [], None, None
    for chunk in events(response) if stream else [response.json()]:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["text"]
            parts.append(choice["logprobs"])
            reason = choice["finish_reason"] or reason
    logprobs = {key: [entry for part in parts for entry in part[key]] for key in parts[0]}
    assert text == "abcab"[: 3 + max_tokens]
    assert logprobs["tokens"] == [*text]
    assert logprobs["token_logprobs"] == [None, -0.125, -0.25, 0.0, -1.0][: 3 + max_tokens]
    assert logprobs["top_logprobs"][:3] == [None, {"<|endoftext|>": 0.0}, {"<|endoftext|>": 0.0}]
    assert logprobs["text_offset"] == [*range(3 + max_tokens)]
    assert usage is not None
    assert usage["completion_tokens"] == max_tokens
    assert reason == "length"


def test_best_of_answers_with_the_choices_of_the_highest_mean_logprob(http: httpx.Client, tokens: Any) -> None:
    # The echo engine's log-probabilities fall with the length, so a choice that a stop string ends early is among the best.
    count = len(tokens("abcdef"))
    body = {"prompt": ["abcdef", "uvwxyz"], "max_tokens": count, "seed": 0, "stop": ["d", "x"]}
    answer = http.post("/v1/completions", json=body | {"n": 2, "best_of": 4}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["", "c", "", "w"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 2 * count
    assert answer["usage"]["completion_tokens"] == 2 * (1 + 2 + 3 + 4)


def test_chat_logprobs_carry_the_bytes_of_each_token(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=openai.models.list().data[0].id,
        messages=[{"role": "user", "content": "日本"}],
        max_tokens=40,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 40
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * 40
    special = {"<|im_start|>", "<|im_end|>"}
    data = b"".join(bytes(token.bytes or []) for token in logprobs.content if token.token not in special)
    assert data.decode(errors="replace") == answer.choices[0].message.content


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {"prompt": ""}, "prompt", "at least 1 token"),
    ("completions", {"prompt": []}, "prompt", "at least one"),
    ("completions", {"prompt": [[]]}, "prompt", "at least 1 token"),
    ("completions", {"prompt": "x " * 2048}, "prompt", "at most 2047 tokens"),
    ("completions", {"prompt": "x" * 3_000_000}, "prompt", "at most 2047 tokens"),
    ("completions", {"prompt": [5] * 2048}, "prompt", "at most 2047 tokens"),
    ("completions", {"prompt": [-1]}, "prompt", "from 0 to 319"),
    ("completions", {"prompt": [10**30]}, "prompt", "from 0 to 319"),
    ("completions", {"prompt": [320]}, "prompt", "from 0 to 319"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ("completions", {"prompt": "x", "max_tokens": -5}, "max_tokens", "at least 1"),
    ("completions", {"prompt": "x", "max_tokens": 2048}, "max_tokens", "at most 2047"),
    ("completions", {"prompt": "x", "max_tokens": 10**30}, "max_tokens", "at most 2047"),
    ("completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens", "Expected `int"),
    ("completions", {"prompt": "x", "temperature": float("nan")}, "temperature", "between 0 and 100"),
    ("completions", {"prompt": "x", "temperature": float("inf")}, "temperature", "between 0 and 100"),
    ("completions", {"prompt": "x", "temperature": -1}, "temperature", "between 0 and 100"),
    ("completions", {"prompt": "x", "top_p": 0}, "top_p", "above 0 and at most 1"),
    ("completions", {"prompt": "x", "n": 0}, "n", "between 1 and 128"),
    ("completions", {"prompt": "x", "n": 10**9}, "n", "between 1 and 128"),
    ("completions", {"prompt": ["x"] * 1025}, "prompt", "at most 1024 prompts"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ("completions", {"prompt": "x", "stop": ""}, "stop", "non-empty"),
    ("completions", {"prompt": "x", "stop": "y" * 1001}, "stop", "at most 1000 characters"),
    ("completions", {"prompt": "x", "seed": 2**63}, "seed", "64-bit"),
    ("completions", {"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias", "below 320"),
    ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ("completions", {"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids", "below 320"),
    ("completions", {"prompt": "x", "namespace": "n" * 257}, "namespace", "at most 256 characters"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
    ("completions", {"prompt": "x", "tools": [1]}, "tools", "not a field"),
    ("completions", {"prompt": "x", "best_of": 1, "n": 2}, "best_of", "between n, which is 2, and 128"),
    ("completions", {"prompt": "x", "best_of": 129}, "best_of", "between n, which is 1, and 128"),
    ("completions", {"prompt": "x", "best_of": 2, "stream": True}, "best_of", "n where stream is true"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ("completions", {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs", "between 0 and 20"),
    ("completions", {"prompt": [-1], "echo": True}, "prompt", "from 0 to 319"),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix", "must be left out"),
    ("completions", {"prompt": "\ud800"}, "", "body must be valid Unicode"),
    ("completions", {}, "prompt", "required"),
    ("completions", {"prompt": [3, 3, 3]}, "prompt", "three threes"),  # refused by the engine itself
    ("chat/completions", {"messages": []}, "messages", "at least one"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages", "role must be"),
    ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "str"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages", "at most 2047 tokens"),
    ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs", "logprobs is true"),
]


@pytest.mark.parametrize(("path", "body", "param", "limit"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_at_once_naming_field_and_limit(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, limit: str
) -> None:
    began = time.monotonic()
    response = http.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert time.monotonic() - began < 5
    error = response.json()["error"]
    assert limit in error["message"]
    assert (error["param"] or "") == param
    assert error["message"].startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [b"", b"\x00garbage", b'{"prompt": "\xff\xfe"}', b"[]", b"[" * 200_000, b'{"prompt": "x"'],
    ids=lambda body: repr(body[:12]),
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "body" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_empty(http: httpx.Client, body: bytes) -> None:
    response = http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert "empty body" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br, gzip"])
def test_a_compressed_body_is_refused_as_one(http: httpx.Client, encoding: str) -> None:
    body = gzip.compress(b'{"prompt": "x", "max_tokens": 1}')
    response = http.post("/v1/completions", content=body, headers={"content-encoding": encoding})
    assert response.status_code == 415
    assert "uncompressed" in response.json()["error"]["message"]
    plain = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_health_answers_head_as_get_without_a_body(http: httpx.Client) -> None:
    head, get = http.head("/health"), http.get("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]
    assert get.json() == {"status": "ok"}


def test_an_unknown_model_is_a_404_that_names_the_one_served(http: httpx.Client, model_folder: Any) -> None:
    response = http.post("/v1/completions", json={"prompt": "x", "model": "gpt-5"})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert str(model_folder) in response.json()["error"]["message"]
    assert http.get("/v1/models/gpt-5").status_code == 404


def test_wrong_paths_methods_and_sizes_have_openai_shaped_errors(http: httpx.Client) -> None:
    for response, status in (
        (http.get("/v1/nonsense"), 404),
        (http.get("/v1/completions"), 405),
        (http.post("/v1/completions", content=b" " * (2**24 + 1)), 413),
    ):
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_bytes_that_are_no_http_harm_nobody(server: Any, http: httpx.Client) -> None:
    for garbage in (b"\x00\xff" * 500, b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
            connection.sendall(garbage)
            connection.settimeout(5)
            connection.recv(1000)
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_gets_its_requests_aborted(server: Any, stream: bool) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2000, "stream": stream, "n": 3}).encode()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        if stream:
            assert b"200 OK" in connection.recv(1000)
        while server.report()["running"] < 3:
            time.sleep(0.01)
    began = time.monotonic()
    server.wait_idle()
    # Two thousand tokens would take at least four seconds.
    assert time.monotonic() - began < 3


def test_many_at_once_all_get_their_own_answers(http: httpx.Client, server: Any) -> None:
    def ask(i: int) -> bool:
        prompt = f"request {i:03}."
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 40}).json()
        return bool((prompt * 10).startswith(answer["choices"][0]["text"]))

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(64)))
    server.wait_idle()
