"""Where the misses went: by reason, and of each reason the places in prompts where most tokens were missed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from radixkv.report.logged_request import LoggedRequest
from radixkv.report.prefix_paths import PrefixPaths
from radixkv.report.trace import as_trace

ORDER = ("logprobs", "in_flight", "evicted", "partial_block", "namespace", "diverged", "new", "last_token")
"""Along a prompt, behind what was cached."""
UNEXPLAINED = "unexplained"
"""Missed by nobody knows why: a server without a prefix cache."""


class MissPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that share a prefix and were missed for one reason from there on."""

    namespace: str
    position: int
    """Tokens of the example before the first missed one."""
    requests: int
    tokens: int
    """Missed for this reason."""
    example: int
    """Index of the request that missed most."""


class MissReasonPlaces(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    tokens: int
    share: float
    """Of all prompt tokens."""
    requests: int
    """That missed anything for this reason."""
    places: list[MissPlace]
    """The worst."""


def miss_places(began: Sequence[LoggedRequest], most: int) -> list[MissReasonPlaces]:
    """Every reason that occurs, the one with most tokens first, with its ``most`` worst places.

    The tokens of all reasons are exactly the prompt tokens that were not cached.
    """
    paths = PrefixPaths([as_trace(line) for line in began])
    tokens: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    places: dict[str, dict[tuple[str, int], list[tuple[int, int, int]]]] = {}
    for index, (line, path) in enumerate(zip(began, paths, strict=True)):
        position = line.cached_tokens or 0
        missed = {
            reason: line.missed[reason] for reason in (*ORDER, *sorted(line.missed.keys() - set(ORDER))) if reason in line.missed
        }
        missed[UNEXPLAINED] = line.prompt_tokens - position - sum(missed.values())
        for reason, count in missed.items():
            if not count:
                continue
            tokens[reason] += count
            requests[reason] += 1
            block = min(position // paths.block_size, len(path))
            key = (line.namespace, int(path[block - 1]) if block else -1)
            places.setdefault(reason, {}).setdefault(key, []).append((count, position, index))
            position += count
    total = sum(line.prompt_tokens for line in began)
    return [
        MissReasonPlaces(
            reason=reason,
            tokens=count,
            share=count / total,
            requests=requests[reason],
            places=sorted(
                (_place(key[0], found) for key, found in places[reason].items()), key=lambda place: (-place.tokens, place.example)
            )[:most],
        )
        for reason, count in tokens.most_common()
    ]


def _place(namespace: str, found: list[tuple[int, int, int]]) -> MissPlace:
    _, position, example = max(found, key=lambda miss: (miss[0], -miss[2]))
    return MissPlace(
        namespace=namespace,
        position=position,
        requests=len(found),
        tokens=sum(count for count, _, _ in found),
        example=example,
    )
