"""The facts as tables in DuckDB: views of Parquet files, and their rows. Needs the analysis extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import duckdb

from ...audit.errors import LedgerError
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.windows import Window
from .engine import EngineFacts
from .kept import OLDER
from .schema import TABLES, Column

SQL_TYPES = {
    "text": "VARCHAR",
    "count": "BIGINT",
    "seconds": "DOUBLE",
    "time": "TIMESTAMP",
    "counts": "BIGINT[]",
    "distribution": "MAP(DOUBLE, BIGINT)",
}


class Facts:
    """Tables of requests and their causes, and of the engines. Times are in UTC.

    ``engines``: one for each journal, in their order; ``audits`` too, if they were wanted.
    ``exported``: whether some rows are of tables that were exported, which have no engine.
    """

    def __init__(
        self,
        connection: Any,
        engines: Sequence[EngineFacts] = (),
        audits: Sequence[EngineAudit] = (),
        exported: bool = False,
    ) -> None:
        self.exported = exported
        self.engines = list(engines)
        self.audits = list(audits)
        self._connection = connection
        """The DuckDB connection, which can read these tables alone."""

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises LedgerError for one that DuckDB refuses."""
        found: list[tuple[Any, ...]] = self.relation(query).fetchall()
        return found

    def relation(self, query: str) -> Any:
        """The result of a query, for which DuckDB has not been asked for rows yet. Raises LedgerError."""
        try:
            return self._connection.execute(query)
        except duckdb.Error as error:
            raise LedgerError(_sentence(error)) from None

    def statements(self, text: str) -> list[Any]:
        """The statements of a text, parsed. Raises LedgerError for one that is no SQL."""
        try:
            return list(self._connection.extract_statements(text))
        except duckdb.Error as error:
            raise LedgerError(_sentence(error)) from None


def _sentence(error: Exception) -> str:
    """DuckDB's message in one line, with the candidates that it names."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(
        line for line in lines if line and not set(line) <= {"^", " "} and not line.startswith("LINE ")
    )
    return text if text.endswith((".", "!", "?")) else f"{text}."


NOTHING: Mapping[str, str] = MappingProxyType({})

Files = dict[str, list[str]]
"""The paths of Parquet files by table; a table may be missing."""


class KeptRows(NamedTuple):
    """Files that ``kvledger compact`` wrote of one journal, and what it and its engine are called now."""

    journal: str
    engine: str
    files: Files


def mount(
    connection: Any,
    files: Files,
    window: Window,
    *,
    kept: Sequence[KeptRows] = (),
    exported: Files | None = None,
) -> None:
    """Make the tables of files that were replayed for the ``window``, kept, and exported."""
    for name, columns in TABLES.items():
        parts = []
        inside = _inside(columns, window)
        if files.get(name):
            parts.append(_select(columns, files[name]))
        if exported and exported.get(name):
            parts.append(_select(columns, exported[name]) + inside)
        for one in kept:
            named = {"journal": quoted(one.journal), "engine": quoted(one.engine)}
            for table in (name, f"{name}{OLDER}"):
                if one.files.get(table):
                    by_name = table != name
                    parts.append(_select(columns, one.files[table], named, by_name=by_name) + inside)
        connection.execute(f"CREATE VIEW {name} AS {' UNION ALL '.join(parts or [_empty(columns)])}")


def _select(
    columns: Sequence[Column],
    files: Sequence[str],
    named: Mapping[str, str] = NOTHING,
    *,
    by_name: bool = False,
) -> str:
    """The rows of files. With ``by_name`` a column that a file lacks is null; each file is opened first."""
    selected = ", ".join(
        f"{named[column.name]} AS {column.name}" if column.name in named else _selected(column)
        for column in columns
    )
    options = f"union_by_name = {by_name}, hive_partitioning = false"
    return f"SELECT {selected} FROM read_parquet({listed(files)}, {options})"


def listed(files: Sequence[str]) -> str:
    return f"[{', '.join(map(quoted, files))}]"


def _empty(columns: Sequence[Column]) -> str:
    typed = ", ".join(f"CAST(NULL AS {SQL_TYPES[column.kind]}) AS {column.name}" for column in columns)
    return f"SELECT {typed} WHERE false"


def _inside(columns: Sequence[Column], window: Window) -> str:
    """The condition on rows, as :meth:`~kvledger.audit.replay.windows.Window.has` puts it."""
    time = next(column.name for column in columns if column.name in ("closed_time", "time"))
    bounds = [
        f"epoch_us({time}) {sign} {round(bound * 1e6)}"
        for sign, bound in ((">=", window.since), ("<", window.until))
        if bound is not None
    ]
    is_open = f"{time} IS NULL OR " if window.until is None else ""
    return f" WHERE {is_open}({' AND '.join(bounds)})" if bounds else ""


def _selected(column: Column) -> str:
    """A column of a file as SQL. A time becomes one without a zone, in UTC."""
    if column.kind == "time":
        return f"make_timestamp(epoch_us({column.name})) AS {column.name}"
    return column.name


def quoted(text: str) -> str:
    """Text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
