"""Times what reads a week of eight million requests from kept rows, and a million requests by two processes.

    python benchmarks/week.py DIR [--million] [--write] [--only COMMAND]

No journal of eight million requests is written, which would take hours. One hour is simulated, written as a
journal and compacted by the code of ``kvledger journals compact``. The week has a copy of its rows for every
hour, with other request numbers and random ids. There is no journal, as after ``journals prune``.

With ``--million`` a journal of a million requests is written too, and summed up by one process and by two.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1]))  # `python -m benchmarks.week` adds this itself

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from benchmarks import page
from tests.simulated import Mix
from tests.simulated_trace import write_journal, write_trace

from kvledger.audit.replay import serialize
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import HourlyFiles, compact, summed_rows
from kvledger.exporters.facts.parquet import RowWriter
from kvledger.exporters.facts.rows import EngineFacts
from kvledger.exporters.facts.schema import TABLES

HOUR = 3600
REQUESTS = 48_500
MIX = Mix(running=20, waiting=4)
"""Nearly fourteen requests a second, so that they fill an hour."""
RUNS = 3
WEEK = (
    "summary --since 7d",
    "summary",
    "summary --by hour,model --percentiles waited_microseconds,prompt_tokens,output_tokens",
    "why --since 7d",
    "export html --since 7d -o page.html",
)
MILLION = (
    "audit -j 1",
    "summary -j 1",
    "summary -j 2",
    "export html -j 1 -o page.html",
    "export html -j 2 -o page.html",
    "export -o tables --table requests --table lives",
)


def week(folder: Path, hours: int = 168, requests: int = REQUESTS, now: float | None = None) -> int:
    """Write the facts of the last ``hours`` hours into ``folder``; returns their bytes."""
    journal = folder / "engine-00"
    shutil.rmtree(folder, ignore_errors=True)
    write_journal(journal, requests, 0, mix=MIX)
    compact(journal)
    session = kept.load(kept.place(journal))
    assert session is not None
    first = int((time.time() if now is None else now) // HOUR) - hours
    began = int(session.engine.began_seconds) // HOUR
    of_hour = [file for file in session.files if file.hour == kept.hour_name(began * HOUR)]
    tables = {file.table: pq.read_table(kept.readable(kept.folder_of(journal), file)) for file in of_hour}
    shutil.rmtree(folder)
    files = []
    for number in range(hours):
        for name, table in tables.items():
            files.append(
                _written(kept.folder_of(journal), name, _moved(table, number, first - began + number))
            )
    sink = HourlyFiles(kept.folder_of(journal), "engine-00.1.sums")
    for table, rows in summed_rows(kept.folder_of(journal), "simulated", files, [], []).tables.items():
        sink.add(table, rows)
    sums = sink.close()
    busy = [us for minute, us in sorted(session.busy_us.items()) if minute // 60 == began]
    facts = msgspec.msgpack.decode(session.facts, type=EngineFacts)
    session.engine = msgspec.structs.replace(session.engine, at=0, wall_seconds=float(HOUR * first))
    session.facts = msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(facts, engine=session.engine)))
    session.files, session.tail, session.ended = [*files, *sums], [], True
    session.busy_us = {
        (first + number) * 60 + minute: us for number in range(hours) for minute, us in enumerate(busy)
    }
    session.tail_busy_us = {}
    session.until_seconds = session.open_until_seconds = float(HOUR * (first + hours) - 1)
    audit = session.audit(journal, EVERYTHING)
    audit.auditor.ledger.engine = session.engine
    audit.read_clock = session.engine.began_seconds
    audit.auditor.ledger.at = HOUR * hours * 1_000_000 - 1
    session.state = msgspec.Raw(serialize.capture(audit))
    kept.save(journal, session)
    return sum(file.bytes for file in session.files)


def _moved(table: Any, number: int, hours: int) -> Any:
    """The rows of an hour, so many hours later, with other request numbers and ids."""
    shift = pa.scalar(hours * HOUR * 1_000_000, pa.duration("us"))
    for place, field in enumerate(table.schema):
        column = table[place]
        if pa.types.is_timestamp(field.type):
            column = pc.add(column, shift)
        elif field.name == "request":
            column = pc.add(column, number * 10_000_000)
        elif field.name == "request_id":
            column = pa.array([f"chatcmpl-{uuid4().hex}" for _ in range(len(table))])
        table = table.set_column(place, field, column)
    return table


def _written(folder: Path, name: str, table: Any) -> kept.KeptFile:
    """Write rows as compact does."""
    columns = TABLES[name][1:]
    times = [column.name for column in columns if column.name in ("closed_time", "time")]
    hour = kept.hour_name(table[times[0]][0].as_py().timestamp())
    path = folder / kept.partition(name, "simulated", hour) / "engine-00.1.1.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = RowWriter(str(path), columns)
    writer.write(table)
    writer.close()
    return kept.KeptFile(
        name, str(path.relative_to(folder)), hour, len(table), path.stat().st_size, kept.columns_of(name)
    )


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
        wide = {**os.environ, "COLUMNS": "120"}  # a library that reads lines may have set another width
        done = subprocess.run(helper, check=True, capture_output=True, text=True, cwd=cwd, env=wide)
        wall, cpu, mib = map(float, used.read().split())
    return Timed(words, wall, cpu, mib, " ".join((done.stdout or done.stderr).splitlines()[:2]))


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

The rows without `-j` read the kept rows of {hours} hours ({size:,} bytes), whose hours are copies of one
simulated and compacted hour with random request ids; the journal is gone. Rows with `-j` (`--million`)
replay a journal of a million requests with so many processes. *Seconds* are wall time, the best of a few
runs, with the start of Python. On a machine that others use they are longer than on an idle one; *CPU
seconds* are longer by less. *MiB* is the largest resident memory of any of its processes. Rows may have been
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
    size = week(arguments.folder / "week", arguments.hours)
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
    text = section(rows, size, arguments.hours)
    print(text)
    if arguments.write:
        page.put(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
