"""The frontend: text in, text out, over an engine that knows only token ids.  It knows no transport; the doors are built on it.

``submit`` checks, renders, tokenises and sends; the :class:`Generation` it returns yields the text as it grows.
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Sequence
from typing import Any

import jinja2
import msgspec

from radixkv.cache import Snapshot
from radixkv.cache.retention import Retention
from radixkv.detokenizer import Detokenizer, TokenBytes
from radixkv.grammar import check_grammar
from radixkv.report.logged_request import LoggedRequest
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import FinishReason
from radixkv.server import logs
from radixkv.server import tools as tool_text
from radixkv.server.activity import Activity
from radixkv.server.errors import InvalidRequest, Unavailable, UnknownModel
from radixkv.server.generation import Choice, Generation
from radixkv.server.messages import ChatMessage, Generate
from radixkv.server.metrics import Metrics
from radixkv.server.recovery import Recovery
from radixkv.server.request_log import RequestLog
from radixkv.server.routing import Router
from radixkv.server.tools import ToolUse
from radixkv.server.waiting_room import WaitingRoom
from radixkv.server.worker_client import CALL_TIMEOUT, WorkerClient
from radixkv.server.worker_stats import merged
from radixkv.structured_outputs import StructuredOutputs

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

    def _log_end(self, choice: Choice, arrival: float, finish_reason: FinishReason | None, error: str | None) -> None:
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
