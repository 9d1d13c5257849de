"""What all HTML pages of reports have in common: a document that loads nothing, in light and dark."""

from __future__ import annotations

from html import escape

from radixkv.report.curve_svg import COLOURS, STYLE

_STYLE = """
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; }
.summary { font-weight: 600; }
.wide { overflow-x: auto; }
.wide svg { width: 100%; min-width: 36rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .6rem 0 1rem; }
caption { text-align: left; color: var(--soft); padding-bottom: .5rem; }
th, td { padding: .25rem .7rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--grid); white-space: nowrap; }
td.words, th.words { text-align: left; }
td.long { white-space: normal; min-width: 10rem; overflow-wrap: anywhere; font-size: .85em; }
td.share { min-width: 7rem; background: linear-gradient(var(--curve), var(--curve)) left bottom / var(--part) 3px no-repeat; }
.knee-row { color: var(--knee); font-weight: 600; }
.how { color: var(--soft); }
.advice { margin: .8rem 0; padding-left: .8rem; border-left: 3px solid var(--knee); overflow-wrap: anywhere; }
.advice p:first-child { font-weight: 600; }
"""


def html_document(title: str, summary: str, body: str) -> str:
    """``title`` and ``summary`` are text, ``body`` is HTML, curves in it included."""
    title = escape(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{COLOURS}{STYLE}{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="summary">{escape(summary)}</p>
{body}</body>
</html>
"""
