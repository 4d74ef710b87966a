"""Reads and writes docs/performance.md: what `make bench`, `make instructions` and the long run found."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from kvledger.audit.engines import host_version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
INSTRUCTIONS = "## Instructions\n"
"""The heading of the second part."""

LONG_RUN = "## A long run\n"
"""The heading of the third part."""

LONG_JOURNALS = "## Long journals\n"
"""The heading of the fourth part."""

HEADINGS = (INSTRUCTIONS, LONG_RUN, LONG_JOURNALS)


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
    return _rows(page.read_text().partition(INSTRUCTIONS)[0])


def read_rows(heading: str, page: Path = PAGE) -> list[tuple[str, ...]]:
    """The cells of the table in the part with this heading, one tuple for each row."""
    return _rows(_parts(page.read_text()).get(heading, ""))


def _rows(part: str) -> list[tuple[str, ...]]:
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines[2:]]


def write_first(part: str, page: Path = PAGE) -> None:
    """Replace what stands above the heading of the instructions."""
    _write(page, "", part)


def write_second(part: str, page: Path = PAGE) -> None:
    """Replace the part about instructions."""
    _write(page, INSTRUCTIONS, part)


def write_long_run(part: str, page: Path = PAGE) -> None:
    """Replace the part about the long run."""
    _write(page, LONG_RUN, part)


def write_long_journals(part: str, page: Path = PAGE) -> None:
    """Replace the part about long journals."""
    _write(page, LONG_JOURNALS, part)


def _write(page: Path, heading: str, part: str) -> None:
    """Replace one part, which begins with its ``heading``, or add it in its place."""
    assert part.startswith(heading)
    parts = _parts(page.read_text()) | {heading: part}
    order = [parts[each] for each in ("", *HEADINGS) if each in parts]
    page.write_text("\n\n".join(text.strip("\n") for text in order) + "\n")


def _parts(text: str) -> dict[str, str]:
    """The parts of the page, by their headings; the first has none."""
    begins = [("", 0)]
    begins += [(each, text.index(each)) for each in HEADINGS if each in text]
    begins.sort(key=lambda each: each[1])
    ends = [place for _, place in begins[1:]] + [len(text)]
    return {heading: text[place:end] for (heading, place), end in zip(begins, ends, strict=True)}
