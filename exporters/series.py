"""Figures over time in a bounded number of buckets, for traces of any length.

A bucket is a power of two of seconds, counted from 1970; when there would be too many, two become one.
So the series of several engines have bounds in common and can be added up.
"""

from __future__ import annotations

import msgspec

MOST = 256
"""Buckets kept; a whole trace has between half as many and all of them, if it is long enough."""


class Series(msgspec.Struct):
    """``counts`` are summed in a bucket, ``levels`` are as they were at its end."""

    width_seconds: int = 1
    counts: dict[int, dict[str, int]] = {}
    levels: dict[int, dict[str, int]] = {}

    def count(self, wall_seconds: float, name: str, amount: int = 1) -> None:
        """Something happened ``amount`` times."""
        row = self.counts.setdefault(int(wall_seconds // self.width_seconds), {})
        row[name] = row.get(name, 0) + amount
        if len(self.counts) > MOST:
            self.coarsen(2 * self.width_seconds)

    def level(self, wall_seconds: float, levels: dict[str, int]) -> None:
        """Something is so many from now on. Times never go back."""
        self.levels[int(wall_seconds // self.width_seconds)] = levels
        if len(self.levels) > MOST:
            self.coarsen(2 * self.width_seconds)

    def coarsen(self, width_seconds: int) -> None:
        """Make buckets of ``width_seconds``, a multiple of what they are."""
        factor = width_seconds // self.width_seconds
        counts: dict[int, dict[str, int]] = {}
        for place, row in self.counts.items():
            into = counts.setdefault(place // factor, {})
            for name, amount in row.items():
                into[name] = into.get(name, 0) + amount
        self.counts = counts
        self.levels = {place // factor: self.levels[place] for place in sorted(self.levels)}
        self.width_seconds = width_seconds

    def filled(self) -> None:
        """A level lasts until the next one: give it to the buckets between."""
        for first, last in zip(sorted(self.levels), sorted(self.levels)[1:], strict=False):
            for place in range(first + 1, last):
                self.levels[place] = self.levels[first]


def together(several: list[Series]) -> Series:
    """All engines' series in one: counts and levels are summed."""
    found = Series()
    for one in several:
        found.width_seconds = max(found.width_seconds, one.width_seconds)
    while True:
        found.counts, found.levels = {}, {}
        for one in several:
            one.coarsen(found.width_seconds)
            one.filled()
            for into, rows in ((found.counts, one.counts), (found.levels, one.levels)):
                for place, row in rows.items():
                    sums = into.setdefault(place, {})
                    for name, amount in row.items():
                        sums[name] = sums.get(name, 0) + amount
        places = found.counts.keys() | found.levels.keys()
        if not places or max(places) - min(places) < 2 * MOST:
            return found
        found.width_seconds *= 2
