"""Scheduler: who runs in this step, and with how many tokens (continuous batching; Orca, Yu et al. 2022)."""

from __future__ import annotations

import time

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.policy import WaitingQueue
from radixkv.scheduling.request import Request
from radixkv.scheduling.running import Running


class Scheduler:
    """Waiting and running requests, and the only caller of the cache.

    A step takes one token of every decoding sequence first, then prefill chunks of running sequences, then admits waiting ones in
    the policy's order, all under one token budget (chunked prefill mixed with decodes; Sarathi-Serve, Agrawal et al. 2024).

    Every chunk is published to the cache as soon as it is scheduled: the K/V of a layer are all written before attention reads
    them, so a request admitted later in the same step shares a prefix that another one computes in that step.  Requests that
    arrive together with a common prefix compute it once.
    """

    def __init__(self, cache: PrefixCache, queue: WaitingQueue, *, max_batch_tokens: int, max_num_seqs: int) -> None:
        self.cache = cache
        self.max_batch_tokens = max_batch_tokens
        self.max_num_seqs = max_num_seqs
        self._running = Running(max_num_seqs)
        self.num_preemptions = 0
        self._queue = queue
        self._waiting: dict[str, Request] = {}
        self._resuming: list[Request] = []
        """Those of the waiting that were preempted; all others are in the queue."""

    def add(self, request: Request) -> None:
        self._queue.add(request, self.cache)
        self._waiting[request.request_id] = request

    @property
    def running(self) -> list[Request]:
        """In order of admission, so the youngest is last."""
        return self._running.requests

    @property
    def waiting(self) -> list[Request]:
        return list(self._waiting.values())

    def find(self, request_id: str) -> Request | None:
        if request_id in self._waiting:
            return self._waiting[request_id]
        return next((request for request in self.running if request.request_id == request_id), None)

    def remove(self, request: Request) -> None:
        """Forget a request that finished, failed or was aborted; its blocks are back when this returns."""
        if request.lease is None:
            self._leave_waiting(request)
        else:
            self._release(self.running.index(request))

    def schedule(self) -> Batch:
        """Choose the work of one step.

        The batch is empty only when nothing waits or runs.
        """
        running, size = self._running, self.cache.block_size
        preemptions = self.num_preemptions
        num_tokens = running.count_tokens()
        for i in np.flatnonzero(num_tokens > running.room[running.rows]).tolist():
            if i < len(running):  # else it was preempted
                self._make_room(i)
        rows = running.rows
        computed = running.num_computed[rows]
        pending = num_tokens[: len(rows)] - computed
        decodes = np.flatnonzero(pending == 1)
        starts = computed[decodes]
        for i in decodes[(starts < running.num_prompt_tokens[rows[decodes]]) | ((starts + 1) % size == 0)].tolist():
            self._compute(i, 1)
        running.num_computed[rows[decodes]] = starts + 1  # of most of them there is nothing to publish
        budget = self.max_batch_tokens - len(decodes)
        chunks: list[tuple[int, int]] = []  # which request, and how many of its tokens
        for i in np.flatnonzero(pending > 1).tolist():  # prompts, and tokens that a grammar has forced
            if budget:
                chunks.append((i, self._compute(i, budget)))
                budget -= chunks[-1][1]
        if self.num_preemptions == preemptions:  # else admitting would only take back what the preemption just freed
            chunks += self._admit(budget)
        counts = np.ones_like(decodes)
        if chunks:
            chosen, lengths = np.array(chunks).T
            decodes, counts = np.append(decodes, chosen), np.append(counts, lengths)
        batch = running.batch(decodes, counts, self.cache)
        batch.copies = self.cache.take_copies()
        return batch

    def _admit(self, budget: int) -> list[tuple[int, int]]:
        """Let waiting requests run while the budget lasts.  Returns which they are of the running ones, and tokens of each."""
        chunks: list[tuple[int, int]] = []
        while self._waiting and budget and len(self._running) < self.max_num_seqs:
            request = min(self._resuming, key=_arrival_time) if self._resuming else self._queue.head(self.cache)
            lease = self.cache.acquire(
                request.tokens,
                namespace=request.namespace,
                # Every running sequence may need a block soon; without this the newcomer would be preempted at once.
                headroom=len(self._running),
                retention=request.retention,
                resumed=request.num_preemptions > 0,
            )
            if lease is None:
                break  # nobody overtakes the one whose turn it is, or a large request would wait for ever
            self._leave_waiting(request)
            request.lease = lease
            start = request.first_to_compute(lease.num_cached_tokens)
            if not request.num_preemptions:
                request.num_cached_tokens = min(start, request.num_prompt_tokens)
                request.missed, request.parting = lease.missed, lease.parting
                request.admission_time = time.monotonic()
                if request.missed is not None and start < lease.num_cached_tokens:
                    request.missed = {"logprobs": lease.num_cached_tokens - start} | request.missed
            i = len(self._running)
            self._running.add(request, start)
            chunks.append((i, self._compute(i, budget)))
            budget -= chunks[-1][1]
        return chunks

    def _leave_waiting(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if request.num_preemptions:
            self._resuming.remove(request)
        else:
            self._queue.remove(request)

    def _compute(self, i: int, most: int) -> int:
        """Put up to ``most`` tokens of running request ``i`` into this step, and publish what they fill.  Returns how many."""
        running, size = self._running, self.cache.block_size
        request, row = running.requests[i], running.rows.item(i)
        lease = request.lease
        assert lease is not None
        start, write_start = running.num_computed.item(row), lease.write_start
        count = min(most, request.num_tokens - start)
        end = start + count
        running.num_computed[row] = end
        self._count(i)
        self.cache.publish(lease, request.tokens, end, written=False)
        if lease.write_start != write_start:  # it was moved onto blocks of another sequence
            running.lease_changed(i)
        if self._waiting and end // size > start // size:
            self._queue.cached(request.tokens[: end // size * size], request.namespace, start // size * size)
        return count

    def _make_room(self, i: int) -> None:
        """Get the blocks for all tokens that are known of running request ``i``, preempting the youngest while there are none.

        That may be ``i`` itself.  The oldest always gets on, so every request ends.
        """
        running, size = self._running, self.cache.block_size
        request = running.requests[i]
        assert request.lease is not None
        missing = -(-request.num_tokens // size) * size - request.lease.num_tokens  # all of the last block: no call for the rest
        while not self.cache.extend(request.lease, missing):
            youngest = running.requests[-1]
            self._release(len(running) - 1)
            youngest.num_preemptions += 1
            self.num_preemptions += 1
            self._waiting[youngest.request_id] = youngest
            self._resuming.append(youngest)
            if youngest is request:
                return
        running.lease_changed(i)

    def _release(self, i: int) -> None:
        """Running request ``i`` runs no more."""
        request = self._running.requests[i]
        assert request.lease is not None
        self._count(i)
        self._running.remove(i)
        self.cache.release(request.lease)
        request.lease = None

    def _count(self, i: int) -> None:
        """Tell the queue how much has been computed for running request ``i`` since it was last told."""
        running, row = self._running, self._running.rows.item(i)
        computed = running.num_computed.item(row)
        self._queue.computed(running.requests[i].namespace, computed - running.num_counted.item(row))
        running.num_counted[row] = computed


def _arrival_time(request: Request) -> float:
    return request.arrival_time
