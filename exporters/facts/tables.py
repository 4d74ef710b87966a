"""The facts as tables in DuckDB: views of Parquet files, and their rows. Needs the analysis extra.

pyarrow opens the files, and DuckDB asks it for columns and rows. So DuckDB itself needs no file, and where a
user's SQL runs it may open none, neither to read nor to write. One folder is left, in which it puts what
does not fit into memory; it is empty, and goes when the command ends. Since DuckDB 2.0 a ``COPY`` inside of
a ``SELECT`` could write there, so a query that does more than select is refused before it runs.

A query ends: by Ctrl-C within two seconds, after :data:`MOST_SECONDS`, and when it takes more memory or has
more values than it may. DuckDB's own bound on memory leaves out some of what it holds, and all that Python
does, and not every one of its functions looks whether it was interrupted. So the query runs in a thread of
its own, and a process whose query does not stop leaves it behind.
"""

from __future__ import annotations

import itertools
import math
import re
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import duckdb

from ...audit.errors import LedgerError
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.windows import Window
from .groups import HOUR_EXPRESSIONS
from .hours import HOUR_LABELS, HOURLY, added_up, query_of
from .kept import OLDER, hour_time
from .parquet import dataset
from .rows import EngineFacts
from .schema import TABLES, Column

ONLY_SUMS = "Of requests of {journal} that ended before {time} only sums by the hour are kept."

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
        self.gone = {one.journal: one.rows_from_seconds for one in engines if one.rows_from_seconds}
        """Journals of which the window has only sums by the hour, before the Unix time that is named."""
        self._connection = connection

    def summed(self, columns: Sequence[str], where: str) -> bool:
        """Whether sums by the hour can answer a question with these expressions over requests.

        Raises LedgerError if they can't and rows that it needs were removed.
        """
        if HOUR_EXPRESSIONS.issuperset(columns) and self._has_labels(where):
            return True
        self.need_rows(
            f"A group or condition by another column than {', '.join(HOUR_LABELS)}, engine, hour or day"
        )
        return False

    def _has_labels(self, where: str) -> bool:
        if where:
            try:
                labels = f"SELECT engine, journal, {', '.join(HOUR_LABELS)} FROM kept.hours"
                self.rows(f"SELECT 1 FROM ({labels}) WHERE ({where}) LIMIT 0")
            except LedgerError:
                return False
        return True

    def need_rows(self, what: str) -> None:
        """Raise LedgerError if rows of the window's requests were removed."""
        if self.gone:
            time = hour_time(max(self.gone.values()))
            raise LedgerError(
                f"{what} needs the rows of requests, and there are only sums by the hour of those that ended "
                f"before {time}: ask with --since {time}."
            )

    @property
    def notes(self) -> list[str]:
        """A sentence for each journal of which rows were removed."""
        return [
            ONLY_SUMS.format(journal=journal, time=hour_time(since)) for journal, since in self.gone.items()
        ]

    @property
    def cut(self) -> list[str]:
        """Of which invariants of which journals not all findings are rows."""
        return [f"{engine.journal}: {words}" for engine in self.engines for words in engine.cut]

    def mount_sums(self) -> None:
        """Make the tables of sums by the hour."""
        mount_sums(self._connection)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises LedgerError for one that DuckDB refuses, or that is not one SELECT."""
        return self.answer(query)[1]

    def answer(self, query: str, most: float = math.inf) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The names of a query's columns, and its rows. Raises LedgerError as :meth:`rows` does.

        Also for an answer of more than ``most`` values.
        """
        try:
            return ended(self._connection, lambda: self._answer(query, most))
        except duckdb.Error as error:
            raise LedgerError(_sentence(error)) from None

    def _answer(self, query: str, most: float) -> tuple[list[str], list[tuple[Any, ...]]]:
        self._require_one_select(query)
        found = self._connection.execute(query)
        names = [column[0] for column in found.description]
        rows: list[tuple[Any, ...]] = []
        while some := found.fetchmany(ROWS_AT_ONCE):
            rows += some
            if len(rows) * len(names) > most:
                raise LedgerError(
                    f"The answer has more than {most:,} values: select fewer columns or sums, or add "
                    "LIMIT. kvledger export writes all rows."
                )
        return names, rows

    def _require_one_select(self, query: str) -> None:
        """Raise LedgerError for other statements, also those in a WITH or in a text that a function runs."""
        kinds = [str(one.type).rpartition(".")[2] for one in self._connection.extract_statements(query)]
        if kinds != ["SELECT"]:
            raise LedgerError(f"A query is one SELECT, and this is {', '.join(kinds) or 'nothing'}.")
        (parsed,) = self._connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchone()
        for node in _NODES.findall(parsed):
            if node not in _SELECTS:
                raise LedgerError(f"A query is one SELECT, and this has {node.partition('_')[0]} in it.")
        for function in _FUNCTIONS.findall(parsed):
            if function.lower() in _RUN_TEXT:
                raise LedgerError(f"A query is one SELECT, and {function} runs a text as another one.")


_NODES = re.compile(r'"type":\s*"(\w+_NODE)"')
_FUNCTIONS = re.compile(r'"function_name":\s*"(\w+)"')
"""In a parsed query as JSON, where a text of the query has its quotes escaped."""
_SELECTS = ("SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE")
_RUN_TEXT = ("query", "json_execute_serialized_sql")


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
    """Files that ``kvledger journals compact`` wrote of one journal, and its name and its engine's now.

    ``rest``: those of rows that no sums by the hour have, of the hours that are whole in the window.
    """

    journal: str
    engine: str
    files: Files
    rest: Files


def mount(
    connection: Any,
    files: Files,
    window: Window,
    *,
    kept: Sequence[KeptRows] = (),
    exported: Files | None = None,
) -> None:
    """Make the tables of files that were replayed for the ``window``, kept, and exported.

    The schema :data:`KEPT` has the sums by the hour that were kept, and :data:`REST` the rows that they lack.
    :func:`mount_sums` adds both up.
    """
    connection.execute("CREATE SCHEMA kept; CREATE SCHEMA rest")
    for name, columns in TABLES.items():
        inside = _inside(columns, window)
        parts = [_select(connection, columns, files[name])] if files.get(name) else []
        if exported and exported.get(name):
            parts.append(_select(connection, columns, exported[name]) + inside)
        rows = _kept(connection, name, columns, kept, [one.files for one in kept], inside)
        _view(connection, name, columns, parts + rows)
        if name in _SUMMED:
            rows = _kept(connection, name, columns, kept, [one.rest for one in kept], inside)
            _view(connection, REST + name, columns, parts + rows)
    for table in HOURLY.values():
        inside = _whole_hours(window)
        parts = _kept(connection, table.name, table.columns, kept, [one.files for one in kept], inside)
        _view(connection, KEPT + table.name, table.columns, parts)


def mount_sums(connection: Any) -> None:
    """Make the tables of sums by the hour: the sums that were kept, and those of the rows that they lack.

    DuckDB takes as long to bind these as all other tables, and only SQL that names them needs them.
    """
    for table in HOURLY.values():
        both = f"{query_of(table, REST)} UNION ALL SELECT * FROM {KEPT}{table.name}"
        connection.execute(f"CREATE VIEW {table.name} AS {added_up(table, both)}")


KEPT, REST = "kept.", "rest."
_SUMMED = ("requests", *(table.of for table in HOURLY.values()))

MEMORY = "1GB"
"""What a query may use before it writes to a folder."""

SPILL = "20GB"
"""What it may write there."""


MOST_VALUES = 10_000_000
"""What the answer to a user's query may have, rows times columns."""

MOST_SECONDS = 600.0
MOST_GROWTH = 3 << 30
"""How many bytes a query may add to the memory of this process; DuckDB keeps to :data:`MEMORY` of them."""

ROWS_AT_ONCE = 10_000
LOOK_SECONDS = 0.1
STOP_SECONDS = 1.0
"""How long a query may take to stop, before it is left behind."""

left_behind: list[Any] = []
"""The connections of queries that did not stop. The process must not wait for their threads."""

Result = TypeVar("Result")


def ended(connection: Any, work: Callable[[], Result]) -> Result:
    """What ``work`` returns or raises, which runs a query of this connection; it ends by a limit or Ctrl-C.

    Raises LedgerError for a query that reaches a limit.
    """
    found: list[Result] = []
    raised: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # the waiting caller raises it
            raised.append(error)
        finally:
            done.set()

    ends, most = time.monotonic() + MOST_SECONDS, _memory_bytes() + MOST_GROWTH
    threading.Thread(target=run, name="kvledger-query", daemon=True).start()
    why = ""
    try:
        while not why and not done.wait(LOOK_SECONDS):
            if time.monotonic() > ends:
                why = f"took longer than {MOST_SECONDS:,.0f} s"
            elif _memory_bytes() > most:
                why = f"needs more than {MOST_GROWTH >> 30} GiB of memory"
    except BaseException:
        _stop(connection, done)
        raise
    if why:
        _stop(connection, done)
        raise LedgerError(f"The query {why} and was ended.")
    if raised:
        raise raised[0]
    return found[0]


def _stop(connection: Any, done: threading.Event) -> None:
    ends = time.monotonic() + STOP_SECONDS
    while time.monotonic() < ends:
        connection.interrupt()  # again: what it reaches may have only just begun
        if done.wait(LOOK_SECONDS):
            return
    left_behind.append(connection)


def _memory_bytes() -> int:
    """The most memory that this process held at a time."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def close(connection: Any) -> None:
    """Close a connection, unless its query was left behind: that would wait for it."""
    if not any(connection is one for one in left_behind):
        connection.close()


def connect(spill: Path | None = None) -> Any:
    """An empty database in memory: the door of all SQL, which opens no file and changes no setting.

    ``spill``: the folder that gets what does not fit into memory; None: no file is written. A query that
    takes seconds draws no progress into a command's output.
    """
    connection = duckdb.connect()
    settings = {
        "enable_progress_bar": "false",
        "memory_limit": quoted(MEMORY),
        "temp_directory": quoted("" if spill is None else str(spill / "spill")),
        "max_temp_directory_size": quoted(SPILL),
        "python_enable_replacements": "false",
        "enable_external_access": "false",
        "lock_configuration": "true",
    }
    # A Jupyter kernel without ipywidgets has no bar, and there DuckDB refuses to turn it off, too.
    if connection.execute("SELECT current_setting('enable_progress_bar')").fetchone() == (False,):
        del settings["enable_progress_bar"]
    for name, value in settings.items():
        connection.execute(f"SET {name} = {value}")
    return connection


def _view(connection: Any, name: str, columns: Sequence[Column], parts: Sequence[str]) -> None:
    """The rows of a table, from all parts. One without rows is an empty table, which DuckDB makes faster."""
    if parts:
        connection.execute(f"CREATE VIEW {name} AS {' UNION ALL '.join(parts)}")
    else:
        typed = ", ".join(f"{column.name} {SQL_TYPES[column.kind]}" for column in columns)
        connection.execute(f"CREATE TABLE {name} ({typed})")


def _kept(
    connection: Any,
    name: str,
    columns: Sequence[Column],
    kept: Sequence[KeptRows],
    files: Sequence[Files],
    inside: str,
) -> list[str]:
    """The rows of a table in the ``files`` of each journal."""
    parts = []
    for one, chosen in zip(kept, files, strict=True):
        named = {"journal": quoted(one.journal), "engine": quoted(one.engine)}
        for table in (name, f"{name}{OLDER}"):
            if chosen.get(table):
                parts.append(_select(connection, columns, chosen[table], named) + inside)
    return parts


def _select(
    connection: Any, columns: Sequence[Column], files: Sequence[str], named: Mapping[str, str] = NOTHING
) -> str:
    """The rows of files; a column that a file lacks is null. pyarrow opens each file when rows are read."""
    selected = ", ".join(
        f"{named[column.name]} AS {column.name}" if column.name in named else _selected(column)
        for column in columns
    )
    name = f"files_{next(_numbers)}"
    connection.register(name, dataset(files, columns))
    return f"SELECT {selected} FROM {name}"


_numbers = itertools.count()


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


def _whole_hours(window: Window) -> str:
    """The condition on sums of hours that are whole in the window."""
    bounds = [
        f"epoch_us(hour) {text} {round(bound * 1e6)}"
        for text, bound in ((">=", window.since), (f"+ {HOUR_US} <=", window.until))
        if bound is not None
    ]
    return f" WHERE {' AND '.join(bounds)}" if bounds else ""


HOUR_US = 3_600_000_000


def _selected(column: Column) -> str:
    """A column of a file as SQL. A time becomes one without a zone, in UTC."""
    if column.kind == "time":
        return f"make_timestamp(epoch_us({column.name})) AS {column.name}"
    return column.name


def quoted(text: str) -> str:
    """Text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
