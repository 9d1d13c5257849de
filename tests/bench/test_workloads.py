"""The serving workloads: the same bytes every time, of the sizes that are promised, and arithmetic that is right."""

from __future__ import annotations

import hashlib
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.workloads import WORKLOADS, agent, fewshot, unique, word_problem
from radixkv.model.loader import ModelSource
from radixkv.model.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def count(default_model: ModelSource) -> Any:
    """Token counts by the default model's own tokenizer."""
    encode = load_tokenizer(default_model).encode
    return lambda text: len(encode(text))


def test_another_process_with_another_hash_seed_makes_the_same_prompts() -> None:
    code = (
        "import hashlib; from bench.workloads import WORKLOADS; "
        "print(hashlib.sha256(repr([WORKLOADS[n]() for n in WORKLOADS]).encode()).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    here = hashlib.sha256(repr([WORKLOADS[name]() for name in WORKLOADS]).encode()).hexdigest()
    assert run.stdout.strip() == here


@pytest.mark.parametrize(
    ("name", "lanes", "turns", "max_tokens"), [("fewshot", 48, 1, 32), ("agent", 8, 5, 48), ("unique", 32, 1, 64)]
)
def test_a_workload_has_the_stated_number_of_requests_and_no_prompt_twice(
    name: str, lanes: int, turns: int, max_tokens: int
) -> None:
    workload = WORKLOADS[name]()
    prompts = [prompt for lane in workload.lanes for prompt in lane]
    assert [len(lane) for lane in workload.lanes] == [turns] * lanes
    assert workload.max_tokens == max_tokens
    assert workload.num_requests == len(set(prompts)) == lanes * turns


def test_each_turn_of_an_agent_begins_with_all_of_the_turn_before() -> None:
    for lane in agent().lanes:
        for before, after in pairwise(lane):
            assert after.startswith(before.removesuffix("Assistant:"))


def test_unique_prompts_share_not_even_their_first_word() -> None:
    first_words = [lane[0].split()[0] for lane in unique().lanes]
    assert len(set(first_words)) == len(first_words)


def test_fewshot_prompts_share_about_1590_tokens_and_own_about_60(count: Any) -> None:
    prompts = [lane[0] for lane in fewshot().lanes]
    shared = count(os.path.commonprefix(prompts))  # noqa: RUF071
    assert 1550 <= shared <= 1630
    assert all(45 <= count(prompt) - shared <= 70 for prompt in prompts)


def test_agent_prompts_share_about_1200_tokens_and_grow_by_about_200_a_turn(count: Any) -> None:
    lanes = agent().lanes
    shared = os.path.commonprefix([lane[0] for lane in lanes])  # noqa: RUF071
    assert 1160 <= count(shared) <= 1240
    for lane in lanes:
        sizes = [count(prompt) for prompt in lane]
        assert all(150 <= after - before <= 230 for before, after in pairwise(sizes))


def test_unique_prompts_have_about_410_tokens(count: Any) -> None:
    sizes = [count(lane[0]) for lane in unique().lanes]
    assert all(360 <= size <= 460 for size in sizes)
    assert abs(sum(sizes) / len(sizes) - 410) < 20


def test_every_worked_answer_is_arithmetically_right() -> None:
    rng = random.Random(9)
    checked = 0
    for kind in range(300):
        question, answer = word_problem(rng, kind)
        assert question.endswith("?")
        for left, right in re.findall(r"(\d+(?: [-+*] \d+)+) =\s+(\d+)", answer):
            assert eval(left) == int(right), answer  # noqa: S307 (digits and signs by the pattern)
            checked += 1
        assert "-" not in answer.partition("#### ")[2], f"a negative result: {answer}"
    assert checked > 600
