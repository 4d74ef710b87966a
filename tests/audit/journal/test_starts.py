"""An engine is recorded, whatever lies in the folder and however many engines start at once."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests import journals

from kvledger.audit.entry.attach import recorder_in_folder
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import Snapshot
from kvledger.audit.journal import catalogue
from kvledger.audit.journal.catalogue import JOURNAL_BYTES, TOTAL_BYTES


def records(folder: Path) -> bool:
    """Whether a new engine writes a journal while it runs."""
    recorder = recorder_in_folder("engine")
    recorder.restart(journals.STARTED, Snapshot(0, 0, [], 0))
    recorder.flush(10)
    written = recorder.failures == 0 and recorder.written_events > 1 and any(recorder.folder.glob("*.kvl"))
    recorder.close()
    return written


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ended engines' journals, of which a new engine has to remove some."""
    monkeypatch.setenv("KVLEDGER_DIR", str(tmp_path))
    monkeypatch.setenv(JOURNAL_BYTES, "40000")
    monkeypatch.setenv(TOTAL_BYTES, "40001")
    for number in range(30):
        journals.clean(tmp_path / f"engine-{1000 + number}-1-0")
    return tmp_path


def _lock_is_a_folder(journal: Path) -> None:
    (journal / "lock").unlink(missing_ok=True)
    (journal / "lock").mkdir()


def _lock_is_a_fifo(journal: Path) -> None:
    (journal / "lock").unlink(missing_ok=True)
    os.mkfifo(journal / "lock")


def _is_a_loop(journal: Path) -> None:
    shutil.rmtree(journal)
    journal.symlink_to(journal)


def _is_a_file(journal: Path) -> None:
    shutil.rmtree(journal)
    journal.write_bytes(b"")


@pytest.mark.parametrize("spoil", [_lock_is_a_folder, _lock_is_a_fifo, _is_a_loop, _is_a_file])
def test_beside_anything(spoil: Callable[[Path], None], folder: Path) -> None:
    for journal in sorted(folder.iterdir())[:5]:
        spoil(journal)

    assert records(folder)
    assert 15 > len(list(folder.glob("engine-10*-1-0/*.kvl"))), "the others made room"


@pytest.mark.parametrize("function", ["_size", "is_live", "Catalogue"])
def test_while_the_journals_vanish(function: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine removes each at the moment at which it is looked at."""
    original = getattr(catalogue, function)

    def vanishing(path: Path) -> object:
        for journal in [path] if path != folder else list(folder.iterdir()):
            shutil.rmtree(journal, ignore_errors=True)
        return original(path)

    monkeypatch.setattr(catalogue, function, vanishing)

    assert records(folder)


def test_in_a_folder_that_can_not_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Path) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(catalogue, "Catalogue", refused)

    assert records(folder)


@pytest.mark.parametrize("round", range(3))
def test_96_at_once(round: int, folder: Path) -> None:
    gate = threading.Barrier(32)

    def start(number: int) -> bool:
        if number < 32:
            gate.wait()
        return records(folder)

    with ThreadPoolExecutor(32) as pool:
        assert [True] * 96 == list(pool.map(start, range(96)))


def test_a_bound_that_is_no_number_is_still_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOTAL_BYTES, "much")
    with pytest.raises(LedgerError):
        recorder_in_folder("engine")
