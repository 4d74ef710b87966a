"""``kvledger journals compact``: keeps the facts of a journal as Parquet, and adds the newest."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from ...audit import temporary
from ...audit.errors import LedgerError
from ...audit.figures.sums import added
from ...audit.journal.reader import Batch, Position, Reader
from ...audit.journal.safe_open import create_file, digest, open_file, own_folder
from ...audit.replay import checkpoint, serialize
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.observers import Steps, taken
from ...audit.replay.windows import EVERYTHING, duration
from ..trace.time_series import MINUTE_TICKS, Series
from .blocks import MOST_BYTES
from .hours import HOURLY, KEEP_SECONDS, Doubts, Hourly, keep_doubts
from .kept import (
    COLUMNS,
    DAY_SECONDS,
    DRAFT,
    HOUR_SECONDS,
    MOST_DAMAGE,
    OBSERVERS,
    OPEN_HOUR,
    SUFFIX,
    KeptFile,
    Session,
    columns_of,
    day_of,
    draft_of,
    every_file,
    folder_of,
    hour_name,
    hour_time,
    is_session,
    journal_of,
    layout,
    load,
    partition,
    place,
    readable,
    save,
    settle,
    usable,
    with_digests,
)
from .parquet import RowWriter
from .replayed import RowCollector, Wanted, rebased
from .rows import activity_rows, engine_facts
from .schema import Column, Row, Rows
from .tables import Facts, Files, KeptRows, close, connect, mount, mount_sums, quoted

# --- What compact does beside rows: sums by the hour of new files, and the removal of files by their age.


class Retention(NamedTuple):
    """Unix times. Rows of requests that ended before ``rows_from`` go, and sums before ``sums_from``."""

    rows_from: float
    sums_from: float


def retention(keep: str, now: float | None = None) -> Retention | None:
    """What ``--keep`` names, such as ``30d``; None: nothing is removed. Raises LedgerError."""
    if not keep:
        return None
    now = time.time() if now is None else now
    rows_from = now - duration(keep)
    return Retention(rows_from, min(rows_from, now - KEEP_SECONDS))


class SummedRows(NamedTuple):
    """Rows of sums by table, the files that they replace, and when requests with findings ended."""

    tables: dict[str, list[Row]]
    replaces: list[KeptFile]
    ended_us: dict[str, int]


def summed_rows(
    folder: Path, engine: str, files: Sequence[KeptFile], before: Sequence[KeptFile], requests: Iterable[str]
) -> SummedRows:
    """The sums by the hour of new ``files``, added to those of the same days that were kept ``before``.

    ``requests``: the ids of requests with findings.
    """
    closed: dict[str, list[KeptFile]] = defaultdict(list)
    for file in files:
        if file.hour != OPEN_HOUR:
            closed[day_of(file.hour)].append(file)
    found = SummedRows({name: [] for name in HOURLY}, [], {})
    for day, of_day in sorted(closed.items()):  # one at a time, so that memory does not grow with the journal
        replaced = [file for file in before if file.table in HOURLY and file.hour == day]
        kept = KeptRows("", engine, _paths(folder, [*replaced, *of_day]), _paths(folder, of_day))
        _add_sums(found, kept, requests)
        found.replaces.extend(replaced)
    return found


def _add_sums(found: SummedRows, kept: KeptRows, requests: Iterable[str]) -> None:
    """Add the sums of the rest of some kept rows to those that they have."""
    listed = ", ".join(map(quoted, requests)) or "''"
    ended = f"SELECT request_id, epoch_us(closed_time) FROM requests WHERE request_id IN ({listed})"
    with temporary.folder("kvledger-sums-") as spill:
        connection = connect(Path(spill))
        try:
            mount(connection, {}, EVERYTHING, kept=[kept])
            mount_sums(connection)
            facts = Facts(connection)
            for name, table in HOURLY.items():
                found.tables[name].extend(facts.rows(_in_microseconds(table)))
            found.ended_us.update(facts.rows(ended))
        finally:
            close(connection)


def _in_microseconds(table: Hourly) -> str:
    """The rows of a table as they are written: in the same order each time, times as numbers."""
    columns = [f"epoch_us({one.name})" if one.kind == "time" else one.name for one in table.columns]
    keys = [key.name for key in table.keys if key.name != "hour"]
    return f"SELECT {', '.join(columns)} FROM {table.name} ORDER BY {', '.join(('hour', *keys))}"


def _paths(folder: Path, files: Iterable[KeptFile]) -> Files:
    found: Files = defaultdict(list)
    for file in files:
        found[file.table].append(str(readable(folder, file)))
    return found


def remove_old(session: Session, chosen: Retention | None) -> bool:
    """Take the files that are older than they are kept out of a session; returns whether there were any.

    Rows that come late, of hours whose rows were removed already, go too: the sums have them.
    """
    rows_from = max(session.rows_from, _floor(chosen.rows_from, HOUR_SECONDS) if chosen else 0.0)
    sums_from = max(session.sums_from, _floor(chosen.sums_from, DAY_SECONDS) if chosen else 0.0)
    files, tail = (
        [file for file in some if not _is_old(file, rows_from, sums_from)]
        for some in (session.files, session.tail)
    )
    if (len(files), len(tail)) == (len(session.files), len(session.tail)):
        return False
    removed = {file.path for file in (*session.files, *session.tail)} - {
        file.path for file in (*files, *tail)
    }
    of_sums = [file for file in session.files if file.path in removed and file.lasts]
    session.files, session.tail, session.rows_from = files, tail, rows_from
    session.sums_from = sums_from if of_sums else session.sums_from
    session.busy_us = _by_hour(session.busy_us, session)
    session.tail_busy_us = _by_hour(session.tail_busy_us, session)
    return True


def _floor(seconds: float, length: float) -> float:
    return seconds // length * length


def _is_old(file: KeptFile, rows_from: float, sums_from: float) -> bool:
    if file.hour == OPEN_HOUR:
        return False
    return file.ends <= (sums_from if file.lasts else rows_from)


def _by_hour(by_minute: dict[int, int], session: Session) -> dict[int, int]:
    """Engine time by the minute, by the hour where rows were removed, and none where sums were."""
    found: dict[int, int] = {}
    for minute, us in by_minute.items():
        if minute * 60 >= session.sums_from:
            place = minute if minute * 60 >= session.rows_from else minute // 60 * 60
            found[place] = found.get(place, 0) + us
    return found


def tidy(folder: Path, journal: str, session: Session, *, drafts_only: bool = False) -> None:
    """Remove the files of a journal that its session does not list.

    They are drafts of a compact that was killed, files that were replaced, and those that were too old.
    """
    for draft in folder.glob(f"{journal}{SUFFIX}.*{DRAFT}"):
        draft.unlink(missing_ok=True)
    listed = {str(folder / file.path) for file in (*session.files, *session.tail)}
    for path, name, _ in _files_of(folder, journal):
        if str(path.with_name(name)) not in listed and (path.name != name or not drafts_only):
            path.unlink(missing_ok=True)


def _files_of(folder: Path, journal: str) -> Iterator[tuple[Path, str, int]]:
    """A journal's files and drafts, each with its name as a file and the number of its compaction."""
    ours = re.compile(rf"{re.escape(journal)}\.(\d+)(\.tail|\.sums)?\.\d+\.parquet")
    for path in folder.glob("*/*/*/*"):
        name = path.name[1 : -len(DRAFT)] if path.name.endswith(DRAFT) else path.name
        if found := ours.fullmatch(name):
            yield path, name, int(found[1])


def next_number(folder: Path, journal: str, session: Session | None) -> int:
    """The number of a journal's next compaction, which no file of an earlier one has.

    Files of a session that can't be read stay. Under the same names they would stand in for the new ones.
    """
    before = 0 if session is None else session.number
    return 1 + max([before, *(number for *_, number in _files_of(folder, journal))])


WANTED = Wanted(audit=True, activity=True, blocks=True)
ENDLESS = 1 << 62
"""A series of a kept activity is never made coarser than minutes."""


AT_WORK = "another compact is at work on it"
TOO_EARLY = "it has no batch before its last one"
LATER = (AT_WORK, TOO_EARLY)
"""Problems that pass."""


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`compact` did with one journal; the figures are of all that is kept.

    ``problem``: why nothing is kept; "" if it is.
    """

    journal: str
    requests: int = 0
    files: int = 0
    bytes: int = 0
    verdict: str = ""
    problem: str = ""
    rows_from: str = ""
    """The hour before which rows were removed by their age, and only sums are kept; "": none were."""


def compact(journal: Path, keep: Retention | None = None) -> Compacted:
    """Keep the facts of a journal, or continue those that are there, and remove old ones.

    ``journal`` may be the session of one that is gone, whose facts only grow old. A journal that can't be
    compacted has a problem.
    """
    path = journal_of(journal)
    if not path.is_dir() and not is_session(journal):
        return Compacted(journal=str(path), problem="a single segment can't be compacted")
    folder = folder_of(path)
    try:
        with _alone(path) as alone:
            if not alone:
                return Compacted(journal=str(path), problem=AT_WORK)
            (session, missed), there = usable(journal), load(place(path))
            if missed and session is None:
                return Compacted(journal=str(path), problem=missed)
            for kept in filter(None, (there,)):
                settle(folder, kept)
            over = session is not None and (session.ended or is_session(journal))
            if session is not None and over and not missed:  # nothing can come any more
                removed, before = remove_old(session, keep), every_file(session)
                session.files = with_digests(folder, session.files)
                session.tail = with_digests(folder, session.tail)
                if removed or before != every_file(session):
                    save(path, session)
                tidy(folder, path.name, session)
                return _compacted(path, session)
            return _Compaction(path, session, there, keep, missed).done()
    except LedgerError as error:
        return Compacted(journal=str(path), problem=str(error))
    except OSError as error:
        return Compacted(journal=str(path), problem=f"{folder} can't be written: {error.strerror}.")


def _compacted(journal: Path, session: Session) -> Compacted:
    """What a session keeps."""
    files = [*session.files, *session.tail]
    return Compacted(
        journal=str(journal),
        requests=sum(file.rows for file in files if file.table == "requests"),
        files=len(files),
        bytes=sum(file.bytes for file in files),
        verdict=session.verdict,
        rows_from=hour_time(session.rows_from) if session.rows_from else "",
    )


@contextlib.contextmanager
def _alone(journal: Path) -> Iterator[bool]:
    """Whether no other process compacts this journal; none begins while the lock is held. Raises OSError."""
    folder = folder_of(journal)
    own_folder(folder, "no facts are kept")
    descriptor = open_file(folder / f".{journal.name}.lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


class _AllButLast:
    """Reads a journal without its last batch, so that a later reader knows how the journal ends."""

    ended = stopped = continues = False

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.last: Batch | None = None
        """The batch behind those that were yielded; None if there is none."""

    def poll(self) -> Iterator[Batch]:
        """All batches but the last, which stays in ``last``."""
        for batch in self._reader.poll():
            if self.last is not None:
                yield self.last
            self.last = batch


class HourlyFiles:
    """The rows of one compaction, in drafts by table and hour."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.files: list[KeptFile] = []
        """The files that are whole."""
        self._folder = folder
        self._stem = stem
        """How the names of all files begin."""
        self._writers: dict[tuple[str, str], tuple[RowWriter, Path, BinaryIO]] = {}
        """The open drafts, by table and hour."""
        self._parts = 0
        """How many files were begun; it makes their names different."""

    def add(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows, each to the hour of its time."""
        columns = COLUMNS[table]
        at = next(
            n for n, column in enumerate(columns) if column.kind == "time" and column.name in _PARTED_BY
        )
        by_hour: dict[tuple[str, str], Rows] = {}
        for row in rows:
            when = row[at]
            hour = hour_name(None if when is None else int(when) / 1e6)
            hour = day_of(hour) if table in HOURLY else hour
            by_hour.setdefault((str(row[0]), hour), []).append(row[1:])
        for (engine, hour), some in by_hour.items():
            self._writer(table, engine, hour, columns[1:]).add(some)

    def _writer(self, table: str, engine: str, hour: str, columns: Sequence[Column]) -> RowWriter:
        path = partition(table, engine, hour)
        found = self._writers.get((table, path))
        if found is None:
            for key in [key for key in self._writers if key[0] == table][:-1]:
                self._finish(key)  # requests end in order, so an hour before the last one gets no more rows
            self._parts += 1
            (self._folder / path).mkdir(mode=0o755, parents=True, exist_ok=True)
            file = self._folder / path / f"{self._stem}.{self._parts}.parquet"
            draft = os.fdopen(create_file(draft_of(file), 0o644), "wb")
            found = self._writers[table, path] = (RowWriter(draft, columns), file, draft)
        return found[0]

    def _finish(self, key: tuple[str, str]) -> None:
        writer, path, draft = self._writers.pop(key)
        with draft:
            writer.close()
            draft.flush()
            os.fsync(draft.fileno())
            size = draft.tell()
        hour = path.parent.name.partition("=")[2]
        name = str(path.relative_to(self._folder))
        found = digest(draft_of(path))
        self.files.append(KeptFile(key[0], name, hour, writer.rows, size, columns_of(key[0]), found))

    def close(self) -> list[KeptFile]:
        """End all drafts; returns the files."""
        for key in list(self._writers):
            self._finish(key)
        return self.files

    def abandon(self) -> None:
        """Remove what was written, after an error."""
        for writer, path, draft in self._writers.values():
            writer.abandon()
            draft.close()
            draft_of(path).unlink(missing_ok=True)
        for file in self.files:
            draft_of(self._folder / file.path).unlink(missing_ok=True)


def _block_state(collector: RowCollector) -> msgspec.Raw:
    assert collector.blocks is not None
    return msgspec.Raw(msgspec.msgpack.encode(collector.blocks.state))


def without_oldest_operations(files: Sequence[KeptFile]) -> list[KeptFile]:
    """The files without the oldest of ``block_operations`` where these are too large; the newest stays."""
    operations = [file for file in files if file.table == "block_operations"]
    while len(operations) > 1 and sum(file.bytes for file in operations) > MOST_BYTES:
        operations.pop(0)
    return [file for file in files if file.table != "block_operations" or file in operations]


_PARTED_BY = ("closed_time", "time", "hour")
"""The times by which rows go to an hour."""


class _Compaction:
    """Replays a journal, or what came since it was last compacted, and keeps the rows."""

    def __init__(
        self,
        journal: Path,
        session: Session | None,
        there: Session | None,
        keep: Retention | None,
        missed: str,
    ) -> None:
        self._journal = journal
        self._session = session
        """Where the compaction before ended; None: the journal is read from its beginning."""
        self._missed = missed
        """Why that compaction was not of this version's layout; "": it was."""
        self._keep = keep
        """What is removed; None: nothing."""
        self._began = there is None
        """Whether no session that can be read lists files. Files of one that can't be read are left alone."""
        self._folder = folder_of(journal)
        self._number = next_number(self._folder, journal.name, there)

    def done(self) -> Compacted:
        """Read, save, and say what was done."""
        sink = HourlyFiles(self._folder, f"{self._journal.name}.{self._number}")
        tail_sink = HourlyFiles(self._folder, f"{self._journal.name}.{self._number}.tail")
        sums_sink = HourlyFiles(self._folder, f"{self._journal.name}.{self._number}.sums")
        try:
            if self._session is not None and self._missed:
                self._session = rebased(self._journal, self._session, self._missed, sink.add)
            before = self._session
            audit = self._audit()
            start = None if before is None else before.position
            steps = audit.of(Steps)
            steps.times.by_minute = True
            state = None if before is None else before.blocks()
            collector = RowCollector(audit, WANTED, sink.add, minutes=True, blocks=state)
            activity = collector.activity
            assert activity is not None
            if before is None:
                activity.series = Series(MINUTE_TICKS, most=ENDLESS)
            else:
                activity.go_on(before.series, before.counts)
            doubts = Doubts() if before is None else before.doubts
            keep_doubts(audit, doubts)
            with Reader(self._journal, start) as reader:
                most = _AllButLast(reader)
                for batch, findings in audit.batches(most):  # type: ignore[arg-type]
                    collector.add(batch.events, taken(audit))
                    collector.found(findings)
                last, ended = most.last, reader.ended
                rotated = before is None and audit.auditor.ledger.sums.removed_events
                damage = [str(place) for place in reader.damage[bool(rotated) :]]
            if last is None or audit.began_seconds is None or audit.engine is None:
                sink.abandon()
                return Compacted(journal=str(self._journal), problem=TOO_EARLY)
            session = self._at(audit, collector, last.start, sink)
            session.doubts = doubts
            session.damage = [*(before.damage if before is not None else ()), *damage][:MOST_DAMAGE]
            if ended:
                self._end(session, audit, collector, tail_sink)
            self._sum_up(session, audit, [*sink.files, *tail_sink.files], sums_sink)
            remove_old(session, self._keep)
        except BaseException:
            for one in (sink, tail_sink, sums_sink):
                one.abandon()
            raise
        save(self._journal, session)
        tidy(self._folder, self._journal.name, session, drafts_only=self._began)
        return _compacted(self._journal, session)

    def _sum_up(
        self, session: Session, audit: EngineAudit, new: Sequence[KeptFile], sink: HourlyFiles
    ) -> None:
        """Add the sums by the hour of new files to the session."""
        found = {one.request for one in audit.auditor.violations if one.request}
        summed = summed_rows(self._folder, audit.name, new, session.files, found.difference(session.ended_us))
        for table, rows in summed.tables.items():
            sink.add(table, rows)
        session.files = [file for file in session.files if file not in summed.replaces] + sink.close()
        session.ended_us.update(summed.ended_us)

    def _audit(self) -> EngineAudit:
        if self._session is not None:
            return self._session.audit(self._journal, EVERYTHING)
        return EngineAudit(self._journal, OBSERVERS)

    def _at(
        self, audit: EngineAudit, collector: RowCollector, position: Position, sink: HourlyFiles
    ) -> Session:
        """The session before the last batch."""
        before, engine = self._session, audit.engine
        assert engine is not None
        activity = collector.activity
        assert activity is not None
        # The minute that is not over stays in the session; the others are rows.
        until_seconds = audit.auditor.ledger.read_to
        over, rest = activity.series.split(int(until_seconds // 60))
        sink.add("activity", list(activity_rows(audit.name, collector.journal, over)))
        activity.series = rest
        busy = dict(before.busy_us) if before is not None else {}
        steps = audit.of(Steps)
        added(busy, steps.sums.busy_by_minute)
        steps.sums.busy_by_minute = {}
        files = [] if before is None else with_digests(self._folder, before.files)
        files = without_oldest_operations([*files, *sink.close()])
        return Session(
            journal=self._journal.name,
            position=position,
            beginning=checkpoint.beginning(self._journal, position.segment),
            number=self._number,
            files=files,
            state=msgspec.Raw(serialize.capture(audit)),
            layout=layout(),
            block_state=_block_state(collector),
            engine=engine,
            facts=msgspec.Raw(msgspec.msgpack.encode(engine_facts(audit))),
            verdict=audit.verdict,
            until_seconds=until_seconds,
            open_until_seconds=audit.open_until,
            busy_us=busy,
            series=msgspec.structs.replace(rest),
            counts=activity.at_end,
            ended_us=dict(before.ended_us) if before is not None else {},
            rows_from=before.rows_from if before is not None else 0.0,
            sums_from=before.sums_from if before is not None else 0.0,
        )

    def _end(
        self,
        session: Session,
        audit: EngineAudit,
        collector: RowCollector,
        sink: HourlyFiles,
    ) -> None:
        """Add what the last batch and the open requests add, if the journal has ended."""
        collector.sink = sink.add
        with Reader(self._journal, session.position) as reader:
            for batch, findings in audit.batches(reader):
                collector.add(batch.events, taken(audit))
                collector.found(findings)
            audit.note_damage(reader)
        session.state = msgspec.Raw(serialize.capture(audit))
        audit.finish()
        collector.add([], taken(audit))
        activity = collector.activity
        assert activity is not None
        sink.add("activity", list(activity_rows(audit.name, collector.journal, activity.series)))
        assert collector.blocks is not None
        collector.blocks.end()
        session.block_state = _block_state(collector)
        session.tail = sink.close()
        session.ended = True
        session.facts = msgspec.Raw(msgspec.msgpack.encode(engine_facts(audit)))
        session.tail_busy_us = audit.of(Steps).sums.busy_by_minute
        session.verdict = audit.verdict
        session.until_seconds = audit.auditor.ledger.read_to
        session.open_until_seconds = audit.open_until
