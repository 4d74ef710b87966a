"""``why``: the causes over whole journals, their sum, and what would tell more."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from tests import journals
from tests.histories import GOLDEN, events

from kvledger.audit.events import Gap
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.parallel import Processes
from kvledger.exporters.reports.why import Tally, as_csv, explained, why


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    for number, row in enumerate(GOLDEN):
        journals.write(
            tmp_path / "golden" / f"engine-{number:02d}", row.events(), configuration={"block_size": 16}
        )
    return tmp_path / "golden"


def test_the_causes_sum_to_all_that_was_no_hit(golden: Path) -> None:
    found = why([golden])

    assert found.no_hit == sum(row.tokens for row in found.causes)
    assert sum(row.share or 0 for row in found.causes) == pytest.approx(1)
    assert audit_paths([golden]).totals.first_prompt <= found.no_hit


def test_hits_stand_beside_them(golden: Path) -> None:
    found, totals = why([golden]), audit_paths([golden]).totals

    assert (totals.prompt_tokens, totals.local + totals.external) == (found.prompt_tokens, found.hit)


def test_several_processes_find_the_same(golden: Path) -> None:
    assert why([golden]) == why([golden], run=Processes(2))


def test_it_says_which_recording_would_tell_more(golden: Path) -> None:
    (note,) = why([golden]).notes

    assert note.startswith("Recorded at level tokens, which has no block events")


def test_of_what_was_recorded_with_blocks_it_says_nothing_more(tmp_path: Path) -> None:
    path = journals.write(
        tmp_path / "one", events(10, "A0+0 s10 o+ F"), configuration={"block_size": 16}, level="blocks"
    )

    assert [] == why([path]).notes


def test_without_a_block_size_it_says_so(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "one", events(10, "A0+0 s10 o+ F"))

    found = why([path])

    assert ["not_knowable"] == [row.cause for row in found.causes]
    assert any("reported no block size" in note for note in found.notes)


def test_unknown_requests_are_in_no_figure(tmp_path: Path) -> None:
    path = journals.write(tmp_path / "unknown", [*events(10, "A0+0 s10 o+"), Gap(900, 5, "full")])

    found = why([path])

    assert (1, 1, 0, []) == (found.requests, found.unknown, found.no_hit, found.causes)


def test_csv_is_a_line_a_cause(golden: Path) -> None:
    found = why([golden])

    read = list(csv.DictReader(io.StringIO(as_csv(found))))

    assert [row.cause for row in found.causes] == [line["cause"] for line in read]
    assert [str(row.tokens) for row in found.causes] == [line["tokens"] for line in read]


def test_what_does_not_add_up_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        explained(Tally(no_hit=1))
