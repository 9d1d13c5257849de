"""A workload's prompts as paths through one prefix tree, cut into blocks of whatever size is simulated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from radixkv.report.trace import BLOCK_TOKENS, TraceRequest

Path = NDArray[np.int32]

_LARGEST_NUMBER = 2**31 - 2


class PrefixPaths:
    """Numbers blocks so that two are equal where a block, all before it, and the namespace are equal.  Iterable.

    Iterating gives a path a request: its blocks' numbers, int32 ``[blocks]``, all below ``num_numbers``.  What one request shares
    with another is a leading run of equal numbers, as in a radix tree, whatever ids the trace uses.

    At the trace's own block size a path has a number for each id, a partial last block's too.  Any other size counts whole blocks
    only, as the engine shares them: where N divides the trace's block, an id stands for several blocks; where N is a multiple, the
    last of its ids stands for all of them.  Tokens that the trace gives no id for are in no block.

    O(ids) time and memory to make, O(blocks) to iterate.

    Raises
    ------
    ValueError
        ``block_size`` neither divides the trace's block size nor is a multiple of it, or requests differ in that size, or the
        blocks are too many to number (2**31).
    """

    def __init__(self, trace: Iterable[TraceRequest], block_size: int | None = None) -> None:
        self.requests = list(trace)
        own = self.requests[0].block_tokens if self.requests else BLOCK_TOKENS
        for request in self.requests:
            if request.block_tokens != own:
                raise ValueError(f"requests of a trace must have one block size, got {own} and {request.block_tokens} tokens")
        size = own if block_size is None else block_size
        if size < 1 or (own % size and size % own):
            raise ValueError(f"block_size must divide the trace's blocks of {own} tokens or be a multiple of that, got {size}")
        self.block_size = size
        grouped, self._split = max(size // own, 1), max(own // size, 1)
        self._nodes: list[Path] = []
        self.lengths: list[int] = []
        """Blocks of each request."""
        number: dict[tuple[int, int | str], int] = {}  # of an id below the node of another
        top: dict[str, int] = {}
        for request in self.requests:
            ids = request.hash_ids
            length = len(ids) if size == own else min(len(ids) * own, request.input_length) // size
            if grouped > 1:
                ids = ids[grouped - 1 :: grouped][:length]
            node = top.setdefault(request.namespace, -1 - len(top))
            self._nodes.append(
                np.array([node := number.setdefault((node, i), len(number)) for i in ids[: -(-length // self._split)]], np.int32)
            )
            self.lengths.append(length)
        self.num_numbers = len(number) * self._split
        if self.num_numbers > _LARGEST_NUMBER:
            raise ValueError(
                f"block_size {size} cuts the trace into up to {self.num_numbers:,} different blocks; at most {_LARGEST_NUMBER:,} "
                "can be told apart: use larger blocks"
            )

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Path]:
        split = self._split
        within = np.arange(split, dtype=np.int32)
        for nodes, length in zip(self._nodes, self.lengths, strict=True):
            yield nodes if split == 1 else (nodes[:, np.newaxis] * np.int32(split) + within).ravel()[:length]
