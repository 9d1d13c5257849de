"""A request's choices as they grow: the tokens that workers send, turned into text."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from operator import attrgetter

from radixkv.detokenizer import Detokenizer, StopMatcher, TokenBytes
from radixkv.scheduling.request import FinishReason, RequestOutput
from radixkv.server.activity import Activity, RecentRequest
from radixkv.server.errors import ServerError, TimedOut
from radixkv.server.messages import Delta, Generate, Usage
from radixkv.server.metrics import Metrics
from radixkv.server.recovery import Recovery
from radixkv.server.waiting_room import Seats

log = logging.getLogger("radixkv.server")


class Generation:
    """The choices of one request as they grow.

    Iterate it for :class:`Delta`; the iteration ends when every choice has finished, and raises what made the request fail.
    Leave its ``with`` block, or call :meth:`close`, and what still runs is aborted.
    """

    def __init__(
        self,
        recovery: Recovery,
        requests: Sequence[Generate],
        choices_per_prompt: int,
        stop: Sequence[str],
        token_bytes: TokenBytes,
        metrics: Metrics,
        arrival: float,
        on_close: Callable[[Generation], None],
        *,
        activity: Activity,
        seats: Seats,
        timeout: float | None,
        on_end: Callable[[Choice, float, FinishReason | None, str | None], None] | None,
    ) -> None:
        """``on_end`` is called once for each choice, with the request's arrival, why it finished, or what it failed of."""
        self._on_end = on_end
        self._recovery = recovery
        self._on_close = on_close
        self._seats = seats
        self._timer = None
        if timeout is not None:
            left = max(0.0, arrival + timeout - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(left, self._time_out, timeout)
        self._metrics = metrics
        self._activity = activity
        self._arrival = arrival
        self.first_token_seconds: float | None = None
        """From the request's arrival to the first token of any choice."""
        self.failure: str | None = None
        """Kind of error that it failed with, ``aborted`` if its client left it, None if neither."""
        self._per_prompt = choices_per_prompt
        self._queue: asyncio.Queue[Delta | ServerError | None] = asyncio.Queue()
        self._choices = [Choice(i, request, stop, token_bytes) for i, request in enumerate(requests)]
        self._open = {choice.request_id: choice for choice in self._choices}
        try:
            for choice, request in zip(self._choices, requests, strict=True):
                recovery.generate(request, lambda output, choice=choice: self._take(choice, output))  # type: ignore[misc]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, ServerError):
                raise item
            yield item

    def close(self) -> None:
        """Abort the choices that still run.  Their blocks are back before the worker's next step."""
        if self._open:
            self.failure = "aborted"
            self._recovery.abort(list(self._open))
            self._metrics.request_success["abort"].inc(len(self._open))
            self._end_open("abort", "aborted")
        self._release()
        self._on_close(self)

    @property
    def usage(self) -> Usage:
        """Of what has been generated so far; final once the iteration has ended."""
        prompts = [self._choices[i : i + self._per_prompt] for i in range(0, len(self._choices), self._per_prompt)]
        first = [min(choices, key=attrgetter("num_cached_tokens")) for choices in prompts]
        missed: Counter[str] = Counter()
        for choice in first:
            missed.update(choice.missed)
        return Usage(
            prompt_tokens=sum(choice.num_prompt_tokens for choice in first),
            cached_tokens=sum(choice.num_cached_tokens for choice in first),
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            missed=dict(missed),
        )

    def _take(self, choice: Choice, output: RequestOutput | ServerError) -> None:
        """Take what the worker says of a choice.  A bug here must end this request only: who calls reads for all others as well."""
        try:
            self._grow(choice, output)
        except Exception:
            log.exception("request %s failed in the server itself", choice.request_id)
            self._fail(ServerError("the server failed on this request; its log says how"))

    def _grow(self, choice: Choice, output: RequestOutput | ServerError) -> None:
        """Turn an output of the worker into a delta.  Runs as outputs arrive, so that a stop string ends a request at once,
        however slowly its deltas are read."""
        if choice.request_id not in self._open:
            return
        if not isinstance(output, ServerError) and output.finish_reason in ("abort", "error"):
            output = ServerError(output.error or "the engine gave up on the request")
        if isinstance(output, ServerError):
            self._fail(output)
            return
        now = time.monotonic()
        self._observe(choice, output, now)
        delta = choice.feed(output, now)
        self._queue.put_nowait(delta)
        if delta.finish_reason is None:
            return
        if output.finish_reason is None:  # a stop string: the worker doesn't know yet
            self._recovery.abort([choice.request_id])
        del self._open[choice.request_id]
        choice.finished(self._metrics, delta.finish_reason, now - self._arrival)
        if self._on_end is not None:
            self._on_end(choice, self._arrival, delta.finish_reason, None)
        if not self._open:
            for first in range(0, len(self._choices), self._per_prompt):
                longest = max(choice.num_tokens for choice in self._choices[first : first + self._per_prompt])
                self._metrics.prompt_finished(self._per_prompt, longest)
            self._release()
            self._queue.put_nowait(None)

    def _fail(self, error: ServerError) -> None:
        self.failure = error.kind
        self._metrics.failed(error.kind, len(self._open))
        self._recovery.abort(list(self._open))
        self._end_open("error", error.kind)
        self._release()
        self._queue.put_nowait(error)

    def _end_open(self, reason: FinishReason, error: str) -> None:
        """None of the open choices will finish."""
        open_choices, self._open = self._open, {}
        for choice in open_choices.values():
            if choice.recent is not None:
                choice.recent.finish_reason = reason
            if self._on_end is not None:
                self._on_end(choice, self._arrival, None, error)

    def _time_out(self, timeout: float) -> None:
        self._fail(TimedOut(f"the request was not done within {timeout:g} s, which is all that this server gives one"))

    def _release(self) -> None:
        """What is held while a choice is open, beside the worker's blocks: seats and a timer."""
        self._seats.close()
        if self._timer is not None:
            self._timer.cancel()

    def _observe(self, choice: Choice, output: RequestOutput, now: float) -> None:
        count = len(output.token_ids)
        self._metrics.generation_tokens.inc(count)
        self._activity.generated(count)
        if choice.last_token_time is None:
            self._seats.leave()
            seconds = now - self._arrival
            self._metrics.began(choice.namespace, output.num_prompt_tokens, output.num_cached_tokens, output.missed, seconds)
            choice.recent = self._activity.began(
                choice.request_id, choice.namespace, choice.prompt, output.num_cached_tokens, output.missed or {}, output.parting,
                seconds,
            )  # fmt: skip
            if self.first_token_seconds is None:
                self.first_token_seconds = seconds
        else:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - choice.last_token_time) / count)


class Choice:
    """One sequence: its worker's request, and the text it has become."""

    def __init__(self, index: int, request: Generate, stop: Sequence[str], token_bytes: TokenBytes) -> None:
        self.index = index
        self.request_id = request.request_id
        self.namespace = request.namespace
        self.num_prompt_tokens = len(request.token_ids)
        self.prompt = request.token_ids
        self.recent: RecentRequest | None = None
        """From its first token on."""
        self.num_cached_tokens = 0
        self.missed: dict[str, int] = {}
        self.num_tokens = 0
        self.last_token_time: float | None = None
        self._max_tokens = request.params.max_tokens
        self.first_token_time = 0.0
        self.queued_seconds = self._prefill_seconds = 0.0
        self._num_preemptions = 0
        self._detokenizer = Detokenizer(token_bytes)
        self._stop = StopMatcher(stop)

    @property
    def began(self) -> bool:
        """It has been given tokens."""
        return self.last_token_time is not None

    def feed(self, output: RequestOutput, now: float) -> Delta:
        if self.last_token_time is None:  # a worker that goes on with it finds less, or what only the request itself has left there
            self.num_cached_tokens = output.num_cached_tokens
            self.missed = output.missed or self.missed
            self.first_token_time = now
            self.queued_seconds, self._prefill_seconds = output.queued_seconds, output.prefill_seconds
        self._num_preemptions = output.num_preemptions
        self.last_token_time = now
        self.num_tokens += len(output.token_ids)
        if self.recent is not None:
            self.recent.output_tokens = self.num_tokens
        final = output.finish_reason is not None
        text = self._stop.feed(self._detokenizer.feed(output.token_ids, final=final), final=final)
        return Delta(
            index=self.index,
            text=text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason="stop" if self._stop.matched is not None else output.finish_reason,
            prompt_token_ids=None if output.prompt_logprobs is None else self.prompt,
            prompt_logprobs=output.prompt_logprobs,
        )

    def finished(self, metrics: Metrics, reason: FinishReason, seconds: float) -> None:
        """It ends for ``reason``, so many seconds after its arrival."""
        assert self.last_token_time is not None
        if self.recent is not None:
            self.recent.finish_reason = reason
        metrics.finished(
            reason,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            tokens=self.num_tokens,
            max_tokens=self._max_tokens,
            preemptions=self._num_preemptions,
            queued=self.queued_seconds,
            prefill=self._prefill_seconds,
            decode=self.last_token_time - self.first_token_time,
            total=seconds,
        )
