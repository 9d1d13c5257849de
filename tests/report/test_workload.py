"""The report on a workload: exact sums, every reason found where it was planted, and advice that is right when carried out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from radixkv.cache import PrefixCache
from radixkv.cli import main
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.other_namespaces import with_other_namespaces
from radixkv.report.page_html import html_page
from radixkv.report.replay import replay
from radixkv.report.simulation import cached_tokens
from radixkv.report.trace import as_trace, read_records
from radixkv.report.workload import WorkloadReport
from radixkv.report.workload_page import workload_page

SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"
SIZE = 16


class Log:
    """What a server would log whose requests go through a real cache, one after the other unless they are left open."""

    def __init__(self, num_blocks: int = 1000, block_size: int = SIZE, log_tokens: bool = True) -> None:
        self.cache = PrefixCache(num_blocks, block_size, attribution=True)
        self.lines: list[LoggedRequest] = []
        self._tokens = log_tokens
        self._names: dict[tuple[Any, ...], int] = {}

    def ask(self, tokens: Sequence[int], *, namespace: str = "", leave_open: bool = False, **fields: Any) -> Any:
        size = self.cache.block_size
        lease = self.cache.acquire(list(tokens), namespace=namespace)
        assert lease is not None
        self.cache.take_copies()
        hashes = [
            self._names.setdefault((namespace, *tokens[: end + size]), len(self._names))
            for end in range(0, len(tokens) // size * size, size)
        ]
        fields |= {"token_ids": list(tokens)} if self._tokens else {}
        line = LoggedRequest(
            time=float(len(self.lines)), request_id=f"r{len(self.lines)}", namespace=namespace, prompt_tokens=len(tokens),
            cached_tokens=lease.num_cached_tokens, missed=lease.missed or {}, output_tokens=1, block_size=size,
            cache_blocks=self.cache.pool.num_blocks, kv_bytes_per_token=1024, block_hashes=hashes, **fields,
        )  # fmt: skip
        self.lines.append(line)
        if leave_open:
            return lease
        self.cache.publish(lease, list(tokens), len(tokens))
        self.cache.release(lease)
        return None

    def report(self, **options: Any) -> WorkloadReport:
        return WorkloadReport.of(self.lines, "the log", **options)


def numbers(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30_000, n).tolist()  # type: ignore[no-any-return]


def mixed_log(log_tokens: bool = True) -> Log:
    log, heads = Log(50, log_tokens=log_tokens), [numbers(i, 100) for i in range(4)]
    for i in range(120):
        log.ask(
            heads[i * i % 4] + numbers(100 + i % 14, 5 + 7 * (i % 14)),
            namespace="ab"[i % 2],
            ttft_seconds=0.01 * (i % 10 + 1),
            queued_seconds=0.01,
        )
    return log


@pytest.mark.parametrize("log_tokens", [False, True])
def test_totals_are_exactly_the_sums_over_the_log(log_tokens: bool) -> None:
    lines = mixed_log(log_tokens).lines
    report = WorkloadReport.of(lines, "the log")
    prompt, cached = sum(line.prompt_tokens for line in lines), sum(line.cached_tokens or 0 for line in lines)
    assert (report.saving.requests, report.saving.prompt_tokens, report.saving.cached_tokens) == (120, prompt, cached)
    reasons = {reason for line in lines for reason in line.missed}
    assert {"evicted", "diverged", "new"} <= reasons
    assert {miss.reason: miss.tokens for miss in report.misses} == {
        reason: sum(line.missed.get(reason, 0) for line in lines) for reason in reasons
    }
    assert sum(miss.tokens for miss in report.misses) + cached == prompt
    for parts in (report.namespaces, report.over_time):
        assert sum(part.requests for part in parts) == 120
        assert sum(part.prompt_tokens for part in parts) == prompt
        assert sum(part.cached_tokens for part in parts) == cached
        assert sum(sum(part.missed.values()) for part in parts) == prompt - cached


def plant(reason: str) -> tuple[Log, int]:
    """A log in which its last request misses so many tokens for ``reason`` behind 32 that it shares, or behind none."""
    log, head, tail = Log(12), numbers(1, 32), numbers(2, 64)
    if reason == "new":
        log.ask(tail)
        return log, 64
    if reason == "diverged":
        log.ask(head + numbers(3, 64))
        log.ask(head + tail)
        return log, 64
    if reason == "evicted":
        log.ask(head + tail)
        log.ask(numbers(4, 160))
        log.ask([*head, *tail, 5])
        return log, log.lines[-1].missed["evicted"]
    if reason == "partial_block":
        log.ask(head + tail[:10])
        log.ask(head + tail)
        return log, 10
    if reason == "in_flight":
        log.ask(head, leave_open=True)
        log.ask([*head, 1])
        return log, 32
    assert reason == "last_token"
    log.ask(head)
    log.ask(head)
    return log, 1


@pytest.mark.parametrize("reason", ["new", "diverged", "evicted", "partial_block", "in_flight", "last_token"])
def test_each_reason_is_found_where_it_was_planted(reason: str) -> None:
    log, tokens = plant(reason)
    report = log.report()
    assert tokens > 0
    assert next(miss.tokens for miss in report.misses if miss.reason == reason) >= tokens
    last = f"r{len(log.lines) - 1}"
    place = next(row for row in report.places if row.reason == reason and row.request_id == last)
    assert place.tokens == tokens
    line = log.lines[-1]
    assert line.cached_tokens is not None
    assert line.cached_tokens <= place.position <= line.prompt_tokens - tokens


def test_a_divergence_shows_both_sides_and_no_more_than_is_logged() -> None:
    log, _ = plant("diverged")
    row = next(row for row in log.report().places if row.reason == "diverged")
    assert row.position == 32
    head, ours, theirs = numbers(1, 32), numbers(2, 12), numbers(3, 12)
    assert row.ours == f"[{' '.join(map(str, head[20:] + ours))}]"
    assert row.theirs == f"[{' '.join(map(str, head[20:] + theirs))}]"
    for line in log.lines:
        line.token_ids = msgspec.UNSET
    hashed = log.report()
    assert all(row.ours is None and row.theirs is None for row in hashed.places)
    assert all(row.text is None for row in hashed.prefixes)


def test_the_prefixes_that_earn_the_hits_come_first_with_what_they_saved() -> None:
    log, long, short = Log(), numbers(1, 320), numbers(2, 64)
    for i in range(5):
        log.ask(long + numbers(10 + i, 40))
        log.ask(short + numbers(20 + i, 40))
    first, second = log.report().prefixes
    assert (first.prefix.start, first.prefix.end, first.prefix.requests, first.prefix.tokens_saved) == (0, 320, 5, 4 * 320)
    assert (second.prefix.start, second.prefix.end, second.prefix.requests, second.prefix.tokens_saved) == (0, 64, 5, 4 * 64)
    assert first.request_id == "r0"
    assert first.text is not None
    assert first.text.startswith("[" + " ".join(map(str, long[:24])))


def test_times_to_first_token_are_told_apart_by_whether_half_was_cached() -> None:
    log, prompt = Log(), numbers(1, 64)
    log.ask(prompt, ttft_seconds=0.9, queued_seconds=0.1)
    for seconds in (0.1, 0.2, 0.3):
        log.ask(prompt, ttft_seconds=seconds, queued_seconds=0.0)
    saving = log.report().saving
    assert saving.miss_waits is not None
    assert (saving.miss_waits.requests, saving.miss_waits.p50) == (1, 0.9)
    assert saving.hit_waits is not None
    assert (saving.hit_waits.requests, saving.hit_waits.p50) == (3, pytest.approx(0.2))
    assert saving.computed_tokens_per_second == pytest.approx(63 / (0.8 - 0.2))
    assert saving.seconds_saved == pytest.approx(3 * (0.8 - 0.2))


def test_requests_that_never_began_and_lost_lines_are_said_and_counted_in_nothing_else() -> None:
    log, _ = plant("new")
    log.lines.append(msgspec.structs.replace(log.lines[0], cached_tokens=None, missed={}, error="timeout", dropped=3))
    report = log.report()
    assert (report.lines, report.not_begun, report.errors, report.dropped) == (2, 1, {"timeout": 1}, 3)
    assert report.saving.prompt_tokens == 64


# -- advice, carried out ---------------------------------------------------------------------------------------------------


def advice(report: WorkloadReport, kind: str) -> Any:
    return next(a for a in report.advice if a.kind == kind)


@pytest.mark.parametrize("log_tokens", [False, True])
def test_the_capacity_advised_hits_what_was_predicted_when_replayed(log_tokens: bool) -> None:
    log = mixed_log(log_tokens)
    predicted = advice(log.report(), "capacity")
    trace = [as_trace(line) for line in log.lines]
    now, then, most = (replay(trace, n) for n in (50, predicted.details["capacity_blocks"], None))
    assert then.hit_blocks == predicted.details["hit_blocks"]
    assert then.hit_tokens - now.hit_tokens == predicted.tokens_saved > 0
    lost = most.hit_blocks - now.hit_blocks
    assert (then.hit_blocks - now.hit_blocks) / lost == predicted.details["share_of_evicted_hits"] >= 0.9
    smaller = replay(trace, predicted.details["capacity_blocks"] - 1)
    assert (smaller.hit_blocks - now.hit_blocks) / lost < 0.9
    assert f"({then.hit_blocks:,} - {now.hit_blocks:,})" in predicted.arithmetic


def dated_prompts(n: int) -> list[tuple[list[int], list[int], list[int], list[int]]]:
    """Beginning, date, tools and question of prompts; dates of 5 or 6 tokens begin alike and differ behind that."""
    start, tools = numbers(1, 37), numbers(2, 400)
    return [(start, [7, 8, *numbers(50 + i, 3 + i % 2)], tools, numbers(900 + i, 20)) for i in range(n)]


def test_moving_a_date_below_the_tools_saves_what_was_predicted() -> None:
    before, after = Log(), Log()
    for start, date, tools, question in dated_prompts(12):
        before.ask(start + date + tools + question)
        after.ask(start + tools + date + question)
    report = before.report()
    first = report.advice[0]
    assert first.kind == "move_span"
    assert (first.details["position"], first.details["run"], first.details["requests"]) == (39, 400, 12)
    saved = sum((b.cached_tokens or 0) - (a.cached_tokens or 0) for a, b in zip(before.lines, after.lines, strict=True))
    # What is before the date, and begins all dates, was moved along: the simulation leaves it, we moved it, so 2 tokens a prompt.
    assert abs(first.tokens_saved - saved) <= 2 * 12
    assert first.tokens_saved > 11 * 390
    assert first.details["tokens_a_request"] == first.tokens_saved / 12
    prompts = dated_prompts(12)
    for side, (_, date, tools, _) in ((first.theirs, prompts[0]), (first.ours, prompts[-1])):
        assert side == f"[{' '.join(map(str, [*prompts[0][0][31:], *date, *tools[:8]]))}]"
    assert first.below is not None
    assert first.below.startswith(f"[{' '.join(map(str, prompts[0][2][:24]))}]")


def test_moving_exactly_what_the_advice_names_saves_exactly_what_it_says() -> None:
    before, after = Log(), Log()
    for start, date, tools, question in dated_prompts(12):
        before.ask(start + date + tools + question)
        after.ask(start + date[:2] + tools + date[2:] + question)
    saved = sum((b.cached_tokens or 0) - (a.cached_tokens or 0) for a, b in zip(before.lines, after.lines, strict=True))
    assert before.report().advice[0].tokens_saved == saved


def test_advice_without_texts_where_they_may_not_be_seen() -> None:
    log = Log()
    for start, date, tools, question in dated_prompts(12):
        log.ask(start + date + tools + question)
    shown, hidden = log.report(), log.report(show=None)
    assert [(a.kind, a.text, a.tokens_saved) for a in hidden.advice] == [(a.kind, a.text, a.tokens_saved) for a in shown.advice]
    assert hidden.advice[0].kind == "move_span"
    assert all(a.ours is a.theirs is a.below is None for a in hidden.advice)
    assert all(row.text is None for row in hidden.prefixes)
    assert all(row.ours is row.theirs is None for row in hidden.places)
    assert "[" not in "".join(a.text + a.arithmetic for a in hidden.advice)


def test_twice_is_not_often_enough_to_move_a_span() -> None:
    for times, kinds in ((2, []), (3, ["move_span"])):
        log = Log()
        for start, date, tools, question in dated_prompts(times):
            log.ask(start + date + tools + question)
        assert [a.kind for a in log.report().advice if a.kind == "move_span"] == kinds


def test_advice_comes_in_the_order_of_what_it_saves() -> None:
    log = mixed_log()
    for start, date, tools, question in dated_prompts(12):
        log.ask(start + date + tools + question)
    shares = [a.share for a in log.report().advice]
    assert len(shares) > 1
    assert shares == sorted(shares, reverse=True)


def test_prompts_that_come_at_once_had_better_come_one_after_the_other() -> None:
    together, apart, head = Log(), Log(), numbers(1, 128)
    leases = [together.ask(head + numbers(10 + i, 8), leave_open=True) for i in range(3)]
    assert all(leases)
    for i in range(3):
        apart.ask(head + numbers(10 + i, 8))
    predicted = advice(together.report(), "in_flight")
    saved = sum((b.cached_tokens or 0) - (a.cached_tokens or 0) for a, b in zip(together.lines, apart.lines, strict=True))
    assert predicted.tokens_saved == saved == 2 * 128
    assert f"{saved} of {3 * 136} prompt tokens" in predicted.arithmetic


def test_evictions_that_the_requests_alone_would_not_cause_are_said_without_a_size() -> None:
    log, prompt = Log(), numbers(1, 320)
    log.ask(prompt)
    log.lines[0].cached_tokens, log.lines[0].missed = 0, {"evicted": 319, "last_token": 1}
    predicted = advice(log.report(), "capacity")
    assert (predicted.tokens_saved, predicted.details) == (319, {})
    assert "can't tell" in predicted.arithmetic


def test_one_request_is_spoken_of_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    log.ask(numbers(1, 40))
    lost = msgspec.structs.replace(log.lines[0], cached_tokens=None, missed={}, error="aborted", dropped=1)
    Console(width=160).print(WorkloadReport.of([*log.lines, lost], "the log"))
    text = capsys.readouterr().out
    assert "40 prompt tokens of 1 request." in text
    assert text.count(": 1 request.") == 2


def test_a_server_that_caches_nothing_is_told_what_caching_would_find() -> None:
    log, prompt = Log(), numbers(1, 64)
    for i in range(4):
        log.ask([*prompt, i])
        log.lines[-1].cached_tokens, log.lines[-1].missed = 0, {}
    (predicted,) = log.report().advice
    assert (predicted.kind, predicted.tokens_saved) == ("prefix_caching", 3 * 64)


@pytest.mark.parametrize("parted", [False, True])
def test_what_another_namespace_has_asked_before_gets_that_reason(parted: bool) -> None:
    log, prompt = Log(), numbers(1, 160)
    log.ask(prompt, namespace="a")
    log.ask(prompt[:32] + numbers(2, 40) if parted else numbers(3, 16), namespace="b")
    log.ask([*prompt, *numbers(4, 20)], namespace="b")
    for line in log.lines:  # blocks numbered alike in all namespaces
        line.block_hashes = [hash(tuple(line.token_ids[: end + SIZE])) for end in range(0, line.prompt_tokens - SIZE + 1, SIZE)]
    *others, last = with_other_namespaces(log.lines)
    assert [line.missed for line in others] == [{"new": 160}, {"namespace": 32, "new": 40} if parted else {"new": 16}]
    cached = log.lines[-1].cached_tokens
    assert cached == (32 if parted else 0)
    assert last.missed == {"namespace": 160 - cached, "diverged" if parted else "new": 20}
    assert log.lines[-1].missed == {"diverged" if parted else "new": 180 - cached}


def test_no_span_is_advised_where_prompts_do_not_go_on_alike() -> None:
    log, head = Log(), numbers(1, 100)
    for i in range(10):
        log.ask(head + numbers(10 + i, 50) + numbers(5, 8))
    assert [a.kind for a in log.report().advice] == []


def test_the_block_size_advised_gains_what_was_predicted() -> None:
    logs = Log(600, 16), Log(1200, 8)
    for i in range(200):
        for log in logs:
            log.ask(numbers(i % 20, 30) + (numbers(1000 + i, 9) if i % 2 else []))
    before, after = (sum(line.cached_tokens or 0 for line in log.lines) for log in logs)
    predicted = advice(logs[0].report(), "block_size")
    assert predicted.details["block_size"] == 8
    assert predicted.tokens_saved == after - before > 0
    total = sum(line.prompt_tokens for line in logs[0].lines)
    assert predicted.details["points"] == pytest.approx(100 * (after - before) / total)


def test_namespaces_that_ask_alike_are_found_and_one_for_all_saves_what_was_predicted() -> None:
    apart, together = Log(), Log()
    for i in range(12):
        prompt = numbers(1, 128) + numbers(10 + i, 16)
        apart.ask(prompt, namespace=f"tenant-{i % 3}")
        together.ask(prompt)
    saved = sum((b.cached_tokens or 0) - (a.cached_tokens or 0) for a, b in zip(apart.lines, together.lines, strict=True))
    assert advice(apart.report(), "namespaces").tokens_saved == saved == 2 * 128


def test_a_prompt_larger_than_the_cache_is_simulated_as_a_miss() -> None:
    small = np.arange(16, dtype=np.int32)
    assert cached_tokens([("", np.arange(100, dtype=np.int32)), ("", small), ("", small)], 4, 16) == [0, 0, 15]


# -- traces, pages and the command ---------------------------------------------------------------------------------------


def trace_lines() -> list[str]:
    lines = [[0, 1, 2], [0, 1, 3], [4, 5, 6], [0, 1, 2]]
    return [json.dumps({"timestamp": i, "input_length": 1500, "output_length": 1, "hash_ids": ids}) for i, ids in enumerate(lines)]


def test_a_trace_is_simulated_and_hits_what_its_replay_hits(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(trace_lines()))
    for capacity in (None, 1, 3, 4, 100):
        report = WorkloadReport.of(read_records(path), "t", capacity_blocks=capacity)
        result = replay([as_or_is(record) for record in read_records(path)], capacity)
        assert report.simulated
        assert report.saving.cached_tokens == result.hit_tokens
        assert sum(miss.tokens for miss in report.misses) == 4 * 1500 - result.hit_tokens
    reasons = {miss.reason: miss.tokens for miss in WorkloadReport.of(read_records(path), "t").misses}
    assert reasons == {"new": 3000, "diverged": 1500 - 1024}
    assert "evicted" in {miss.reason for miss in WorkloadReport.of(read_records(path), "t", capacity_blocks=3).misses}


def as_or_is(record: Any) -> Any:
    return as_trace(record) if isinstance(record, LoggedRequest) else record


def test_the_page_answers_in_order_loads_nothing_and_escapes_what_users_wrote() -> None:
    log, _ = plant("diverged")
    log.ask(numbers(9, 20), namespace="<script>alert(1)</script>")
    report = log.report(show=lambda tokens: "“<b>text</b>”")
    page = html_page(workload_page(report))
    titles = ["What the cache saved", "Which prefixes", "Where the misses", "What to do", "By namespace", "Over time", "Hit rate"]
    places = [page.index(f"<h2>{title}") for title in titles]
    assert places == sorted(places)
    assert "<script" not in page
    assert "<b>text" not in page
    assert "&lt;b&gt;text" in page
    assert not re.search(r"""\b(src|href)\s*=|@import|url\(""", page)
    assert "default-src 'none'" in page
    assert f"today: {report.capacity_blocks} blocks" in page


@pytest.mark.parametrize("field", ["namespace", "model", "error", "missed"])
def test_the_terminal_is_not_at_the_mercy_of_what_a_log_says(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    log = Log()
    for _ in range(2):
        log.ask(numbers(1, 40))
        log.lines[-1].cached_tokens, log.lines[-1].missed = 16, {"new": 24}
    text: Any = "\x1b[31mred[bold]"
    setattr(log.lines[-1], field, {text: 24} if field == "missed" else text)
    Console(width=160).print(log.report())
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


def test_the_command_writes_text_json_and_html_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = mixed_log().lines
    path, page = tmp_path / "log.jsonl", tmp_path / "page.html"
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    assert main(["report", str(path)]) == 0
    assert "What to do" in capsys.readouterr().out
    assert main(["report", str(path), "--json", "--html", str(page)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["saving"]["cached_tokens"] == sum(line.cached_tokens or 0 for line in lines)
    assert result == json.loads(msgspec.json.encode(WorkloadReport.of(lines, "log.jsonl").to_dict())) | {"curve": result["curve"]}
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-file"], ["SOURCE", "http://", "no-file"]),
        (["FILE", "--html", "/nowhere/page.html"], ["--html", "folder"]),
        (["http://127.0.0.1:9", "--model", "x"], ["--model", "request logs"]),
        (["EMPTY"], ["no requests"]),
    ],
)
def test_what_can_not_be_reported_on_is_refused(
    tmp_path: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").write_text("\n".join(trace_lines()))
    (tmp_path / "EMPTY").write_text("\n")
    names = [str(tmp_path / argument) if argument in ("FILE", "EMPTY") else argument for argument in arguments]
    assert main(["report", *names]) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_a_table_has_a_row_for_each_namespace_whose_columns_add_up() -> None:
    report = mixed_log().report()
    rows = report.rows()
    assert {row["namespace"] for row in rows} == {"a", "b"}
    for row in rows:
        missed = sum(value for name, value in row.items() if name.startswith("missed_"))
        assert row["cached_tokens"] + missed == row["prompt_tokens"]
    assert "<table>" in report._repr_html_()


def test_the_page_of_a_log_with_a_salt_for_each_request_stays_small() -> None:
    log = Log()
    for i in range(1200):
        log.ask(numbers(i, 20 + i % 2), namespace=f"salt-{i:016}")
    report = log.report()
    page = html_page(workload_page(report))
    assert len(report.to_dict()["namespaces"]) == 1200
    assert page.count('<td class="words">salt-') < 1100
    assert "200 smaller ones are in --json" in page


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")
def test_the_page_of_the_public_trace_is_under_two_megabytes() -> None:
    report = WorkloadReport.of(read_records(SHARED_TRACE), SHARED_TRACE.name, capacity_blocks=10_000)
    assert round(100 * report.saving.cached_tokens / report.saving.prompt_tokens, 1) == 21.6
    assert len(html_page(workload_page(report)).encode()) < 2_000_000
