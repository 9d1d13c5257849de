"""The live page's data: what it says, and to whom."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from radixkv.cache import PrefixCache
from radixkv.cache.snapshot import SnapshotNode
from radixkv.server.activity import SECONDS, Activity
from radixkv.server.recent import Recent, since_start
from radixkv.server.timeline import SPANS, Timeline
from radixkv.server.use_times import UseTimes

CACHING = [sys.executable, "-P", str(Path(__file__).parent / "caching_worker.py")]
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


def test_the_newest_sequences_are_remembered_as_far_as_their_prompts_have_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("radixkv.server.activity.REQUESTS", 3)
    monkeypatch.setattr("radixkv.server.activity.PROMPT_TOKENS", 100)
    activity = Activity()

    def remembered(length: int) -> list[int]:
        activity.began("a", "", range(length), 0, {"new": length}, None, 0.1)
        return [len(request.prompt) for request in activity.requests]

    assert [remembered(length) for length in (10, 20, 30, 40)][-2:] == [[10, 20, 30], [20, 30, 40]]
    assert remembered(50) == [40, 50]
    assert remembered(101) == []
    assert remembered(100) == [100]
    assert activity.totals["prompt_tokens"] == 351


# --- time ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.4, 7, 5000, 1e7])
def test_a_timeline_has_few_spans_however_long_it_is_and_loses_nothing(seconds: float):
    timeline = Timeline()
    for i in range(500):
        timeline.add(i * seconds / 499, 100, 30 + i % 2, {"new": 50, "diverged": 20 - i % 2})
    parts = timeline.parts()
    assert 0 < len(parts) <= SPANS
    assert len(parts) > SPANS / 2 or seconds < 60
    assert sum(part.requests for part in parts) == 500
    assert sum(part.prompt_tokens for part in parts) == 50000
    assert sum(part.cached_tokens for part in parts) == 15250
    assert sum(sum(part.missed.values()) for part in parts) == 34750
    assert parts[0].name == "0:00:00"


def test_a_prefixs_age_in_seconds_is_right_to_a_second_and_a_part_of_the_age():
    times, now, used = UseTimes(), 1000.0, {}
    rng = np.random.default_rng(0)
    cache = PrefixCache(10)
    for ended in range(1, 40000):
        used[ended] = now
        pause = rng.choice([0.001, 0.3, 30.0, 9000.0], p=[0.5, 0.489, 0.01, 0.001])
        times.note(ended, now + 0.0005, idle=pause > 0.1)
        now += pause
    assert len(times._samples) < 2000
    for ended in [*range(1, 40000, 97), 39990, 39998, 39999]:
        snapshot = cache.snapshot()
        snapshot.nodes.append(node_used(39999 - ended))
        times.fill(snapshot, 39999, now)
        age, said = now - used[ended], snapshot.nodes[-1].idle_seconds
        assert said is not None
        assert 0.97 * age - 1.1 < said <= age


def test_ages_begin_anew_with_an_engine_that_does():
    times = UseTimes()
    times.note(500, 10.0, idle=True)
    times.note(1, 20.0, idle=True)
    snapshot = PrefixCache(10).snapshot()
    snapshot.nodes.extend([node_used(0), node_used(None)])
    times.fill(snapshot, 1, 25.0)
    assert [node.idle_seconds for node in snapshot.nodes[-2:]] == [5.0, None]


def node_used(age: int | None) -> SnapshotNode:
    return SnapshotNode("segment", "id", -1, 0, 1, 1, 0, 0, 1, age, False, "", [])


@pytest.mark.parametrize("never_began", [0, 50, 5000])
def test_requests_that_never_began_hide_nothing_of_what_other_namespaces_have(never_began: int):
    activity = Activity()
    activity.began("a", "team", range(300), 0, {"new": 300}, None, 0.5)
    activity.began("b", "team", range(300), 100, {"diverged": 200}, None, 0.5)
    of_workers = {"new": 220 + never_began, "diverged": 200, "namespace": 80}
    missed = since_start(activity, {"missed_tokens": of_workers})["missed_tokens"]
    assert missed == {"new": 220, "diverged": 200, "namespace": 80}


def test_an_open_page_does_not_wait_for_a_report(monkeypatch: pytest.MonkeyPatch):
    may_end = threading.Event()
    monkeypatch.setattr("radixkv.server.recent._report", lambda *_: may_end.wait())
    activity = Activity()
    activity.began("a", "", range(100), 40, {"new": 60}, None, 0.5)
    recent = Recent(SimpleNamespace(activity=activity, model="m", show_prompts=False))  # type: ignore[arg-type]

    async def look() -> object:
        report = asyncio.create_task(recent.report({}))
        await asyncio.sleep(0)
        try:
            return await asyncio.wait_for(recent.advice({}), 5)
        finally:
            may_end.set()
            await report

    assert asyncio.run(look()) == []


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
    used = [node for worker in snapshot["workers"] for node in worker["nodes"] if node["uses"]]
    assert used
    assert all(0 <= node["idle_seconds"] < 60 for node in used)
    assert blocks == sum(worker["num_blocks"] for worker in snapshot["workers"]) == report["blocks_cached"] > 0


@pytest.mark.parametrize("path", ["/snapshot", "/dashboard/data", "/report/recent"])
def test_texts_are_hidden_unless_they_are_to_be_shown(two: Any, path: str):
    answer = httpx.get(two.url + path)
    assert answer.json().get("show_prompts", False) is False
    fields = ['"ours":"', '"theirs":"', '"below":"', '"prompt":', "vault", "“"] + ['"text"'] * (path == "/snapshot")
    found = [field for field in fields if field in answer.text]
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
    for path in ("/dashboard/data", "/snapshot", "/report/recent"):
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
