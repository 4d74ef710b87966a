"""Versions of the weights under which KV and output tokens were computed.

The weights of a running engine change. Each change has a number, the *version* of the weights from there on;
version 0 is what the engine had before. The KV of a position has two versions: that of the weights that
computed it, and the oldest one in its *chain*, the positions that it was computed from. An output token is
suspect if the step that sampled it read KV whose chain has an older version than the step's own weights.

A look at the weights that finds a change does not tell when it took place: at some time since the last look
that found none. So each look that finds none begins a *stage* within the version, and KV is kept by stages:
``version * STAGES`` plus the looks since. Once a change is found, it is not known of the last stage before it
which of the two weights it has.

Nothing is kept before the first change or look: everything is of stage 0 then. A request with an adapter runs
under the model's weights and the adapter's; its version is the number of the last change of either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from .. import causes

UNKNOWN = -1
"""A version that is not known. It is below all others, so the oldest of it and another one is not known."""

STAGES = 1 << 32
"""The number of a version's first stage is the version times this."""

Made: TypeAlias = tuple[int, int, int]
"""Positions from the first number up to the next item of a list: the stage in which their KV was computed,
and the oldest stage in their chain."""

Sampled: TypeAlias = tuple[int, int, int, int, int]
"""Tokens from a position up to the next item of a list: the stage of the steps that sampled them, the
oldest stage in the chain of the KV that the steps read, how many changes lie between (-1: not known), and the
version of the steps."""

BEFORE: Made = (0, 0, 0)
"""Everything that was computed before the first change."""

MODEL = ""
"""Stands for the model itself, where other names are those of adapters."""


class Weights:
    """The versions of an engine's weights."""

    def __init__(self) -> None:
        self.stage = 0
        """The present stage."""
        self.looked = 0
        """The stage that the last look at the model's weights began."""
        self.changes: dict[str, list[int]] = {}
        """The stages that changes of the model, and of each adapter, began."""
        self.possible: set[int] = set()
        """Changes of which it is not known whether the weights became others."""
        self.found: dict[int, int] = {}
        """Of each change that a look found: the stage within which it took place."""
        self.counted: list[tuple[Any, str, int, int, int]] = []
        """What was counted as not older since the last look: account, figure, stage, oldest stage, tokens."""
        self.outcomes: dict[tuple[str, int], dict[int, tuple[bool, bool | None]]] = {}
        """By method and number of a call, of each worker: whether it raised, and left its weights equal."""
        self.last_calls: dict[str, tuple[int, str]] = {}
        """Of each method that all workers were asked for: the number of the last call, and its adapter."""
        self.handed_over = False
        """Whether KV was loaded that a prefill engine computed, whose weights are not known."""
        self.label = ""
        """What the caller called the weights last."""
        self.loaded_in = -1
        """The step after which a worker's model last loaded weights, until a call of the engine returned."""
        self.differing: dict[tuple[str, int], str] = {}
        """Last calls with other outcomes on some workers than on others, before a step runs; the adapter."""
        self.cached_since = 0
        """None of the blocks of the prefix cache is of an older stage."""
        self.reset_stage = 0
        """The stage at the last reset of the prefix cache."""
        self.refused: tuple[int, int] | None = None
        """A reset that was refused after a change, since the last one that was not: its step, and version.
        None: there is none, or a request that hit the cache since was reported."""

    @property
    def version(self) -> int:
        """The number of the last change."""
        return self.stage // STAGES

    def of(self, adapter: str) -> int:
        """The stage in which a request with this adapter runs now."""
        return max([self.looked, *(each[-1] for each in self._changes(adapter))])

    def age(self, adapter: str, stage: int, oldest: int) -> int:
        """How many changes lie between two stages for a request with this adapter; -1: not known."""
        if oldest == UNKNOWN:
            return UNKNOWN
        later = [n for each in self._changes(adapter) for n in each[bisect_right(each, oldest) :]]
        between = [n for n in later if self.found.get(n, n) <= stage]
        certain = [
            n for n in between if oldest < self.found.get(n, n) and n <= stage and n not in self.possible
        ]
        return UNKNOWN if between and not certain else len(certain)

    def version_of(self, adapter: str, stage: int) -> int:
        """The number of the last change, for a request with this adapter, before a stage; -1: not known."""
        places = [(each, bisect_right(each, stage)) for each in self._changes(adapter)]
        later = (each[place] for each, place in places if place < len(each))
        if stage == UNKNOWN or any(self.found.get(n, n) <= stage for n in later):
            return UNKNOWN
        return max((each[place - 1] for each, place in places if place), default=0) // STAGES

    def _changes(self, adapter: str) -> Iterator[list[int]]:
        return (self.changes[name] for name in {MODEL, adapter} if name in self.changes)


def version_words(version: int) -> str:
    """A version in a sentence."""
    words = {0: "the weights before the first change", UNKNOWN: "a version that is not known"}
    return words.get(version, f"version {version}")


def age_cause(age: int) -> str:
    """The cause that stands for an age in versions."""
    if age == UNKNOWN:
        return causes.AGE_UNKNOWN
    return tuple(causes.OLDER)[min(age, 3) - 1]


def extend(made: list[Made], start: int, stage: int, oldest: int) -> None:
    """From position ``start`` on, KV is of ``stage``; its chain has ``oldest`` besides what is below."""
    while made and made[-1][0] >= start:
        made.pop()
    chain = min(oldest, stage)
    if made:
        chain = min(chain, made[-1][2])
    if not made or made[-1][1:] != (stage, chain):
        made.append((start, stage, chain))


def clipped(made: Sequence[Made], begin: int, end: int) -> list[Made]:
    """The part of ``made`` in the positions [begin, end)."""
    first = max(0, bisect_right(made, begin, key=lambda each: each[0]) - 1)
    rows = [each for each in made[first:] if each[0] < end]
    return [(max(begin, start), stage, oldest) for start, stage, oldest in rows]


def spans(made: Sequence[Made], begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Start, end, stage and oldest stage of each part of [begin, end)."""
    rows = clipped(made or [BEFORE], begin, end)
    for place, (start, stage, oldest) in enumerate(rows):
        stop = rows[place + 1][0] if place + 1 < len(rows) else end
        if start < stop:
            yield start, stop, stage, oldest


def oldest_of_all(groups: Iterable[Sequence[Made]], end: int) -> list[Made]:
    """What a request reads below ``end`` whose KV is in several cache groups: of each position the oldest."""
    tables = [table for table in groups if table]
    starts = sorted({start for table in tables for start, _, _ in table if start < end})
    made: list[Made] = []
    for place, start in enumerate(starts):
        rows = [clipped(table, start, start + 1) for table in tables]
        stages = [row[0] for row in rows if row]
        first = start if place else 0  # nothing reads the positions below a window
        extend(made, first, min(row[1] for row in stages), min(row[2] for row in stages))
    return made
