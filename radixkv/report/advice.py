"""What to do about the misses: each advice is computed by carrying it out in a simulation, and says what it was computed from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from radixkv.cache.tokens import Tokens
from radixkv.report.curve_report import percent
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.movable_spans import MovableSpan, movable_spans
from radixkv.report.simulation import Prompt, cached_tokens
from radixkv.report.stack_distance import HitCurve
from radixkv.report.tokens_text import Show, printable, shortened

WINNING_BACK = 0.9
"""The capacity advised is the smallest that keeps this share of the hits that evictions lose."""
LEAST_GAIN = 0.001
"""Advice that gains less than this share of all prompt tokens is not worth giving."""
SIMULATED_PROMPTS = 2000
SIMULATED_TOKENS = 4 * 2**20
"""Of a log with tokens, the newest prompts that are simulated."""
AROUND = 8
"""Tokens shown on each side of a span."""
_SPANS = 3


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """What to change, what it gains, and how that was computed."""

    kind: str
    """``move_span``, ``capacity``, ``block_size``, ``namespaces``, ``in_flight`` or ``prefix_caching``."""
    text: str
    arithmetic: str
    tokens_saved: int
    """Prompt tokens that would not have been computed, over the requests that the arithmetic names."""
    share: float
    """Of all prompt tokens of those requests."""
    ours: str | None = None
    """Of ``move_span``: the newest prompt around the span; None where prompts may not be shown."""
    theirs: str | None = None
    """The same of an earlier prompt."""
    below: str | None = None
    """What the span should come below."""
    details: dict[str, int | float] = {}
    """What the advice says, as numbers."""


def advise(
    began: Sequence[LoggedRequest],
    prompts: Sequence[Tokens | None],
    curve: HitCurve,
    capacity_blocks: int | None,
    kv_bytes_per_token: int | None,
    show: Show | None,
) -> list[Advice]:
    """All that is worth doing, what saves most first.

    ``prompts`` are the tokens of ``began`` where they are known, ``curve`` is that of ``began``; ``capacity_blocks`` is today's
    size of the cache, None if that is unknown.  ``show`` turns tokens into text, where that may be seen.
    """
    total = curve.prompt_tokens
    if not any(line.missed or line.cached_tokens for line in began):
        return _caching(curve, capacity_blocks)
    advice = [*_in_flight(began, total), *(_capacity(curve, capacity_blocks, kv_bytes_per_token) or _evicted(began, curve))]
    newest = _newest(began, prompts)
    if newest:
        simulation = _Simulation(newest, capacity_blocks, began[-1].block_size)
        advice += [*_spans(simulation, show), *_block_size(simulation), *_namespaces(simulation)]
    return sorted(advice, key=lambda each: each.share, reverse=True)


def _caching(curve: HitCurve, capacity_blocks: int | None) -> list[Advice]:
    """A server that looks nothing up has no reasons for its misses either."""
    hits, tokens = curve.hits_at(capacity_blocks)
    if not tokens:
        return []
    return [
        Advice(
            kind="prefix_caching",
            text="Turn prefix caching on: the server runs without it, so that every prompt token is computed.",
            arithmetic=(
                f"Of {curve.prompt_blocks:,} prompt blocks an LRU cache of {_blocks(capacity_blocks)} hits {hits:,}, which are "
                f"{tokens:,} of {curve.prompt_tokens:,} prompt tokens."
            ),
            tokens_saved=tokens,
            share=tokens / curve.prompt_tokens,
        )
    ]


def _blocks(capacity_blocks: int | None) -> str:
    return "any size" if capacity_blocks is None else f"today's {capacity_blocks:,} blocks"


def _in_flight(began: Sequence[LoggedRequest], total: int) -> list[Advice]:
    tokens = sum(line.missed.get("in_flight", 0) for line in began)
    if tokens < max(1, LEAST_GAIN * total):
        return []
    return [
        Advice(
            kind="in_flight",
            text="Send the first of many prompts that begin alike a moment before the others.",
            arithmetic=f"{tokens:,} of {total:,} prompt tokens were just being computed by another request.",
            tokens_saved=tokens,
            share=tokens / total,
        )
    ]


def _evicted(began: Sequence[LoggedRequest], curve: HitCurve) -> list[Advice]:
    """Where ``began`` alone would not have filled the cache: what was evicted before them came from earlier requests."""
    tokens = sum(line.missed.get("evicted", 0) for line in began)
    if tokens < max(1, LEAST_GAIN * curve.prompt_tokens):
        return []
    return [
        Advice(
            kind="capacity",
            text="A larger cache would keep some of what is evicted before it comes again.",
            arithmetic=(
                f"{tokens:,} of {curve.prompt_tokens:,} prompt tokens had been cached and were evicted. How much larger it must be "
                "these requests can't tell: alone, they would have found all that they share."
            ),
            tokens_saved=tokens,
            share=tokens / curve.prompt_tokens,
        )
    ]


def _capacity(curve: HitCurve, capacity_blocks: int | None, kv_bytes_per_token: int | None) -> list[Advice]:
    """The smallest capacity that keeps most hits that an LRU cache of ``capacity_blocks`` loses; none where it loses few."""
    if capacity_blocks is None:
        return []
    (now, now_tokens), (most, most_tokens) = curve.hits_at(capacity_blocks), curve.hits_at(None)
    if most_tokens - now_tokens < max(1, LEAST_GAIN * curve.prompt_tokens):
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
            share=(then_tokens - now_tokens) / curve.prompt_tokens,
            details={"capacity_blocks": blocks, "hit_blocks": then, "share_of_evicted_hits": share},
        )
    ]


def _newest(began: Sequence[LoggedRequest], prompts: Sequence[Tokens | None]) -> list[Prompt]:
    newest: list[Prompt] = []
    left = SIMULATED_TOKENS
    for line, tokens in zip(began[: -SIMULATED_PROMPTS - 1 : -1], prompts[: -SIMULATED_PROMPTS - 1 : -1], strict=True):
        left -= line.prompt_tokens
        if tokens is None or left < 0:
            break
        newest.append((line.namespace, tokens))
    return newest[::-1]


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

    def share(self, tokens: int) -> float:
        """What those are more, of all prompt tokens."""
        return (tokens - self.cached) / self.prompt_tokens

    def is_worth(self, tokens: int) -> bool:
        return tokens - self.cached >= max(1, LEAST_GAIN * self.prompt_tokens)


def _spans(simulation: _Simulation, show: Show | None) -> list[Advice]:
    advice = []
    for span in movable_spans(simulation.prompts)[:_SPANS]:
        moved = [(name, span.moved(i, tokens)) for i, (name, tokens) in enumerate(simulation.prompts)]
        tokens = simulation.run(moved)
        if not simulation.is_worth(tokens):
            continue
        count, first = len(span.lengths), next(iter(span.lengths))
        saved = tokens - simulation.cached
        namespace = printable(simulation.prompts[first][0])
        where = f" of namespace {namespace}" if namespace else ""
        advice.append(
            Advice(
                kind="move_span",
                text=(
                    f"Move what differs at token {span.start:,} below the {span.run:,} tokens that follow it and are the same in "
                    f"{count:,} prompts{where}: saves {saved / count:,.0f} tokens a request."
                ),
                arithmetic=(
                    f"{simulation.what}, the span moved in {count:,} of them: {simulation.gain(tokens)}, / {count:,} = "
                    f"{saved / count:,.1f} a request."
                ),
                tokens_saved=saved,
                share=simulation.share(tokens),
                **({} if show is None else _texts(span, simulation.prompts, show)),
                details={
                    "position": span.start,
                    "length": span.lengths[first],
                    "run": span.run,
                    "requests": count,
                    "tokens_a_request": saved / count,
                },
            )
        )
    return advice


def _texts(span: MovableSpan, prompts: Sequence[Prompt], show: Show) -> dict[str, str]:
    def around(index: int) -> str:
        end = span.start + span.lengths[index]
        return show(prompts[index][1][max(span.start - AROUND, 0) : end + AROUND])

    first = next(iter(span.lengths))
    end = span.start + span.lengths[first]
    below = shortened(prompts[first][1][end : end + span.run], show)
    return {"ours": around(span.differing), "theirs": around(first), "below": below}


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
            share=simulation.share(tokens),
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
            share=simulation.share(tokens),
            details={"namespaces": len(names)},
        )
    ]
