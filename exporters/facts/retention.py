"""What compact does beside rows: sums by the hour of new files, and the removal of files by their age."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...audit import temporary
from ...audit.replay.windows import EVERYTHING, duration
from .hours import HOURLY, KEEP_SECONDS, Hourly
from .kept import (
    DAY_SECONDS,
    DRAFT,
    HOUR_SECONDS,
    OPEN_HOUR,
    SUFFIX,
    KeptFile,
    Session,
    day_of,
    readable,
)
from .schema import Row
from .tables import Facts, Files, KeptRows, close, connect, mount, mount_sums, quoted


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
