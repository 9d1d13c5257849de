"""The prefix-timing side channel: what another namespace has cached must make no first token faster."""

from __future__ import annotations

import json
import runpy
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixkv.model.loader import ModelSource
from radixkv.server.launcher import WORKER_COMMAND

SUPPORT = runpy.run_path(str(Path(__file__).parents[1] / "server" / "conftest.py"))
FIRST = [
    "apple",
    "river",
    "stone",
    "cloud",
    "green",
    "table",
    "horse",
    "light",
    "music",
    "paper",
    "glass",
    "ocean",
    "bread",
    "chair",
    "window",
]
ROUNDS = (len(FIRST) - 1) // 2


@pytest.fixture(scope="module")
def server(default_model: ModelSource) -> Iterator[Any]:
    with SUPPORT["starting"](Path("smollm2-135m")) as start:
        yield start(worker_command=WORKER_COMMAND, config={"model": "smollm2-135m"}).wait_ready()


def prompt(number: int) -> str:
    """About a thousand tokens, another first one for each number."""
    return FIRST[number] + " ".join(f" Item {number * 1000 + i} is on shelf {i * 7 % 31}." for i in range(85))


def first_token(server: Any, number: int, namespace: str) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's tokens came from the cache."""
    body = {"prompt": prompt(number), "namespace": namespace, "max_tokens": 1, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    began = time.monotonic()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        seconds = time.monotonic() - began
        usage = json.loads([first, *lines][-2].removeprefix("data: "))["usage"]
    return seconds, usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.full
def test_another_namespaces_cached_prefix_gives_no_faster_first_token_and_ones_own_does(server: Any, record_property: Any) -> None:
    first_token(server, -1, "warm-up")
    times: dict[str, list[float]] = {"nobody's": [], "another's": [], "own": []}
    for i in range(ROUNDS):
        secret, fresh = 2 * i, 2 * i + 1
        first_token(server, secret, "victim")
        guesses = [("another's", secret), ("nobody's", fresh)]
        for whose, number in guesses if i % 2 else reversed(guesses):  # neither always comes first
            seconds, cached = first_token(server, number, "attacker")
            assert cached == 0
            times[whose].append(seconds)
        seconds, cached = first_token(server, secret, "attacker")
        assert cached > 500
        times["own"].append(seconds)
    nobodys, anothers, own = (statistics.median(found) for found in times.values())
    record_property(
        "finding",
        f"first token, median of {ROUNDS}: prompt cached by nobody {1000 * nobodys:.0f} ms, by another namespace "
        f"{1000 * anothers:.0f} ms, by one's own {1000 * own:.0f} ms",
    )
    assert anothers > 0.8 * nobodys
    assert own < 0.5 * nobodys
