"""A curve of hit rates as a page that loads nothing: the picture, and the same as a table."""

from __future__ import annotations

from html import escape

from radixkv.report.curve_report import CurveReport
from radixkv.report.curve_svg import svg_element
from radixkv.report.html_document import html_document


def html_page(report: CurveReport, title: str) -> str:
    """The whole page."""
    picture = svg_element(report, "Hit rate over cache size")
    table = _table(report) if report.rows else ""
    return html_document(
        title, report.summary(), f'<div class="wide">\n{picture}</div>\n{table}\n<p class="how">{_how(report)}</p>\n'
    )


def _how(report: CurveReport) -> str:
    return (
        f"{report.requests:,} requests with {report.prompt_blocks:,} prompt blocks ({report.prompt_tokens:,} tokens) in the order "
        "of the trace, through a prefix cache that evicts the least recently used. The hit rate is the share of prompt blocks "
        "found cached, always a leading run of a prompt. Reachable is what a cache that never evicts hits."
    )


def _table(report: CurveReport) -> str:
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in report.headings())
    rows = ""
    for row in report.rows:
        *numbers, note = map(escape, report.cells(row))
        cells = "".join(f"<td>{number}</td>" for number in numbers) + f'<td class="words">{note}</td>'
        rows += f'<tr class="knee-row">{cells}</tr>\n' if row == report.knee else f"<tr>{cells}</tr>\n"
    return (
        '<div class="wide"><table>\n<caption>LRU hit rate by the capacity of the cache</caption>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>"
    )
