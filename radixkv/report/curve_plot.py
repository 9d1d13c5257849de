"""Writes a curve of hit rates into a file: HTML and SVG need nothing, PNG needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from radixkv.report.curve_html import html_page
from radixkv.report.curve_report import CurveReport
from radixkv.report.curve_scales import Scales, short
from radixkv.report.curve_svg import svg_picture

_SUFFIXES = (".html", ".svg", ".png")


def check_plot(path: Path) -> None:
    """Raise ``ValueError`` for a file that can't be drawn into, ``RuntimeError`` where its kind needs a package that isn't here."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"--plot must name a file that ends in {', '.join(_SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"--plot must name a file in a folder that is there, got {path}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("a PNG needs the Python package 'matplotlib': pip install 'radixkv[plot]', or name a .html or .svg file")


def write_plot(report: CurveReport, path: Path, *, title: str) -> None:
    """Draw into ``path``; its suffix says how.  Raises as :func:`check_plot`, and ``OSError`` where it can't be written."""
    check_plot(path)
    if path.suffix.lower() == ".png":
        _write_png(report, path, title)
    else:
        draw = html_page if path.suffix.lower() == ".html" else svg_picture
        path.write_text(draw(report, title), encoding="utf-8")


def _write_png(report: CurveReport, path: Path, title: str) -> None:
    from matplotlib.figure import Figure

    scales = Scales.of(report)
    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    axes = figure.add_subplot(xscale="log", xlim=(scales.least, scales.most), ylim=(0, scales.top_rate))
    axes.set(title=title, xlabel=f"capacity in blocks of {report.block_size:,} tokens", ylabel="hit rate, share of prompt blocks")
    axes.set_xticks(ticks := scales.capacity_ticks(), [short(tick) for tick in ticks])
    axes.set_yticks(ticks := scales.rate_ticks(), [f"{tick * 100:.3g} %" for tick in ticks])
    axes.grid(alpha=0.3)
    units_per_block, unit = report.large_unit()
    above = axes.secondary_xaxis("top", functions=(lambda blocks: blocks * units_per_block, lambda units: units / units_per_block))
    above.set_xlabel(f"capacity in {unit}")
    above.set_xticks(ticks := scales.capacity_ticks(units_per_block), [short(tick) for tick in ticks])
    for axis in (axes.xaxis, above.xaxis):
        axis.set_ticks([], minor=True)
    if report.knee is None:
        axes.text(0.5, 0.5, report.summary(), transform=axes.transAxes, ha="center")
    else:
        knee, reach = report.knee, report.reachable.hit_rate_blocks
        capacities = [*(point.capacity_blocks for point in report.points), scales.most]
        axes.plot(capacities, [*(point.hit_rate_blocks for point in report.points), reach], linewidth=2)
        axes.axhline(reach, color="grey", linestyle=":")
        axes.vlines(knee.capacity_blocks, 0, knee.hit_rate_blocks, color="#b83a06", linestyle="--")
        axes.plot(knee.capacity_blocks, knee.hit_rate_blocks, "o", color="#b83a06", markersize=8)
        axes.annotate(report.reachable_label(), (scales.least, reach), (8, 4), textcoords="offset points")
        below = scales.capacity_share(max(knee.capacity_blocks, scales.least)) < 0.75
        axes.annotate(
            "\n".join(report.knee_label()), (knee.capacity_blocks, 0 if below else knee.hit_rate_blocks), (8 if below else -8, 6),
            textcoords="offset points", ha="left" if below else "right", va="bottom", color="#b83a06", weight="bold",
        )  # fmt: skip
    figure.savefig(path, metadata={"Title": title, "Description": report.in_words()})
