"""Advice: what would gain hits, computed from the requests of the last minutes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.server.activity import Parted, RecentRequest

NEAR = 8
"""Positions this close together are one place: the digits of a time change at several."""
OFTEN = 3
"""Requests that part at a place before it is worth a word."""
PLACES = 4
"""Places looked into, those where the most tokens were computed."""
COMPARED = 4
"""Pairs of requests compared for one place."""
RUN = 16
"""Tokens in a row that must be equal to count as said again."""
SHARE = 0.05
"""Of the prompt tokens looked at, what a reason must cost to be worth a word."""


@dataclass(frozen=True, slots=True)
class Advice:
    title: str
    detail: str
    """The arithmetic behind it."""
    tokens: int
    """Prompt tokens of the requests looked at that it would have saved."""
    position: int | None = None
    ours: list[int] | None = None
    """Tokens around the place where the newest of those requests parts from an earlier one; and what that one has there."""
    theirs: list[int] | None = None


def advise(requests: Sequence[RecentRequest], stats: Mapping[str, Any]) -> list[Advice]:
    """The most useful first.  ``requests`` are the newest ones, oldest first; ``stats`` those of the engine, added up."""
    if not requests:
        return []
    if not stats.get("prefix_caching", True):
        return [Advice("Turn prefix caching on", "The server runs without it, so every prompt token is computed.", 0)]
    total = sum(request.prompt_tokens for request in requests)
    places = heapq.nlargest(PLACES, _places(requests), key=lambda place: sum(len(parted.tail) for parted in place))
    found = [_move_what_changes(place) for place in places]
    advice = [each for each in found if each is not None and each.tokens >= SHARE * total]
    block = stats["block_size"]
    lost = {
        reason: sum(request.missed.get(reason, 0) for request in requests) for reason in ("evicted", "partial_block", "in_flight")
    }
    if lost["evicted"] >= SHARE * total:
        advice.append(
            Advice(
                "Give the cache more room",
                f"{_share(lost['evicted'], total)} had been cached and were evicted since. The cache holds "
                f"{stats['blocks_total'] * block:,} tokens (--kv-cache-tokens).",
                lost["evicted"],
            )
        )
    if lost["partial_block"] >= SHARE * total and block > 1:
        advice.append(
            Advice(
                f"Try blocks smaller than {block} tokens",
                f"{_share(lost['partial_block'], total)} were computed again because they did not fill a block (--block-size).",
                lost["partial_block"],
            )
        )
    if lost["in_flight"] >= SHARE * total:
        advice.append(
            Advice(
                "Send the first of many equal prompts a moment before the others",
                f"{_share(lost['in_flight'], total)} were being computed by another request at that time.",
                lost["in_flight"],
            )
        )
    return sorted(advice, key=lambda each: each.tokens, reverse=True)


def _share(tokens: int, total: int) -> str:
    return f"{tokens:,} of the last {total:,} prompt tokens ({100 * tokens / total:.1f} %)"


def _places(requests: Sequence[RecentRequest]) -> list[list[Parted]]:
    """Where requests of one namespace part from earlier ones time and again."""
    parted = sorted(
        (request.namespace, request.parted.position, i) for i, request in enumerate(requests) if request.parted is not None
    )
    places: list[list[int]] = []
    last: tuple[str, int] | None = None
    for namespace, position, i in parted:
        if last is None or last[0] != namespace or position - last[1] > NEAR:
            places.append([])
        places[-1].append(i)
        last = namespace, position
    return [[p for i in sorted(place) if (p := requests[i].parted) is not None] for place in places if len(place) >= OFTEN]


def _move_what_changes(place: list[Parted]) -> Advice | None:
    """Where prompts go on alike behind a difference, they would share that if the difference came after it."""
    pairs = list(pairwise(place))[-COMPARED:]
    again = [_said_again(new.tail, old.tail) for old, new in pairs]
    mean = int(np.median(again))
    if mean < RUN:
        return None
    newest = place[-1]
    position = min(parted.position for parted in place)
    return Advice(
        f"Move what changes at token {position:,} behind what stays the same",
        f"{len(place)} requests part there from earlier ones, and then say again about {mean:,} tokens that the earlier ones had: "
        f"those could be cached, {mean:,} tokens a request.",
        mean * len(place),
        newest.position,
        newest.ours,
        newest.theirs,
    )


def _said_again(new: NDArray[np.int32], old: NDArray[np.int32]) -> int:
    """Tokens of ``new`` that are in runs of 16 or more that ``old`` has, too."""
    if min(len(new), len(old)) < RUN:
        return 0
    found = np.isin(_runs(new), _runs(old))
    return int(np.count_nonzero(np.convolve(found, np.ones(RUN, dtype=np.int64))))


def _runs(tokens: NDArray[np.int32]) -> NDArray[np.int64]:
    """A number for each run of 16 tokens, equal where the runs are, and else with next to no chance: ``[n - 15]``."""
    numbers = np.zeros(len(tokens) - RUN + 1, dtype=np.int64)
    for i in range(RUN):
        numbers = numbers * np.int64(6364136223846793005) + tokens[i : len(tokens) - RUN + 1 + i]
    return numbers
