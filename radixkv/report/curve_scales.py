"""The axes of a picture of hit rates: which part is shown, and where the ticks are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from radixkv.report.curve_report import CurveReport

_DECADES = 3
"""Powers of ten shown below that of the largest capacity: a cache a thousand times too small hits next to nothing."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Capacities, in blocks, are drawn on a logarithmic scale from ``least`` to ``most``, hit rates on a linear one from 0."""

    least: float
    most: float
    top_rate: float

    @classmethod
    def of(cls, report: CurveReport) -> Scales:
        enough = max(report.reachable.capacity_blocks, 1)
        least = 10.0 ** max(math.floor(math.log10(enough)) - _DECADES, 0)
        return cls(least, max(enough * 1.25, least * 10), max(report.reachable.hit_rate_blocks, 0.001) * 1.15)

    def capacity_share(self, blocks: float) -> float:
        """0 at the least capacity shown, 1 at the most."""
        return math.log(blocks / self.least) / math.log(self.most / self.least)

    def rate_share(self, rate: float) -> float:
        """0 at no hits, 1 at the top."""
        return rate / self.top_rate

    def rate_ticks(self) -> list[float]:
        """Round rates from 0 to at most 1, seven or fewer."""
        steps = [digit * 10.0**power for power in range(-5, 0) for digit in (1, 2, 5)]
        step = next(step for step in steps if self.top_rate / step < 7 or step == steps[-1])
        return [n * step for n in range(int(min(self.top_rate, 1.0) / step * (1 + 1e-9)) + 1)]

    def capacity_ticks(self, units_per_block: float = 1.0) -> list[float]:
        """Capacities of 1, 2 or 5 times a power of ten units, in those units."""
        least, most = self.least * units_per_block, self.most * units_per_block
        powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        return [tick for power in powers for digit in (1, 2, 5) if least <= (tick := digit * 10.0**power) <= most]


def short(value: float) -> str:
    """2000 as 2k."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
