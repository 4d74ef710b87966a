"""What the ledger keeps of the sketches of computed blocks, by block hash."""

from __future__ import annotations

from typing import NamedTuple

from ..bounded_tables import take_oldest

DIGITS_KEPT = 128 << 20
"""The most hexadecimal digits of sketches that are kept; the oldest are dropped first."""


class Computation(NamedTuple):
    """One computation of a block: where and when, and its sketch as hexadecimal digits."""

    step: int
    block: int
    allocated: int
    """The step of the block's allocation."""
    writer: str
    """The request that filled the block."""
    sketch: str


class SketchState:
    """The last computation of each block hash. Plain data only."""

    def __init__(self) -> None:
        self.key_name = ""
        """The function and key of the sketches; others can't be compared."""
        self.projections = 0
        """Numbers of a sketch for each part of a block."""
        self.kept: dict[tuple[int, int, int], tuple[int, int, int, str, str]] = {}
        """By hash id, worker and group: the last :class:`Computation`."""
        self.digits = 0
        """Digits of these sketches."""
        self.waiting: dict[tuple[int, int], list[tuple[int, int, int, int, str]]] = {}
        """By pool and block: computations of a block without a hash, one for each worker: worker, group,
        steps of allocation and computation, sketch."""

    def keep(self, key: tuple[int, int, int], computed: Computation) -> None:
        """Keep a computation in place of the one before."""
        before = self.kept.pop(key, None)
        if before is not None:
            self.digits -= len(before[-1])
        self.kept[key] = (*computed,)
        self.digits += len(computed.sketch)
        while self.digits > DIGITS_KEPT:
            self.digits -= sum(len(one[-1]) for one in take_oldest(self.kept))

    def forget(self) -> None:
        """What follows can't be compared with what was computed before."""
        self.digits = 0
        self.kept.clear()
        self.waiting.clear()

    def wait(self, place: tuple[int, int], row: tuple[int, int, int, int, str]) -> None:
        """Keep a computation of a block without a hash in place of the same worker's one before."""
        others = [each for each in self.waiting.get(place, ()) if each[0] != row[0]]
        self.waiting[place] = [*others, row]

    def use_key(self, name: str, projections: int) -> None:
        """Sketches of another key follow: forget all others."""
        if (name, projections) != (self.key_name, self.projections):
            self.key_name, self.projections = name, projections
            self.forget()
