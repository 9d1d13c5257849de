"""What reporting costs: what runs against what, how it is summed up, and that each part is on where it is to be; never how fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from bench import reporting, unattributed
from bench.local import RADIXKV, server


def test_a_cost_is_the_median_over_pairs_of_the_same_turn() -> None:
    plain = {"as it comes": [100.0, 50.0], "no attribution": [100.0, 50.0], "log": [90.0, 48.0], "page": [100.0, 50.0]}
    first = plain | {"log with tokens": [80.0, 40.0], "all": [60.0, 40.0]}
    second = {name: [10.0, 10.0] for name in reporting.SETTINGS}
    rows = reporting.summary([first, second])
    assert set(rows) == set(reporting.COSTS)
    assert rows["request log"]["cost"] == pytest.approx((0.04 + 0.0) / 2)  # of 10 %, 4 %, nothing and nothing
    assert rows["request log"]["cost_high"] == pytest.approx(0.055)
    assert rows["request log with --log-tokens"]["cost_low"] == 0
    assert rows["request log with --log-tokens"]["on"] == 25
    assert rows["all of these"]["cost"] == pytest.approx(0.1)
    assert rows["live page, looked at"] == {"off": 30, "on": 30, "cost": 0, "cost_low": 0, "cost_high": 0}


def test_each_turn_runs_all_settings_on_their_servers_there_and_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    asked: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def fake_server(command: Sequence[str]) -> Iterator[str]:
        if "--request-log" in command:
            Path(command[command.index("--request-log") + 1]).write_text("{}\n")
        started.append(" ".join(command[command.index("serve") :]))
        yield started[-1]

    async def measure(url: str, concurrency: int, *, watched: bool, progress: Any) -> float:
        asked.append((url, watched))
        return 50 if watched else 100

    monkeypatch.setattr(reporting, "server", fake_server)
    monkeypatch.setattr(reporting, "measure", measure)
    out = tmp_path / "figures.json"
    assert reporting.main(["--rounds", "2", "--passes", "2", "--flags=--dtype float32", "--json", str(out)]) == 0
    assert len(started) == 8
    assert all("--dtype float32" in command for command in started)
    assert sum("--request-log" in command for command in started) == 4
    assert sum("--log-tokens" in command for command in started) == 2
    first_round = asked[: 4 + 12]
    turns = first_round[4:10], first_round[10:]
    assert [watched for _, watched in first_round[:4]] == [False] * 4  # warming up
    assert turns[0] == turns[1][::-1]
    assert Counter(watched for _, watched in turns[0]) == {True: 2, False: 4}
    assert ["--log-tokens" in url for url, watched in turns[0] if watched] == [False, True]
    result = json.loads(out.read_text())
    assert [len(passes) for passes in result["rounds"][1].values()] == [2] * 6
    assert result["summary"]["live page, looked at"]["cost"] == 0.5
    assert "+50.0%" in capsys.readouterr().out


def test_a_log_that_stayed_empty_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextlib.contextmanager
    def silent_server(command: Sequence[str]) -> Iterator[str]:
        if "--request-log" in command:
            Path(command[command.index("--request-log") + 1]).touch()
        yield "http://nobody"

    async def measure(*arguments: object, **more: object) -> float:
        return 1

    monkeypatch.setattr(reporting, "server", silent_server)
    monkeypatch.setattr(reporting, "measure", measure)
    assert reporting.main(["--rounds", "1", "--passes", "1"]) == 2
    assert "log.jsonl is empty" in capsys.readouterr().err


def watch(statuses: dict[str, int], seconds: float) -> Counter[str]:
    """What is asked, in so many seconds, of a server that answers paths with these statuses, others with 200."""
    asked: Counter[str] = Counter()

    async def answer(request: web.BaseRequest) -> web.Response:
        asked[request.path] += 1
        return web.Response(status=statuses.get(request.path, 200))

    async def run() -> None:
        async with (
            RawTestServer(answer) as server,
            aiohttp.ClientSession(server.make_url("/")) as client,
            reporting.watching(client),
        ):
            await asyncio.sleep(seconds)

    asyncio.run(run())
    return asked


def test_watching_asks_what_the_page_asks_until_the_pass_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "ASKED", {path: every / 1000 for path, every in reporting.ASKED.items()})
    asked = watch({}, 0.2)
    assert asked["/dashboard/data"] > asked["/snapshot"] > 1


def test_an_answer_that_the_page_could_not_use_fails_the_pass() -> None:
    with pytest.raises(aiohttp.ClientResponseError, match="404"):
        watch({"/snapshot": 404}, 0.2)


def test_what_is_asked_for_is_what_the_page_asks_for() -> None:
    page = (Path(__file__).parents[2] / "server" / "web" / "app.js").read_text()
    for path, every in reporting.ASKED.items():
        assert f"/{path.partition('=')[0]}" in page
        assert f"_SECONDS = {every:g};" in page


def test_bad_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert reporting.main(["--passes", "0"]) == 2
    assert "passes" in capsys.readouterr().err


@pytest.mark.full
def test_the_server_without_attribution_finds_what_others_find_and_explains_nothing(tiny_model: Path) -> None:
    flags = ["--model", str(tiny_model), "--kv-cache-tokens", "1024"]
    reports = []
    for command in ([*unattributed.COMMAND, "serve", "--port", "{port}", *flags], [*RADIXKV, *flags]):
        with server(command) as url, httpx.Client(base_url=url, timeout=60) as client:
            for ending in (5, 6):
                client.post("/v1/completions", json={"prompt": [*range(10, 58), ending], "max_tokens": 1}).raise_for_status()
            reports.append(client.get("/report").raise_for_status().json())
    without, with_it = reports
    assert without["cached_tokens"] == with_it["cached_tokens"] == 48
    assert sum(without["missed_tokens"].values()) == 0
    assert sum(with_it["missed_tokens"].values()) == 50
