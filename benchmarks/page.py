"""Reads and writes docs/performance.md: the table of `make bench`, then that of `make instructions`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

from kvledger.audit.engines import host_version

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
INSTRUCTIONS = "## Instructions\n"
"""The heading of the second half."""


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
    first = page.read_text().partition(INSTRUCTIONS)[0]
    lines = [line for line in first.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines[2:]]


def write_first(half: str, page: Path = PAGE) -> None:
    """Replace the part above the heading of the instructions by ``half``."""
    _, heading, rest = page.read_text().partition(INSTRUCTIONS)
    page.write_text(f"{half}\n{heading}{rest}" if heading else half)


def write_second(half: str, page: Path = PAGE) -> None:
    """Replace the part from the heading of the instructions on by ``half``."""
    assert half.startswith(INSTRUCTIONS)
    first = page.read_text().partition(INSTRUCTIONS)[0].rstrip("\n")
    page.write_text(f"{first}\n\n{half}")
