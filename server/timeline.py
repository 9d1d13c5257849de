"""Timeline: where prompt tokens came from since the start, in a bounded number of spans of equal length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from radixkv.report.savings import Part, clock

SPANS = 48
"""At most; beyond, two become one."""


class Timeline:
    """Sums over spans whose length doubles whenever there would be more than 48 of them.  O(1) for each request, amortised."""

    def __init__(self) -> None:
        self._seconds = 1
        self._spans: dict[int, tuple[Counter[str], Counter[str]]] = {}
        """Sums and missed tokens by reason, by the span's number."""

    def add(self, seconds: float, prompt_tokens: int, cached_tokens: int, missed: Mapping[str, int]) -> None:
        """A sequence got its first token so many ``seconds`` after the start."""
        while seconds >= self._seconds * SPANS:
            self._seconds *= 2
            wider: dict[int, tuple[Counter[str], Counter[str]]] = {}
            for number, (sums, reasons) in self._spans.items():
                both = wider.setdefault(number // 2, (Counter(), Counter()))
                both[0].update(sums)
                both[1].update(reasons)
            self._spans = wider
        sums, reasons = self._spans.setdefault(int(seconds / self._seconds), (Counter(), Counter()))
        sums.update(requests=1, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        reasons.update(missed)

    def parts(self) -> list[Part]:
        """One a span in which something came, named by when it begins."""
        return [
            Part(
                name=clock(number * self._seconds),
                requests=sums["requests"],
                prompt_tokens=sums["prompt_tokens"],
                cached_tokens=sums["cached_tokens"],
                hit_rate=sums["cached_tokens"] / sums["prompt_tokens"],
                missed=dict(reasons),
            )
            for number, (sums, reasons) in sorted(self._spans.items())
        ]
