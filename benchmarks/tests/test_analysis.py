"""The benchmark of the analysis runs, and its sums agree. No test checks how fast it is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from benchmarks.analysis import SUMS, duckdb_totals, kvledger
from tests.simulated_trace import write_trace

from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.trace.parquet import export


def test_sql_over_the_tables_gives_the_sums_of_a_summary(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", 300, engines=2)
    export([tmp_path / "trace"], tmp_path / "tables", ("requests",))

    (row,) = summarize([tmp_path / "trace"])
    _, sums = duckdb_totals(tmp_path / "tables" / "requests.parquet")

    assert {name: getattr(row, name) for name in SUMS} == sums


def test_a_run_is_timed_and_its_memory_measured(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", 10)

    found = kvledger("audit", tmp_path / "trace", "--format", "json")

    assert found.out.startswith("{")
    assert found.wall_seconds > 0
    assert found.peak_bytes > 1 << 20
