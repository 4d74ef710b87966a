"""The release matrix: every report on every release, expected and actual.

Usage: python3 scripts/matrix.py [--write] [NAME...]     all releases, or these, or `core`

Runs the scenarios of `tests/scenarios` under observation in each release's
environment (scripts/releases.py), prints one grid, and exits with 1 if an expected finding is missing or
an unexpected one appears. `--write` writes docs/detection.md after a run of all releases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import content_grid
import lmcache_stores
from expectations import DRIFTS, KNOWN, REPORTS, Known, Report
from releases import BIN, CORE, MATRIX, build, environ

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "detection.md"
WHOLE = ROOT / "docs" / "whole-engine-0.17.0.txt"
"""The output of scripts/whole_engine_017.py."""
UPSTREAM = ROOT / "docs" / "upstream-tests.md"
"""The output of scripts/upstream_tests.py."""


class Unexpected(NamedTuple):
    """A result that is not as expected; ``scenario`` is empty if it concerns no single scenario."""

    release: str
    what: str
    scenario: str = ""


@dataclass
class Outcome:
    """The results of the scenarios in one release."""

    release: str
    lines: dict[str, dict[str, object]] = field(default_factory=dict)
    error: str = ""

    def findings(self, scenario: str) -> set[str]:
        """Ids of the findings in a scenario, without the drifts of figures."""
        return {id for id in self._ids(scenario) if not id.startswith("metrics/")}

    def drifts(self, scenario: str) -> set[str]:
        """Ids of the drifts of figures in a scenario."""
        return {id for id in self._ids(scenario) if id.startswith("metrics/")}

    def _ids(self, scenario: str) -> set[str]:
        rows = self.lines.get(scenario, {}).get("findings", [])
        assert isinstance(rows, list)
        return {row[0] for row in rows}

    @property
    def left_out(self) -> list[str]:
        return [name for name, line in self.lines.items() if line.get("left_out")]

    def unexpected(self) -> list[Unexpected]:
        """Results that are not expected: false alarms, doubts, accounts that do not balance."""
        results: list[Unexpected] = []
        for scenario, line in self.lines.items():
            extra = self.findings(scenario) - expected_ids(scenario, self.release)
            wrong = [f"found {each}" for each in sorted(extra)]
            if not line.get("left_out"):
                wrong += self._unexpected_drifts(scenario)
            if not excused(scenario, self.release):
                wrong += [
                    f"{key} {line[key]}"
                    for key in ("doubts", "unbalanced", "open", "raised")
                    if line.get(key)
                ]
                wrong += ["does not balance"] if line.get("balanced") is False else []
            for report in REPORTS:
                settled = report.settles.get(scenario)
                if settled and not line.get("left_out") and line.get("settled") != settled:
                    wrong.append(f"settled {line.get('settled')}, not {settled}")
            results += [Unexpected(self.release, each, scenario) for each in wrong]
        return results

    def _unexpected_drifts(self, scenario: str) -> list[str]:
        """Drifts that this release does not have, and those that this scenario should have shown."""
        found = self.drifts(scenario)
        here = {drift.id for drift in DRIFTS if drift.covers(self.release)}
        due = {drift.id for drift in DRIFTS if drift.shows(scenario, self.release)}
        return [f"found {id}" for id in sorted(found - here)] + [
            f"{id} is not found" for id in sorted(due - found)
        ]


def expected_ids(scenario: str, release: str) -> set[str]:
    """Ids that the audit may find in a scenario of a release."""
    ids = {known.id for known in KNOWN if known.covers(scenario, release)}
    for report in REPORTS:
        if report.drives(scenario) and release in report.found_in:
            ids.update(report.ids)
    return ids


def excused(scenario: str, release: str) -> bool:
    """Whether the engine itself is known to fail in this scenario."""
    return any(known.covers(scenario, release) and known.host_fails for known in KNOWN)


def run(name: str) -> Outcome:
    """Run the scenarios in one release."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    special = "v0.audit" if name.endswith("-v0") else "lmcache" if name.startswith("lmcache-") else "matrix"
    module = f"tests.scenarios.{special}"
    done = subprocess.run(
        [str(BIN / "python"), "-m", module],
        env=environ(name)
        | {"PYTHONPATH": os.pathsep.join((environ(name).get("PYTHONPATH", ""), str(ROOT / "src")))},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    outcome = Outcome(name)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            outcome.lines[row["scenario"]] = row
    if done.returncode or not outcome.lines:
        outcome.error = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return outcome


def cell(report: Report, outcome: Outcome) -> tuple[str, bool]:
    """The cell of the grid for a report in a release, and whether it is as expected."""
    run_here = [c for c in outcome.lines if report.drives(c) and c not in outcome.left_out]
    if not run_here:
        return "-", outcome.release not in report.found_in
    seen = [c for c in run_here if outcome.findings(c) & set(report.ids)]
    if outcome.release in report.found_in:
        return (f"found {len(seen)}/{len(run_here)}", len(seen) == len(run_here))
    return ("silent", True) if not seen else (f"FOUND {len(seen)}", False)


def grid(outcomes: Sequence[Outcome]) -> tuple[list[list[str]], list[Unexpected]]:
    """The rows of the grid, header first, and the results that are not as expected."""
    rows = [["release", "scenarios", "left out", "clean", *(report.key for report in REPORTS)]]
    wrong: list[Unexpected] = []
    for outcome in outcomes:
        if outcome.error:
            wrong.append(Unexpected(outcome.release, outcome.error))
        alarms = outcome.unexpected()
        wrong += alarms
        ran = len(outcome.lines) - len(outcome.left_out)
        clean = sum(not outcome.findings(c) for c in outcome.lines) - len(outcome.left_out)
        row = [outcome.release, str(ran), str(len(outcome.left_out)), str(clean)]
        for report in REPORTS:
            text, right = cell(report, outcome)
            row.append(text if right else f"{text} (!)")
            if not right:
                wrong.append(Unexpected(outcome.release, f"{report.key}: {text}"))
        rows.append(row)
    return rows, wrong


def text(rows: list[list[str]]) -> str:
    """The grid, aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _id(known: Known) -> str:
    return _code(known.id) if known.id else "none: the scheduler itself fails"


def _code(word: str) -> str:
    return f"`{word}`"


def together(wrong: Sequence[Unexpected]) -> list[str]:
    """One line for each result that is not as expected, naming a few of its scenarios."""
    places: dict[tuple[str, str], list[str]] = {}
    for each in wrong:
        places.setdefault((each.release, each.what), []).append(each.scenario)
    lines = []
    for (release, what), scenarios in places.items():
        more = f" and {len(scenarios) - 4} more" if len(scenarios) > 4 else ""
        lines.append(": ".join(filter(None, (release, what, ", ".join(scenarios[:4]) + more))))
    return lines


def page(rows: list[list[str]], contents: list[list[str]]) -> str:
    """docs/detection.md."""
    head, *body = rows
    table = [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(r) + " |" for r in body),
    ]
    known = [
        "| "
        + " | ".join((_id(k), f"{k.first} to {k.last}", k.why, ", ".join(map(_code, k.scenarios))))
        + " |"
        for k in KNOWN
    ]
    reports = [f"- **{r.key}** ([{r.reference[0]}]({r.reference[1]})): {r.says}" for r in REPORTS]
    return "\n".join(
        [
            "# Detection",
            "",
            "Generated by `make releases ARGS=--write`; do not edit. The scenarios of `tests/scenarios`",
            "drive the real scheduler of each release, with scripted model output, while kvledger observes.",
            "",
            "- *found n/n*: n scenarios drive the engine into the fault, and the audit found it in each.",
            "- *silent*: the same scenarios ran, and the audit found nothing.",
            "- *-*: these scenarios can't run in the release (v0 or v1 only, or a missing feature).",
            "- *clean*: the number of scenarios without any finding. The findings in the other scenarios are",
            "  listed below by release; there were no others. Drifts of figures are not counted here:",
            "  [reconciliation.md](reconciliation.md) has them by release.",
            "",
            "A release of LMCache runs with vLLM 0.32.0, or with the release after the slash, in scenarios",
            "of its own. The scheduler side of its adapter is real; a table takes the place of its store.",
            "",
            *table,
            "",
            *reports,
            "",
            "## Other findings on released engines",
            "",
            "| finding | releases | what it is | scenarios |",
            "|---|---|---|---|",
            *known,
            "",
            "[findings.md](findings.md) reproduces nearly all of them one by one on the released packages.",
            "",
            *content_grid.section(contents),
            *lmcache_stores.section(),
            "## negative-local-hit on a whole engine",
            "",
            "The same report on the whole engine of vLLM 0.17.0 on a CPU, with scheduler, model and",
            "Prometheus counters. The engine adds -64 to a counter, the counter raises, and",
            "`LLMEngine.step()` raises the error instead of returning the outputs of that step.",
            "`scripts/whole_engine_017.py` prints this and describes how to build its environment; `make",
            "releases` does not run it.",
            "",
            "```",
            WHOLE.read_text().rstrip(),
            "```",
            "",
            "## vLLM's own tests under the ledger",
            "",
            "The tests of vLLM's source distributions run twice: as they are, and with kvledger observing",
            "every scheduler and KV cache manager that they create, at level `blocks`. `make",
            "upstream-tests` prints this; `make test` does not run it. *found* counts tests that pass only",
            "without kvledger, although they forge nothing.",
            "",
            UPSTREAM.read_text().rstrip(),
            "",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    write = "--write" in arguments
    words = [word for word in arguments if word != "--write"]
    names = [name for word in words or MATRIX for name in (CORE if word == "core" else [word])]
    build(names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(run, names))
    rows, wrong = grid(outcomes)
    contents, wrong_contents = content_grid.grid(names)
    print(text(rows))
    print(text(contents))
    for each in (*together(wrong), *wrong_contents):
        print(f"not as expected: {each}")
    if write and not words:
        PAGE.write_text(page(rows, contents))
    count = len(wrong) + len(wrong_contents)
    print(f"{len(outcomes)} releases, {count} not as expected")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
