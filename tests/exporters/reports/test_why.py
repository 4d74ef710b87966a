"""``why``: the causes of misses over whole journals, their sum, and notes on what a trace can't prove."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import journals
from tests.histories import events

from kvledger.audit.events import Gap
from kvledger.audit.figures.declared import BY_NAME
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.parallel import Processes
from kvledger.exporters.facts.misses import Misses, Sampled
from kvledger.exporters.facts.sums import GroupSums
from kvledger.exporters.reports.why import explained, why


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return journals.golden(tmp_path / "golden", {"block_size": 16})


def test_the_causes_sum_to_all_misses(golden: Path) -> None:
    result = why([golden])

    assert result.no_hit == sum(row.tokens for row in result.causes)
    assert sum(row.share or 0 for row in result.causes) == pytest.approx(1)
    assert audit_paths([golden]).totals.first_prompt <= result.no_hit


def test_several_processes_give_the_same_result(golden: Path) -> None:
    assert why([golden]) == why([golden], run=Processes(2))


def test_a_note_names_the_level_that_proves_more(golden: Path) -> None:
    (note,) = why([golden]).notes

    assert note.startswith("Recorded at level tokens, which has no block events")


@pytest.mark.parametrize("level", ["blocks", "content"])
def test_levels_with_block_events_have_no_note(tmp_path: Path, level: str) -> None:
    path = journals.write(
        tmp_path / "one", events(10, "A0+0 s10 o+ F"), configuration={"block_size": 16}, level=level
    )

    assert [] == why([path]).notes


def test_a_missing_block_size_is_noted(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "one", events(10, "A0+0 s10 o+ F"))

    result = why([path])

    assert ["not_knowable"] == [row.cause for row in result.causes]
    assert any("reported no block size" in note for note in result.notes)


def test_unknown_requests_are_in_no_figure(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])

    result = why([path])

    assert (1, 1, 0, []) == (result.requests, result.unknown, result.no_hit, result.causes)


def test_causes_that_do_not_add_up_are_a_defect_of_kvledger() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        explained(Misses(GroupSums(missed=1, figures=dict.fromkeys(BY_NAME, 0))), Sampled(), [])
