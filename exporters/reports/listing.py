"""Lists the journals of a folder, compacts them, and removes old ones when asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...audit.errors import LedgerError
from ...audit.journal.catalogue import (
    JournalFacts,
    facts,
    find_journals,
    host_folders,
    prunable,
    recordings_in,
    say,
    workers_of,
)
from ...audit.replay.atomic_files import FOLDER
from ...audit.replay.find import journals_at, short_names
from ...audit.replay.parallel import Run, here, is_remote
from ...audit.text import utc
from ..answer import Answer, Table, bytes_text, counted, made, records

if TYPE_CHECKING:
    from ..facts.compact import Compacted, Retention


class JournalRow(msgspec.Struct, frozen=True, kw_only=True):
    """One journal. Times are Unix time.

    ``name`` is the short name, which commands take too. ``verdict`` is of a replay, or else that of the last
    compact; "" without either.
    """

    journal: str
    name: str
    engine: str
    release: str
    model: str
    rank: int | None
    host: str
    level: str
    state: str
    began_seconds: float | None
    until_seconds: float | None
    requests: int | None
    bytes: int
    segments: int
    verdict: str = ""

    @property
    def since(self) -> str:
        """When it began, without a date's zone: the columns are of UTC."""
        return _time(self.began_seconds)

    @property
    def until(self) -> str:
        """When it ended."""
        return _time(self.until_seconds)


def journals(paths: Sequence[Path], *, audit: bool = False, run: Run = here) -> list[JournalRow]:
    """A row for each journal at ``paths``, the oldest first. ``audit`` replays them for the verdict.

    Recordings of KV events beside the journals have rows too, without a verdict of their own.
    """
    found = journals_at(paths)
    recordings = recordings_in(path.parent for path in found if not is_remote(path) and path not in paths)
    verdicts = list(run(_compacted_verdict, found))
    if audit:
        from ...audit.replay.journals import audit_paths

        verdicts = [engine.verdict for engine in audit_paths(found, run=run).engines]
    names = short_names([*found, *recordings])
    known = [*zip(run(facts, found), verdicts, strict=True), *((facts(path), "") for path in recordings)]
    rows = [_row(one, names[place], verdict) for place, (one, verdict) in zip(names, known, strict=True)]
    return sorted(rows, key=lambda row: (row.began_seconds or 0.0, row.journal))


def _compacted_verdict(journal: Path) -> str:
    """The verdict when the journal was last compacted; "" if it never was."""
    if not os.path.lexists(journal.parent / FOLDER):
        return ""  # which needs no replay to be imported
    from ..facts import kept

    session = kept.load(kept.place(journal))
    return "" if session is None else session.verdict


def _row(known: JournalFacts, name: str, verdict: str = "") -> JournalRow:
    return made(JournalRow, known, journal=str(known.path), name=name, verdict=verdict)


def answer(rows: Sequence[JournalRow]) -> Answer:
    """How many journals there are, then a line each."""
    live = sum(row.state == "live" for row in rows)
    running = f", {live} of them of live engines" if live else ""
    whole = bytes_text(sum(row.bytes for row in rows))
    columns = (
        "name | model | rank | host | release | level | state | from (UTC)=since | to (UTC)=until | "
        "requests | bytes:bytes"
    )
    verdict = " | verdict" if any(row.verdict for row in rows) else ""
    sentence = f"{counted(len(rows), 'journal')}, {whole}{running}."
    return Answer(rows, [sentence], [Table(rows, columns + verdict)], records(JournalRow, rows))


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """Journals that were removed, or would be. ``kept``: how many stay."""

    removed: bool
    journals: list[JournalRow]
    bytes: int
    kept: int


def prune(
    folder: Path, *, before_seconds: float | None, most_bytes: int | None, remove: bool = False
) -> Pruned:
    """Choose the journals of ended engines in ``folder`` that are old or too many, and ``remove`` them.

    Raises LedgerError if there is nothing to choose by, or a journal can't be removed.
    """
    if before_seconds is None and most_bytes is None:
        raise LedgerError("Say which journals: --older-than 30d, --most 50GiB, or both.")
    if not folder.is_dir():
        raise LedgerError(f"{folder} is not a folder of journals.")
    recordings = recordings_in([folder, *host_folders(folder)])
    try:
        journals = [path for path in find_journals([folder]) if path != folder]
    except LedgerError:
        if not recordings:
            raise
        journals = []  # only recordings of engines whose journals are gone
    found = [facts(path) for path in [*journals, *recordings]]
    chosen = prunable(found, before_seconds=before_seconds, most_bytes=most_bytes)
    names = short_names(one.path for one in chosen)
    if remove:
        for one in chosen:
            _remove(one.path)
    return Pruned(
        removed=remove,
        journals=[_row(one, names[one.path]) for one in chosen],
        bytes=sum(one.bytes for one in chosen),
        kept=len(found) - len(chosen),
    )


def _remove(journal: Path) -> None:
    """Remove a journal and those of its workers; the lock says last whether an engine writes there."""
    if facts(journal).state == "live":
        raise LedgerError(f"{journal} is being written: nothing of it was removed.")
    for path in [*workers_of(journal), journal]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            raise LedgerError(f"{path} can't be removed: {error.strerror}.") from error


def answer_of_pruned(result: Pruned) -> Answer:
    """What was or would be removed."""
    did = "Removed" if result.removed else "Would remove"
    stay = f"{counted(result.kept, 'journal')} {'left' if result.removed else 'would stay'}."
    more = "" if result.removed or not result.journals else " Nothing was removed: add --yes to do it."
    sentence = f"{did} {counted(len(result.journals), 'journal')}, {bytes_text(result.bytes)}; {stay}{more}"
    name_of = names_of(row.journal for row in result.journals)
    rows = [(name_of(row.journal), row.release, row.until, bytes_text(row.bytes)) for row in result.journals]
    table = Table(rows, "journal | release | to (UTC) | bytes")
    return Answer(result, [sentence], [table], records(JournalRow, result.journals))


def compact_all(paths: Sequence[Path], *, keep: Retention | None = None, run: Run = here) -> list[Compacted]:
    """Keep or continue the facts of every journal at ``paths``; what can't be is said. Raises LedgerError.

    With ``keep`` old rows are removed, also those of journals that are gone.
    """
    from ..facts.compact import LATER, compact
    from ..facts.kept import is_session, journals_and_sessions

    found = journals_and_sessions(paths)
    rows = list(run(partial(compact, keep=keep), [path for path in found if keep or not is_session(path)]))
    for row in rows:
        if row.problem and row.problem not in LATER:
            say(f"{row.journal} was not compacted: {row.problem}")
    return rows


def answer_of_compacted(rows: Sequence[Compacted]) -> Answer:
    """How many requests are kept, then a line for each journal."""
    from ..facts.compact import Compacted

    whole = [row for row in rows if not row.problem]
    requests, size = sum(row.requests for row in whole), bytes_text(sum(row.bytes for row in whole))
    sentence = (
        f"{counted(requests, 'ended request')} of {counted(len(whole), 'journal')} in {size} of Parquet."
    )
    if removed := sorted({row.rows_from for row in whole} - {""}):
        sentence += f" Of requests that ended before {' or '.join(removed)} only sums by the hour are kept."
    name_of = names_of(row.journal for row in rows)
    shown = [
        (name_of(row.journal), None, None, None, f"not compacted: {row.problem}")
        if row.problem
        else (name_of(row.journal), row.requests, row.files, bytes_text(row.bytes), row.verdict)
        for row in rows
    ]
    table = Table(shown, "journal | requests | files | bytes | verdict")
    return Answer(rows, [sentence], [table], records(Compacted, rows))


def names_of(journals: Iterable[str]) -> Callable[[str], str]:
    """How each of these journals is shown: by its name, with the folder where there are several."""
    several = len({Path(journal).parent for journal in journals}) > 1

    def name(journal: str) -> str:
        path = Path(journal)
        return f"{path.parent.name}/{path.name}" if several else path.name

    return name


def _time(seconds: float | None) -> str:
    """The columns are of UTC, so the cells do not say it."""
    return "-" if seconds is None else utc(seconds).removesuffix(" UTC")
