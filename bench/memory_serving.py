"""The same requests served out of the same KV memory, handed out in blocks of any size or by the longest sequence's length."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from radixkv import engine as engine_module
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine import Engine
from radixkv.model.llama import Llama
from radixkv.model.loader import load_model
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.policy import FirstComeFirstServed
from radixkv.scheduling.request import Request, RequestOutput
from radixkv.scheduling.scheduler import Scheduler

Tokens = NDArray[np.int32]

MAX_MODEL_LEN = 4096
"""Tokens that contiguous reservation sets aside for every sequence."""
CONTIGUOUS = "contiguous"
MOST_RUNNING = 256


class Layout(NamedTuple):
    """How KV memory is handed out: blocks of ``block_size``, or one slot of ``MAX_MODEL_LEN`` a sequence where that is None."""

    block_size: int | None
    shares_prefixes: bool

    @property
    def name(self) -> str:
        return CONTIGUOUS if self.block_size is None else f"{self.block_size}"

    def most_running(self, budget: int, most: int = MOST_RUNNING) -> int:
        return min(budget // MAX_MODEL_LEN, most) if self.block_size is None else most


class Occupancy(NamedTuple):
    """What the running sequences hold, over the steps of a run."""

    waste: float
    """Mean over the steps of (slots reserved - slots in use) / slots reserved.  A slot holds one token's K/V.  Reserved are those
    of all blocks that running sequences hold, a shared block counted once; in use are those that belong to a token of a prompt or
    of the output so far.  In blocks this is what PagedAttention calls internal fragmentation: the empty end of a sequence's last
    block.  Of contiguous slots it is internal fragmentation and what is reserved for tokens to come."""
    waste_of_all: float
    """The same slots as a share of all blocks in use: those of finished requests, which stay cached, are full of K/V.  Without
    prefix sharing there are none."""
    empty_end: float
    """Mean of the slots that are unused of a running sequence: (block size - 1) / 2 where lengths are spread evenly."""
    running: int
    """Most sequences that ran at once."""
    table_bytes: int
    """Most bytes that their block tables took, int32."""
    preemptions: int


def occupancy(
    prompts: Sequence[Tokens], max_tokens: int, budget: int, layout: Layout, most_running: int = MOST_RUNNING
) -> Occupancy:
    """Serve ``prompts``, which all wait from the start, through the real scheduler and cache, without a model.

    ``budget`` is the KV memory in tokens; at most ``most_running`` run at once.  Contiguous reservation is the same
    scheduler, held to as many sequences as have room for ``MAX_MODEL_LEN`` tokens each.
    """
    block_size = layout.block_size or 16
    cache = PrefixCache(budget // block_size, block_size, enable_prefix_caching=layout.shares_prefixes)
    scheduler = Scheduler(
        cache, FirstComeFirstServed(), max_batch_tokens=EngineConfig.max_batch_tokens,
        max_num_seqs=layout.most_running(budget, most_running),
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens)
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(str(i), prompt, params, arrival_time=i))
    fresh = itertools.count(10**6)  # outputs that no prompt goes on with
    wastes, wastes_of_all, empty_ends, peak, table_bytes = [], [], [], 0, 0
    while scheduler.running or scheduler.waiting:
        batch = scheduler.schedule()
        running = scheduler.running
        tables = [request.lease.block_table for request in running if request.lease is not None]
        if layout.block_size is None:
            reserved = in_use = len(running) * MAX_MODEL_LEN
            unused = reserved - sum(request.num_tokens for request in running)
        else:
            reserved = len(np.unique(np.concatenate(tables))) * block_size
            in_use = (cache.pool.num_blocks - cache.pool.num_free) * block_size
            unused = sum(len(table) * block_size - r.num_tokens for r, table in zip(running, tables, strict=True))
            table_bytes = max(table_bytes, sum(table.nbytes for table in tables))
        wastes.append(unused / reserved)
        wastes_of_all.append(unused / in_use)
        empty_ends.append(unused / len(running))
        peak = max(peak, len(running))
        for sequence in batch.sequences:
            if sequence.samples and sequence.request.append(next(fresh)):
                scheduler.remove(sequence.request)
    waste, waste_of_all, empty_end = np.mean((wastes, wastes_of_all, empty_ends), axis=1).tolist()
    return Occupancy(waste, waste_of_all, empty_end, peak, table_bytes, scheduler.num_preemptions)


class Speed(NamedTuple):
    """A run of the real engine."""

    seconds: float
    output_tokens: int
    computed_prompt_tokens: int
    outputs: list[list[int]]
    """Token ids by request."""

    @property
    def tokens_per_second(self) -> float:
        """Of output."""
        return self.output_tokens / self.seconds


class Engines:
    """Engines that differ in how they lay out KV memory, over one model that is loaded once."""

    def __init__(self, model: str) -> None:
        self._name = model
        self._model: Llama | None = None

    def make(self, budget: int, layout: Layout) -> Engine:
        config = EngineConfig(
            model=self._name, kv_cache_tokens=budget, block_size=layout.block_size or 16, policy="fcfs",
            max_model_len=MAX_MODEL_LEN, max_num_seqs=layout.most_running(budget), enable_prefix_caching=layout.shares_prefixes,
        )  # fmt: skip
        with mock.patch.object(engine_module, "load_model", self._load):
            return Engine(config)

    def _load(self, *args: Any, **kwargs: Any) -> Llama:
        if self._model is None:
            self._model = load_model(*args, **kwargs)
        return self._model


def _steps(engine: Engine) -> Iterator[list[RequestOutput]]:
    while engine.has_unfinished:
        yield engine.step()


def speed(engine: Engine, prompts: Sequence[Tokens], max_tokens: int, progress: Callable[[int, int], None]) -> Speed:
    """Serve ``prompts`` on the real model, greedily, all waiting from the start."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    outputs: list[list[int]] = [[] for _ in prompts]
    engine.add("warm-up", list(range(100, 132)), SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    for _ in _steps(engine):
        pass
    engine.reset_cache()
    computed, done = engine.stats()["prefill_tokens_computed"], 0
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    for step in _steps(engine):
        for output in step:
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            outputs[int(output.request_id)] += output.token_ids
            done += output.finish_reason is not None
        progress(done, len(prompts))
    seconds = time.perf_counter() - start
    computed = engine.stats()["prefill_tokens_computed"] - computed
    return Speed(seconds, sum(map(len, outputs)), computed, outputs)
