"""BlockPool: physical KV blocks, handed out by id and counted by reference (PagedAttention, Kwon et al. 2023)."""

from __future__ import annotations

from array import array
from operator import index

import numpy as np
from numpy.typing import NDArray

BlockIds = NDArray[np.int32]

PackedIds = bytes
"""Block ids as the bytes of an int32 array: the tree keeps these because they take a third of a small array's memory, join faster
than arrays and can't change."""

_FEW = 4
"""Up to this many blocks, a loop is faster than numpy's indexing by an array."""


def unpack(*pieces: PackedIds) -> BlockIds:
    """The ids in order as one int32 array, read-only."""
    return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype=np.int32)


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for; nothing was allocated."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens each; both are fixed for the pool's life.

    The pool holds ids and counts, never K/V itself.  Arguments called ``blocks`` are int32 arrays of distinct ids.  Every
    operation is O(number of ids) in numpy.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        num_blocks, block_size = index(num_blocks), index(block_size)
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Two views of the same memory: whole arrays of blocks go through numpy, a few blocks go one by one through the array.
        self._counts = array("i", bytes(4 * num_blocks))
        self._refcounts = np.frombuffer(self._counts, dtype=np.int32)
        # A stack whose top is at num_free - 1: the block freed last is reused first, while it may still be in a CPU cache.
        self._stack = array("i", np.arange(num_blocks - 1, -1, -1, dtype=np.int32).tobytes())
        self._free = np.frombuffer(self._stack, dtype=np.int32)
        self.num_free = num_blocks
        """Only the pool changes it."""

    def refcount(self, block: int) -> int:
        return int(self._refcounts[block])

    def refcounts(self) -> NDArray[np.int32]:
        """Every block's reference count, int32 ``[num_blocks]``, a copy."""
        return self._refcounts.copy()

    def allocate(self, n: int) -> BlockIds:
        """Take ``n`` free blocks, each with a reference count of 1; read-only.

        Raises :class:`OutOfBlocks`, having changed nothing, when fewer are free.
        """
        return np.frombuffer(self.allocate_packed(n), dtype=np.int32)

    def allocate_packed(self, n: int) -> PackedIds:
        """:meth:`allocate`, as the ids' bytes."""
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        end = self.num_free
        left = end - n
        if left < 0:
            raise OutOfBlocks(f"{n} blocks asked for, {end} of {self.num_blocks} are free")
        self.num_free = left
        if n <= _FEW:
            counts = self._counts
            for block in self._stack[left:end]:
                counts[block] = 1
        else:
            self._refcounts[self._free[left:end]] = 1
        return self._stack[left:end].tobytes()

    def incref(self, blocks: BlockIds) -> None:
        """Add a reference to each block.  Raises ``ValueError`` if one of them is free."""
        if len(blocks) and not self._refcounts[blocks].all():
            raise ValueError("incref of a free block")
        self._refcounts[blocks] += 1

    def decref(self, blocks: BlockIds) -> int:
        """Drop a reference to each block; return how many became free.  Raises ``ValueError`` if one is free already."""
        if len(blocks) == 1:  # a sequence's last, incomplete block: the usual case
            block: int = blocks.item(0)
            count = self._counts[block] - 1
            if count < 0:
                raise ValueError("decref of a free block")
            self._counts[block] = count
            if count:
                return 0
            self._stack[self.num_free] = block
            self.num_free += 1
            return 1
        counts = self._refcounts[blocks]
        if len(blocks) and not counts.all():
            raise ValueError("decref of a free block")
        counts -= 1
        self._refcounts[blocks] = counts
        freed = blocks[counts == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)
        return len(freed)

    def check(self) -> None:
        """Assert that free and referenced blocks together are all blocks, each once.  O(num_blocks)."""
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a block is free twice"
        assert (self._refcounts >= 0).all(), "a reference count is negative"
        assert not self._refcounts[free].any(), "a free block is referenced"
        referenced = int(np.count_nonzero(self._refcounts))
        assert referenced + self.num_free == self.num_blocks, (
            f"{referenced} referenced + {self.num_free} free != {self.num_blocks} blocks"
        )
