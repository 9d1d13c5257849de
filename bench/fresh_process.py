"""Run a function of a benchmark in a process of its own, so that no measurement inherits another's heap or imports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) now and then."""

_ROOT = Path(__file__).resolve().parent.parent


class ChildError(Exception):
    """The function raised what its caller can do something about; the text says what."""


def run_fresh(function: str, arguments: dict[str, Any], progress: Progress) -> Any:
    """Call ``module:name`` with ``arguments`` (JSON) and a progress callback; return its result (JSON).  One thread only.

    Raises :class:`ChildError` where the function raised ValueError, ImportError or OSError, RuntimeError where it died.
    """
    command = [sys.executable, "-m", "bench.fresh_process", function, json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=environment) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise ChildError(message["error"])
                if "result" in message:
                    return message["result"]
                progress(*message["progress"])
        finally:
            process.kill()
    raise RuntimeError(f"{function} died with exit code {process.returncode}")


def main(argv: list[str]) -> None:
    """The other side: ``function arguments``, messages as lines of JSON on standard output."""
    module, _, name = argv[0].partition(":")
    sys.stdout = sys.stderr  # what is printed meanwhile is no message of ours

    def tell(**message: object) -> None:
        print(json.dumps(message), file=sys.__stdout__, flush=True)

    try:
        result = getattr(importlib.import_module(module), name)(
            **json.loads(argv[1]), progress=lambda done, total: tell(progress=(done, total))
        )
    except (ValueError, ImportError, OSError) as error:
        tell(error=f"{type(error).__name__}: {error}")
    else:
        tell(result=result)


if __name__ == "__main__":
    main(sys.argv[1:])
