"""Kept facts: their sums are those of a replay, in any window of whole minutes, and survive the journal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import events
from tests.simulated import Simulated
from tests.simulated_trace import WALL_SECONDS, started

from kvledger import cli
from kvledger.audit import events as ev
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.windows import EVERYTHING, Window, window
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.facts.kept import find, place
from kvledger.exporters.reports.listing import journals as listed
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.why import why

MINUTE, HOUR = 60.0, 3600.0
SLOWER = 256
"""Times are stretched by this, so that few requests last for hours."""


class Engine:
    """Writes the journal of a simulated engine, as much of it as a test wants."""

    def __init__(self, folder: Path, requests: int = 400, seed: int = 7, name: str = "engine-00") -> None:
        self.path = folder / name
        self._simulated = Simulated(requests, seed)
        self._batches = self._events()
        self._writer = JournalWriter(self.path)
        self._writer.rotate()
        self._writer.write([started(0, 0), ev.Snapshot(0, 0, [], 0)])

    def _events(self) -> Iterator[list[ev.Event]]:
        for batch in self._simulated.events():
            yield [replace(event, at=event.at * SLOWER) for event in batch]

    def write(self, batches: int) -> None:
        for _, batch in zip(range(batches), self._batches, strict=False):
            self._writer.write(batch)

    def stop(self) -> None:
        last = 0
        for batch in self._batches:
            self._writer.write(batch)
            last = batch[-1].at
        self._writer.write([ev.EngineStopped(last, "shutdown")])
        self._writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rolled")
    Engine(path).stop()
    return path


@pytest.fixture(scope="module")
def compacted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the journal, with kept rows."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("compacted") / "rolled")
    assert "" == compact(path / "engine-00").problem
    return path


WINDOW = Window(WALL_SECONDS + 7 * MINUTE, WALL_SECONDS + 71 * MINUTE)
"""``test_kept_pages.py`` has windows that are open, and empty ones."""
BY = ["", "hour", "engine,model,hour,outcome,rank", "lives", "(seen|[0-9])"]


def answers(path: Path, chosen: Window, by: str = "") -> Any:
    """What summary and why say."""
    rows = summarize([path], by, window=chosen, with_costs=True, percentiles="missed,waited_microseconds")
    return msgspec.to_builtins([rows, why([path], window=chosen, by=by)])


def approximately(data: Any) -> Any:
    """The same integers; sums of floats depend on their order, in the last digits."""
    return json.loads(json.dumps(data), parse_float=lambda text: pytest.approx(float(text), rel=1e-9))


@pytest.mark.parametrize(("chosen", "by"), [(EVERYTHING, ""), *((WINDOW, by) for by in BY)])
def test_kept_facts_give_the_sums_of_a_replay(
    folder: Path, compacted: Path, chosen: Window, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder / kept.FOLDER, ignore_errors=True)
    replayed = answers(folder, chosen, by)
    read = count_batches(monkeypatch)
    rolled = answers(compacted, chosen, by)
    assert rolled == approximately(replayed)
    assert [] == read, "nothing is read of a journal that has ended"


def count_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    from kvledger.audit.journal import reader

    read: list[int] = []
    original = reader.decode_batch

    def decode(data: memoryview) -> Any:
        read.append(len(data))
        return original(data)

    monkeypatch.setattr(reader, "decode_batch", decode)
    return read


def test_facts_are_continued_while_the_engine_runs(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 300)
    for batches in (40, 300):
        engine.write(batches)
        compact(engine.path)
        rolled = answers(tmp_path, WINDOW)
        place(engine.path).rename(tmp_path / "aside")
        assert rolled == approximately(answers(tmp_path, WINDOW))
        (tmp_path / "aside").rename(place(engine.path))
    engine.stop()
    compact(engine.path)
    rolled = answers(tmp_path, EVERYTHING)
    place(engine.path).unlink()
    assert rolled == approximately(answers(tmp_path, EVERYTHING))


def test_facts_of_another_version_count_only_where_the_journal_is_gone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "engine-00", tmp_path / "engine-00")
    whole = answers(tmp_path, EVERYTHING)
    compact(tmp_path / "engine-00")
    monkeypatch.setattr(kept.serialize, "layout", lambda: "another")
    assert find(tmp_path / "engine-00") is None
    shutil.rmtree(tmp_path / "engine-00")
    assert approximately(whole) == answers(tmp_path, EVERYTHING)


def test_bounds_within_a_minute_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compact(folder / "engine-00")
    read = count_batches(monkeypatch)
    summarize([folder], window=Window(WALL_SECONDS + 90.5))
    assert 2 < len(read)


def test_ages_of_hours_and_days_begin_at_a_whole_minute() -> None:
    assert Window(7 * 86400.0, None) == window("1d", now=8 * 86400.0 + 59.9)
    assert not kept.whole_minutes(window("90s", now=1e9 + 7)) and kept.whole_minutes(
        window("1h", now=1e9 + 7)
    )


@pytest.mark.parametrize("damage", ["cut", "changed", "other journal"])
def test_what_is_damaged_or_of_another_journal_is_not_used(tmp_path: Path, damage: str) -> None:
    journal = journals.write(tmp_path / "engine-1", [*events(200, journals.CLEAN)])
    compact(journal)
    path = place(journal)
    data = path.read_bytes()
    before = set(path.parent.rglob("*.parquet"))
    if damage == "other journal":
        shutil.rmtree(journal)
        journals.write(journal, events(200, journals.CLEAN), wall_seconds=1.8e9)
    else:
        path.write_bytes(data[:-9] if damage == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    assert find(journal) is None
    assert 1 == summarize([tmp_path])[-1].requests
    assert "" == compact(journal).problem
    session = find(journal)
    assert session is not None
    new = {path.parent / file.path for file in (*session.files, *session.tail)}
    assert new.isdisjoint(before), "an older file under the same name would be read in its place"


def test_the_command_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journals.write(tmp_path / "engine-1", events(200, journals.CLEAN))
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exited:
            patch.setattr(sys, "argv", ["kvledger", "journals", "compact", str(tmp_path)])
            cli.main()
        assert 0 == exited.value.code
    assert "engine-1" in capsys.readouterr().out
    [row] = listed([tmp_path])
    assert "clean" == row.verdict, "kvledger journals takes the verdict from the session"


def test_no_facts_are_written_through_a_link(tmp_path: Path) -> None:
    journal = journals.write(tmp_path / "engine-1", events(200, journals.CLEAN))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / kept.FOLDER).symlink_to(tmp_path / "elsewhere")
    assert "is a link" in compact(journal).problem
    assert [] == [*(tmp_path / "elsewhere").iterdir()]


def test_a_kept_file_that_is_gone_is_not_missed_silently(folder: Path, tmp_path: Path) -> None:
    """The journal is read in its place. Where the journal is gone, too, a sentence names the file."""
    shutil.copytree(folder / "engine-00", tmp_path / "engine-00")
    whole = answers(tmp_path, EVERYTHING)
    compact(tmp_path / "engine-00")
    next((tmp_path / kept.FOLDER).glob("requests/*/*/*.parquet")).unlink()

    assert approximately(whole) == answers(tmp_path, EVERYTHING)
    shutil.copytree(tmp_path / kept.FOLDER, tmp_path / "gone" / kept.FOLDER)
    with pytest.raises(LedgerError, match="which is gone or was changed"):
        summarize([tmp_path / "gone"])
    shutil.rmtree(tmp_path / "gone")
    assert "" == compact(tmp_path / "engine-00").problem
    shutil.rmtree(tmp_path / "engine-00")
    assert approximately(whole) == answers(tmp_path, EVERYTHING)
