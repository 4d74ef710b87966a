"""Versions of the weights under which KV and output tokens were computed.

The weights of a running engine change. Each change has a number, the *version* of the weights from there on;
version 0 is what the engine had before. The KV of a position has two versions: that of the weights that
computed it, and the oldest one in its *chain*, the positions that it was computed from. An output token is
suspect if the step that sampled it read KV whose chain has an older version than the step's own weights.

Nothing is kept before the first change: everything is of version 0 then. A request with an adapter runs under
the model's weights and the adapter's; its version is the number of the last change of either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from .. import causes

UNKNOWN = -1
"""A version that is not known. It is below all others, so the oldest of it and another one is not known."""

Made: TypeAlias = tuple[int, int, int]
"""Positions from the first number up to the next item of a list: the version of the weights that computed
their KV, and the oldest version in their chain."""

Sampled: TypeAlias = tuple[int, int, int, int]
"""Tokens from a position up to the next item of a list: the version of the weights of the steps that sampled
them, the oldest version in the chain of the KV that the steps read, and how many changes lie between."""

BEFORE: Made = (0, 0, 0)
"""Everything that was computed before the first change."""

MODEL = ""
"""Stands for the model itself, where other names are those of adapters."""


class Weights:
    """The versions of an engine's weights."""

    def __init__(self) -> None:
        self.version = 0
        """The number of the last change."""
        self.changes: dict[str, list[int]] = {}
        """The numbers of the changes of the model, and of each adapter."""
        self.possible: set[int] = set()
        """Changes of which it is not known whether the weights became others."""
        self.cached_since = 0
        """None of the blocks of the prefix cache is of older weights than these."""
        self.reset_version = 0
        """The version at the last reset of the prefix cache."""
        self.refused: tuple[int, int] | None = None
        """A reset that was refused after a change, since the last one that was not: its step, and version.
        None: there is none, or a request that hit the cache since was reported."""

    def of(self, adapter: str) -> int:
        """The version under which a request with this adapter runs now."""
        return max((self.changes[name][-1] for name in {MODEL, adapter} if name in self.changes), default=0)

    def age(self, adapter: str, version: int, oldest: int) -> int:
        """How many changes lie between two versions for a request with this adapter; -1: not known."""
        if oldest == UNKNOWN:
            return UNKNOWN
        numbers = (self.changes.get(name, ()) for name in {MODEL, adapter})
        between = {n for each in numbers for n in each[bisect_right(each, oldest) :] if n <= version}
        certain = len(between - self.possible)
        return UNKNOWN if between and not certain else certain


def age_cause(age: int) -> str:
    """The cause that stands for an age in versions."""
    if age == UNKNOWN:
        return causes.AGE_UNKNOWN
    return tuple(causes.OLDER)[min(age, 3) - 1]


def extend(made: list[Made], start: int, version: int, oldest: int) -> None:
    """From position ``start`` on, KV is of ``version``; its chain has ``oldest`` besides what is below."""
    while made and made[-1][0] >= start:
        made.pop()
    chain = min(oldest, version)
    if made:
        chain = min(chain, made[-1][2])
    if not made or made[-1][1:] != (version, chain):
        made.append((start, version, chain))


def clipped(made: Sequence[Made], begin: int, end: int) -> list[Made]:
    """The part of ``made`` in the positions [begin, end)."""
    first = max(0, bisect_right(made, begin, key=lambda each: each[0]) - 1)
    rows = [each for each in made[first:] if each[0] < end]
    return [(max(begin, start), version, oldest) for start, version, oldest in rows]


def spans(made: Sequence[Made], begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, version and oldest version of each part of [begin, end)."""
    rows = clipped(made or [BEFORE], begin, end)
    for place, (start, version, oldest) in enumerate(rows):
        stop = rows[place + 1][0] if place + 1 < len(rows) else end
        if start < stop:
            yield start, stop, version, oldest


def oldest_of_all(groups: Iterable[Sequence[Made]], end: int) -> list[Made]:
    """What a request reads below ``end`` whose KV is in several cache groups: of each position the oldest."""
    tables = [table for table in groups if table]
    starts = sorted({start for table in tables for start, _, _ in table if start < end})
    made: list[Made] = []
    for place, start in enumerate(starts):
        rows = [clipped(table, start, start + 1) for table in tables]
        versions = [row[0] for row in rows if row]
        first = start if place else 0  # nothing reads the positions below a window
        extend(made, first, min(row[1] for row in versions), min(row[2] for row in versions))
    return made
