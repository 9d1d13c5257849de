"""Spans that keep prompts apart although they go on alike behind them: dates, ids, names at the top of a system prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.tokens import common_prefix
from radixkv.report.simulation import Prompt

Tokens = NDArray[np.int32]

LONGEST_SPAN = 64
"""Tokens in which prompts may differ before they are alike again."""
LEAST_RUN = 16
"""Tokens in which they must be alike behind it."""
LEAST_PROMPTS = 3
"""That must have a span before it is worth a word: two may differ anywhere by chance."""
_REFERENCES = 16
"""Prompts of a namespace that a later one is compared with."""


@dataclass(frozen=True, slots=True)
class MovableSpan:
    """In :attr:`lengths` prompts, the tokens from ``start`` on differ; the ``run`` tokens behind are the same in all of them."""

    start: int
    run: int
    lengths: dict[int, int]
    """Of the span, by the prompt's index; prompts that happen to have it in common are among them."""
    differing: int
    """Index of the newest prompt that has the span otherwise than the first."""

    def moved(self, index: int, tokens: Tokens) -> Tokens:
        """The prompt with the span behind the run."""
        if index not in self.lengths:
            return tokens
        end = self.start + self.lengths[index]
        return np.concatenate(
            (tokens[: self.start], tokens[end : end + self.run], tokens[self.start : end], tokens[end + self.run :])
        )


@dataclass(slots=True)
class _Family:
    """Prompts that are alike but for a span each, compared with the first of them."""

    index: int
    tokens: Tokens
    members: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Index; where it parts from the first; tokens of its span, of the first's, and of the run behind."""
    longer: list[tuple[int, int]] = field(default_factory=list)
    """Index and common prefix of those that go on otherwise without being alike again."""


def movable_spans(prompts: Sequence[Prompt]) -> list[MovableSpan]:
    """At most one for each family of prompts, those with the most tokens behind them first.  O(prompts * prompt length)."""
    families: dict[str, list[_Family]] = {}
    for index, (namespace, tokens) in enumerate(prompts):
        known = families.setdefault(namespace, [])
        for family in known:
            shared = common_prefix(family.tokens, tokens)
            if shared >= LEAST_RUN and (shared == min(len(tokens), len(family.tokens))):
                family.longer.append((index, shared))
                break
            found = _alike_again(tokens, family.tokens, shared)
            if found is not None:
                family.members.append((index, shared, *found))
                break
            if shared >= LEAST_RUN + LONGEST_SPAN:
                family.longer.append((index, shared))
        else:
            if len(known) < _REFERENCES:
                known.append(_Family(index, tokens))
    spans = [span for known in families.values() for family in known if (span := _span(family)) is not None]
    return sorted(spans, key=lambda span: -span.run * len(span.lengths))


def _alike_again(ours: Tokens, theirs: Tokens, start: int) -> tuple[int, int, int] | None:
    """Tokens of both spans from ``start`` on, the fewest in all, and of the run behind that both share; None if it is short."""
    window = 4 * LEAST_RUN
    mine, other = (tokens[start : start + LONGEST_SPAN + LEAST_RUN].tobytes() for tokens in (ours, theirs))
    at: dict[bytes, int] = {}
    for offset in range(min(len(mine) - window, 4 * LONGEST_SPAN), -1, -4):
        at[mine[offset : offset + window]] = offset // 4
    best: tuple[int, int] | None = None
    for offset in range(0, min(len(other) - window, 4 * LONGEST_SPAN) + 1, 4):
        length = at.get(other[offset : offset + window])
        if length is not None and (best is None or length + offset // 4 < sum(best)):
            best = length, offset // 4
    if best is None:
        return None
    rest = np.ascontiguousarray(theirs[start + best[1] :])
    return *best, common_prefix(rest, np.ascontiguousarray(ours[start + best[0] :]))


def _span(family: _Family) -> MovableSpan | None:
    """The stretch of the first prompt in which most of the family differ from it, widened to where all of these do."""
    if not family.members:
        return None
    stretches: list[list[int]] = []
    for _, shared, _, theirs, _ in sorted(family.members, key=lambda member: member[1]):
        if stretches and shared <= stretches[-1][1]:
            stretches[-1][1] = max(stretches[-1][1], shared + theirs)
        else:
            stretches.append([shared, shared + theirs])

    def members_of(start: int, end: int) -> list[tuple[int, int, int, int, int]]:
        inside = [m for m in family.members if start <= m[1] <= end and m[1] + m[3] <= end]
        return [m for m in inside if m[1] + m[3] + m[4] - end >= LEAST_RUN]

    start, end = max(stretches, key=lambda stretch: len(members_of(*stretch)))
    inside = members_of(start, end)
    if not inside:
        return None
    run = min(shared + theirs + run - end for _, shared, _, theirs, run in inside)
    lengths = {family.index: end - start}
    lengths |= {index: end - start + ours - theirs for index, _, ours, theirs, _ in inside}
    lengths |= {index: end - start for index, shared, *_ in (*family.members, *family.longer) if shared >= end + run}
    return MovableSpan(start, run, lengths, inside[-1][0]) if len(lengths) >= LEAST_PROMPTS else None
