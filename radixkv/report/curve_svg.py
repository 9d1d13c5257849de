"""Draws a curve of hit rates as SVG that needs nothing from elsewhere, for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from radixkv.report.curve_report import CurveReport, percent
from radixkv.report.curve_scales import Scales, short

_WIDTH, _HEIGHT = 900, 500
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, _WIDTH - 28, 70, _HEIGHT - 64
_LETTER_WIDTH = 7.5
"""About that of a 13 px sans-serif: SVG can't be asked how wide a text is."""

_DOTS_APART = 12

COLOURS = """
:root { color-scheme: light dark;
  --paper: #fff; --ink: #1c2024; --soft: #5b6470; --grid: #e3e6ea; --curve: #0b62d6; --knee: #b83a06; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181c; --ink: #e8eaed; --soft: #a2abb7; --grid: #2d333b; --curve: #6eb1ff; --knee: #ff9a5c; }
}
"""
STYLE = """
.hit-rate text { fill: var(--ink); font: 13px system-ui, sans-serif; paint-order: stroke; stroke: var(--paper); stroke-width: 4px;
  stroke-linejoin: round; }
.hit-rate .tick { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.hit-rate .knee-text { fill: var(--knee); font-weight: 600; }
.hit-rate .grid { stroke: var(--grid); }
.hit-rate .axis { stroke: var(--soft); fill: none; }
.hit-rate .reach { stroke: var(--soft); stroke-dasharray: 2 4; }
.hit-rate .guide { stroke: var(--knee); stroke-dasharray: 5 4; }
.hit-rate .today { stroke: var(--ink); stroke-width: 1.5; }
.hit-rate .today-text { font-weight: 600; }
.hit-rate .curve { stroke: var(--curve); stroke-width: 2.5; stroke-linejoin: round; fill: none; }
.hit-rate .row { fill: var(--curve); }
.hit-rate .knee { fill: var(--knee); stroke: var(--paper); stroke-width: 2; }
.hit-rate .paper { fill: var(--paper); }
"""


def svg_picture(report: CurveReport, title: str) -> str:
    """The picture as a file of its own."""
    return _Picture(report).svg(title, f"<style>{COLOURS}{STYLE}</style>\n")


def svg_element(report: CurveReport, title: str) -> str:
    """The picture for a page that has :data:`COLOURS` and :data:`STYLE`."""
    return _Picture(report).svg(title)


class _Picture:
    def __init__(self, report: CurveReport) -> None:
        self.report = report
        self.scales = Scales.of(report)

    def svg(self, title: str, style: str = "") -> str:
        parts = [*self._axes(), *(self._marks() if self.report.knee else self._nothing())]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="hit-rate" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-labelledby="hit-rate-title hit-rate-text">\n<title id="hit-rate-title">{escape(title)}</title>\n'
            f'<desc id="hit-rate-text">{escape(self.report.in_words())}</desc>\n{style}'
            f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>\n' + "\n".join(parts) + "\n</svg>\n"
        )

    def _x(self, blocks: float) -> float:
        return round(_LEFT + self.scales.capacity_share(blocks) * (_RIGHT - _LEFT), 1)

    def _y(self, rate: float) -> float:
        return round(_BOTTOM - self.scales.rate_share(rate) * (_BOTTOM - _TOP), 1)

    def _axes(self) -> Iterator[str]:
        report, middle = self.report, (_LEFT + _RIGHT) / 2
        for rate in self.scales.rate_ticks():
            y = self._y(rate)
            yield f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{y}" y2="{y}"/>'
            yield _text(_LEFT - 8, y + 4, f"{rate * 100:.3g} %", "tick", "end")
        for blocks in self.scales.capacity_ticks():
            x = self._x(blocks)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_BOTTOM}"/>'
            yield _text(x, _BOTTOM + 18, short(blocks), "tick")
        units_per_block, unit = report.large_unit()
        for amount in self.scales.capacity_ticks(units_per_block):
            x = self._x(amount / units_per_block)
            yield f'<line class="axis" x1="{x}" x2="{x}" y1="{_TOP - 5}" y2="{_TOP}"/>'
            yield _text(x, _TOP - 11, short(amount), "tick")
        yield f'<path class="axis" d="M{_LEFT} {_TOP}H{_RIGHT}M{_LEFT} {_BOTTOM}H{_RIGHT}"/>'
        yield _text(middle, _HEIGHT - 16, f"capacity in blocks of {report.block_size:,} tokens")
        yield _text(middle, 24, f"capacity in {unit}")
        turn = f"translate(18 {(_TOP + _BOTTOM) / 2}) rotate(-90)"
        yield f'<text text-anchor="middle" transform="{turn}">hit rate, share of prompt blocks</text>'

    def _nothing(self) -> Iterator[str]:
        yield _text((_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2, self.report.summary())

    def _marks(self) -> Iterator[str]:
        report, knee, least = self.report, self.report.knee, self.scales.least
        assert knee is not None
        reach = self._y(report.reachable.hit_rate_blocks)
        yield f'<line class="reach" x1="{_LEFT}" x2="{_RIGHT}" y1="{reach}" y2="{reach}"/>'
        yield _text(_LEFT + 10, reach - 8, report.reachable_label(), anchor="start")

        points = [(self._x(p.capacity_blocks), self._y(p.hit_rate_blocks)) for p in report.points if p.capacity_blocks >= least]
        yield f'<polyline class="curve" points="{" ".join(f"{x},{y}" for x, y in [*points, (_RIGHT, reach)])}"/>'
        knee_x, knee_y = self._x(max(knee.capacity_blocks, least)), self._y(knee.hit_rate_blocks)
        for row in report.rows:
            x, y = self._x(max(row.capacity_blocks, least)), self._y(row.hit_rate_blocks)
            if row.capacity_blocks >= least and row != report.today and abs(x - knee_x) > _DOTS_APART:
                tip = f"{row.capacity_blocks:,} blocks ({report.size(row.capacity_blocks)}): {percent(row.hit_rate_blocks, 2)}"
                yield f'<circle class="row" cx="{x}" cy="{y}" r="3.5"><title>{escape(tip)}</title></circle>'
        if report.today is not None:
            x = self._x(min(max(report.today.capacity_blocks, least), self.scales.most))
            yield f'<line class="today" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_BOTTOM}"/>'
            beyond = " →" if report.today.capacity_blocks > self.scales.most else ""
            label = f"today: {report.today.capacity_blocks:,} blocks{beyond}"
            room = x + 8 + _LETTER_WIDTH * len(label) < _RIGHT
            yield _text(x + (8 if room else -8), _BOTTOM - 12, label, "today-text", "start" if room else "end")
        yield f'<line class="guide" x1="{knee_x}" x2="{knee_x}" y1="{knee_y}" y2="{_BOTTOM}"/>'
        yield f'<circle class="knee" cx="{knee_x}" cy="{knee_y}" r="6.5"/>'
        # The curve rises, so there is room right of the knee and below it, and left of it and above.
        lines = report.knee_label()
        if knee_x + 14 + _LETTER_WIDTH * max(map(len, lines)) < _RIGHT:
            x, y, anchor = knee_x + 14, _BOTTOM - 54, "start"
        else:
            x, y, anchor = knee_x - 14, knee_y - 44, "end"
        for n, line in enumerate(lines):
            yield _text(x, y + 20 * n, line, "knee-text", anchor)


def _text(x: float, y: float, words: str, css: str = "", anchor: str = "middle") -> str:
    of_class = f' class="{css}"' if css else ""
    return f'<text{of_class} x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
