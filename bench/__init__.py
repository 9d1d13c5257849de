"""Benchmarks: ``python -m bench NAME`` from the repository's root."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` puts the root first on sys.path, where kernels/ would shadow the Hugging Face package that transformers looks for.
# Our own submodules are found through this package's __path__ and need no root.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _ROOT]
