"""The whole stack, from HTTP and ZeroMQ down to the kernels, in processes of its own.

The oracle is the same model in this process: what a server answers must be what `LLM` says.
"""

from __future__ import annotations

import runpy
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from radixkv import LLM, SamplingParams
from radixkv.model.loader import ModelSource
from radixkv.server.client import Client
from radixkv.server.launcher import WORKER_COMMAND

AREA = Path(__file__).parents[1] / "server"
SUPPORT = runpy.run_path(str(AREA / "conftest.py"))
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
# Long enough that a common beginning fills blocks, and with characters of two to four bytes.
SHARED = "the quick brown fox jumps over the lazy dog. grüße aus köln, 日本語のテキスト 🙂🙃 emoji! " * 3
CONFIG = {"kv_cache_tokens": 16384, "num_threads": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Any]:
    with SUPPORT["starting"](tiny_model) as start:
        server = start(config=CONFIG, zmq="tcp://127.0.0.1:*", worker_command=WORKER_COMMAND).wait_ready()
        yield server
        assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), **CONFIG)  # type: ignore[arg-type]


@pytest.fixture
def openai(server: Any) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def complete(server: Any, **body: Any) -> Any:
    response = httpx.post(f"{server.url}/v1/completions", json=GREEDY | body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def expected(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate([prompt], SamplingParams(**(GREEDY | params)))[0]


def test_every_door_says_what_the_model_says_cold_and_warm(server: Any, openai: OpenAI, llm: LLM, tiny_model: Path) -> None:
    truth = expected(llm, SHARED)
    prompt_tokens = truth.num_prompt_tokens
    cold = complete(server, prompt=SHARED)
    warm = complete(server, prompt=SHARED)
    assert cold["choices"][0]["text"] == warm["choices"][0]["text"] == truth.text
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 1
    assert warm["usage"]["prompt_tokens"] == prompt_tokens
    chunks = openai.completions.create(
        model=str(tiny_model), prompt=SHARED, max_tokens=24, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == truth.text
    endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
    with Client(endpoint, timeout=60) as client:
        answer = client.generate(SHARED, SamplingParams(**GREEDY))
        assert answer.choices[0].token_ids == truth.token_ids
        assert answer.text == truth.text
        assert answer.usage.cached_tokens == prompt_tokens - 1


def test_a_chat_goes_through_the_models_template_and_the_next_turn_hits(openai: OpenAI, llm: LLM, tiny_model: Path) -> None:
    messages: list[Any] = [{"role": "system", "content": SHARED}, {"role": "user", "content": "Tell me."}]
    answer = openai.chat.completions.create(model=str(tiny_model), messages=messages, temperature=0, max_tokens=16)
    truth = llm.chat(messages, SamplingParams(temperature=0, max_tokens=16))[0]
    assert answer.choices[0].message.content == truth.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == truth.num_prompt_tokens
    messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "More."}]
    more = openai.chat.completions.create(model=str(tiny_model), messages=messages, temperature=0, max_tokens=4)
    assert more.usage is not None
    assert more.usage.prompt_tokens_details is not None
    assert (more.usage.prompt_tokens_details.cached_tokens or 0) >= answer.usage.prompt_tokens


def test_many_requests_at_once_get_what_each_gets_alone(server: Any, llm: LLM) -> None:
    prompts = [f"{SHARED[: 40 * (i % 5)]} question {i}" for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt=prompt)["choices"][0]["text"], prompts))
    assert answers == [expected(llm, prompt).text for prompt in prompts]
    server.wait_idle()


def test_n_choices_are_what_their_seeds_give_alone(server: Any, llm: LLM) -> None:
    sampled = {"prompt": SHARED, "temperature": 1.0}
    together = complete(server, **sampled, n=4, seed=11)
    texts = [choice["text"] for choice in together["choices"]]
    assert texts == [complete(server, **sampled, seed=11 + i)["choices"][0]["text"] for i in range(4)]
    assert texts == [expected(llm, SHARED, temperature=1.0, seed=11 + i).text for i in range(4)]
    assert len(set(texts)) > 1
    assert together["usage"]["completion_tokens"] == 4 * 24
    assert together["usage"]["prompt_tokens"] == expected(llm, SHARED).num_prompt_tokens


def test_without_a_seed_choices_differ(server: Any) -> None:
    choices = complete(server, prompt=SHARED, temperature=1.0, n=3)["choices"]
    assert len({choice["text"] for choice in choices}) == 3


def test_logprobs_are_those_of_the_model(server: Any, llm: LLM) -> None:
    truth = expected(llm, SHARED, logprobs=3)
    logprobs = complete(server, prompt=SHARED, logprobs=3)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([token.logprob for token in truth.logprobs], abs=1e-4)
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert chosen == max(top.values())


def test_an_echoed_prompts_logprobs_are_those_of_the_model_cached_or_not(server: Any, llm: LLM) -> None:
    prompt = f"scored: {SHARED}"
    scored = expected(llm, prompt, max_tokens=1, prompt_logprobs=1).prompt_logprobs
    cold, warm = [complete(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1) for _ in range(2)]
    for answer in (cold, warm):
        (choice,) = answer["choices"]
        assert choice["text"] == prompt
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([token.logprob for token in scored], abs=1e-4)
    missed = warm["usage"]["prompt_tokens_details"]["miss_reasons"]
    assert missed["logprobs"] > len(scored) - 16
    assert sum(missed.values()) == warm["usage"]["prompt_tokens"]


def test_a_stop_string_cut_from_the_middle_of_the_answer_ends_it(server: Any, llm: LLM) -> None:
    text = expected(llm, SHARED).text
    stop = text[5:8]
    answer = complete(server, prompt=SHARED, stop=stop)
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    server.wait_idle()


def test_an_end_of_text_token_ends_the_answer_unless_it_is_to_be_ignored(server: Any) -> None:
    biased = {"prompt": "abc", "logit_bias": {"2": 100}, "ignore_eos": False}
    answer = complete(server, **biased)
    assert answer["choices"][0] | {"logprobs": None} == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    assert complete(server, **biased | {"ignore_eos": True})["choices"][0]["finish_reason"] == "length"


def test_a_client_that_goes_away_in_mid_stream_gives_its_blocks_back_and_leaves_its_prefix_cached(server: Any) -> None:
    prompt = "a prompt of somebody who leaves " * 8
    body = {"prompt": prompt, "max_tokens": 1500, "stream": True, "ignore_eos": True, "n": 4}
    before = server.report()["generated_tokens"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    report = server.wait_idle()
    assert 0 < report["generated_tokens"] - before < 4 * 1500
    again = complete(server, prompt=prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_client_that_goes_away_before_an_answer_not_streamed_gives_its_blocks_back(server: Any) -> None:
    body = b'{"prompt": "somebody else who leaves", "max_tokens": 1900, "ignore_eos": true}'
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        while not server.report()["running"]:
            time.sleep(0.01)
    before = server.wait_idle()["generated_tokens"]
    time.sleep(0.2)
    assert server.report()["generated_tokens"] == before


def test_a_namespace_does_not_see_anothers_prefixes(server: Any) -> None:
    def cached(**fields: Any) -> int:
        usage = complete(server, prompt=SHARED + "!", max_tokens=1, **fields)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() > 0
    assert cached(namespace="other") == 0
    assert cached(namespace="other") > 0
    assert server.report()["namespaces"]["other"]["requests"] == 2
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_a_prompt_that_fills_the_context_is_served_and_one_token_more_is_refused(server: Any) -> None:
    longest = server.report()["max_model_len"]
    assert longest == 2048
    answer = complete(server, prompt=[7] * (longest - 1), max_tokens=1)
    assert answer["usage"]["total_tokens"] == longest
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": [7] * longest, "max_tokens": 1})
    assert response.status_code == 400
    assert f"prompt must be at most {longest - 1} tokens" in response.json()["error"]["message"]


@pytest.mark.full
def test_the_default_model_answers_a_chat_over_openais_client(default_model: ModelSource) -> None:
    with SUPPORT["starting"](Path("smollm2-135m")) as start:
        server = start(worker_command=WORKER_COMMAND, config={"model": "smollm2-135m"}).wait_ready()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        messages: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        answer = client.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=16)
        assert "Paris" in (answer.choices[0].message.content or "")
        again = client.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=16, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in again) == answer.choices[0].message.content
        assert server.stop(signal.SIGINT) == 0
