"""Times what reads a week at ten requests a second from its rollup, and a million requests by two processes.

    python benchmarks/week.py DIR [--million] [--write] [--only COMMAND]

No journal of six million requests is written, which would take an hour. One hour is simulated (36,000
requests), written as a journal and compacted by the code of ``kvledger compact``. The week's rollup has a
copy of that hour's sums for every hour, so it has the minutes, groups, requests and bytes of a whole week.
The journal itself is removed, as ``kvledger prune`` would.

With ``--million`` a journal of a million requests is written too, and summed up by one process and by two.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.week` adds this itself

import msgspec
from benchmarks import page
from tests.simulated import Mix
from tests.simulated_trace import write_journal, write_trace

from kvledger.exporters.reports import rollup_builder, rollup_minutes, rollups
from kvledger.exporters.reports.rollup_cells import Cells, merge_cells
from kvledger.exporters.reports.rollup_pages import Page

HOUR = 3600
REQUESTS = 36_000
MIX = Mix(running=20, waiting=4)
"""About ten requests a second."""
RUNS = 3
WEEK = (
    "summary --since 7d",
    "summary",
    "summary --by hour",
    "why --since 7d",
    "report --since 7d -o page.html",
)
MILLION = ("summary -j 1", "summary -j 2", "report -j 1 -o page.html", "report -j 2 -o page.html")


def week(folder: Path, hours: int = 168, requests: int = REQUESTS, now: float | None = None) -> Path:
    """Write the rollup of the last ``hours`` hours into ``folder``; returns its path."""
    journal = folder / "engine-00"
    write_journal(journal, requests, 0, mix=MIX)
    rollup_builder.compact(journal)
    rollup = rollups.find(journal)
    assert rollup is not None
    first = int((time.time() if now is None else now) // HOUR) - hours
    minutes = [cells for raw in rollup.minutes.values() for cells in rollups.minutes_of(raw).values()]
    busy = sum(rollup.busy_us.values()) // len(rollup.busy_us)
    rollup.hours, rollup.minutes, rollup.busy_us = {}, {}, {}
    for hour in range(first, first + hours):
        parts = {
            60 * hour + minute: _arrived_in(hour, minutes[minute % len(minutes)]) for minute in range(60)
        }
        rollup.minutes[hour] = msgspec.Raw(msgspec.msgpack.encode(parts))
        rollup.busy_us.update(dict.fromkeys(parts, busy))
        rollup.hours[hour] = _sum(parts.values())
    rollup.cells, rollup.rest = _sum(rollup.hours.values()), {}
    rollup.until_seconds = float(HOUR * (first + hours) - 1)
    rollup.engine = msgspec.structs.replace(rollup.engine, at=0, wall_seconds=float(HOUR * first))
    assert rollup.page is not None
    _repeat(rollup.page, first, hours)
    shutil.rmtree(journal)
    rollups.save(rollups.place(journal), rollup)
    return rollups.place(journal)


def _repeat(page: Page, first: int, hours: int) -> None:
    """Let the minutes of a page be those of each hour from ``first`` on, with its findings in the first."""
    hour = [pair for raw in page.hours.values() for pair in sorted(rollup_minutes.decoded(raw).items())][:60]
    page.hours = {}
    for place in range(first, first + hours):
        minutes = {
            60 * place + number: _moved(*pair, 60 * place + number) for number, pair in enumerate(hour)
        }
        page.hours[place] = rollup_minutes.encoded(minutes)
    end = page.end
    end.rest, end.last_at = rollup_minutes.Minute(), HOUR * hours * 1_000_000 - 1
    end.events *= hours
    end.findings.ends = dict.fromkeys(end.findings.ends, 60 * first)
    end.findings.found = {id: [60 * first] for id in end.findings.found}


def _moved(place: int, minute: rollup_minutes.Minute, to: int) -> rollup_minutes.Minute:
    settled = {settled + to - place: tokens for settled, tokens in minute.settled.items()}
    return msgspec.structs.replace(minute, settled=settled)


def _arrived_in(hour: int, cells: Cells) -> Cells:
    return {f"{hour} {key.partition(' ')[2]}": cell for key, cell in cells.items()}


def _sum(several: Iterable[Cells]) -> Cells:
    found: Cells = {}
    for cells in several:
        merge_cells(found, cells)
    return found


class Timed(NamedTuple):
    """A command, and the best of some runs. ``cpu``: of all its processes; ``mib``: memory of the largest."""

    command: str
    wall: float
    cpu: float
    mib: float
    answer: str


def timed(words: str, folder: Path, runs: int = RUNS) -> Timed:
    """Run a command of kvledger on ``folder`` some times. A report is written beside ``folder``."""
    command = [sys.executable, "-m", "kvledger", *words.split(), str(folder.absolute())]
    found = [_run(words, command, folder.parent) for _ in range(runs)]
    best = [min(getattr(row, name) for row in found) for name in ("wall", "cpu", "mib")]
    return Timed(words, *best, found[-1].answer)


HELPER = """
import os, sys, time
began = time.monotonic()
process = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ)
_, status, used = os.wait4(process, 0)
with open(sys.argv[1], "w") as file:
    print(time.monotonic() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, file=file)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Starts a command from a small process: the memory of a process counts that of the one that started it."""


def _run(words: str, command: Sequence[str], cwd: Path) -> Timed:
    with tempfile.NamedTemporaryFile("r") as used:
        helper = [sys.executable, "-S", "-c", HELPER, used.name, *command]
        done = subprocess.run(helper, check=True, capture_output=True, text=True, cwd=cwd)
        wall, cpu, mib = map(float, used.read().split())
    return Timed(words, wall, cpu, mib, (done.stdout or done.stderr).splitlines()[0])


TableRow = tuple[str, ...]
COLUMNS = ("command", "seconds", "CPU seconds", "MiB", "answer")


def table_row(row: Timed) -> TableRow:
    """The cells of a row."""
    return (f"kvledger {row.command}", f"{row.wall:.2f}", f"{row.cpu:.2f}", f"{row.mib:.0f}", row.answer)


def section(rows: Sequence[TableRow], size: int, hours: int) -> str:
    """The part of the page."""
    return TEXT.format(
        heading=page.LONG_JOURNALS,
        machine=page.machine(),
        table=page.table(COLUMNS, rows),
        hours=hours,
        size=size,
    )


TEXT = """{heading}
Generated by `python benchmarks/week.py DIR --write`; do not edit. Ran on {machine}

{table}

The rows without `-j` read a rollup of {hours} hours ({size:,} bytes), whose hours are copies of one
simulated and compacted hour; its journal is gone. Rows with `-j` (`--million`) replay a journal of
a million requests with so many processes. *Seconds* are wall time, the best of a few runs, with the
start of Python. On a machine that others use they are longer than on an idle one; *CPU seconds* are
longer by less. *MiB* is the largest resident memory of any of its processes. Rows may have been
measured at different times (`--only`); the load is that of the last time.
"""


def main() -> int:
    """Write the week, and print how long its readers take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hours", type=int, default=168)
    parser.add_argument("--million", action="store_true", help="time a journal of a million requests too")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md too")
    parser.add_argument(
        "--only", default="", metavar="COMMAND", help="keep the page's rows of other commands"
    )
    arguments = parser.parse_args()
    path = week(arguments.folder / "week", arguments.hours)
    million = arguments.folder / "million"
    if arguments.million and not million.exists():
        write_trace(million, 1_000_000)
    before = {row[0]: row for row in page.read_rows(page.LONG_JOURNALS)}
    rows: list[TableRow] = []
    for words in (*WEEK, *MILLION):
        of_week = words in WEEK
        if words.startswith(arguments.only) and (of_week or arguments.million):
            found = timed(words, arguments.folder / "week" if of_week else million, RUNS if of_week else 1)
            rows.append(table_row(found))
            print(rows[-1], flush=True)
        elif (row := before.get(f"kvledger {words}")) is not None:
            rows.append(row)
    text = section(rows, path.stat().st_size, arguments.hours)
    print(text)
    if arguments.write:
        page.write_long_journals(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
