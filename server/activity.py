"""Activity: what the server has done in the last minutes, for the live page.

Requests write into the second they happen in, so it costs a counter each and nothing runs while nothing happens.  What only the
workers know (queues, blocks) is there for the seconds in which somebody looked.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.cache.stats import Recorder
from radixkv.server.timeline import Timeline

SECONDS = 300
"""How far back the series go."""
REQUESTS = 2000
"""Sequences remembered, the newest ones."""
PROMPT_TOKENS = 4 * 2**20
"""Of those sequences' prompts: where they are long, fewer sequences are remembered.  4 bytes each."""
GAUGES = ("running", "waiting", "blocks_free", "blocks_cached", "blocks_locked")


@dataclass(slots=True)
class Second:
    """Sums over one second, and what the workers said of themselves at its end; None where nobody asked."""

    at: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_tokens: int = 0
    """Sequences that got one."""
    first_token_seconds: float = 0.0
    """Summed over those."""
    gauges: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Parted:
    """Where a prompt left what the cache knew of earlier ones, and what both say there."""

    position: int
    ours: list[int]
    theirs: list[int]


@dataclass(slots=True)
class RecentRequest:
    """A sequence that has got its first token."""

    id: str
    namespace: str
    time: float
    """Of its first token, in seconds since the epoch."""
    prompt: array[int]
    cached_tokens: int
    missed: dict[str, int]
    first_token_seconds: float
    parted: Parted | None
    output_tokens: int = 0
    finish_reason: str | None = None
    """None while it runs, ``abort`` or ``error`` where it did not come to its end."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)


class Activity:
    """Sums since the start and by second, and the newest sequences.  All methods belong to one event loop.

    All are O(1), but for :meth:`began`, which copies the prompt, and :meth:`series`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[Second] = deque(maxlen=SECONDS)
        self._started = clock()
        self.requests: deque[RecentRequest] = deque()
        """The newest, as many as may be remembered, the oldest first."""
        self._remembered_tokens = 0
        self.num_requests = 0
        self.totals: Counter[str] = Counter(prompt_tokens=0, cached_tokens=0, generated_tokens=0)
        """Tokens since the start."""
        self.missed: Counter[str] = Counter()
        """Prompt tokens since the start that were computed, by reason."""
        self.namespaces = Recorder()
        self.timeline = Timeline()

    def _now(self) -> Second:
        at = int(self._clock())
        if not self._seconds or self._seconds[-1].at != at:
            self._seconds.append(Second(at))
        return self._seconds[-1]

    def began(
        self,
        id: str,
        namespace: str,
        prompt: Sequence[int],
        cached_tokens: int,
        missed: Mapping[str, int],
        parting: tuple[int, list[int], list[int]] | None,
        seconds: float,
    ) -> RecentRequest:
        """A sequence has got its first token, so many seconds after its arrival."""
        second = self._now()
        second.prompt_tokens += len(prompt)
        second.cached_tokens += cached_tokens
        second.first_tokens += 1
        second.first_token_seconds += seconds
        self.totals["prompt_tokens"] += len(prompt)
        self.totals["cached_tokens"] += cached_tokens
        self.missed.update(missed)
        self.namespaces.record(namespace, len(prompt), cached_tokens, None)
        self.timeline.add(self._clock() - self._started, len(prompt), cached_tokens, missed)
        parted = None if parting is None else Parted(*parting)
        request = RecentRequest(id, namespace, time.time(), array("i", prompt), cached_tokens, dict(missed), seconds, parted)
        self.num_requests += 1
        self.requests.append(request)
        self._remembered_tokens += len(prompt)
        while len(self.requests) > REQUESTS or self._remembered_tokens > PROMPT_TOKENS:
            self._remembered_tokens -= self.requests.popleft().prompt_tokens
        return request

    def generated(self, count: int) -> None:
        """So many tokens were put out."""
        self._now().generated_tokens += count
        self.totals["generated_tokens"] += count

    def looked(self, stats: Mapping[str, Any]) -> None:
        """This is what the workers say of themselves now, added up."""
        self._now().gauges = {name: stats[name] for name in GAUGES}

    def series(self) -> dict[str, list[float | None]]:
        """A value for each of the last 300 seconds, the oldest first, the running one last; None where there is none."""
        now = int(self._clock())
        known = {second.at: second for second in self._seconds}
        seconds = [known.get(at) or Second(at) for at in range(now - SECONDS + 1, now + 1)]
        sums = ("prompt_tokens", "cached_tokens", "generated_tokens", "first_tokens", "first_token_seconds")
        return {name: [getattr(second, name) for second in seconds] for name in sums} | {
            name: [second.gauges.get(name) for second in seconds] for name in GAUGES
        }


_PUBLIC = (
    "id", "namespace", "time", "prompt_tokens", "cached_tokens", "missed", "first_token_seconds", "output_tokens", "finish_reason",
)  # fmt: skip


def public(request: RecentRequest, text: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """What the page gets of a sequence; with prompts' text only where there is something to say it with."""
    fields: dict[str, Any] = {name: getattr(request, name) for name in _PUBLIC}
    fields["computed_tokens"] = request.prompt_tokens - request.cached_tokens
    parted = request.parted
    if parted is not None:
        fields["position"] = parted.position
        if text is not None:
            fields |= {"ours": text(parted.ours), "theirs": text(parted.theirs)}
    return fields
