"""Prompts' tokens as a report shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = Sequence[int] | NDArray[np.int32]
Show = Callable[[Tokens], str]
"""Turns a few tokens into a word or two in quotes or brackets."""

_ENDS = 24
"""Tokens shown of either end of a long piece."""


def as_ids(tokens: Tokens) -> str:
    """For who has no tokenizer."""
    return f"[{' '.join(map(str, tokens))}]"


def as_text(tokenizer: Any) -> Show:
    """With a tokenizer that has ``decode``."""
    return lambda tokens: f"“{printable(tokenizer.decode(list(map(int, tokens))))}”"


def shortened(tokens: Tokens, show: Show) -> str:
    """Both ends of it."""
    if len(tokens) <= 2 * _ENDS:
        return show(tokens)
    return f"{show(tokens[:_ENDS])} … {show(tokens[-_ENDS:])}"


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or change its colours: prompts and namespaces are anybody's."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
