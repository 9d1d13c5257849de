"""The report on a workload, from a request log or a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from radixkv.cache.tokens import Tokens, common_prefix
from radixkv.report.advice import Advice, advise
from radixkv.report.curve_report import CurveReport
from radixkv.report.kv_size import KVSize
from radixkv.report.logged_request import LoggedRequest
from radixkv.report.miss_places import MissPlace, MissReasonPlaces, miss_places
from radixkv.report.savings import Part, Saving, by_namespace, over_time
from radixkv.report.shared_prefixes import SharedPrefix, shared_prefixes
from radixkv.report.simulation import as_logged
from radixkv.report.stack_distance import hit_curve
from radixkv.report.tokens_text import Show, as_ids, shortened
from radixkv.report.trace import Progress, TraceRequest, as_trace

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_PREFIXES = 20
MOST_PLACES = 5
_AROUND = 12
"""Tokens shown on each side of where prompts part."""


class PrefixRow(msgspec.Struct, frozen=True, kw_only=True):
    prefix: SharedPrefix
    request_id: str
    """Of the first that has it."""
    text: str | None
    """None where the log has no tokens."""


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    namespace: str
    position: int
    requests: int
    tokens: int
    request_id: str
    ours: str | None
    """Around the place; None where the log has no tokens."""
    theirs: str | None
    """The same of the earlier prompt that has most in common; None where there is none that goes on otherwise."""


class WorkloadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache did for a workload.  All tokens are exact sums over its lines, but in ``advice``, ``curve`` and seconds."""

    source: str
    simulated: bool
    """What was cached is computed, not recorded: the source is a trace."""
    lines: int
    not_begun: int
    """Requests that ended before their prompts were looked up: in no other number."""
    errors: dict[str, int]
    dropped: int
    """Lines that the log lacks."""
    block_size: int
    capacity_blocks: int | None
    """Today's size; None is unknown, or unbounded in a simulation."""
    kv_bytes_per_token: int | None
    saving: Saving
    prefixes: list[PrefixRow]
    misses: list[MissReasonPlaces]
    places: list[PlaceRow]
    advice: list[Advice]
    namespaces: list[Part]
    over_time: list[Part]
    curve: CurveReport

    @classmethod
    def of(
        cls,
        records: Iterable[TraceRequest | LoggedRequest],
        source: str,
        *,
        capacity_blocks: int | None = None,
        kv: KVSize | None = None,
        show: Show | None = as_ids,
        progress: Progress | None = None,
    ) -> WorkloadReport:
        """Read a workload of :func:`~radixkv.report.trace.read_records`.

        ``capacity_blocks`` is today's size of the cache where the log doesn't say it, ``kv`` the size of K/V likewise, ``show``
        turns tokens into text; with None none are shown, but advice is computed from them all the same.

        Raises ``ValueError`` where there are no requests.
        """
        lines, simulated = _as_lines(records, capacity_blocks, progress)
        began = [line for line in lines if line.cached_tokens is not None]
        if not began:
            raise ValueError(f"{source} has no requests to report on")
        last = began[-1]
        capacity = capacity_blocks if capacity_blocks is not None else last.cache_blocks
        if kv is None and last.kv_bytes_per_token is not None:
            kv = KVSize(model=last.model, dtype="the server's type", bytes_per_token=last.kv_bytes_per_token)
        curve = hit_curve([as_trace(line) for line in began])
        misses = miss_places(began, MOST_PLACES)
        prompts = [_tokens(line) for line in began]
        texts = _Texts(began, prompts, show)
        return cls(
            source=source,
            simulated=simulated,
            lines=len(lines),
            not_begun=len(lines) - len(began),
            errors=dict(Counter(line.error for line in lines if line.error is not None)),
            dropped=sum(line.dropped for line in lines),
            block_size=last.block_size,
            capacity_blocks=capacity,
            kv_bytes_per_token=None if kv is None else kv.bytes_per_token,
            saving=Saving.of(began),
            prefixes=[texts.prefix(prefix) for prefix in shared_prefixes(began, MOST_PREFIXES)],
            misses=misses,
            places=[texts.place(miss.reason, place) for miss in misses for place in miss.places],
            advice=advise(began, prompts, curve, capacity, None if kv is None else kv.bytes_per_token, show),
            namespaces=by_namespace(began),
            over_time=over_time(began),
            curve=CurveReport.from_curve(curve, kv, today_blocks=capacity),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain types; what ``--json`` prints."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each namespace, missed tokens by reason among its columns: ``pandas.DataFrame(report.rows())``."""
        rows = []
        for part in self.namespaces:
            row = msgspec.to_builtins(part)
            missed = row.pop("missed")
            rows.append(
                {
                    "namespace": row.pop("name"),
                    **row,
                    **{f"missed_{miss.reason}": missed.get(miss.reason, 0) for miss in self.misses},
                }
            )
        return rows

    def _repr_html_(self) -> str:
        """In notebooks."""
        from radixkv.report.page_html import html_fragment
        from radixkv.report.workload_page import workload_page

        return html_fragment(workload_page(self))

    def __rich__(self) -> RenderableType:
        from radixkv.report.page_text import rich_page
        from radixkv.report.workload_page import workload_page

        return rich_page(workload_page(self))


def _as_lines(
    records: Iterable[TraceRequest | LoggedRequest], capacity_blocks: int | None, progress: Progress | None
) -> tuple[list[LoggedRequest], bool]:
    """In the order of arrival, and whether what was cached had to be simulated."""
    traced: list[TraceRequest] = []
    logged: list[LoggedRequest] = []
    for record in records:
        if isinstance(record, TraceRequest):
            traced.append(record)
        else:
            logged.append(record)
    if traced:
        return as_logged(traced, capacity_blocks, progress), True
    return sorted(logged, key=lambda line: line.time), False


def _tokens(line: LoggedRequest) -> Tokens | None:
    if line.token_ids is msgspec.UNSET:
        return None
    tokens = np.asarray(line.token_ids, np.int32)
    tokens.flags.writeable = False
    return tokens


class _Texts:
    """Rows of the report with the prompts' words in them, where these are known and may be seen."""

    def __init__(self, began: Sequence[LoggedRequest], prompts: Sequence[Tokens | None], show: Show | None) -> None:
        self._began = began
        self._prompts = prompts if show is not None else [None] * len(prompts)
        self._show = show or as_ids

    def prefix(self, prefix: SharedPrefix) -> PrefixRow:
        tokens = self._prompts[prefix.example]
        text = None if tokens is None else shortened(tokens[prefix.start : prefix.end], self._show)
        return PrefixRow(prefix=prefix, request_id=self._began[prefix.example].request_id, text=text)

    def place(self, reason: str, place: MissPlace) -> PlaceRow:
        tokens, theirs = self._prompts[place.example], None
        if tokens is not None and reason == "diverged":
            theirs = self._nearest(tokens, place.example)
        return PlaceRow(
            reason=reason,
            namespace=place.namespace,
            position=place.position,
            requests=place.requests,
            tokens=place.tokens,
            request_id=self._began[place.example].request_id,
            ours=self._around(tokens, place.position),
            theirs=self._around(theirs, place.position),
        )

    def _around(self, tokens: Tokens | None, position: int) -> str | None:
        return None if tokens is None else self._show(tokens[max(position - _AROUND, 0) : position + _AROUND])

    def _nearest(self, tokens: Tokens, index: int) -> Tokens | None:
        """The prompt of the namespace before that at ``index`` that has most in common with it and then goes on otherwise."""
        best, longest = None, 0
        for line, other in zip(self._began[:index], self._prompts[:index], strict=True):
            if other is None or line.namespace != self._began[index].namespace:
                continue
            shared = common_prefix(other, tokens)
            if longest < shared < min(len(other), len(tokens)):
                best, longest = other, shared
        return best
