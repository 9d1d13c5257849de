"""Reading traces: what is taken, what is refused, and how the refusal reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixkv.report.trace import TraceError, TraceRequest, read_trace

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


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="../shared/traces is not here")
def test_the_conversation_trace_has_the_length_and_means_its_readme_states() -> None:
    requests = list(read_trace(SHARED_TRACE))
    assert len(requests) == 12_031
    assert round(sum(r.input_length for r in requests) / len(requests)) == 12_035
    assert round(sum(r.output_length for r in requests) / len(requests)) == 343
    assert len({i for r in requests for i in r.hash_ids}) == 182_790
