"""`kvledger summary blocks`, the tables about blocks, their metrics, and the section of the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import journals
from tests.audit.analysis.test_blocks import A, B, C, Recording
from tests.command_line import exit_code

from kvledger.exporters.metrics.metric_list import METRICS
from kvledger.exporters.reports.page import gather, html
from kvledger.exporters.trace.columns import TABLES, Rows, rows


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of four blocks; the second request hits block 1 and evicts block 2."""
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    return journals.write(tmp_path / "blocks", recording.events, level="blocks")


def test_the_command_sums_up_states_evictions_and_reuse(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == exit_code("summary", "blocks", journal)
    text = capsys.readouterr().out
    assert "1 cached block was evicted; nobody had hit 1 of them (100.0 %)." in text

    exit_code("summary", "blocks", journal, "--format", "json")
    data = json.loads(capsys.readouterr().out)
    assert (4, 3, 1, 1) == tuple(data[name] for name in ("blocks", "allocated", "hits", "evicted"))
    assert sum(data["state_shares"].values()) == pytest.approx(1)


def test_a_journal_without_block_events_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == exit_code("summary", "blocks", journals.clean(tmp_path / "tokens"))
    assert "KVLEDGER_LEVEL=blocks" in capsys.readouterr().err


def test_the_tables_have_stays_and_seconds(journal: Path) -> None:
    found: dict[str, Rows] = {name: [] for name in TABLES}
    for name, some in rows([journal]):
        found[name] += some

    columns = [column.name for column in TABLES["stays"]]
    stays = [dict(zip(columns, row, strict=True)) for row in found["stays"]]
    assert [(2, "evicted", "r0", 0), (1, None, "r0", 1), (2, None, "r1", 0)] == [
        (stay["block"], stay["left_by"], stay["request_id"], stay["hits"]) for stay in stays
    ]
    columns = [column.name for column in TABLES["occupancy"]]
    seconds = [dict(zip(columns, row, strict=True)) for row in found["occupancy"]]
    assert [(0, 2, 0, 0), (1, 1, 1, 1)] == [
        (second["second"], second["allocated"], second["evicted"], second["hits"]) for second in seconds
    ]
    assert {4} == {second["running"] + second["cached"] + second["empty"] for second in seconds}


def test_metrics_have_the_states_and_the_evictions(journal: Path, tmp_path: Path) -> None:
    audits = journals.followed_audits(journal)
    samples = {
        (metric.name, sample.labels[1:]): sample.value
        for metric in METRICS
        for sample in metric.read(audits)
        if "block" in metric.name
    }
    assert 2 == samples["kvledger_pool_blocks", ("cached",)] == samples["kvledger_pool_blocks", ("empty",)]
    assert 0 == samples["kvledger_pool_blocks", ("running",)]
    assert 1 == samples["kvledger_evicted_blocks", ("no",)]
    assert 0 == samples["kvledger_evicted_blocks", ("yes",)]
    assert 1 == samples["kvledger_block_lifetime_seconds", ()].observed

    silent = journals.followed_audits(journals.clean(tmp_path / "tokens"))
    names = {metric.name for metric in METRICS for _ in metric.read(silent)}
    assert ["kvledger_sampled_missed_blocks"] == [name for name in names if "block" in name]


def test_the_report_has_the_section_only_at_level_blocks(journal: Path, tmp_path: Path) -> None:
    assert "<h2>Blocks</h2>" in html(gather([journal]))
    assert "<h2>Blocks</h2>" not in html(gather([journals.clean(tmp_path / "tokens")]))
