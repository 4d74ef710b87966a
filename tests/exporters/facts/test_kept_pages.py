"""The report from kept facts: each figure is that of a replay."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.exporters.facts.test_compact import HOUR, MINUTE, SLOWER, approximately, count_batches
from tests.exporters.facts.test_compact import Engine as PlainEngine
from tests.simulated_trace import WALL_SECONDS, cut_trace

from kvledger.audit import events as ev
from kvledger.audit.checks.registry import is_once
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.format import segments
from kvledger.audit.replay.windows import EVERYTHING, Window
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept import FOLDER
from kvledger.exporters.reports.diff import compare
from kvledger.exporters.reports.page import PageData, gather
from kvledger.exporters.trace.time_series import MINUTE_TICKS, TICKS, Series

WINDOWS = [
    EVERYTHING,
    Window(WALL_SECONDS + 7 * MINUTE, WALL_SECONDS + 71 * MINUTE),
    Window(WALL_SECONDS + 30 * MINUTE),
    Window(WALL_SECONDS + 60 * MINUTE),
    Window(None, WALL_SECONDS + HOUR),
    Window(WALL_SECONDS + 1000 * HOUR),
]


class Engine(PlainEngine):
    """The same with wrong reports, exceptions, lost events and a hook that failed, in smaller batches."""

    def _events(self) -> Iterator[list[ev.Event]]:
        for number, batch in enumerate(self._simulated.events()):
            some = [replace(event, at=event.at * SLOWER) for event in batch]
            at = some[-1].at
            if number in (3, 9):
                some.append(ev.EngineRaised(at, "schedule", "RuntimeError", False))
            if number in (5, 8):
                some.append(ev.Gap(at, 3, "full") if number == 5 else ev.HookFailed(at, "step", "", False))
                some.append(replace(self._simulated.snapshot(), at=at))
            some = [wrong for event in some for wrong in self._with_wrong_report(event)]
            yield from (some[first : first + 16] for first in range(0, len(some), 16))

    @staticmethod
    def _with_wrong_report(event: ev.Event) -> Iterator[ev.Event]:
        if isinstance(event, ev.Finished) and event.request % 40 == 7:
            yield ev.Reported(event.at, event.request, 10, -5, 15, 0, 10)
        yield event


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rolled")
    Engine(path).stop()
    compact(path / "engine-00")
    return path


def figures(data: PageData, width: int) -> Any:
    """Everything that a page shows, with curves of this ``width`` of buckets.

    Of an invariant that is found once an engine, only that it was found: a replay names the first request in
    the window, kept facts that of the journal.
    """
    data.series.coarsen(width)
    report = data.report
    found = {
        "report": replace(
            report,
            journals=[replace(row, path="") for row in report.journals],
            violations=[row for row in report.violations if not is_once(row.id)],
        ),
        "found once": sorted(row.id for row in report.violations if is_once(row.id)),
        "why": data.why,
        "costs": data.costs,
        "waits": data.waits,
        "preempted": data.preempted,
        "about": data.about,
        "groups": data.groups,
        "counts": _without_zeros(data.series.counts),
        "levels": data.series.levels,
    }
    return json.loads(msgspec.json.encode(found))


def _without_zeros(counts: dict[int, dict[str, int]]) -> Any:
    rows = {place: {name: n for name, n in row.items() if n} for place, row in counts.items()}
    return {place: row for place, row in rows.items() if row}


@contextlib.contextmanager
def not_compacted(*folders: Path) -> Iterator[None]:
    """As if the journals in the folders had never been compacted."""
    for folder in folders:
        (folder / FOLDER).rename(folder / ".aside")
    try:
        yield
    finally:
        for folder in folders:
            (folder / ".aside").rename(folder / FOLDER)


def replay(path: Path, window: Window = EVERYTHING, by: str = "") -> PageData:
    """The page of a replay of all journals."""
    with not_compacted(path):
        return gather([path], window=window, by=by)


@functools.cache
def replayed_once(path: Path, window: Window, by: str = "") -> PageData:
    """The same of a folder that no test changes."""
    return replay(path, window, by)


def compared(path: Path, window: Window = EVERYTHING, by: str = "", once: bool = False) -> tuple[Any, Any]:
    """The figures from kept facts, and those of a replay."""
    from_kept = gather([path], window=window, by=by)
    replayed = (replayed_once if once else replay)(path, window, by)
    width = max(from_kept.series.width_ticks, replayed.series.width_ticks)
    return figures(from_kept, width), approximately(figures(replayed, width))


@pytest.mark.parametrize(
    ("window", "by"),
    [*((one, "") for one in WINDOWS), (WINDOWS[1], "hour"), (WINDOWS[1], "engine,outcome")],
)
def test_a_page_from_kept_facts_has_the_figures_of_a_replay(folder: Path, window: Window, by: str) -> None:
    from_kept, replayed = compared(folder, window, by, once=True)

    for name, figure in from_kept.items():
        assert figure == replayed[name], name


def test_the_trace_of_these_tests_has_what_they_compare(folder: Path) -> None:
    report = gather([folder], window=WINDOWS[1]).report

    assert "violated" == report.verdict and report.unknown
    assert {
        "events were lost once",
        "observers failed 1 times",
        "the engine raised RuntimeError in schedule",
    } <= {*report.notes}
    assert any(is_once(row.id) for row in report.violations) and report.differences


def test_nothing_is_read_of_a_journal_that_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_batches(monkeypatch)
    gather([folder])
    assert [] == read


def test_a_page_goes_on_where_the_kept_facts_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for batches in (60, 0, 60):
        engine.write(batches)
        assert "" == compact(engine.path).problem
    engine.write(60)
    for window in (EVERYTHING, WINDOWS[2]):
        from_kept, replayed = compared(tmp_path, window)
        assert from_kept == replayed
    engine.stop()
    for window in (EVERYTHING, WINDOWS[3]):
        from_kept, replayed = compared(tmp_path, window)
        assert from_kept == replayed


def test_a_page_keeps_what_rotation_removed(tmp_path: Path) -> None:
    journal = cut_trace(tmp_path / "engine-00", requests=800, segment=12_000)
    whole = figures(gather([tmp_path]), MINUTE_TICKS)
    compact(journal)
    for number in (1, 2, 3):
        segments(journal)[number].unlink()

    assert figures(gather([tmp_path]), MINUTE_TICKS) == approximately(whole)
    with not_compacted(tmp_path):
        assert gather([tmp_path]).report.requests < 800


def test_the_pages_of_an_engine_and_of_its_restart_are_added(tmp_path: Path) -> None:
    """Two journals of different length, of which one is read."""
    for requests, seed in ((300, 3), (200, 4)):
        Engine(tmp_path, requests, seed, f"engine-{seed:02d}").stop()
    compact(tmp_path / "engine-03")
    from_kept, replayed = compared(tmp_path, WINDOWS[2])
    assert from_kept == replayed


@pytest.fixture(scope="module")
def without_journal(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder without its journal. No test changes it."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("gone") / "rolled")
    shutil.rmtree(path / "engine-00")
    return path


@pytest.mark.parametrize("window", [EVERYTHING, WINDOWS[1]])
def test_a_page_is_there_when_the_journal_is_gone(
    folder: Path, without_journal: Path, window: Window
) -> None:
    page = replayed_once(folder, window)
    left = gather([without_journal], window=window)
    width = max(page.series.width_ticks, left.series.width_ticks)
    from_kept, replayed = figures(left, width), figures(page, width)
    for data in (from_kept, replayed):
        for name in ("notes", "journals"):
            del data["report"][name]
    assert from_kept == approximately(replayed)
    notes = [note for note in left.report.notes if "the journal is gone" not in note]
    assert notes == page.report.notes and len(notes) < len(left.report.notes)


def test_a_page_names_the_journals_that_another_version_compacted_and_that_are_gone(
    without_journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept.serialize, "layout", lambda: "another")
    with pytest.raises(LedgerError, match="compacted by another version"):
        gather([without_journal])


def test_findings_that_were_not_kept_are_missed_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvledger.audit.checks.auditor.FINDINGS_KEPT", 2)
    Engine(tmp_path).stop()
    compact(tmp_path / "engine-00")

    report = gather([tmp_path], window=WINDOWS[2]).report
    assert "violated" == report.verdict
    assert any(note.endswith("shown of the findings of tokens/negative") for note in report.notes)


def test_curves_of_minutes_are_those_of_events_at_the_same_width() -> None:
    fine, minutes = Series(), Series(width_ticks=MINUTE_TICKS)
    for second in range(0, 7 * 3600, 5):
        for series in (fine, minutes):
            series.count(second, "preemptions")
            series.level(second, {"running": second})

    assert fine.width_ticks == minutes.width_ticks == 2 * 60 * TICKS
    assert (fine.counts, fine.levels) == (minutes.counts, minutes.levels)


def test_diff_compares_kept_rows_as_it_compares_replays(folder: Path) -> None:
    """Costs and groups are the same in any window; of findings made once an engine see :func:`figures`."""
    found = compare([folder], [folder], window=WINDOWS[1], by="outcome")
    with not_compacted(folder):
        expected = compare([folder], [folder], window=WINDOWS[1], by="outcome")

    as_data = json.loads(msgspec.json.encode(found))
    assert as_data == approximately(msgspec.to_builtins(expected))


def test_diff_reads_no_journal_that_was_compacted_and_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_batches(monkeypatch)
    compare([folder], [folder])

    assert [] == read
