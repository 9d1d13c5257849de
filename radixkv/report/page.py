"""A report before it is text or HTML: sections of sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.report.curve_report import CurveReport

Cell = str | int | float
"""Text, a count, or a share from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    points: Sequence[tuple[str, str]] = ()
    """A statement each, and the fine print under it."""
    curve: CurveReport | None = None


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    summary: str
    sections: Sequence[Section]


def counted(number: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def cell_text(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if isinstance(cell, int) else f"{cell * 100:.1f} %"
