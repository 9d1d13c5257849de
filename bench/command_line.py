"""What every benchmark's ``main`` does with its command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError


def run(app: App, argv: Sequence[str], bad_input: tuple[type[Exception], ...] = (ValueError, OSError)) -> int:
    """Exit code: what ``app`` returns, or 0; 2, and the error in a line, for bad input; 130 after Ctrl-C."""
    errors: tuple[type[Exception], ...] = (CycloptsError, *bad_input)
    try:
        code: int = app(argv) or 0
    except KeyboardInterrupt:
        return 130
    except errors as error:
        print(error, file=sys.stderr)
        return 2
    return code
