"""How much journals may hold on a volume that an engine's container shares with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.format import take_lock
from kvledger.audit.journal.retention import JOURNAL_BYTES, TOTAL_BYTES, limits, make_room
from kvledger.audit.journal.writer import Limits


def journal(folder: Path, began: int, size: int) -> Path:
    made = folder / f"engine-{began}-7-0"
    made.mkdir(parents=True)
    (made / "00000001.kvl").write_bytes(b"x" * size)
    return made


def left(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in folder.glob("engine-*"))


def test_nothing_is_removed_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOTAL_BYTES, raising=False)
    journal(tmp_path, 1, 1000)

    assert [] == make_room(tmp_path, 1 << 40)
    assert ["1"] == left(tmp_path)


def test_the_oldest_go_until_a_new_journal_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "3500")
    for began in (1, 2, 3, 4):
        journal(tmp_path, began, 1000)

    removed = make_room(tmp_path, 1500)

    assert ["engine-1-7-0", "engine-2-7-0"] == [path.name for path in removed]
    assert ["3", "4"] == left(tmp_path)


def test_a_living_engines_journal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "1000")
    lock = take_lock(journal(tmp_path, 1, 1000))
    journal(tmp_path, 2, 1000)

    make_room(tmp_path, 500)

    assert ["1"] == left(tmp_path)
    assert lock


def test_what_is_no_journal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "1")
    (tmp_path / "engine-notes").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "00000001.kvl").write_bytes(b"x" * 100)

    assert [] == make_room(tmp_path, 1)


def test_a_folder_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "1")

    assert [] == make_room(tmp_path / "later", 1)


def test_one_journals_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOURNAL_BYTES, "8388608")

    assert Limits(segment_bytes=2 << 20, folder_bytes=8 << 20) == limits()


def test_bounds_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOURNAL_BYTES, raising=False)

    assert Limits() == limits()


@pytest.mark.parametrize("said", ["64M", "-1", "0", "many"])
def test_a_size_that_is_none(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOURNAL_BYTES, said)

    with pytest.raises(LedgerError, match="is not a number of bytes"):
        limits()


def test_workers_journals_go_by_age_with_those_of_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "2500")
    journal(tmp_path, 1, 1000).rename(tmp_path / "worker-1-7-0")
    journal(tmp_path, 2, 1000)

    assert [tmp_path / "worker-1-7-0"] == make_room(tmp_path, 1000)
    assert ["2"] == left(tmp_path)
