"""What the cache has done for its users so far, from an engine's counters: as text and as JSON."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 20
"""Namespaces shown as text, those with the most prompt tokens; JSON has all that the engine tells apart."""


class NamespaceCounts(msgspec.Struct, frozen=True):
    requests: int
    prompt_tokens: int
    cached_tokens: int


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
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
    namespaces: dict[str, NamespaceCounts]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Hit rate so far, and what it saved.  ``print(report)`` gives text, ``msgspec.json.encode(report)`` JSON."""

    stats: EngineStats
    hit_tokens: int
    hit_rate: float
    """Share of all prompt tokens found in the cache."""
    namespace_hit_rates: dict[str, float]
    prefill_tokens_per_second: float | None
    """None before anything was computed."""
    seconds_saved: float | None
    """Estimate: the hit tokens at the mean speed of the prompt tokens that were computed."""

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Report:
        """Read ``Engine.stats()``.  Raises ``ValueError`` naming the field if it is something else."""
        try:
            s = msgspec.convert(stats, EngineStats)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an engine's statistics: {error}") from None
        speed = s.prefill_tokens_computed / s.prefill_seconds if s.prefill_seconds > 0 and s.prefill_tokens_computed else None
        return cls(
            stats=s,
            hit_tokens=s.cached_tokens,
            hit_rate=_share(s.cached_tokens, s.prompt_tokens),
            namespace_hit_rates={name: _share(n.cached_tokens, n.prompt_tokens) for name, n in s.namespaces.items()},
            prefill_tokens_per_second=speed,
            seconds_saved=s.cached_tokens / speed if speed else None,
        )

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Table

        s, speed = self.stats, self.prefill_tokens_per_second
        used = s.blocks_total - s.blocks_free
        mebibytes = used * s.block_size * s.kv_bytes_per_token / 2**20
        summary = Table.grid(padding=(0, 2))
        for name, value in (
            ("model", f"{escape(s.model)}, up {_duration(s.uptime_s)}"),
            ("requests", f"{s.requests:,}, {s.generated_tokens:,} tokens generated, {s.preemptions:,} preemptions"),
            ("prompt tokens", f"{s.prompt_tokens:,}"),
            ("hit tokens", f"{self.hit_tokens:,}"),
            ("hit rate", f"[bold]{self.hit_rate:.1%}[/]"),
            (
                "prefill",
                f"{s.prefill_tokens_computed:,} tokens computed in {_duration(s.prefill_seconds)}"
                + (f" ({speed:,.0f} a second)" if speed else ""),
            ),
            ("saved", f"about {_duration(self.seconds_saved)} of prefill" if self.seconds_saved is not None else "not known yet"),
            (
                "blocks",
                f"{used:,} of {s.blocks_total:,} in use ({_share(used, s.blocks_total):.0%}, {mebibytes:,.0f} MiB): "
                f"{s.blocks_cached:,} cached, {s.blocks_locked:,} locked by running requests",
            ),
        ):
            summary.add_row(f"[dim]{name}[/]", value)
        if len(s.namespaces) < 2:
            return summary
        table = Table("namespace", *(_right(name) for name in ("requests", "prompt tokens", "hit tokens", "hit rate")))
        for name, n in sorted(s.namespaces.items(), key=lambda item: -item[1].prompt_tokens)[:MAX_ROWS]:
            table.add_row(
                escape(name) or "[dim](default)[/]",
                f"{n.requests:,}", f"{n.prompt_tokens:,}", f"{n.cached_tokens:,}", f"{self.namespace_hit_rates[name]:.1%}",
            )  # fmt: skip
        hidden = len(s.namespaces) - MAX_ROWS
        return Group(summary, table, f"[dim]and {hidden:,} smaller namespaces[/]") if hidden > 0 else Group(summary, table)

    def __str__(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=110).print(self)
        return text.getvalue().rstrip("\n")


def fetch_report(url: str, *, timeout: float = 10.0) -> Report:
    """Ask the server at ``url`` (its base, as in ``http://127.0.0.1:8000``) for its counters.

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
        with urllib.request.urlopen(address, timeout=timeout) as response:  # noqa: S310 (scheme checked above)
            body = response.read()
    except urllib.error.HTTPError as error:
        raise ConnectionError(f"{address} answers {error.code} {error.reason}: is it a radixkv server?") from None
    except OSError as error:  # URLError and time-outs too
        raise ConnectionError(f"no server answers at {address}: {getattr(error, 'reason', error)}") from None
    try:
        return Report.from_stats(msgspec.json.decode(body))
    except (msgspec.DecodeError, ValueError) as error:
        raise ValueError(f"{address} is no radixkv server: {error}") from None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")
