"""What `kvledger repro` does: choose a finding, reproduce it, write the file and bisect releases.

The reproduction itself is in ``audit/repro``, the files in ``exporters/repro``.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...audit import temporary
from ...audit.errors import LedgerError
from ...audit.repro import bisect as bisection
from ...audit.repro import workers
from ...audit.repro.assertions import refusal
from ...audit.repro.bisect import Bisection, Environment, Run, run_file
from ...audit.repro.choose_finding import Ambiguous, Seen, choose
from ...audit.repro.reproduction import OtherRelease, Reproduction, reproduce
from ...audit.text import printable
from ..answer import BAD, Answer, Lines, Table, Words, counted, notes
from ..files import write_whole
from ..repro.bug_report import bug_report
from ..repro.pytest_file import render as file_text
from ..terminal import console, progress, rendered, share_progress, show

EXIT_CODES = {"reproduced": 0, "not reproduced": 1, "refused": 3, "not run": 4}
TIME_OVER = "was not run to its end: the time was over. Give more with --budget."
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
    scheduler: str,
    python: str,
    yes: bool,
    as_json: bool,
) -> Answer | int:
    """Reproduce one finding, write what was asked for, and run the test once if the user agrees.

    The answer goes to standard error, and its exit code is returned, if the test is on standard output.
    """
    seconds, began = _seconds(budget), time.monotonic()
    if as_json and str(output) == "-":
        raise LedgerError("--format json and -o - would both print to standard output; name a file")
    try:
        seen = choose(path, finding or None, request or None)
    except Ambiguous as several:
        seen = _choose(several.findings)
        began = time.monotonic()  # the user's time is not the command's
    try:
        with _progress() as move:
            made = reproduce(
                path,
                seen=seen,
                budget=began + seconds - time.monotonic(),
                python=python or None,
                any_release=any_release,
                scheduler=scheduler,
                progress=move,
            )
    except OtherRelease as differs:
        raise LedgerError(f"{differs} Or try the installed one with --any-release.") from None
    tried: Run | str = ""
    if made.status == "reproduced":
        limit = min(began + seconds - time.monotonic(), workers.LIMIT_SECONDS)
        tried = _write(made, output, issue, python or sys.executable, yes, limit)
    found = answer(made, tried, output, issue)
    if str(output) != "-":
        return found
    show(rendered(found), stderr=True)
    return found.code


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
        raise LedgerError(f"{counted(len(findings), 'finding')}: choose with --finding or --request")
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


def _write(
    made: Reproduction, output: Path, issue: Path | None, python: str, yes: bool, limit: float
) -> Run | str:
    """Write the test and the report, and run the test once with the vLLM that drove the workload.

    A text says why it was not run to its end.
    """
    assert made.workload is not None and made.check is not None
    name = "test_repro.py" if str(output) == "-" else output.name
    test = file_text(made.workload, made.check, assumed=made.assumed, file=name)
    if str(output) == "-":
        print(test, end="")
    else:
        write_whole(output, test)
    if issue is not None:
        write_whole(issue, bug_report(made, test))
    if limit < 1:
        return TIME_OVER
    if not _may_run(f"{python} runs {name} once, {workers.bounds(limit)}.", yes):
        return "was not run: nobody agreed to it. --yes agrees."
    with temporary.folder() as folder:
        file = Path(folder, name)
        file.write_text(test)
        # A scheduler class of the user's is imported from where kvledger is called, as it was to drive it.
        own = [Path.cwd()] if made.workload.engine.get("scheduler_class") else []
        tried = run_file(file, Environment(made.workload.release, (python,)), limit, own)
    over = tried.result == "error" and tried.seconds == limit < workers.LIMIT_SECONDS
    return TIME_OVER if over else tried


def _may_run(told: str, yes: bool) -> bool:
    """Whether the user agrees to what will run; off a terminal only ``yes`` says so."""
    asked = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    print(told + " May it (y/n)? " * asked, end="" if asked else "\n", file=sys.stderr, flush=True)
    return yes or (asked and sys.stdin.readline().strip().lower() in ("y", "yes"))


# --- the answer -----------------------------------------------------------------------------------------


def answer(made: Reproduction, tried: Run | str, output: Path, issue: Path | None) -> Answer:
    """What came of it, then what was cut down, what was assumed, and what to do next.

    ``tried``: the run of the test that was written, or why it was not run.
    """
    data = lambda: as_data(made, tried, output, issue)  # noqa: E731
    ran = isinstance(tried, Run)
    holds = not isinstance(tried, Run) or tried.result == "fails"
    status = made.status if holds else "not reproduced"
    code = EXIT_CODES["not run" if status == "reproduced" and not ran else status]
    if made.status != "reproduced":
        nearest = made.nearest
        near = (
            ""
            if nearest is None
            else f"The nearest that came back: {nearest.id}: {printable(nearest.message)}"
        )
        return Answer(made, [_sentence(made), *filter(None, [near])], plain=data, code=code)
    file = "" if str(output) == "-" else str(output)
    journal = "in the journal" if made.whole else "in the part of the journal that was read"
    return Answer(
        made,
        [_sentence(made), *_written(made, tried, file, issue)],
        [
            Table(
                [
                    (journal, made.requests_before, made.steps_before),
                    ("in the test", made.requests_after, made.steps_after),
                ],
                " | requests | steps",
            ),
            Lines(
                [
                    f"{made.driven:,} workloads driven in {made.seconds:.1f} s, the first reproduction after "
                    f"{made.first_seconds:.1f} s."
                ]
            ),
            notes([f"Assumed: {sentence}" for sentence in made.assumed]),
            Lines([f"Next: kvledger repro bisect {file}"] if file and holds else []),
        ],
        plain=data,
        code=code,
    )


def _sentence(made: Reproduction) -> str:
    request = f" of request {printable(made.seen.request_id)}" if made.seen.request_id else ""
    if made.status == "reproduced":
        cut = f"{counted(made.requests_after, 'request')} and {counted(made.steps_after, 'step')}"
        early = " It was interrupted, so it may not be the smallest." if made.interrupted else ""
        return f"Reproduced: {made.seen.id}{request}, with {cut}.{early}"
    heading = "Not reproduced" if made.status == "not reproduced" else "Refused"
    return f"{heading}: {made.seen.id}{request}. {printable(made.reason)}"


def _written(made: Reproduction, tried: Run | str, file: str, issue: Path | None) -> Iterator[str]:
    assert made.check is not None
    where = f"{file or 'The test'} "
    if isinstance(tried, str):
        yield Words(where + tried, BAD)
    else:
        yield f"{made.check.says}: {tried.figure}, right: {made.check.right}"
        yield from _ran(made, tried, where)
    if issue is not None:
        yield f"{issue} is the bug report, with the test."


def _ran(made: Reproduction, tried: Run, where: str) -> Iterator[str]:
    """What the run of the test shows."""
    if tried.result == "fails":
        yield f"{where}fails on vLLM {made.release}, as it should."
    elif tried.result == "passes":
        words = "passes: the finding came back under kvledger's driver, but not in the file."
        yield Words(where + words, BAD)
    else:
        yield Words(f"{where}can't run here: {printable(tried.figure)}", BAD)


def as_data(made: Reproduction, tried: Run | str, output: Path, issue: Path | None) -> dict[str, Any]:
    """For JSON: the reproduction, flat, without the workload's tables; the files hold those."""
    data: dict[str, Any] = msgspec.to_builtins(made, enc_hook=str)
    for name in ("workload", "configuration", "statement"):
        data.pop(name, None)
    written = made.status == "reproduced" and str(output) != "-"
    data["file"] = str(output) if written else None
    data["issue"] = str(issue) if issue is not None and made.status == "reproduced" else None
    data["test"] = {"result": tried.result, "figure": tried.figure} if isinstance(tried, Run) else None
    return data


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int, int], None] | None]:
    """A bar on a terminal; elsewhere nothing is printed."""
    with share_progress("reading the journal", known=False) as bar:

        def move(phase: str, done: int, requests: int, steps: int) -> None:
            best = f", best: {requests} requests, {steps} steps" if requests else ""
            bar(f"{phase}, {done:,}{best}", 0.0)

        yield move


# --- bisect ---------------------------------------------------------------------------------------------


def bisect(file: Path, releases: str, interpreters: Sequence[str], jobs: int) -> Answer:
    """Run the file over the given interpreters, and over the releases named, or all, of this checkout."""
    environments = bisection.chosen(file, releases, interpreters)
    if workers.network_open():
        print(f"The file runs {workers.bounds()}.", file=sys.stderr)
    if not console(stderr=True).is_terminal:
        return answer_of_bisection(bisection.bisect(file, environments, jobs=jobs))
    with progress("running the test", "releases") as move:
        move(0, len(environments))
        return answer_of_bisection(bisection.bisect(file, environments, jobs=jobs, progress=move))


def answer_of_bisection(found: Bisection) -> Answer:
    """Where a fault begins and ends, then a line per release, oldest first."""
    return Answer(
        found,
        [bounds(found)],
        [Table(found.runs, "release | result | seconds:.1f | the engine's figure, or the error=figure")],
        plain=lambda: {
            "file": found.file,
            "first_bad": found.first_bad or None,
            "last_bad": found.last_bad or None,
            "first_good": found.first_good or None,
            "releases": [
                {
                    "release": run.release,
                    "result": run.result,
                    "figure": run.figure,
                    "seconds": round(run.seconds, 3),
                }
                for run in found.runs
            ],
        },
        code=0 if found.first_bad else 1,
    )


def bounds(found: Bisection) -> str:
    """First bad, last bad and first good release, in one sentence."""
    first, last = found.first_bad, found.last_bad
    if not first:
        ran = sum(run.result == "passes" for run in found.runs)
        return f"{found.file} fails in none of {counted(len(found.runs), 'release')} and passes in {ran}."
    bad = f"First bad {first}, last bad {last}" if first != last else f"Bad in {first} only"
    if found.first_good:
        return f"{bad}, first good {found.first_good}."
    if last == found.runs[-1].release:
        return f"{bad}, which is the newest release tried."
    return f"{bad}, no later release passes."
