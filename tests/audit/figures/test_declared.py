"""A figure is declared once: one line in ``declared.py`` adds it to every output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests import journals
from tests.histories import events

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.figures.declared import FIGURES
from kvledger.audit.figures.totals import Totals

ROOT = Path(__file__).parents[3]
LINE = """
    Figure(
        "admissions",
        "number of admissions",
        Slot("admissions"),
        "admissions",
        counters=(Counter("kvledger_admissions", "Work", "Admissions, resumptions included."),),
    ),
"""
READ_COUNTER = """
import sys
from pathlib import Path
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.serialize import capture, restore
from kvledger.exporters.metrics.metric_list import collect

audit = FollowedAudit(Path(sys.argv[1]))
with Reader(audit.path) as reader:
    audit.read(reader)
audit = restore(capture(audit), FollowedAudit(audit.path))
found = {metric.name: samples for metric, samples in collect([audit])}
print(*(sample.value for sample in found["kvledger_admissions"]))
"""


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the product in which one figure more is declared."""
    folder = tmp_path_factory.mktemp("product")
    package = folder / "kvledger"
    for name in ("audit", "exporters", "dashboards"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("__init__.py", "__main__.py", "cli.py", "cli_options.py", "cli_run.py"):
        shutil.copy(ROOT / file, package / file)
    declared = package / "audit" / "figures" / "declared.py"
    text = declared.read_text()
    declared.write_text(
        text.replace("FIGURES: tuple[Figure, ...] = (", f"FIGURES: tuple[Figure, ...] = ({LINE}", 1)
    )
    return folder


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request that was admitted twice."""
    return journals.write(tmp_path_factory.mktemp("journal") / "engine-1", events(200, journals.CLEAN))


def run(product: Path, *words: object) -> str:
    """What Python prints with the copied product on its path."""
    environ = {**os.environ, "PYTHONPATH": str(product)}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout


def kvledger(product: Path, *words: object) -> str:
    return run(product, "-m", "kvledger", *words)


def test_the_audit_has_an_added_figure(product: Path, journal: Path) -> None:
    assert 2 == json.loads(kvledger(product, "audit", journal, "--format", "json"))["figures"]["admissions"]


def test_the_summary_has_an_added_figure(product: Path, journal: Path) -> None:
    (row,) = json.loads(kvledger(product, "summary", journal, "--format", "json"))
    assert 2 == row["admissions"]
    head, cells = (
        line.split(",") for line in kvledger(product, "summary", journal, "--format", "csv").splitlines()
    )
    assert "2" == cells[head.index("admissions")]


def test_a_query_and_the_percentiles_have_an_added_figure(product: Path, journal: Path) -> None:
    assert "2" in kvledger(product, "query", journal, "select sum(admissions) from requests")
    assert "admissions p95" in kvledger(product, "summary", journal, "--percentiles", "admissions")


def test_the_comparison_has_an_added_figure(product: Path, journal: Path) -> None:
    figures = json.loads(kvledger(product, "diff", journal, journal, "--format", "json"))["figures"]
    assert [2] == [row["after"] for row in figures if row["name"] == "admissions"]


def test_exported_tables_and_their_page_have_an_added_figure(
    product: Path, journal: Path, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    kvledger(product, "export", journal, "-o", tmp_path)
    assert [2] == pq.read_table(tmp_path / "requests.parquet")["admissions"].to_pylist()
    page = run(product, "-m", "kvledger.exporters.trace.columns")
    assert "| `admissions` | count | number of admissions" in page


def test_the_metrics_and_a_checkpoint_have_an_added_figure(product: Path, journal: Path) -> None:
    assert "2" == run(product, "-c", READ_COUNTER, journal).strip()
    assert "`kvledger_admissions_total`" in run(product, "-m", "kvledger.exporters.metrics.metric_list")


# --- the sums --------------------------------------------------------------------------------------------


def test_totals_have_each_figure_and_add_by_field() -> None:
    auditor = Auditor()
    auditor.feed_all([journals.STARTED, *events(200, journals.CLEAN)])
    once = auditor.ledger.totals()

    both = once + once

    for figure in FIGURES:
        assert 2 * once.of(figure.name) == both.of(figure.name)
    assert once == auditor.ledger.totals(), "adding leaves the parts as they were"


def test_the_parts_of_a_figure_sum_to_it() -> None:
    auditor = Auditor()
    auditor.feed_all([journals.STARTED, *events(200, journals.CLEAN)])
    totals = auditor.ledger.totals()

    for whole in ("prompt_tokens", "scheduled", "promised"):
        parts = [
            figure.name for figure in FIGURES if figure.part_of == whole and figure.name != "invalid_hits"
        ]
        assert totals.of(whole) == sum(map(totals.of, parts))


def test_an_unknown_request_counts_only_as_a_request() -> None:
    from kvledger.audit.ledger.account import Account

    account = Account(1, "a", 10, 0)
    account.unknown, account.preemptions, account.scheduled = "events were lost", 2, 10
    totals = Totals()
    totals.add(account)

    assert (1, 1, 2, 0) == (
        totals.requests,
        totals.unknown_requests,
        totals.preemptions,
        totals.scheduled,
    )
