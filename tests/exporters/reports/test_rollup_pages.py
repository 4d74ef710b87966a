"""The report from rollups: each figure is that of a replay, and the page says what it leaves out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.analysis.test_prefixes import A, B, C, Recording
from tests.audit.replay.test_split import cut_trace
from tests.command_line import exit_code
from tests.exporters.reports.test_rollups import HOUR, MINUTE, SLOWER, approximately, count_batches
from tests.exporters.reports.test_rollups import Engine as PlainEngine
from tests.simulated_trace import WALL_SECONDS

from kvledger.audit import events as ev
from kvledger.audit.checks.registry import is_once
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.format import segments
from kvledger.audit.replay.windows import EVERYTHING, Window
from kvledger.exporters.reports import rollups
from kvledger.exporters.reports.html_data import PageData, gather
from kvledger.exporters.reports.html_page import html
from kvledger.exporters.reports.rollup_builder import compact
from kvledger.exporters.reports.rollups import place
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
    """Everything that a page from rollups shows, with curves of this ``width`` of buckets.

    Of an invariant that is found once an engine, only that it was found: a replay names the first request in
    the window, a rollup that of the journal.
    """
    data.series.coarsen(width)
    report, late = data.report, ("first_token_median_seconds", "first_token_p95_seconds")
    found = {
        "report": replace(
            report,
            costs=None,
            journals=[replace(row, path="") for row in report.journals],
            violations=[row for row in report.violations if not is_once(row.id)],
        ),
        "found once": sorted(row.id for row in report.violations if is_once(row.id)),
        "why": _without(data.why, "causes", *late),
        "costs": _without(data.costs, "rows", *late),
        "waits": data.waits,
        "about": data.about,
        "groups": data.groups,
        "counts": data.series.counts,
        "levels": data.series.levels,
    }
    return json.loads(msgspec.json.encode(found))


def _without(data: Any, rows: str, *names: str) -> Any:
    """The data without some figures of its rows."""
    return replace(data, **{rows: [replace(row, **dict.fromkeys(names)) for row in getattr(data, rows)]})


def compared(path: Path, window: Window = EVERYTHING, by: str = "") -> tuple[Any, Any]:
    """The figures from rollups, and those of a replay."""
    rolled, replayed = (gather([path], window=window, by=by, with_rollups=on) for on in (True, False))
    assert rolled.left_out and not replayed.left_out
    width = max(rolled.series.width_ticks, replayed.series.width_ticks)
    return figures(rolled, width), approximately(figures(replayed, width))


@pytest.mark.parametrize(
    ("window", "by"),
    [*((one, "") for one in WINDOWS), *((WINDOWS[1], by) for by in ("engine", "hour", "outcome"))],
)
def test_a_page_from_rollups_has_the_figures_of_a_replay(folder: Path, window: Window, by: str) -> None:
    rolled, replayed = compared(folder, window, by)

    for name, figure in rolled.items():
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


def test_only_the_last_batch_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_batches(monkeypatch)
    gather([folder])
    assert 1 == len(read)


@pytest.mark.parametrize("window", [EVERYTHING, WINDOWS[3], Window(WALL_SECONDS + 30 * MINUTE)])
def test_a_page_goes_on_where_the_rollup_ends(tmp_path: Path, window: Window) -> None:
    engine = Engine(tmp_path)
    for batches in (60, 0, 60):
        engine.write(batches)
        assert "" == compact(engine.path).problem
    engine.write(60)
    rolled, replayed = compared(tmp_path, window)
    assert rolled == replayed
    engine.stop()
    rolled, replayed = compared(tmp_path, window)
    assert rolled == replayed


def test_a_page_keeps_what_rotation_removed(tmp_path: Path) -> None:
    journal = cut_trace(tmp_path / "engine-00", requests=800, segment=12_000)
    whole = figures(gather([tmp_path], with_rollups=False), MINUTE_TICKS)
    compact(journal)
    for number in (1, 2, 3):
        segments(journal)[number].unlink()

    assert figures(gather([tmp_path]), MINUTE_TICKS) == approximately(whole)
    assert gather([tmp_path], with_rollups=False).report.requests < 800


def test_the_pages_of_an_engine_and_of_its_restart_are_added(tmp_path: Path) -> None:
    """Two journals of different length, of which one is read."""
    for requests, seed in ((300, 3), (200, 4)):
        Engine(tmp_path, requests, seed, f"engine-{seed:02d}").stop()
    compact(tmp_path / "engine-03")
    rolled, replayed = compared(tmp_path, WINDOWS[2])
    assert rolled == replayed


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layout", ["the same", "another"])
def test_a_page_is_there_when_the_journal_is_gone(
    folder: Path, tmp_path: Path, window: Window, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    page = gather([tmp_path], window=window, with_rollups=False)
    shutil.rmtree(tmp_path / "engine-00")
    if layout == "another":
        monkeypatch.setattr(rollups.serialize, "layout", lambda: "another")
    left = gather([tmp_path], window=window)
    width = max(page.series.width_ticks, left.series.width_ticks)
    notes = [note for note in left.report.notes if "the journal is gone" not in note]
    assert len(notes) < len(left.report.notes)
    rolled, replayed = figures(left, width), figures(page, width)
    for data in (rolled, replayed):
        for name in ("notes", "journals"):
            del data["report"][name]
        if window != EVERYTHING:  # what the last batch counts belongs to the time of its last event
            data["levels"] = data["counts"] = {}
    assert rolled == approximately(replayed)
    assert notes == page.report.notes


def test_a_journal_whose_rollup_holds_no_page_is_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    journal = tmp_path / "engine-00"
    whole = figures(gather([tmp_path], with_rollups=False), MINUTE_TICKS)
    old = rollups.find(journal)
    assert old is not None
    rollups.save(place(journal), replace(old, page=None))

    page = gather([tmp_path])
    assert not page.left_out and page.preempted
    assert whole == figures(page, MINUTE_TICKS)

    shutil.copytree(journal, tmp_path / "aside")
    shutil.rmtree(journal)
    assert "1 rollup has no data for a report" in " ".join(gather([tmp_path]).report.notes)
    shutil.rmtree(tmp_path / "aside")
    with pytest.raises(LedgerError, match="has no data for a report"):
        gather([tmp_path])

    shutil.copytree(folder / "engine-00", journal)
    assert "" == compact(journal).problem
    assert gather([tmp_path]).left_out, "compact writes the rollup anew"


def test_level_blocks_has_the_same_sums_and_no_part_about_blocks(tmp_path: Path) -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    journal = journals.write(tmp_path / "blocks", recording.events, level="blocks")
    assert "" == compact(journal).problem

    rolled, replayed = compared(tmp_path)
    assert rolled == replayed
    assert "<h2>Blocks</h2>" not in html(gather([tmp_path]))
    assert "<h2>Blocks</h2>" in html(gather([tmp_path], with_rollups=False))


def test_the_page_says_what_it_leaves_out(folder: Path, tmp_path: Path) -> None:
    page = html(gather([folder]))
    assert "read the journals: kvledger report --no-rollups." in page
    assert "Most preempted requests" not in page and "Hit rate over time" in page

    assert 1 == exit_code("report", folder, "--no-rollups", "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "--no-rollups" not in page and "Most preempted requests" in page


def test_findings_that_were_not_kept_are_missed_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvledger.audit.checks.auditor.FINDINGS_KEPT", 2)
    Engine(tmp_path).stop()
    compact(tmp_path / "engine-00")

    report = gather([tmp_path], window=WINDOWS[2]).report
    assert "violated" == report.verdict
    assert any("more requests violate tokens/negative than" in note for note in report.notes)


def test_curves_of_minutes_are_those_of_events_at_the_same_width() -> None:
    fine, minutes = Series(), Series(width_ticks=MINUTE_TICKS)
    for second in range(0, 7 * 3600, 5):
        for series in (fine, minutes):
            series.count(second, "preemptions")
            series.level(second, {"running": second})

    assert fine.width_ticks == minutes.width_ticks == 2 * 60 * TICKS
    assert (fine.counts, fine.levels) == (minutes.counts, minutes.levels)
