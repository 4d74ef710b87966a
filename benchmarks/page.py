"""Puts sections into pages, and reads docs/performance.md.

Benchmarks and proofs write into pages what they found; each has a section of its own, which it replaces.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from kvledger.audit.engines import host_version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
LONG_RUN, LONG_JOURNALS = "## A long run\n", "## Long journals\n"
"""Headings of sections of docs/performance.md."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    ruler = tuple("-" * width for width in widths)
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (headings, ruler, *rows)
    )


def software() -> str:
    """The versions of the system, of Python and of vLLM."""
    return (
        f"{platform.system()} {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, vLLM {host_version()}"
    )


def machine() -> str:
    """The machine and the software, in one sentence."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = (line for line in cpuinfo.read_text().splitlines() if line.startswith("model name"))
        name = next(models, f":{name}").split(":", 1)[1].strip()
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} CPUs ({name}, shared: load {load:.1f} at the start), {software()}."


def read_table(page: Path = PAGE) -> list[tuple[str, ...]]:
    """The cells of the first table on the page, one tuple for each row."""
    return _rows(page.read_text().partition(LONG_RUN)[0])


def read_rows(heading: str, page: Path = PAGE) -> list[tuple[str, ...]]:
    """The cells of the table in the part with this heading, one tuple for each row."""
    return _rows(page.read_text().partition(heading)[2].partition("\n## ")[0])


def _rows(part: str) -> list[tuple[str, ...]]:
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines[2:]]


def put_first(part: str, page: Path = PAGE) -> None:
    """Replace what stands above the heading of the long run."""
    _, heading, rest = page.read_text().partition(f"\n{LONG_RUN}")
    page.write_text(part.strip("\n") + "\n" + (f"{heading}{rest}" if heading else ""))


def put(part: str, page: Path = PAGE, *, before: str = "") -> None:
    """Put a section, which begins with its heading, in place of the one with this heading.

    A section ends at the next heading of its level or above. A new one comes before the heading ``before``,
    or last.
    """
    heading = part.partition("\n")[0]
    above, found, old = f"\n{page.read_text()}".partition(f"\n{heading}\n")
    if found:
        end = re.search(rf"^#{{1,{len(heading.partition(' ')[0])}}} ", old, re.MULTILINE)
        rest = old[end.start() :] if end else ""
    else:
        above, found, old = above.partition(f"\n{before}\n") if before else (above, "", "")
        rest = f"{before}\n{old}" if found else ""
    kept = [text.strip("\n") + "\n" for text in (above, part, rest) if text.strip("\n")]
    page.write_text("\n".join(kept))


def put_between(begin: str, end: str, lines: Sequence[str], page: Path) -> None:
    """Put lines between two marks of a page."""
    above, _, rest = page.read_text().partition(begin)
    below = rest[rest.index(end) :]
    page.write_text(above + "\n".join([begin, *lines, below]))
