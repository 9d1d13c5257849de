"""The report on a workload, in the order in which people ask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from radixkv.report.advice import Advice
from radixkv.report.curve_report import percent
from radixkv.report.page import Cell, Page, Section, Table, counted
from radixkv.report.reasons import MEANING
from radixkv.report.savings import Part, Waits
from radixkv.report.tokens_text import printable
from radixkv.report.workload import WorkloadReport

MOST_NAMESPACES = 1000
"""Of a log that has a salt for each user there may be as many as requests."""
_ID_LENGTH = 12


def workload_page(report: WorkloadReport) -> Page:
    saving = report.saving
    what = "a simulated cache" if report.simulated else "the cache"
    return Page(
        title=f"Prefix cache report: {report.source}",
        summary=(
            f"{what.capitalize()} saved {percent(saving.hit_rate)} of the prefill: {saving.cached_tokens:,} of "
            f"{saving.prompt_tokens:,} prompt tokens of {counted(saving.requests, 'request')}."
        ),
        sections=[
            Section("What the cache saved", [*_saved(report)], waits(report)),
            Section("Which prefixes earn it", tables=[prefixes(report)]),
            Section("Where the misses went", tables=[_reasons(report), *places(report)]),
            what_to_do(report),
            Section("By namespace", tables=[_namespaces(report)]),
            Section("Over time", tables=[parts("By arrival", "from (h:min:s)", report.over_time)]),
            Section("Hit rate over cache size", curve=report.curve),
        ],
    )


def _saved(report: WorkloadReport) -> Iterator[str]:
    saving, capacity = report.saving, report.capacity_blocks
    size = "of unknown size" if capacity is None else f"of {capacity:,} blocks"
    if report.simulated:
        size = "that never evicts" if capacity is None else f"of {capacity:,} blocks, LRU"
        yield f"A trace says nothing of hits: this is what a cache {size} with blocks of {report.block_size:,} tokens would find."
    else:
        yield f"The server has a cache {size} with blocks of {report.block_size:,} tokens."
    if saving.seconds_saved is not None and saving.computed_tokens_per_second is not None:
        yield (
            f"About {saving.seconds_saved:,.1f} s of waiting for prefill saved, all requests added up: {saving.cached_tokens:,} "
            f"tokens at {saving.computed_tokens_per_second:,.0f} a second, which is by how much each computed token delayed its "
            "request's first one (least squares)."
        )
    if report.not_begun:
        yield f"Ended before a first token, and in no other number: {counted(report.not_begun, 'request')}."
    if report.errors:
        yield "Not finished: " + ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.errors.items())) + "."
    if report.dropped:
        yield f"Missing from the log, which could not be written fast enough: {counted(report.dropped, 'request')}."


def waits(report: WorkloadReport) -> list[Table]:
    def row(name: str, those: Waits) -> list[str | int]:
        return [name, those.requests, *(f"{1000 * seconds:,.1f}" for seconds in (those.p50, those.p90, those.p99))]

    rows = [
        row(name, those)
        for name, those in (
            ("hit: half of the prompt or more was cached", report.saving.hit_waits),
            ("miss: less was", report.saving.miss_waits),
        )
        if those is not None
    ]
    headings = ["requests that", "requests", "50 %", "90 %", "99 %"]
    return [Table("Time to first token in ms, percentiles", headings, rows)] if rows else []


def prefixes(report: WorkloadReport) -> Table:
    texts = any(row.text is not None for row in report.prefixes)
    rows: list[list[Cell]] = []
    for row in report.prefixes:
        prefix = row.prefix
        share = prefix.tokens_saved / max(report.saving.cached_tokens, 1)
        what = [row.text or ""] if texts else []
        rows.append(
            [f"{prefix.start:,} to {prefix.end:,}", prefix.requests, prefix.tokens_saved, share, _name(prefix.namespace), *what]
        )
    return Table(
        "Parts of prompts that requests share, by the cached tokens they account for",
        ["tokens", "requests", "tokens saved", "of all saved", "namespace", *(["text"] if texts else [])],
        rows,
    )


def _reasons(report: WorkloadReport) -> Table:
    return Table(
        "Computed prompt tokens by reason",
        ["reason", "tokens", "of prompt tokens", "requests", "meaning"],
        [[miss.reason, miss.tokens, miss.share, miss.requests, MEANING.get(miss.reason, "")] for miss in report.misses],
    )


def places(report: WorkloadReport) -> list[Table]:
    texts = any(row.ours is not None for row in report.places)
    rows: list[list[Cell]] = []
    for row in report.places:
        if row.reason == "last_token":
            continue
        what = [row.ours or "", row.theirs or ""] if texts else []
        rows.append([row.reason, row.position, row.requests, row.tokens, _name(row.namespace), _short(row.request_id), *what])
    headings = ["reason", "at token", "requests", "tokens missed", "namespace", "for example"]
    caption = "Worst places: requests that share what is before a position and miss from there on"
    return [Table(caption, headings + (["here", "an earlier prompt"] if texts else []), rows)] if rows else []


def what_to_do(report: WorkloadReport) -> Section:
    nothing = "Nothing that could be computed here gains 0.1 % of the prompt tokens."
    return Section(
        "What to do", [] if report.advice else [nothing], points=[(advice.text, _fine_print(advice)) for advice in report.advice]
    )


def _fine_print(advice: Advice) -> str:
    if advice.ours is None:
        return advice.arithmetic
    return f"{advice.arithmetic} Earlier: {advice.theirs}. Later: {advice.ours}. It should come below {advice.below}."


def parts(caption: str, heading: str, those: Sequence[Part]) -> Table:
    rows: list[list[Cell]] = []
    for part in those:
        most = max(part.missed.items(), key=lambda item: item[1], default=None)
        why = "" if most is None else f"{most[0]}: {most[1]:,}"
        rows.append([_name(part.name), part.requests, part.prompt_tokens, part.cached_tokens, part.hit_rate, why])
    return Table(caption, [heading, "requests", "prompt tokens", "cached", "hit rate", "most missed"], rows)


def _namespaces(report: WorkloadReport) -> Table:
    shown = report.namespaces[:MOST_NAMESPACES]
    more = len(report.namespaces) - len(shown)
    caption = "Namespaces, the largest first" + (f"; {more:,} smaller ones are in --json" if more else "")
    return parts(caption, "namespace", shown)


def _short(request_id: str) -> str:
    """Enough of it to find the request in a log; JSON has all."""
    id = printable(request_id) or "-"
    return id if len(id) <= _ID_LENGTH else f"{id[: _ID_LENGTH - 1]}…"


def _name(namespace: str) -> str:
    return printable(namespace) or "(default)"
