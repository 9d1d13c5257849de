"""Several workers behind one frontend, in real processes with the real scheduler and cache, and a model that only echoes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = [sys.executable, "-P", str(Path(__file__).parent / "caching_worker.py")]


def complete(server: Any, prompt: str | list[str], max_tokens: int = 1, **body: Any) -> Any:
    body |= {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def metrics(server: Any) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("waited for 20 seconds")


@pytest.fixture(scope="module")
def two(module_start: Any) -> Any:
    return module_start(workers=2, worker_command=COMMAND, config={"kv_cache_tokens": 65536}).wait_ready()


def test_each_worker_has_its_share_of_the_cores_and_reports_add_both_up(two: Any) -> None:
    assert len(two.worker_pids) == 2
    report = two.report()
    assert report["num_threads"] == 2 * max(1, len(os.sched_getaffinity(0)) // 2)
    assert report["blocks_total"] == 2 * 65536 // 16
    assert report["max_model_len"] == 16384
    assert [worker["worker"] for worker in report["workers"]] == [0, 1]
    assert [worker["blocks_total"] for worker in report["workers"]] == [4096, 4096]
    for number, name in enumerate(("0", "1")):
        assert metrics(two)[f'radixkv_worker_kv_blocks_cached{{worker="{name}"}}'] == report["workers"][number]["blocks_cached"]
    assert metrics(two)["radixkv_engine_up"] == 1


def test_conversations_spread_over_both_workers_and_each_finds_its_own_last_turn(two: Any) -> None:
    before = [worker["requests"] for worker in two.report()["workers"]]
    system = "You are one of several agents, and this is what all of you are told. " * 16
    turns = [f"{i} says what only {i} knows, at some length. " * 3 for i in range(6)]
    # All six at once and, later, turns so short that no worker can fall behind by more than the router's slack.
    complete(two, [system + turn for turn in turns])

    def converse(i: int) -> list[tuple[int, int]]:
        prompt, hits = system + turns[i], []
        last = len(httpx.post(f"{two.url}/tokenize", json={"prompt": prompt}).json()["tokens"])
        for _ in range(3):
            prompt += turns[i]
            answer = complete(two, prompt)
            hits.append((cached(answer), last))
            last = answer["usage"]["prompt_tokens"]
        return hits

    with ThreadPoolExecutor(6) as pool:
        for hits in pool.map(converse, range(6)):
            for hit, last_tokens in hits:
                assert hit >= last_tokens - 16, "a turn did not find the one before it"
    each = [worker["requests"] - past for worker, past in zip(two.report()["workers"], before, strict=True)]
    assert sum(each) == 24
    assert min(each) >= 4
    two.wait_idle()


def test_a_cached_prompt_is_found_again_whichever_worker_has_it_but_not_by_another_namespace(two: Any) -> None:
    prompts = [f"{i} is a prompt of its own. " * 10 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: cached(complete(two, prompt)), prompts)) == [0] * 4
    for prompt in prompts:
        answer = complete(two, prompt)
        assert cached(answer) > answer["usage"]["prompt_tokens"] - 16
        assert cached(complete(two, prompt, namespace="other")) == 0
        assert cached(complete(two, prompt, namespace="other")) == cached(answer)
    assert httpx.post(f"{two.url}/reset_prefix_cache").status_code == 200
    assert all(cached(complete(two, prompt)) == 0 for prompt in prompts)


def test_when_one_worker_dies_its_requests_go_on_on_the_other_and_nobody_waits_for_the_next(two: Any) -> None:
    server = two
    one, other = server.worker_pids
    prompts = [chr(97 + i) * 600 for i in range(8)]
    (server.folder / "hold").touch()
    with ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(complete, server, prompt, 400) for prompt in prompts]
        wait_until(lambda: server.report()["running"] == 8)
        on_each = [worker["running"] for worker in server.report()["workers"]]
        assert min(on_each) > 0
        os.kill(one, signal.SIGKILL)
        wait_until(lambda: server.worker_pids != [one, other])
        late = complete(server, "someone who comes meanwhile", 8)
        assert late["choices"][0]["text"].startswith("someo")
        for prompt, stream in zip(prompts, streams, strict=True):
            assert stream.result()["choices"][0]["text"] == prompt[0] * 400
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert len(server.report().get("workers", ())) == 0, "it was to be held up"
    (server.folder / "hold").unlink()
    assert metrics(server)["radixkv_requests_resubmitted_total"] in on_each
    assert metrics(server)["radixkv_worker_restarts_total"] == 1
    wait_until(lambda: len(server.report().get("workers", ())) == 2)
    server.wait_idle()
    # All of them have ended on the one that lived, and the frontend knows that the new one holds nothing of what the dead one did.
    for prompt in prompts:
        answer = complete(server, prompt)
        assert cached(answer) == answer["usage"]["prompt_tokens"] - 1
    assert "Traceback" not in server.log


@pytest.mark.full
def test_a_worker_that_does_not_answer_is_left_out_of_the_metrics_before_prometheus_gives_up(start_server: Any) -> None:
    server = start_server(workers=2, worker_command=COMMAND).wait_ready()
    os.kill(server.worker_pids[1], signal.SIGSTOP)
    text = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert 'radixkv_worker_requests_running{worker="0"} 0.0' in text
    assert 'worker="1"' not in text
    assert "radixkv_engine_up 1.0" in text


@pytest.mark.full
def test_one_of_two_workers_that_hangs_is_replaced_and_a_drain_waits_for_both(start_server: Any) -> None:
    server = start_server(workers=2, worker_command=COMMAND, hang_timeout=2).wait_ready()
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(complete, server, chr(97 + i) * 60, 1500) for i in range(4)]
        wait_until(lambda: server.report()["running"] == 4)
        os.kill(server.worker_pids[1], signal.SIGSTOP)
        wait_until(lambda: "engine process 1 was busy and said nothing for 2 s, so it was killed" in server.log)
        wait_until(lambda: "engine process 1 is back" in server.log)
        more = [pool.submit(complete, server, "x" * 60, 100) for _ in range(4)]
        server.process.send_signal(signal.SIGTERM)
        for i, stream in enumerate(streams):
            assert stream.result()["choices"][0]["text"] == chr(97 + i) * 1500
        del more
    workers = server.worker_pids
    assert server.process.wait(20) == 0
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in server.log
