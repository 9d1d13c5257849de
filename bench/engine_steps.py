"""The worker's loop around a model that computes nothing, timed part by part."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import zmq
from torch import Tensor

from bench.cache_growth import CHAT_TURN_BLOCKS, SYSTEM_BLOCKS, SYSTEM_PROMPTS, TURNS, Forest
from bench.cache_trace import BLOCK_SIZE, Tokens
from bench.fresh_process import Progress
from radixkv import engine as engine_module
from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.kernels import AttentionMetadata
from radixkv.model import sampler
from radixkv.model.config import ModelConfig, RopeConfig
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import RequestOutput
from radixkv.server import worker as worker_module
from radixkv.server.messages import FromWorker, Generate, Parser, Ready, frames
from radixkv.server.messages import Tokens as TokensMessage
from radixkv.server.worker import Worker

VOCAB = 49_152
QUESTION_TOKENS = 64
OUTPUT_TOKENS = 256
BACKLOG = 8
"""Requests that wait, so that a sequence that ends is followed at once."""
SETTLING = 64
"""Turns that are not counted once so many sequences run as were asked for."""
CACHE_CALLS = ("acquire", "extend", "publish", "release", "take_copies", "tree_order")
PARTS = ("receive", "schedule", "batch", "sample", "outputs", "send", "rest")
MODEL = ModelConfig(
    architecture="null", vocab_size=VOCAB, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=1, max_position_embeddings=8192, rms_norm_eps=1e-5, rope=RopeConfig(),
)  # fmt: skip


class NullModel:
    """In the place of ``Llama``: its logits are drawn beforehand, one row for each place in the batch, and it computes nothing."""

    def __init__(self, most_rows: int) -> None:
        self.config = MODEL
        self.device = torch.device("cpu")
        self._logits = torch.randn(most_rows, VOCAB, generator=torch.Generator().manual_seed(0))

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, kv: NullStorage, rows: Tensor | None = None) -> Tensor:
        return token_ids if rows is None else rows

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[n, vocab]``"""
        return self._logits[: len(hidden)]


class NullStorage:
    """In the place of ``KVStorage``: blocks without memory."""

    num_bytes = 0

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, *_: object) -> None:
        self.block_size = block_size

    def copy(self, copies: Sequence[object]) -> None:
        """Nothing is there to be copied."""


class Chats(Forest):
    """The forest of :mod:`bench.cache_growth`, in a given cache and in the model's vocabulary."""

    def __init__(self, cache: Any) -> None:
        super().__init__(CHAT_TURN_BLOCKS, 1)
        self.cache = cache

    def prompt(self, chat: int, turns: int, *, regenerated: bool = True) -> Tokens:
        tokens = super().prompt(chat, turns, regenerated=regenerated) % VOCAB
        tokens.flags.writeable = False
        return tokens


class Laps:
    """Nanoseconds that functions took since the last :meth:`take`, summed by part."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}

    def around(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """``function``, timed."""
        clock, spent = time.perf_counter_ns, self._spent
        spent[part] = 0

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[part] += clock() - start

        return timed

    def take(self) -> dict[str, int]:
        taken = dict(self._spent)
        for part in self._spent:
            self._spent[part] = 0
        return taken


class Turn(NamedTuple):
    """Nanoseconds of a turn of the worker's loop, by part.  What the device would do is in none of them."""

    receive: int
    """Draining the socket: most often nothing is there."""
    schedule: int
    cache: int
    """Of ``schedule`` and ``outputs``: the calls of the cache, where they were timed."""
    batch: int
    """Block tables, positions, slots and token ids: from a batch of sequences to tensors."""
    sample: int
    """All but the search for each row's highest logit."""
    outputs: int
    """Tokens appended, ended sequences released, and what is said of them."""
    send: int
    """Encoding, and the socket."""
    rest: int
    """Polling, and memory given back."""
    highest: int
    """The search for each row's highest logit, which is the device's and not counted in ``overhead``."""
    only_decodes: bool
    """No request arrived, and none was admitted."""

    @classmethod
    def of(cls, whole: int, spent: dict[str, int]) -> Turn:
        receive, send, step = spent["_drain"], spent["_send"], spent["step"]
        schedule, forward, sample, highest = spent["schedule"], spent["forward"], spent["sample"], spent["best"]
        return cls(
            receive, schedule, sum(spent.get(name, 0) for name in CACHE_CALLS), forward, sample - highest,
            step - schedule - forward - sample, send, whole - receive - step - send, highest,
            not (spent["add"] or spent["acquire"]),
        )  # fmt: skip

    @property
    def overhead(self) -> int:
        return self.receive + self.schedule + self.batch + self.sample + self.outputs + self.send + self.rest


class Stop(Exception):
    """Enough turns were timed."""


class Frontend:
    """The other end of the worker's socket: keeps ``BACKLOG`` requests waiting there beside those that run."""

    def __init__(self, socket: zmq.Socket[bytes], request: Callable[[], Generate]) -> None:
        self._socket = socket
        self._request = request
        self._parse: Parser[FromWorker] = Parser(FromWorker)

    def answer(self) -> None:
        """Read all that the worker has sent, and send a request for each that ended."""
        while self._socket.poll(0):
            address, *received = self._socket.recv_multipart()
            message = self._parse(received)
            assert isinstance(message, TokensMessage | Ready), f"the worker sent {message}"
            if isinstance(message, TokensMessage):
                for _ in range(sum(output.finish_reason is not None for output in message.outputs)):
                    self._socket.send_multipart([address, *frames(self._request())])


class Loop:
    """A real worker, engine, scheduler, cache, sampler and socket, kept busy.  Only what computes on K/V or weights is replaced.

    The cache is full before the first request: ``nodes`` nodes with edges of 4 blocks.  Every request goes on from a cached chat
    (1,088 to 2,304 tokens, behind one of 8 system prompts of 1,024) with 64 tokens of its own, and puts out 256 tokens, so that
    most blocks of a running sequence are shared and each new one evicts an old one.  As one ends, the next one is admitted.
    """

    def __init__(self, nodes: int, most_running: int, progress: Progress) -> None:
        blocks = nodes * CHAT_TURN_BLOCKS + SYSTEM_PROMPTS * SYSTEM_BLOCKS
        config = EngineConfig(
            model="null", device="cpu", dtype="float32", kv_cache_tokens=blocks * BLOCK_SIZE, block_size=BLOCK_SIZE, num_threads=1,
            max_num_seqs=most_running, max_batch_tokens=max(EngineConfig.max_batch_tokens, 2 * most_running),
        )  # fmt: skip
        with mock.patch.multiple(
            engine_module, resolve_model=lambda name: name, load_model_config=lambda source: MODEL, KVStorage=NullStorage,
            load_model=lambda *args, **kwargs: NullModel(most_running),
        ):  # fmt: skip
            self.engine = Engine(config)
        self._best = sampler._best(self.engine.runner.model.logits(torch.empty(most_running)))
        self._chats = Chats(self.engine.cache)
        self._chats.grow(nodes, progress)
        self._rng = random.Random(1)
        self._ids = map(str, count())

    def time(self, running: int, turns: int, *, cold: bool = False, cache_too: bool = False) -> list[Turn]:
        """``turns`` turns of the worker's loop with ``running`` sequences.

        ``cold``: each step's logits are searched for their highest, which takes all else out of the processor's caches, as a model
        on a CPU does; else that was done beforehand, as if on a GPU.  ``cache_too`` times every call of the cache, which adds
        some 0.3 us to each.
        """
        engine = self.engine
        engine.scheduler.max_num_seqs = running
        laps, timed = Laps(), list[Turn]()
        read_end, write_end = os.pipe()
        with (
            open(read_end), open(write_end, "w"), zmq.Context() as context, context.socket(zmq.ROUTER) as ours,
            context.socket(zmq.DEALER) as theirs,
        ):  # fmt: skip
            ours.setsockopt(zmq.LINGER, 0)
            theirs.setsockopt(zmq.LINGER, 0)
            theirs.connect(f"tcp://127.0.0.1:{ours.bind_to_random_port('tcp://127.0.0.1')}")
            best = sampler._best if cold else self._best_beforehand
            worker, frontend = Worker(engine, theirs), Frontend(ours, self._request)
            compute: Callable[[], list[RequestOutput]] = laps.around(engine.step, "step")
            settled, resumed = -SETTLING, 0

            def step() -> list[RequestOutput]:
                """A turn ends and the next one begins where the engine is asked for a step."""
                nonlocal settled, resumed
                whole = time.perf_counter_ns() - resumed
                spent = laps.take()
                settled += len(engine.scheduler.running) == running or settled > -SETTLING
                if settled > 0:
                    timed.append(Turn.of(whole, spent))
                if len(timed) == turns:
                    raise Stop
                frontend.answer()
                resumed = time.perf_counter_ns()
                outputs = compute()
                if error := next((output.error for output in outputs if output.error), None):
                    raise ValueError(f"a step failed: {error}")  # or the loop would wait for ever for sequences that decode
                return outputs

            parts: list[tuple[object, str]] = [
                (worker, "_drain"), (worker, "_send"), (engine.scheduler, "schedule"), (engine.runner, "forward"),
                (engine_module, "sample"), (engine, "add"),
            ]  # fmt: skip
            parts += [(engine.cache, name) for name in (CACHE_CALLS if cache_too else ("acquire",))]
            with ExitStack() as patches:
                for owner, name in parts:
                    patches.enter_context(mock.patch.object(owner, name, laps.around(getattr(owner, name), name)))
                patches.enter_context(mock.patch.object(sampler, "_best", laps.around(best, "best")))
                patches.enter_context(mock.patch.object(engine, "step", step))
                patches.enter_context(mock.patch.object(worker_module, "STDIN", read_end))
                for _ in range(running + BACKLOG):
                    worker._handle(self._request(self._rng.randint(1, OUTPUT_TOKENS)))
                with suppress(Stop):
                    worker.run()
        for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(request.request_id)
        return timed

    def _best_beforehand(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        tokens, highest = self._best
        return tokens[: len(logits)], highest[: len(logits)]

    def _request(self, max_tokens: int = OUTPUT_TOKENS) -> Generate:
        newest = self._chats.finished_chats
        chat = newest - 1 - self._rng.randrange(newest // 2)
        question = np.random.default_rng(self._rng.getrandbits(32)).integers(0, VOCAB, QUESTION_TOKENS)
        prompt = np.concatenate((self._chats.prompt(chat, self._rng.randint(1, TURNS)), question))
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return Generate(request_id=next(self._ids), token_ids=prompt.tolist(), params=params)


def time_steps(*, nodes: int, running: Sequence[int], turns: int, progress: Progress) -> dict[str, Any]:
    """Every number of ``running`` sequences, warm and cold.  For a process of its own.

    A row each: percentiles of ``overhead`` in microseconds over the turns that only decode, the median of each part over the same
    turns, and the mean over all turns.  ``cache_us`` is from as many turns more, in which every call of the cache was timed.
    """
    loop = Loop(nodes, max(running), progress)
    start, rows = loop.engine.cache.stats().nodes, []
    cases = [(cold, n) for cold in (False, True) for n in running]
    for done, (cold, n) in enumerate(cases):
        progress(done, len(cases))
        every = loop.time(n, turns, cold=cold)
        decodes = [turn for turn in every if turn.only_decodes]
        by_call = [turn for turn in loop.time(n, turns, cold=cold, cache_too=True) if turn.only_decodes]
        overhead = np.array([turn.overhead for turn in decodes]) / 1e3
        rows.append(
            {
                "running": n,
                "cold": cold,
                "turns": len(every),
                "turns_that_only_decode": len(decodes),
                **{f"{name}_us": float(np.median([getattr(turn, name) for turn in decodes])) / 1e3 for name in PARTS},
                "cache_us": float(np.median([turn.cache for turn in by_call])) / 1e3,
                "highest_us": float(np.median([turn.highest for turn in decodes])) / 1e3,
                **{f"p{q}_us": float(np.percentile(overhead, q)) for q in (50, 90, 99)},
                "mean_of_all_us": float(np.mean([turn.overhead for turn in every])) / 1e3,
            }
        )
    stats = loop.engine.cache.stats()
    return {"nodes": [start, stats.nodes], "blocks": stats.blocks_total, "vocab": VOCAB, "rows": rows}
