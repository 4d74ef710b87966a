"""Rows as Parquet: written in row groups, to a file or to memory. Needs the analysis extra.

Times are delta-encoded and text is a dictionary, so that a request takes about fifty bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ...audit.errors import JournalError, LedgerError
from ...audit.foreign import text_of
from ...audit.journal.safe_open import digest, reading
from .schema import Column, Row, Rows

ROW_GROUP = 64 << 10
ROWS_AT_ONCE = 8 << 10
"""Rows that are read as Python objects at a time."""

TYPES = {
    "text": pa.string(),
    "count": pa.int64(),
    "seconds": pa.float64(),
    "time": pa.timestamp("us", tz="UTC"),
    "counts": pa.list_(pa.int64()),
    "distribution": pa.map_(pa.float64(), pa.int64()),
}
_ALL_DIFFERENT = ("request_id", "message")
"""Text of which nearly every row has another one; a dictionary would only be in the way."""


def schema(columns: Sequence[Column]) -> Any:
    """A table's schema, with each column's ``description`` as metadata."""
    return pa.schema(
        [pa.field(c.name, TYPES[c.kind], metadata={"description": c.description}) for c in columns],
    )


def dataset(files: Sequence[str], columns: Sequence[Column]) -> Any:
    """The rows of some files. Each is opened when it is read; a column that it lacks is null."""
    import pyarrow.dataset as datasets  # it imports pandas: 0.3 s for nothing, where no file is read

    return datasets.dataset(list(files), schema(columns), format="parquet")


SUMS = "SHA256SUMS"
"""The file beside exported tables that has their digests, as ``sha256sum -c`` reads it."""


def sums(folder: Path) -> dict[str, str]:
    """The digests of the exported files of a folder by their names; none if it has no list of them."""
    if not (folder / SUMS).exists():
        return {}
    lines = (line.split(maxsplit=1) for line in text_of(folder / SUMS, 1 << 16).splitlines())
    return {words[1]: words[0] for words in lines if len(words) == 2}


def require_sums(folder: Path) -> None:
    """Raise LedgerError for an exported file that is not as it was exported."""
    for name, expected in sums(folder).items():
        path, found = folder / Path(name).name, ""
        with contextlib.suppress(OSError):
            found = digest(path, hashlib.sha256()).hex()
        if found != expected:
            raise LedgerError(f"{path} is not as it was exported: export it again, or remove {SUMS}.")


def column_names(path: Path) -> list[str]:
    """The names of the columns of a file. Raises LedgerError for one that can't be read."""
    try:
        with reading(path) as opened, pq.ParquetFile(opened) as file:
            return list(file.schema_arrow.names)
    except (pa.ArrowException, OSError) as error:
        raise JournalError(f"{path} can't be read: {error}.") from error


def read_columns(path: Path, names: Sequence[str]) -> Iterator[list[list[Any]]]:
    """Columns of a file, some rows at a time. A time is microseconds since 1970, and a null count -1.

    Raises LedgerError for a file that can't be read.
    """
    try:
        with reading(path) as opened, pq.ParquetFile(opened) as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(names), use_threads=False):
                yield [_values(column) for column in map(batch.column, names)]
    except (pa.ArrowException, OSError) as error:
        raise JournalError(f"{path} can't be read: {error}.") from error


def _values(column: Any) -> list[Any]:
    if pa.types.is_list(column.type):
        numbers, ends = _integers(column.flatten()), column.offsets.to_pylist()
        return [numbers[start - ends[0] : end - ends[0]] for start, end in pairwise(ends)]
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    return _integers(column) if pa.types.is_integer(column.type) else list(column.to_pylist())


def _integers(column: Any) -> list[int]:
    """The integers of a column; pyarrow's own conversion imports pandas, which takes 50 MiB and a second."""
    if column.null_count:
        return [-1 if value is None else value for value in column.to_pylist()]
    if not len(column):
        return []
    return memoryview(column.buffers()[1]).cast("q")[column.offset : column.offset + len(column)].tolist()


_RISING = ("request", "number", "life", "arrival")
"""Counts that rise from row to row, or nearly do."""

_REPEATED_LEVEL = 9
"""How hard zstd searches lists for those that came before: hits and evictions repeat hash ids."""


class RowWriter:
    """Writes the rows of one table into ``sink``, a path or a pyarrow stream."""

    def __init__(self, sink: Any, columns: Sequence[Column]) -> None:
        self.rows = 0
        """How many rows were added."""
        self._schema = schema(columns)
        self._waiting: Rows = []
        """Rows that are not written yet."""
        deltas = [c.name for c in columns if c.kind == "time" or c.name in _RISING]
        self._writer: Any = pq.ParquetWriter(
            sink,
            self._schema,
            compression="zstd",
            compression_level={
                f"{c.name}.list.element": _REPEATED_LEVEL for c in columns if c.kind == "counts"
            }
            or None,
            use_dictionary=[c.name for c in columns if c.name not in (*deltas, *_ALL_DIFFERENT)],
            column_encoding=dict.fromkeys(deltas, "DELTA_BINARY_PACKED"),
        )

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows. Raises LedgerError for a figure that does not fit into 64 bits."""
        self._waiting += rows
        if len(self._waiting) >= ROW_GROUP:
            self._write()

    def write(self, table: Any) -> None:
        """Add a pyarrow table with these columns."""
        self._write()
        self._writer.write_table(table.cast(self._schema))
        self.rows += len(table)

    def close(self) -> None:
        """Write what waits, and end the file. Raises LedgerError as :meth:`add`."""
        self._write()
        self._writer.close()

    def abandon(self) -> None:
        """End without writing what waits."""
        self._writer.is_open = False  # else the garbage collector tries to close it again and logs an error

    def _write(self) -> None:
        if not self._waiting:
            return
        try:
            columns = zip(*self._waiting, strict=True)
            arrays = [
                pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)
            ]
        except (OverflowError, pa.ArrowInvalid) as error:
            raise LedgerError(
                f"A figure of this trace does not fit into a column of 64 bits: {error}."
            ) from error
        self._writer.write_batch(pa.record_batch(arrays, self._schema))
        self.rows += len(self._waiting)
        self._waiting = []
