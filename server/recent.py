"""What the newest requests tell: the same report that a request log gets, made in a thread from what the server remembers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from radixkv.report.advice import Advice
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.other_namespaces import with_other_namespaces
from radixkv.report.page import counted
from radixkv.report.tokens_text import Show, Tokens, printable
from radixkv.report.workload import WorkloadReport
from radixkv.server.activity import Activity, RecentRequest
from radixkv.server.frontend import Frontend

ADVISED = 100
"""Sequences that the live page's advice is computed from, the newest ones."""
BUSY_SHARE = 0.005
"""Of the time, what is spent on advice for a page that is open."""


class Recent:
    """Belongs to one event loop, which it keeps free."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._lock = asyncio.Lock()
        self._advice: list[Advice] = []
        self._advised_at = 0
        """Requests that there had been then."""
        self._next = 0.0

    async def report(self, stats: Mapping[str, Any]) -> WorkloadReport | None:
        """On all requests that are remembered; None where there are none.  ``stats`` are the workers', added up."""
        async with self._lock:
            return await self._of(list(self._frontend.activity.requests), stats)

    async def advice(self, stats: Mapping[str, Any]) -> list[Advice]:
        """From the last 100 requests, or from a little earlier ones where that takes long or a report is being made."""
        if self._lock.locked():
            return self._advice
        async with self._lock:
            num_requests, started = self._frontend.activity.num_requests, time.monotonic()
            if num_requests != self._advised_at and started >= self._next:
                newest = list(islice(reversed(self._frontend.activity.requests), ADVISED))[::-1]
                report = await self._of(newest, stats)
                self._advice = [] if report is None else report.advice
                self._advised_at = num_requests
                now = time.monotonic()
                self._next = now + (now - started) / BUSY_SHARE
            return self._advice

    async def _of(self, requests: Sequence[RecentRequest], stats: Mapping[str, Any]) -> WorkloadReport | None:
        if not requests:
            return None
        return await asyncio.to_thread(_report, requests, stats, self._frontend.model, self._show)

    @property
    def _show(self) -> Show | None:
        """What turns tokens into text, where that may be seen."""
        return self._text if self._frontend.show_prompts else None

    def _text(self, tokens: Tokens) -> str:
        return f"“{printable(self._frontend.prompt_text([int(id) for id in tokens]))}”"


def since_start(activity: Activity, stats: Mapping[str, Any]) -> dict[str, Any]:
    """What ``/metrics`` counts, under the names of ``Engine.stats()``, whose counters are those of workers that may be young."""
    missed = dict(activity.missed)
    of_workers: Mapping[str, int] = stats.get("missed_tokens", {})
    none: Mapping[str, int] = {}
    elsewhere = of_workers.get("namespace", 0)
    # A request's own reasons don't tell of other namespaces, and the workers' do.  As they count requests, too, that have no first
    # token or never got one, what they have moved from a reason can't be seen where that is more: then from whatever there is.
    for theirs in (of_workers, none):
        for reason in ("new", "diverged"):
            moved = min(elsewhere, max(0, missed.get(reason, 0) - theirs.get(reason, 0)))
            if moved:
                missed[reason] -= moved
                missed["namespace"] = missed.get("namespace", 0) + moved
                elsewhere -= moved
    return activity.totals | {
        "requests": activity.num_requests,
        "missed_tokens": missed,
        "namespaces": {
            name: {"requests": counts.requests, "prompt_tokens": counts.prompt_tokens, "cached_tokens": counts.cached_tokens}
            for name, counts in activity.namespaces.namespaces().items()
        },
    }


def _report(requests: Sequence[RecentRequest], stats: Mapping[str, Any], model: str, show: Show | None) -> WorkloadReport:
    lines = with_other_namespaces(as_logged(requests, stats, model))
    return WorkloadReport.of(lines, f"the last {counted(len(lines), 'request')}", show=show)


def as_logged(requests: Sequence[RecentRequest], stats: Mapping[str, Any], model: str) -> list[LoggedRequest]:
    """As a request log has them, in the order of their first tokens; blocks are numbered alike in all namespaces."""
    size = stats["block_size"]
    numbers: dict[tuple[int, bytes], int] = {}
    logged = []
    for request in requests:
        tokens, number = memoryview(request.prompt), -1
        hashes: list[int | str] = []
        for start in range(0, len(tokens) - size + 1, size):
            number = numbers.setdefault((number, tokens[start : start + size].tobytes()), len(numbers))
            hashes.append(number)
        logged.append(
            LoggedRequest(
                time=request.time - request.first_token_seconds,
                request_id=request.id,
                model=model,
                namespace=request.namespace,
                prompt_tokens=request.prompt_tokens,
                cached_tokens=request.cached_tokens,
                missed=request.missed,
                output_tokens=request.output_tokens,
                finish_reason=request.finish_reason,
                ttft_seconds=request.first_token_seconds,
                block_size=size,
                cache_blocks=stats["blocks_total"],
                kv_bytes_per_token=stats["kv_bytes_per_token"],
                block_hashes=hashes,
                token_ids=request.prompt,
            )
        )
    return logged
