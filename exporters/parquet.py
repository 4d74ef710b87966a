"""Tables of a trace in Parquet files, for DuckDB, Spark, pandas, polars, or a spreadsheet.

One file a table, ``requests.parquet`` and so on; columns, units and what they mean stand in
``tables.py`` and with each field of the files. Needs the analysis extra.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvledger.audit.errors import LedgerError
from kvledger.exporters.tables import TABLES, Column, Rows, rows

ROW_GROUP = 64 << 10
TYPES = {"text": pa.string(), "count": pa.int64(), "seconds": pa.float64()}


def schema(columns: Sequence[Column]) -> Any:
    """A table's schema; what a column means is in its metadata, as ``description``."""
    return pa.schema(
        [pa.field(c.name, TYPES[c.kind], metadata={"description": c.says}) for c in columns],
    )


def export(paths: Sequence[Path], folder: Path) -> dict[str, int]:
    """Write every table into ``folder``; rows by table. A file stands whole or not at all.

    Raises :class:`LedgerError` for a path that holds no journal and a folder that can't be written.
    """
    files: dict[str, _File] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: _File(folder / f"{name}.parquet", schema(TABLES[name])) for name in TABLES}
        for name, some in rows(paths):
            files[name].add(some)
        for file in files.values():
            file.finish()
    except OSError as error:
        raise LedgerError(f"{folder} can't be written: {error.strerror or error}.") from error
    finally:
        for file in files.values():
            file.abandon()
    return {name: file.rows for name, file in files.items()}


class _File:
    """One table's file, under another name until it is whole."""

    def __init__(self, path: Path, columns: Any) -> None:
        self.rows = 0
        self._path = path
        self._draft = path.with_name(f"{path.name}.new")
        self._schema = columns
        self._writer: Any = pq.ParquetWriter(self._draft, columns, compression="zstd")
        self._waiting: Rows = []

    def add(self, some: Rows) -> None:
        self._waiting += some
        if len(self._waiting) >= ROW_GROUP:
            self._write()

    def finish(self) -> None:
        self._write()
        self._writer.close()
        self._draft.replace(self._path)

    def abandon(self) -> None:
        """Leave nothing behind that is not whole. After :meth:`finish` it does nothing."""
        with contextlib.suppress(OSError):
            self._writer.close()
            self._draft.unlink(missing_ok=True)

    def _write(self) -> None:
        if not self._waiting:
            return
        columns = zip(*self._waiting, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(pa.record_batch(arrays, self._schema))
        self.rows += len(self._waiting)
        self._waiting = []
