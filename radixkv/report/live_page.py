"""The report on a running server, or on an engine in this process: what it counted, and what its newest requests tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from radixkv.report.curve_report import percent
from radixkv.report.miss_places import UNEXPLAINED
from radixkv.report.page import Cell, Page, Section, Table, counted
from radixkv.report.reasons import MEANING
from radixkv.report.report import Report
from radixkv.report.tokens_text import printable
from radixkv.report.workload import WorkloadReport
from radixkv.report.workload_page import parts, places, prefixes, waits, what_to_do


def live_page(report: Report) -> Page:
    recent = report.recent
    misses = Section("Where the misses went", tables=[_reasons(report)])
    namespaces = Section("By namespace", tables=[_namespaces(report)])
    if recent is None:
        sections = [Section("What the cache saved", [*_saved(report)]), misses, namespaces]
    else:
        advice = what_to_do(recent)
        sections = [
            Section("What the cache saved", [*_saved(report), _what_is_recent(report, recent)], _labelled(waits(recent), recent)),
            Section("Which prefixes earn it", tables=_labelled([prefixes(recent)], recent)),
            replace(misses, tables=[*misses.tables, *_labelled(places(recent), recent)]),
            replace(advice, sentences=[f"Computed from {_those(recent)}.", *advice.sentences]),
            namespaces,
            Section("Over time", tables=[parts("Since the start", "from (h:min:s)", report.over_time)]),
            Section("Hit rate over cache size", [f"What {_those(recent)} would hit, one after the other."], curve=recent.curve),
        ]
    return Page(
        title=f"Prefix cache report: {printable(report.model)}",
        summary=(
            f"The cache saved {percent(report.hit_rate)} of the prefill: {report.hit_tokens:,} of {report.prompt_tokens:,} prompt "
            f"tokens of {counted(report.requests, 'request')}."
        ),
        sections=sections,
    )


def _those(recent: WorkloadReport) -> str:
    return f"the last {counted(recent.saving.requests, 'request')}"


def _labelled(tables: Sequence[Table], recent: WorkloadReport) -> list[Table]:
    return [replace(table, caption=f"{table.caption}; of {_those(recent)}") for table in tables]


def _what_is_recent(report: Report, recent: WorkloadReport) -> str:
    saving = recent.saving
    return (
        f"Totals are since the start, {report.uptime_s:,.0f} s ago. The server remembers its newest requests' prompts only. "
        f"In {_those(recent)} there are {saving.prompt_tokens:,} prompt tokens, of which {saving.cached_tokens:,} were cached "
        f"({percent(saving.hit_rate)})."
    )


def _saved(report: Report) -> Iterator[str]:
    if report.seconds_saved is None or report.prefill_tokens_per_second is None:
        yield "Nothing was computed yet, so that the time saved can't be estimated."
    else:
        yield (
            f"About {report.seconds_saved:,.1f} s of prefill saved: {report.hit_tokens:,} tokens at "
            f"{report.prefill_tokens_per_second:,.0f} a second, as fast as the others were computed."
        )
    blocks = report.blocks
    yield (
        f"{blocks.total - blocks.free:,} of {blocks.total:,} blocks are in use: {blocks.cached:,} cached, {blocks.locked:,} locked "
        "by running requests."
    )


def _reasons(report: Report) -> Table:
    unexplained = report.prompt_tokens - report.hit_tokens - sum(report.missed_tokens.values())
    counts = {**report.missed_tokens, UNEXPLAINED: unexplained}
    missed = sorted(((count, reason) for reason, count in counts.items() if count), reverse=True)
    total = max(report.prompt_tokens, 1)
    return Table(
        "Computed prompt tokens by reason",
        ["reason", "tokens", "of prompt tokens", "meaning"],
        [[reason, count, count / total, MEANING.get(reason, "")] for count, reason in missed],
    )


def _namespaces(report: Report) -> Table:
    rows: list[list[Cell]] = [
        [printable(name) or "(default)", part.requests, part.prompt_tokens, part.hit_tokens, part.hit_rate]
        for name, part in sorted(report.namespaces.items(), key=lambda item: -item[1].prompt_tokens)
    ]
    headings = ["namespace", "requests", "prompt tokens", "hit tokens", "hit rate"]
    return Table("Namespaces, the largest first", headings, rows)
