"""Rollups: the sums of a journal's requests by the minute in which they ended, read in place of the journal.

:func:`compact` writes a rollup beside the journals, in ``.kvledger-rollups``. It covers all batches but the
last one, and holds the audit up to there as a checkpoint does. ``summary`` and ``why`` take a window's sums
from the rollup and replay only what came later. A rollup stays when its journal is removed.

``report`` does the same with what ``rollup_pages.py`` adds.

A rollup answers for windows whose bounds are whole minutes. Its size grows with the minutes and not with the
requests. A rollup of another version counts where its journal is gone. Where the journal is there, the
journal is read, and ``compact`` writes the rollup anew if the journal's first segment is still there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import floor
from pathlib import Path
from zlib import crc32

import msgspec

from ...audit.analysis.step_times import Sample
from ...audit.errors import LedgerError
from ...audit.events import EngineStarted, Event
from ...audit.journal.format import segments
from ...audit.journal.reader import Batch, Position, Reader
from ...audit.ledger.account import Account
from ...audit.replay import checkpoint, serialize
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_account
from ...audit.replay.kept_files import FOLDER, left_behind
from ...audit.replay.parallel import Result, Run
from ...audit.replay.split import Part, Span, split_run
from ...audit.replay.windows import EVERYTHING, Window
from ..trace.groups import TIMES, time_name
from .miss_tally import block_size
from .rollup_cells import Cell, Cells, merge_cells
from .rollup_pages import Page, PageBuilder

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
    path.parent.mkdir(mode=checkpoint.FOLDER_MODE, parents=True, exist_ok=True)
    if path.parent.is_symlink():  # the engine's container may write beside the journals
        raise LedgerError(f"{path.parent} is a link, not a folder: no rollup is written there.")
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{checkpoint.DRAFT}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            file.write(_LINE + b"%08x\n" % crc32(payload) + payload)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return len(payload)


# --- compact --------------------------------------------------------------------------------------------


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`compact` did with one journal. ``problem``: why it has no rollup; "" if it has one.

    ``block_trace_bytes``: bytes of the block trace that is kept beside the rollup; 0: the journal has none.
    """

    journal: str
    requests: int = 0
    minutes: int = 0
    bytes: int = 0
    verdict: str = ""
    problem: str = ""
    block_trace_bytes: int = 0


def compact(journal: Path) -> Compacted:
    """Write the rollup of a journal, or continue the one that is there. Raises LedgerError."""
    if not journal.is_dir():
        return Compacted(journal=str(journal), problem="a single segment has no rollup")
    old = find(journal)
    if old is not None and old.page is None and 1 in segments(journal):
        old = None
    builder = _Builder(journal, old)
    if old is None and place(journal).exists() and 1 not in segments(journal):
        return Compacted(
            journal=str(journal),
            problem="its rollup is of another version, and its first segments are gone; it is kept as it is",
        )
    try:
        return builder.build()
    except OSError as error:
        raise LedgerError(f"{place(journal)} can't be written: {error.strerror}.") from error


class _AllButLast:
    """Reads a journal without its last batch, so that a later reader knows how the journal ends."""

    ended = stopped = continues = False

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.last: Batch | None = None

    def poll(self) -> Iterator[Batch]:
        """All batches but the last, which stays in ``last``."""
        for batch in self._reader.poll():
            if self.last is not None:
                yield self.last
            self.last = batch


class _Builder:
    """Replays a journal, or what came since its last rollup, and adds up the cells."""

    def __init__(self, journal: Path, old: Rollup | None) -> None:
        self._journal, self._old = journal, old
        self._start = old.position if old is not None else None
        self._minutes: dict[int, Cells] = {}
        self._busy: dict[int, int] = dict(old.busy_us) if old is not None else {}
        if old is None:
            self._audit = EngineAudit(journal, keep=True, with_metrics=False, times_steps=True)
        else:
            self._audit = old.audit(journal, EVERYTHING)
        self._page: PageBuilder | None = None
        if old is None or old.page is not None:
            self._page = PageBuilder(self._audit, old.page if old is not None else None)

    def build(self) -> Compacted:
        """Read, save, and say what was done."""
        audit = self._audit
        audit.step_times.busy_by_minute = {}
        with Reader(self._journal, self._start) as reader:
            most = _AllButLast(reader)
            for batch, _ in audit.batches(most):  # type: ignore[arg-type]
                self._add(audit.take_accounts(), self._minutes, batch.events)
            last, ended = most.last, reader.ended
            damage = reader.damage[bool(self._old is None and audit.auditor.ledger.removed_events) :]
        if last is None or audit.began_seconds is None:
            return Compacted(journal=str(self._journal), problem="it has no batch before its last one")
        for minute, us in (audit.step_times.busy_by_minute or {}).items():
            self._busy[minute] = self._busy.get(minute, 0) + us
        audit.step_times.busy_by_minute = None
        sample = msgspec.structs.replace(audit.step_times.sample)
        state = msgspec.Raw(serialize.capture(audit))
        verdict, until = audit.verdict, audit.began_seconds + max(audit.last_at, 0) / 1e6
        page = None if self._page is None else self._page.page(damage)
        rest = self._rest(last.start) if ended else {}
        if page is not None and self._page is not None and ended:
            page.end = self._page.end()
        rollup = self._rollup(last.start, state, verdict, until, rest, sample, page)
        size = save(place(self._journal), rollup)
        return Compacted(
            journal=str(self._journal),
            requests=sum(cell.totals.requests for cell in rollup.cells.values()),
            minutes=sum(len(minutes_of(raw)) for raw in rollup.minutes.values()),
            bytes=size,
            verdict=verdict,
        )

    def _add(self, accounts: Sequence[Account], into: dict[int, Cells], events: Sequence[Event] = ()) -> None:
        if self._page is not None:
            self._page.add(events, accounts)
        began = self._audit.began_seconds or 0.0
        several: dict[tuple[int, str], list[Account]] = {}
        for account in accounts:
            minute = floor((began + account.closed_at / 1e6) / 60) if account.closed_at >= 0 else 0
            several.setdefault((minute, key_of(account, began)), []).append(account)
        for (minute, key), some in several.items():
            cell = into.setdefault(minute, {}).setdefault(key, Cell())
            cell.take(some, self._audit.last_at, block_size(self._audit))

    def _rest(self, start: Position) -> Cells:
        """What the last batch and the open requests add."""
        audit, found = self._audit, dict[int, Cells]()
        audit.resume(EVERYTHING)
        with Reader(self._journal, start) as reader:
            for batch, _ in audit.batches(reader):
                self._add(audit.take_accounts(), found, batch.events)
        audit.finish()
        self._add(audit.take_accounts(), found)
        return _sum(found.values())

    def _rollup(
        self,
        start: Position,
        state: msgspec.Raw,
        verdict: str,
        until: float,
        rest: Cells,
        sample: Sample,
        page: Page | None,
    ) -> Rollup:
        old, engine = self._old, self._audit.engine
        assert engine is not None
        hours: dict[int, Cells] = dict(old.hours) if old is not None else {}
        minutes: dict[int, msgspec.Raw] = dict(old.minutes) if old is not None else {}
        for hour in sorted({minute // MINUTES for minute in self._minutes}):
            parts = minutes_of(minutes[hour]) if hour in minutes else {}
            for minute in [minute for minute in self._minutes if minute // MINUTES == hour]:
                merge_cells(parts.setdefault(minute, {}), self._minutes[minute])
            minutes[hour] = msgspec.Raw(msgspec.msgpack.encode(parts))
            hours[hour] = _sum(parts.values())
        return Rollup(
            journal=self._journal.name,
            position=start,
            beginning=checkpoint.beginning(self._journal, start.segment),
            verdict=verdict,
            until_seconds=until,
            cells=_sum(hours.values()),
            hours=hours,
            minutes=minutes,
            busy_us=self._busy,
            state=state,
            layout=serialize.layout(),
            engine=engine,
            sample=sample,
            rest=rest,
            page=page,
        )


def key_of(account: Account, began: float) -> str:
    """The key of an account's cell."""
    hour = floor((began + account.added_at / 1e6) / 3600)
    return f"{hour} {account.outcome or ('open' if account.closed_at < 0 else 'unknown')}"


def _sum(several: Iterable[Cells]) -> Cells:
    found: Cells = {}
    for cells in several:
        merge_cells(found, cells)
    return found


_decoder = msgspec.msgpack.Decoder(dict[int, Cells])


def minutes_of(raw: msgspec.Raw) -> dict[int, Cells]:
    """The cells of the minutes of an hour."""
    return _decoder.decode(raw)
