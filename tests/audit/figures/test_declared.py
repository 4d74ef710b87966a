"""A figure, a label and a counter are declared once: one line adds each to every output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.events import RequestAdded, RequestLabels
from kvledger.audit.figures.declared import FIGURES
from kvledger.audit.figures.totals import Totals

ROOT = Path(__file__).parents[3]
ADDED = {
    "audit/figures/declared.py": (
        "FIGURES: tuple[Figure, ...] = (",
        """
    Figure(
        "admissions",
        "number of admissions",
        Slot("admissions"),
        "admissions",
        counters=(Counter("kvledger_admissions", "Work", "Admissions, resumptions included."),),
    ),""",
    ),
    "audit/figures/figure.py": (
        "LABELS: tuple[Label, ...] = (",
        """
    Label(
        "size",
        "size_class",
        "whether the prompt is long or short",
        lambda account: "long" if account.prompt_tokens > 100 else "short",
        "no size",
        hourly=True,
    ),""",
    ),
    "audit/replay/metrics_state.py": (
        "class MetricsState(Sums):",
        """
    resumptions: int = 0
""",
    ),
}
"""By file: the text behind which a figure with a unit of its own, a label, and a counter are added."""

ASK = """
import contextlib, io, json, sys
from pathlib import Path

from kvledger import cli
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.metrics_state import MetricsState
from kvledger.audit.replay.serialize import capture, restore
from kvledger.exporters.facts.hours import HOURLY
from kvledger.exporters.metrics import metric_list, otel
from kvledger.exporters.metrics.metric_list import collect
from kvledger.exporters.trace import columns

def kvledger(*words):
    out, sys.argv = io.StringIO(), ["kvledger", *map(str, words)]
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main()
    return out.getvalue()

journal, exported = map(Path, sys.argv[1:])
audit = FollowedAudit(journal)
with Reader(audit.path) as reader:
    audit.read(reader)
audit = restore(capture(audit), FollowedAudit(audit.path))
found = {metric.name: samples for metric, samples in collect([audit])}
table = {metric.name: metric for metric in metric_list.METRICS}
both = MetricsState(resumptions=2)
both.merge(MetricsState(resumptions=3))
sums = {one.column.name for one in HOURLY["hours"].sums} | {key.name for key in HOURLY["hours"].keys}
print(json.dumps({
    "audit": kvledger("audit", journal, "--format", "json"),
    "summary": kvledger("summary", journal, "--format", "json"),
    "csv": kvledger("summary", journal, "--by", "size", "--format", "csv"),
    "by": kvledger("summary", journal, "--by", "size", "--format", "json"),
    "query": kvledger("query", journal, "select admissions, size_class from requests", "--format", "csv"),
    "percentiles": kvledger("summary", journal, "--percentiles", "admissions"),
    "diff": kvledger("diff", journal, journal, "--format", "json"),
    "export": kvledger("export", journal, "-o", exported),
    "prometheus": [sample.value for sample in found["kvledger_admissions"]],
    "labelled": [sample.labels for sample in found["kvledger_labelled_requests"]],
    "otlp": otel.unit_code(table["kvledger_admissions"].unit),
    "merged": both.resumptions,
    "hourly": sorted(sums),
    "tables": columns.markdown(),
    "metrics": metric_list.markdown(),
}))
"""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One request that was admitted twice."""
    labelled = [
        replace(event, labels=RequestLabels(priority=1)) if isinstance(event, RequestAdded) else event
        for event in events(200, journals.CLEAN)
    ]
    return journals.write(tmp_path_factory.mktemp("journal") / "engine-1", labelled)


@pytest.fixture(scope="module")
def found(journal: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the product prints in which a figure, a label and a counter more are declared."""
    folder = tmp_path_factory.mktemp("product")
    package = folder / "kvledger"
    for name in ("audit", "exporters", "dashboards"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("__init__.py", "__main__.py", "cli.py", "cli_options.py", "cli_run.py"):
        shutil.copy(ROOT / file, package / file)
    for name, (before, line) in ADDED.items():
        text = (package / name).read_text()
        assert 1 == text.count(before)
        if name.endswith("metrics_state.py"):  # behind the docstring of the class
            before = text[text.index(before) : text.index("    clock_seconds")].rstrip()
        (package / name).write_text(text.replace(before, before + line, 1))
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", ASK, str(journal), str(folder / "exported")]
    asked = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert 0 == asked.returncode, asked.stderr
    parquet = folder / "exported/requests.parquet"
    return json.loads(asked.stdout) | {"parquet": pq.read_table(parquet).to_pylist()}


def test_the_audit_and_the_summary_have_an_added_figure(found: dict[str, Any]) -> None:
    assert 2 == json.loads(found["audit"])["figures"]["admissions"]
    assert [2] == [row["admissions"] for row in json.loads(found["summary"])]
    head, cells = (line.split(",") for line in found["csv"].splitlines()[:2])
    assert "2" == cells[head.index("admissions")]


def test_a_query_and_the_percentiles_have_an_added_figure(found: dict[str, Any]) -> None:
    assert ["admissions,size_class", "2,long"] == found["query"].splitlines()
    assert "admissions p95" in found["percentiles"]


def test_the_comparison_has_an_added_figure(found: dict[str, Any]) -> None:
    figures = json.loads(found["diff"])["figures"]
    assert [2] == [row["after"] for row in figures if row["name"] == "admissions"]


def test_exported_tables_and_their_page_have_an_added_figure_and_label(found: dict[str, Any]) -> None:
    assert [(2, "long")] == [(row["admissions"], row["size_class"]) for row in found["parquet"]]
    assert "| `admissions` | count | number of admissions" in found["tables"]
    assert "| `size_class` | text | whether the prompt is long or short |" in found["tables"]


def test_the_metrics_and_a_checkpoint_have_an_added_figure(found: dict[str, Any]) -> None:
    assert [2] == found["prometheus"]
    assert "`kvledger_admissions_total`" in found["metrics"]


def test_a_unit_that_no_table_lists_has_a_code_in_otlp(found: dict[str, Any]) -> None:
    assert "{admission}" == found["otlp"]


def test_groups_and_metrics_have_an_added_label(found: dict[str, Any]) -> None:
    assert "long" == json.loads(found["by"])[0]["group"]
    assert ["size", "long"] in [labels[-2:] for labels in found["labelled"]]


def test_the_sums_by_the_hour_have_an_added_figure_and_label(found: dict[str, Any]) -> None:
    assert {"admissions", "size_class"} <= set(found["hourly"])


def test_a_counter_that_nothing_lists_is_added_when_states_merge(found: dict[str, Any]) -> None:
    assert 5 == found["merged"]


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
