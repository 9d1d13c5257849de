"""Reading traces: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.report.trace import TraceError, TraceRequest, read_trace

LOG = {"time": 1.5e9, "prompt_tokens": 40, "output_tokens": 7, "block_size": 16, "block_hashes": ["a0", 17]}
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [4, 5]}
SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_trace.jsonl"


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_requests_come_in_order_and_blank_lines_and_unknown_fields_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", {**GOOD, "timestamp": 2.5, "user": "x"})
    assert list(read_trace(path)) == [TraceRequest(0, 600, 7, [4, 5]), TraceRequest(2.5, 600, 7, [4, 5])]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["truncated"]),
        ("nonsense", ["JSON"]),
        ("[1]", ["object", "array"]),
        ({"timestamp": 0, "input_length": 600, "output_length": 7}, ["hash_ids"]),
        ({**GOOD, "input_length": "600"}, ["input_length", "int", "str"]),
        ({**GOOD, "hash_ids": [4, None]}, ["hash_ids[1]", "int", "null"]),
        ({**GOOD, "input_length": 0}, ["input_length", "at least 1", "0"]),
        ({**GOOD, "output_length": -1}, ["output_length", "at least 0", "-1"]),
        ({**GOOD, "hash_ids": [4]}, ["hash_ids", "2 blocks", "1 ids"]),
    ],
)
def test_a_bad_line_is_refused_with_file_line_number_and_field(tmp_path: Path, line: object, words: list[str]) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    for word in ["t.jsonl, line 3: ", *words]:
        assert word in str(caught.value)


def test_bytes_that_are_no_text_are_refused_with_the_line_number(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes(b'{"timestamp": "\xff"}\n')
    with pytest.raises(TraceError, match="line 1"):
        list(read_trace(tmp_path / "t.jsonl"))


def test_a_trace_is_read_one_line_at_a_time(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path / "t.jsonl", GOOD, "nonsense"))
    assert next(requests).hash_ids == [4, 5]


def test_a_request_log_is_known_by_its_first_line_and_put_in_the_order_of_arrival(tmp_path: Path) -> None:
    early = {**LOG, "time": 1.5e9 - 2, "namespace": "tenant", "prompt_tokens": 15, "block_hashes": [], "miss": {"new": 15}}
    path = write(tmp_path / "log.jsonl", "", LOG, early)
    assert list(read_trace(path)) == [
        TraceRequest(1.5e12 - 2000, 15, 7, [], "tenant", 16),
        TraceRequest(1.5e12, 40, 7, ["a0", 17], "", 16),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD, ["time"]),
        ({**LOG, "block_hashes": ["a0", 1.5]}, ["block_hashes[1]", "int | str", "float"]),
        ({**LOG, "block_hashes": ["a0"]}, ["block_hashes", "40 prompt tokens have 2 whole blocks of 16", "got 1 hashes"]),
        ({**LOG, "prompt_tokens": 0}, ["prompt_tokens", "at least 1", "0"]),
        ({**LOG, "output_tokens": -1}, ["output_tokens", "at least 0", "-1"]),
        ({**LOG, "block_size": 0}, ["block_size", "at least 1", "0"]),
        ({**LOG, "block_size": 8}, ["block_size", "must be 16", "8"]),
        ({**LOG, "namespace": None}, ["namespace", "str", "null"]),
        ({**LOG, "version": 2}, ["version", "2"]),
        ({**LOG, "token_ids": [1]}, ["token_ids", "prompt_tokens=40", "got 1"]),
        ({**LOG, "token_ids": [*range(39), -1]}, ["token_ids", "between 0 and 2147483647", "-1"]),
        ({**LOG, "token_ids": [*range(39), 2**31]}, ["token_ids", "between 0 and 2147483647", "2147483648"]),
        ({**LOG, "cached_tokens": -1}, ["cached_tokens", "at least 0", "-1"]),
        ({**LOG, "missed": {"new": -1}}, ["missed.new", "at least 0", "-1"]),
        ({**LOG, "cache_blocks": 0}, ["cache_blocks", "at least 1", "0"]),
        ({**LOG, "kv_bytes_per_token": 0}, ["kv_bytes_per_token", "at least 1", "0"]),
        ({**LOG, "dropped": -1}, ["dropped", "at least 0", "-1"]),
        ({**LOG, "cached_tokens": 30, "missed": {"new": 11}}, ["missed", "30 cached and 11 missed", "prompt_tokens=40"]),
    ],
)
def test_a_bad_line_of_a_request_log_is_refused_with_file_line_number_and_field(
    tmp_path: Path, line: object, words: list[str]
) -> None:
    path = write(tmp_path / "log.jsonl", LOG, line)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    for word in ["log.jsonl, line 2: ", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"), [({"user": 1}, ["hash_ids", "block_hashes"]), ("[1]", ["object", "array"]), ("nonsense", ["JSON"])]
)
def test_a_file_of_another_kind_is_refused_at_its_first_line(tmp_path: Path, line: object, words: list[str]) -> None:
    with pytest.raises(TraceError) as caught:
        list(read_trace(write(tmp_path / "t.jsonl", line)))
    for word in ["t.jsonl, line 1: ", *words]:
        assert word in str(caught.value)


def test_an_empty_file_has_no_requests(tmp_path: Path) -> None:
    assert list(read_trace(write(tmp_path / "t.jsonl", ""))) == []


def test_a_mooncake_trace_may_have_blocks_of_another_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {**GOOD, "input_length": 20})
    assert list(read_trace(path, block_tokens=16)) == [TraceRequest(0, 20, 7, [4, 5], "", 16)]


def test_progress_of_reading_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", *[GOOD] * 300)
    calls: list[tuple[int, int]] = []
    list(read_trace(path, progress=lambda read, size: calls.append((read, size))))
    size = path.stat().st_size
    assert calls == [(size // 300 * 256, size), (size, size)]


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")
def test_the_conversation_trace_has_the_length_and_means_its_readme_states() -> None:
    requests = list(read_trace(SHARED_TRACE))
    assert len(requests) == 12_031
    assert round(sum(r.input_length for r in requests) / len(requests)) == 12_035
    assert round(sum(r.output_length for r in requests) / len(requests)) == 343
    assert len({i for r in requests for i in r.hash_ids}) == 182_790
