"""The frontend: text in, text out, over an engine that knows only token ids.  It knows no transport; the doors are built on it.

``submit`` checks, renders, tokenises and sends; the :class:`Generation` it returns yields the text as it grows.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from operator import attrgetter
from typing import Any

import jinja2
import msgspec

from radixkv.cache import Snapshot
from radixkv.cache.retention import Retention
from radixkv.detokenizer import Detokenizer, StopMatcher, TokenBytes
from radixkv.grammar import check_grammar
from radixkv.report.logged_request import LoggedRequest
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import FinishReason, RequestOutput
from radixkv.server import logs
from radixkv.server import tools as tool_text
from radixkv.server.activity import Activity, RecentRequest
from radixkv.server.errors import InvalidRequest, ServerError, TimedOut, Unavailable, UnknownModel
from radixkv.server.messages import ChatMessage, Delta, Generate, Usage
from radixkv.server.metrics import Metrics
from radixkv.server.recovery import Recovery
from radixkv.server.request_log import RequestLog
from radixkv.server.routing import Router
from radixkv.server.tools import ToolUse
from radixkv.server.waiting_room import Seats, WaitingRoom
from radixkv.server.worker_client import CALL_TIMEOUT, WorkerClient
from radixkv.server.worker_stats import merged
from radixkv.structured_outputs import StructuredOutputs

log = logging.getLogger("radixkv.server")

Prompt = str | Sequence[int]

MAX_N = 128
MAX_CHOICES = 1024
MAX_STOP_LENGTH = 1000
MAX_NAMESPACE_LENGTH = 256
MAX_MESSAGES = 4096
MAX_PROMPT_LOGPROBS = 2**19
"""Log-probabilities of prompts in one answer, alternatives and choices included.  They come at once, not as fast as a model writes:
so many are a tenth of a GB, and hold up the event loop for a second."""
DEFAULT_MAX_WAITING = 2048
INLINE_CHARACTERS = 1024
"""Texts up to this long are tokenised on the event loop, which that holds up for about a millisecond; longer ones in a thread."""


class Frontend:
    """Serves one model through whichever workers are attached.  All methods belong to one event loop."""

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        vocab_size: int,
        *,
        max_waiting: int = DEFAULT_MAX_WAITING,
        request_timeout: float | None = None,
        router: Router[WorkerClient] | None = None,
        show_prompts: bool = False,
        request_log: RequestLog | None = None,
    ) -> None:
        """``max_waiting`` is :class:`WaitingRoom`'s limit, ``request_timeout`` the most seconds that a request may take.

        ``router`` is needed where there may be several workers.  ``show_prompts`` has the live page show prompts to administrators.
        ``request_log`` gets a line for each sequence that ends.
        """
        self.model = model
        self.started = int(time.time())
        self.metrics = Metrics(model)
        self.activity = Activity()
        self.show_prompts = show_prompts
        self.token_bytes = TokenBytes(tokenizer.backend_tokenizer)
        self.tokenizer = tokenizer
        # The Rust tokenizer itself: unlike the wrapper's, its `encode` changes no state, so threads may share it.
        self._tokenizer = tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._longest_token = max((len(piece) for piece in self._tokenizer.get_vocab()), default=1)
        self._vocab_size = vocab_size
        self._workers: dict[int, WorkerClient] = {}
        self._router = router
        self._unavailable = Unavailable("the engine is not ready yet")
        self._recovery = Recovery(self.metrics, router)
        self._refusal: Unavailable | None = None
        self._generations: set[Generation] = set()
        self._closed = asyncio.Event()
        self.max_model_len = 0
        self._waiting_room = WaitingRoom(max_waiting)
        self._request_timeout = request_timeout
        self._request_log = request_log
        self._engines: dict[int, dict[str, Any]] = {}
        """What each worker said of itself when it was attached last."""

    # --- the workers' comings and goings ---

    def attach(self, worker: WorkerClient, stats: dict[str, Any]) -> None:
        """Go on on this worker with all open requests that have none."""
        self._workers[worker.index] = worker
        self.max_model_len = stats["max_model_len"]
        self.metrics.engine_started(worker.index, stats)
        self._engines[worker.index] = stats
        if self._router is not None and self._router.hashes is not None:
            worker.watch_cache(self._router.hashes.key, functools.partial(self._router.cache_changed, worker))
        self._recovery.attach(worker)

    def worker_died(self, worker: WorkerClient, how: str) -> bool:
        """Its requests go on on another worker, or wait for the next one where there is none, but for those that killed this one.

        True if the worker had given tokens to anybody.
        """
        del self._workers[worker.index]
        self._unavailable = Unavailable(f"the engine process {how}; another is being started")
        progressed = self._recovery.worker_died(worker, how)
        worker.close(self._unavailable)
        return progressed

    def no_worker_soon(self) -> None:
        """A worker that was to replace another did not start."""
        self._recovery.no_worker_soon()

    @property
    def has_worker(self) -> bool:
        return bool(self._workers)

    async def drain(self, error: Unavailable) -> None:
        """Have every later request fail, and wait until the open ones are over and their doors have passed on what there was."""
        self._refusal = error
        while self._generations:
            self._closed.clear()
            await self._closed.wait()

    def detach(self, error: Unavailable) -> None:
        """Have every open request fail, and every later one."""
        workers, self._workers, self._unavailable = self._workers, {}, error
        self._refusal = error
        self._recovery.fail(error)
        for worker in workers.values():
            worker.close(error)

    @property
    def workers(self) -> list[WorkerClient]:
        """Those that are ready, by index.  Raises ``Unavailable`` that says why, if there is none."""
        if not self._workers:
            raise Unavailable(self._unavailable.message)
        return [worker for _, worker in sorted(self._workers.items())]

    @property
    def status(self) -> str:
        """``"ok"``, ``"restarting"`` (requests wait for the next worker), or ``"draining"`` (new ones are refused)."""
        if self._refusal is not None:
            return "draining"
        return "ok" if self._workers else "restarting"

    def check_ready(self) -> None:
        """Raise ``Unavailable`` that says why, unless a request sent now would be worked on now."""
        if self._refusal is not None:
            raise Unavailable(self._refusal.message)
        self.workers  # noqa: B018  raises
        if self._recovery.trying:
            raise Unavailable("the engine process died twice: the requests that were running are being tried in parts")

    # --- requests ---

    async def submit(
        self,
        prompts: Sequence[Prompt] | None,
        params: SamplingParams,
        *,
        messages: Sequence[ChatMessage] | None = None,
        n: int = 1,
        namespace: str = "",
        model: str | None = None,
        clip_max_tokens: bool = False,
        tools: ToolUse | None = None,
        retention: Retention | None = None,
    ) -> Generation:
        """Check a request and send it.

        ``prompts`` is one or more texts or token id lists, each of which gets ``n`` choices, numbered prompt by prompt; or it is
        None, and ``messages`` is a chat to answer.  ``clip_max_tokens`` takes ``params.max_tokens`` for a wish, cut to what the
        context has room for.  Choice ``i`` of a prompt draws with ``params.seed + i``.

        Raises ``InvalidRequest`` naming field and limit, ``UnknownModel``, ``Overloaded``, or ``Unavailable`` once the server is
        shutting down.  While the worker is being replaced, the request waits for the next one.
        """
        arrival = time.monotonic()
        self._check_accepting()
        self.check_model(model)
        params = self._checked(params)
        if params.structured_outputs is not None:
            await asyncio.to_thread(_check_form, params.structured_outputs)
        if retention is not None:
            _check_retention(retention)
        _check(1 <= n <= MAX_N, "n", f"between 1 and {MAX_N}", n)
        _check(len(namespace) <= MAX_NAMESPACE_LENGTH, "namespace", f"at most {MAX_NAMESPACE_LENGTH} characters", len(namespace))
        if (prompts is None) == (messages is None):
            raise InvalidRequest("prompt or messages must be given, and not both", param="prompt")
        field = "messages" if prompts is None else "prompt"
        _check(bool(prompts or messages), field, "at least one", 0)
        num_prompts = 1 if prompts is None else len(prompts)
        _check(num_prompts * n <= MAX_CHOICES, "prompt", f"at most {MAX_CHOICES // n} prompts with n={n}", num_prompts)
        with self.metrics.counting_rejections():
            self._waiting_room.check(namespace, num_prompts * n)  # refused before it costs anything
        if prompts is None:
            token_lists = [await self.render_chat(messages or (), tools)]
        else:
            token_lists = [await self.tokenise(prompt) for prompt in prompts]
        if params.prompt_logprobs is not None:
            scored = n * (1 + params.prompt_logprobs) * sum(map(len, token_lists))
            limit = f"at most {MAX_PROMPT_LOGPROBS} for all prompts, choices and alternatives together"
            _check(scored <= MAX_PROMPT_LOGPROBS, "prompt_logprobs", limit, scored)
        requests = []
        for tokens in token_lists:
            request_params = self._fitted(params, field, len(tokens), clip=clip_max_tokens)
            for i in range(n):
                seeded = params.seed if params.seed is None else _wrapped(params.seed + i)
                requests.append(
                    Generate(
                        request_id=f"{logs.request_id.get()}.{uuid.uuid4().hex}".removeprefix("."),
                        token_ids=tokens,
                        params=msgspec.structs.replace(request_params, stop=(), seed=seeded),
                        namespace=namespace,
                        retention=retention,
                    )
                )
        self._check_accepting()  # that may have changed while it was tokenised
        with self.metrics.counting_rejections():
            seats = self._waiting_room.enter(namespace, num_prompts * n)
        generation = Generation(
            self._recovery, requests, n, params.stop, self.token_bytes, self.metrics, arrival, self._forget,
            activity=self.activity, seats=seats, timeout=self._request_timeout,
            on_end=None if self._request_log is None else self._log_end,
        )  # fmt: skip
        self._generations.add(generation)
        return generation

    def _forget(self, generation: Generation) -> None:
        self._generations.discard(generation)
        self._closed.set()

    def _log_end(self, choice: _Choice, arrival: float, finish_reason: FinishReason | None, error: str | None) -> None:
        """Have the request log say how a sequence ended."""
        assert self._request_log is not None
        seconds = time.monotonic() - arrival
        engine = next(iter(self._engines.values()))
        line = LoggedRequest(
            time=time.time() - seconds,
            request_id=choice.request_id,
            model=self.model,
            namespace=choice.namespace,
            prompt_tokens=choice.num_prompt_tokens,
            cached_tokens=choice.num_cached_tokens if choice.began else None,
            missed=choice.missed,
            output_tokens=choice.num_tokens,
            finish_reason=finish_reason,
            error=error,
            queued_seconds=choice.queued_seconds if choice.began else None,
            ttft_seconds=choice.first_token_time - arrival if choice.began else None,
            seconds=seconds,
            block_size=engine["block_size"],
            cache_blocks=sum(stats["blocks_total"] for stats in self._engines.values()),
            kv_bytes_per_token=engine["kv_bytes_per_token"],
            block_hashes=[],  # the log's own work
        )
        self._request_log.write(line, choice.prompt)

    def _check_accepting(self) -> None:
        if self._refusal is not None:
            raise Unavailable(self._refusal.message)

    async def stats(self) -> dict[str, Any]:
        """``Engine.stats()``, of several workers added up (:func:`merged`)."""
        return merged(await self.worker_stats())

    async def worker_stats(self, timeout: float = CALL_TIMEOUT) -> dict[int, dict[str, Any]]:
        """``Engine.stats()`` of each worker that is ready, by index, and answers in ``timeout`` seconds.

        Raises ``Unavailable`` where none does.
        """
        workers = self.workers
        answers = await asyncio.gather(*(worker.stats(timeout) for worker in workers), return_exceptions=True)
        stats = {worker.index: answer for worker, answer in zip(workers, answers, strict=True) if isinstance(answer, dict)}
        if not stats:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return stats

    async def snapshots(self, max_nodes: int) -> dict[int, Snapshot]:
        """``PrefixCache.snapshot()`` of each worker that is ready, by index.  Raises ``Unavailable`` where one does not answer."""
        workers = self.workers
        answers = await asyncio.gather(*(worker.snapshot(max_nodes) for worker in workers))
        return {worker.index: answer for worker, answer in zip(workers, answers, strict=True)}

    async def reset_cache(self) -> None:
        await asyncio.gather(*(worker.reset_cache() for worker in self.workers))

    def token_text(self, token_id: int) -> str:
        """A token as logprobs name it: its text, or ``bytes:\\xNN...`` where it is only a part of a character."""
        raw = self.token_bytes.raw(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def prompt_text(self, prompt: Prompt) -> str:
        """A prompt as text; ids that are no tokens add nothing."""
        return prompt if isinstance(prompt, str) else Detokenizer(self.token_bytes).feed(prompt, final=True)

    # --- checks ---

    def check_model(self, model: str | None) -> None:
        """Raise ``UnknownModel`` unless this is the model served, or none is named."""
        if model is not None and model != self.model:
            raise UnknownModel(f"model {model!r} is not served here; {self.model!r} is", param="model")

    def _checked(self, params: SamplingParams) -> SamplingParams:
        try:
            params.validate()
        except ValueError as error:
            raise InvalidRequest.of(error) from None
        for stop in params.stop:
            _check(len(stop) <= MAX_STOP_LENGTH, "stop", f"strings of at most {MAX_STOP_LENGTH} characters", f"one of {len(stop)}")
        for field, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            for token_id in ids:
                _check(token_id < self._vocab_size, field, f"token ids below {self._vocab_size}", token_id)
        return msgspec.structs.replace(params, top_k=min(params.top_k, self._vocab_size))

    def _fitted(self, params: SamplingParams, field: str, prompt_length: int, *, clip: bool) -> SamplingParams:
        _check(prompt_length >= 1, field, "at least 1 token", prompt_length)
        room = self.max_model_len - prompt_length
        # The output needs at least one.
        _check(
            room >= 1, field, f"at most {self.max_model_len - 1} tokens (model and cache hold {self.max_model_len})", prompt_length
        )
        if params.max_tokens <= room:
            return params
        if clip:
            return msgspec.structs.replace(params, max_tokens=room)
        raise InvalidRequest(
            f"max_tokens must be at most {room} after a prompt of {prompt_length} tokens "
            f"(model and cache hold {self.max_model_len}), got {params.max_tokens}",
            param="max_tokens",
        )

    # --- text to tokens ---

    async def tokenise(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """Raises ``InvalidRequest`` for ids that are none, and for a text that can't fit."""
        if isinstance(prompt, str):
            return await self._encode(prompt, "prompt", add_special_tokens=add_special_tokens)
        _check(len(prompt) < self.max_model_len, "prompt", f"at most {self.max_model_len - 1} tokens", len(prompt))
        return self.check_tokens(prompt, "prompt")

    def check_tokens(self, token_ids: Sequence[int], field: str) -> list[int]:
        for token_id in token_ids:
            _check(0 <= token_id < self._vocab_size, field, f"made of token ids from 0 to {self._vocab_size - 1}", token_id)
        return list(token_ids)

    async def render_chat(
        self, messages: Sequence[ChatMessage], tools: ToolUse | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise InvalidRequest(f"model {self.model!r} has no chat template: use completions", param="messages")
        _check(bool(messages), "messages", "at least one", 0)
        _check(len(messages) <= MAX_MESSAGES, "messages", f"at most {MAX_MESSAGES}", len(messages))
        self._check_characters(sum(len(message.text) for message in messages), "messages")  # before the template copies them
        messages = [msgspec.structs.replace(m, role="system") if m.role == "developer" else m for m in messages]
        takes_tools = "tools" in template and tool_text.BEGIN in template
        try:
            turns = tool_text.template_turns(messages if takes_tools else tool_text.spelled_out(messages, tools))
            text = self.tokenizer.apply_chat_template(
                turns,
                tools=tools.definitions if tools is not None and takes_tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except RecursionError:
            raise InvalidRequest("tools must be nested less deeply", param="tools") from None
        except (jinja2.TemplateError, TypeError, OverflowError) as error:  # the last where it wants more than the sandbox gives
            raise InvalidRequest(f"messages do not fit the model's chat template: {error}", param="messages") from None
        return await self._encode(text, "messages", add_special_tokens=False)

    async def _encode(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        """Off the event loop where it takes long, and not at all where the text can't fit."""
        self._check_characters(len(text), field)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{field} must be Unicode: character {error.start} is half a surrogate", param=field) from None
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids  # type: ignore[no-any-return]
        encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return encoding.ids  # type: ignore[no-any-return]

    def _check_characters(self, count: int, field: str) -> None:
        _check(
            count <= self.max_model_len * self._longest_token,
            field,
            f"at most {self.max_model_len - 1} tokens, of which none has over {self._longest_token} characters",
            f"{count} characters",
        )


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
        on_end: Callable[[_Choice, float, FinishReason | None, str | None], None] | None,
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
        self._choices = [_Choice(i, request, stop, token_bytes) for i, request in enumerate(requests)]
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

    def _take(self, choice: _Choice, output: RequestOutput | ServerError) -> None:
        """Take what the worker says of a choice.  A bug here must end this request only: who calls reads for all others as well."""
        try:
            self._grow(choice, output)
        except Exception:
            log.exception("request %s failed in the server itself", choice.request_id)
            self._fail(ServerError("the server failed on this request; its log says how"))

    def _grow(self, choice: _Choice, output: RequestOutput | ServerError) -> None:
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

    def _observe(self, choice: _Choice, output: RequestOutput, now: float) -> None:
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


class _Choice:
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


def _check(ok: bool, field: str, limit: str, value: object) -> None:
    if not ok:
        raise InvalidRequest(f"{field} must be {limit}, got {value!r}", param=field)


def _check_form(outputs: StructuredOutputs) -> None:
    try:
        check_grammar(outputs)
    except ValueError as error:
        raise InvalidRequest(str(error), param="structured_outputs") from None


def _check_retention(retention: Retention) -> None:
    try:
        retention.validate()
    except ValueError as error:
        raise InvalidRequest(str(error), param="retention") from None


def _wrapped(seed: int) -> int:
    """Into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63
