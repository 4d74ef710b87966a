"""CSV, of which a spreadsheet runs no cell: request ids, models and groups are text that clients chose.

A spreadsheet takes a cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return for a
formula. So such a text gets an apostrophe, as spreadsheets write text. Numbers have none. A text that begins
with apostrophes before one of these gets one more, so that no two texts look alike.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import msgspec

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def cell(value: object) -> object:
    """A value for a cell. What is no text is a number, nothing, or begins with a letter, digit or bracket."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def csv_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """CSV with a header, without the last line break; an empty cell for None."""
    lines: list[str] = []
    # The writer quotes a carriage return only if it is in the line terminator.
    out = SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n")))
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(map(cell, columns))
    writer.writerows([map(cell, row) for row in rows])
    return "\n".join(lines)


def structs_csv(kind: type[msgspec.Struct], rows: Iterable[msgspec.Struct]) -> str:
    """CSV of structs of one ``kind``, one line each."""
    names = [field.name for field in msgspec.structs.fields(kind)]
    return csv_of(names, ([getattr(row, name) for name in names] for row in rows))
