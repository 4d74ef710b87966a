"""Tables of a trace in Parquet files, for DuckDB, Spark, pandas, polars, or a spreadsheet.

One file per table, such as ``requests.parquet``. Columns and their meaning are in ``columns.py`` and in the
metadata of each field. Commands read a folder with ``requests.parquet`` back. Needs the analysis extra.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa

from ...audit.errors import LedgerError
from ...audit.journal.safe_open import digest
from ...audit.replay.windows import EVERYTHING, Window
from ..facts.parquet import SUMS, RowWriter, sums
from ..facts.schema import Column, Rows
from ..files import draft_of, write_whole
from .columns import TABLES, rows

BUFFER_BYTES = 256 << 10


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
            files[name] = _File(folder / f"{name}.parquet", TABLES[name])
        for name, some in rows(paths, names, window):
            files[name].add(some)
        for file in files.values():
            file.finish()
        kept = {name: of for name, of in sums(folder).items() if name.removesuffix(".parquet") not in names}
        (folder / SUMS).unlink(missing_ok=True)
        for file in files.values():
            file.publish()
        for path in (folder / f"{name}.parquet" for name in names):
            kept[path.name] = digest(path, hashlib.sha256()).hex()
        write_whole(folder / SUMS, "".join(f"{of}  {name}\n" for name, of in sorted(kept.items())))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise LedgerError(f"{folder} can't be written: {reason}.") from error
    finally:
        for file in files.values():
            file.abandon()
    return {name: file.rows for name, file in files.items()}


class _File:
    """One table's file, under a draft name until it is complete."""

    def __init__(self, path: Path, columns: Sequence[Column]) -> None:
        self._path = path
        """Where the complete file is published."""
        self._draft = draft_of(path)
        """The path until then."""
        # Buffered, so that a disk that is full from the start leaves no half-open writer.
        self._sink = pa.BufferedOutputStream(pa.OSFile(str(self._draft), "wb"), BUFFER_BYTES)
        self._writer = RowWriter(self._sink, columns)

    @property
    def rows(self) -> int:
        """How many rows were written."""
        return self._writer.rows

    def add(self, some: Rows) -> None:
        self._writer.add(some)

    def finish(self) -> None:
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
        self._writer.abandon()
        with contextlib.suppress(OSError):
            self._draft.unlink(missing_ok=True)
