"""Whatever happens to a live engine's files, its figures go on; until they do, it is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import journals
from tests.audit.analysis.test_blocks import Recording
from tests.exporters.sidecar.crash import counted
from tests.exporters.sidecar.test_follower import Engine, ended, following, rose

from kvledger.audit import events as ev
from kvledger.audit.journal import reader
from kvledger.audit.journal.format import LOCK, segment_name
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.sidecar import follower as sidecar_follower
from kvledger.exporters.sidecar.follower import Follower

SERVED = 5


def current(folder: Path) -> Path:
    return max(folder.glob("*.kvl"))


def lock_removed(folder: Path) -> None:
    (folder / LOCK).unlink()


def lock_is_a_fifo(folder: Path) -> None:
    (folder / LOCK).unlink()
    os.mkfifo(folder / LOCK)


def lock_is_another_file(folder: Path) -> None:
    (folder / LOCK).unlink()
    (folder / LOCK).write_bytes(b"")


def cut_in_half(folder: Path) -> None:
    os.truncate(current(folder), current(folder).stat().st_size // 2)


def emptied(folder: Path) -> None:
    os.truncate(current(folder), 0)


def segment_removed(folder: Path) -> None:
    current(folder).unlink()


def segment_renamed(folder: Path) -> None:
    current(folder).rename(folder / "aside")


def segment_renumbered(folder: Path) -> None:
    current(folder).rename(folder / segment_name(7))


def all_removed(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


DISTURBANCES = [
    lock_removed,
    lock_is_a_fifo,
    lock_is_another_file,
    cut_in_half,
    emptied,
    segment_removed,
    segment_renamed,
    segment_renumbered,
    all_removed,
]


@pytest.fixture(autouse=True)
def at_each_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_follower, "LOOK_SECONDS", 0.0)


def goes_on(engine: Engine) -> None:
    """What the recorder's thread does each second, and requests after it."""
    if engine.writer.removed:
        engine.writer.recreate()
        engine.rotate()
    for _ in range(SERVED):
        engine.serve()


def polled(follower: Follower) -> int:
    """The ended requests after some polls, in which no counter fell."""
    for _ in range(3):
        before = counted(follower.audits)
        follower.poll()
        assert rose(before, counted(follower.audits))
    return ended(follower)


@pytest.mark.parametrize("settle_seconds", [60.0, 0.0], ids=["can go on", "settled at once"])
@pytest.mark.parametrize("others_end", [False, True], ids=["last of its name", "folded"])
@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_the_figures_of_a_live_engine_go_on(
    disturb: Callable[[Path], None],
    others_end: bool,
    settle_seconds: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sidecar_follower, "SETTLE_SECONDS", settle_seconds)
    engine = Engine(tmp_path / "engine-1", model="one")
    engine.serve()
    with following(tmp_path) as follower:
        disturb(tmp_path / "engine-1")
        before = polled(follower)
        if others_end:
            other = Engine(tmp_path / "engine-2", process_id=7, wall_seconds=1.8e9, model="one")
            other.serve()
            polled(follower)
            other.stop()
            before = polled(follower)
        goes_on(engine)

        assert polled(follower) >= before + SERVED
        assert 0 == follower.health.unread
        engine.stop()
        assert polled(follower) >= before + SERVED


def test_a_live_engine_of_which_nothing_is_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segment was cut, and it has not begun another."""
    engine = Engine(tmp_path / "engine-1")
    engine.serve()
    quiet = Engine(tmp_path / "engine-2", process_id=2)
    with following(tmp_path) as follower:
        polled(follower)
        assert 0 == follower.health.unread
        monkeypatch.setattr(sidecar_follower, "UNREAD_SECONDS", 0.0)
        emptied(tmp_path / "engine-1")
        polled(follower)
        assert 0 == follower.health.unread, "it writes nothing"
        engine.serve()
        polled(follower)
        assert 1 == follower.health.unread
        goes_on(engine)
        polled(follower)
        assert 0 == follower.health.unread
    engine.stop()
    quiet.stop()


@pytest.mark.parametrize("restart", [False, True])
def test_an_end_that_was_none_is_revoked_also_after_a_restart(
    restart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a file server says for a moment that nobody holds the lock; nothing else changes."""
    engine = Engine(tmp_path / "engine-1")
    engine.serve()
    state = tmp_path / "state"
    with following(tmp_path, folder=state) as follower:
        with monkeypatch.context() as patch:
            patch.setattr(reader, "is_live", lambda _: False)
            patch.setattr(sidecar_follower, "is_live", lambda _: False)
            engine.serve()
            before = polled(follower)
            assert follower.journals["engine-1"].ended
            follower.save()
        if not restart:
            goes_on(engine)
            assert polled(follower) == before + SERVED
    if restart:
        with following(tmp_path, folder=state) as follower:
            goes_on(engine)
            assert polled(follower) == before + SERVED
    engine.stop()


def test_an_ended_journal_is_left_alone(tmp_path: Path) -> None:
    """Also one that was killed in the middle of a write, and after a restart."""
    for number, kill in enumerate((False, True)):
        engine = Engine(tmp_path / f"engine-{number}", process_id=number)
        engine.serve()
        if kill:
            engine.kill()
            with current(engine.writer.folder).open("ab") as file:
                file.write(b"\x99\x00")
        else:
            engine.stop()
    said: list[str] = []
    for _ in range(2):
        with following(tmp_path, notified=said) as follower:
            before = counted(follower.audits)
            polled(follower)
            assert before == counted(follower.audits)
            assert all(journal.ended for journal in follower.journals.values())
            assert 0 == follower.health.unread
            follower.save()
    assert [] == said


def test_an_engine_that_ended_before_the_start_keeps_its_sums_and_no_blocks(tmp_path: Path) -> None:
    """The blocks of a pool take more memory than everything else."""
    recording = Recording(blocks=64)
    recording.request([], [(1, 1), (2, 2)])
    at = recording.events[-1].at
    finished = ev.Finished(at, 0, "stop", 32, 0, 0, -1, -1)
    folder = journals.write(tmp_path / "engine-1", [*recording.events, finished], level="blocks")

    with following(tmp_path) as follower:
        (audit,) = follower.audits
        assert 1 == ended(follower)
        assert not audit.auditor.ledger.blocks.pools
    (whole,) = audit_paths([folder]).engines
    assert whole.auditor.ledger.blocks.pools
    assert whole.totals() == audit.totals()
