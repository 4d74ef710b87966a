"""Findings of a journal that is audited in parts are those of the journal read from its beginning."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.repro.crowds import record
from tests.repro.faults import FAULTS

from kvledger.audit.journal.format import segments
from kvledger.audit.repro import choose_finding
from kvledger.audit.repro.choose_finding import Ambiguous, Part, Seen, Wanted, choose, findings

FINDING = "tokens/in-flight"


class Found(NamedTuple):
    """A journal of small segments, and its findings as read from the beginning."""

    folder: Path
    findings: list[Seen]

    def first(self, finding: str) -> Seen:
        """The first finding of an id in a request."""
        return next(seen for seen in self.findings if seen.id == finding and seen.request_id)

    @property
    def violations(self) -> set[str]:
        """The ids of its violations."""
        return {seen.id for seen in self.findings if seen.severity == "violation"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("crowd") / "journal"
    record(FAULTS["placeholder-leak"], folder, requests=60, segment_bytes=4 << 10)
    return Found(folder, list(findings(folder)))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a segment or two, audited in this process until their requests have ended."""
    monkeypatch.setattr(choose_finding, "PART_BYTES", 6 << 10)
    # Segments are cut by time too, so a slow machine has more of them.
    monkeypatch.setattr(choose_finding, "READ_ON", 1000)
    monkeypatch.setattr(choose_finding, "cores", lambda: 1)


def test_the_finding_chosen_from_parts_is_the_one_of_the_whole_journal(found: Found):
    assert len(choose_finding._parts(found.folder)) >= 4

    assert choose(found.folder, FINDING, None) == found.first(FINDING)


def test_parts_have_every_violation_of_the_journal(found: Found):
    parts = [
        seen
        for part in choose_finding._parts(found.folder)
        for seen in choose_finding._first_of_part(part, Wanted())
    ]

    assert {seen.id for seen in parts if seen.severity == "violation"} == found.violations


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_part_has_the_finding_whichever_segments_begin_a_part(found: Found, size: int):
    seen = found.first(FINDING)
    numbers = list(segments(found.folder))
    for offset in range(size):
        starts = [numbers[0], *numbers[size - offset :: size]]
        ends = [start - 1 for start in starts[1:]] + [numbers[-1]]
        parts = [Part(found.folder, a, b, max(1, a - 1)) for a, b in zip(starts, ends, strict=True) if a <= b]
        owners = [
            part for part in parts if choose_finding._first_of_part(part, Wanted(FINDING, seen.request_id))
        ]
        assert 1 == len(owners)
        assert owners[0].first is not None and owners[0].last is not None
        assert owners[0].first <= seen.segment <= owners[0].last


def test_a_request_that_is_open_for_longer_than_a_part_reads_on_is_searched_from_the_beginning(
    found: Found, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(choose_finding, "READ_ON", -1)

    assert choose(found.folder, FINDING, None) == found.first(FINDING)


def test_a_finding_that_no_part_has_is_searched_from_the_beginning(
    found: Found, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(choose_finding, "_first_of_part", lambda part, wanted: [])

    assert choose(found.folder, FINDING, None) == found.first(FINDING)


def test_processes_find_what_one_process_finds(found: Found, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choose_finding, "cores", lambda: 2)

    assert choose(found.folder, FINDING, None) == found.first(FINDING)


def test_the_only_violation_is_chosen_among_drifts(found: Found, monkeypatch: pytest.MonkeyPatch):
    several = [seen for seen in found.findings if seen.severity == "drift" or seen.id == FINDING]
    assert len({seen.id for seen in several}) > 1
    monkeypatch.setattr(choose_finding, "_in_parallel", lambda parts, wanted: iter(several))

    assert FINDING == choose(found.folder, None, None).id


def test_several_violations_must_be_chosen_from(found: Found, monkeypatch: pytest.MonkeyPatch):
    other = msgspec.structs.replace(found.first(FINDING), id="tokens/negative")
    monkeypatch.setattr(
        choose_finding, "_in_parallel", lambda parts, wanted: iter([found.first(FINDING), other])
    )

    with pytest.raises(Ambiguous):
        choose(found.folder, None, None)


def test_a_damaged_segment_does_not_hide_findings_of_later_parts(found: Found, tmp_path: Path):
    folder = tmp_path / "damaged"
    shutil.copytree(found.folder, folder)
    second = segments(folder)[2]
    second.write_bytes(second.read_bytes()[:100])

    assert choose(folder, FINDING, None).request_id == found.first(FINDING).request_id
