"""What the cache has done for its users so far, from an engine's counters: as text and as JSON."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from radixkv.report.savings import Part
from radixkv.report.tokens_text import printable
from radixkv.report.workload import WorkloadReport

if TYPE_CHECKING:
    from rich.console import RenderableType

TIMEOUT = 60.0
"""Seconds; of thousands of long prompts a server computes its report for some."""
MAX_ROWS = 20
"""Namespaces shown as text, those with the most prompt tokens; JSON has all that the engine tells apart."""


class _NamespaceCounts(msgspec.Struct, frozen=True):
    requests: int
    prompt_tokens: int
    cached_tokens: int


class _EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The part of ``Engine.stats()`` that the report reads."""

    model: str
    uptime_s: float
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    prefill_tokens_computed: int
    prefill_seconds: float
    block_size: int
    kv_bytes_per_token: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_locked: int
    namespaces: dict[str, _NamespaceCounts]
    missed_tokens: dict[str, int] = {}


class NamespaceReport(msgspec.Struct, frozen=True):
    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float


class BlockUse(msgspec.Struct, frozen=True):
    """Physical KV blocks now; ``cached`` ones can be evicted, ``locked`` ones are used by running requests."""

    total: int
    free: int
    cached: int
    locked: int
    bytes_each: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate so far, and what it saved.

    ``print(report)`` gives text, :meth:`to_dict` plain types, :meth:`rows` a table, and a notebook shows it as HTML.
    """

    model: str
    uptime_s: float
    requests: int
    prompt_tokens: int
    hit_tokens: int
    """Prompt tokens found in the cache."""
    hit_rate: float
    """Their share of all prompt tokens."""
    generated_tokens: int
    preemptions: int
    prefill_tokens_computed: int
    prefill_seconds: float
    prefill_tokens_per_second: float | None
    """None before anything was computed."""
    seconds_saved: float | None
    """Estimate: the hit tokens at the mean speed of the prompt tokens that were computed."""
    blocks: BlockUse
    namespaces: dict[str, NamespaceReport]
    missed_tokens: dict[str, int] = {}
    """The other prompt tokens by reason."""
    over_time: list[Part] = []
    """Of a server since its start; the spans are named by when they begin."""
    recent: WorkloadReport | None = None
    """Of a server, the report on the newest requests, as many as it remembers."""

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Report:
        """Read ``Engine.stats()``.  Raises ``ValueError`` naming the field if it is something else."""
        try:
            s = msgspec.convert(stats, _EngineStats)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an engine's statistics: {error}") from None
        speed = s.prefill_tokens_computed / s.prefill_seconds if s.prefill_seconds > 0 and s.prefill_tokens_computed else None
        return cls(
            model=s.model,
            uptime_s=s.uptime_s,
            requests=s.requests,
            prompt_tokens=s.prompt_tokens,
            hit_tokens=s.cached_tokens,
            hit_rate=_share(s.cached_tokens, s.prompt_tokens),
            generated_tokens=s.generated_tokens,
            preemptions=s.preemptions,
            prefill_tokens_computed=s.prefill_tokens_computed,
            prefill_seconds=s.prefill_seconds,
            prefill_tokens_per_second=speed,
            seconds_saved=s.cached_tokens / speed if speed else None,
            blocks=BlockUse(s.blocks_total, s.blocks_free, s.blocks_cached, s.blocks_locked, s.block_size * s.kv_bytes_per_token),
            namespaces={
                name: NamespaceReport(n.requests, n.prompt_tokens, n.cached_tokens, _share(n.cached_tokens, n.prompt_tokens))
                for name, n in s.namespaces.items()
            },
            missed_tokens=s.missed_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types; what ``--json`` prints."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]

    def rows(self) -> list[dict[str, str | int | float]]:
        """A row for each namespace: ``pandas.DataFrame(report.rows())``."""
        return [{"namespace": name, **msgspec.to_builtins(part)} for name, part in self.namespaces.items()]

    def _repr_html_(self) -> str:
        """In notebooks."""
        from radixkv.report.live_page import live_page
        from radixkv.report.page_html import html_fragment

        return html_fragment(live_page(self))

    def __rich__(self) -> RenderableType:
        if self.recent is not None:
            from radixkv.report.live_page import live_page
            from radixkv.report.page_text import rich_page

            return rich_page(live_page(self))
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Column, Table

        blocks, speed = self.blocks, self.prefill_tokens_per_second
        used = blocks.total - blocks.free
        mebibytes = used * blocks.bytes_each / 2**20
        summary = Table.grid(padding=(0, 2))
        for name, value in (
            ("model", f"{escape(printable(self.model))}, up {_duration(self.uptime_s)}"),
            ("requests", f"{self.requests:,}, {self.generated_tokens:,} tokens generated, {self.preemptions:,} preemptions"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("hit tokens", f"{self.hit_tokens:,}"),
            ("hit rate", f"[bold]{self.hit_rate:.1%}[/]"),
            ("missed", _by_size(self.missed_tokens)),
            (
                "prefill",
                f"{self.prefill_tokens_computed:,} tokens computed in {_duration(self.prefill_seconds)}"
                + (f" ({speed:,.0f} a second)" if speed else ""),
            ),
            ("saved", f"about {_duration(self.seconds_saved)} of prefill" if self.seconds_saved is not None else "not known yet"),
            (
                "blocks",
                f"{used:,} of {blocks.total:,} in use ({_share(used, blocks.total):.0%}, {mebibytes:,.0f} MiB): "
                f"{blocks.cached:,} cached, {blocks.locked:,} locked by running requests",
            ),
        ):
            summary.add_row(f"[dim]{name}[/]", value)
        if len(self.namespaces) < 2:
            return summary
        table = Table(
            "namespace", *(Column(name, justify="right") for name in ("requests", "prompt tokens", "hit tokens", "hit rate"))
        )
        for name, n in sorted(self.namespaces.items(), key=lambda item: -item[1].prompt_tokens)[:MAX_ROWS]:
            counts = (f"{count:,}" for count in (n.requests, n.prompt_tokens, n.hit_tokens))
            table.add_row(escape(printable(name)) or "[dim](default)[/]", *counts, f"{n.hit_rate:.1%}")
        hidden = len(self.namespaces) - MAX_ROWS
        return Group(summary, table, f"[dim]and {hidden:,} smaller namespaces[/]") if hidden > 0 else Group(summary, table)

    def __str__(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=110).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class _Recent(msgspec.Struct, frozen=True):
    """What ``GET /report/recent`` says."""

    since_start: dict[str, Any] = {}
    """Of the engine's counters those that the server keeps itself, which go on when a worker is replaced."""
    over_time: list[Part] = []
    recent: WorkloadReport | None = None


def fetch_report(url: str) -> Report:
    """Ask the server at ``url`` (its base, as in ``http://127.0.0.1:8000``) for its counters and its recent requests.

    Raises
    ------
    ConnectionError
        Nothing answers there, or not with success.
    ValueError
        ``url`` isn't an http(s) URL, or what answers isn't a radixkv server.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"URL must begin with http:// or https://, got {url!r}")
    address = url.rstrip("/").removesuffix("/v1") + "/report"
    try:
        stats = msgspec.json.decode(_get(address), type=dict[str, Any])
        Report.from_stats(stats)  # something else that answers there is told by this, before it is asked for more
        recent = msgspec.json.decode(_get(f"{address}/recent"), type=_Recent)
        report = Report.from_stats(stats | recent.since_start)
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{address} is no radixkv server of this version: {error}") from None
    return msgspec.structs.replace(report, over_time=recent.over_time, recent=recent.recent)


def _get(address: str) -> bytes:
    request = urllib.request.Request(address)  # noqa: S310 (scheme checked by the caller)
    if keys := os.environ.get("RADIXKV_API_KEY", "").split():
        request.add_unredirected_header("Authorization", f"Bearer {keys[0]}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:  # noqa: S310 (scheme checked by the caller)
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise ConnectionError(f"{address} wants an API key without a namespace: set RADIXKV_API_KEY") from None
        if error.code == 403:
            raise ConnectionError(f"{address} refuses: {_message(error)}") from None
        raise ConnectionError(f"{address} answers {error.code} {error.reason}: is it a radixkv server?") from None
    except OSError as error:  # URLError and time-outs too
        raise ConnectionError(f"no server answers at {address}: {getattr(error, 'reason', error)}") from None


def _message(error: urllib.error.HTTPError) -> str:
    """What a radixkv server says in an error, or else the status."""
    try:
        return str(msgspec.json.decode(error.read())["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return error.reason


def _by_size(missed: Mapping[str, int]) -> str:
    words = [f"{count:,} {reason}" for reason, count in sorted(missed.items(), key=lambda item: -item[1]) if count]
    return ", ".join(words) or "-"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
