"""The examples run as they are, and end by showing what of their prompts was cached."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.full


def hit_rate(name: str) -> float:
    """Per cent, of the report at the end."""
    command = [sys.executable, "-P", str(EXAMPLES / name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (rate,) = re.findall(r"^hit rate +([\d.]+)%", run.stdout, flags=re.MULTILINE)
    return float(rate)


@pytest.mark.parametrize(
    ("name", "least"), [("agent_loop.py", 50), ("chats.py", 80), ("few_shot_batch.py", 70), ("parallel_sampling.py", 60)]
)
def test_an_example_ends_with_the_hit_rate_of_what_it_did(default_model: object, name: str, least: float) -> None:
    assert hit_rate(name) > least


def test_the_example_of_the_cache_alone_needs_no_model() -> None:
    assert hit_rate("cache_only.py") > 0
