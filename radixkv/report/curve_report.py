"""What a curve of hit rates says about how large a cache should be: as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from radixkv.report.kv_size import KVSize
from radixkv.report.stack_distance import HitCurve
from radixkv.report.tokens_text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

KNEE_SHARE = 0.8
"""The knee is the smallest capacity that reaches this share of the hits of an unbounded cache."""

_KNEE = f"{KNEE_SHARE * 100:.0f} %"
_POINTS = 200
_ROUND_ROWS = 8


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    capacity_blocks: int
    hit_rate_blocks: float
    hit_rate_tokens: float


class CurveReport(msgspec.Struct, frozen=True, kw_only=True):
    """An LRU cache's hit rates over its capacity.  Rates are shares of all prompt blocks, or of all prompt tokens."""

    requests: int
    prompt_blocks: int
    prompt_tokens: int
    distinct_blocks: int
    block_size: int
    """Tokens in a block."""
    kv: KVSize | None
    """Turns tokens into bytes; None where no model was named."""
    reachable: CurvePoint
    """The smallest capacity that hits as much as an unbounded cache."""
    knee: CurvePoint | None
    """The smallest that reaches 80 % of those hits; None where nothing is ever hit."""
    rows: list[CurvePoint]
    """Round capacities, the knee, the reachable and today's: for a table.  Empty where nothing is ever hit."""
    points: list[CurvePoint]
    """A few hundred capacities at most, evenly spread on a logarithmic scale: for a picture."""
    seconds: float
    """Time the simulation took."""
    today: CurvePoint | None = None
    """The capacity that a server has now, where it is known."""

    @classmethod
    def from_curve(cls, curve: HitCurve, kv: KVSize | None = None, *, today_blocks: int | None = None) -> CurveReport:
        def at(capacity: int) -> CurvePoint:
            return CurvePoint(
                capacity_blocks=capacity,
                hit_rate_blocks=curve.hit_rate_blocks(capacity),
                hit_rate_tokens=curve.hit_rate_tokens(capacity),
            )

        most, knee = curve.enough_blocks, curve.capacity_for(KNEE_SHARE)
        marked = {knee, most, today_blocks or 0} if most else set()
        spread = np.geomspace(1, most, _POINTS).round().astype(int).tolist() if most > _POINTS else range(1, most + 1)
        return cls(
            requests=curve.requests,
            prompt_blocks=curve.prompt_blocks,
            prompt_tokens=curve.prompt_tokens,
            distinct_blocks=curve.distinct_blocks,
            block_size=curve.block_size,
            kv=kv,
            reachable=at(most),
            knee=at(knee) if most else None,
            rows=[at(c) for c in sorted({*_round_numbers(most)[-_ROUND_ROWS:], *marked} - {0})],
            points=[at(c) for c in sorted({*spread, *_round_numbers(most)})],
            seconds=curve.seconds,
            today=None if today_blocks is None else at(today_blocks),
        )

    def size(self, capacity_blocks: int) -> str:
        """Memory where the model is known, otherwise tokens."""
        tokens = capacity_blocks * self.block_size
        return f"{tokens:,} tokens" if self.kv is None else _memory(tokens * self.kv.bytes_per_token)

    def reachable_label(self) -> str:
        """A line to write at the top of the curve in a picture."""
        return f"reachable: {percent(self.reachable.hit_rate_blocks)}, from {self.reachable.capacity_blocks:,} blocks on"

    def large_unit(self) -> tuple[float, str]:
        """What a block is worth in the unit that people plan in, and its name."""
        if self.kv is None:
            return self.block_size, "tokens"
        return self.block_size * self.kv.bytes_per_token / 2**30, f"GiB of K/V for {self.kv.model.rstrip('/').rpartition('/')[2]}"

    def summary(self) -> str:
        """The knee in one sentence."""
        if self.knee is None:
            return "No block of this trace is used twice: no cache of any size would hit."
        blocks = self.knee.capacity_blocks
        of_model = ""
        if self.kv is not None:
            of_model = f" for {printable(self.kv.model)} ({self.kv.bytes_per_token:,} bytes a token in {self.kv.dtype})"
        return (
            f"{_KNEE} of the reachable hits need {blocks:,} blocks of {self.block_size:,} tokens = {self.size(blocks)}{of_model}."
        )

    def in_words(self) -> str:
        """What a picture of the curve shows, for those who can't see it."""
        rows = "".join(f"{row.capacity_blocks:,} blocks hit {percent(row.hit_rate_blocks)}. " for row in self.rows)
        return f"A curve of the LRU hit rate, which rises with the capacity of the cache. {rows}{self.summary()}"

    def knee_label(self) -> list[str]:
        """Lines to write at the knee in a picture."""
        assert self.knee is not None
        blocks = self.knee.capacity_blocks
        return [f"knee: {blocks:,} blocks", f"= {self.size(blocks)}", f"{_KNEE} of reachable"]

    def headings(self) -> list[str]:
        size = "tokens" if self.kv is None else "memory"
        return ["blocks", size, "hit rate", "of reachable", "in tokens", ""]

    def cells(self, row: CurvePoint) -> list[str]:
        """A row of the table under :meth:`headings`.  Only for a curve that has hits."""
        notes = [name for name, point in (("knee", self.knee), ("all", self.reachable), ("today", self.today)) if row == point]
        return [
            f"{row.capacity_blocks:,}",
            self.size(row.capacity_blocks).removesuffix(" tokens"),
            percent(row.hit_rate_blocks, 2),
            percent(row.hit_rate_blocks / self.reachable.hit_rate_blocks),
            percent(row.hit_rate_tokens, 2),
            ", ".join(notes),
        ]

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.markup import escape
        from rich.table import Column, Table

        facts = (
            f"[dim]{self.requests:,} requests, {self.prompt_blocks:,} blocks, {self.distinct_blocks:,} different; "
            f"every capacity in {self.seconds:.2f} s[/]"
        )
        if self.knee is None:
            return Group(facts, self.summary())
        table = Table(*(Column(heading, justify="right" if heading else "left") for heading in self.headings()))
        for row in self.rows:
            table.add_row(*self.cells(row), style="bold" if row == self.knee else "")
        return Group(facts, table, f"[bold]{escape(self.summary())}[/]")


def percent(share: float, digits: int = 1) -> str:
    """0.3664 as 36.6 %."""
    return f"{share * 100:.{digits}f} %"


def _round_numbers(most: int) -> list[int]:
    """1, 2, 5, 10, 20, … below ``most``."""
    numbers, power = [], 1
    while power < most:
        numbers += [n * power for n in (1, 2, 5) if n * power < most]
        power *= 10
    return numbers


def _memory(size: int) -> str:
    """Bytes in GiB, or in MiB where that is small."""
    gib = size / 2**30
    if gib < 0.1:
        return f"{size / 2**20:.2f} MiB"
    return f"{gib:,.0f} GiB" if gib >= 100 else f"{gib:.1f} GiB" if gib >= 10 else f"{gib:.2f} GiB"
