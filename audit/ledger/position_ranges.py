"""Positions of a request's sequence: where their KV came from, and why it was lost.

Positions are kept as ranges, never one by one. Two questions are kept apart:

- *Where did this position's KV come from?* The first valid origin stays (:class:`PositionRanges`).
- *Did the position have KV before?* Then computing it again is rework, with the cause for which the KV was
  last lost (:class:`Losses`).

The answers differ after a failed load: tokens computed above it had KV, but not valid KV.
"""

from __future__ import annotations

import msgspec

from ..causes import UNKNOWN

LOCAL = "local"
EXTERNAL = "external"
COMPUTED = "computed"
REVOKED = "revoked"
"""Origins of KV. REVOKED: computed, but above a failed load, so the KV was not valid."""
UNATTAINED = "unattained"
"""No valid origin."""


class PositionRange(msgspec.Struct, eq=False):
    """Positions [start, end) with one origin: KV from ``source`` in life ``life``.

    ``again``: the positions had KV before, which turned out not to be valid.
    """

    start: int
    """The first position."""
    end: int
    """One above the last position."""
    source: str
    life: int
    again: bool = False

    def continues(self, last: PositionRange) -> bool:
        """Whether this range directly continues ``last``, with the same origin."""
        return (
            last.end == self.start
            and last.source is self.source
            and last.life == self.life
            and last.again == self.again
        )


class PositionRanges(msgspec.Struct, eq=False):
    """The positions that had KV, and its origin: disjoint ranges, sorted by position."""

    ranges: list[PositionRange] = []
    """The ranges; a position in none has no origin."""

    def fill(self, start: int, end: int, source: str, life: int) -> list[tuple[int, int]]:
        """Give this origin to every position of [start, end) that has no valid origin.

        Returns the intervals that never had KV before. Revoked positions get the new origin and are not
        among these intervals.
        """
        if start >= end:
            return []
        ranges = self.ranges
        if not ranges or ranges[-1].end <= start:
            self._append(start, end, source, life)
            return [(start, end)]
        gaps: list[tuple[int, int]] = []
        kept: list[PositionRange] = []
        position = start
        for row in ranges:
            if row.end <= start or row.start >= end:
                if row.start >= end and position < end:
                    gaps.append((position, end))
                    kept.append(PositionRange(position, end, source, life))
                    position = end
                kept.append(row)
                continue
            if position < row.start:
                gaps.append((position, row.start))
                kept.append(PositionRange(position, row.start, source, life))
            if row.source is REVOKED:
                low, high = max(start, row.start), min(end, row.end)
                for piece in ((row.start, low), (high, row.end)):
                    if piece[0] < piece[1]:
                        kept.append(PositionRange(*piece, REVOKED, row.life))
                kept.append(PositionRange(low, high, source, life, again=True))
                kept.sort(key=_start)
            else:
                kept.append(row)
            position = max(position, row.end)
        if position < end:
            gaps.append((position, end))
            kept.append(PositionRange(position, end, source, life))
        self.ranges = _joined(kept)
        return gaps

    def revoke(self, start: int, life: int) -> None:
        """Mark the KV that life ``life`` gave to positions from ``start`` up as not valid.

        Computed positions become revoked, since computing them again is rework; hits and loads are
        forgotten.
        """
        kept: list[PositionRange] = []
        for row in self.ranges:
            if row.life != life or row.end <= start:
                kept.append(row)
                continue
            if row.start < start:
                kept.append(PositionRange(row.start, start, row.source, life, row.again))
            if row.source in (COMPUTED, REVOKED) or row.again:
                kept.append(PositionRange(max(start, row.start), row.end, REVOKED, life))
        self.ranges = kept

    def withdraw(self, start: int, end: int, life: int, source: str = EXTERNAL) -> int:
        """Forget the origin ``source`` that life ``life`` gave in [start, end); return the tokens."""
        kept: list[PositionRange] = []
        tokens = 0
        for row in self.ranges:
            low, high = max(start, row.start), min(end, row.end)
            if row.source is not source or row.life != life or low >= high:
                kept.append(row)
                continue
            tokens += high - low
            for piece in ((row.start, low), (high, row.end)):
                if piece[0] < piece[1]:
                    kept.append(PositionRange(*piece, row.source, life, row.again))
        self.ranges = kept
        return tokens

    def truncate(self, end: int) -> None:
        """Forget positions from ``end`` up, which hold other tokens now."""
        self.ranges = [row for row in self.ranges if row.start < end]
        if self.ranges and self.ranges[-1].end > end:
            self.ranges[-1].end = end

    def first_computed_from(self, start: int) -> int:
        """Count the tokens from position ``start`` up whose first KV was computed, valid or not."""
        return sum(
            row.end - max(start, row.start)
            for row in self.ranges
            if row.end > start and (row.source in (COMPUTED, REVOKED) or row.again)
        )

    def tally(self, start: int, end: int) -> dict[str, int]:
        """Count tokens of [start, end) by origin; ``unattained`` are those without a valid origin."""
        tokens = {LOCAL: 0, EXTERNAL: 0, COMPUTED: 0, UNATTAINED: 0}
        position = start
        for row in self.ranges:
            low, high = max(position, row.start), min(end, row.end)
            if low >= high:
                continue
            tokens[UNATTAINED] += low - position
            tokens[UNATTAINED if row.source is REVOKED else row.source] += high - low
            position = high
        tokens[UNATTAINED] += max(0, end - position)
        return tokens

    @property
    def end(self) -> int:
        """One above the highest position that ever had KV."""
        return self.ranges[-1].end if self.ranges else 0

    def _append(self, start: int, end: int, source: str, life: int) -> None:
        row = PositionRange(start, end, source, life)
        if self.ranges and row.continues(self.ranges[-1]):
            self.ranges[-1].end = end
        else:
            self.ranges.append(row)


def _start(row: PositionRange) -> int:
    return row.start


def _joined(rows: list[PositionRange]) -> list[PositionRange]:
    joined: list[PositionRange] = []
    for row in rows:
        if joined and row.continues(joined[-1]):
            joined[-1].end = row.end
        else:
            joined.append(row)
    return joined


class Losses(msgspec.Struct, eq=False):
    """The cause for which each position last lost its KV. Newest first; covered older losses are dropped."""

    ranges: list[tuple[int, int, str]] = []
    """First position, one above the last position, and cause of each loss."""

    def add(self, start: int, end: int, cause: str) -> None:
        """Note that positions [start, end) lost their KV."""
        if start < end:
            older = [row for row in self.ranges if row[0] < start or row[1] > end]
            self.ranges = [(start, end, cause), *older]

    def split(self, pieces: list[tuple[int, int]]) -> list[tuple[int, int, str]]:
        """Split ``pieces`` by the cause of their last loss; ``unknown`` where no loss is known."""
        by_cause: list[tuple[int, int, str]] = []
        for low, high, cause in [*self.ranges, (0, 1 << 62, UNKNOWN)]:
            rest: list[tuple[int, int]] = []
            for start, end in pieces:
                first, last = max(start, low), min(end, high)
                if first >= last:
                    rest.append((start, end))
                    continue
                by_cause.append((first, last, cause))
                rest += [p for p in ((start, first), (last, end)) if p[0] < p[1]]
            pieces = rest
        return by_cause
