"""Rows about blocks: kept and replayed ones are the same, and the report's section is read from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests import journals
from tests.audit.analysis.test_blocks import A, B, C, Recording
from tests.exporters.facts.test_compact import approximately, count_batches
from tests.exporters.facts.test_kept_blocks import BEGAN, SECOND, Engine, ended
from tests.exporters.facts.test_kept_pages import figures, not_compacted, replay

from kvledger.audit.analysis.block_states import STATES
from kvledger.audit.replay.windows import EVERYTHING, Window
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept import FOLDER
from kvledger.exporters.facts.schema import ADMISSIONS, BLOCK_OPERATIONS
from kvledger.exporters.reports.page import gather, html
from kvledger.exporters.reports.query import ask
from kvledger.exporters.trace.time_series import MINUTE_TICKS

FIRST_MINUTE = BEGAN // 60 * 60
WINDOWS = [
    EVERYTHING,
    Window(FIRST_MINUTE + 600),
    Window(FIRST_MINUTE + 300, FIRST_MINUTE + 1500),
    Window(None, FIRST_MINUTE + 1200),
    Window(FIRST_MINUTE + 1e6),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocks")
    engine = Engine(path, 1, blocks=16, step=20 * SECOND)
    engine.run(200)
    compact(engine.path)
    engine.run(100)
    compact(engine.path)
    engine.stop()
    compact(engine.path)
    return path


def asked(path: Path, sql: str, window: Window = EVERYTHING) -> Any:
    return ask([path], sql, window=window).rows


@pytest.mark.parametrize("window", WINDOWS)
def test_kept_rows_of_the_block_trace_are_those_of_a_replay(folder: Path, window: Window) -> None:
    questions = []
    for table, names in (("admissions", ADMISSIONS), ("block_operations", BLOCK_OPERATIONS)):
        columns = ", ".join(column.name for column in names)
        order = "life" if table == "admissions" else "number"
        questions.append(f"(SELECT list(one ORDER BY {order}) FROM (SELECT {columns} FROM {table}) one)")
    sql = f"SELECT {', '.join(questions)}"
    from_kept = asked(folder, sql, window)
    with not_compacted(folder):
        assert from_kept == asked(folder, sql, window)
    assert all(from_kept[0]) or window == WINDOWS[-1]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_page_of_level_blocks_from_kept_rows_has_the_figures_of_a_replay(
    folder: Path, window: Window
) -> None:
    from_kept, replayed = gather([folder], window=window), replay(folder, window)
    assert from_kept.block_use == replayed.block_use
    assert (from_kept.block_use is None) == (window == WINDOWS[-1])
    replayed.block_series.coarsen(max(MINUTE_TICKS, from_kept.block_series.width_ticks))
    assert from_kept.block_series.levels == replayed.block_series.levels
    assert from_kept.block_series.counts == replayed.block_series.counts
    width = max(from_kept.series.width_ticks, replayed.series.width_ticks)
    expected = approximately(figures(replayed, width))
    for name, figure in figures(from_kept, width).items():
        assert figure == expected[name], name


def test_the_sums_of_two_windows_are_those_of_both(folder: Path) -> None:
    sums = "SELECT " + ", ".join(
        f"coalesce(sum({name}), 0)" for name in ("allocated", "hits", "evicted", "cached_microseconds")
    )
    middle = FIRST_MINUTE + 900
    parts = [
        asked(folder, f"{sums} FROM block_use", one)[0] for one in (Window(None, middle), Window(middle))
    ]
    [whole] = asked(folder, f"{sums} FROM block_use")
    assert whole == [sum(both) for both in zip(*parts, strict=True)] and all(parts[0]) and all(parts[1])


def test_nothing_is_read_of_a_journal_of_level_blocks_that_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_batches(monkeypatch)
    assert gather([folder]).block_use is not None
    assert [] == read


def test_the_report_goes_on_where_the_kept_rows_about_blocks_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 2, blocks=16, step=20 * SECOND)
    engine.run(200)
    compact(engine.path)
    engine.run(50)
    for window in (EVERYTHING, WINDOWS[1]):
        from_kept = gather([tmp_path], window=window).block_use
        with not_compacted(tmp_path):
            assert from_kept == gather([tmp_path], window=window).block_use
    engine.stop()


def test_the_report_has_the_block_section_of_a_journal_that_is_gone(tmp_path: Path) -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    journal = journals.write(tmp_path / "blocks", recording.events, level="blocks")
    expected = gather([tmp_path])
    assert "" == compact(journal).problem
    shutil.rmtree(journal)

    left = gather([tmp_path])
    assert left.block_use == expected.block_use and left.block_use is not None
    assert {*STATES} == {*next(iter(left.block_series.levels.values()))}
    assert "<h2>Blocks</h2>" in html(left)


def test_questions_about_blocks_are_answered_in_sql(tmp_path: Path) -> None:
    recording = Recording(blocks=5)
    recording.request([], [(1, A), (2, B)])
    recording.request([1], [(2, C)])
    journal = journals.write(tmp_path / "blocks", recording.events, level="blocks")

    evicted = "SELECT unnest(hash_ids) FROM block_operations WHERE operation = 'evicted'"
    assert [[B]] == asked(journal, evicted)
    lives = "SELECT request_id, local, hit_blocks FROM admissions ORDER BY life"
    assert [["r0", 0, 0], ["r1", 16, 1]] == asked(journal, lives)
    lifetime = "SELECT sum(list_sum(map_values(lifetimes))) FROM block_use"
    assert [[1]] == asked(journal, lifetime)


def test_journals_of_level_tokens_have_no_rows_about_blocks(tmp_path: Path) -> None:
    compact(journals.clean(tmp_path / "tokens"))
    tables = {path.name for path in (tmp_path / FOLDER).iterdir() if path.is_dir()}
    assert "requests" in tables and not tables & {"admissions", "block_operations", "block_use"}


def test_a_request_ends_in_the_hour_of_its_last_event(tmp_path: Path) -> None:
    path = ended(tmp_path, step=120 * SECOND).path
    compact(path)
    [[wrong]] = asked(
        tmp_path,
        "SELECT count(*) FROM admissions JOIN requests USING (journal, request) "
        "WHERE admissions.closed_time IS DISTINCT FROM requests.closed_time",
    )
    assert 0 == wrong
