"""Limits on the size of journals on a volume that an engine's container shares with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.catalogue import JOURNAL_BYTES, TOTAL_BYTES, limits, make_room
from kvledger.audit.journal.format import take_lock
from kvledger.audit.journal.writer import Limits


def journal(folder: Path, began: int, size: int) -> Path:
    path = folder / f"engine-{began}-7-0"
    path.mkdir(parents=True)
    (path / "00000001.kvl").write_bytes(b"x" * size)
    return path


def remaining(folder: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in folder.glob("engine-*"))


def test_below_the_default_limit_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOTAL_BYTES, raising=False)
    journal(tmp_path, 1, 1000)

    assert [] == make_room(tmp_path, 1 << 40)
    assert ["1"] == remaining(tmp_path)


def test_without_a_setting_there_is_room_for_sixteen_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that restarts for months does not fill the disk."""
    monkeypatch.delenv(TOTAL_BYTES, raising=False)
    for began in range(101, 121):
        make_room(tmp_path, 1000)
        journal(tmp_path, began, 1000)

    assert [str(began) for began in range(105, 121)] == remaining(tmp_path)


def test_the_oldest_journals_are_removed_until_a_new_one_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "3500")
    for began in (1, 2, 3, 4):
        journal(tmp_path, began, 1000)

    removed = make_room(tmp_path, 1500)

    assert ["engine-1-7-0", "engine-2-7-0"] == [path.name for path in removed]
    assert ["3", "4"] == remaining(tmp_path)


def test_a_live_journal_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "1000")
    lock = take_lock(journal(tmp_path, 1, 1000))
    journal(tmp_path, 2, 1000)

    make_room(tmp_path, 500)

    assert ["1"] == remaining(tmp_path)
    assert lock


def test_folders_that_hold_no_journal_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "1")
    (tmp_path / "engine-notes").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "00000001.kvl").write_bytes(b"x" * 100)

    assert [] == make_room(tmp_path, 1)


def test_a_missing_folder_has_nothing_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "1")

    assert [] == make_room(tmp_path / "later", 1)


def test_the_size_of_a_journal_sets_its_segment_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOURNAL_BYTES, "8388608")

    assert Limits(segment_bytes=2 << 20, folder_bytes=8 << 20) == limits()


def test_without_a_setting_the_default_limits_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOURNAL_BYTES, raising=False)

    assert Limits() == limits()


@pytest.mark.parametrize("size", ["64M", "-1", "0", "many"])
def test_a_size_that_is_no_number_of_bytes_is_refused(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOURNAL_BYTES, size)

    with pytest.raises(LedgerError, match="is not a number of bytes"):
        limits()


def test_journals_of_workers_and_engines_are_removed_by_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "2500")
    journal(tmp_path, 1, 1000).rename(tmp_path / "worker-1-7-0")
    journal(tmp_path, 2, 1000)

    assert [tmp_path / "worker-1-7-0"] == make_room(tmp_path, 1000)
    assert ["2"] == remaining(tmp_path)
