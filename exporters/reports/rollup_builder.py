"""Builds the rollup of a journal for ``kvledger compact``, or continues the one that is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor
from pathlib import Path

import msgspec

from ...audit.analysis.step_times import Sample
from ...audit.errors import LedgerError
from ...audit.events import Event
from ...audit.journal.format import segments
from ...audit.journal.reader import Batch, Position, Reader
from ...audit.ledger.account import Account
from ...audit.replay import checkpoint, serialize
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.windows import EVERYTHING
from .miss_tally import block_size
from .rollup_cells import Cell, Cells, merge_cells
from .rollup_page_builder import PageBuilder
from .rollup_pages import Page
from .rollups import MINUTES, Rollup, find, minutes_of, place, save


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
