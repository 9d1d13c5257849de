"""A request trace expanded to tokens, and a prefix cache timed as it serves the requests one after the other."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bench.fresh_process import Progress
from radixkv.cache import PrefixCache
from radixkv.report.trace import BLOCK_TOKENS, TraceRequest, read_trace

BLOCK_SIZE = 16
Tokens = NDArray[np.int32]


class Contender(Protocol):
    """A prefix cache with a capacity in tokens, driven through a request's whole life."""

    operations: tuple[str, ...]
    """What a request's life consists of, in order."""

    def prepare(self, tokens: Tokens) -> Any:
        """The prompt in the form this cache takes.  Not timed."""

    def serve(self, prompt: Any, lap: Callable[[], object]) -> int:
        """Take a request through its life, calling ``lap`` after each operation; return how many prompt tokens it hit."""


class Radixkv:
    """Ours.  Attribution counts every request's missed tokens by reason; spelling a miss out (``Lease.miss``) is left out."""

    operations: tuple[str, ...] = ("acquire", "publish", "release")

    def __init__(self, capacity_tokens: int, *, attribution: bool = True) -> None:
        self.cache = PrefixCache(capacity_tokens // BLOCK_SIZE, BLOCK_SIZE, attribution=attribution)

    def prepare(self, tokens: Tokens) -> Tokens:
        return tokens

    def serve(self, prompt: Tokens, lap: Callable[[], object]) -> int:
        cache = self.cache
        lease = cache.acquire(prompt)
        cache.take_copies()
        lap()
        if lease is None:
            raise ValueError(f"a request of {len(prompt)} tokens does not fit into an idle cache")
        cache.publish(lease, prompt, len(prompt))
        lap()
        cache.release(lease)
        lap()
        return lease.num_cached_tokens


def load_requests(trace: Path | None, count: int) -> list[TraceRequest]:
    """The first ``count`` requests of a trace file, or as many synthetic ones where there is none.

    Raises OSError, TraceError, or ValueError where the file holds no request.
    """
    if trace is None:
        return synthetic_requests(count)
    requests = list(islice(read_trace(trace), count))
    if not requests:
        raise ValueError(f"{trace} holds no request")
    return requests


def synthetic_requests(count: int, seed: int = 0) -> list[TraceRequest]:
    """Chats behind one system prompt, shaped after an hour of a production chat service (Mooncake's conversation trace).

    Prompts are log-normal with a mean of about 12,000 tokens.  One in five requests is the next turn of a chat, mostly a recent
    one, that the rest of the trace has not gone on from; the others begin a chat.
    """
    rng = random.Random(seed)
    chats: list[list[int]] = []  # ids of a chat's full blocks as of its latest turn, latest chat last
    requests, next_id = [], 1
    for arrival in range(count):
        blocks = [0]
        if chats and rng.random() < 0.2:
            back = min(int(rng.expovariate(1 / 400)), len(chats) - 1)
            blocks = chats.pop(-1 - back)
            fresh = max(int(rng.lognormvariate(7.2, 1.0)), 1)
        else:
            fresh = max(int(rng.lognormvariate(8.75, 1.0)), 1)
        length = len(blocks) * BLOCK_TOKENS + fresh
        ids = blocks + list(range(next_id, next_id + -(-fresh // BLOCK_TOKENS)))
        next_id += len(ids) - len(blocks)
        chats.append(ids[: length // BLOCK_TOKENS])
        requests.append(TraceRequest(float(arrival * 300), length, 300, ids))
    return requests


def expand(requests: Sequence[TraceRequest]) -> list[Tokens]:
    """Each request's prompt as tokens: read-only int32 ``[input_length]``.  Every distinct block gets a range of tokens of its own.

    Ranges are given out as blocks first appear, since ids may be 64-bit hashes and tokens are int32.  A block of another namespace
    is another block, and so is a partial last block that has no id.  Raises ValueError where the tokens don't suffice.
    """
    first_token: dict[tuple[str, int, int | str], int] = {}
    unused = 0
    prompts: list[Tokens] = []
    for request in requests:
        size, starts = request.block_tokens, list[int]()
        for block in request.hash_ids:
            start = first_token.setdefault((request.namespace, size, block), unused)
            unused += size * (start == unused)
            starts.append(start)
        if len(starts) * size < request.input_length:
            starts.append(unused)
            unused += size
        if unused > np.iinfo(np.int32).max:
            raise ValueError(
                f"hash_ids: {len(first_token):,} distinct blocks of {size} tokens are more than int32 tokens can tell apart"
            )
        within: Tokens = np.arange(size, dtype=np.int32)
        tokens = np.add.outer(np.array(starts, dtype=np.int32), within).ravel()[: request.input_length].copy()
        tokens.flags.writeable = False
        prompts.append(tokens)
    return prompts


def contender(name: str, capacity_tokens: int, folder: str | None) -> Contender:
    """The cache of that name; ``folder`` is what a peer's wheel was unpacked to."""
    if name == "radixkv":
        return Radixkv(capacity_tokens)
    if name == "radixkv-no-attribution":
        return Radixkv(capacity_tokens, attribution=False)
    from bench import cache_peers

    assert folder is not None
    return cache_peers.peer(name, Path(folder), capacity_tokens)


def time_trace(
    *, name: str, folder: str | None, trace: str | None, requests: int, capacity_tokens: int, by_operation: bool, progress: Progress
) -> dict[str, Any]:
    """One round of one contender, for a process of its own: every request once, in order, one at a time, from an empty cache.

    All prompts are prepared, the heap as it then is frozen and collected, before the first clock starts.  The clock runs around
    each request's whole life, or, ``by_operation``, is read after every operation too.  Returns ``microseconds`` a request
    ``[requests]``, ``cpu_us``, the processor time of all in the mean, ``hit_share`` of all prompt tokens, and the mean
    ``operations`` where they were asked for.
    """
    cache = contender(name, capacity_tokens, folder)
    prompts = [cache.prepare(tokens) for tokens in expand(load_requests(Path(trace) if trace else None, requests))]
    clock = time.perf_counter
    marks: list[float] = []
    lap = (lambda: marks.append(clock())) if by_operation else (lambda: None)
    hits, starts, ends = 0, [], []
    gc.collect()
    gc.freeze()
    cpu = time.thread_time()
    for done, prompt in enumerate(prompts):
        if done % 100 == 0:
            progress(done, len(prompts))
        start = clock()
        hits += cache.serve(prompt, lap)
        ends.append(clock())
        starts.append(start)
    cpu = time.thread_time() - cpu
    progress(len(prompts), len(prompts))
    result: dict[str, Any] = {
        "microseconds": [(end - start) * 1e6 for start, end in zip(starts, ends, strict=True)],
        "cpu_us": cpu / len(prompts) * 1e6,
        "hit_share": hits / sum(len(prompt) for prompt in prompts),
    }
    if by_operation:
        laps = np.array(marks).reshape(len(prompts), len(cache.operations))
        spent = np.diff(laps, axis=1, prepend=np.array(starts)[:, None])
        result["operations"] = dict(zip(cache.operations, (spent.mean(axis=0) * 1e6).tolist(), strict=True))
    return result
