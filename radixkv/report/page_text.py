"""A report for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.report.page import Page, Table, cell_text
from radixkv.report.tokens_text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_ROWS = 10
"""Of a table; HTML and JSON have them all."""


def rich_page(page: Page) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding

    parts: list[RenderableType] = [_text(page.title, "bold"), _text(page.summary)]
    for section in page.sections:
        parts += [_text(""), _text(section.title, "bold cyan")]
        parts += [_text(sentence) for sentence in section.sentences]
        for statement, fine_print in section.points:
            parts += [_text(f"• {statement}"), Padding(_text(fine_print, "dim"), (0, 0, 0, 2))]
        parts += [_table(table) for table in section.tables]
        if section.curve is not None:
            parts.append(section.curve)
    return Group(*parts)


def _text(text: str, style: str = "") -> Text:
    """What others wrote, names in a log among it, must not reach the terminal as commands."""
    from rich.text import Text

    return Text(printable(text), style)


def _table(table: Table) -> RenderableType:
    from rich import table as rich_table

    numeric = [all(not isinstance(row[i], str) for row in table.rows) for i in range(len(table.headings))]
    result = rich_table.Table(
        *(
            rich_table.Column(heading, justify="right" if right else "left", overflow="fold")
            for heading, right in zip(table.headings, numeric, strict=True)
        ),
        title=_text(table.caption, "dim italic"),
        title_justify="left",
    )
    for row in table.rows[:MOST_ROWS]:
        result.add_row(*(_text(cell_text(cell)) for cell in row))
    if len(table.rows) > MOST_ROWS:
        result.caption = _text(f"and {len(table.rows) - MOST_ROWS:,} more: --html and --json have them", "dim")
    return result
