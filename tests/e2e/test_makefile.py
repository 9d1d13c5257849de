"""What `make` would install for which target, and when again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    return tmp_path


def installs(project: Path, target: str) -> list[str]:
    """The extras that ``make target`` would install, in order; nothing is run.  Afterwards its stamps are as if it had been."""
    run = subprocess.run(["make", "-n", target], cwd=project, capture_output=True, text=True, timeout=30, check=True)
    now = time.time()
    for number, stamp in enumerate(re.findall(r"^touch (\S+)$", run.stdout, flags=re.MULTILINE)):
        (project / stamp).touch()
        os.utime(project / stamp, (now + number, now + number))
    return re.findall(r"--editable '\.\[(\w+)\]'", run.stdout)


def test_the_demo_installs_less_than_the_tests(project: Path) -> None:
    assert installs(project, "demo") == ["demo"]
    assert installs(project, "demo") == []
    assert installs(project, "test") == ["dev"]
    assert installs(project, "test") == installs(project, "lint") == installs(project, "demo") == []


def test_the_tests_first_install_what_the_demo_needs_too(project: Path) -> None:
    assert installs(project, "test") == ["demo", "dev"]
    assert installs(project, "demo") == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_what_changes_requirements_has_both_installed_again(project: Path, name: str) -> None:
    installs(project, "test")
    later = time.time() + 60
    os.utime(project / name, (later, later))
    for stamp in (".installed-demo", ".installed-dev"):
        os.utime(project / ".venv" / stamp, (later - 30, later - 30))
    run = subprocess.run(["make", "-n", "demo"], cwd=project, capture_output=True, text=True, timeout=30, check=True)
    assert "'.[demo]'" in run.stdout
    assert installs(project, "test") == ["demo", "dev"]
