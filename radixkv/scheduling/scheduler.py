"""Scheduler: who runs in this step, and with how many tokens (continuous batching; Orca, Yu et al. 2022)."""

from __future__ import annotations

import time

from radixkv.cache import PrefixCache
from radixkv.scheduling.batch import Batch, ScheduledSequence
from radixkv.scheduling.policy import WaitingQueue
from radixkv.scheduling.request import Request


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
        self.running: list[Request] = []
        """In order of admission, so the youngest is last."""
        self.num_preemptions = 0
        self._queue = queue
        self._waiting: dict[str, Request] = {}
        self._resuming: list[Request] = []
        """Those of the waiting that were preempted; all others are in the queue."""

    def add(self, request: Request) -> None:
        self._queue.add(request, self.cache)
        self._waiting[request.request_id] = request

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
            self.running.remove(request)
            self._release(request)

    def schedule(self) -> Batch:
        """Choose the work of one step.

        The batch is empty only when nothing waits or runs.
        """
        batch = Batch()
        preemptions = self.num_preemptions
        prefilling = []
        block_size, sequences = self.cache.block_size, batch.sequences
        for request in self.running.copy():
            lease, start = request.lease, request.num_computed_tokens
            if request.num_tokens - start > 1:  # a prompt, or tokens that a grammar has forced
                if lease is not None and (request.num_tokens <= lease.num_tokens or self._make_room(request)):
                    prefilling.append(request)
            elif lease is not None and (start < lease.num_tokens or self._make_room(request)):
                if start >= request.num_prompt_tokens and (start + 1) % block_size:  # most decodes: nothing to publish
                    request.num_computed_tokens = start + 1
                    sequences.append(ScheduledSequence(request, start, 1))
                else:
                    self._schedule_chunk(batch, request, 1)
        budget = self.max_batch_tokens - len(batch.sequences)
        for request in prefilling:
            if budget and request.lease is not None:
                budget -= self._schedule_chunk(batch, request, budget)
        if self.num_preemptions == preemptions:  # else admitting would only take back what the preemption just freed
            self._admit(batch, budget)
        batch.put_in_tree_order(self.cache)
        batch.copies = self.cache.take_copies()
        return batch

    def _admit(self, batch: Batch, budget: int) -> None:
        while self._waiting and budget and len(self.running) < self.max_num_seqs:
            request = min(self._resuming, key=_arrival_time) if self._resuming else self._queue.head(self.cache)
            lease = self.cache.acquire(
                request.tokens,
                namespace=request.namespace,
                # Every running sequence may need a block soon; without this the newcomer would be preempted at once.
                headroom=len(self.running),
                retention=request.retention,
                resumed=request.num_preemptions > 0,
            )
            if lease is None:
                return  # nobody overtakes the one whose turn it is, or a large request would wait for ever
            self._leave_waiting(request)
            self.running.append(request)
            request.lease = lease
            start = request.first_to_compute(lease.num_cached_tokens)
            request.num_computed_tokens = request.num_counted_tokens = start
            if not request.num_preemptions:
                request.num_cached_tokens = min(start, request.num_prompt_tokens)
                request.missed = lease.missed
                request.admission_time = time.monotonic()
                if request.missed is not None and start < lease.num_cached_tokens:
                    request.missed = {"logprobs": lease.num_cached_tokens - start} | request.missed
            budget -= self._schedule_chunk(batch, request, budget)

    def _leave_waiting(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if request.num_preemptions:
            self._resuming.remove(request)
        else:
            self._queue.remove(request)

    def _schedule_chunk(self, batch: Batch, request: Request, budget: int) -> int:
        assert request.lease is not None
        start, size = request.num_computed_tokens, self.cache.block_size
        chunk = min(budget, request.num_tokens - start)
        end = request.num_computed_tokens = start + chunk
        batch.sequences.append(ScheduledSequence(request, start, chunk))
        batch.scores_prompts |= request.prompt_logprobs is not None
        self._count(request)
        self.cache.publish(request.lease, request.tokens, end, written=False)
        if end // size > start // size:
            self._queue.cached(request.tokens[: end // size * size], request.namespace, start // size * size)
        return chunk

    def _make_room(self, request: Request) -> bool:
        """Get the blocks for all tokens that are known, preempting the youngest while there are none.

        False if ``request`` itself was the youngest.  The oldest always gets on, so every request ends.
        """
        assert request.lease is not None
        size = self.cache.block_size
        missing = -(-request.num_tokens // size) * size - request.lease.num_tokens  # all of the last block: no call for the rest
        while not self.cache.extend(request.lease, missing):
            youngest = self.running.pop()
            self._release(youngest)
            youngest.num_preemptions += 1
            self.num_preemptions += 1
            self._waiting[youngest.request_id] = youngest
            self._resuming.append(youngest)
            if youngest is request:
                return False
        return True

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        self._count(request)
        self.cache.release(request.lease)
        request.lease = None
        request.num_computed_tokens = 0

    def _count(self, request: Request) -> None:
        self._queue.computed(request.namespace, request.num_computed_tokens - request.num_counted_tokens)
        request.num_counted_tokens = request.num_computed_tokens


def _arrival_time(request: Request) -> float:
    return request.arrival_time
