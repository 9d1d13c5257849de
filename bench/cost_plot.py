"""Cost against size as an SVG file of its own: logarithmic axes side by side, a line an operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#4269d0", "#ef8a17", "#3c9d5d", "#a463f2", "#d6336c")
WIDTH, HEIGHT = 420, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 36, 52, 48
LEGEND_STEP = 72


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    """Points of each line, in order of x; all coordinates above 0."""


def cost_svg(panels: Sequence[Panel]) -> str:
    """The panels side by side.  Raises ValueError where one has no points, or a point that has no logarithm."""
    body = "".join(f'<g transform="translate({WIDTH * i},0)">{_panel(panel)}</g>' for i, panel in enumerate(panels))
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" fill="#333">'
        f'<rect {size} fill="#fff"/>{body}</svg>\n'
    )


def _panel(panel: Panel) -> str:
    points = [point for line in panel.lines.values() for point in line]
    if not points or min(map(min, points)) <= 0:
        raise ValueError(f"{panel.title!r} must have points, and their coordinates be above 0")
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    x_ticks, y_ticks = (_ticks([point[axis] for point in points]) for axis in (0, 1))

    def x_of(value: float) -> float:
        return LEFT + (right - LEFT) * _share(value, x_ticks)

    def y_of(value: float) -> float:
        return bottom - (bottom - TOP) * _share(value, y_ticks)

    parts = [f'<text x="{LEFT}" y="22" font-weight="bold">{escape(panel.title)}</text>']
    for value in x_ticks:
        x = f"{x_of(value):.1f}"
        parts.append(f'<path d="M{x} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:,.12g}</text>')
    for value in y_ticks:
        y = f"{y_of(value):.1f}"
        parts.append(f'<path d="M{LEFT} {y}H{right}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="4" text-anchor="end">{value:,.12g}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(panel.x_label)}</text>')
    parts.append(f'<text transform="translate(16,{middle}) rotate(-90)" text-anchor="middle">{escape(panel.y_label)}</text>')
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line]
        parts.append(f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += (f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (place.split(",") for place in places))
        parts.append(f'<text x="{LEFT + LEGEND_STEP * number}" y="40" fill="{colour}">{escape(name)}</text>')
    return "".join(parts)


def _ticks(values: Sequence[float]) -> list[float]:
    """Powers of ten around the values: at least two."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def _share(value: float, ticks: Sequence[float]) -> float:
    """Where between the first and the last tick the value lies, 0 to 1, on a logarithmic scale."""
    return math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
