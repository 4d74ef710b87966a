"""The rows of a made week: copies of one hour, which every reader adds up."""

from __future__ import annotations

from pathlib import Path

from benchmarks.week import section, table_row, timed, week

from kvledger.exporters.reports.summary import summarize

NOW = 1_770_000_000.0


def test_a_week_has_the_requests_of_its_hours(tmp_path: Path) -> None:
    size = week(tmp_path, hours=3, requests=600, now=NOW)

    *hours, all_requests = summarize([tmp_path], "hour", with_costs=True)

    assert 3 == len(hours)
    assert 1 == len({row.requests for row in hours}) and 3 * hours[0].requests == all_requests.requests > 0
    assert size == sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    assert not (tmp_path / "engine-00").exists()


def test_the_table_has_a_row_a_command(tmp_path: Path) -> None:
    week(tmp_path, hours=2, requests=300, now=NOW)

    row = timed("summary", tmp_path, 1)

    assert "spent waiting." in row.answer and row.wall > 0 and row.mib > 20
    assert "| kvledger summary |" in section([table_row(row)], 1, 2)


def test_a_page_of_the_week_has_its_requests_and_its_range(tmp_path: Path) -> None:
    week(tmp_path / "week", hours=3, requests=600, now=NOW)

    row = timed("export html --until 2100-01-01 -o page.html", tmp_path / "week", 1)

    (total,) = summarize([tmp_path / "week"])
    assert f"{total.requests:,} requests" in row.answer
    page = (tmp_path / "page.html").read_text()
    assert "2026-02-01 23:00:00 UTC to 2026-02-02 01:59:59 UTC" in page
