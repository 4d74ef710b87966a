"""A histogram of one value per request, and the exemplar of each bucket."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from ..figures.sums import Sums


class Exemplar(msgspec.Struct, frozen=True):
    """One request as an example of a bucket: its id, the caller's trace id ("" if none) and its value."""

    request_id: str
    trace_id: str
    value: float
    at_seconds: float


class Distribution(Sums):
    """A histogram: how often a value was at most each of ``bounds`` and above the bound before.

    ``counts`` has one more item than ``bounds``, for values above all of them. ``exemplars`` holds the
    latest request of each bucket that has one. The sum is kept in whole ``millionths``, because a sum of
    floats would depend on the order in which journals are added, and might even fall slightly.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    millionths: int = 0
    exemplars: dict[int, Exemplar] = {}

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Distribution:
        """An empty histogram."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Count one value."""
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.millionths += round(value * 1e6)
        if exemplar is not None:
            self.exemplars[place] = exemplar

    def merge(self, other: Distribution) -> None:
        """Add the counts of another histogram."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.millionths += other.millionths
        self.exemplars = self.exemplars | other.exemplars

    @property
    def sum(self) -> float:
        """The sum of all values, each rounded to a millionth."""
        return self.millionths / 1e6

    @property
    def observed(self) -> int:
        """How many values were counted."""
        return sum(self.counts)
