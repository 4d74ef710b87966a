"""`kvledger repro` on journals that are cut, rotated, damaged, or begin midway."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("vllm")

from tests.repro.crowds import record
from tests.repro.faults import FAULTS

from kvledger.audit import events as ev
from kvledger.audit.journal.format import segment_number, segments
from kvledger.audit.journal.reader import Reader
from kvledger.audit.repro.choose_finding import findings
from kvledger.audit.repro.reproduction import Reproduction, reproduce

FINDING = "tokens/in-flight"


class Recorded(NamedTuple):
    """A journal of many segments, the finding's request, and the segments in which it was added and ended."""

    folder: Path
    added: int
    ended: int
    last: int

    def copy(self, folder: Path, *removed: int) -> Path:
        """A copy of the journal without some of its segments."""
        shutil.copytree(self.folder, folder)
        for number, path in segments(folder).items():
            if number in removed:
                path.unlink()
        return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("crowd") / "journal"
    record(FAULTS["placeholder-leak"], folder, requests=60, segment_bytes=8 << 10)
    (seen,) = [seen for seen in findings(folder) if seen.id == FINDING]
    places: dict[type[ev.Event], int] = {}
    number = -2
    with Reader(folder) as reader:
        for batch in reader.poll():
            for event in batch.events:
                if getattr(event, "request_id", "") == seen.request_id:
                    number = event.request
                if getattr(event, "request", -1) == number:
                    places[type(event)] = batch.start.segment
    return Recorded(folder, places[ev.RequestAdded], places[ev.Finished], max(segments(folder)))


def interrupted_while_shrinking(phase: str, *_: int) -> None:
    """A progress callback that interrupts as soon as there is a first reproduction."""
    if phase == "shrinking":
        raise KeyboardInterrupt


def first(folder: Path) -> Reproduction:
    """The first reproduction of the finding, not shrunk."""
    return reproduce(folder, finding=FINDING, budget=60, workers=0, progress=interrupted_while_shrinking)


def test_a_journal_of_many_segments_is_reproduced_and_an_interrupt_keeps_the_smallest_so_far(
    recorded: Recorded,
):
    assert recorded.last >= 5

    result = first(recorded.folder)

    assert ("reproduced", "", True) == (result.status, result.reason, result.interrupted)
    assert result.workload is not None and result.check is not None
    assert result.requests_after < result.requests_before


def test_a_journal_whose_last_frame_is_torn_is_reproduced(recorded: Recorded, tmp_path: Path):
    folder = recorded.copy(tmp_path / "torn", *range(recorded.ended + 2, recorded.last + 1))
    last = max(segments(folder).values(), key=lambda path: segment_number(path) or 0)
    last.write_bytes(last.read_bytes()[:-7])

    assert "reproduced" == first(folder).status


def test_a_journal_that_begins_before_the_request_is_reproduced(recorded: Recorded, tmp_path: Path):
    folder = recorded.copy(tmp_path / "midway", *range(1, recorded.added))

    assert "reproduced" == first(folder).status


def test_a_journal_that_lost_segments_before_the_request_is_reproduced(recorded: Recorded, tmp_path: Path):
    folder = recorded.copy(tmp_path / "gap", 2)

    assert "reproduced" == first(folder).status


def test_a_journal_that_begins_amid_the_request_is_reproduced_or_says_why_not(
    recorded: Recorded, tmp_path: Path
):
    folder = recorded.copy(tmp_path / "late", *range(1, recorded.ended))
    found = [seen for seen in findings(folder) if seen.id == FINDING]

    results = [first(folder)] if found else []

    assert all(result.status == "reproduced" or result.reason for result in results)
