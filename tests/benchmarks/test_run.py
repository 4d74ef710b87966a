"""The page of figures: what is measured again replaces what was measured before, and nothing else."""

from __future__ import annotations

from pathlib import Path

from benchmarks import page
from benchmarks.run import Row, cells, merged, text

CHURN = Row("churn: CPU a step", "1.02", "1.01 to 1.03", "at most 1.03", True, "churn")
STEADY = Row("steady: CPU a step", "1.01", "1.00 to 1.02", "at most 1.01", True, "steady-256")
REPLAY = Row("replay", "9", "", "at least 8", True, "replay")


def test_a_part_measured_again_has_its_place_and_the_others_stay() -> None:
    before = [cells(row) for row in (STEADY, CHURN, REPLAY)]
    now = CHURN._replace(figure="1.04", met=False)

    assert [cells(row) for row in (STEADY, now, REPLAY)] == merged(before, [now])


def test_what_is_measured_no_more_is_left_out() -> None:
    gone = STEADY._replace(part="a part of old")

    assert [cells(CHURN)] == merged([cells(gone)], [CHURN])


def test_the_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    lines = [cells(row) for row in (STEADY, CHURN, REPLAY)]
    written = tmp_path / "performance.md"
    written.write_text("")
    page.write_first(text(lines, "a machine."), written)

    assert lines == page.told(written)
