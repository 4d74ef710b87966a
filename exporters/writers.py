"""Write an answer as CSV, JSON, Markdown or an HTML page; ``terminal.py`` writes it as text.

These alone know how output looks. A page needs no network: style, script and plots are inside the file. Plots
are data in it, which ``templates/page.js`` draws when a browser opens the page.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec

from .. import __version__
from .answer import JUDGING, TONES, Answer, Lines, Plot, Sum, Table, Words, printed

if TYPE_CHECKING:
    from markupsafe import Markup


# --- CSV, of which a spreadsheet runs no cell: request ids, models and groups are text that clients
# chose.
#
# A spreadsheet takes a cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or a carriage return for a
# formula. So such a text gets an apostrophe, as spreadsheets write text. Numbers have none. A text that
# begins with apostrophes before one of these gets one more, so that no two texts look alike.

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


def show(answer: Answer, format: str) -> None:
    """Print an answer on standard output."""
    if format in ("text", "table"):
        from . import terminal

        terminal.show(terminal.rendered(answer))
    else:
        print(as_text(answer, format))


def as_text(answer: Answer, format: str) -> str:
    """An answer in any format but text for a terminal."""
    if format in answer.others:
        return answer.others[format]()
    if format == "csv" and answer.records is not None:
        return csv_of(*answer.records)
    if format == "markdown":
        return markdown(answer)
    return as_json(answer.data if answer.plain is None else answer.plain())


def as_json(data: object) -> str:
    """One JSON object, indented."""
    return msgspec.json.format(msgspec.json.encode(data), indent=2).decode()


# --- Markdown -------------------------------------------------------------------------------------------


def markdown(answer: Answer) -> str:
    """An answer as a section of a page: a heading, sentences, tables and lists."""
    return "\n\n".join(filter(None, ["\n\n".join(answer.sentences), *map(_section, printed(answer))]))


def _section(part: Table | Lines) -> str:
    lines = [f"#### {part.title}", ""] if part.title else []
    lines += [part.legend, ""] if part.legend else []
    if isinstance(part, Lines):
        return "\n".join(
            [*lines, *(f"- {markdown_text(line.strip().removeprefix('- '))}" for line in part.lines)]
        )
    rules = ("---:" if figures and place else "---" for place, figures in enumerate(part.figures()))
    lines += [f"| {' | '.join(each.heading for each in part.head())} |", f"|{'|'.join(rules)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(markdown_text, row))} |" for row in part.cells() if row)])


def markdown_text(text: str) -> str:
    """A text in a cell or a line: no cell ends in it, and it makes no tag and no link."""
    return re.sub(r"[\\|<\[]", r"\\\g<0>", text.strip())


# --- a page ---------------------------------------------------------------------------------------------

_URL = r"https?://[^\s,]+"


def page(answer: Answer, heading: str, title: str) -> str:
    """An answer as a page, whose title has ``title``."""
    from markupsafe import Markup, escape

    from .files import environment

    parts = [part for part in answer.parts if part and (part.lines if isinstance(part, Lines) else part.rows)]
    anchors = sorted((part.anchor for part in parts if isinstance(part, Lines) and part.anchor), key=len)
    links = re.compile("|".join([_URL, *map(re.escape, reversed(anchors))]))

    def linked(line: str, ours: bool = False) -> Markup:
        """A line with links to other lines; a word that judges has its colour.

        URLs are links in text of ours alone: a client chooses what its request is called.
        """
        text, found = line.lstrip(), Markup()
        if not isinstance(line, Words) and (judging := JUDGING.match(text)):
            found = Markup('<b class="{}">{}</b>').format(TONES[judging[0]], judging[0])
            text = text[judging.end() :]
        end = 0
        for link in links.finditer(text):
            is_url = link[0].startswith("http")
            if is_url and not ours:
                continue
            at = link[0] if is_url else f"#{anchor(link[0])}"
            found += escape(text[end : link.start()]) + Markup('<a href="{}">{}</a>').format(at, link[0])
            end = link.end()
        return found + escape(text[end:])

    return (
        environment(Path(__file__).parent / "templates")
        .get_template("page.html.j2")
        .render(
            heading=heading,
            title=title,
            sentences=answer.sentences,
            parts=parts,
            linked=linked,
            anchor=anchor,
            tone=_tone,
            data=_plot,
            version=__version__,
            kind=lambda part: type(part).__name__,
            is_sum=lambda row: isinstance(row, Sum),
        )
    )


def anchor(name: str) -> str:
    """The id of a section."""
    return name.replace("/", "-")


def _tone(words: str) -> str:
    return words.tone if isinstance(words, Words) else TONES.get(words, "")


def _plot(part: Plot) -> str:
    """What ``page.js`` draws."""
    of = {name: list(values) for name, values in part.rows.items()}
    return json.dumps({"at": list(part.starts), "stacked": part.stacked, "share": part.share, "of": of})
