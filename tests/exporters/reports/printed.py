"""What a part of a report prints, as plain text."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, RenderableType


def text(part: RenderableType, width: int = 100) -> str:
    """The lines of ``part`` at this width, without trailing blanks."""
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
