"""Compiling the CPU kernels at first use: cached, safe against races, and done without where it can't be done."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.kernels.cpu import build
from radixkv.kernels.cpu.build import library

QUICK_SOURCES = ("kv.c", "parallel.c")  # these tests compile again and again: a part of the library will do
load_anew = library.__wrapped__  # as the first caller in a process has it: the result is cached


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RADIXKV_NO_NATIVE", raising=False)
    monkeypatch.setattr(build, "SOURCES", QUICK_SOURCES)
    return tmp_path / "radixkv" / "kernels"


def compiler_script(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Makes ``$CC`` a script that answers ``--version`` and otherwise does ``body``."""
    script = folder / "fakecc"
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fakecc 1; exit 0; fi\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))


def test_without_a_compiler_torch_computes_and_one_warning_says_what_to_install(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(cache))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert load_anew() is None
    (record,) = caplog.records
    assert "no C compiler found" in record.getMessage()
    assert "install gcc" in record.getMessage()
    assert "slower" in record.getMessage()


def test_a_broken_compiler_gives_torch_and_its_own_words(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler_script(tmp_path, monkeypatch, "echo no headers on this system >&2; exit 3")
    with caplog.at_level(logging.WARNING):
        assert load_anew() is None
    (record,) = caplog.records
    assert "no headers on this system" in record.getMessage()
    assert list(cache.iterdir()) == []


def test_a_compiler_that_writes_nonsense_gives_torch(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler_script(tmp_path, monkeypatch, 'for last; do [ "$previous" = -o ] && echo garbage > "$last"; previous=$last; done')
    with caplog.at_level(logging.WARNING):
        assert load_anew() is None
    assert len(caplog.records) == 1


def test_a_cache_folder_that_cannot_be_made_gives_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("RADIXKV_NO_NATIVE", raising=False)
    compiler_script(tmp_path, monkeypatch, "exit 0")
    with caplog.at_level(logging.WARNING):
        assert load_anew() is None
    assert len(caplog.records) == 1


def test_the_environment_can_ask_for_torch_without_a_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RADIXKV_NO_NATIVE", "1")
    assert load_anew() is None
    assert caplog.records == []
    assert not cache.exists()


@pytest.mark.usefixtures("compiler")
def test_a_second_build_finds_the_first_and_other_flags_make_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.build()
    written = first.stat().st_mtime_ns
    assert build.build() == first
    assert first.stat().st_mtime_ns == written
    assert build.build(("-DVBYTES=16",)) != first
    assert len(list(cache.iterdir())) == 2


RACE = f"""
import ctypes, sys
from radixkv.kernels.cpu import build
build.SOURCES = {QUICK_SOURCES}
print("ready", flush=True)
sys.stdin.readline()
path = build.build()
ctypes.CDLL(str(path)).radixkv_write_kv
print(path)
"""


@pytest.mark.usefixtures("compiler")
def test_processes_that_compile_at_once_all_get_a_whole_library(cache: Path) -> None:
    command = [sys.executable, "-P", "-c", RACE]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all are past their imports: start them together
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(outputs)) == 1
    assert [str(path) for path in cache.iterdir()] == outputs[:1]
