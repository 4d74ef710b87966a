"""What ``kvledger journals compact`` keeps beside the journals, and where the replay of a journal goes on.

    .kvledger-facts/requests/engine=NAME/ended_hour=2026-11-24T09/JOURNAL-3.parquet
    .kvledger-facts/hours/engine=NAME/ended_day=2026-11-24/JOURNAL-3.parquet
    .kvledger-facts/JOURNAL.session

The dataset is plain Hive-partitioned Parquet: whatever reads that can read it. The *session* of a journal
lists its files, and holds the audit up to there, as a checkpoint does. kvledger reads the files that a
session lists and no others. So a compact that is killed loses nothing and counts nothing twice: it writes
files under draft names, then replaces the session, then renames the drafts. A reader that finds a draft
which the session lists reads it; the next compact renames it.

Facts stay when their journal is removed. Sums by the hour have every row of a request that has ended: one
replacement of the session lists both. So what is removed by its age is not lost, and counts once.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote
from zlib import crc32

import msgspec

from ...audit.analysis.step_model import StepModel
from ...audit.errors import LedgerError, Missed
from ...audit.events import EngineStarted
from ...audit.journal.catalogue import say
from ...audit.journal.format import segments
from ...audit.journal.host_folders import engine_name, journal_name, same_place
from ...audit.journal.reader import Position
from ...audit.journal.safe_open import digest, is_intact, read_file
from ...audit.replay import checkpoint, serialize
from ...audit.replay.atomic_files import FOLDER, left_behind, replaced
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.observers import KeptAccounts, Lost, Reconciled, Steps
from ...audit.replay.windows import Window
from ..trace.time_series import Series
from .blocks import BlockState
from .blocks import layout as blocks_layout
from .hours import HOURLY, Doubts
from .rows import CountsState, EngineFacts
from .schema import TABLES, Column

OBSERVERS = (KeptAccounts, Reconciled, Lost, Steps)
"""What counts in the audit that a session holds."""

SCHEMA = 2
MOST_DAMAGE = 100
SUFFIX = ".session"
DRAFT = ".new"
OPEN_HOUR = "__HIVE_DEFAULT_PARTITION__"
"""The partition of requests that never ended. It is how Hive names a null."""

_LINE = f"kvledger session {SCHEMA} ".encode()
_HOUR = "%Y-%m-%dT%H"
_DAY = "%Y-%m-%d"
DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3600.0

LASTING = ("activity", "findings", "block_use")
"""Tables whose rows are kept as long as sums by the hour; others are removed with the rows of requests."""

COLUMNS: dict[str, tuple[Column, ...]] = {**TABLES, **{name: one.columns for name, one in HOURLY.items()}}
"""The columns of all tables that are kept."""


Digest = bytes
"""In a class with a field ``bytes`` the type has no other name."""


class KeptFile(msgspec.Struct, frozen=True, array_like=True):
    """One file of a table, by its path below the folder of facts. ``hour``: when its requests ended.

    That is a day for sums by the hour. ``columns``: a checksum of the names of its columns. ``digest``: that
    of its bytes; version 0.1.0 kept none, and the next compact adds it.
    """

    table: str
    path: str
    hour: str
    rows: int
    bytes: int
    columns: int
    digest: Digest = b""

    @property
    def begins(self) -> float:
        """Unix time at which its hour or day begins. Not for :data:`OPEN_HOUR`."""
        return hour_seconds(self.hour)

    @property
    def ends(self) -> float:
        """Unix time at which its hour or day ends."""
        return self.begins + (DAY_SECONDS if self.table in HOURLY else HOUR_SECONDS)

    @property
    def lasts(self) -> bool:
        """Whether it is kept as long as sums by the hour."""
        return self.table in HOURLY or self.table in LASTING


OLDER = " of another version"
"""Files with other columns than this version writes are listed by the table's name with this behind it."""


def columns_of(table: str) -> int:
    """A checksum of the names of a table's columns in files that this version writes."""
    return crc32(" ".join(column.name for column in COLUMNS[table]).encode())


class Session(msgspec.Struct, kw_only=True):
    """Where the replay of a journal goes on, and the files that have what came before.

    ``position``: the batch to go on with. ``state``: the audit up to there, or up to the end of a journal
    that has ``ended``, of the ``layout`` of the version that wrote it. ``files`` have the rows up to there.
    ``tail`` has those of the last batch and of the requests that are open at the end, if the journal has
    ``ended``. ``series``: activity of the last minute, which is not over. ``facts``: the engine, in msgpack.
    """

    journal: str
    position: Position
    beginning: bytes
    number: int
    """How often the journal was compacted; it is in the names of the files."""
    files: list[KeptFile] = []
    tail: list[KeptFile] = []
    ended: bool = False
    state: msgspec.Raw
    layout: str
    engine: EngineStarted
    facts: msgspec.Raw
    verdict: str
    until_seconds: float
    """Unix time of the last event."""
    open_until_seconds: float
    """Unix time up to which a request that is open at the end may have run."""
    busy_us: dict[int, int] = {}
    """Engine time by minute since 1970."""
    tail_busy_us: dict[int, int] = {}
    """The same of the last batch."""
    series: Series = msgspec.field(default_factory=Series)
    counts: CountsState = (0, [])
    """The requests in the engine at ``position``."""
    doubts: Doubts = msgspec.field(default_factory=Doubts)
    """What went wrong, and when."""
    block_state: msgspec.Raw = msgspec.Raw(b"\xc0")
    """Where the rows about blocks go on: a :class:`BlockState` in msgpack."""
    damage: list[str] = []
    """What was damaged in the journal, the first :data:`MOST_DAMAGE` places."""
    ended_us: dict[str, int] = {}
    """When each request with a finding ended, in microseconds since 1970."""
    rows_from: float = 0.0
    """Unix time before which rows of requests were removed. Engine time is kept by the hour there."""
    sums_from: float = 0.0
    """Unix time before which sums by the hour were removed, too."""

    @property
    def continues(self) -> bool:
        """Whether this version can read the journal on from ``position``."""
        return self.layout == layout()

    def blocks(self) -> BlockState:
        """A copy of where the rows about blocks go on."""
        return msgspec.msgpack.decode(self.block_state, type=BlockState)

    def audit(self, path: Path, window: Window) -> EngineAudit:
        """The audit at ``position``, which counts requests of the ``window`` only from there on."""
        audit = serialize.restore(self.state, EngineAudit(journal_of(path), OBSERVERS, window=window))
        audit.of(Steps).sums.busy_us = self.busy_within(window) + _within(self.tail_busy_us, window)
        return audit

    def busy_within(self, window: Window) -> int:
        """Microseconds of engine time in the window, whose bounds are whole minutes."""
        return _within(self.busy_us, window)

    def series_within(self, window: Window) -> Series:
        """The activity of the minute that is not over, if it is in the window."""
        minutes = {*self.series.counts, *self.series.levels}
        return self.series if all(window.holds(60.0 * minute) for minute in minutes) else Series()

    def engine_facts(self, path: Path, window: Window) -> EngineFacts:
        """The engine of a journal that need not be read, or is gone.

        Where the window's bounds are no whole minutes, the time of its steps is not known.
        """
        facts = msgspec.msgpack.decode(self.facts, type=EngineFacts)
        busy_us, model = self.busy_within(window) + _within(self.tail_busy_us, window), facts.model
        if not whole_minutes(window):
            busy_us, model = 0, StepModel(refused="the bounds of the window are no whole minutes")
        journal = journal_of(path)
        return msgspec.structs.replace(
            facts,
            path=str(path),
            journal=journal_name(journal),
            name=engine_name(self.engine, journal),
            busy_us=busy_us,
            model=model,
            rows_from_seconds=self.rows_from_in(window),
        )

    def rows_from_in(self, window: Window) -> float | None:
        """The Unix time from which the window has rows of requests; None: from its beginning."""
        reaches = window.touches(self.sums_from, self.rows_from - 1e-6)
        return self.rows_from if self.rows_from and reaches else None

    def within(self, window: Window) -> Window:
        """The part of the window of which something is kept.

        Raises LedgerError for one that begins or ends within an hour of which there are only sums.
        """
        for bound in (window.since, window.until):
            if bound is not None and self.sums_from < bound < self.rows_from and bound % HOUR_SECONDS:
                raise LedgerError(
                    f"Of requests of {self.journal} that ended before {hour_time(self.rows_from)} only sums "
                    "by the hour are kept: before then --since and --until must be whole hours, such as "
                    f"{hour_time(bound)}."
                )
        is_cut = self.sums_from and (window.since is None or window.since < self.sums_from)
        return Window(self.sums_from, window.until) if is_cut else window

    def files_within(self, window: Window, *, with_tail: bool) -> list[KeptFile]:
        """The files that can have rows of the window."""
        found = [*self.files, *(self.tail if with_tail else ())]
        open_inside = window.until is None and window.touches(self.until_seconds, self.open_until_seconds)
        return [file for file in found if (open_inside if file.hour == OPEN_HOUR else _touches(window, file))]


def is_summed(file: KeptFile, window: Window) -> bool:
    """Whether the sums of hours that are whole in the window have the rows of this file."""
    if file.hour == OPEN_HOUR:
        return False
    since, until = window.since, window.until
    return (since is None or since <= file.begins) and (until is None or file.ends <= until)


def layout() -> str:
    """A checksum of what a session holds of an audit and of blocks."""
    return f"{serialize.layout()}.{blocks_layout()}"


def _within(by_minute: Mapping[int, int], window: Window) -> int:
    return sum(us for minute, us in by_minute.items() if window.holds(minute * 60.0))


def hour_name(seconds: float | None) -> str:
    """The partition of a request that ended then; None: it never did."""
    if seconds is None:
        return OPEN_HOUR
    return datetime.fromtimestamp(seconds, timezone.utc).strftime(_HOUR)


def hour_time(seconds: float) -> str:
    """The beginning of the hour of a Unix time, as ``--since`` takes it."""
    return f"{hour_name(seconds)}:00Z"


def day_of(hour: str) -> str:
    """The day of an hour, as :func:`hour_name` has it."""
    return hour[: len("2026-11-24")]


def hour_seconds(hour: str) -> float:
    """The Unix time at which an hour, or a day, begins."""
    form = _DAY if hour == day_of(hour) else _HOUR
    return datetime.strptime(hour, form).replace(tzinfo=timezone.utc).timestamp()


def _touches(window: Window, file: KeptFile) -> bool:
    return window.touches(file.begins, file.ends - 1e-6)


def whole_minutes(window: Window) -> bool:
    """Whether the bounds of a window are whole minutes, by which engine time is kept."""
    return all(bound is None or not bound % 60 for bound in (window.since, window.until))


# --- files ----------------------------------------------------------------------------------------------


def folder_of(journal: Path) -> Path:
    """The folder of facts beside a journal."""
    return journal.parent / FOLDER


def place(journal: Path) -> Path:
    """Where the session of a journal is."""
    return folder_of(journal) / f"{journal.name}{SUFFIX}"


def partition(table: str, engine: str, hour: str) -> str:
    """The folder of a table's rows of one engine and hour, or day, below the folder of facts."""
    time = "ended_day" if table in HOURLY else "ended_hour"
    return f"{table}/engine={quote(engine, safe='')}/{time}={hour}"


def draft_of(path: Path) -> Path:
    """The name of a file until the session lists it; the dot hides it from those who read the dataset."""
    return path.with_name(f".{path.name}{DRAFT}")


def readable(folder: Path, file: KeptFile) -> Path:
    """Where a listed file is: under its name, or still under that of its draft."""
    path = folder / file.path
    return path if os.path.lexists(path) or not os.path.lexists(draft_of(path)) else draft_of(path)


def journal_of(path: Path) -> Path:
    """The path of a journal, also if this is that of its session."""
    if not is_session(path):
        return path
    return same_place(path.parent.parent / path.name.removesuffix(SUFFIX), path)


def is_session(path: Path) -> bool:
    """Whether this is the path of a session, whose journal is gone."""
    return path.suffix == SUFFIX


def find(path: Path) -> Session | None:
    """The session of the journal at ``path``, if it can be read on from there; or the session at ``path``.

    Raises Missed for one at ``path`` that can't be used.
    """
    session, missed = usable(path)
    if missed and is_session(path):
        raise Missed(missed)
    return None if missed else session


Chosen = Callable[[Session], Iterable[KeptFile]]
"""Which files of a session a command reads."""


def every_file(session: Session) -> list[KeptFile]:
    """All files of a session."""
    return [*session.files, *session.tail]


def files_of(windows: Sequence[Window]) -> Chosen:
    """The files that can have rows of the windows."""

    def chosen(session: Session) -> Iterable[KeptFile]:
        for window in windows:
            yield from session.files_within(session.within(window), with_tail=True)

    return chosen


def usable(path: Path, read: Chosen = every_file) -> tuple[Session | None, str]:
    """The session of :func:`find`, and a sentence if there is one that can't be used and is missed.

    It is missed if what it stands for can't be read from the journal again. Every file must have its size,
    and those that are ``read`` their digest. The rows of a session that does not continue count, and its
    audit is to be :func:`~.replayed.rebased`.
    """
    session = path if is_session(path) else place(path)
    if not is_session(path) and not path.is_dir():
        return None, ""
    found, why = _loaded(session)
    if found is not None and not is_session(path):
        beginning = checkpoint.beginning(path, found.position.segment)
        if beginning not in (found.beginning, b""):
            why = "is of another journal of this name"
    if found is not None and not why:
        folder = session.parent
        lost = _changed(folder, every_file(found), digests=False) or _changed(folder, read(found))
        why = f"needs {lost}, which is gone or was changed" if lost else ""
    older = found is not None and not found.continues and not is_session(path) and segments(path)
    if not why and not older:
        return found, ""
    if not is_session(path) and 1 in segments(path):
        return None, ""
    if not why:
        return found, (
            f"{session} is of another version of kvledger: its rows count, but verdicts and block traces "
            "begin with the first segment that is left. kvledger journals compact goes on with it."
        )
    return None, (
        f"{session} {why}, and with it the only record of requests: figures lack them. "
        "Put it back, or remove it to go on without them."
    )


def _changed(folder: Path, files: Iterable[KeptFile], *, digests: bool = True) -> str:
    """The first of some files that is not as the session lists it; "" if all are."""
    return next(
        (
            file.path
            for file in files
            if not is_intact(readable(folder, file), file.bytes, file.digest if digests else b"")
        ),
        "",
    )


def with_digests(folder: Path, files: Iterable[KeptFile]) -> list[KeptFile]:
    """The files, those of older versions with a digest of what they hold now."""
    return [
        file if file.digest else msgspec.structs.replace(file, digest=digest(readable(folder, file)))
        for file in files
    ]


def load(path: Path) -> Session | None:
    """The session in a file; None if there is none that this version can read."""
    return _loaded(path)[0]


def _loaded(path: Path) -> tuple[Session | None, str]:
    """The session in a file, and why there is none; "" if there is no file."""
    try:
        data = read_file(path, _LINE)
        head, _, payload = data.partition(b"\n")
        if head != _LINE + b"%08x" % crc32(payload):
            return None, "is damaged, or of another version of kvledger"
        return msgspec.msgpack.decode(payload, type=Session), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"can't be read ({error.strerror})"
    except msgspec.MsgspecError:
        return None, "is of another version of kvledger"


def save(journal: Path, session: Session) -> None:
    """Replace the session of a journal, and rename the drafts that it lists. Raises LedgerError, OSError."""
    payload = msgspec.msgpack.encode(session)
    with replaced(place(journal), 0o644, "no facts are kept") as file:
        file.write(_LINE + b"%08x\n" % crc32(payload) + payload)
    settle(folder_of(journal), session)


def settle(folder: Path, session: Session) -> None:
    """Rename the drafts that a session lists, where an earlier compact was killed before it did."""
    for file in (*session.files, *session.tail):
        path = folder / file.path
        if not path.exists():
            with contextlib.suppress(FileNotFoundError):
                draft_of(path).rename(path)


def journals_and_sessions(
    paths: Sequence[Path], exported: Sequence[Path] = (), read: Chosen = every_file
) -> list[Path]:
    """Every journal at ``paths``, and the sessions of compacted journals that are gone.

    What was kept and can't be used is said, if the journal has lost what it stands for. ``read`` is that of
    :func:`usable`. Raises LedgerError if there is nothing, and nothing was ``exported`` either.
    """
    if exported and not paths:
        return []
    sessions = [session for path in paths if path.is_dir() for session in left_behind(path, SUFFIX)]
    try:
        found = [*journals_at(paths), *sessions]
    except LedgerError:
        if not sessions or len(paths) > 1:
            raise
        found = sessions
    missed = {path: problem for path in found if (problem := usable(path, read)[1])}
    left = [path for path in found if path not in missed or not is_session(path)]
    for problem in missed.values():
        if not left:
            raise Missed(problem)
        say(problem)
    return left
