"""Makes ``bench`` importable without putting the repository's root on ``sys.path``, where ``kernels`` would be found too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "bench"

if "bench" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("bench", _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)])
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["bench"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["bench"])
