"""`radixkv report URL` on a server that works: its totals are the metrics', every reason is found where it was planted, and its
advice holds when it is followed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from radixkv.cli import main

CACHING = [sys.executable, "-P", str(Path(__file__).parent / "caching_worker.py")]
REAL = [sys.executable, "-P", "-m", "radixkv.server.worker"]
IN_FLIGHT = 11
KEY = "operator-0123456789abcdef"
TENANT = "tenant-0123456789abcdef"
REASONS = ("new", "diverged", "evicted", "partial_block", "in_flight", "last_token", "namespace")


def numbers(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(20, 300, n).tolist()  # type: ignore[no-any-return]


def complete(url: str, prompt: list[int] | str, namespace: str = "", key: str = KEY) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "namespace": namespace}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=20)
    assert answer.status_code == 200, answer.text


def plant(url: str) -> dict[str, tuple[str, int, int]]:
    """Have requests miss for each reason; where: the namespace, the position, and the tokens."""
    head, tail = numbers(1, 32), numbers(2, 64)
    prompts = {
        "new": [numbers(3, 64)],
        "diverged": [head + numbers(4, 64), head + tail],
        "partial_block": [numbers(5, 32) + tail[:10], numbers(5, 32) + tail],
        "in_flight": [[IN_FLIGHT, *numbers(6, 80)]],
        "last_token": [numbers(7, 48), numbers(7, 48)],
        "tenant": [numbers(8, 128)],
        "namespace": [numbers(8, 128) + numbers(9, 20)],
        "evicted": [numbers(10, 96)],
        "others": [numbers(20 + i, 400) for i in range(6)],
    }
    for namespace, each in prompts.items():
        for prompt in each:
            complete(url, prompt, namespace)
        # What another namespace has now is looked up when somebody asks for the counters.
        httpx.get(f"{url}/report", headers={"authorization": f"Bearer {KEY}"}).raise_for_status()
    complete(url, [*numbers(10, 96), 5], "evicted")
    return {
        "new": ("new", 0, 64),
        "diverged": ("diverged", 32, 64),
        "partial_block": ("partial_block", 32, 10),
        "in_flight": ("in_flight", 0, 80),
        "last_token": ("last_token", 47, 1),
        "namespace": ("namespace", 0, 128),
        "evicted": ("evicted", 0, 96),
    }


@pytest.fixture(scope="module")
def server(module_start: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEY}\n{TENANT} team\n")
    keys.chmod(0o600)
    server = module_start(
        worker_command=CACHING, show_prompts=True, api_keys=str(keys), config={"kv_cache_tokens": 2048}
    ).wait_ready()
    server.planted = plant(server.url)
    yield server
    assert "Traceback" not in server.log


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_API_KEY", KEY)


def reported(url: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["report", url, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_is_found_where_it_was_planted(server: Any, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = reported(server.url, capsys)
    namespace, position, tokens = server.planted[reason]
    assert report["missed_tokens"][reason] >= tokens
    place = next(row for row in report["recent"]["places"] if (row["reason"], row["namespace"]) == (reason, namespace))
    assert (place["position"], place["tokens"]) == (position, tokens)
    missed = next(miss for miss in report["recent"]["misses"] if miss["reason"] == reason)
    assert missed["tokens"] == report["missed_tokens"][reason]


def test_both_sides_of_a_parting_are_shown_where_prompts_may_be(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for question in ("what then?", "why so?"):
        complete(server.url, f"The vault opens at nine. {question}", "texts")
    rows = reported(server.url, capsys)["recent"]["places"]
    row = next(row for row in rows if row["namespace"] == "texts" and row["reason"] == "diverged")
    assert "why" in row["ours"]
    assert "what" in row["theirs"]


def has_the_metrics_totals(report: Any, url: str) -> tuple[float, float]:
    """Hits and queries."""
    lines = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text.splitlines()
    measured = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    def metric(name: str) -> float:
        return sum(float(value) for key, value in measured.items() if key.partition("{")[0] == name)

    hits, queries = metric("vllm:prefix_cache_hits_total"), metric("vllm:prefix_cache_queries_total")
    assert (report["hit_tokens"], report["prompt_tokens"]) == (hits, queries)
    assert report["generated_tokens"] == metric("vllm:generation_tokens_total")
    assert report["requests"] == metric("vllm:request_success_total")
    assert sum(report["missed_tokens"].values()) == queries - hits == metric("radixkv_prefix_cache_missed_total")
    return hits, queries


def test_totals_are_the_metrics_and_of_all_requests_where_all_are_remembered(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = reported(server.url, capsys)
    hits, queries = has_the_metrics_totals(report, server.url)
    assert report["requests"] == report["recent"]["saving"]["requests"]
    assert sum(part["hit_tokens"] for part in report["namespaces"].values()) == hits
    for parts in (report["over_time"], report["recent"]["over_time"], report["recent"]["namespaces"]):
        assert sum(part["cached_tokens"] for part in parts) == hits
        assert sum(part["prompt_tokens"] for part in parts) == queries
        assert sum(sum(part["missed"].values()) for part in parts) == queries - hits
    for part in report["recent"]["namespaces"]:
        assert report["namespaces"][part["name"]]["hit_tokens"] == part["cached_tokens"]
    assert report["recent"]["curve"]["today"]["capacity_blocks"] == report["blocks"]["total"] == 128


def test_text_and_page_answer_in_order_and_say_what_is_of_recent_requests_only(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    titles = [
        "What the cache saved", "Which prefixes earn it", "Where the misses went", "What to do", "By namespace", "Over time",
        "Hit rate over cache size",
    ]  # fmt: skip
    assert main(["report", server.url]) == 0
    text = capsys.readouterr().out
    assert main(["report", server.url, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    for answer in (text, page):
        places = [answer.index(title) for title in titles]
        assert places == sorted(places)
        assert "of the last " in answer
        assert "another namespace has it" in answer
    assert "today: 128 blocks" in page


def test_without_a_prefix_cache_all_prompt_tokens_are_missed_unexplained(
    start_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    url = start_server(worker_command=CACHING, config={"enable_prefix_caching": False}).wait_ready().url
    complete(url, numbers(1, 100))
    assert main(["report", url]) == 0
    reasons = capsys.readouterr().out.partition("Where the misses went")[2].partition("Worst places")[0]
    assert re.search(r"unexplained\W+100\W+100\.0 %", reasons)


def test_only_who_may_see_all_namespaces_gets_it(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for keys, words in (("", "set RADIXKV_API_KEY"), (TENANT, "a key without a namespace")):
        monkeypatch.setenv("RADIXKV_API_KEY", keys)
        assert main(["report", server.url]) == 1
        assert words in capsys.readouterr().err
        headers = {"authorization": f"Bearer {keys}"} if keys else {}
        assert httpx.get(f"{server.url}/report/recent", headers=headers).status_code in (401, 403)


def test_moving_a_time_as_advised_saves_what_was_promised(start_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server(worker_command=CACHING, config={"kv_cache_tokens": 16384}).wait_ready()
    unused = reported(server.url, capsys)
    assert (unused["requests"], unused["recent"], unused["over_time"]) == (0, None, [])
    start, tools = numbers(1, 37), numbers(2, 320)
    prompts = [[*start, 7, 8, 30 + i, 50 + i, *tools, *numbers(100 + i, 20)] for i in range(10)]
    for prompt in prompts:
        complete(server.url, prompt, "before")
    advice = reported(server.url, capsys)["recent"]["advice"][0]
    assert advice["kind"] == "move_span"
    assert advice["ours"] is None  # the server does not show prompts
    at, length, run = (advice["details"][name] for name in ("position", "length", "run"))
    assert (at, length, run) == (39, 2, 320)
    for prompt in prompts:
        span, behind = prompt[at : at + length], prompt[at + length : at + length + run]
        complete(server.url, prompt[:at] + behind + span + prompt[at + length + run :], "after")
    measured = reported(server.url, capsys)["namespaces"]
    assert measured["after"]["hit_tokens"] - measured["before"]["hit_tokens"] == advice["tokens_saved"] > 9 * 300
    assert advice["details"]["tokens_a_request"] == advice["tokens_saved"] / 10
    assert f"saves {advice['tokens_saved'] / 10:,.0f} tokens a request" in advice["text"]

    os.kill(server.worker_pids[0], signal.SIGKILL)  # its counters go with it
    complete(server.url, prompts[0], "later")
    has_the_metrics_totals(report := reported(server.url, capsys), server.url)
    assert report["requests"] == 21


@pytest.mark.full
def test_over_the_real_model_text_that_is_moved_as_advised_saves_about_what_was_promised(
    start_server: Any, default_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model": "smollm2-135m", "kv_cache_tokens": 8192}
    server = start_server(worker_command=REAL, show_prompts=True, config=config).wait_ready()
    rules = (
        "You help the staff of a small library. Answer in one sentence. Ask back where a question is not clear. Books may be kept "
        "for four weeks, films for one. Readers under twelve need a parent's card. The library is open from nine to five.\n"
    )
    times = [f"The time is {8 + i}:{10 + 7 * i % 50}.\n" for i in range(8)]
    questions = [f"May I renew book {i}?" for i in range(8)]
    for time, question in zip(times, questions, strict=True):
        complete(server.url, f"System.\n{time}{rules}{question}", "before")
    advice = reported(server.url, capsys)["recent"]["advice"][0]
    assert advice["kind"] == "move_span"
    assert "8:10" in advice["theirs"]
    assert "15:59" in advice["ours"]
    assert "You help the staff" in advice["below"]
    for time, question in zip(times, questions, strict=True):
        complete(server.url, f"System.\n{rules}{time}{question}", "after")
    measured = reported(server.url, capsys)["namespaces"]
    saved = measured["after"]["hit_tokens"] - measured["before"]["hit_tokens"]
    # The text before the time's digits went along, and texts are cut into tokens otherwise where they meet.
    assert abs(saved - advice["tokens_saved"]) <= 8 * len(times)
    assert saved > 30 * len(times)
