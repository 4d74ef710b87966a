"""Rollups: the sums of a journal's requests by the minute in which they ended, read in place of the journal.

``rollup_builder.py`` writes a rollup beside the journals, in ``.kvledger-rollups``. It covers all batches but
the last one, and holds the audit up to there as a checkpoint does. ``summary``, ``why`` and ``report`` take a
window's sums from the rollup and replay only what came later; ``rollup_pages.py`` has what only ``report``
needs. A rollup stays when its journal is removed.

A rollup answers for windows whose bounds are whole minutes. Its size grows with the minutes and not with the
requests. A rollup of another version counts where its journal is gone. Where the journal is there, the
journal is read, and ``compact`` writes the rollup anew if the journal's first segment is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from ...audit.analysis.step_times import Sample
from ...audit.errors import LedgerError
from ...audit.events import EngineStarted
from ...audit.journal.reader import Position
from ...audit.ledger.account import Account
from ...audit.replay import checkpoint, serialize
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_account
from ...audit.replay.kept_files import FOLDER, left_behind, replaced
from ...audit.replay.parallel import Result, Run
from ...audit.replay.split import Part, Span, split_run
from ...audit.replay.windows import Window
from ..trace.groups import TIMES, time_name
from .rollup_cells import Cells, merge_cells
from .rollup_pages import Page

SCHEMA = 1
SUFFIX = ".rollup"
MINUTES = 60
GROUPS = ("", "engine", "model", "rank", "hour", "outcome")
"""The groups that rollups know."""


class Rollup(msgspec.Struct):
    """The rollup of one journal. ``cells`` are of all minutes, ``hours`` of each hour.

    ``minutes`` has the cells of an hour's minutes, encoded, because most windows need those of two hours.
    ``position``: where the journal goes on; ``state``: the audit up to there. ``rest``: what the last batch
    and the open requests of an engine that has ended add; it is used when the journal is gone.
    """

    journal: str
    position: Position
    beginning: bytes
    verdict: str
    until_seconds: float
    cells: Cells
    hours: dict[int, Cells]
    minutes: dict[int, msgspec.Raw]
    busy_us: dict[int, int]
    """Engine time by minute."""
    state: msgspec.Raw
    layout: str
    """The layout of ``state``."""
    engine: EngineStarted
    sample: Sample
    """Observations of steps, for the model of step time."""
    rest: Cells
    page: Page | None = None
    """For the HTML report; None if a version that wrote no pages wrote the rollup."""

    def rest_of(self, path: Path, window: Window) -> tuple[EngineAudit, Iterable[Account]]:
        """The audit at ``position``, and the accounts that it adds beyond the rollup; none if the journal is
        gone and ``path`` is that of the rollup."""
        audit = self.audit(path, window)
        return audit, () if is_rollup(path) else each_account(audit, self.position)

    def within(self, path: Path, window: Window) -> Cells:
        """The sums of the requests that ended in the window, whose bounds are whole minutes.

        Where ``path`` is that of the rollup, nobody reads the rest of the journal: it belongs to the time of
        its last event.
        """
        found: Cells = {}
        if is_rollup(path) and window.holds(self.until_seconds):
            merge_cells(found, self.rest)
        if not window.bounded:
            merge_cells(found, self.cells)
            return found
        for hour, cells in self.hours.items():
            first, after = hour * 3600.0, (hour + 1) * 3600.0
            if (window.since or first) <= first and (window.until is None or after <= window.until):
                merge_cells(found, cells)
            elif window.touches(first, after - 1):
                for minute, parts in minutes_of(self.minutes[hour]).items():
                    if window.holds(minute * 60.0):
                        merge_cells(found, parts)
        return found

    @property
    def continues(self) -> bool:
        """Whether this version can read the journal on from ``position``."""
        return self.layout == serialize.layout()

    def busy_within(self, window: Window) -> int:
        """Microseconds of engine time in the window."""
        return sum(us for minute, us in self.busy_us.items() if window.holds(minute * 60.0))

    def audit(self, path: Path, window: Window, *, sums_only: bool = False) -> EngineAudit:
        """The audit at ``position``, which keeps its accounts and counts requests of the ``window`` only.

        If another version wrote the rollup, or with ``sums_only``, the audit knows the engine only.
        """
        if self.continues and not sums_only:
            audit = serialize.restore(self.state, path)
        else:
            audit = EngineAudit(path, with_metrics=False, times_steps=True)
            audit.step_times.sample = self.sample
        audit.describe(audit.engine or self.engine)  # its name says where the journal is now
        audit.resume(window)
        audit.step_times.busy_us = self.busy_within(window)
        return audit


def is_rollup(path: Path) -> bool:
    """Whether this is the path of a rollup, whose journal is gone."""
    return path.suffix == SUFFIX


def has_one(path: Path) -> bool:
    """Whether this is a rollup, or a journal that was compacted."""
    return is_rollup(path) or place(path).exists()


def each_journal(
    run: Run,
    places: Sequence[Path],
    window: Window,
    piece: Callable[[Span], Part],
    join: Callable[[Sequence[Part]], Result | None],
    whole: Callable[[Path], Result],
) -> Iterator[Result]:
    """The result of each journal or rollup. Where none has a rollup, a journal may be read in spans."""
    if window.bounded or any(map(has_one, places)):
        return run(whole, places)
    return split_run(run, places, piece, join, whole)


def found(path: Path, by: str, window: Window) -> Rollup | None:
    """The rollup that answers for the journal at ``path``; None if there is none."""
    return find(path) if by in GROUPS and usable(window) else None


def group_of(by: str, key: str, engine_audit: EngineAudit) -> str:
    """The group of a cell, by one of :data:`GROUPS`."""
    hour, _, outcome = key.partition(" ")
    if by == "hour":
        return time_name(int(hour), TIMES[by])
    rank = str(engine_audit.rank)
    names = {"engine": engine_audit.name, "model": engine_audit.model, "rank": rank, "outcome": outcome}
    return names[by] if by else ""


def usable(window: Window) -> bool:
    """Whether rollups can answer for the window: its bounds are whole minutes."""
    return all(bound is None or not bound % 60 for bound in (window.since, window.until))


# --- files ----------------------------------------------------------------------------------------------


def place(journal: Path) -> Path:
    """Where the rollup of a journal is."""
    return journal.parent / FOLDER / f"{journal.name}{SUFFIX}"


def find(journal: Path) -> Rollup | None:
    """The rollup of a journal, or the one at this path; None if there is none that can be used."""
    if is_rollup(journal):
        return _load(journal)
    found = _load(place(journal)) if journal.is_dir() else None
    if found is None or not found.continues:
        return None
    beginning = checkpoint.beginning(journal, found.position.segment)
    return found if beginning in (found.beginning, b"") else None


def rolled_verdict(journal: Path) -> str:
    """The verdict when the journal was last compacted; "" if it never was."""
    rollup = find(journal)
    return "" if rollup is None else rollup.verdict


def journals_and_rollups(paths: Sequence[Path], by: str, window: Window) -> list[Path]:
    """Every journal at ``paths``, and the rollups of journals that are gone, if they can answer.

    Raises LedgerError if there is none.
    """
    answer = by in GROUPS and usable(window)
    rollups = [rollup for path in paths if answer and path.is_dir() for rollup in left_behind(path, SUFFIX)]
    try:
        return [*journals_at(paths), *rollups]
    except LedgerError:
        if not rollups or len(paths) > 1:
            raise
        return rollups


_LINE = f"kvledger rollup {SCHEMA} ".encode()


def _load(path: Path) -> Rollup | None:
    try:
        data = path.read_bytes()
        head, _, payload = data.partition(b"\n")
        if head != _LINE + b"%08x" % crc32(payload):
            return None
        return msgspec.msgpack.decode(payload, type=Rollup)
    except (OSError, msgspec.MsgspecError):
        return None


def save(path: Path, rollup: Rollup) -> int:
    """Write a rollup under another name, and rename it; returns its bytes."""
    payload = msgspec.msgpack.encode(rollup)
    with replaced(path, 0o644, "no rollup is written") as file:
        file.write(_LINE + b"%08x\n" % crc32(payload) + payload)
    return len(payload)


_decoder = msgspec.msgpack.Decoder(dict[int, Cells])


def minutes_of(raw: msgspec.Raw) -> dict[int, Cells]:
    """The cells of the minutes of an hour."""
    return _decoder.decode(raw)
