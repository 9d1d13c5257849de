"""The live page's data: what it says, and to whom."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from radixkv.server.activity import SECONDS, Activity, Parted, RecentRequest
from radixkv.server.advice import Advice, advise

CACHING = [sys.executable, "-P", str(Path(__file__).parent / "caching_worker.py")]
STATS = {"prefix_caching": True, "block_size": 16, "blocks_total": 100}
PRIVATE = "the vault opens at nine and closes at five, and nobody may know of it"


# --- sums ---------------------------------------------------------------------------------------------------------------------


def test_series_have_a_value_for_each_second_and_none_for_what_nobody_asked():
    now = 1000.0
    activity = Activity(lambda: now)
    activity.began("a", "", range(100), 40, {"new": 60}, None, 0.5)
    activity.generated(1)
    now = 1002.9
    activity.generated(3)
    activity.looked({"running": 1, "waiting": 2, "blocks_free": 3, "blocks_cached": 4, "blocks_locked": 5, "more": 6})
    series = activity.series()
    assert {len(values) for values in series.values()} == {SECONDS}
    assert series["prompt_tokens"][-3:] == [100, 0, 0]
    assert series["cached_tokens"][-3:] == [40, 0, 0]
    assert series["generated_tokens"][-3:] == [1, 0, 3]
    assert series["first_token_seconds"][-3:] == [0.5, 0, 0]
    assert series["blocks_locked"][-3:] == [None, None, 5]
    now = 1000.0 + SECONDS + 3
    assert not any(activity.series()["generated_tokens"])
    assert activity.totals == {"prompt_tokens": 100, "cached_tokens": 40, "generated_tokens": 4}


# --- advice -------------------------------------------------------------------------------------------------------------------


def request(i: int, prompt: int = 200, position: int = -1, tail: Any = (), **missed: int) -> RecentRequest:
    parted = None if position < 0 else Parted(position, [1, i], [1, i - 1], np.array(tail, dtype=np.int32))
    return RecentRequest(str(i), "", 0.0, prompt, prompt - sum(missed.values()), missed, 0.1, parted)


def test_what_changes_before_text_that_stays_the_same_is_to_be_moved():
    """As a time does, whose last digits change, or more of them."""
    tail = list(range(500, 600))
    requests = [request(i, 140, 30 + i % 3, [i, i + 7, *tail, 1000 + i], diverged=110) for i in range(6)]
    (advice,) = advise(requests, STATS)
    assert (advice.position, advice.ours, advice.theirs, advice.tokens) == (32, [1, 5], [1, 4], 600)
    assert advice.title == "Move what changes at token 30 behind what stays the same"
    assert "100 tokens a request" in advice.detail


def test_questions_that_differ_after_what_they_share_are_no_reason_for_advice():
    rng = np.random.default_rng(0)
    assert advise([request(i, 140, 100, rng.integers(0, 1000, 40), diverged=40) for i in range(20)], STATS) == []


def test_twice_is_not_often_enough():
    assert advise([request(i, 140, 30, range(100), diverged=110) for i in range(2)], STATS) == []


@pytest.mark.parametrize(
    ("reason", "title"),
    [
        ("evicted", "Give the cache more room"),
        ("partial_block", "Try blocks smaller than 16 tokens"),
        ("in_flight", "Send the first of many equal prompts a moment before the others"),
    ],
)
def test_a_reason_that_costs_a_twentieth_is_worth_a_word(reason: str, title: str):
    assert advise([request(1, **{reason: 9})], STATS) == []
    (advice,) = advise([request(1, **{reason: 12})], STATS)
    assert (advice.title, advice.tokens) == (title, 12)
    assert "12 of the last 200 prompt tokens (6.0 %)" in advice.detail


def test_advice_comes_in_the_order_of_what_it_saves():
    advice = advise([request(1, evicted=20, partial_block=60)], STATS)
    assert [each.tokens for each in advice] == [60, 20]


def test_without_prefix_caching_there_is_one_thing_to_do():
    assert advise([request(1, evicted=20)], STATS | {"prefix_caching": False}) == [
        Advice("Turn prefix caching on", "The server runs without it, so every prompt token is computed.", 0)
    ]


# --- routes -------------------------------------------------------------------------------------------------------------------


def complete(url: str, prompt: str, **fields: object) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{url}/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 2, **fields})
    assert answer.status_code == 200


@pytest.fixture(scope="module")
def two(module_start: Any) -> Any:
    server = module_start(worker_command=CACHING, workers=2).wait_ready()
    for question in ("what then?", "why so?", "and now?"):
        complete(server.url, PRIVATE + question, namespace="team")
    yield server
    assert "Traceback" not in server.log


def test_the_page_loads_only_its_own_files_and_runs_no_script_in_its_text(http: httpx.Client):
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    for name, kind in (("app.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        file = http.get(f"/web/{name}")
        assert (file.status_code, file.headers["content-type"].partition(";")[0]) == (200, kind)
        assert file.headers["x-content-type-options"] == "nosniff"
    for name in ("nothing.js", "..%2Fdashboard.py", "%2e%2e/dashboard.py"):
        assert http.get(f"/web/{name}").status_code == 404


def test_snapshots_of_all_workers_have_all_their_blocks(two: Any):
    snapshot = httpx.get(f"{two.url}/snapshot").json()
    report = two.report()
    assert [worker["worker"] for worker in snapshot["workers"]] == [0, 1]
    blocks = sum(node["blocks"] for worker in snapshot["workers"] for node in worker["nodes"])
    assert blocks == sum(worker["num_blocks"] for worker in snapshot["workers"]) == report["blocks_cached"] > 0


@pytest.mark.parametrize("path", ["/snapshot", "/dashboard/data"])
def test_texts_are_hidden_unless_they_are_to_be_shown(two: Any, path: str):
    answer = httpx.get(two.url + path)
    assert answer.json()["show_prompts"] is False
    found = [field for field in ('"text"', '"ours"', '"theirs"', '"tail"', "vault") if field in answer.text]
    assert found == []
    assert '"first_tokens":[' not in answer.text or path != "/snapshot"


def test_recent_requests_say_what_was_cached_and_where_they_parted(two: Any):
    newest, *_, oldest = httpx.get(f"{two.url}/dashboard/data").json()["requests"]
    assert oldest["missed"] == {"new": oldest["prompt_tokens"]}
    assert 40 < newest["position"] <= len(PRIVATE)
    assert newest["cached_tokens"] + newest["computed_tokens"] == newest["prompt_tokens"]
    assert sum(newest["missed"].values()) == newest["computed_tokens"]
    assert (newest["output_tokens"], newest["finish_reason"], newest["namespace"]) == (2, "length", "team")


@pytest.mark.parametrize("given", ["0", "2001", "many", "-1"])
def test_a_bad_max_nodes_is_refused(two: Any, given: str):
    answer = httpx.get(f"{two.url}/snapshot?max_nodes={given}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_nodes")


def test_without_keys_a_page_whose_name_was_pointed_here_gets_nothing(two: Any):
    for path in ("/dashboard/data", "/snapshot"):
        assert httpx.get(two.url + path, headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(two.url + path, headers={"host": "localhost:8000"}).status_code == 200


def test_with_show_prompts_the_tree_and_the_parting_have_their_texts(start_server: Any):
    server = start_server(worker_command=CACHING, show_prompts=True).wait_ready()
    complete(server.url, PRIVATE + "what then?")
    complete(server.url, PRIVATE + "why so?")
    nodes = httpx.get(f"{server.url}/snapshot").json()["workers"][0]["nodes"]
    assert any(node["text"] and PRIVATE.startswith(node["text"]) for node in nodes)
    newest = httpx.get(f"{server.url}/dashboard/data").json()["requests"][0]
    assert newest["theirs"].endswith("what the") or newest["ours"].endswith("why so?")
