"""Rows are removed by their age: the sums of their requests stay by the hour, and each is counted once."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace
from tests.exporters.facts.test_compact import HOUR, MINUTE, Engine, approximately
from tests.exporters.facts.test_kept_pages import Engine as FaultyEngine
from tests.exporters.facts.test_kept_pages import not_compacted
from tests.simulated_trace import WALL_SECONDS

from kvledger import cli
from kvledger.audit.errors import LedgerError
from kvledger.audit.replay.windows import EVERYTHING, Window
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import Retention, compact, retention
from kvledger.exporters.facts.kept import FOLDER, hour_time, place
from kvledger.exporters.reports.listing import compact_all
from kvledger.exporters.reports.page import gather
from kvledger.exporters.reports.query import ask
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.why import why

ROWS_FROM = WALL_SECONDS + HOUR
KEEP = Retention(ROWS_FROM, 0.0)
BY = ["hour", "day", "hour,model,outcome,engine,rank,group"]
WINDOWS = [
    EVERYTHING,
    Window(WALL_SECONDS, WALL_SECONDS + 2 * HOUR),
    Window(WALL_SECONDS),
    Window(None, WALL_SECONDS + HOUR),
    Window(None, ROWS_FROM + 7 * MINUTE),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of several hours, of which the rows of the first were removed."""
    path = tmp_path_factory.mktemp("journals")
    FaultyEngine(path, 600).stop()
    assert hour_time(ROWS_FROM) == compact(path / "engine-00", KEEP).rows_from
    return path


def without_medians(data: Any) -> Any:
    """The same without how much later the first token came, for which rows are needed."""
    if isinstance(data, dict):
        medians = ("first_token_median_seconds", "first_token_p95_seconds", "notes")
        return {name: without_medians(value) for name, value in data.items() if name not in medians}
    return [without_medians(one) for one in data] if isinstance(data, list) else data


def answers(path: Path, window: Window, by: str = "") -> Any:
    rows = summarize([path], by, window=window, with_costs=True, gpu_hour=2.0)
    return without_medians(msgspec.to_builtins([rows, why([path], window=window, by=by)]))


def files(folder: Path, table: str) -> list[Path]:
    return sorted((folder / FOLDER).glob(f"{table}/*/*/*.parquet"))


@pytest.mark.parametrize(
    ("window", "by"), [*((window, "") for window in WINDOWS), *((EVERYTHING, by) for by in BY)]
)
def test_summary_and_why_are_those_of_a_replay_where_rows_were_removed(
    folder: Path, window: Window, by: str
) -> None:
    found = answers(folder, window, by)
    with not_compacted(folder):
        assert found == approximately(answers(folder, window, by))


@pytest.mark.parametrize("window", [EVERYTHING, WINDOWS[-1]])
def test_the_report_has_the_figures_of_a_replay_where_rows_were_removed(folder: Path, window: Window) -> None:
    page = gather([folder], window=window)
    with not_compacted(folder):
        expected = gather([folder], window=window)

    for name in ("totals", "plan", "reported", "differences", "requests", "unknown", "outcomes", "work"):
        assert getattr(expected.report, name, None) == getattr(page.report, name, None), name
    assert expected.report.verdict == page.report.verdict
    assert len(expected.report.violations) == len(page.report.violations)
    assert sum(expected.series.counts.get(at, {}).get("local", 0) for at in expected.series.counts) == sum(
        page.series.counts.get(at, {}).get("local", 0) for at in page.series.counts
    )


def test_removed_rows_are_gone_and_sums_are_of_all_requests(folder: Path) -> None:
    rows = ask(
        [folder], "select count(*), min(epoch(closed_time)) from requests where closed_time is not null"
    )
    sums = ask([folder], "select sum(requests) from hours where hour is not null")
    everything = summarize([folder], "outcome")[-1].requests

    [[kept_rows, first]] = rows.rows
    assert first >= ROWS_FROM
    assert 0 < kept_rows < everything == sums.rows[0][0]
    assert all(kept.hour_seconds(path.parent.name[-13:]) >= ROWS_FROM for path in files(folder, "requests"))


def test_an_answer_over_removed_rows_says_so(folder: Path) -> None:
    note = (
        f"Of requests of engine-00 that ended before {hour_time(ROWS_FROM)} only sums by the hour are kept."
    )
    assert [note] == ask([folder], "select count(*) from requests").notes
    assert note in why([folder]).notes
    assert note in gather([folder]).report.notes
    assert [] == ask([folder], "select count(*) from requests", window=Window(ROWS_FROM)).notes


@pytest.mark.parametrize(
    "asked", [{"percentiles": "missed"}, {"by": "lives"}, {"where": "rework > 0"}, {"by": "5m"}]
)
def test_what_needs_rows_names_the_time_of_the_first_ones(folder: Path, asked: dict[str, str]) -> None:
    with pytest.raises(LedgerError, match=f"ask with --since {hour_time(ROWS_FROM)}"):
        summarize([folder], **asked)
    window = Window(ROWS_FROM)
    found = msgspec.to_builtins(summarize([folder], window=window, **asked))
    with not_compacted(folder):
        assert found == approximately(msgspec.to_builtins(summarize([folder], window=window, **asked)))


def test_a_window_cannot_cut_an_hour_of_sums(folder: Path) -> None:
    with pytest.raises(LedgerError, match=f"must be whole hours, such as {hour_time(WALL_SECONDS)}"):
        summarize([folder], window=Window(WALL_SECONDS + 7 * MINUTE))


def test_kept_sums_are_what_their_query_finds_over_rows(tmp_path: Path) -> None:
    """One law: the sums of a compacted journal are those that the same query finds in a replay."""
    Engine(tmp_path, 200).stop()
    questions = [
        "select * exclude (engine) from hours order by all",
        "select * exclude (engine) from hour_causes order by all",
        "select * exclude (engine) from hour_differences order by all",
    ]
    replayed = [ask([tmp_path], question).rows for question in questions]
    compact(tmp_path / "engine-00")

    assert replayed == [ask([tmp_path], question).rows for question in questions]
    assert all(replayed)


def test_rows_are_removed_while_the_engine_runs(tmp_path: Path) -> None:
    """The age of rows moves on with each compaction; each request counts once all the time."""
    engine = Engine(tmp_path, 300)
    for hours in (0, 1, 1, 2):
        engine.write(40)
        compact(engine.path, Retention(WALL_SECONDS + hours * HOUR, 0.0))
        found = answers(tmp_path, EVERYTHING, "hour")
        with not_compacted(tmp_path):
            assert found == approximately(answers(tmp_path, EVERYTHING, "hour"))
    engine.stop()
    compact(engine.path)
    found = answers(tmp_path, EVERYTHING)
    with not_compacted(tmp_path):
        assert found == approximately(answers(tmp_path, EVERYTHING))


def test_rows_of_a_journal_that_is_gone_grow_old(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    expected = answers(tmp_path, EVERYTHING)
    shutil.rmtree(tmp_path / "engine-00")
    [row] = compact_all([tmp_path], keep=Retention(WALL_SECONDS + 1000 * HOUR, 0.0))

    assert hour_time(WALL_SECONDS + 1000 * HOUR) == row.rows_from
    assert [] == [path for path in files(tmp_path, "requests") if "HIVE" not in str(path)]
    assert expected == approximately(answers(tmp_path, EVERYTHING))


def test_sums_are_removed_after_a_year(folder: Path, tmp_path: Path) -> None:
    assert retention("", now=0.0) is None
    day = 86_400.0
    assert Retention(370 * day, 35 * day) == retention("30d", now=400 * day)
    assert Retention(0.0, 0.0) == retention("400d", now=400 * day), "sums are kept as long as rows"

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    later = WALL_SECONDS + 1000 * HOUR
    compact(tmp_path / "engine-00", Retention(later, later))
    assert [] == files(tmp_path, "hours")
    session = kept.load(place(tmp_path / "engine-00"))
    assert session is not None and not session.busy_us
    summed = summarize([tmp_path])[-1].requests
    assert summed == gather([tmp_path]).report.requests, "summary and report count the same requests"


def test_a_column_that_kept_files_lack_is_null(folder: Path, tmp_path: Path) -> None:
    """Sums outlive the version that wrote them."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    expected = summarize([tmp_path])[-1]
    session = kept.load(place(tmp_path / "engine-00"))
    assert session is not None
    for number, file in enumerate(session.files):
        if file.table in ("hours", "requests"):
            path = tmp_path / FOLDER / file.path
            pq.write_table(pq.ParquetFile(path).read().drop_columns(["scheduled"]), path)
            session.files[number] = replace(file, columns=0, bytes=path.stat().st_size, digest=b"")
    session.layout = "another"
    kept.save(tmp_path / "engine-00", session)
    shutil.rmtree(tmp_path / "engine-00")
    found = summarize([tmp_path])[-1]

    assert (expected.requests, expected.rework, 0) == (found.requests, found.rework, found.scheduled)


def test_csv_keeps_its_notes_apart(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        asked = "select count(*) as n from requests"
        patch.setattr(sys, "argv", ["kvledger", "query", str(folder), asked, "--format", "csv"])
        cli.main()
    printed = capsys.readouterr()

    assert "only sums by the hour are kept" in printed.err
    assert ["n"] == printed.out.splitlines()[:1] and 2 == len(printed.out.splitlines())
