"""Two traces compared: figures, findings, and meanings that differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events

from kvledger.audit.journal.reader import Position, Reader
from kvledger.exporters import writers
from kvledger.exporters.reports.diff import answer, compare
from kvledger.exporters.reports.summary import summarize


def test_a_trace_does_not_differ_from_itself(tmp_path: Path) -> None:
    path = journals.clean(tmp_path / "one")

    comparison = compare([path], [path])

    assert all(row.before == row.after for row in comparison.figures)
    assert ({}, [], ("clean", "clean")) == (comparison.findings, comparison.meanings, comparison.verdicts)


def test_shares_verdicts_and_findings_are_compared(tmp_path: Path) -> None:
    before = journals.write(tmp_path / "before", events(200, "A100+0 s100 o+ F"))
    after = journals.violated(tmp_path / "after")

    comparison = compare([before], [after])

    shares = {row.label: (row.before, row.after) for row in comparison.figures}
    assert (0.5, 0.0) == shares["local, of prompt tokens"]
    assert (0, 1) == comparison.findings["tokens/negative"]
    assert ("clean", "violated") == comparison.verdicts


def test_changed_settings_come_first_and_what_names_an_engine_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = events(10, "A0+0 s10 o+ F")
    before = journals.write(tmp_path / "before", stream, configuration={"blocks": 100, "engine_key": "a"})
    after = journals.write(tmp_path / "after", stream, configuration={"blocks": 40, "engine_key": "b"})

    comparison = compare([before], [after])
    writers.show(answer(comparison), "text")

    assert [("blocks", "100", "40")] == [(row.setting, row.before, row.after) for row in comparison.settings]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.index(["blocks", "100", "40"]) == lines.index(["Settings", "before", "after"]) + 1


def test_a_fall_of_hits_names_the_cause_of_misses_that_rose_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = journals.write(tmp_path / "before", events(200, "A150+0 s50 o+ F"))
    after = journals.write(tmp_path / "after", events(200, "A0+0 s160 o P A0+0 s200 o+ F"))

    comparison = compare([before], [after])
    writers.show(answer(comparison), "text")

    shares = [(row.name, row.before, row.after) for row in comparison.misses]
    assert [("lost to preemption", 0.0, 0.8), ("never seen before, or not knowable", 0.25, 1.0)] == shares
    text = " ".join(capsys.readouterr().out.split())
    assert "Hits fell from 75.0 % to 0.0 % of prompt tokens." in text
    assert 'Of the misses, "lost to preemption" rose most: +80.0 points.' in text


def test_hits_that_change_by_less_than_a_point_are_not_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = journals.write(tmp_path / "before", events(200, "A150+0 s50 o+ F"))
    after = journals.write(tmp_path / "after", events(200, "A149+0 s51 o+ F"))

    writers.show(answer(compare([before], [after])), "text")

    first = capsys.readouterr().out.splitlines()[0]
    assert "Hits stayed the same: 75.0 % and 74.5 % of prompt tokens." == first


def test_meanings_that_differ_between_releases_are_listed(tmp_path: Path) -> None:
    stream = events(10, "A0+0 s10 o+ F")
    old = journals.write(tmp_path / "old", stream, version="0.19.1")
    new = journals.write(tmp_path / "new", stream, version="0.32.0")

    meanings = {row.figure: row for row in compare([old], [new]).meanings}

    assert "first admission" in meanings["prompt figures"].after
    assert meanings["prompt figures"].before != meanings["prompt figures"].after
    assert "" == meanings["a negative figure"].after
    assert "load failure policy" not in meanings


def test_the_text_names_figures_findings_and_meanings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = events(10, "A0+0 s10 o+ F")
    old = journals.write(tmp_path / "old", stream, version="0.19.1")
    new = journals.violated(tmp_path / "new")

    writers.show(answer(compare([old], [new]), verbose=True), "text")

    shown = capsys.readouterr().out
    assert "local, of prompt tokens" in shown
    assert "tokens/negative" in shown
    assert "does not apply" in shown


def test_groups_are_of_the_same_reading_and_equal_those_of_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = journals.write(tmp_path / "before", events(200, "A100+0 s100 o+ F"))
    after = journals.violated(tmp_path / "after")
    rows = [summarize([path], "outcome")[:-1] for path in (before, after)]
    ungrouped = compare([before], [after])
    read: list[Path] = []
    begin = Reader.__init__

    def count(self: Reader, path: Path, start: Position | None = None) -> None:
        if start is None:  # else only the engine's newest description is read
            read.append(path)
        begin(self, path, start)

    monkeypatch.setattr(Reader, "__init__", count)

    comparison = compare([before], [after], by="outcome")

    assert [before, after] == read
    assert rows[0] == [change.before for change in comparison.groups if change.before]
    assert rows[1] == [change.after for change in comparison.groups if change.after]
    assert ungrouped == replace(comparison, groups=[])
