"""The writer of text, with rich; the console that it prints to; and progress bars on standard error.

Names from outside (request ids, paths, messages) are printed as text and never as rich markup. Every other
writer is in ``writers.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from .answer import (
    BAD,
    BAR,
    DIM,
    DOUBT,
    GOOD,
    JUDGING,
    STRONG,
    TONES,
    Answer,
    Lines,
    Sum,
    Table,
    Words,
    printed,
)

PLAIN_WIDTH = 100
"""Columns where the output is not a terminal and COLUMNS is not set."""

LABEL_WIDTH = 14
"""Columns that the label of a narrow table keeps; its figures take what they need."""

TEXT_WIDTH = 20
"""Columns that a text in a narrow table keeps."""

BAR_WIDTH = 40
"""Columns of the longest bar."""

WIDEST = 10_000
"""Columns to measure a table in, so that no cell is cut."""

STYLES = {GOOD: "bold green", BAD: "bold red", DOUBT: "bold yellow", DIM: "dim", STRONG: "bold"}


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
    if not isinstance(part, RichTable):
        return 0
    wide = out.options.update(width=WIDEST)
    widths = []
    for column in part.columns:
        cells = [column.header, *column.cells] if part.show_header else [*column.cells]
        longest = max((Measurement.get(out, wide, cell).maximum for cell in cells), default=0)
        widths.append(longest if column.no_wrap else column.min_width or min(longest, LABEL_WIDTH))
    _, right, _, left = part.padding
    return sum(widths) + len(widths) * (left + right)


# --- an answer as text ------------------------------------------------------------------------------


def rendered(answer: Answer) -> Group:
    """An answer with an empty line between its parts; the conclusion is bold."""
    first = [_line(line, "bold" if not place else "") for place, line in enumerate(answer.sentences)]
    parts: list[RenderableType] = [Group(*first)] if first else []
    for part in printed(answer):
        parts += [Text()] if parts else []
        parts.append(_part(part))
    return Group(*parts)


def _part(part: Table | Lines) -> Group:
    """A part below its heading, and below that what the words of its table mean."""
    heading = Text(part.title, style="bold")
    heading.append(f"\n{part.legend}" if part.legend and part.title else part.legend, style="dim")
    body = [_table(part)] if isinstance(part, Table) else map(_line, part.lines)
    return Group(*([heading] if heading else []), *body)


def _line(words: str, style: str = "") -> RenderableType:
    """A sentence; its wrapped lines keep its indentation."""
    depth = len(words) - len(words.lstrip())
    if words.startswith("- "):
        part = RichTable.grid(padding=(0, 1, 0, 0))
        part.add_row(Text("-", style="bold"), Text(words[2:], overflow="fold"))
        return part
    bare = Words(words.lstrip(), words.tone) if isinstance(words, Words) else words.lstrip()
    text = _toned(bare, style)
    return Padding(text, (0, 0, 0, depth), expand=False) if depth else text


def _toned(words: str, style: str = "") -> Text:
    """Text in its tone; a word that judges has its colour if it begins the text."""
    if isinstance(words, Words):
        return Text(words, style=STYLES[words.tone], overflow="fold")
    text = Text(words, style=style, overflow="fold")
    if judging := JUDGING.match(words):
        text.stylize(STYLES[TONES[judging[0]]], 0, judging.end())
    return text


def _table(part: Table) -> RichTable:
    """A table without lines: labels and texts on the left, figures on the right and never cut."""
    head, cells, figures = part.head(), part.cells(), part.figures()
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.show_header = any(column.heading for column in head)
    for place, column in enumerate(head):
        longest = max((row[place] for row in cells if len(row) > place), key=len, default="")
        whole = figures[place] or " " not in longest or column.form == BAR
        table.add_column(
            Text(column.heading),
            justify="right" if figures[place] else "left",
            no_wrap=whole,
            overflow="fold",
            min_width=None if whole else min(len(longest), TEXT_WIDTH if place else LABEL_WIDTH),
        )
    full = "█" if (getattr(sys.stdout, "encoding", "") or "").lower().startswith("utf") else "#"
    for row, values, texts in zip(part.rows, part.values(), cells, strict=True):
        shown = [
            Text(full * round(BAR_WIDTH * value)) if column.form == BAR else _cell(text)
            for column, value, text in zip(head, values, texts, strict=False)
        ]
        style = "bold" if isinstance(row, Sum) else "cyan" if texts and texts[0].startswith("  ") else None
        table.add_row(*shown, style=style)
    return table


def _cell(words: str) -> Text:
    tone = words.tone if isinstance(words, Words) else TONES.get(words, "")
    return Text(words, style=STYLES.get(tone, ""))


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
def share_progress(before: str, *, known: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, which the yielded ``move(words, share)`` moves; nothing off a terminal.

    It only shows that something runs where no share is ``known``.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda words, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(before, total=1.0 if known else None)
        yield lambda words, share: bar.update(task, description=words, completed=share)


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """Turn a spinner on standard error; nothing is printed where that is not a terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield
        return
    with out.status(text):
        yield
