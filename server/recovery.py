"""Recovery: the open requests, whichever worker runs them, and how they outlive its death.

A worker that dies takes nothing along that is not known here: a request and the tokens that it has been given.  Another worker, one
that lives or else the next one, gets both, and goes on behind them.

A request may be what kills the workers.  Whoever was running may have done it once.  From the second time on, those that were
running are suspects, and the next worker that starts gets a part of them at a time and nobody else (group testing; Dorfman 1943),
until each has been given some tokens more.  If it dies meanwhile, the part is suspect, the others are not.  So a culprit is alone
in the end, and a request is refused only where workers died twice in a row while it ran alone.  Workers that live get no suspects.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

import msgspec

from radixkv.scheduling.request import RequestOutput
from radixkv.server.errors import ServerError, Unavailable
from radixkv.server.messages import Generate, frames
from radixkv.server.metrics import Metrics
from radixkv.server.routing import Route, Router
from radixkv.server.worker_client import Sink, WorkerClient

log = logging.getLogger("radixkv.server")

SUSPECT_AFTER = 2
"""Deaths of workers that were running a request until it is a suspect."""
REFUSE_AFTER = 3
"""Deaths until it may be refused."""
PARTS = 8
"""In how many parts suspects are tried: more find a culprit in fewer deaths, fewer hold up the innocent for less."""
LIVED_DOWN = 64
"""Tokens behind a death that make it forgotten."""


class Recovery:
    """Sends requests to the workers there are, or to the next one.  All methods belong to one event loop."""

    def __init__(self, metrics: Metrics, router: Router[WorkerClient] | None = None) -> None:
        """``router`` chooses where there may be several workers."""
        self._metrics = metrics
        self._router = router
        self._workers: list[WorkerClient] = []
        self._progressed: set[WorkerClient] = set()
        """Workers that have given anybody a token."""
        self._open: dict[str, _Sequence] = {}
        self._suspects: deque[list[_Sequence]] = deque()
        """Suspects that wait: those of each death by themselves, for one of them is the culprit, or none."""
        self._parts: deque[list[_Sequence]] = deque()
        """Parts of those that are tried now, and wait for their trial."""
        self._on_trial: set[_Sequence] = set()
        self._trial_worker: WorkerClient | None = None
        """Runs suspects, and nothing else once it is through with what it had before."""

    @property
    def trying(self) -> bool:
        """Whether suspects are being tried, while all others wait."""
        return bool(self._workers) and not self._takers()

    def generate(self, request: Generate, sink: Sink) -> None:
        """Have a request run; ``sink`` hears of it until it finishes, fails or is aborted.

        Raises ``InvalidRequest`` where MessagePack can't carry it.
        """
        sequence = _Sequence(request, sink)
        if workers := self._takers():
            self._send(sequence, workers)
        else:
            frames(request)  # so that it does not raise when it is sent
        self._open[request.request_id] = sequence

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; their sinks hear nothing more."""
        self._withdraw([sequence for id in request_ids if (sequence := self._open.pop(id, None))])

    def attach(self, worker: WorkerClient) -> None:
        """Go on on a new worker with all requests that have none."""
        self._workers.append(worker)
        if self._router is not None:
            self._router.attach(worker)
        if self._trial_worker is None and self._suspects:
            self._trial_worker = worker
        self._go_on()

    def worker_died(self, worker: WorkerClient, how: str) -> bool:
        """Charge the death to the requests that the worker was running, refuse what has killed workers time and again, and go on.

        True if the worker had given anybody a token.
        """
        self._workers.remove(worker)
        charged = [sequence for sequence in self._open.values() if sequence.worker is worker]
        for sequence in charged:
            sequence.died(alone=len(charged) == 1)
        suspects = [sequence for sequence in charged if sequence.suspect]
        if worker is self._trial_worker:  # nobody else ran, so nobody else did it
            for sequence in chain.from_iterable(self._parts):
                sequence.suspect = False
            self._end_trials()
            self._suspects.appendleft(suspects)
        elif suspects:
            self._suspects.append(suspects)
        if self._router is not None:
            self._router.detach(worker)
        refused = [sequence for sequence in charged if sequence.deaths >= REFUSE_AFTER and sequence.deaths_alone >= 2]
        self._metrics.requests_resubmitted.inc(len(charged) - len(refused))
        for sequence in refused:
            message = f"the engine process died {sequence.deaths} times while it ran this request, at last with no other: it {how}"
            log.error("request %s is refused: %s", sequence.request.request_id, message)
            del self._open[sequence.request.request_id]
            sequence.sink(ServerError(message))
        if not self._workers:
            self._metrics.engine_lost(len(self._open))
        self._go_on()
        progressed = worker in self._progressed
        self._progressed.discard(worker)
        return progressed

    def no_worker_soon(self) -> None:
        """A worker did not start, so suspects must not wait for it: one that lives takes them when it has ended what it runs."""
        if self._trial_worker is None and self._workers and self._suspects:
            running = Counter(sequence.worker for sequence in self._open.values())
            self._trial_worker = min(self._workers, key=lambda worker: running[worker])
            self._go_on()

    def fail(self, error: Unavailable) -> None:
        """Have all open requests fail, and those after them wait."""
        self._workers = []
        self._end_trials()
        self._suspects.clear()
        sequences, self._open = list(self._open.values()), {}
        for sequence in sequences:
            sequence.sink(error)

    def _takers(self) -> list[WorkerClient]:
        """Workers that take requests which are no suspects."""
        return [worker for worker in self._workers if worker is not self._trial_worker]

    def _go_on(self) -> None:
        """Try the next part of the suspects, if it is time, and send all others that have no worker."""
        self._next_trial()
        if workers := self._takers():
            for sequence in list(self._open.values()):
                if sequence.worker is None and not sequence.suspect:
                    self._send(sequence, workers)

    def _next_trial(self) -> None:
        worker = self._trial_worker
        if worker is None or any(sequence.worker is worker for sequence in self._open.values()):
            return
        while not self._on_trial:
            if self._parts:
                self._on_trial = set(self._still_open(self._parts.popleft()))
            elif self._suspects:
                if suspects := self._still_open(self._suspects.popleft()):
                    size = -(-len(suspects) // PARTS)
                    self._parts.extend(suspects[i : i + size] for i in range(0, len(suspects), size))
                    log.warning("one of %d requests may have killed the engine process: trying %d at a time", len(suspects), size)
            else:
                self._end_trials()
                return
        for sequence in self._on_trial:
            self._send(sequence, [worker])

    def _still_open(self, sequences: Sequence[_Sequence]) -> list[_Sequence]:
        return [sequence for sequence in sequences if sequence.request.request_id in self._open]

    def _end_trials(self) -> None:
        self._trial_worker = None
        self._parts.clear()
        self._on_trial.clear()

    def _send(self, sequence: _Sequence, workers: Sequence[WorkerClient]) -> None:
        request = sequence.submission()
        route = None
        if self._router is not None:
            tokens = request.token_ids + request.output_token_ids if request.output_token_ids else request.token_ids
            output = request.params.max_tokens - len(request.output_token_ids)
            route = self._router.route(tokens, request.namespace, output, workers)
        worker = workers[0] if route is None else route.worker
        try:
            worker.generate(request, lambda output: self._take(sequence, output))
        except BaseException:
            if route is not None:
                route.end()
            raise
        sequence.sent(worker, route)

    def _withdraw(self, sequences: Sequence[_Sequence]) -> None:
        """Have the workers forget sequences."""
        by_worker: dict[WorkerClient, list[str]] = {}
        for sequence in sequences:
            if sequence.worker is not None:
                by_worker.setdefault(sequence.worker, []).append(sequence.worker_id)
            sequence.left()
        for worker, worker_ids in by_worker.items():
            worker.abort(worker_ids)
        if self._trial_worker in by_worker:
            self._left_trial(sequences)

    def _left_trial(self, sequences: Sequence[_Sequence]) -> None:
        """The worker that tries suspects runs these sequences no more."""
        self._on_trial.difference_update(sequences)
        self._go_on()

    def _take(self, sequence: _Sequence, output: RequestOutput | ServerError) -> None:
        worker = sequence.worker
        assert worker is not None
        is_over = isinstance(output, ServerError) or output.finish_reason is not None
        if is_over:
            sequence.left()
            del self._open[sequence.request.request_id]
        if not isinstance(output, ServerError) and output.token_ids:
            self._progressed.add(worker)
            sequence.grew(output.token_ids)
        sequence.sink(output)
        if worker is not self._trial_worker:
            return
        if is_over:
            self._left_trial([sequence])
        elif sequence in self._on_trial and not sequence.suspect:  # it goes on elsewhere or later: it must make room for the trials
            self._withdraw([sequence])


class _Sequence:
    """One request as any worker needs it, and what speaks against it."""

    def __init__(self, request: Generate, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.worker: WorkerClient | None = None
        """Who runs it."""
        self.worker_id = ""
        """As which."""
        self._route: Route[WorkerClient] | None = None
        self.deaths = 0
        self.deaths_alone = 0
        """Deaths in a row of workers that ran nothing else."""
        self.suspect = False
        self._tokens: list[int] = []
        self._new_tokens = 0
        """Of them, those since the last death."""
        self._attempts = 0

    def submission(self) -> Generate:
        """The request with what it has been given, under a new id: tokens of the last attempt may still be on their way."""
        self._attempts += 1
        self.worker_id = f"{self.request.request_id}-{self._attempts}"
        return msgspec.structs.replace(self.request, request_id=self.worker_id, output_token_ids=self._tokens)

    def sent(self, worker: WorkerClient, route: Route[WorkerClient] | None) -> None:
        self.worker = worker
        self._route = route

    def left(self) -> None:
        """No worker runs it any more."""
        self.worker = None
        if self._route is not None:
            self._route.end()
            self._route = None

    def died(self, *, alone: bool) -> None:
        """The worker that ran it is dead."""
        self.left()
        self._new_tokens = 0
        self.deaths += 1
        self.deaths_alone = self.deaths_alone + 1 if alone else 0
        self.suspect = self.deaths >= SUSPECT_AFTER

    def grew(self, token_ids: Sequence[int]) -> None:
        """A worker gave it tokens: the more deaths speak against it, the more of them it takes to be no suspect."""
        if self._route is not None:
            self._route.began()
        self._tokens += token_ids
        self._new_tokens += len(token_ids)
        if self._new_tokens >= min(4 ** max(0, self.deaths - SUSPECT_AFTER), LIVED_DOWN):
            self.suspect = False
            self.deaths_alone = 0
        if self._new_tokens >= LIVED_DOWN:
            self.deaths = 0
