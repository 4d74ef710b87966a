"""The one reader of text that others wrote: logs, traces, metrics, predictions, options, settings.

Whoever wrote it may have meant harm, or may have been cut off. So a file is opened without waiting and read
in lines of bounded length, a packed one is unpacked up to a bound, JSON has bounded depth and digits, and
numbers have a range. What can't be understood is an :class:`Unreadable` with the reason, which a reader puts
behind the number of the line. Text of journals is read in ``journal/``; YAML in ``sidecar/web_config.py``.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from .errors import LedgerError
from .text import printable

MOST_LINE_BYTES = 16 << 20
"""A line of a trace with the hashes of a prompt of a million tokens has a tenth of it."""

MOST_UNPACKED_BYTES = 4 << 30
"""What a packed file may unpack to."""

MOST_DIGITS = 18
"""Digits of a number that stands as text: as many as 64 bits have in any case."""

MOST_COUNT = 1 << 53
"""A larger count is none: JSON's numbers are exact up to here."""

Type = TypeVar("Type")


class Unreadable(Exception):
    """Why a text can't be understood: the end of a sentence, such as ``is no JSON object``."""


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, each with its number; a file named ``.gz`` is unpacked.

    A line that is too long is cut, so that :func:`parsed` refuses it. Raises LedgerError for a file that
    can't be read.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if path.name.endswith(".gz"):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield from _lines(unpacked, path)  # type: ignore[arg-type]
            else:
                yield from _lines(file, path)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise LedgerError(f"{path} can't be read: {printable(why)}.") from error


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = read = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number, read, rest = number + 1, read + len(line), line
        while len(rest) > MOST_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MOST_LINE_BYTES + 1)
            read += len(rest)
        if read > MOST_UNPACKED_BYTES and path.name.endswith(".gz"):
            raise LedgerError(f"{path} unpacks to more than {MOST_UNPACKED_BYTES:,} bytes.")
        if line.strip():
            yield number, line


def text_of(path: Path, most: int) -> str:
    """A whole small file in UTF-8. Raises LedgerError, also for one of more than ``most`` bytes."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise LedgerError(f"{path} is larger than {most:,} bytes.")
        return data.decode()
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError:
        raise LedgerError(f"{path} can't be read: not UTF-8.") from None


def parsed(text: str | bytes, type: type[Type], *, strict: bool = True) -> Type:
    """JSON as a value of this type. Raises :class:`Unreadable`."""
    if len(text) > MOST_LINE_BYTES:
        raise Unreadable(f"is longer than {MOST_LINE_BYTES:,} bytes")
    try:
        return msgspec.json.decode(text, type=type, strict=strict)
    except RecursionError:
        raise Unreadable("is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise Unreadable(f"is not as it should be: {printable(str(error))}") from None
    except (msgspec.MsgspecError, UnicodeError):
        raise Unreadable("is no JSON") from None


def count(value: object) -> int:
    """A count, which some write as text. Raises :class:`Unreadable`."""
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS else -1
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_COUNT:
        raise Unreadable("has a token count that is no number")
    return value


def whole_number(text: str) -> int | None:
    """The whole number that a short text is; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def number(text: str) -> float | None:
    """The number, or infinity, that a short text is; None for any other text."""
    try:
        found = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        return None
    return None if math.isnan(found) else found


# --- metrics -------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """One line of metrics: ``name{label="value"} 1``."""

    name: str
    labels: dict[str, str]
    value: float


MOST_SAMPLES = 100_000
MOST_SAMPLE_BYTES = 64 << 10
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*(?:\{|(?=[ \t]))")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\.)*)"[ \t]*,?')
_VALUE = re.compile(r"[ \t]*([+-]?(?:[0-9.eE+-]{1,40}|[Ii]nf|NaN))(?:[ \t]|$)")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}
_TYPE = re.compile(r"# (?:TYPE|HELP) ([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]")


def families(text: str, names: frozenset[str]) -> dict[str, list[Sample]]:
    """The samples of metrics in Prometheus's text format, by name; one that is only described has none.

    Only lines of these ``names`` are read: others, such as the histograms of many engines, can be anything.
    Raises :class:`Unreadable` for a line that is not as it should be, and for too many.
    """
    found: dict[str, list[Sample]] = {}
    samples = 0
    for number, line in enumerate(text.split("\n"), 1):
        described = _TYPE.match(line)
        if described is not None:
            if described[1] in names:
                found.setdefault(described[1], [])
            continue
        head = _SAMPLE.match(line)
        if head is None or head[1] not in names:
            continue
        samples += 1
        if samples > MOST_SAMPLES or len(line) > MOST_SAMPLE_BYTES:
            raise Unreadable(
                f"has more than {MOST_SAMPLES:,} samples of an engine, or a line of more than "
                f"{MOST_SAMPLE_BYTES:,} bytes"
            )
        found.setdefault(head[1], []).append(_sample(line, head, number))
    return found


def _sample(line: str, head: re.Match[str], number: int) -> Sample:
    labels, place = {}, head.end()
    if head[0].endswith("{"):
        while label := _LABEL.match(line, place):
            labels[label[1]] = _ESCAPED.sub(lambda one: _ESCAPES.get(one[1], one[0]), label[2])
            place = label.end()
        if line[place : place + 1] != "}":
            raise Unreadable(f"has labels in line {number} that are none")
        place += 1
    value = _VALUE.match(line, place)
    try:
        return Sample(head[1], labels, float(value[1] if value else ""))
    except ValueError:
        raise Unreadable(f"has a value in line {number} that is no number") from None
