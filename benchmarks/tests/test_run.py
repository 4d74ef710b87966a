"""The page of figures: a new measurement replaces the rows of its own part and no others."""

from __future__ import annotations

from pathlib import Path

from benchmarks import page
from benchmarks.run import Row, cells, merged, middle, text

CHURN = Row("churn: CPU a step", "1.02", "1.01 to 1.03", "at most 1.03", True, "churn")
STEADY = Row("steady: CPU a step", "1.01", "1.00 to 1.02", "at most 1.01", True, "steady-256")
REPLAY = Row("replay", "9", "", "at least 8", True, "replay")


def test_a_new_measurement_replaces_the_rows_of_its_part() -> None:
    before = [cells(row) for row in (STEADY, CHURN, REPLAY)]
    now = CHURN._replace(figure="1.04", met=False)

    assert [cells(row) for row in (STEADY, now, REPLAY)] == merged(before, [now])


def test_rows_of_a_part_that_no_longer_exists_are_left_out() -> None:
    gone = STEADY._replace(part="a removed part")

    assert [cells(CHURN)] == merged([cells(gone)], [CHURN])


def test_reading_the_page_gives_the_rows_that_were_written(tmp_path: Path) -> None:
    lines = [cells(row) for row in (STEADY, CHURN, REPLAY)]
    written = tmp_path / "performance.md"
    written.write_text("")
    page.put_first(text(lines, "a machine."), written)

    assert lines == page.read_table(written)


def test_of_several_runs_the_row_is_the_median_run_beside_all_figures() -> None:
    runs = [CHURN._replace(figure=figure, met=met) for figure, met in (("1.04", False), ("1.01", True))]

    row = middle([*runs, CHURN])

    assert ("1.02", True, "1.04, 1.01, 1.02") == (row.figure, row.met, row.all_runs)
    assert CHURN == middle([CHURN])
