"""The request log: what a line says, that it leaks nothing, how files rotate, and that nobody waits for the disk."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.report.logged_request import LoggedRequest
from radixkv.report.trace import read_records, read_trace
from radixkv.server.block_hashes import BlockHashes
from radixkv.server.launcher import serve
from radixkv.server.request_log import OLD_FILES, RequestLog

KEY = b"sixteen bytes or more"


def line(**fields: Any) -> LoggedRequest:
    return LoggedRequest(time=1.0, prompt_tokens=40, output_tokens=2, block_size=16, block_hashes=[], **fields)


def test_hashes_are_equal_where_blocks_and_all_before_them_are_and_nowhere_else() -> None:
    hashes = BlockHashes(KEY)
    first, second = list(range(40)), [*range(16), 99, *range(17, 48)]
    ours, theirs = hashes(first, 16, "a"), hashes(second, 16, "a")
    assert (len(ours), len(theirs)) == (2, 3)
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    assert hashes([*[7] * 16, *range(32, 48)], 16, "a")[1] != theirs[2]
    assert hashes([5] * 32, 16, "a")[0] != hashes([5] * 32, 16, "a")[1]


def test_namespaces_and_runs_can_not_be_compared() -> None:
    tokens = list(range(32))
    assert not set(BlockHashes(KEY)(tokens, 16, "a")) & set(BlockHashes(KEY)(tokens, 16, "b"))
    assert not set(BlockHashes()(tokens, 16, "")) & set(BlockHashes()(tokens, 16, ""))
    assert BlockHashes(KEY)(tokens, 16, "a") == BlockHashes(KEY)(tokens, 16, "a")


def test_a_key_file_must_be_private_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    assert BlockHashes.load(path)([1] * 16, 16, "") == BlockHashes(KEY)([1] * 16, 16, "")
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match=r"request-log-key.*16 to 64 bytes, got 5"):
        BlockHashes.load(path)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        BlockHashes.load(path)


@pytest.mark.parametrize("log_tokens", [False, True])
def test_tokens_are_written_only_where_asked_for(tmp_path: Path, log_tokens: bool) -> None:
    path = tmp_path / "log"
    log = RequestLog(path, BlockHashes(), log_tokens=log_tokens)
    log.write(line(), list(range(1000, 1040)))
    log.close()
    (record,) = read_records(path)
    assert isinstance(record, LoggedRequest)
    assert len(record.block_hashes) == 2
    assert (record.token_ids == list(range(1000, 1040))) == log_tokens == ("1017" in path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_rotate_by_size_each_of_whole_lines_and_the_oldest_go(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log", BlockHashes(), file_bytes=2000)
    for number in range(100):
        log.write(line(request_id=f"r{number}"), [1] * 40)
    log.close()
    files = [tmp_path / "log", *(tmp_path / f"log.{n}" for n in range(1, OLD_FILES + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(0 < file.stat().st_size <= 2000 for file in files)
    ids = [record.request_id for file in reversed(files) for record in read_records(file) if isinstance(record, LoggedRequest)]
    assert ids == [f"r{number}" for number in range(100 - len(ids), 100)]


def test_a_restart_appends(tmp_path: Path) -> None:
    for _ in range(2):
        log = RequestLog(tmp_path / "log", BlockHashes())
        log.write(line(), [1] * 40)
        log.close()
    assert len(list(read_trace(tmp_path / "log"))) == 2


def test_lines_that_find_no_room_are_dropped_and_counted_in_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate, held = threading.Event(), threading.Event()

    class Slow(BlockHashes):
        def __call__(self, *args: Any) -> list[str]:
            held.set()
            assert gate.wait(20)
            return super().__call__(*args)

    log = RequestLog(tmp_path / "log", Slow(), max_waiting_lines=2)
    log.write(line(request_id="0"), [1] * 40)
    assert held.wait(20)
    for number in range(1, 6):
        log.write(line(request_id=f"{number}"), [1] * 40)
    gate.set()
    while not log._queue.empty():
        time.sleep(0.01)
    log.write(line(request_id="6"), [1] * 40)
    log.close()
    written = [
        (record.request_id, record.dropped) for record in read_records(tmp_path / "log") if isinstance(record, LoggedRequest)
    ]
    assert written == [("0", 0), ("1", 0), ("2", 0), ("6", 3)]
    assert "lines are dropped" in caplog.text


def test_a_line_that_can_not_be_written_is_reported_once_and_counted_and_does_not_end_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RequestLog(tmp_path / "log", BlockHashes())
    for number in range(3):
        log.write(line(request_id="\ud800" if number < 2 else "good"), [1] * 40)
    log.close()
    assert [record["request_id"] for record in map(json.loads, (tmp_path / "log").read_text().splitlines())] == ["good"]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert "lacks 2 lines" in caplog.text


def test_options_of_a_log_that_is_not_asked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="log-tokens is for a request log: give --request-log"):
        serve(None, log_tokens=True)  # type: ignore[arg-type]


def test_a_served_request_has_a_line_for_each_sequence_however_it_ended(start_server: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    server = start_server(request_log=str(path), request_timeout=1.0).wait_ready()
    post, prompt = httpx.Client(base_url=f"{server.url}/v1", timeout=20).post, list(range(10, 50))
    for n in (1, 2):
        body = {"prompt": prompt, "max_tokens": 3, "n": n, "namespace": "tenant"}
        assert post("/completions", json=body, headers={"x-request-id": f"told-{n}"}).status_code == 200
    assert post("/completions", json={"prompt": [5, 5, 5], "max_tokens": 3}).status_code == 504  # never gets a token
    assert post("/completions", json={"prompt": [1], "max_tokens": 0}).status_code == 400
    metrics = httpx.get(f"{server.url}/metrics").text
    server.stop()
    lines = [record for record in read_records(path) if isinstance(record, LoggedRequest)]
    assert [line.prompt_tokens for line in lines] == [40, 40, 40, 3]
    first, again, other, late = lines
    assert first.request_id.startswith("told-1.")
    assert (first.namespace, first.cached_tokens, first.missed) == ("tenant", 0, {"new": 39, "last_token": 1})
    assert (again.cached_tokens, again.missed, again.block_hashes) == (39, {"new": 0, "last_token": 1}, first.block_hashes)
    assert again.request_id != other.request_id
    assert (first.output_tokens, first.finish_reason, first.error) == (3, "length", None)
    assert (late.output_tokens, late.finish_reason, late.error, late.cached_tokens) == (0, None, "timeout", None)
    assert (first.block_size, first.cache_blocks, first.kv_bytes_per_token) == (16, 256, 1024)
    assert 0 < first.ttft_seconds <= first.seconds < 20  # type: ignore[operator]
    assert abs(first.time - time.time()) < 60
    began = [line for line in lines if line.cached_tokens is not None]
    assert (
        f'vllm:prompt_tokens_cached_total{{engine="0",model_name="{first.model}"}} {sum(x.cached_tokens or 0 for x in began)}.0'
        in metrics
    )
    assert [request.hash_ids for request in read_trace(path)] == [line.block_hashes for line in lines]


def test_a_log_that_can_not_be_written_stops_the_start(start_server: Any, tmp_path: Path) -> None:
    server = start_server(request_log=str(tmp_path / "no-folder" / "log"))
    assert server.process.wait(20) != 0
    assert "no-folder" in server.log
    assert os.listdir(tmp_path) == []
