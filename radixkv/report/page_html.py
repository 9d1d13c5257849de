"""A report as one HTML page that loads nothing, or as a part of a notebook's."""

from __future__ import annotations

from html import escape

from radixkv.report.curve_svg import svg_element
from radixkv.report.html_document import html_document
from radixkv.report.page import Cell, Page, Section, Table, cell_text

_LONG = 40
"""Characters from which on a cell breaks into lines."""


def html_page(page: Page) -> str:
    return html_document(page.title, page.summary, "".join(map(_section, page.sections)))


def html_fragment(page: Page) -> str:
    """For a notebook, whose own style it takes."""
    tables = "".join(_table(table) for section in page.sections for table in section.tables)
    return f"<p><strong>{escape(page.title)}</strong></p>\n<p>{escape(page.summary)}</p>\n{tables}"


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{escape(section.title)}</h2>\n"]
    parts += [f"<p>{escape(sentence)}</p>\n" for sentence in section.sentences]
    for statement, fine_print in section.points:
        parts.append(f'<div class="advice"><p>{escape(statement)}</p><p class="how">{escape(fine_print)}</p></div>\n')
    if section.curve is not None:
        parts.append(
            f'<p>{escape(section.curve.summary())}</p>\n<div class="wide">\n{svg_element(section.curve, section.title)}</div>\n'
        )
    parts += map(_table, section.tables)
    return "".join([*parts, "</section>\n"])


def _table(table: Table) -> str:
    words = [any(isinstance(row[i], str) for row in table.rows) for i in range(len(table.headings))]
    headings = "".join(
        f'<th scope="col"{" class=words" if left else ""}>{escape(heading)}</th>'
        for heading, left in zip(table.headings, words, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in table.rows)
    return (
        f'<div class="wide"><table>\n<caption>{escape(table.caption)}</caption>\n<thead><tr>{headings}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def _cell(cell: Cell) -> str:
    text = escape(cell_text(cell))
    if isinstance(cell, str):
        return f'<td class="words{" long" if len(cell) > _LONG else ""}">{text}</td>'
    if isinstance(cell, float):
        return f'<td class="share" style="--part:{cell * 100:.1f}%">{text}</td>'
    return f"<td>{text}</td>"
