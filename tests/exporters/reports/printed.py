"""What an answer prints, as plain text and as CSV."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich.console import Console

from kvledger.exporters.answer import Answer, Part
from kvledger.exporters.terminal import rendered
from kvledger.exporters.writers import as_text

if TYPE_CHECKING:
    from collections.abc import Sequence


def text(shown: Answer | Part | Sequence[str], width: int = 100) -> str:
    """The lines of an answer, a part or sentences at this width, without trailing blanks."""
    out = StringIO()
    if not isinstance(shown, Answer):
        is_part = isinstance(shown, Part)
        shown = Answer(None, [] if is_part else list(shown), [shown] if is_part else [])
    Console(file=out, width=width, highlight=False).print(rendered(shown))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def lines(answer: Answer) -> str:
    """The CSV of an answer."""
    return as_text(answer, "csv")
