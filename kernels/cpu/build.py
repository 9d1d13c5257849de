"""Compiles the C kernels with the user's compiler at first use and keeps the library in the user's cache folder.

The file's name is a hash of all that shapes the code (sources, flags, compiler version, CPU features), so an upgrade or another
machine on a shared home folder gets its own; it is written under a temporary name and renamed, so processes can race.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCES = (
    "decoder.c", "linear.c", "linear_tiles.c", "attention.c", "attention_tiles.c", "attention_plan.c", "matrix_tiles.c",
    "elementwise.c", "highest.c", "kv.c", "parallel.c",
)  # fmt: skip
# Contraction off: the code says where multiply-adds are fused, so that a row has the same bits in every instance of a loop.
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-fPIC",
)  # fmt: skip
COMPILERS = ("gcc", "cc", "clang")
COMPILE_TIMEOUT = 300  # seconds

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "radixkv_advise_huge_pages": [_POINTER, _LONG],
    "radixkv_pack_weight": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "radixkv_pack_quantized": [_POINTER] * 4 + [_LONG] * 2 + [_INT],
    "radixkv_linear": [_POINTER, _LONG] + [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 3,
    "radixkv_decoder_layers": [_POINTER, _LONG] + [_POINTER] * 5 + [_INT],
    "radixkv_wide_linear": [_POINTER, _LONG] + [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 3,
    "radixkv_gated_linear": [_POINTER, _LONG] + [_POINTER] * 3 + [_LONG] * 3 + [_INT] * 3,
    "radixkv_highest": [_POINTER] + [_LONG] * 2 + [_POINTER] * 2 + [_INT],
    "radixkv_rms_norm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT] + [_INT] * 2,
    "radixkv_silu_mul": [_POINTER] * 2 + [_LONG] * 2 + [_INT] * 2,
    "radixkv_rope": [_POINTER, _LONG] * 2 + [_POINTER] * 2 + [_LONG] * 4 + [_INT] * 2,
    "radixkv_write_kv": [_POINTER, _LONG] * 2 + [_POINTER] * 3 + [_LONG] * 4 + [_INT] * 2,
    "radixkv_copy_blocks": [_POINTER] * 3 + [_LONG] * 4 + [_INT],
    "radixkv_paged_attention": [_POINTER, _LONG] + [_POINTER] * 6 + [_LONG] * 7 + [_POINTER, _LONG, _FLOAT] + [_INT] * 2,
}  # fmt: skip


class BuildError(RuntimeError):
    """No compiler, or one that could not make the library; says what to do."""


@functools.cache
def library() -> Any:
    """The compiled kernels (a ``ctypes.CDLL``), or None where they can't be had; then says why, once, in the log.

    ``RADIXKV_NO_NATIVE=1`` in the environment asks for None.
    """
    if os.environ.get("RADIXKV_NO_NATIVE", "0") not in ("", "0"):
        return None
    try:
        return load(build())
    except (BuildError, OSError) as error:
        logger.warning(
            "CPU kernels: %s. Falling back to torch, which is several times slower and can't promise that a sequence's "
            "bits are the same in every batch. For the native kernels install gcc (Debian, Ubuntu: `apt install gcc libc6-dev`).",
            error,
        )
        return None


def load(path: Path) -> ctypes.CDLL:
    """Load a library that :func:`build` made. Raises OSError."""
    lib = ctypes.CDLL(str(path))
    for name, argtypes in _SIGNATURES.items():
        function = getattr(lib, name)
        function.argtypes, function.restype = argtypes, None
    return lib


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """Path of the library for this machine, compiled (5 to 20 s) if it isn't in the cache. Raises BuildError, OSError."""
    compiler = find_compiler()
    folder = Path(__file__).parent
    flags = (*FLAGS, *extra_flags)
    sources = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    identity = [_run([compiler, "--version"]), *flags, _cpu_features(), *(path.read_text() for path in sources)]
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:24]
    target = cache_folder() / f"kernels-{digest}.so"
    if target.exists():
        return target
    logger.info("compiling the CPU kernels with %s (once for this machine)", compiler)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        made = Path(scratch) / "kernels.so"
        objects = [f"{scratch}/{name}.o" for name in SOURCES]
        commands = [[compiler, *flags, "-c", str(folder / name), "-o", o] for name, o in zip(SOURCES, objects, strict=True)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        _run([compiler, *flags, "-shared", *objects, "-o", str(made), "-lm"])
        os.replace(made, target)
    return target


def cache_folder() -> Path:
    """``radixkv/kernels`` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixkv" / "kernels"


def find_compiler() -> str:
    """``$CC`` if that is set, else the first of gcc, cc, clang on the path. Raises BuildError."""
    chosen = os.environ.get("CC")
    for name in (chosen,) if chosen else COMPILERS:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C compiler found (looked for {chosen or ', '.join(COMPILERS)})")


def _cpu_features() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = {line for line in lines if line.split(":")[0].strip() in ("flags", "Features", "model name", "CPU part")}
    return "\n".join(sorted(kept))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} did not finish in {COMPILE_TIMEOUT} s") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[:500] or f'exit status {done.returncode}'}")
    return done.stdout
