"""A report for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.report.page import Page, Table, cell_text

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST_ROWS = 10
"""Of a table; HTML and JSON have them all."""


def rich_page(page: Page) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(page.title, "bold"), Text(page.summary)]
    for section in page.sections:
        parts += [Text(""), Text(section.title, "bold cyan")]
        parts += [Text(sentence) for sentence in section.sentences]
        for statement, fine_print in section.points:
            parts += [Text(f"• {statement}"), Padding(Text(fine_print, "dim"), (0, 0, 0, 2))]
        parts += [_table(table) for table in section.tables]
        if section.curve is not None:
            parts.append(section.curve)
    return Group(*parts)


def _table(table: Table) -> RenderableType:
    from rich import table as rich_table
    from rich.text import Text

    numeric = [all(not isinstance(row[i], str) for row in table.rows) for i in range(len(table.headings))]
    result = rich_table.Table(
        *(
            rich_table.Column(heading, justify="right" if right else "left", overflow="fold")
            for heading, right in zip(table.headings, numeric, strict=True)
        ),
        title=Text(table.caption, "dim italic"),
        title_justify="left",
    )
    for row in table.rows[:MOST_ROWS]:
        result.add_row(*(Text(cell_text(cell)) for cell in row))
    if len(table.rows) > MOST_ROWS:
        result.caption = Text(f"and {len(table.rows) - MOST_ROWS:,} more: --html and --json have them", "dim")
    return result
