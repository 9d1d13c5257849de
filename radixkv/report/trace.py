"""Reading recorded workloads: one JSON object a line, a prompt given as the ids of its blocks instead of its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from radixkv.report.logged_request import LoggedRequest

BLOCK_TOKENS = 512
"""Tokens in a block of a Mooncake trace (the published traces' choice)."""

_PROGRESS_LINES = 256

Progress = Callable[[int, int], None]
"""Called with (how much is done, how much there is) now and then, and at the end."""


class TraceError(ValueError):
    """A trace line that can't be used; the text says where, which field, and why."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request.  Equal ids in ``hash_ids`` mean an equal block after an equal prefix, in the same namespace."""

    timestamp: float
    """Milliseconds, from any start."""
    input_length: int
    """Prompt tokens."""
    output_length: int
    hash_ids: Sequence[int | str]
    """One id for each block of the prompt, in order.  The last block may be partial; a request log leaves it out then."""
    namespace: str = ""
    """Tenant or salt: prompts in different namespaces share nothing."""
    block_tokens: int = BLOCK_TOKENS
    """Tokens in a block that ``hash_ids`` names."""


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS, progress: Progress | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a JSON-lines file; blank lines are skipped, and fields that no replay needs are ignored.

    The first line tells the format.  A Mooncake trace (Qin et al., FAST 2025) is read one line at a time.  A request log of
    ``radixkv serve`` is read whole and put in the order of arrival, because requests are logged when they end.

    Parameters
    ----------
    block_tokens
        Tokens in a block of a Mooncake trace; a request log says it itself.
    progress
        Called with (bytes read, bytes in all).

    Raises
    ------
    OSError
        The file can't be read.
    TraceError
        A line isn't JSON, lacks a field, has a field of the wrong type, or has a number of ids that contradicts its length.
    """
    finished: list[TraceRequest] = []
    for record in read_records(path, block_tokens=block_tokens, progress=progress):
        if isinstance(record, TraceRequest):
            yield record
        else:
            finished.append(as_trace(record))
    yield from sorted(finished, key=lambda request: request.timestamp)


def read_records(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, progress: Progress | None = None
) -> Iterator[TraceRequest | LoggedRequest]:
    """The lines of either format, as they are and in their order, all of one kind.  Takes and raises what ``read_trace`` does."""
    parse: Callable[[bytes], TraceRequest | LoggedRequest] | None = None
    read, size = 0, path.stat().st_size
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            read += len(line)
            if progress is not None and number % _PROGRESS_LINES == 0:
                progress(read, size)
            if line.isspace():
                continue
            try:
                parse = parse or _parser_for(line, block_tokens)
                yield parse(line)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: {_explain(error)}") from None
    if progress is not None:
        progress(read, read)


def as_trace(line: LoggedRequest) -> TraceRequest:
    """What a replay needs of a request log's line."""
    return TraceRequest(
        1000 * line.time, line.prompt_tokens, line.output_tokens, line.block_hashes, line.namespace, line.block_size
    )


def _parser_for(first_line: bytes, block_tokens: int) -> Callable[[bytes], TraceRequest | LoggedRequest]:
    fields = msgspec.json.decode(first_line, type=dict[str, msgspec.Raw])
    if "hash_ids" in fields:
        return _MooncakeParser(block_tokens)
    if "block_hashes" in fields:
        return _RequestLogParser()
    raise ValueError("has neither hash_ids, as a Mooncake trace has, nor block_hashes, as a request log of radixkv has")


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _MooncakeParser:
    def __init__(self, block_tokens: int) -> None:
        self._decode = msgspec.json.Decoder(_MooncakeLine).decode
        self._block_tokens = block_tokens

    def __call__(self, text: bytes) -> TraceRequest:
        line, size = self._decode(text), self._block_tokens
        _at_least("input_length", line.input_length, 1)
        _at_least("output_length", line.output_length, 0)
        blocks = -(-line.input_length // size)
        if len(line.hash_ids) != blocks:
            raise ValueError(
                f"hash_ids: {line.input_length} input tokens fill {blocks} blocks of {size}, got {len(line.hash_ids)} ids"
            )
        return TraceRequest(line.timestamp, line.input_length, line.output_length, line.hash_ids, "", size)


class _RequestLogParser:
    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(LoggedRequest).decode
        self._block_size: int | None = None

    def __call__(self, text: bytes) -> LoggedRequest:
        line = self._decode(text)
        if self._block_size is not None and line.block_size != self._block_size and line.block_size >= 1:
            raise ValueError(f"block_size: must be {self._block_size}, as in the lines before, got {line.block_size}")
        line.check()
        self._block_size = line.block_size
        return line


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{field}: must be at least {least}, got {value}")


def _explain(error: Exception) -> str:
    """msgspec's ``Expected `int`, got `str` - at `$.hash_ids[3]``` with the field first, as our own checks have it."""
    problem, _, field = str(error).partition(" - at `$.")
    return f"{field.removesuffix('`')}: {problem}" if field else problem
