"""Token arrays: taken from callers without copying where that is safe, and compared as memory."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Tokens = NDArray[np.int32]

NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False

_INT32 = np.dtype(np.int32)
_FLAT = (4,)

_FIRST = 512
"""Tokens compared at once in any case."""

_SEARCH = 8192
"""Up to here, searching the comparison's bytes is faster than argmax."""


def as_tokens(tokens: ArrayLike) -> Tokens:
    """``tokens`` as a one-dimensional int32 array: itself where it is one already.

    Raises ``ValueError`` for another shape, for anything but integers, and for integers beyond int32.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype is _INT32 and tokens.strides == _FLAT:
        return tokens
    try:
        array: NDArray[Any] = np.asarray(tokens)
    except (ValueError, OverflowError) as error:  # lists of different lengths, integers beyond 64 bits
        raise ValueError(f"tokens must be a flat sequence of integers: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise ValueError(f"tokens must be a flat sequence of integers, got shape {array.shape} of {array.dtype}")
    if len(array) and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
        raise ValueError(f"tokens must be 32-bit integers, got {array.min()} to {array.max()}")
    converted = array.astype(np.int32)
    converted.flags.writeable = False
    return converted


def keep(tokens: Tokens) -> Tokens:
    """``tokens`` as an array that may be kept: itself if it is read-only and most of its buffer, else a copy of its own.

    A read-only array is its owner's word that these tokens don't change any more.  A small part of a large buffer is copied
    because it would keep all of the buffer in memory.
    """
    base = tokens.base
    if base is None:
        kept: float = tokens.nbytes
    elif isinstance(base, np.ndarray) and base.base is None:
        kept = base.nbytes
    else:
        kept = _num_bytes(base)
    if kept > 2 * tokens.nbytes or tokens.flags.writeable:
        tokens = tokens.copy()
        tokens.flags.writeable = False
    return tokens


def _num_bytes(buffer: object) -> float:
    """Size of the memory that an array keeps alive whose base is ``buffer``."""
    while isinstance(buffer, np.ndarray):
        base = buffer.base
        if base is None:
            return buffer.nbytes
        buffer = base
    try:
        return memoryview(buffer).nbytes  # type: ignore[arg-type]
    except TypeError:
        return inf  # not to be known


Edge = Tokens | bytes
"""An edge's tokens as a node keeps them: an array, or its bytes where it is short, because a small array takes 150 bytes more."""

_SHORT = 512


def as_edge(tokens: Tokens) -> Edge:
    """``tokens`` to be kept by a node: see :func:`keep`."""
    return tokens.tobytes() if len(tokens) <= _SHORT else keep(tokens)


def edge_tokens(edge: Edge) -> Tokens:
    """The tokens of an edge, int32, read-only."""
    return np.frombuffer(edge, dtype=np.int32) if isinstance(edge, bytes) else edge


def _are_one(one: Tokens, other: Tokens) -> bool:
    """Whether two arrays begin at the same place in memory; False, too, where that would take long to find out."""
    owner = other if other.base is None else other.base
    return (one if one.base is None else one.base) is owner and _address(one) == _address(other)


def _address(tokens: Tokens) -> int:
    address: int = tokens.__array_interface__["data"][0]
    return address


def common_prefix(edge: Edge, tokens: Tokens) -> int:
    """Leading tokens that an edge and an array share, in O(that number) compared as memory; O(1) where both are the same memory."""
    n = len(tokens)
    if isinstance(edge, bytes):
        length = len(edge) >> 2
        if edge.startswith(tokens[:length] if length < n else tokens):  # type: ignore[arg-type]  # an array is a buffer
            return length if length < n else n
        edge = np.frombuffer(edge, dtype=_INT32)
    elif len(edge) > _SEARCH and n > _SEARCH and _are_one(edge, tokens):
        return min(n, len(edge))  # a sequence meets its own tokens: a chat that grows in one buffer, or one that was preempted
    if len(edge) < n:
        n = len(edge)
    # Look ahead at a few single tokens, so that two long arrays that part early are not compared to their ends.
    probe = _FIRST
    while probe < n:
        if edge.item(probe) != tokens.item(probe):
            n = probe
            break
        probe *= 2
    if n <= _SEARCH:
        at = (edge[:n] != tokens[:n]).tobytes().find(1)
        return n if at < 0 else at
    # Two tokens at a time: half as many results to write and to search, and half the time.
    pairs = n // 2
    differ = edge[: 2 * pairs].view(np.int64) != tokens[: 2 * pairs].view(np.int64)
    at = int(differ.argmax())
    at = 2 * at if differ[at] else 2 * pairs
    return at + 1 if at < n and edge[at] == tokens[at] else at
