"""`kvledger journals` and `journals prune`: facts without a replay, and which journals are removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import journals
from tests.command_line import exit_code
from tests.histories import events

from kvledger.audit.journal.catalogue import JournalFacts, facts, prunable
from kvledger.audit.journal.writer import JournalWriter

DAY = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three journals, a day apart; the last has no EngineStopped."""
    for number in range(3):
        journals.write(
            tmp_path / f"engine-{number}",
            events(200, journals.CLEAN),
            wall_seconds=1.7e9 + number * DAY,
            stopped=number < 2,
        )
    return tmp_path


def test_the_facts_of_a_journal(folder: Path) -> None:
    found = facts(folder / "engine-0")
    assert ("0.32.0", "tokens", "stopped", 1, 1) == (
        found.release,
        found.level,
        found.state,
        found.requests,
        found.segments,
    )
    assert (1.7e9, 1.7e9 + 1) == (found.began_seconds, found.until_seconds)
    assert found.bytes == sum(file.stat().st_size for file in (folder / "engine-0").glob("*.kvl"))
    assert "dead" == facts(folder / "engine-2").state


def test_a_journal_that_is_written_is_live_and_stays(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "engine-live")
    writer.rotate()
    writer.write([journals.STARTED])
    found = facts(tmp_path / "engine-live")
    assert "live" == found.state
    assert [] == prunable([found], before_seconds=1e12, most_bytes=0)
    assert 0 == exit_code("journals", "prune", tmp_path, "--most", "1KB", "--yes")
    assert (tmp_path / "engine-live").is_dir()
    writer.close()


def test_a_damaged_journal_is_listed(folder: Path) -> None:
    segment = next((folder / "engine-1").glob("*.kvl"))
    data = segment.read_bytes()
    segment.write_bytes(data[: len(data) // 2])
    assert "dead" == facts(folder / "engine-1").state


def test_prune_takes_the_oldest_by_age_or_by_size() -> None:
    rows = [
        JournalFacts(path=Path(name), state=state, until_seconds=until, bytes=10)
        for name, state, until in (
            ("b", "dead", 2.0),
            ("a", "stopped", 1.0),
            ("c", "live", 0.5),
            ("d", "stopped", 4.0),
        )
    ]
    assert ["a", "b"] == [str(one.path) for one in prunable(rows, before_seconds=3.0)]
    assert ["a"] == [str(one.path) for one in prunable(rows, most_bytes=30)]
    assert ["a", "b", "d"] == [str(one.path) for one in prunable(rows, most_bytes=0)]
    assert [] == prunable(rows, most_bytes=40)


def test_prune_lists_and_removes_only_with_yes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == exit_code("journals", "prune", folder, "--older-than", "2023-11-16T00:00:00Z")
    assert "Nothing was removed: add --yes" in capsys.readouterr().out
    assert 3 == len(list(folder.iterdir()))

    assert 0 == exit_code(
        "journals", "prune", folder, "--older-than", "2023-11-16T00:00:00Z", "--yes", "--format", "json"
    )
    result = json.loads(capsys.readouterr().out)
    assert (True, 2, 1) == (result["removed"], len(result["journals"]), result["kept"])
    assert ["engine-2"] == [path.name for path in folder.iterdir()]


def test_prune_needs_a_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == exit_code("journals", "prune", folder, "--yes")
    assert "--older-than" in capsys.readouterr().err
    assert 3 == len(list(folder.iterdir()))


def test_prune_takes_the_workers_journals_too(tmp_path: Path) -> None:
    for name, transfer in (("engine-1", "t1"), ("worker-1", "t1"), ("worker-2", "t2")):
        journals.write(tmp_path / name, events(200, journals.CLEAN), configuration={"transfer": transfer})
    assert 0 == exit_code("journals", "prune", tmp_path, "--most", "1B", "--yes")
    assert ["worker-2"] == [path.name for path in tmp_path.iterdir()]


def recording(folder: Path, *, days: float) -> Path:
    """A recording of KV events that was begun so long after the first journal."""
    return journals.write(folder, [], wall_seconds=1.7e9 + days * DAY, level="events")


def test_prune_takes_recordings_of_kv_events_by_their_own_age(folder: Path) -> None:
    recording(folder / "events-0", days=0.5)
    recording(folder / "events-1", days=1.5)
    live = JournalWriter(folder / "events-live")
    live.rotate()
    live.write([journals.STARTED])

    assert 0 == exit_code("journals", "prune", folder, "--older-than", "2023-11-16T00:00:00Z")
    assert 6 == len(list(folder.iterdir()))
    assert 0 == exit_code("journals", "prune", folder, "--older-than", "2023-11-16T00:00:00Z", "--yes")
    assert ["engine-2", "events-1", "events-live"] == sorted(path.name for path in folder.iterdir())
    assert 0 == exit_code("journals", "prune", folder, "--most", "1B", "--yes")
    assert ["events-live"] == [path.name for path in folder.iterdir()]
    live.close()


def test_prune_takes_recordings_whose_engines_are_gone(tmp_path: Path) -> None:
    recording(tmp_path / "events-0", days=0)
    assert 0 == exit_code("journals", "prune", tmp_path, "--most", "1B", "--yes")
    assert [] == list(tmp_path.iterdir())


def test_the_list_has_recordings_of_kv_events(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording(folder / "events-0", days=0.5)
    assert 0 == exit_code("journals", folder)
    assert capsys.readouterr().out.startswith("4 journals, ")
    exit_code("journals", folder, "--audit", "--format", "json")
    rows = {Path(row["journal"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert ("events", "", "stopped") == tuple(
        rows["events-0"][name] for name in ("level", "verdict", "state")
    )
    assert "clean" == rows["engine-0"]["verdict"]


def test_the_list_has_a_line_per_journal_and_verdicts_when_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 0 == exit_code("journals", folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("3 journals, ")
    assert ["ne-0", "ne-1", "ne-2"] == [line.split()[0] for line in lines[3:]]
    exit_code("journals", folder, "--audit", "--format", "json")
    assert ["clean", "clean", "unknown"] == [row["verdict"] for row in json.loads(capsys.readouterr().out)]


def test_the_list_has_model_rank_host_and_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = {"model": "chat", "data_parallel_rank": 1, "instance": "node-7"}
    journals.write(tmp_path / "engine-1764000000123-85-0", [], configuration=named)
    journals.write(tmp_path / "b" / "engine-1764000000124-85-0", [])
    exit_code("journals", tmp_path, "--format", "json")
    rows = [
        [row[column] for column in ("name", "model", "rank", "host", "level")]
        for row in json.loads(capsys.readouterr().out)
    ]
    assert [["4-85-0", "", None, "b", "tokens"], ["3-85-0", "chat", 1, "node-7", "tokens"]] == rows
