"""Faults of released schedulers at level `content`: found in the releases that have them, silent in others.

Usage: .venv/bin/python scripts/content_grid.py [--write] [NAME...]     all releases since 0.17, or these

Drives the real scheduler of each release with a runner that has KV caches and no model
(`tests/scenarios/content_faults.py`), prints one grid, and exits with 1 if a finding is missing or is not
expected. `--write` replaces the section of docs/reference/detection.md after a run of all releases.
`make releases` runs this too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from releases import BIN, CORE, MATRIX, build, environ

from kvledger.audit.faults.catalogue import catalogue

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "detection.md"
HEADING = "## Released faults at level `content`"


@dataclass(frozen=True)
class Driven:
    """A scenario that drives a known fault at level ``content``, or a near miss of one.

    ``id``: what the audit finds; empty for a near miss. A fault's scenario has the fault's name.
    """

    name: str
    id: str
    says: str
    since: str = "0.17.0"
    """The first release that has what the scenario drives."""

    def expected(self, release: str) -> bool:
        """Whether the audit must find the fault in a release."""
        return bool(self.id) and catalogue()[self.name].releases.state("vllm", release) == "has"


DRIVEN = (
    Driven(
        "failed-load-stays-cached",
        "content/unsealed-hit",
        "a load fails, its request is aborted, and the next request hits the blocks, which nobody filled",
    ),
    Driven("failed-load-computed", "", "the same load fails, and its request computes the blocks"),
    Driven(
        "load-rounded-up",
        "content/unsealed-hit",
        "a load ends within a block, and the engine counts the block's other positions as computed: the "
        "request reads what nobody filled",
    ),
    Driven("load-of-whole-blocks", "", "the same load ends with a block"),
    Driven(
        "offload-store-race",
        "content/transfer",
        "SimpleCPUOffloadConnector stores blocks while the step that fills them is in flight, and a later "
        "load brings what the block held before. Scheduler, connector and copy loop are vLLM's; streams, "
        "events and copies are a model of a device (`tests/scenarios/offload_race.py`)",
        since="0.19.1",
    ),
    Driven(
        "offload-store-in-order",
        "",
        "the same stores, where each step ends before the next begins",
        since="0.19.1",
    ),
)


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def covered(names: Iterable[str]) -> list[str]:
    """The releases among these whose scheduler level `content` reaches."""
    return [name for name in names if re.fullmatch(r"[\d.]+", name)]


def run(release: str) -> dict[str, dict[str, object]]:
    """The outcome of each fault in a release, or the error by the empty name."""
    print(f"{release} at level content ...", file=sys.stderr, flush=True)
    environment = environ(release)
    path = os.pathsep.join((environment.get("PYTHONPATH", ""), str(ROOT / "src")))
    done = subprocess.run(
        [str(BIN / "python"), "-m", "tests.scenarios.content_faults"],
        env=environment | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {row["fault"]: row for row in rows}
    if done.returncode or not found:
        found[""] = {"raised": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]}
    return found


def cell(driven: Driven, release: str, outcome: dict[str, dict[str, object]]) -> tuple[str, bool]:
    """The cell of the grid, and whether it is as expected."""
    if _number(release) < _number(driven.since):
        return "-", True
    row = outcome.get(driven.name) or outcome.get("") or {"raised": "it was not run"}
    if "raised" in row:
        return f"error: {row['raised']}", False
    findings = row["findings"]
    assert isinstance(findings, list)
    ids = {finding[0] for finding in findings}
    right = ids == ({driven.id} if driven.expected(release) else set()) and not row["excluded"]
    return ", ".join(f"`{id}`" for id in sorted(ids)) or "silent", right


def grid(names: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The rows of the grid, header first, and what is not as expected."""
    releases = covered(names)
    rows, wrong = [["release", *(driven.name for driven in DRIVEN)]], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(run, releases)
        for release, outcome in zip(releases, outcomes, strict=True):
            cells = [cell(driven, release, outcome) for driven in DRIVEN]
            rows.append([release, *(text if right else f"{text} (!)" for text, right in cells)])
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
            wrong += [
                f"{release}: {driven.name} at level content: {text}"
                for driven, (text, right) in zip(DRIVEN, cells, strict=True)
                if not right
            ]
    return rows, wrong


def _finding(driven: Driven) -> str:
    return f" ([finding](findings.md#{driven.name}))" if driven.id else ""


def section(rows: list[list[str]]) -> list[str]:
    """The section of docs/reference/detection.md."""
    head, *body = rows
    return [
        HEADING,
        "",
        "The real scheduler of each release plans, and a runner with KV caches and no model executes: it",
        "writes random KV at every position that a step computes, and in every block that a load fills. *-*:",
        "the release does not have what the scenario drives.",
        "`make releases` runs this; `scripts/content_grid.py --write` writes this section.",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(row) + " |" for row in body),
        "",
        *(f"- **{driven.name}**: {driven.says}{_finding(driven)}." for driven in DRIVEN),
        "",
    ]


def replace_section(page: str, lines: list[str]) -> str:
    """The page with these lines in place of the section, or before the section on the whole engine."""
    text = "\n".join(lines) + "\n"
    old = re.compile(rf"^{re.escape(HEADING)}\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
    if old.search(page):
        return old.sub(lambda _: text, page)
    return page.replace(
        "## negative-local-hit on a whole engine", f"{text}## negative-local-hit on a whole engine"
    )


def main(arguments: Sequence[str]) -> int:
    write = "--write" in arguments
    words = [word for word in arguments if word != "--write"]
    names = [name for word in words or MATRIX for name in (CORE if word == "core" else [word])]
    build(covered(names))
    rows, wrong = grid(names)
    for row in rows:
        print("  ".join(each.ljust(26) for each in row).rstrip())
    for each in wrong:
        print(f"not as expected: {each}")
    if write and not words:
        PAGE.write_text(replace_section(PAGE.read_text(), section(rows)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
