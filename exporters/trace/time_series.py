"""Figures over time in a bounded number of buckets, for traces of any length.

A bucket is a power of two of ticks, sixty-four a second, counted from 1970; when there would be too
many, two become one. So the series of several engines have bounds in common and can be added up.
"""

from __future__ import annotations

import msgspec

TICKS = 64
"""A second's."""

MOST = 256
"""Buckets kept; a whole trace has between half as many and all of them, if it is long enough."""


class Series(msgspec.Struct):
    """``counts`` are summed in a bucket, ``levels`` are as they were at its end."""

    width_ticks: int = 1
    counts: dict[int, dict[str, int]] = {}
    levels: dict[int, dict[str, int]] = {}

    def count(self, wall_seconds: float, name: str, amount: int = 1) -> None:
        """Something happened ``amount`` times."""
        row = self.counts.setdefault(int(wall_seconds * TICKS) // self.width_ticks, {})
        row[name] = row.get(name, 0) + amount
        if len(self.counts) > MOST:
            self.coarsen(2 * self.width_ticks)

    def level(self, wall_seconds: float, levels: dict[str, int]) -> None:
        """Something is so many from now on. Times never go back."""
        self.levels[int(wall_seconds * TICKS) // self.width_ticks] = levels
        if len(self.levels) > MOST:
            self.coarsen(2 * self.width_ticks)

    def coarsen(self, width_ticks: int) -> None:
        """Make buckets of ``width_ticks``, a multiple of what they are."""
        factor = width_ticks // self.width_ticks
        counts: dict[int, dict[str, int]] = {}
        for place, row in self.counts.items():
            into = counts.setdefault(place // factor, {})
            for name, amount in row.items():
                into[name] = into.get(name, 0) + amount
        self.counts = counts
        self.levels = {place // factor: self.levels[place] for place in sorted(self.levels)}
        self.width_ticks = width_ticks

    def filled(self) -> None:
        """A level lasts until the next one: give it to the buckets between."""
        for first, last in zip(sorted(self.levels), sorted(self.levels)[1:], strict=False):
            for place in range(first + 1, last):
                self.levels[place] = self.levels[first]


def together(several: list[Series]) -> Series:
    """All engines' series in one: counts and levels are summed."""
    found = Series(width_ticks=max((one.width_ticks for one in several), default=1))
    while True:
        for one in several:
            one.coarsen(found.width_ticks)
        places = [place for one in several for place in (*one.counts, *one.levels)]
        if not places or max(places) - min(places) < 2 * MOST:
            break
        found.width_ticks *= 2
    for one in several:
        one.filled()
        for into, rows in ((found.counts, one.counts), (found.levels, one.levels)):
            for place, row in rows.items():
                sums = into.setdefault(place, {})
                for name, amount in row.items():
                    sums[name] = sums.get(name, 0) + amount
    return found
