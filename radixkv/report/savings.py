"""How much prefill the cache saved, in all, by namespace and over time: sums over the lines of a request log."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from radixkv.report.logged_request import LoggedRequest

PERCENTILES = (50, 90, 99)
HIT_SHARE = 0.5
"""A request counts as a hit where at least this share of its prompt was cached: nearly all share a token or two."""
TIME_ROWS = 24


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token of some requests."""

    requests: int
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits | None:
        if not seconds:
            return None
        p50, p90, p99 = (float(value) for value in np.percentile(seconds, PERCENTILES))
        return cls(requests=len(seconds), p50=p50, p90=p90, p99=p99)


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens are exact sums over requests that began."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    """``cached_tokens / prompt_tokens``."""
    computed_tokens_per_second: float | None
    """By how much each computed token delayed the first token (:func:`_speed`); None where that can't be told."""
    seconds_saved: float | None
    """Estimate: the cached tokens at that speed."""
    hit_waits: Waits | None
    """Of requests with at least half of their prompt cached."""
    miss_waits: Waits | None
    """Of the others."""

    @classmethod
    def of(cls, began: Sequence[LoggedRequest]) -> Saving:
        prompt = sum(line.prompt_tokens for line in began)
        cached = sum(line.cached_tokens or 0 for line in began)
        timed = [line for line in began if line.ttft_seconds is not None]
        speed = _speed(timed)
        waits: tuple[list[float], list[float]] = [], []
        for line in timed:
            assert line.ttft_seconds is not None
            waits[(line.cached_tokens or 0) >= HIT_SHARE * line.prompt_tokens].append(line.ttft_seconds)
        return cls(
            requests=len(began),
            prompt_tokens=prompt,
            cached_tokens=cached,
            hit_rate=cached / prompt if prompt else 0.0,
            computed_tokens_per_second=speed,
            seconds_saved=cached / speed if speed else None,
            hit_waits=Waits.of(waits[1]),
            miss_waits=Waits.of(waits[0]),
        )


def _speed(timed: Sequence[LoggedRequest]) -> float | None:
    """Tokens a second, from the slope of the time from the queue to the first token over the tokens computed (least squares).

    Not the one divided by the other: a step takes its time for one token, too, and hits compute few.
    """
    computed = np.array([line.prompt_tokens - (line.cached_tokens or 0) for line in timed], float)
    seconds = np.array([(line.ttft_seconds or 0) - (line.queued_seconds or 0) for line in timed], float)
    if len(timed) < 2 or np.ptp(computed) == 0:
        return None
    offsets = computed - computed.mean()
    slope = float((offsets * seconds).sum() / (offsets * offsets).sum())
    return 1 / slope if slope > 0 else None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The same of a part of the requests."""

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    missed: dict[str, int]

    @classmethod
    def of(cls, name: str, began: Sequence[LoggedRequest]) -> Part:
        saving = Saving.of(began)
        missed: dict[str, int] = {}
        for line in began:
            for reason, count in line.missed.items():
                missed[reason] = missed.get(reason, 0) + count
        return cls(
            name=name,
            requests=len(began),
            prompt_tokens=saving.prompt_tokens,
            cached_tokens=saving.cached_tokens,
            hit_rate=saving.hit_rate,
            missed=missed,
        )


def by_namespace(began: Sequence[LoggedRequest]) -> list[Part]:
    """One part a namespace, that with the most prompt tokens first."""
    groups: dict[str, list[LoggedRequest]] = {}
    for line in began:
        groups.setdefault(line.namespace, []).append(line)
    return sorted((Part.of(name, lines) for name, lines in groups.items()), key=lambda part: -part.prompt_tokens)


def over_time(began: Sequence[LoggedRequest]) -> list[Part]:
    """At most 24 spans of equal length, without those in which nothing came, named by when they begin after the first request."""
    if not began:
        return []
    first, last = min(line.time for line in began), max(line.time for line in began)
    span = _round_up((last - first) / TIME_ROWS)
    groups: dict[int, list[LoggedRequest]] = {}
    for line in began:
        groups.setdefault(int((line.time - first) // span), []).append(line)
    return [Part.of(clock(number * span), lines) for number, lines in sorted(groups.items())]


def _round_up(seconds: float) -> float:
    steps = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400)
    return next((float(step) for step in steps if step > seconds), 86400.0 * (1 + seconds // 86400))


def clock(seconds: float) -> str:
    """3661 as 1:01:01."""
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{left:02}"
