"""What a command answers, as data: sentences, tables, charts and notes; and how figures are written.

The first sentence is the conclusion. ``terminal.py`` writes an answer as text, ``writers.py`` as CSV, JSON,
Markdown and HTML, and nothing else knows how output looks. A report makes an answer, and no output.

A sentence is plain text. Leading blanks indent it, and ``- `` makes it one of a list. Words of
:data:`TONES` have a colour where they are a cell, or begin a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..audit.errors import LedgerError

if TYPE_CHECKING:
    import msgspec

    Struct = TypeVar("Struct", bound=msgspec.Struct)

BAR = "bar"
"""The form of a share that a writer may draw."""

GOOD, BAD, DOUBT, DIM, STRONG = "good", "bad", "doubt", "dim", "strong"

TONES = {
    **dict.fromkeys(("clean", "passes", "parts", "ok", "Calibrated", "Reproduced"), GOOD),
    **dict.fromkeys(("violated", "violation", "fails", "shares", "broke", "missing", "unexplained"), BAD),
    **dict.fromkeys(("Not calibrated", "Not reproduced", "Refused"), BAD),
    **dict.fromkeys(("unknown", "error", "no control", "partly", "drift"), DOUBT),
    **dict.fromkeys(("inherited", "not reached", "not here"), DIM),
}
"""The tone of words that judge."""


JUDGING = re.compile(rf"({'|'.join(sorted(TONES, key=len, reverse=True))})(?=[:.;,]|  | at level)")
"""A word that judges, at the beginning of a sentence."""


class Words(str):
    """Text in a tone of its own."""

    tone: str

    def __new__(cls, text: str, tone: str) -> Words:
        """``tone``: GOOD, BAD, DOUBT, DIM or STRONG."""
        words = super().__new__(cls, text)
        words.tone = tone
        return words


class Sum(tuple[Any, ...]):
    """A row that stands out: a sum, or figures that rows with an indented label lead to."""


class Column(NamedTuple):
    """A heading, where its values come from, and how they are written."""

    heading: str
    field: str
    form: str

    def value(self, row: Any, place: int) -> Any:
        """The value in this place of a row: an attribute, a key, or a share of one in another."""
        if isinstance(row, tuple) and not hasattr(row, "_fields"):
            return row[place]
        part, _, whole = self.field.partition("/")
        found = row[part] if isinstance(row, Mapping) else getattr(row, part)
        return share(found, getattr(row, whole)) if whole else found


class Table(NamedTuple):
    """Rows below headings. A table without rows is not printed.

    Columns are headings, or one text: separated by ``|``, each ``heading=field:form``. The field is a name of
    the rows, or ``a/b`` for the share of one in another; without one it is the heading. A tuple has its
    values in the order of the columns, may be shorter, and separates if it is empty. Forms are those of
    :data:`FORMS` and of Python; without one, a value is written by its type.
    """

    rows: Sequence[Any]
    columns: str | Sequence[str]
    title: str = ""
    legend: str = ""

    def head(self) -> list[Column]:
        """The columns."""
        if isinstance(self.columns, str):
            return list(map(_column, self.columns.split("|")))
        return [Column(each, each, "") for each in self.columns]

    def values(self) -> list[list[Any]]:
        """The values of the rows."""
        head = self.head()
        return [
            [
                each.value(row, place)
                for place, each in enumerate(head[: len(row)] if isinstance(row, tuple) else head)
            ]
            for row in self.rows
        ]

    def cells(self) -> list[list[str]]:
        """The written values; a text keeps its tone."""
        head = self.head()
        return [
            [written(value, each.form) for value, each in zip(row, head, strict=False)]
            for row in self.values()
        ]

    def figures(self) -> list[bool]:
        """For each column whether its values are numbers, which stand on the right."""
        cells = self.cells()
        return [
            column.form != BAR and all(_FIGURE.fullmatch(row[place]) for row in cells if len(row) > place)
            for place, column in enumerate(self.head())
        ]


_FIGURE = re.compile(r"([-+]?\d[\d,.:]*( (%|points|s|ms|[KMGT]i?B|B))?)?|-|unknown")


def _column(text: str) -> Column:
    heading, _, said = text.strip().partition("=")
    field, _, form = said.partition(":")
    if not said:
        heading, _, form = heading.partition(":")
    return Column(heading, field or heading.replace(" ", "_"), form)


class Lines(NamedTuple):
    """Sentences below a heading. Without sentences nothing is printed.

    On a page a name in them that is the anchor of other lines leads there.
    """

    lines: Sequence[str]
    title: str = ""
    legend: str = ""
    anchor: str = ""


class Tiles(NamedTuple):
    """The most important figures of a page, each with its name."""

    rows: Sequence[tuple[str, str]]
    title: str = ""
    legend: str = ""


class Bars(NamedTuple):
    """A bar for each row of name, length and text."""

    rows: Sequence[tuple[str, float, str]]
    title: str
    legend: str = ""


class Split(NamedTuple):
    """One bar, split by the tokens of each row of name and tokens."""

    rows: Sequence[tuple[str, int]]
    title: str
    legend: str = ""


class Plot(NamedTuple):
    """Series over buckets that begin at ``starts``: lines, or stacked areas. None leaves a gap.

    ``share``: values are parts of 1, shown as percent.
    """

    rows: Mapping[str, Sequence[float | None]]
    starts: Sequence[str]
    title: str
    legend: str = ""
    stacked: bool = False
    share: bool = False


class Records(NamedTuple):
    """What CSV prints: names, and a row for each line."""

    names: Sequence[str]
    rows: Iterable[Sequence[object]]


Chart = Tiles | Bars | Split | Plot
"""What a page draws, and text leaves out."""

Part = Table | Lines | Chart


class Answer(NamedTuple):
    """What a command found, and its exit code."""

    data: Any
    sentences: Sequence[str] = ()
    """The conclusion, and what else is to be read first."""
    parts: Sequence[Part | None] = ()
    records: Records | None = None
    """None: the command prints no CSV."""
    plain: Callable[[], Any] | None = None
    """What JSON prints, where that is not ``data`` as it is."""
    code: int = 0
    others: Mapping[str, Callable[[], str]] = {}
    """Formats that this command alone has."""


def printed(answer: Answer) -> list[Table | Lines]:
    """The parts that have something to print as text."""
    texts = (part for part in answer.parts if isinstance(part, Table | Lines))
    return [part for part in texts if (part.rows if isinstance(part, Table) else part.lines)]


def records(kind: type[msgspec.Struct], rows: Iterable[msgspec.Struct], *leave_out: str) -> Records:
    """Structs of one kind, a line each, with all their fields but those left out."""
    return of_fields([name for name in kind.__struct_fields__ if name not in leave_out], rows)


def of_fields(names: Sequence[str], rows: Iterable[Any]) -> Records:
    """The attributes of these names, a line each."""
    return Records(names, ([getattr(row, name) for name in names] for row in rows))


def made(kind: type[Struct], source: object, /, **given: Any) -> Struct:
    """A struct whose fields are the attributes of ``source``, but for those that are given."""
    names = [name for name in kind.__struct_fields__ if name not in given and hasattr(source, name)]
    return kind(**{name: getattr(source, name) for name in names}, **given)


def notes(lines: Iterable[str]) -> Lines:
    """What a reader should know about how the figures were found."""
    return Lines([f"  {line}" for line in dict.fromkeys(lines)], "Notes")


# --- how figures are written ----------------------------------------------------------------------------


def written(value: Any, form: str = "") -> str:
    """A value in a form; by its type where there is none."""
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if form:
        return FORMS[form](value) if form in FORMS else format(value, form)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else decimal(value, 6)


def share(part: int, whole: int) -> float | None:
    """A part of a whole, 1 for all of it; None where the whole is 0."""
    return part / whole if whole else None


def percent(share: float) -> str:
    """``41.1 %`` for 0.411."""
    return f"{100 * share:.1f} %"


def signed(number: int) -> str:
    """``+1,120``; nothing for 0."""
    return f"{number:+,}" if number else ""


def points(share: float) -> str:
    """``+8.1 points`` for 0.081."""
    return f"{100 * share:+.1f} points"


def decimal(number: float, digits: int) -> str:
    """A number with so many significant digits and no exponent: ``0.000041``, ``1,200,000``."""
    return f"{Decimal(f'{number:.{digits}g}'):,f}"


def seconds(seconds: float) -> str:
    """``12.345 s``, ``0.041 ms``."""
    if seconds >= 100:
        return f"{seconds:,.1f} s"
    return f"{seconds:.3f} s" if seconds >= 0.1 or not seconds else f"{decimal(1e3 * seconds, 2)} ms"


def milliseconds(milliseconds: float) -> str:
    """``1.20 s`` or ``34.5 ms``."""
    return f"{milliseconds / 1e3:,.2f} s" if milliseconds >= 1000 else f"{milliseconds:.1f} ms"


def bytes_text(number: int) -> str:
    """A number of bytes for a person."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return f"{number} B"


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for base, unit in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", 1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def size(text: str) -> int:
    """The bytes of a size as a user writes it: ``40GiB``. Raises LedgerError."""
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("0", "")
    found = int(float(number) * _UNITS.get(unit.lower(), 0))
    if not found:
        raise LedgerError(f"{text!r} is no size: write 512MiB, 40GiB or 500GB.")
    return found


def counted(n: int, noun: str, plural: str = "") -> str:
    """1 request, 2 requests. (``audit/text.py`` has it, too; an import of that takes msgspec's time.)"""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or f'{noun}s'}"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def part_of(tokens: int, whole: int, name: str) -> str:
    """``1,120 local (41.1 %)``."""
    return f"{tokens:,} {name} ({percent(tokens / whole)})" if whole else f"{tokens:,} {name}"


FORMS: dict[str, Callable[[Any], str]] = {
    "%": percent,
    "+": signed,
    "bytes": bytes_text,
    "ms": milliseconds,
    "s": seconds,
    BAR: percent,
}
"""The forms of columns: shares, differences, bytes, milliseconds, seconds."""
