"""What `kvledger repro` does: choose a finding, reproduce it, write the file, and print what came of it.

The reproduction itself is in ``audit/repro``, the files in ``exporters/repro``.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ...audit.errors import LedgerError
from ...audit.repro.assertions import refusal
from ...audit.repro.bisect import Environment, Run, run_file
from ...audit.repro.choose_finding import Ambiguous, Seen, choose
from ...audit.repro.reproduction import OtherRelease, Reproduction, reproduce
from ...audit.text import printable
from ..files import write_whole
from ..repro.bug_report import bug_report
from ..repro.pytest_file import render as file_text
from . import terminal

EXIT_CODES = {"reproduced": 0, "not reproduced": 1, "refused": 3}
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
LISTED = 20
"""Findings that are listed to choose from."""


def run(
    path: Path,
    *,
    finding: str,
    request: str,
    output: Path,
    issue: Path | None,
    budget: str,
    any_release: bool,
    python: str,
    as_json: bool,
) -> int:
    """Reproduce one finding, write what was asked for, and return the exit code."""
    seconds = _seconds(budget)
    if as_json and str(output) == "-":
        raise LedgerError("--format json and -o - would both print to standard output; name a file")
    try:
        seen = choose(path, finding or None, request or None)
    except Ambiguous as several:
        seen = _choose(several.findings)
    try:
        with _progress() as progress:
            made = reproduce(
                path,
                seen=seen,
                budget=seconds,
                python=python or None,
                any_release=any_release,
                progress=progress,
            )
    except OtherRelease as differs:
        raise LedgerError(f"{differs} Or try the installed one with --any-release.") from None
    tried = None
    if made.status == "reproduced":
        tried = _write(made, output, issue, python or sys.executable)
    if as_json:
        print(json.dumps(as_data(made, tried, output, issue), indent=2))
    else:
        terminal.show(render(made, tried, output, issue), stderr=str(output) == "-")
    if tried is not None and tried.result != "fails":
        return EXIT_CODES["not reproduced"]
    return EXIT_CODES[made.status]


# --- which finding --------------------------------------------------------------------------------------


def _choose(findings: Sequence[Seen]) -> Seen:
    """The finding that the user chooses; off a terminal an error, after a list of them."""
    offered = sorted((seen for seen in findings if not refusal(seen.id)), key=_is_drift)
    offered, more = offered[:LISTED], max(0, len(offered) - LISTED)
    lines = [f"{number}. {_line(seen)}" for number, seen in enumerate(offered, 1)]
    lines += [f"and {more:,} more"] if more else []
    if refused := sorted({seen.id for seen in findings if refusal(seen.id)}):
        lines.append(f"Can't be rebuilt: {', '.join(refused)}")
    for line in lines:
        print(line, file=sys.stderr)
    if not offered or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise LedgerError(f"{terminal.counted(len(findings), 'finding')}: choose with --finding or --request")
    print(f"Which of them (1 to {len(offered)})? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer.isdigit() or not 1 <= int(answer) <= len(offered):
        raise LedgerError(f"{printable(answer)!r} is no number from 1 to {len(offered)}")
    return offered[int(answer) - 1]


def _is_drift(seen: Seen) -> bool:
    return seen.severity == "drift"


def _line(seen: Seen) -> str:
    words = [seen.id, "(drift)" if _is_drift(seen) else ""]
    if seen.request_id and seen.request_id not in seen.message:
        words.append(f"of request {printable(seen.request_id)}")
    return f"{' '.join(filter(None, words))}: {printable(seen.message)}"


def _seconds(text: str) -> float:
    """The seconds of ``120s``, ``2m`` or ``120``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None or not float(match[1]):
        raise LedgerError(f"{text!r} is no length of time, such as 120s or 5m")
    return float(match[1]) * UNITS[match[2]]


# --- the files ------------------------------------------------------------------------------------------


def _write(made: Reproduction, output: Path, issue: Path | None, python: str) -> Run:
    """Write the test and the report, and run the test once with the vLLM that drove the workload."""
    assert made.workload is not None and made.check is not None
    name = "test_repro.py" if str(output) == "-" else output.name
    test = file_text(made.workload, made.check, assumed=made.assumed, file=name)
    if str(output) == "-":
        print(test, end="")
    else:
        write_whole(output, test)
    if issue is not None:
        write_whole(issue, bug_report(made, test))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_text(test)
        return run_file(file, Environment(made.workload.release, (python,)))


# --- what is printed ------------------------------------------------------------------------------------


def render(made: Reproduction, tried: Run | None, output: Path, issue: Path | None) -> Group:
    """The answer, then what was cut down, what was assumed, and what to do next."""
    if made.status != "reproduced" or tried is None:
        return terminal.blocks(_answer(made), _nearest(made))
    file = "" if str(output) == "-" else str(output)
    return terminal.blocks(
        _answer(made),
        _written(made, tried, file, issue),
        _table(made),
        Text(
            f"{made.driven:,} workloads driven in {made.seconds:.1f} s, the first reproduction after "
            f"{made.first_seconds:.1f} s."
        ),
        terminal.notes([f"Assumed: {sentence}" for sentence in made.assumed]),
        Text(f"Next: kvledger repro bisect {file}") if file and tried.result == "fails" else None,
    )


def _answer(made: Reproduction) -> Text:
    request = f" of request {printable(made.seen.request_id)}" if made.seen.request_id else ""
    if made.status == "reproduced":
        cut = terminal.counted(made.requests_after, "request")
        cut += f" and {terminal.counted(made.steps_after, 'step')}"
        early = " It was interrupted, so it may not be the smallest." if made.interrupted else ""
        return Text.assemble(("Reproduced: ", "bold green"), f"{made.seen.id}{request}, with {cut}.{early}")
    heading = "Not reproduced: " if made.status == "not reproduced" else "Refused: "
    return Text.assemble((heading, "bold red"), f"{made.seen.id}{request}. {printable(made.reason)}")


def _nearest(made: Reproduction) -> Text | None:
    if made.nearest is None:
        return None
    return Text(f"The nearest that came back: {made.nearest.id}: {printable(made.nearest.message)}")


def _written(made: Reproduction, tried: Run, file: str, issue: Path | None) -> Group:
    assert made.check is not None
    lines = [Text(f"{made.check.says}: {tried.figure}, right: {made.check.right}")]
    where = f"{file or 'The test'} "
    if tried.result == "fails":
        lines.append(Text(f"{where}fails on vLLM {made.release}, as it should."))
    elif tried.result == "passes":
        words = "passes: the finding came back under kvledger's driver, but not in the file."
        lines = [Text(where + words, style="red")]
    else:
        lines = [Text(f"{where}can't run here: {printable(tried.figure)}", style="red")]
    if issue is not None:
        lines.append(Text(f"{issue} is the bug report, with the test."))
    return Group(*lines)


def _table(made: Reproduction) -> Table:
    table = terminal.figures_table("", "requests", "steps")
    journal = "in the journal" if made.whole else "in the part of the journal that was read"
    table.add_row(journal, f"{made.requests_before:,}", f"{made.steps_before:,}")
    table.add_row("in the test", f"{made.requests_after:,}", f"{made.steps_after:,}")
    return table


def as_data(made: Reproduction, tried: Run | None, output: Path, issue: Path | None) -> dict[str, Any]:
    """For JSON: the reproduction, flat, without the workload's tables; the files hold those."""
    data: dict[str, Any] = msgspec.to_builtins(made, enc_hook=str)
    for name in ("workload", "configuration", "statement"):
        data.pop(name, None)
    written = made.status == "reproduced" and str(output) != "-"
    data["file"] = str(output) if written else None
    data["issue"] = str(issue) if issue is not None and made.status == "reproduced" else None
    data["test"] = None if tried is None else {"result": tried.result, "figure": tried.figure}
    return data


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int, int], None] | None]:
    """A bar on a terminal; elsewhere nothing is printed."""
    out = terminal.console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("reading the journal", total=None)

        def move(phase: str, done: int, requests: int, steps: int) -> None:
            best = f", best: {requests} requests, {steps} steps" if requests else ""
            bar.update(task, description=f"{phase}, {done:,}{best}")

        yield move
