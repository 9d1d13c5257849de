"""A curve of hit rates as a page that loads nothing: the picture, and the same as a table."""

from __future__ import annotations

from html import escape

from radixkv.report.curve_report import CurveReport
from radixkv.report.curve_svg import COLOURS, STYLE, svg_element

PAGE_STYLE = """
body { margin: 2rem auto; max-width: 56rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.summary { font-weight: 600; }
.wide { overflow-x: auto; }
.wide svg { width: 100%; min-width: 36rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .5rem; }
th, td { padding: .25rem .9rem; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
td:last-child { text-align: left; }
.knee-row { color: var(--knee); font-weight: 600; }
.how { color: var(--soft); }
"""


def html_page(report: CurveReport, title: str) -> str:
    """The whole page."""
    title = escape(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{COLOURS}{STYLE}{PAGE_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="summary">{escape(report.summary())}</p>
<div class="wide">
{svg_element(report, "Hit rate over cache size")}</div>
{_table(report) if report.rows else ""}
<p class="how">{_how(report)}</p>
</body>
</html>
"""


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
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in report.cells(row))
        rows += f'<tr class="knee-row">{cells}</tr>\n' if row == report.knee else f"<tr>{cells}</tr>\n"
    return (
        '<div class="wide"><table>\n<caption>LRU hit rate by the capacity of the cache</caption>\n'
        f"<thead><tr>{headings}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>"
    )
