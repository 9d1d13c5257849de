"""What to do about the misses: each advice is computed by carrying it out in a simulation, and says what it was computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from radixkv.report.curve_report import percent
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.movable_spans import movable_spans
from radixkv.report.simulation import Prompt, cached_tokens
from radixkv.report.stack_distance import HitCurve
from radixkv.report.tokens_text import Show, printable

WINNING_BACK = 0.9
"""The capacity advised is the smallest that keeps this share of the hits that evictions lose."""
LEAST_GAIN = 0.001
"""Advice that gains less than this share of all prompt tokens is not worth giving."""
SIMULATED_PROMPTS = 2000
SIMULATED_TOKENS = 4 * 2**20
"""Of a log with tokens, the newest prompts that are simulated."""
_SPANS = 3


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to change, what it gains, and how that was computed."""

    kind: str
    """``move_span``, ``capacity``, ``block_size`` or ``namespaces``."""
    text: str
    arithmetic: str
    tokens_saved: int
    """Prompt tokens that would not have been computed, over the requests that the arithmetic names."""
    details: dict[str, int | float | str] = {}
    """What the advice says, as numbers."""


def capacity_advice(curve: HitCurve, capacity_blocks: int | None, kv_bytes_per_token: int | None) -> list[Advice]:
    """The smallest capacity that keeps most hits that an LRU cache of ``capacity_blocks`` loses; none where it loses few."""
    if capacity_blocks is None:
        return []
    (now, now_tokens), (most, most_tokens) = curve.hits_at(capacity_blocks), curve.hits_at(None)
    if most_tokens - now_tokens < LEAST_GAIN * curve.prompt_tokens:
        return []
    blocks = int(np.searchsorted(curve.hit_blocks, now + math.ceil(WINNING_BACK * (most - now))))
    then, then_tokens = curve.hits_at(blocks)
    size = f"{blocks * curve.block_size:,} tokens"
    if kv_bytes_per_token is not None:
        size = f"{blocks * curve.block_size * kv_bytes_per_token / 2**30:,.2f} GiB"
    share = (then - now) / (most - now)
    return [
        Advice(
            kind="capacity",
            text=f"A cache of {blocks:,} blocks = {size} would keep {percent(share)} of the evicted hits.",
            arithmetic=(
                f"Of {curve.prompt_blocks:,} prompt blocks an LRU cache of today's {capacity_blocks:,} blocks hits {now:,}, one "
                f"that never evicts {most:,}, one of {blocks:,} blocks {then:,}: ({then:,} - {now:,}) / ({most:,} - {now:,}) = "
                f"{percent(share)}, or {then_tokens - now_tokens:,} tokens."
            ),
            tokens_saved=then_tokens - now_tokens,
            details={"capacity_blocks": blocks, "hit_blocks": then, "share_of_evicted_hits": share},
        )
    ]


def token_advice(began: Sequence[LoggedRequest], capacity_blocks: int | None, show: Show) -> list[Advice]:
    """What can only be told where a log has tokens."""
    prompts = _newest(began)
    if not prompts or (size := began[-1].block_size) < 1:
        return []
    simulation = _Simulation(prompts, capacity_blocks, size)
    return [*_spans(simulation, show), *_block_size(simulation), *_namespaces(simulation)]


def _newest(began: Sequence[LoggedRequest]) -> list[Prompt]:
    prompts: list[Prompt] = []
    left = SIMULATED_TOKENS
    for line in reversed(began[-SIMULATED_PROMPTS:]):
        left -= line.prompt_tokens
        if line.token_ids is msgspec.UNSET or left < 0:
            break
        tokens = np.array(line.token_ids, np.int32)
        tokens.flags.writeable = False
        prompts.append((line.namespace, tokens))
    return prompts[::-1]


class _Simulation:
    def __init__(self, prompts: list[Prompt], capacity_blocks: int | None, block_size: int) -> None:
        self.prompts, self.block_size, self._capacity = prompts, block_size, capacity_blocks
        self.prompt_tokens = sum(len(tokens) for _, tokens in prompts)
        self.cached = self.run(prompts)
        self.what = f"Simulated with the newest {len(prompts):,} prompts ({self.prompt_tokens:,} tokens) one after the other"

    def run(self, prompts: list[Prompt], block_size: int | None = None) -> int:
        """Tokens found in a cache of today's memory."""
        size = block_size or self.block_size
        blocks = None if self._capacity is None else self._capacity * self.block_size // size
        return sum(cached_tokens(prompts, blocks, size))

    def gain(self, tokens: int) -> str:
        """In the words of an arithmetic."""
        return f"{tokens:,} tokens cached instead of {self.cached:,}: {tokens - self.cached:,} more"

    def is_worth(self, tokens: int) -> bool:
        return tokens - self.cached >= max(1, LEAST_GAIN * self.prompt_tokens)


def _spans(simulation: _Simulation, show: Show) -> list[Advice]:
    advice = []
    for span in movable_spans(simulation.prompts)[:_SPANS]:
        moved = [(name, span.moved(i, tokens)) for i, (name, tokens) in enumerate(simulation.prompts)]
        tokens = simulation.run(moved)
        if not simulation.is_worth(tokens):
            continue
        count = len(span.lengths)
        first = next(iter(span.lengths))

        def text(index: int, start: int = span.start, lengths: dict[int, int] = span.lengths) -> str:
            return show(simulation.prompts[index][1][start : start + lengths[index]])

        ours, theirs = text(span.differing), text(first)
        saved = tokens - simulation.cached
        namespace = printable(simulation.prompts[first][0])
        where = f" of namespace {namespace}" if namespace else ""
        advice.append(
            Advice(
                kind="move_span",
                text=(
                    f"Move what differs at token {span.start:,} ({theirs} here, {ours} there) below the {span.run:,} tokens that "
                    f"follow it and are the same in {count:,} prompts{where}: saves {saved / count:,.0f} tokens a request."
                ),
                arithmetic=(
                    f"{simulation.what}, the span moved in {count:,} of them: {simulation.gain(tokens)}, / {count:,} = "
                    f"{saved / count:,.1f} a request."
                ),
                tokens_saved=saved,
                details={
                    "position": span.start,
                    "length": span.lengths[first],
                    "run": span.run,
                    "requests": count,
                    "ours": ours,
                    "theirs": theirs,
                    "tokens_a_request": saved / count,
                },
            )
        )
    return sorted(advice, key=lambda a: -a.tokens_saved)


def _block_size(simulation: _Simulation) -> list[Advice]:
    size = simulation.block_size // 2
    tokens = simulation.run(simulation.prompts, size) if size else 0
    if not simulation.is_worth(tokens):
        return []
    points = 100 * (tokens - simulation.cached) / simulation.prompt_tokens
    return [
        Advice(
            kind="block_size",
            text=f"Block size {simulation.block_size} -> {size} gains {points:.1f} points of hit rate.",
            arithmetic=(
                f"{simulation.what}, in the same memory: {simulation.gain(tokens)}, / {simulation.prompt_tokens:,} = {points:.1f} "
                "points."
            ),
            tokens_saved=tokens - simulation.cached,
            details={"block_size": size, "points": points},
        )
    ]


def _namespaces(simulation: _Simulation) -> list[Advice]:
    names = {name for name, _ in simulation.prompts}
    tokens = simulation.run([("", tokens) for _, tokens in simulation.prompts]) if len(names) > 1 else 0
    if not simulation.is_worth(tokens):
        return []
    return [
        Advice(
            kind="namespaces",
            text=(
                f"The {len(names):,} namespaces ask alike: one for all of them would save {tokens - simulation.cached:,} tokens. "
                "Only where tenants may learn from an answer's speed what others have asked."
            ),
            arithmetic=f"{simulation.what}, all in one namespace: {simulation.gain(tokens)}.",
            tokens_saved=tokens - simulation.cached,
            details={"namespaces": len(names)},
        )
    ]
