"""Running: the requests that run, and what each step asks of them, as columns."""

from __future__ import annotations

from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv.scheduling.batch import Batch, Column
from radixkv.scheduling.request import Request

_num_tokens = attrgetter("num_tokens")


class Running:
    """Requests in order of admission, each with a row of the columns for as long as it runs.

    A step asks the same of every sequence: is there room for its next token, where does that go, which blocks hold those before it.
    In columns that is a few operations on arrays, and a request and its lease are only looked at where it begins or fills a block.
    A row repeats what its request and lease say, so :meth:`lease_changed` must be called where a call of the cache changed the
    lease; ``num_computed`` is kept here alone.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.requests: list[Request] = []
        """The youngest is last."""
        self.rows: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        """Which row each request has."""
        self.num_tokens: Column = np.zeros(max_num_seqs, dtype=np.int64)
        """Tokens that are known, as of the last :meth:`count_tokens`."""
        self.num_prompt_tokens = np.zeros_like(self.num_tokens)
        self.num_computed = np.zeros_like(self.num_tokens)
        """Leading tokens whose K/V are in blocks, or will be once the scheduled step has run."""
        self.num_counted = np.zeros_like(self.num_tokens)
        """Of those, the leading ones that were cached or that the queue was told of (:meth:`WaitingQueue.computed`)."""
        self.room = np.zeros_like(self.num_tokens)
        """Tokens that its blocks have room for."""
        self.write_start = np.zeros_like(self.num_tokens)
        self.block_tables: NDArray[np.int32] = np.zeros((max_num_seqs, 64), dtype=np.int32)
        """What stands behind a sequence's last block means nothing."""
        self._free = list(range(max_num_seqs))

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request, start: int) -> None:
        """``request`` has got its lease, and is to be computed from position ``start`` on; at most ``max_num_seqs`` run."""
        assert request.lease is not None
        row = self._free.pop()
        self.requests.append(request)
        self.rows = np.append(self.rows, row)
        self.num_tokens[row] = request.num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = self.num_counted[row] = start
        self.lease_changed(len(self) - 1)

    def remove(self, i: int) -> None:
        self._free.append(int(self.rows[i]))
        self.rows = np.delete(self.rows, i)
        del self.requests[i]

    def lease_changed(self, i: int) -> None:
        """Read again what the lease of request ``i`` says."""
        row, lease = self.rows.item(i), self.requests[i].lease
        assert lease is not None
        self.room[row] = lease.num_tokens
        self.write_start[row] = lease.write_start
        table = lease.block_table
        if len(table) > self.block_tables.shape[1]:
            more = max(len(table), 2 * self.block_tables.shape[1]) - self.block_tables.shape[1]
            self.block_tables = np.pad(self.block_tables, ((0, 0), (0, more)))
        self.block_tables[row, : len(table)] = table

    def count_tokens(self) -> Column:
        """Tokens that are known now of each request."""
        counts = np.fromiter(map(_num_tokens, self.requests), np.int64, len(self.requests))
        self.num_tokens[self.rows] = counts
        return counts

    def batch(self, chosen: NDArray[np.intp], counts: Column, cache: PrefixCache) -> Batch:
        """The last ``counts`` tokens of those that are computed of the ``chosen`` requests, sharing blocks side by side.

        O(sequences) in numpy, and in Python where the tree has changed.
        """
        if not len(chosen):
            return Batch()
        requests = [self.requests[i] for i in chosen.tolist()]
        order, segments = cache.tree_order([request.lease for request in requests if request.lease is not None])
        if len(segments):
            chosen, counts = chosen[order], counts[order]
            requests = [self.requests[i] for i in chosen.tolist()]
        rows = self.rows[chosen]
        ends = self.num_computed[rows]
        starts = ends - counts
        of_prompts = starts < self.num_prompt_tokens[rows]
        return Batch(
            requests,
            starts,
            counts,
            samples=ends == self.num_tokens[rows],
            write_starts=self.write_start[rows],
            block_tables=self.block_tables[rows, : -(-int(ends.max()) // cache.block_size)],
            num_prompt_tokens=int(counts[of_prompts].sum()),
            scores_prompts=any(requests[i].prompt_logprobs is not None for i in np.flatnonzero(of_prompts).tolist()),
            tree_segments=segments if len(segments) else None,
        )

    def check(self) -> None:
        """Assert that each row says what its request and lease do, and that no row is lost.  For tests."""
        assert sorted([*self._free, *self.rows.tolist()]) == list(range(len(self.num_tokens))), "a row is lost, or used twice"
        for row, request in zip(self.rows.tolist(), self.requests, strict=True):
            lease = request.lease
            assert lease is not None, "a running request holds no lease"
            assert self.num_prompt_tokens[row] == request.num_prompt_tokens
            assert (self.room[row], self.write_start[row]) == (lease.num_tokens, lease.write_start)
            assert self.block_tables[row, : len(lease.block_table)].tolist() == lease.block_table.tolist()
