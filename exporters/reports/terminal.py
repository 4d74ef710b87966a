"""What the terminal output of all commands shares: console, tables of figures, headings, progress bar.

Not here: what one command prints, which is in that command's file. Names from outside (request ids, paths,
messages) are printed as text and never as rich markup.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...audit.errors import LedgerError

PLAIN_WIDTH = 100
"""Columns where the output is not a terminal and COLUMNS is not set."""

LABEL_WIDTH = 14
"""Columns that the label of a narrow table keeps; its figures take what they need."""

WIDEST = 10_000
"""Columns to measure a table in, so that no cell is cut."""

VERDICTS = {"clean": "bold green", "violated": "bold red", "unknown": "bold yellow"}


def console(*, stderr: bool = False) -> Console:
    """The console to print to; without colour and of a fixed width where it is not a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    fixed = None if stream.isatty() or os.environ.get("COLUMNS") else PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, width=fixed)


def show(*parts: RenderableType, stderr: bool = False) -> None:
    """Print to standard output or error, without trailing blanks where it is not a terminal.

    Where the terminal is too narrow for a table, lines get longer and no figure is cut.
    """
    out = console(stderr=stderr)
    out.width = max(out.width, *(_least_width(out, part) for part in parts))
    if out.is_terminal:
        out.print(*parts, sep="\n")
        return
    with out.capture() as captured:
        out.print(*parts, sep="\n")
    for line in captured.get().splitlines():
        print(line.rstrip(), file=sys.stderr if stderr else sys.stdout)


def _least_width(out: Console, part: RenderableType) -> int:
    """The width below which a table in ``part`` loses figures."""
    if isinstance(part, Group):
        return max((_least_width(out, one) for one in part.renderables), default=0)
    if isinstance(part, Padding):
        return _least_width(out, part.renderable) + part.left + part.right
    if not isinstance(part, Table):
        return 0
    wide = out.options.update(width=WIDEST)
    widths = []
    for column in part.columns:
        cells = [column.header, *column.cells] if part.show_header else [*column.cells]
        longest = max((Measurement.get(out, wide, cell).maximum for cell in cells), default=0)
        widths.append(longest if column.no_wrap else column.min_width or min(longest, LABEL_WIDTH))
    _, right, _, left = part.padding
    return sum(widths) + len(widths) * (left + right)


# --- words and blocks -------------------------------------------------------------------------------


def percent(share: float) -> str:
    """``41.1 %`` for 0.411."""
    return f"{100 * share:.1f} %"


def decimal(number: float, digits: int) -> str:
    """A number with so many significant digits and no exponent: ``0.000041``, ``1,200,000``."""
    return f"{Decimal(f'{number:.{digits}g}'):,f}"


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


def counted(n: int, noun: str) -> str:
    """1 request, 2 requests."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def part_of(tokens: int, whole: int, name: str) -> str:
    """``1,120 local (41.1 %)``."""
    return f"{tokens:,} {name} ({percent(tokens / whole)})" if whole else f"{tokens:,} {name}"


def blocks(*parts: RenderableType | None) -> Group:
    """Parts with an empty line between them; None is left out."""
    lines: list[RenderableType] = []
    for part in parts:
        if part is not None:
            lines += [Text(), part] if lines else [part]
    return Group(*lines)


def title(text: str, legend: str = "") -> Text:
    """A heading, and below it what the words of its table mean."""
    below = (f"\n{legend}", "dim") if legend else ""
    return Text.assemble((text, "bold"), below)


def indented(part: RenderableType, columns: int = 2) -> Padding:
    """A part, some columns to the right."""
    return Padding(part, (0, 0, 0, columns), expand=False)


def bullets(sentences: Sequence[str]) -> Iterator[Text]:
    """Sentences as a list."""
    for sentence in sentences:
        yield Text.assemble(("- ", "bold"), sentence)


def notes(lines: Sequence[str]) -> Group | None:
    """What a reader should know about how the journals were read; None for nothing."""
    if not lines:
        return None
    return Group(title("Notes"), *(indented(Text(line)) for line in lines))


def plain_table(*, header: bool = False) -> Table:
    """A table without lines, with or without a header row; columns are the caller's."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=header)


def figures_table(label: str, *columns: str) -> Table:
    """A table of labels and figures, each column as wide as its longest figure."""
    table = plain_table(header=True)
    table.add_column(label, ratio=None, min_width=LABEL_WIDTH)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


# --- progress ---------------------------------------------------------------------------------------


@contextmanager
def progress(before: str, text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, labelled ``before`` until the yielded ``move(done, total)`` is called.

    One plain line where standard error is not a terminal. Nothing is drawn before the first move.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=out, transient=True)
    task = bar.add_task(before, total=None)

    def move(done: int, total: int) -> None:
        if not bar.live.is_started and not done:
            bar.start() if out.is_terminal else out.print(Text(f"{before} ..."))
        if done:
            bar.update(task, description=text, completed=done, total=total)

    try:
        yield move
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Turn a spinner on standard error; nothing is printed where that is not a terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield
        return
    with out.status(text):
        yield
