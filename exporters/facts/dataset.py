"""The facts of some journals as tables in DuckDB, for one command. Needs the analysis extra.

A journal is replayed into rows, in this process or in others, and the rows are Parquet files in a folder that
goes when the command ends. In SQL no file can be opened, nothing can be written, and no setting can be
changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...audit import temporary
from ...audit.errors import LedgerError
from ...audit.replay.find import matching_paths
from ...audit.replay.parallel import Run, here, readable
from ...audit.replay.windows import EVERYTHING, Window
from .kept import files_of, journals_and_sessions
from .replayed import Replayed, Wanted, replayed
from .rows import EngineFacts
from .schema import ENGINES, TABLES
from .tables import SQL_TYPES, Facts, Files, close, connect, mount

ROWS_ONLY = Wanted()


@contextmanager
def facts(
    paths: Sequence[Path], *, window: Window = EVERYTHING, run: Run = here, wanted: Wanted = ROWS_ONLY
) -> Iterator[Facts]:
    """The facts of all journals at ``paths``, of the requests of the ``window``.

    ``run`` decides which processes replay the journals. Raises LedgerError for a path that holds no journal.
    """
    with facts_of_windows(paths, (window,), run=run, wanted=wanted) as (found,):
        yield found


@contextmanager
def facts_of_windows(
    paths: Sequence[Path], windows: Sequence[Window], *, run: Run = here, wanted: Wanted = ROWS_ONLY
) -> Iterator[list[Facts]]:
    """The same for several windows, for all of which a journal is replayed once."""
    places = [place for path in paths for place in matching_paths(path)]
    exported = [place for place in places if os.path.isfile(place / EXPORTED)]
    journals = journals_and_sessions(
        [place for place in places if place not in exported], exported, files_of(windows)
    )
    whole = partial(replayed, windows=windows, wanted=wanted)
    replays: list[list[Replayed]] = [[] for _ in windows]
    with temporary.folder("kvledger-facts-") as folder, ExitStack() as opened:
        files: list[Files] = [{name: [] for name in TABLES} for _ in windows]
        for several in readable(run, whole, journals):
            for place, one in enumerate(several):
                for name, parts in one.tables.items():
                    for part in parts:
                        path = Path(folder) / f"{name}-{place}-{len(files[place][name])}.parquet"
                        path.write_bytes(part)
                        files[place][name].append(str(path))
                replays[place].append(msgspec.structs.replace(one, tables={}))
        found = []
        for window, some, of_window in zip(windows, files, replays, strict=True):
            connection = connect(Path(folder))
            opened.callback(close, connection)
            kept = [one.kept for one in of_window if one.kept is not None]
            mount(connection, some, window, kept=kept, exported=_exported_files(exported))
            _add_engines(connection, [one.engine for one in of_window])
            audits = [one.audit for one in of_window if one.audit is not None]
            found.append(Facts(connection, [one.engine for one in of_window], audits, bool(exported)))
        yield found


EXPORTED = "requests.parquet"
"""A folder that holds this file was written by ``kvledger export``."""


def _exported_files(folders: Sequence[Path]) -> dict[str, list[str]]:
    """The files that ``kvledger export`` wrote, by table. Raises LedgerError for one of another schema."""
    from .parquet import column_names, require_sums

    files: dict[str, list[str]] = {name: [] for name in TABLES}
    for folder in folders:
        require_sums(folder)
        for name in TABLES:
            path = folder / f"{name}.parquet"
            if path.is_file():
                missing = {column.name for column in TABLES[name]}.difference(column_names(path))
                if missing:
                    raise LedgerError(f"{path} has no {min(missing)}: export it again.")
                files[name].append(str(path))
    return files


def _add_engines(connection: Any, engines: Sequence[EngineFacts]) -> None:
    typed = ", ".join(f"{column.name} {SQL_TYPES[column.kind]}" for column in ENGINES)
    connection.execute(f"CREATE TABLE engines ({typed})")
    if engines:
        row = f"INSERT INTO engines VALUES ({', '.join('?' * len(ENGINES))})"
        connection.executemany(row, [list(_engine_row(engine)) for engine in engines])


def _timestamp(seconds: float) -> datetime:
    return datetime.fromtimestamp(round(seconds, 6), timezone.utc).replace(tzinfo=None)


def _counted(number: int) -> int | None:
    """A number as a column holds it; None for one beyond 64 bits with a sign, which no engine has."""
    return number if abs(number) < 1 << 63 else None


def _engine_row(facts: EngineFacts) -> tuple[object, ...]:
    engine, model = facts.engine, facts.model
    settings = engine.configuration if engine else {}
    return (
        facts.name,
        facts.journal,
        facts.path,
        engine.engine if engine else None,
        engine.version if engine else None,
        engine.adapter if engine else None,
        engine.level if engine else None,
        _counted(engine.process_id) if engine else None,
        str(settings.get("model") or "") or None,
        facts.connector,
        _counted(facts.block_tokens) or None,
        None if engine is None else _timestamp(engine.began_seconds),
        facts.busy_us / 1e6,
        model.prefill_seconds,
        None if model.refused else model.decode_seconds,
        model.draft_seconds,
        None if facts.rows_from_seconds is None else _timestamp(facts.rows_from_seconds),
    )
