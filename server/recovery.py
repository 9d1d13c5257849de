"""Recovery: the open requests, whichever worker runs them, and how they outlive its death.

A worker that dies takes nothing along that is not known here: a request and the tokens that it has been given.  The next worker
gets both, and goes on behind them.

A request may be what kills the workers.  Whoever was running may have done it once.  From the second time on, those that were
running are suspects, and the next worker gets a part of them at a time and nobody else (group testing; Dorfman 1943), until each
has been given some tokens more.  If it dies meanwhile, the part is suspect, the others are not.  So a culprit is alone in the end,
and a request is refused only where workers died twice in a row while it ran alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import msgspec

from radixkv.scheduling.request import RequestOutput
from radixkv.server.errors import ServerError, Unavailable
from radixkv.server.messages import Generate, frames
from radixkv.server.metrics import Metrics
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
    """Sends requests to the worker there is, or to the next one.  All methods belong to one event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._worker: WorkerClient | None = None
        self._open: dict[str, _Sequence] = {}
        self._parts: deque[list[_Sequence]] = deque()
        """Suspects that wait for their trial."""
        self._on_trial: set[_Sequence] = set()
        self.progressed = False
        """Whether the last worker attached has given anybody a token."""

    @property
    def trying(self) -> bool:
        """Whether suspects are being tried, while all others wait."""
        return bool(self._on_trial)

    def generate(self, request: Generate, sink: Sink) -> None:
        """Have a request run; ``sink`` hears of it until it finishes, fails or is aborted.

        Raises ``InvalidRequest`` where MessagePack can't carry it.
        """
        sequence = _Sequence(request, sink)
        if self._worker is not None and not self.trying:
            self._send(sequence)
        else:
            frames(request)  # so that it does not raise when it is sent
        self._open[request.request_id] = sequence

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; their sinks hear nothing more."""
        self._withdraw([sequence for id in request_ids if (sequence := self._open.pop(id, None))])

    def attach(self, worker: WorkerClient) -> None:
        """Go on with all open requests on a new worker."""
        self._worker = worker
        self.progressed = False
        suspects = [sequence for sequence in self._open.values() if sequence.suspect]
        self._parts = deque()
        if suspects:
            size = -(-len(suspects) // PARTS)
            self._parts.extend(suspects[i : i + size] for i in range(0, len(suspects), size))
            log.warning("one of %d requests may have killed the engine process: trying %d at a time", len(suspects), size)
        self._next_trial()

    def worker_died(self, how: str) -> None:
        """Charge the death to the requests that the worker was running, and refuse what has killed it time and again."""
        self._worker = None
        charged = [sequence for sequence in self._open.values() if sequence.worker_id]
        if self.trying:  # nobody else ran, so nobody else did it
            for sequence in self._open.values():
                sequence.suspect = False
        self._on_trial.clear()
        for sequence in charged:
            sequence.died(alone=len(charged) == 1)
        refused = [sequence for sequence in charged if sequence.deaths >= REFUSE_AFTER and sequence.deaths_alone >= 2]
        self._metrics.requests_resubmitted.inc(len(charged) - len(refused))
        for sequence in refused:
            message = f"the engine process died {sequence.deaths} times while it ran this request, at last with no other: it {how}"
            log.error("request %s is refused: %s", sequence.request.request_id, message)
            del self._open[sequence.request.request_id]
            sequence.sink(ServerError(message))
        self._metrics.engine_lost(len(self._open))

    def fail(self, error: Unavailable) -> None:
        """Have all open requests fail."""
        self._worker = None
        self._on_trial.clear()
        sequences, self._open = list(self._open.values()), {}
        for sequence in sequences:
            sequence.sink(error)

    def _next_trial(self) -> None:
        """Send the next part of the suspects, or everybody if all were tried."""
        while self._parts and not self._on_trial:
            self._on_trial = {sequence for sequence in self._parts.popleft() if sequence.request.request_id in self._open}
        for sequence in list(self._on_trial or self._open.values()):
            if not sequence.worker_id:
                self._send(sequence)

    def _send(self, sequence: _Sequence) -> None:
        assert self._worker is not None
        self._worker.generate(sequence.submission(), lambda output: self._take(sequence, output))

    def _withdraw(self, sequences: Sequence[_Sequence]) -> None:
        """Have the worker forget sequences."""
        worker_ids = [sequence.worker_id for sequence in sequences if sequence.worker_id]
        for sequence in sequences:
            sequence.worker_id = ""
        if worker_ids and self._worker is not None:
            self._worker.abort(worker_ids)
        self._tried(sequences)

    def _tried(self, sequences: Sequence[_Sequence]) -> None:
        if self._on_trial:
            self._on_trial.difference_update(sequences)
            if not self._on_trial:
                self._next_trial()

    def _take(self, sequence: _Sequence, output: RequestOutput | ServerError) -> None:
        if isinstance(output, ServerError) or output.finish_reason is not None:
            sequence.worker_id = ""
            del self._open[sequence.request.request_id]
        if not isinstance(output, ServerError) and output.token_ids:
            self.progressed = True
            sequence.grew(output.token_ids)
        sequence.sink(output)
        if sequence not in self._on_trial:
            return
        if not sequence.worker_id:
            self._tried([sequence])
        elif not sequence.suspect:  # it goes on with the others, for whose trials it must make room
            self._withdraw([sequence])


class _Sequence:
    """One request as any worker needs it, and what speaks against it."""

    def __init__(self, request: Generate, sink: Sink) -> None:
        self.request = request
        self.sink = sink
        self.worker_id = ""
        """As which the worker there is runs it; empty while none does."""
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

    def died(self, *, alone: bool) -> None:
        """The worker that ran it is dead."""
        self.worker_id = ""
        self._new_tokens = 0
        self.deaths += 1
        self.deaths_alone = self.deaths_alone + 1 if alone else 0
        self.suspect = self.deaths >= SUSPECT_AFTER

    def grew(self, token_ids: Sequence[int]) -> None:
        """A worker gave it tokens: the more deaths speak against it, the more of them it takes to be no suspect."""
        self._tokens += token_ids
        self._new_tokens += len(token_ids)
        if self._new_tokens >= min(4 ** max(0, self.deaths - SUSPECT_AFTER), LIVED_DOWN):
            self.suspect = False
            self.deaths_alone = 0
        if self._new_tokens >= LIVED_DOWN:
            self.deaths = 0
