"""The report on a running server, for HTML and notebooks."""

from __future__ import annotations

from radixkv.report.curve_report import percent
from radixkv.report.page import Cell, Page, Section, Table
from radixkv.report.reasons import MEANING
from radixkv.report.report import Report
from radixkv.report.tokens_text import printable


def live_page(report: Report) -> Page:
    missed = sorted(((count, reason) for reason, count in report.missed_tokens.items() if count), reverse=True)
    total = max(report.prompt_tokens, 1)
    blocks = report.blocks
    saved = "Nothing was computed yet, so that the time saved can't be estimated."
    if report.seconds_saved is not None and report.prefill_tokens_per_second is not None:
        saved = (
            f"About {report.seconds_saved:,.1f} s of prefill saved: {report.hit_tokens:,} tokens at "
            f"{report.prefill_tokens_per_second:,.0f} a second, as fast as the others were computed."
        )
    rows: list[list[Cell]] = [
        [printable(name) or "(default)", part.requests, part.prompt_tokens, part.hit_tokens, part.hit_rate]
        for name, part in sorted(report.namespaces.items(), key=lambda item: -item[1].prompt_tokens)
    ]
    return Page(
        title=f"Prefix cache report: {report.model}",
        summary=(
            f"The cache saved {percent(report.hit_rate)} of the prefill: {report.hit_tokens:,} of {report.prompt_tokens:,} prompt "
            f"tokens of {report.requests:,} requests."
        ),
        sections=[
            Section(
                "What the cache saved",
                [
                    saved,
                    f"{blocks.total - blocks.free:,} of {blocks.total:,} blocks are in use: {blocks.cached:,} cached, "
                    f"{blocks.locked:,} locked by running requests.",
                ],
            ),
            Section(
                "Where the misses went",
                tables=[
                    Table(
                        "Computed prompt tokens by reason",
                        ["reason", "tokens", "of prompt tokens", "meaning"],
                        [[reason, count, count / total, MEANING.get(reason, "")] for count, reason in missed],
                    )
                ],
            ),
            Section(
                "By namespace",
                tables=[
                    Table(
                        "Namespaces, the largest first", ["namespace", "requests", "prompt tokens", "hit tokens", "hit rate"], rows
                    )
                ],
            ),
        ],
    )
