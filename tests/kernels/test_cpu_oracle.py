"""The C kernels as a program of their own, by other compilers and for other CPUs, against sums in double: see oracle.c."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from radixkv.kernels import cpu
from radixkv.kernels.cpu import build

ORACLE = Path(__file__).with_name("oracle.c")
FOLDER = Path(cpu.__file__).parent


def run_oracle(folder: Path, compiler: str, machine: str, *flags: str, emulator: str | None = None) -> None:
    for tool in (compiler, emulator):
        if tool is not None and shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    program = folder / "oracle"
    options = [flag for flag in build.FLAGS if not flag.startswith("-march=")]
    sources = [str(FOLDER / name) for name in build.SOURCES]
    command = [compiler, *options, f"-march={machine}", *flags, f"-I{FOLDER}", *sources, str(ORACLE), "-o", str(program), "-lm"]
    subprocess.run(command, check=True, timeout=300)
    run = [emulator, str(program)] if emulator else [str(program)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("attention") == 8  # each type, four block sizes
    assert done.stdout.count("quantized") == 2


@pytest.mark.full
@pytest.mark.parametrize("compiler", build.COMPILERS)
def test_the_kernels_agree_with_double_by_every_compiler(compiler: str, tmp_path: Path) -> None:
    run_oracle(tmp_path, compiler, "native")


@pytest.mark.full
@pytest.mark.parametrize("machine", ["armv8-a", "armv8.6-a+bf16"])
def test_the_kernels_agree_with_double_on_an_emulated_arm(machine: str, tmp_path: Path) -> None:
    run_oracle(tmp_path, "aarch64-linux-gnu-gcc", machine, "-static", emulator="qemu-aarch64-static")
