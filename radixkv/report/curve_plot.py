"""Writes a curve of hit rates into a file that needs nothing else to be looked at: HTML or SVG."""

from __future__ import annotations

from pathlib import Path

from radixkv.report.curve_html import html_page
from radixkv.report.curve_report import CurveReport
from radixkv.report.curve_svg import svg_picture

_DRAW = {".html": html_page, ".svg": svg_picture}


def check_plot(path: Path) -> None:
    """Raise ``ValueError`` for a file that can't be drawn into."""
    if path.suffix.lower() not in _DRAW:
        raise ValueError(f"--plot must name a file that ends in {' or '.join(_DRAW)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot must name a file in a folder that is there, got {path}")


def write_plot(report: CurveReport, path: Path, *, title: str) -> None:
    """Draw into ``path``; its suffix says how.  Raises as :func:`check_plot`, and ``OSError`` where it can't be written."""
    check_plot(path)
    path.write_text(_DRAW[path.suffix.lower()](report, title), encoding="utf-8")
