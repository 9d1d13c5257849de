"""The prefix cache: no torch, no I/O, usable alone."""

from __future__ import annotations

from typing import NamedTuple


class BlockCopy(NamedTuple):
    """Copy the first ``num_rows`` token rows of block ``source`` to block ``target``, before the step writes anything."""

    source: int
    target: int
    num_rows: int


class Lease:  # replaced in the next commit
    block_table: object
    write_start: int
