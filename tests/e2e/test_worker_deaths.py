"""500 mixed requests or more on the real model, 64 at a time, while its worker is killed five times: nobody may notice."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import runpy
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv import SamplingParams
from radixkv.model.loader import ModelSource
from radixkv.server.client import AsyncClient
from radixkv.server.launcher import WORKER_COMMAND

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "server" / "conftest.py"))
REQUESTS, CONCURRENCY, KILLS = 500, 64, 5
TOKENS_BETWEEN_KILLS = 500
PREFIX = "Here are some facts about places, animals and numbers. "


def request(i: int) -> dict[str, Any]:
    """The ``i``-th: streamed or not, text or chat, greedy or sampled, with stop strings, choices or penalties, over ZeroMQ."""
    body: dict[str, Any] = {
        "prompt": PREFIX * (i % 3) + f"Fact number {i % 50} is that",
        "max_tokens": 8 + i * 7 % 25,
        "temperature": 0,
        "ignore_eos": True,
    }
    match i % 8:
        case 1:
            body |= {"stream": True}
        case 2:
            body |= {"stream": True, "logprobs": 2}
        case 3:
            body |= {"temperature": 1.0, "seed": i, "n": 2}
        case 4:
            body |= {"stream": True, "stop": ["the", "."], "temperature": 0.8, "seed": i}
        case 5:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        case 6:
            body |= {"zmq": True, "frequency_penalty": 0.5}
        case 7:
            body |= {"temperature": 1.0}
    return body


async def answer(http: httpx.AsyncClient, zmq: AsyncClient, body: dict[str, Any]) -> Any:
    """All that must not depend on whether workers died."""
    if body.pop("zmq", False):
        completion = await zmq.generate(body.pop("prompt"), SamplingParams(**body))
        return [(choice.text, choice.token_ids, choice.finish_reason) for choice in completion.choices]
    if not body.get("stream"):
        response = await http.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
        assert response.status_code == 200, response.text
        result = response.json()
        if body["temperature"] and "seed" not in body:  # no two answers need be alike
            return result["usage"]["completion_tokens"]
        return result["choices"], result["usage"]["completion_tokens"]
    text, logprobs, reasons = "", [], []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
        assert "error" not in event, event
        (choice,) = event["choices"]
        text += choice["text"]
        logprobs.append(choice["logprobs"])
        reasons.append(choice["finish_reason"])
    assert reasons[-1]
    assert not any(reasons[:-1])
    return text, [entry for entry in logprobs if entry], reasons[-1]


async def all_answers(http: httpx.AsyncClient, endpoint: str, number: int, killing: asyncio.Task[Any] | None = None) -> list[Any]:
    """What each of ``number`` requests is answered, one list for each.

    While ``killing`` isn't done the clients begin with the first request again: however fast the requests are answered,
    workers die with many of them at hand.
    """
    turns = itertools.count()
    answers: list[Any] = [[] for _ in range(number)]

    async def client() -> None:
        for turn in turns:
            if turn >= number and (killing is None or killing.done()):
                return
            answers[turn % number].append(await answer(http, zmq, request(turn % number)))

    async with AsyncClient(endpoint, timeout=120) as zmq:
        await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return answers


async def kill_workers(http: httpx.AsyncClient, server: Any, workers: int, kills: int) -> list[int]:
    """Kill workers in turn after they have given some tokens to many requests.  Returns the killed."""
    killed: list[int] = []
    while len(killed) < kills:
        await asyncio.sleep(0.05)
        if (await http.get("/ready")).status_code != 200:
            continue
        response = await http.get("/report")
        if response.status_code != 200 or len(response.json().get("workers", "1")) < workers:
            continue
        if response.json()["generated_tokens"] >= TOKENS_BETWEEN_KILLS / workers:
            alive = server.worker_pids
            killed.append(alive[len(killed) % workers])
            os.kill(killed[-1], signal.SIGKILL)
            while killed[-1] in server.worker_pids:
                await asyncio.sleep(0.01)
    return killed


@pytest.mark.full
@pytest.mark.parametrize(("number", "workers", "kills"), [(REQUESTS, 1, KILLS), (REQUESTS // 2, 2, 3)])
def test_no_answer_shows_that_workers_were_killed_under_it(
    default_model: ModelSource, record_property: Any, number: int, workers: int, kills: int
) -> None:
    async def run(server: Any) -> tuple[list[Any], list[Any], list[int]]:
        endpoint = next(word for word in server.log.split() if word.startswith("tcp://"))
        limits = httpx.Limits(max_connections=CONCURRENCY + 2)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
            undisturbed = await all_answers(http, endpoint, number)
            async with asyncio.timeout(240):
                killing = asyncio.create_task(kill_workers(http, server, workers, kills))
                disturbed = await all_answers(http, endpoint, number, killing)
            return undisturbed, disturbed, await killing

    with SUPPORT["starting"](Path("smollm2-135m")) as start:
        server = start(
            workers=workers, worker_command=WORKER_COMMAND, zmq="tcp://127.0.0.1:*", config={"kv_cache_tokens": 32768}
        ).wait_ready()
        undisturbed, disturbed, killed = asyncio.run(run(server))
        for once, answers in zip(undisturbed, disturbed, strict=True):
            assert answers == once * len(answers)
        assert server.wait_idle()["blocks_locked"] == 0
        metrics = dict(line.rsplit(" ", 1) for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line[0] != "#")
        assert float(metrics["radixkv_worker_restarts_total"]) == kills
        assert float(metrics["radixkv_requests_resubmitted_total"]) > kills * (CONCURRENCY / 2 if workers == 1 else 1)
        assert not [name for name in metrics if name.startswith("radixkv_request_failure_total")]
        pids = killed + server.worker_pids
        assert len(set(pids)) == kills + workers
        assert server.stop() == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in server.log
    asked = sum(map(len, disturbed))
    resubmitted = metrics["radixkv_requests_resubmitted_total"]
    record_property(
        "finding",
        f"{asked} requests, {workers} worker(s) at a time, {kills} killed, {resubmitted} resubmissions: all answers the same",
    )
