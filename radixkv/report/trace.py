"""Request traces: one JSON object a line, a prompt given as the ids of its blocks instead of its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

BLOCK_TOKENS = 512
"""Tokens in a trace block (the Mooncake traces' choice)."""


class TraceError(ValueError):
    """A trace line that can't be used; the text says where, which field, and why."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request.  Equal ids in ``hash_ids`` mean an equal block after an equal prefix; the last block may be partial.

    The format is Mooncake's (Qin et al., FAST 2025).  Further fields in a line are ignored.
    """

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    hash_ids: list[int]
    """One id for each block of the prompt, in order: ``ceil(input_length / 512)`` of them."""


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """Yield the requests of a JSON-lines file one by one; blank lines are skipped.

    Raises
    ------
    OSError
        The file can't be read.
    TraceError
        A line isn't JSON, lacks a field, has a field of the wrong type, or has a number of ids that contradicts its length.
    """
    decode = msgspec.json.Decoder(TraceRequest).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                request = decode(line)
                _check(request, block_tokens)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: {_explain(error)}") from None
            yield request


def _check(request: TraceRequest, block_tokens: int) -> None:
    if request.input_length < 1:
        raise ValueError(f"input_length: must be at least 1, got {request.input_length}")
    if request.output_length < 0:
        raise ValueError(f"output_length: must be at least 0, got {request.output_length}")
    blocks = -(-request.input_length // block_tokens)
    if len(request.hash_ids) != blocks:
        raise ValueError(
            f"hash_ids: {request.input_length} input tokens fill {blocks} blocks of {block_tokens}, got {len(request.hash_ids)} ids"
        )


def _explain(error: Exception) -> str:
    """msgspec's ``Expected `int`, got `str` - at `$.hash_ids[3]``` with the field first, as our own checks have it."""
    problem, _, field = str(error).partition(" - at `$.")
    return f"{field.removesuffix('`')}: {problem}" if field else problem
