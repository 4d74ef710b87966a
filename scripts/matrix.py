"""The release matrix: every report on every release, expected and actual.

Usage: .venv/bin/python scripts/matrix.py [--write] [NAME...]     all releases, or these, or `core`

Runs the scenarios of `tests/scenarios` under observation in each release's
environment (scripts/releases.py), prints one grid, and exits with 1 if an expected finding is missing or
an unexpected one appears. `--write` writes docs/reference/detection.md after a run of all releases; `--text`
runs nothing and writes the page again around the grids that it has.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import content_grid
import expectations as expected
from expectations import Expected
from releases import BIN, CORE, MATRIX, build, environ

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "detection.md"


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
        """Ids of the findings in a scenario, without the drifts."""
        return self._ids(scenario) - expected.DRIFTS

    def drifts(self, scenario: str) -> set[str]:
        """Ids of the drifts in a scenario."""
        return self._ids(scenario) & expected.DRIFTS

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
            extra = self.findings(scenario) - expected.ids(scenario, self.release)
            wrong = [f"found {each}" for each in sorted(extra)]
            if not line.get("left_out"):
                wrong += self._unexpected_drifts(scenario)
                wrong += self._unnamed(scenario)
            if not expected.excused(scenario, self.release):
                wrong += [
                    f"{key} {line[key]}"
                    for key in ("doubts", "unbalanced", "open", "raised")
                    if line.get(key)
                ]
                wrong += ["does not balance"] if line.get("balanced") is False else []
            settled = expected.settled(scenario)
            if settled and not line.get("left_out") and line.get("settled") != settled:
                wrong.append(f"settled {line.get('settled')}, not {settled}")
            results += [Unexpected(self.release, each, scenario) for each in wrong]
        return results

    def _unnamed(self, scenario: str) -> list[str]:
        """Findings that name other requests or tokens than those that the fault harms."""
        rows = self.lines[scenario].get("findings", [])
        assert isinstance(rows, list)
        found = {row[0] for row in rows}
        due = (row for row in expected.harmed(scenario, self.release) if row[0] in found)
        return [
            f"{id} names no {request} with {tokens} tokens"
            for id, request, tokens in due
            if [id, request, tokens] not in rows
        ]

    def _unexpected_drifts(self, scenario: str) -> list[str]:
        """Drifts that this release does not have, and those that this scenario should have shown."""
        found, due = self.drifts(scenario), expected.drifts_due(scenario, self.release)
        return [f"found {id}" for id in sorted(found - expected.drifts(self.release))] + [
            f"{id} is not found" for id in sorted(due - found)
        ]


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


def cell(column: Expected, outcome: Outcome) -> tuple[str, bool]:
    """The cell of the grid for a fault in a release, and whether it is as expected."""
    is_due = column.covers(outcome.release)
    run_here = [c for c in outcome.lines if column.scenarios.drive(c) and c not in outcome.left_out]
    if not run_here:
        return "-", not is_due
    seen = [c for c in run_here if outcome.findings(c) & set(column.ids)]
    if is_due:
        return (f"found {len(seen)}/{len(run_here)}", len(seen) == len(run_here))
    return ("silent", True) if not seen else (f"FOUND {len(seen)}", False)


def grid(outcomes: Sequence[Outcome]) -> tuple[list[list[str]], list[Unexpected]]:
    """The rows of the grid, header first, and the results that are not as expected."""
    rows = [["release", "scenarios", "left out", "clean", *(column.fault.id for column in expected.COLUMNS)]]
    wrong: list[Unexpected] = []
    for outcome in outcomes:
        if outcome.error:
            wrong.append(Unexpected(outcome.release, outcome.error))
        alarms = outcome.unexpected()
        wrong += alarms
        ran = len(outcome.lines) - len(outcome.left_out)
        clean = sum(not outcome.findings(c) for c in outcome.lines) - len(outcome.left_out)
        row = [outcome.release, str(ran), str(len(outcome.left_out)), str(clean)]
        for column in expected.COLUMNS:
            text, right = cell(column, outcome)
            row.append(text if right else f"{text} (!)")
            if not right:
                wrong.append(Unexpected(outcome.release, f"{column.fault.id}: {text}"))
        rows.append(row)
    return rows, wrong


def text(rows: list[list[str]]) -> str:
    """The grid, aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def described(column: Expected) -> str:
    """What the page says below the grid of a column."""
    links = ", ".join(f"[{name}]({url})" for name, url in column.fault.named_links)
    names = f"**{column.fault.id}** ({links})" if links else f"**{column.fault.id}**"
    note = f" In these scenarios: {column.scenarios.note}." if column.scenarios.note else ""
    return f"- {names}: {column.fault.text}{note}"


def other(each: Expected) -> str:
    """The row of the page for what scenarios may show besides."""
    found = ", ".join(map(_code, each.ids)) or "none"
    found += "; the scheduler itself fails" if each.scenarios.engine_fails else ""
    note = f" ({each.scenarios.note})" if each.scenarios.note else ""
    says = f"[{each.fault.id}](findings.md#{each.fault.id}): {each.fault.title}{note}"
    return f"| {found} | {each.span} | {says} | {', '.join(map(_code, each.scenarios.names))} |"


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
    """docs/reference/detection.md."""
    head, *body = rows
    table = [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(r) + " |" for r in body),
    ]
    return "\n".join(
        [
            "# Detection",
            "",
            "Generated by `make releases ARGS=--write`; do not edit. The scenarios of `tests/scenarios`",
            "drive the real scheduler of each release, with scripted model output, while kvledger observes.",
            "",
            "- *found n/n*: n scenarios drive the engine into the fault, and the audit found it in each. The",
            "  findings name the requests and tokens that the fault harms (`harmed` in `audit/faults/data`).",
            "- *silent*: the same scenarios ran, and the audit found nothing.",
            "- *-*: these scenarios can't run in the release (v0 or v1 only, or a missing feature).",
            "- *clean*: the number of scenarios without any finding. The findings in the other scenarios are",
            "  listed below by release; there were no others. Drifts are not counted here:",
            "  [reconciliation.md](../reconciliation.md) has them by release.",
            "",
            "A release of LMCache runs with vLLM 0.32.0, or with the release after the slash, in scenarios",
            "of its own. The scheduler side of its adapter is real; a table takes the place of its store.",
            "",
            *table,
            "",
            *map(described, expected.COLUMNS),
            "",
            "## Other findings on released engines",
            "",
            "| finding | releases | what it is | scenarios |",
            "|---|---|---|---|",
            *map(other, expected.OTHERS),
            "",
            "[findings.md](findings.md) has every fault, and reproduces nearly all of these one by one on",
            "the released packages.",
            "",
            *content_grid.section(contents),
            "## vLLM's own tests under the ledger",
            "",
            "[upstream-tests.md](upstream-tests.md): the tests of vLLM's source distributions, as they are",
            "and with kvledger observing every scheduler and KV cache manager that they create.",
            "",
        ]
    )


def tables(page: str) -> tuple[list[list[str]], list[list[str]]]:
    """The two grids that a page has: of all scenarios, and of those at level ``content``."""
    grids = []
    for lines in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in lines.splitlines()]
        if rows[0][0] == "release":
            grids.append([rows[0], *rows[2:]])
    return grids[0], grids[1]


def main(arguments: Sequence[str]) -> int:
    if list(arguments) == ["--text"]:
        PAGE.write_text(page(*tables(PAGE.read_text())))
        return 0
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
