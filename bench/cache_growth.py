"""How the prefix cache's costs grow: with the nodes of its tree, with the turns of a chat, and in memory."""

from __future__ import annotations

import gc
import random
import resource
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cache_trace import BLOCK_SIZE, Tokens
from bench.fresh_process import Progress
from radixkv.cache import PrefixCache

SYSTEM_PROMPTS, SYSTEM_BLOCKS = 8, 64
TURNS = 20
ACTIVE_CHATS = 16
LEAST_NODES = 3 * ACTIVE_CHATS * TURNS
"""Enough that some chats are finished."""
CHAT_TURN_BLOCKS = 4
TOKEN_BYTES = BLOCK_SIZE * np.dtype(np.int32).itemsize
"""A block's tokens: what memory is counted beyond."""
BATCHES, BATCH = 10, 100
"""Samples of each operation: in batches, so that two trees can be timed in turn."""
OPERATIONS = ("match", "turn", "evict")


def resident_bytes() -> int:
    """Memory of this process that is in RAM now, garbage collected first.  Raises OSError where there is no /proc."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Forest:
    """Many chats behind few system prompts, grown turn by turn through the cache's public methods.

    A chat has ``TURNS`` turns of ``edge_blocks`` blocks.  Each turn is answered twice, as when a user regenerates an answer, and
    goes on from the second answer: every turn makes two nodes of ``edge_blocks`` blocks, and no edge can merge with the next.
    ``ACTIVE_CHATS`` chats advance in turn, so that a chat's nodes lie apart in memory as in a busy server.  Tokens are computed
    from the chat's number whenever they are wanted: what memory the process gains is what the cache holds.
    """

    def __init__(self, edge_blocks: int, most_nodes: int) -> None:
        self.edge_blocks = edge_blocks
        self.turn_tokens = edge_blocks * BLOCK_SIZE
        self.resident_before = resident_bytes()
        self.cache = PrefixCache((most_nodes + BATCH) * edge_blocks + SYSTEM_PROMPTS * SYSTEM_BLOCKS, BLOCK_SIZE, attribution=True)
        self.finished_chats = 0
        self._ramp = np.arange(TURNS * self.turn_tokens, dtype=np.int32) * 97
        self._prompts = self._stream()
        self._rng = random.Random(0)

    def prompt(self, chat: int, turns: int, *, regenerated: bool = True) -> Tokens:
        """A chat's system prompt and first ``turns`` turns, the last one as first answered or ``regenerated``: a fresh array."""
        system = np.arange(SYSTEM_BLOCKS * BLOCK_SIZE, dtype=np.int32) * 89 - (chat % SYSTEM_PROMPTS) - 1
        answers = self._ramp[: turns * self.turn_tokens] + np.int32(2 * chat + 1)
        if not regenerated:
            answers[-self.turn_tokens :] -= 1
        tokens = np.concatenate((system, answers))
        tokens.flags.writeable = False
        return tokens

    def grow(self, nodes: int, progress: Progress) -> None:
        """Add turns until the tree has ``nodes`` nodes."""
        while (missing := nodes - self.cache.stats().nodes) > 0:
            progress(nodes - missing, nodes)
            self.time_turn(min(missing, 5000))
        progress(nodes, nodes)

    def time_turn(self, turns: int) -> list[float]:
        """Seconds of each of the next ``turns`` turns: acquire, publish, release."""
        cache, clock, seconds = self.cache, time.perf_counter, []
        for prompt in islice(self._prompts, turns):
            start = clock()
            lease = cache.acquire(prompt)
            cache.take_copies()
            assert lease is not None, "the cache has room for the whole forest"
            cache.publish(lease, prompt, len(prompt))
            cache.release(lease)
            seconds.append(clock() - start)
        return seconds

    def time_match(self, prompts: int) -> list[float]:
        """Seconds of looking up each of ``prompts`` random ones of the newer half, which evictions have not reached."""
        cache, clock, seconds = self.cache, time.perf_counter, []
        newer_half = cache.stats().nodes // (2 * TURNS) // 2
        for _ in range(prompts):
            chat = self.finished_chats - 1 - self._rng.randrange(min(newer_half, self.finished_chats))
            prompt = self.prompt(chat, self._rng.randint(1, TURNS))
            start = clock()
            match = cache.match(prompt)
            seconds.append(clock() - start)
            if (found := match.num_tokens(BLOCK_SIZE)) != len(prompt):
                raise RuntimeError(f"{found} of {len(prompt)} tokens found of a prompt that is cached whole")
        return seconds

    def time_evict(self, leaves: int) -> list[float]:
        """Seconds of evicting the blocks of each of the ``leaves`` least recently used leaves."""
        cache, clock, seconds = self.cache, time.perf_counter, []
        for _ in range(leaves):
            start = clock()
            freed = cache.evict(self.edge_blocks)
            seconds.append(clock() - start)
            if freed != self.edge_blocks:
                raise RuntimeError(f"evict({self.edge_blocks}) freed {freed}")
        return seconds

    def describe(self) -> dict[str, Any]:
        """Nodes, blocks, and bytes a block: resident memory gained since before the cache was made, less the blocks' tokens."""
        stats = self.cache.stats()
        gained = resident_bytes() - self.resident_before
        return {"nodes": stats.nodes, "blocks": stats.blocks_cached, "bytes_per_block": gained / stats.blocks_cached - TOKEN_BYTES}

    def _stream(self) -> Iterator[Tokens]:
        for first in count(0, ACTIVE_CHATS):
            for turn in range(1, TURNS + 1):
                for chat in range(first, first + ACTIVE_CHATS):
                    yield self.prompt(chat, turn, regenerated=False)
                    yield self.prompt(chat, turn)
            self.finished_chats = first + ACTIVE_CHATS


def grow_tree(*, sizes: Sequence[int], progress: Progress) -> list[dict[str, Any]]:
    """Grow one tree with edges of 4 blocks to each of ``sizes`` nodes and time it there.  For a process of its own.

    A row a size: its ``nodes`` and ``blocks``, ``bytes_per_block`` (of use in the last row only: the pool has that size from the
    start), and median microseconds of a ``match``, of a whole ``turn`` (acquire, publish, release) and of an ``evict`` of one leaf.
    ``*_ratio`` are those over the same of a second tree, which stays at the first of ``sizes`` and is timed in turn with the first:
    a machine's speed drifts, and would spoil ratios of figures taken minutes apart.

    Raises ValueError for a size too small to hold whole chats.
    """
    if min(sizes) < LEAST_NODES:
        raise ValueError(f"sizes must be at least {LEAST_NODES} nodes, got {min(sizes)}")
    warm_up()
    small = Forest(CHAT_TURN_BLOCKS, sizes[0])
    small.grow(sizes[0], progress)
    forest, rows = Forest(CHAT_TURN_BLOCKS, max(sizes)), []
    for size in sizes:
        forest.grow(size, progress)
        row: dict[str, Any] = forest.describe()
        seconds: dict[tuple[str, Forest], list[float]] = {}
        for _ in range(BATCHES):
            for operation in OPERATIONS:
                for tree in (small, forest):
                    seconds.setdefault((operation, tree), []).extend(getattr(tree, f"time_{operation}")(BATCH))
        for operation in OPERATIONS:
            median = float(np.median(seconds[operation, forest]))
            row[f"{operation}_us"] = median * 1e6
            row[f"{operation}_ratio"] = median / float(np.median(seconds[operation, small]))
        rows.append(row)
    return rows


def measure_memory(*, edge_blocks: int, blocks: int, turned_over: bool, progress: Progress) -> dict[str, Any]:
    """Bytes a cached block of a tree of ``blocks`` blocks in edges of ``edge_blocks``.  For a process of its own.

    ``turned_over``: as many blocks again have been cached since the cache was full, and so as many evicted.
    """
    warm_up()
    nodes = blocks // edge_blocks
    forest = Forest(edge_blocks, nodes)
    forest.grow(nodes, progress)
    for done in range(0, nodes if turned_over else 0, 1000):
        progress(done, nodes)
        forest.time_turn(1000)
    return {"edge_blocks": edge_blocks, "turned_over": turned_over, **forest.describe()}


def warm_up() -> None:
    """Do everything once in a small tree, so that what the process gains from here on is the cache's."""
    forest = Forest(1, LEAST_NODES)
    forest.grow(LEAST_NODES, lambda done, total: None)
    forest.time_match(10)
    forest.time_evict(10)


def long_chats(*, turns: int, chats: int, one_buffer: bool, progress: Progress) -> dict[str, Any]:
    """Chats that grow by 64 tokens a turn.  For a process of its own.

    ``one_buffer``: a turn's prompt is a view of a buffer that the chat grows in, and that doubles when it is full; else it is a
    fresh array of all the tokens so far.
    ``curve``: at turns 10, 20, 50 and so on to ``turns``, median microseconds of a turn and of its ``acquire``, ``publish`` and
    ``release``, over the turns within 5 % (at least 5) of it, of all chats; ``ratio`` is the turn's over turn 20's of the same
    chat, the median over chats.
    """
    warm_up()
    step = CHAT_TURN_BLOCKS * BLOCK_SIZE
    before = resident_bytes()
    cache = PrefixCache((chats + 1) * turns * CHAT_TURN_BLOCKS, BLOCK_SIZE, attribution=True)
    spent = np.empty((chats, turns, 3))
    clock = time.perf_counter
    for chat in range(chats):
        tokens = np.arange(turns * step, dtype=np.int32) * 97 + np.int32(chat)
        buffer = tokens[:0]
        for turn in range(turns):
            if turn % 50 == 0:
                progress(chat * turns + turn, chats * turns)
            end = (turn + 1) * step
            if not one_buffer:
                prompt = tokens[:end].copy()
            else:
                if end > len(buffer):
                    buffer = tokens[: 2 * end].copy()
                prompt = buffer[:end]
            prompt.flags.writeable = False
            start = clock()
            lease = cache.acquire(prompt)
            cache.take_copies()
            acquired = clock()
            assert lease is not None, "the cache has room for all chats"
            cache.publish(lease, prompt, len(prompt))
            published = clock()
            cache.release(lease)
            spent[chat, turn] = acquired - start, published - acquired, clock() - published
            if lease.num_matched_tokens != turn * step:
                raise RuntimeError(f"turn {turn + 1} found {lease.num_matched_tokens} tokens of the {turn * step} before it")
    del tokens, buffer, prompt

    def around(turn: int) -> NDArray[np.float64]:
        """Microseconds [chats, turns, 3] of the turns near this one."""
        within = max(turn // 20, 5)
        return spent[:, max(turn - within, 0) : turn + within] * 1e6

    early = np.median(around(min(20, turns)).sum(axis=2), axis=1)
    curve = []
    for turn in milestones(turns):
        near = around(turn)
        acquire, publish, release = np.median(near, axis=(0, 1)).tolist()
        whole = near.sum(axis=2)
        ratio = float(np.median(np.median(whole, axis=1) / early))
        curve.append(
            {
                "turn": turn,
                "turn_us": float(np.median(whole)),
                "acquire_us": acquire,
                "publish_us": publish,
                "release_us": release,
                "ratio": ratio,
            }
        )
    stats = cache.stats()
    return {
        "turns": turns,
        "chats": chats,
        "nodes": stats.nodes,
        "bytes_per_block": (resident_bytes() - before - spent.nbytes) / stats.blocks_cached - TOKEN_BYTES,
        "curve": curve,
    }


def milestones(turns: int) -> list[int]:
    """10, 20, 50, 100, 200 and so on up to ``turns``, which is always one of them."""
    scale = [digit * 10**power for power in range(1, 10) for digit in (1, 2, 5)]
    return [turn for turn in scale if turn < turns] + [turns]
