"""The rollup of a made week: copies of one hour, which every reader adds up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.week import section, timed, week

from kvledger.exporters.reports.summary import summarize

NOW = 1_770_000_000.0


def test_a_week_has_the_requests_of_its_hours(tmp_path: Path) -> None:
    path = week(tmp_path, hours=3, requests=600, now=NOW)

    *hours, all_requests = summarize([tmp_path], "hour", with_costs=True)

    assert 3 == len(hours)
    assert 1 == len({row.requests for row in hours}) and 3 * hours[0].requests == all_requests.requests > 0
    assert [path] == list(tmp_path.rglob("*.rollup")) and not (tmp_path / "engine-00").exists()


def test_the_table_has_a_row_a_command(tmp_path: Path) -> None:
    week(tmp_path, hours=2, requests=300, now=NOW)

    row = timed("summary", tmp_path, 1)

    assert row.answer.endswith("spent waiting.") and row.wall > 0
    assert "| kvledger summary |" in section([row], 1, 2)
