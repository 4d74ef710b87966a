"""Tables of a trace in Parquet files, for DuckDB, Spark, pandas, polars, or a spreadsheet.

One file per table, such as ``requests.parquet``. Columns and their meaning are in ``tables.py`` and in the
metadata of each field. :func:`sums` reads a folder of requests back. Needs the analysis extra.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ...audit.errors import LedgerError
from ...audit.replay.windows import EVERYTHING, Window
from ..files import draft_of
from .groups import NO_ADAPTER, NO_GROUP, NO_SALT, TIMES, named_by, time_name
from .tables import TABLES, Column, Rows, rows

ROW_GROUP = 64 << 10
BUFFER_BYTES = 256 << 10
TYPES = {
    "text": pa.string(),
    "count": pa.int64(),
    "seconds": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
}


def schema(columns: Sequence[Column]) -> Any:
    """A table's schema, with each column's ``description`` as metadata."""
    return pa.schema(
        [pa.field(c.name, TYPES[c.kind], metadata={"description": c.description}) for c in columns],
    )


def export(
    paths: Sequence[Path],
    folder: Path,
    wanted: Collection[str] = tuple(TABLES),
    window: Window = EVERYTHING,
) -> dict[str, int]:
    """Write the ``wanted`` tables into ``folder``; return the number of rows by table.

    Each file is written whole or not at all. Raises :class:`LedgerError` for a path that holds no journal,
    a folder that can't be written, and a name that is no table.
    """
    for name in wanted:
        if name not in TABLES:
            raise LedgerError(f"{name!r} is no table: there are {', '.join(TABLES)}.")
    if folder.exists() and not folder.is_dir():
        raise LedgerError(f"{folder} can't be written: it is a file, not a folder.")
    files: dict[str, _File] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [name for name in TABLES if name in wanted]
        for name in names:
            files[name] = _File(folder / f"{name}.parquet", schema(TABLES[name]))
        for name, some in rows(paths, names, window):
            files[name].add(some)
        for file in files.values():
            file.finish()
        for file in files.values():
            file.publish()
    except (OverflowError, pa.ArrowInvalid) as error:
        raise LedgerError(
            f"A figure of this trace does not fit into a column of 64 bits: {error}."
        ) from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise LedgerError(f"{folder} can't be written: {reason}.") from error
    finally:
        for file in files.values():
            file.abandon()
    return {name: file.rows for name, file in files.items()}


class _File:
    """One table's file, under a draft name until it is complete."""

    def __init__(self, path: Path, columns: Any) -> None:
        self.rows = 0
        self._path = path
        self._draft = draft_of(path)
        self._schema = columns
        # Buffered, so that a disk that is full from the start leaves no half-open writer.
        self._sink = pa.BufferedOutputStream(pa.OSFile(str(self._draft), "wb"), BUFFER_BYTES)
        self._writer: Any = pq.ParquetWriter(self._sink, columns, compression="zstd")
        self._waiting: Rows = []

    def add(self, some: Rows) -> None:
        self._waiting += some
        if len(self._waiting) >= ROW_GROUP:
            self._write()

    def finish(self) -> None:
        self._write()
        self._writer.close()
        self._sink.close()

    def publish(self) -> None:
        """Replace the file of an earlier export. Call after :meth:`finish`."""
        self._draft.replace(self._path)

    def abandon(self) -> None:
        """Remove the draft. Does nothing after :meth:`publish`."""
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
            self._sink.close()
        self._writer.is_open = False  # else the garbage collector tries to close it again and logs an error
        with contextlib.suppress(OSError):
            self._draft.unlink(missing_ok=True)

    def _write(self) -> None:
        if not self._waiting:
            return
        columns = zip(*self._waiting, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, self._schema))
        self.rows += len(self._waiting)
        self._waiting = []


# --- reading requests back -----------------------------------------------------------------------------

REQUESTS = "requests.parquet"

SUMS = (
    "preemptions", "prompt_tokens", "local", "external", "computed", "unattained", "scheduled", "rework",
    "rejected", "overrun", "promised", "loaded", "waited_microseconds",
)  # fmt: skip


def sums(folder: Path, by: str, window: Window) -> dict[str, dict[str, int]]:
    """Sum the columns :data:`SUMS` of a folder's requests by group, with ``requests`` and ``unknown``.

    ``by`` is as for :func:`~.groups.group_key`. Raises :class:`LedgerError` for files with another schema.
    """
    columns = [*_group_columns(by), *SUMS]
    try:
        # read_table would take seconds to import modules that a single file does not need.
        with pq.ParquetFile(folder / REQUESTS) as file:
            missing = set(columns).difference(file.schema_arrow.names)
            table = None if missing else file.read(columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise LedgerError(f"{folder / REQUESTS} can't be read: {error}.") from error
    if table is None:
        raise LedgerError(f"{folder / REQUESTS} has no {sorted(missing)[0]}: export it again.")
    if window.bounded:
        table = table.filter(_in_window(table, window))
    unknown = pc.cast(pc.is_valid(table["unknown"]), pa.int64())
    key = _group(table, by)
    columns_to_sum = table.select(SUMS).append_column("unknown", unknown).append_column("group", key)
    grouped = columns_to_sum.group_by("group").aggregate(
        [([], "count_all"), *((name, "sum") for name in (*SUMS, "unknown"))]
    )
    return {
        row["group"]: {
            "requests": row["count_all"],
            **{name: row[f"{name}_sum"] or 0 for name in (*SUMS, "unknown")},
        }
        for row in grouped.to_pylist()
    }


def _group_columns(by: str) -> tuple[str, ...]:
    always = ("unknown", "outcome", "closed_seconds", "began_seconds")
    return always + {
        "engine": ("engine",), "model": ("model",), "hour": ("added_seconds",), "5m": ("added_seconds",),
        "outcome": (), "": (), "rank": ("data_parallel_rank",), "priority": ("priority",),
        **{key: (column,) for key, (column, _) in LABELS.items()},
    }.get(by, ("request_id",))  # fmt: skip


LABELS = {"lora": ("lora", NO_ADAPTER), "salt": ("salt", NO_SALT), "group": ("request_group", NO_GROUP)}
"""The column of each label, and the group of requests without it."""


def _in_window(table: Any, window: Window) -> Any:
    """Select rows as :meth:`~kvledger.audit.replay.windows.Window.has` does."""
    ended = pc.add(table["began_seconds"], table["closed_seconds"])
    inside: Any = pc.is_valid(ended)
    if window.since is not None:
        inside = pc.and_(inside, pc.fill_null(pc.greater_equal(ended, window.since), False))
    if window.until is not None:
        return pc.and_(inside, pc.fill_null(pc.less(ended, window.until), False))
    return pc.or_(inside, pc.is_null(table["closed_seconds"]))


def _group(table: Any, by: str) -> Any:
    if by in ("engine", "model"):
        return table[by]
    if by in TIMES:
        began = pc.fill_null(table["began_seconds"], 0.0)
        places = pc.floor(pc.divide(pc.add(began, table["added_seconds"]), float(TIMES[by]))).to_pylist()
        words = {place: time_name(int(place), TIMES[by]) for place in set(places)}
        return pa.array(map(words.__getitem__, places), pa.string())
    if by in ("rank", "priority"):
        return pc.cast(table["data_parallel_rank" if by == "rank" else by], pa.string())
    if by in LABELS:
        column, without = LABELS[by]
        return pc.fill_null(table[column], without)
    if by == "outcome":
        without = pc.if_else(pc.is_valid(table["closed_seconds"]), "unknown", "open")
        return pc.coalesce(table["outcome"], without)
    if not by:
        return pa.array([""] * len(table), pa.string())
    names = named_by(by)
    return pa.array([names(name) for name in table["request_id"].to_pylist()], pa.string())
