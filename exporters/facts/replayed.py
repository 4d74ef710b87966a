"""The facts of one journal, replayed: its rows as Parquet, and what is known of its engine.

The result is data, so that other processes and other machines can make it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from ...audit.checks.auditor import Verdict
from ...audit.checks.registry import Violation
from ...audit.errors import JournalError, Missed
from ...audit.events import Event
from ...audit.journal.host_folders import journal_name
from ...audit.journal.reader import Batch, Position, Reader
from ...audit.ledger.account import Account
from ...audit.replay import serialize
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journal_parts import skip_to_window
from ...audit.replay.journals import each_batch
from ...audit.replay.observers import KeptAccounts, Steps, taken
from ...audit.replay.windows import EVERYTHING, Window
from .blocks import BlockRows, BlockState
from .kept import (
    OBSERVERS,
    OLDER,
    KeptFile,
    Session,
    columns_of,
    files_of,
    folder_of,
    is_session,
    is_summed,
    journal_of,
    layout,
    readable,
    usable,
    whole_minutes,
)
from .parquet import RowWriter
from .rows import (
    Activity,
    EngineFacts,
    activity_rows,
    cause_rows,
    chunk_rows,
    difference_rows,
    engine_facts,
    finding_rows,
    head,
    request_row,
)
from .schema import TABLES, Row
from .sums import begin_window, take_sums
from .tables import Files, KeptRows


class Wanted(msgspec.Struct, frozen=True):
    """What a command needs of each journal beside the rows of its requests.

    Without anything: the rows of requests and causes. ``checks``: verdicts, and the rows of all tables.
    ``audit``: the whole audit too. ``activity``: the rows of ``activity``. ``turns``: those of ``turns`` and
    ``block_use``. ``blocks``: these, ``admissions`` and ``block_operations``.
    """

    checks: bool = False
    audit: bool = False
    activity: bool = False
    turns: bool = False
    blocks: bool = False


class Replayed(msgspec.Struct):
    """The rows of a journal by table, in Parquet files, and what else was :class:`Wanted`."""

    engine: EngineFacts
    tables: dict[str, list[bytes]]
    audit: EngineAudit | None = None
    kept: KeptRows | None = None
    """The files that compact wrote."""


_ROWS_OF = {"causes": cause_rows, "chunks": chunk_rows, "differences": difference_rows}
"""Tables with several rows for an account, or none."""

Sink = Callable[[str, Sequence[Row]], None]
"""Takes rows of the table of this name."""


class InMemory:
    """A Parquet file in memory for each table that has rows: a small journal has rows in few tables."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[io.BytesIO, RowWriter]] = {}
        """The file of each table, and what writes it."""

    def add(self, table: str, rows: Sequence[Row]) -> None:
        """Add rows to a table."""
        if not rows:
            return
        if table not in self._written:
            sink = io.BytesIO()
            self._written[table] = sink, RowWriter(sink, TABLES[table])
        self._written[table][1].add(rows)

    def files(self) -> dict[str, list[bytes]]:
        """The whole files. Nothing can be added after this."""
        for _, writer in self._written.values():
            writer.close()
        return {name: [sink.getvalue()] for name, (sink, _) in self._written.items()}


class RowCollector:
    """Makes the rows of one audit, batch by batch, for a ``sink``."""

    def __init__(
        self,
        audit: EngineAudit,
        wanted: Wanted,
        sink: Sink,
        *,
        minutes: bool = False,
        blocks: BlockState | None = None,
    ) -> None:
        self.activity = Activity(audit) if wanted.activity else None
        """What the engine did over time; None: not wanted."""
        self.sink = sink
        """Where rows go."""
        self.journal = journal_name(audit.path)
        """The journal's name in rows."""
        self._audit = audit
        self.blocks: BlockRows | None = None
        """Makes the rows about blocks; None: not wanted."""
        if wanted.turns or wanted.blocks:
            self.blocks = BlockRows(
                audit,
                self.journal,
                self._put,
                operations=wanted.blocks,
                minutes=minutes,
                state=blocks,
            )
        self._verdicts: dict[int, Verdict] = {}
        """The verdicts of accounts that closed in this batch, by the identity of the account."""
        self._has_verdicts = wanted.checks or wanted.audit
        """Whether the audit runs the checks."""
        self._rows_of = _ROWS_OF if self._has_verdicts else {"causes": cause_rows}
        """What makes the rows of tables with several rows for an account; sums need the causes alone."""
        audit.on_closed.append(self._closed)

    def _put(self, table: str, rows: Sequence[Row]) -> None:
        if rows:
            self.sink(table, rows)

    def _closed(self, account: Account, verdict: Verdict) -> None:
        self._verdicts[id(account)] = verdict

    def add(self, events: Sequence[Event], accounts: Sequence[Account]) -> None:
        """Add a batch, and the accounts that closed in it, or are open at the end of the journal."""
        if self.activity is not None:
            self.activity.add(events)
        if self.blocks is not None:
            self.blocks.add(events)
        verdicts = self._verdicts if self._has_verdicts else {}
        if accounts:
            shared = head(self._audit, self.journal)
            self.sink(
                "requests", [request_row(shared, account, verdicts.get(id(account))) for account in accounts]
            )
            for table, rows_of in self._rows_of.items():
                self.sink(table, [row for account in accounts for row in rows_of(shared, account)])
        self._verdicts.clear()

    def found(self, findings: Sequence[Violation]) -> None:
        """Add findings."""
        if findings:
            self.sink("findings", finding_rows(self._audit, self.journal, findings))

    def end(self) -> None:
        """Add the rows of the activity, and leave the audit."""
        self._audit.on_closed.remove(self._closed)
        if self.blocks is not None:
            self.blocks.end()
        if self.activity is not None:
            rows = activity_rows(self._audit.name, self.journal, self.activity.series)
            self.sink("activity", list(rows))


def replayed(path: Path, windows: Sequence[Window], wanted: Wanted) -> list[Replayed]:
    """Replay a journal once for all ``windows``, or what came since it was compacted for each.

    ``path`` may be that of the session of a journal that is gone.
    """
    session, missed = usable(path, files_of(windows))
    if missed and is_session(path):
        raise Missed(missed)
    if session is not None and missed:
        session = rebased(path, session, missed)
    if session is not None and (is_session(path) or all(map(whole_minutes, windows))):
        found = _left if is_session(path) else _since  # engine time is kept by the minute
        return [found(path, session, session.within(window), wanted) for window in windows]
    first = min(windows, key=lambda window: window.since or 0.0)
    audit = _audit(path, first, wanted)
    start = skip_to_window(audit)
    audits = [audit if window is first else _audit(path, window, wanted, audit) for window in windows]
    if missed:
        for one in audits:
            one.journal.missed.append(missed)
    return _read(audit, audits, wanted, start, None)


class _UpTo:
    """Reads a journal up to a position."""

    ended = stopped = continues = False

    def __init__(self, reader: Reader, position: Position) -> None:
        self._reader = reader
        self._end = (position.segment, position.offset)

    def poll(self) -> Iterator[Batch]:
        """The batches before the position."""
        return takewhile(
            lambda batch: (batch.start.segment, batch.start.offset) < self._end, self._reader.poll()
        )


TRACE = ("admissions", "block_operations")
"""Tables whose rows name lives and blocks by numbers of the audit that made them."""


def rebased(path: Path, session: Session, missed: str, sink: Sink | None = None) -> Session:
    """A session of another version, so that the replay of its journal goes on where it ends.

    The open requests and blocks are those of an audit of the segments that are left. The sums are those of
    kept rows, so every request counts once. ``sink`` gets the rows of the block trace, which begins again.
    ``missed``: why the verdict is not clean from now on.
    """

    def put(table: str, rows: Sequence[Row]) -> None:
        if sink is not None and table in TRACE:
            sink(table, rows)

    audit = EngineAudit(path, OBSERVERS)
    everything = Wanted(audit=True, activity=True, blocks=True)
    collector = RowCollector(audit, everything, put, minutes=True)  # as of kept rows, which it goes on with
    with Reader(path) as reader:
        for batch, _ in audit.batches(_UpTo(reader, session.position)):  # type: ignore[arg-type]
            collector.add(batch.events, taken(audit))
    files = [file for file in session.files if file.table not in TRACE]
    found = msgspec.structs.replace(session, files=files, tail=[], ended=False, layout=layout())
    take_sums(audit, _kept_rows(path, audit.name, found, EVERYTHING, with_tail=False))
    audit.journal.missed.append(missed)
    assert collector.blocks is not None
    found.block_state = msgspec.Raw(msgspec.msgpack.encode(collector.blocks.state))
    found.state = msgspec.Raw(serialize.capture(audit))
    return found


def _read(
    reading: EngineAudit,
    audits: Sequence[EngineAudit],
    wanted: Wanted,
    start: Position | None,
    session: Session | None,
) -> list[Replayed]:
    """Replay a journal from ``start`` by the audit that is ``reading`` for all ``audits``."""
    blocks = None if session is None else session.blocks()
    sinks = [InMemory() for _ in audits]
    collectors = [
        RowCollector(audit, wanted, sink.add, blocks=blocks)
        for audit, sink in zip(audits, sinks, strict=True)
    ]
    if session is not None:
        for collector in collectors:
            if collector.activity is not None:
                collector.activity.go_on(session.series_within(reading.window), session.counts)
    for batch in each_batch(reading, start):
        for audit, collector in zip(audits, collectors, strict=True):
            collector.add(batch.events, batch.accounts if audit is reading else taken(audit))
        if session is not None:
            collectors[0].found(batch.findings)
    found = []
    for audit, collector, sink in zip(audits, collectors, sinks, strict=True):
        if session is None:
            collector.found(audit.violations)
        collector.end()
        found.append(Replayed(engine_facts(audit), sink.files(), audit if wanted.audit else None))
    return found


def _since(path: Path, session: Session, window: Window, wanted: Wanted) -> Replayed:
    """What is kept of a journal, and what came since; nothing came since the end of one that has ended."""
    if session.ended:
        return _left(path, session, window, wanted)
    audit = session.audit(path, window)
    kept = _kept_rows(path, audit.name, session, window, with_tail=False)
    if wanted.audit:
        begin_window(audit, session, window, kept)
    (found,) = _read(audit, [audit], wanted, session.position, session)
    engine = msgspec.structs.replace(found.engine, rows_from_seconds=session.rows_from_in(window))
    return msgspec.structs.replace(found, engine=engine, kept=kept)


_GONE = "the journal is gone: these are the facts that kvledger journals compact kept"
_LACKS = "which do not have its last events"


def _left(path: Path, session: Session, window: Window, wanted: Wanted) -> Replayed:
    """What is kept of a journal that has ended, or is gone."""
    engine = session.engine_facts(path, window)
    kept = _kept_rows(path, engine.name, session, window, with_tail=True)
    found = Replayed(engine, {name: [] for name in TABLES}, kept=kept)
    if wanted.audit:
        if not session.continues:
            raise JournalError(
                f"{path} was compacted by another version of kvledger, and its journal is gone: it has rows "
                "for summary, why and query, and no page."
            )
        found.audit = session.audit(path, window)
        if is_session(path):
            found.audit.notes.append(_GONE if session.ended else f"{_GONE} {_LACKS}")
        begin_window(found.audit, session, window, kept)
        found.audit.finish()
        taken(found.audit)
    return found


def _kept_rows(path: Path, engine: str, session: Session, window: Window, *, with_tail: bool) -> KeptRows:
    """The kept files, and which of them have rows that no sums have."""
    folder = path.parent if is_session(path) else folder_of(path)
    files = session.files_within(window, with_tail=with_tail)
    rest = [file for file in files if not is_summed(file, window)]
    return KeptRows(journal_name(journal_of(path)), engine, _by_table(folder, files), _by_table(folder, rest))


def _by_table(folder: Path, files: Sequence[KeptFile]) -> Files:
    found: Files = {}
    for file in files:
        name = file.table if file.columns == columns_of(file.table) else f"{file.table}{OLDER}"
        found.setdefault(name, []).append(str(readable(folder, file)))
    return found


def _audit(path: Path, window: Window, wanted: Wanted, beside: EngineAudit | None = None) -> EngineAudit:
    observers = OBSERVERS if wanted.audit else (KeptAccounts, Steps)
    invariants = None if wanted.audit or wanted.checks else ()
    return EngineAudit(path, observers, window=window, invariants=invariants, beside=beside)
