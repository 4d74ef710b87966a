"""Lists the journals of a folder, and removes old ones when asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from rich.console import Group
from rich.text import Text

from ...audit.errors import LedgerError
from ...audit.journal.catalogue import find_journals, host_folders
from ...audit.journal.listing import JournalFacts, facts, prunable, recordings_in, workers_of
from ...audit.replay.atomic_files import FOLDER
from ...audit.replay.find import journals_at, short_names
from ...audit.replay.parallel import Run, here, is_remote
from ...audit.text import utc
from ..csv_cells import structs_csv
from .terminal import blocks, bytes_text, counted, plain_table


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
    values = {each: getattr(known, each) for each in known.__struct_fields__ if each != "path"}
    return JournalRow(journal=str(known.path), name=name, verdict=verdict, **values)


def render(rows: Sequence[JournalRow]) -> Group:
    """How many journals there are, then a line each."""
    audited = any(row.verdict for row in rows)
    table = plain_table(header=True)
    for name in ("name", "model", "rank", "host", "release", "level", "state", "from (UTC)", "to (UTC)"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "bytes"):
        table.add_column(name, justify="right")
    if audited:
        table.add_column("verdict")
    for row in rows:
        rank = "-" if row.rank is None else str(row.rank)
        cells = [row.name, row.model or "-", rank, row.host or "-"]
        cells += [row.release or "-", row.level or "-", row.state]
        cells += [_time(row.began_seconds), _time(row.until_seconds)]
        cells += ["-" if row.requests is None else f"{row.requests:,}", bytes_text(row.bytes)]
        table.add_row(*map(Text, [*cells, row.verdict] if audited else cells))
    whole = bytes_text(sum(row.bytes for row in rows))
    live = sum(row.state == "live" for row in rows)
    running = f", {live} of them of live engines" if live else ""
    return blocks(Group(Text(f"{counted(len(rows), 'journal')}, {whole}{running}.")), table)


def as_csv(rows: Sequence[JournalRow]) -> str:
    """One line per journal, with a header."""
    return structs_csv(JournalRow, rows)


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


def render_pruned(result: Pruned) -> Group:
    """What was or would be removed."""
    name_of = names_of(row.journal for row in result.journals)
    did = "Removed" if result.removed else "Would remove"
    answer = f"{did} {counted(len(result.journals), 'journal')}, {bytes_text(result.bytes)}"
    more = "" if result.removed or not result.journals else " Nothing was removed: add --yes to do it."
    table = plain_table(header=True)
    for name in ("journal", "release", "to (UTC)"):
        table.add_column(name)
    table.add_column("bytes", justify="right")
    for row in result.journals:
        cells = (name_of(row.journal), row.release or "-", _time(row.until_seconds), bytes_text(row.bytes))
        table.add_row(*map(Text, cells))
    text = Text(f"{answer}; {counted(result.kept, 'journal')} would stay.{more}")
    if result.removed:
        text = Text(f"{answer}; {counted(result.kept, 'journal')} left.")
    return blocks(Group(text), table if result.journals else None)


def pruned_csv(result: Pruned) -> str:
    """One line per journal, with a header."""
    return structs_csv(JournalRow, result.journals)


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
