"""The follower: journals that appear, end and vanish, and restarts from a checkpoint."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.replay.test_serialize import picture
from tests.exporters.sidecar.crash import counted, renumbered
from tests.histories import events
from tests.time_limits import HANGS

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import (
    BlocksAllocated,
    BlocksCached,
    EngineStopped,
    Event,
    PoolSeen,
    RequestAdded,
    Snapshot,
)
from kvledger.audit.journal import reader
from kvledger.audit.journal.format import frame, header
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.replay import checkpoint, serialize
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.exporters.metrics.values import engine_label
from kvledger.exporters.sidecar import follower as sidecar_follower
from kvledger.exporters.sidecar.follower import FollowedJournal, Follower

HISTORY = events(200, journals.CLEAN)


class Engine:
    """A journal that is being written, one segment per history."""

    def __init__(
        self, folder: Path, process_id: int = 4000, wall_seconds: float = 1.7e9, model: str = "", **given: Any
    ) -> None:
        self.writer = JournalWriter(folder, Limits(segment_bytes=1))
        settings = {"model": model or f"model {process_id}"}
        given |= {"process_id": process_id, "wall_seconds": wall_seconds, "configuration": settings}
        self.started = replace(journals.STARTED, **given)
        self.requests = 0
        self.rotate()

    def rotate(self) -> None:
        self.writer.rotate()
        self.writer.write([self.started, Snapshot(0, 0, [], 0)])

    def serve(self, stream: list[Event] = HISTORY) -> None:
        """Write one request under a new number."""
        self.writer.write([renumbered(event, self.requests) for event in stream])
        self.requests += 1

    def stop(self) -> None:
        self.writer.write([EngineStopped(1_000_000, "shutdown")])
        self.writer.close()

    def kill(self) -> None:
        self.writer.abandon()


@contextlib.contextmanager
def following(path: Path, **given: Any) -> Iterator[Follower]:
    """A follower that has caught up, with its state under ``path``; closed without a last checkpoint."""
    notified = given.pop("notified", [])
    follower = Follower(path, given.pop("folder", path / checkpoint.HIDDEN), notified.append)
    try:
        follower.catch_up()
        yield follower
    finally:
        follower.close()


def ended(follower: Follower) -> int:
    return sum(engine_audit.closed.requests for engine_audit in follower.audits)


# --- engines come and go --------------------------------------------------------------------------------


def test_ended_engines_are_read_by_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same figures and labels. The journal of a live engine is read as ever."""
    root = tmp_path / "journals"
    live = Engine(root / "c", model="model")
    live.serve()
    for number, name in enumerate("abde", 1):
        engine = Engine(root / name, number, model="model")
        engine.serve()
        engine.stop() if name < "d" else engine.kill()
    damaged = root / "b/00000001.kvl"
    damaged.write_bytes(damaged.read_bytes()[:-3])
    monkeypatch.setattr(sidecar_follower, "AHEAD_WORTH_BYTES", 0)
    read: list[str] = []
    whole = FollowedJournal.read
    monkeypatch.setattr(
        FollowedJournal, "read", lambda one, *more: (read.append(one.name), whole(one, *more))
    )
    found = []
    for processes, read_here in (1, "abcde"), (2, "c"):
        monkeypatch.setattr(sidecar_follower, "AHEAD_PROCESSES", processes)
        notified: list[str] = []
        read.clear()
        with following(root, folder=tmp_path / str(processes), notified=notified) as follower:
            assert read_here == "".join(sorted({*read}))
            audits = {engine_label(one): picture(one) for one in follower.audits}
        found.append((audits, notified))
    live.stop()
    assert found[0] == found[1]


def test_a_journal_that_goes_while_others_are_read_gives_its_figures_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate("abc", 1):
        engine = Engine(tmp_path / name, number)
        for _ in range(number):
            engine.serve()
        engine.stop()
    monkeypatch.setattr(sidecar_follower, "AHEAD_WORTH_BYTES", 0)
    monkeypatch.setattr(sidecar_follower, "AHEAD_PROCESSES", 2)
    taken = Follower._take_up_ahead

    def without_b(follower: Follower, journal: FollowedJournal) -> bool:
        found = taken(follower, journal)
        follower.journals.pop("b", None)
        return found

    monkeypatch.setattr(Follower, "_take_up_ahead", without_b)
    monkeypatch.setattr(sidecar_follower, "cores", lambda: 2)
    with following(tmp_path) as follower:
        requests = {each.model: each.closed.requests for each in follower.audits}
    assert {"model 1": 1, "model 3": 3}.items() <= requests.items()


def test_later_events_are_read_by_the_next_poll(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    with following(tmp_path) as follower:
        assert 0 == ended(follower)
        engine.serve()
        follower.poll()
        assert 1 == ended(follower)
    engine.stop()


def test_a_journal_that_appears_later_is_followed(tmp_path: Path) -> None:
    """Also if no journal existed when the sidecar started."""
    with following(tmp_path) as follower:
        assert follower.ready.is_set()
        assert [] == follower.audits
        journals.clean(tmp_path / "engine")
        follower.poll()
        assert 1 == ended(follower)


def test_a_journal_with_much_to_read_leaves_others_their_turn(tmp_path: Path) -> None:
    """No figure of a journal is exported before it was read to its end."""
    with following(tmp_path) as follower:
        engines = [Engine(tmp_path / name) for name in "ab"]
        for engine in engines:
            for _ in range(3):
                engine.serve()
        follower.poll(seconds=0)
        read = [journal.engine_audit.journal.events for journal in follower.journals.values()]
        assert 2 == len(read) and all(read)
        assert all(journal.behind for journal in follower.journals.values())
        assert [] == follower.audits

        for _ in range(9):
            follower.poll(seconds=0)
        assert not any(journal.behind for journal in follower.journals.values())
        assert 6 == ended(follower)
    for engine in engines:
        engine.stop()


def test_a_restarted_engine_has_its_own_journal(tmp_path: Path) -> None:
    """With the same process id, as in a container: sums continue and count since the first start."""
    first = Engine(tmp_path / "a", wall_seconds=100.0)
    first.serve()
    first.kill()
    with following(tmp_path) as follower:
        before = counted(follower.audits)
        second = Engine(tmp_path / "b", wall_seconds=200.0)
        second.serve()
        follower.poll()
        after = counted(follower.audits)
        assert ["vllm 0.32.0 pid 4000"] * 2 == [engine_audit.name for engine_audit in follower.audits]
        assert all(after[key] >= value for key, value in before.items())
        second.stop()


def test_open_requests_of_a_killed_engine_become_unknown(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    engine.serve(HISTORY[:-1])
    with following(tmp_path) as follower:
        assert 0 == ended(follower)
        engine.kill()
        follower.poll()
        [engine_audit] = follower.audits
        assert {("unknown", "unknown"): 1} == engine_audit.journal.requests


def test_open_requests_of_a_stopped_engine_end_with_it(tmp_path: Path) -> None:
    """The stop was orderly, so everything that the engine did is known and settled."""
    engine = Engine(tmp_path / "engine")
    engine.serve(HISTORY[:-1])
    engine.stop()
    with following(tmp_path) as follower:
        [engine_audit] = follower.audits
        assert {("clean", "engine_ended"): 1} == engine_audit.journal.requests
        assert 200 == engine_audit.closed.prompt_tokens
        assert 0 == engine_audit.closed.in_flight
        assert {} == engine_audit.auditor.ledger.last_step


def test_sums_of_a_removed_journal_stay(tmp_path: Path) -> None:
    """Every counter of every golden history stays."""
    journals.golden(tmp_path)
    journals.violated(tmp_path / "violated")
    with following(tmp_path) as follower:
        before = counted(follower.audits)
        for journal in tmp_path.glob("*[!.]*"):
            if journal.name != checkpoint.HIDDEN:
                shutil.rmtree(journal)
                follower.poll()
                assert before == counted(follower.audits)
        assert {} == follower.journals
        created = [engine_audit.created for engine_audit in follower.audits]
        follower.save()

    with following(tmp_path) as follower:
        assert before == counted(follower.audits)
        assert created == [engine_audit.created for engine_audit in follower.audits]


def test_a_journal_may_be_removed_while_the_sidecar_is_down(tmp_path: Path) -> None:
    journals.violated(tmp_path / "engine")
    with following(tmp_path) as follower:
        before = counted(follower.audits)
    shutil.rmtree(tmp_path / "engine")

    with following(tmp_path) as follower:
        assert before == counted(follower.audits)


def test_the_engine_removed_first_is_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole name is dropped, so no sum falls: a series ends."""
    monkeypatch.setattr(sidecar_follower, "PAST_NAMES", 2)
    with following(tmp_path) as follower:
        for number in range(4):
            engine = Engine(tmp_path / "engine", process_id=number)
            engine.serve()
            engine.stop()
            follower.poll()
            shutil.rmtree(tmp_path / "engine")
            follower.poll()
        assert ["vllm 0.32.0 pid 2", "vllm 0.32.0 pid 3"] == [
            engine_audit.name for engine_audit in follower.audits
        ]
        assert {"engine forgotten": 2} == follower.health.lost


# --- many restarts --------------------------------------------------------------------------------------


def restarted(root: Path, engines: int, *, names: int = 1) -> None:
    """Journals of engines that ended one after the other, under so many names."""
    for number in range(engines):
        engine = Engine(root / f"engine-{number:04d}", process_id=number % names, wall_seconds=1e9 + number)
        engine.serve()
        engine.stop()


def rose(before: dict[Any, float], after: dict[Any, float]) -> bool:
    """Whether no counter fell or vanished."""
    return all(key in after and after[key] >= value for key, value in before.items())


def test_ended_engines_of_a_name_share_an_audit(tmp_path: Path) -> None:
    """The last one keeps its own, with its findings; the sums are those of every engine, also resumed."""
    restarted(tmp_path, 20)
    with following(tmp_path) as follower:
        assert 2 == len(follower.audits)
        assert 20 == ended(follower)
        assert ["engine-0019"] == list(follower.journals)
        before = counted(follower.audits)
        follower.save()
    with following(tmp_path) as follower:
        assert before == counted(follower.audits)
        assert ["engine-0019"] == list(follower.journals)
        follower.save()
        Engine(tmp_path / "engine-0020", process_id=0, wall_seconds=2e9).kill()
        follower.poll()
        assert rose(before, counted(follower.audits))
        assert 2 == len(follower.audits)


def test_a_folded_engine_leaves_the_memory_while_others_are_read(tmp_path: Path) -> None:
    restarted(tmp_path, 6)
    read: list[weakref.ref[FollowedJournal]] = []
    most = []

    def note(journal: FollowedJournal, *_: object) -> None:
        read.append(weakref.ref(journal))
        gc.collect()
        most.append(len({id(one) for each in read if (one := each()) is not None}))

    follower = Follower(tmp_path)
    follower.on_batch = note
    gc.freeze()  # what other tests have imported need not be collected after each batch
    try:
        follower.catch_up()
    finally:
        gc.unfreeze()
    follower.close()
    assert 6 <= len(most) and 2 == max(most)


def test_the_blocks_of_an_engine_that_has_ended_leave_the_memory(tmp_path: Path) -> None:
    start = [journals.STARTED, Snapshot(0, 0, [], 0), PoolSeen(0, 0, 0, 9, 0, 8, 0, [0, 16, 2])]
    cached = BlocksCached(1, 1, 0, [0, 0, 16, 1, 1, 77, 16])
    allocated = BlocksAllocated(1, 1, 0, "allocate", [0, 0, 1, 1])
    writer = JournalWriter(tmp_path / "engine")
    writer.rotate()
    writer.write([*start, RequestAdded(0, 0, "r", 16), allocated, cached, EngineStopped(2, "shutdown")])
    writer.close()

    with following(tmp_path) as follower:
        (audit,) = follower.audits
        assert {} == audit.metrics.blocks.pools == audit.auditor.ledger.blocks.pools
        assert (True, 1) == (audit.metrics.blocks.seen, audit.metrics.blocks.use.cached)


def test_a_scrape_does_not_grow_with_the_engines_that_ever_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the checkpoint; and a folded journal is not read again."""
    monkeypatch.setattr(sidecar_follower, "PAST_NAMES", 3)
    samples, sizes = set(), []
    for engines in (3, 30):
        folder = tmp_path / str(engines)
        restarted(folder, engines, names=engines)
        with following(folder) as follower:
            samples.add(len(counted(follower.audits)))
            follower.save()
            sizes.append(follower.health.save_bytes)
        with following(folder) as follower:
            samples.add(len(counted(follower.audits)))
            assert 3 == ended(follower)
    assert 1 == len(samples)
    assert sizes[1] < 1.5 * sizes[0]


def test_counters_never_fall_while_engines_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names, restarted in turn, with a follower that is restarted too."""
    monkeypatch.setattr(sidecar_follower, "PAST_NAMES", 1)
    before: dict[Any, float] = {}
    first = Engine(tmp_path / "always", process_id=0)
    first.serve()
    for number in range(6):
        with following(tmp_path) as follower:
            for step in range(2):
                engine = Engine(tmp_path / f"engine-{number}-{step}", process_id=0, wall_seconds=1e9)
                engine.serve()
                follower.poll()
                assert rose(before, counted(follower.audits))
                before = counted(follower.audits)
                engine.stop()
                follower.poll()
                assert rose(before, counted(follower.audits))
            before = counted(follower.audits)
    with following(tmp_path) as follower:
        assert 13 == ended(follower)
        assert {} == follower.health.lost
    first.stop()


def test_a_name_with_an_engine_that_runs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other names ended since; dropping its sums would make the counters of the live engine fall."""
    monkeypatch.setattr(sidecar_follower, "PAST_NAMES", 1)
    restarted(tmp_path, 2)
    with following(tmp_path) as follower:
        live = Engine(tmp_path / "live", process_id=0)
        live.serve()
        for journal in tmp_path.glob("engine-*"):
            shutil.rmtree(journal)
        follower.poll()
        assert 3 == ended(follower)
        for number in range(1, 4):
            engine = Engine(tmp_path / f"other-{number}", process_id=number)
            engine.serve()
            engine.stop()
            follower.poll()
            shutil.rmtree(tmp_path / f"other-{number}")
            follower.poll()
        audits = follower.audits
        assert {"vllm 0.32.0 pid 0", "vllm 0.32.0 pid 3"} == {engine_audit.name for engine_audit in audits}
        assert 4 == ended(follower)
    live.stop()


def test_a_name_leaves_some_time_after_its_last_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is no loss: its series end, and its journals are not read again."""
    restarted(tmp_path, 4, names=2)
    with following(tmp_path) as follower:
        assert 4 == ended(follower)
        monkeypatch.setattr(sidecar_follower, "PAST_SECONDS", 0.0)
        follower.poll()
        assert [] == follower.audits
        assert {} == follower.health.lost
        follower.save()
    with following(tmp_path) as follower:
        assert [] == follower.audits
        assert {} == follower.journals


def test_a_folded_journal_that_was_replaced_is_read(tmp_path: Path) -> None:
    restarted(tmp_path, 2)
    with following(tmp_path) as follower:
        assert ["engine-0001"] == list(follower.journals)
        follower.save()
    shutil.rmtree(tmp_path / "engine-0000")
    second = Engine(tmp_path / "engine-0000", process_id=0, wall_seconds=1.8e9)
    second.serve()
    with following(tmp_path) as follower:
        assert {"journal replaced": 1} == follower.health.lost
        assert 3 == ended(follower)
    second.stop()


# --- one bad journal --------------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_read_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer schema, for example. It is reported once, however often the journal is tried."""
    monkeypatch.setattr(sidecar_follower, "RETRY_SECONDS", 0.0)
    bad, good = Engine(tmp_path / "bad"), Engine(tmp_path / "good")
    (tmp_path / "bad" / "00000002.kvl").write_bytes(header(99))
    good.serve()
    notified: list[str] = []
    with following(tmp_path, notified=notified) as follower:
        follower.poll()
        assert 1 == ended(follower)
        assert 1 == follower.health.problems
    [sentence] = notified
    assert sentence.startswith("bad is not followed: 00000002.kvl was written with schema 99")
    bad.stop()
    good.stop()


def test_a_journal_that_becomes_readable_again_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_follower, "RETRY_SECONDS", 0.0)
    engine, said = Engine(tmp_path / "engine"), list[str]()
    with following(tmp_path, notified=said) as follower:
        with monkeypatch.context() as patched:
            patched.setattr(reader, "is_live", denied)
            engine.serve()
            follower.poll()
            assert 0 == ended(follower)
            assert "lock can't be opened: Permission denied." == follower.journals["engine"].problem
        follower.poll()
        follower.poll()
        assert 1 == ended(follower)
        assert "" == follower.journals["engine"].problem
    assert [
        "engine is not followed: lock can't be opened: Permission denied.",
        "engine is followed again.",
    ] == said
    engine.stop()


def denied(_: Path) -> bool:
    raise LedgerError("lock can't be opened: Permission denied.")


def test_an_exception_in_kvledger_stops_one_journal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal keeps the state of the last checkpoint, and the others continue."""
    one, other = Engine(tmp_path / "one"), Engine(tmp_path / "other")
    one.serve()
    other.serve()
    notified: list[str] = []
    with following(tmp_path, notified=notified) as follower:
        engine_audit = follower.journals["one"].engine_audit
        monkeypatch.setattr(engine_audit, "feed", lambda number, event: 1 / 0)
        one.serve()
        other.serve()
        follower.poll()
        follower.poll()
        follower.save()
        assert 3 == ended(follower)
        assert [
            "one is not followed: kvledger itself failed (ZeroDivisionError: division by zero)"
        ] == notified

    with following(tmp_path) as follower:
        assert 4 == ended(follower)
    one.stop()
    other.stop()


def test_a_folder_without_segments_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "00000001.kvl").write_text("x")
    journals.clean(tmp_path / "engine")
    notified: list[str] = []
    with following(tmp_path, notified=notified) as follower:
        follower.poll()
        assert 1 == ended(follower)
    assert [
        f"{tmp_path / 'odd'} is not a kvledger journal: no segment in it has a journal's header."
    ] == notified


@pytest.mark.parametrize("name", ["nowhere", "notes.txt"])
def test_a_path_without_a_journal_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(LedgerError):
        Follower(tmp_path / name)


def test_a_single_journal_or_segment_is_followed(tmp_path: Path) -> None:
    journal = journals.clean(tmp_path / "engine")
    with following(journal / "00000001.kvl", folder=None) as follower:
        assert 1 == ended(follower)
    for _ in range(2):
        with following(journal) as follower:
            assert 1 == ended(follower)


# --- restarts -----------------------------------------------------------------------------------------------


def test_a_restart_resumes_at_the_saved_position(tmp_path: Path) -> None:
    """With an open request, after any event: nothing is counted twice and nothing is missing."""
    for cut in range(len(HISTORY)):
        folder = tmp_path / str(cut)
        engine = Engine(folder / "engine")
        engine.serve()
        engine.serve(HISTORY[:cut])
        with following(folder):
            pass
        engine.requests -= 1
        engine.serve(HISTORY[cut:])
        engine.stop()
        with following(folder) as resumed, following(folder, folder=None) as whole:
            assert counted(whole.audits) == counted(resumed.audits)
            [restored], [uninterrupted] = resumed.audits, whole.audits
            assert picture(uninterrupted) == picture(restored)


def test_a_prompt_is_settled_once_over_restarts(tmp_path: Path) -> None:
    """A prompt that was settled before the restart is not settled again after it."""
    settled = next(n for n, event in enumerate(HISTORY) if type(event).__name__ == "Finished")
    engine = Engine(tmp_path / "engine")
    engine.serve(HISTORY[:settled])
    with following(tmp_path) as follower:
        [account] = follower.audits[0].auditor.ledger.open.values()
        before = list(account.settlements)
        assert before
    engine.requests -= 1
    engine.serve(HISTORY[settled:])
    engine.stop()
    with following(tmp_path) as follower:
        assert 200 == follower.audits[0].closed.prompt_tokens


def test_a_restart_reads_at_most_one_segment_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    for _ in range(3):
        engine.serve()
        engine.rotate()
    with following(tmp_path):
        pass
    engine.serve()
    with following(tmp_path) as follower:
        assert 4 == ended(follower)
        assert 4 == follower.journals["engine"].reader.position.segment
    saved = checkpoint.load(tmp_path / checkpoint.HIDDEN)
    assert saved is not None
    assert [4] == [one.position.segment for one in saved.journals]
    engine.stop()


def test_a_long_journal_is_saved_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill during the first reading then costs one segment at most."""
    monkeypatch.setattr(sidecar_follower, "LEAST_SAVE_SECONDS", 0.0)
    engine = Engine(tmp_path / "engine")
    for _ in range(3):
        engine.serve()
        engine.rotate()
    engine.stop()
    places = []
    saving = checkpoint.save

    def saved(folder: Path, state: checkpoint.Checkpoint) -> int:
        places.extend(one.position.segment for one in state.journals)
        return saving(folder, state)

    monkeypatch.setattr(checkpoint, "save", saved)
    with following(tmp_path):
        assert [1, 2, 3, 4] == sorted(set(places))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: b"nonsense" + data,
        lambda data: os.urandom(100),
    ],
    ids=["empty", "half", "a bit", "before", "noise"],
)
def test_a_damaged_checkpoint_is_counted_and_journals_are_read_again(tmp_path: Path, spoil: Any) -> None:
    engine = Engine(tmp_path / "engine")
    engine.serve()
    engine.stop()
    with following(tmp_path) as follower:
        before = counted(follower.audits)
    place = tmp_path / checkpoint.HIDDEN / checkpoint.NAME
    place.write_bytes(spoil(place.read_bytes()))
    notified: list[str] = []
    loss = "kvledger_sidecar_losses_total", frozenset({("reason", "checkpoint damaged")})

    for _ in range(2):
        with following(tmp_path, notified=notified) as follower:
            assert before | {loss: 1} == counted(follower.audits)
            assert {"checkpoint damaged": 1} == follower.health.lost
    assert [f"{place} is damaged. Every journal is read again from its oldest segment."] == notified


def test_a_checkpoint_of_another_version_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journals.clean(tmp_path / "engine")
    with following(tmp_path):
        pass
    monkeypatch.setattr(checkpoint, "layout", lambda: "2.0")
    with following(tmp_path) as follower:
        assert {"checkpoint of another version": 1} == follower.health.lost
        assert 1 == ended(follower)


def test_a_lost_checkpoint_and_removed_segments_are_a_rotated_journal(tmp_path: Path) -> None:
    """The figures are those of the remaining segments; nobody has read the removed ones."""
    engine = Engine(tmp_path / "engine")
    engine.serve()
    engine.rotate()
    engine.serve()
    engine.stop()
    (tmp_path / "engine" / "00000001.kvl").unlink()
    with following(tmp_path) as follower:
        [engine_audit] = follower.audits
        assert 0 == engine_audit.auditor.ledger.sums.gaps
        assert 0 < engine_audit.auditor.ledger.sums.removed_events
        assert {("clean", "stopped"): 1} == engine_audit.journal.requests


def test_a_segment_removed_while_the_sidecar_was_down_is_a_gap(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    engine.serve()
    engine.serve(HISTORY[:-1])
    with following(tmp_path):
        pass
    engine.rotate()
    engine.serve()
    engine.stop()
    (tmp_path / "engine" / "00000001.kvl").unlink()
    with following(tmp_path) as follower:
        [engine_audit] = follower.audits
        assert {"segment removed": 1} == follower.health.lost
        assert {("clean", "stopped"): 2, ("unknown", "unknown"): 1} == engine_audit.journal.requests
        assert 400 == engine_audit.closed.prompt_tokens


def test_a_replaced_journal_is_read_from_its_start(tmp_path: Path) -> None:
    """The old journal's sums stay, and the new journal is read from its start."""
    first = Engine(tmp_path / "engine")
    first.serve()
    first.stop()
    with following(tmp_path):
        pass
    shutil.rmtree(tmp_path / "engine")
    second = Engine(tmp_path / "engine", wall_seconds=1.8e9)
    second.serve()
    second.serve()
    with following(tmp_path) as follower:
        assert {"journal replaced": 1} == follower.health.lost
        assert 3 == ended(follower)
    second.stop()


@pytest.mark.parametrize("decodes", [False, True], ids=["damaged", "no batch"])
def test_damage_is_counted_once_over_restarts(tmp_path: Path, decodes: bool) -> None:
    """As often as by an uninterrupted follower: at once, or with the next good batch."""
    engine = Engine(tmp_path / "engine")
    engine.serve()
    payload = msgspec.msgpack.encode(["no", "batch"])
    with open(tmp_path / "engine" / "00000001.kvl", "ab") as file:
        file.write(frame(payload) if decodes else b"\x01\0\0\0\0\0\0\0\0" * 3)
    with following(tmp_path, folder=None) as whole:
        with following(tmp_path):
            pass
        with following(tmp_path) as resumed:
            engine.rotate()
            engine.serve()
            engine.stop()
            resumed.poll()
            whole.poll()
            assert counted(whole.audits) == counted(resumed.audits)
            assert [one.damage for one in whole.journals.values()] == [1]
            assert [one.damage for one in resumed.journals.values()] == [1]


def test_a_second_follower_of_a_state_folder_is_refused(tmp_path: Path) -> None:
    with following(tmp_path), pytest.raises(LedgerError, match=r"Another kvledger serve keeps its state in"):
        Follower(tmp_path, tmp_path / checkpoint.HIDDEN)


def test_a_checkpoint_that_cannot_be_written_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, state: checkpoint.Checkpoint) -> int:
        raise OSError(28, "No space left on device")

    notified: list[str] = []
    with following(tmp_path, notified=notified) as follower:
        monkeypatch.setattr(checkpoint, "save", full)
        follower.save()
        follower.save()
        assert 2 == follower.health.save_failures
    assert [f"{tmp_path / checkpoint.HIDDEN} can't be written: No space left on device."] == notified


@pytest.mark.parametrize("name", ["checkpoint.new", "lock"])
def test_no_link_in_the_state_folder_is_followed(tmp_path: Path, name: str) -> None:
    """The engine's container may write beside the journals, and would choose what is overwritten."""
    journals.clean(tmp_path / "engine")
    state = tmp_path / checkpoint.HIDDEN
    state.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (state / name).symlink_to(victim)
    if name == "lock":
        with pytest.raises(OSError, match="Is a link"):
            Follower(tmp_path, state)
    else:
        with following(tmp_path) as follower:
            follower.save()
            assert 0 == follower.health.save_failures
    assert "precious" == victim.read_text()
    assert not (state / checkpoint.NAME).is_symlink()


def test_a_checkpoint_that_is_a_pipe_or_a_link_is_not_read(tmp_path: Path) -> None:
    """Opening a pipe without a writer would block for ever."""
    journals.clean(tmp_path / "engine")
    state = tmp_path / checkpoint.HIDDEN
    state.mkdir()
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        make(state / checkpoint.NAME)
        with following(tmp_path) as follower:
            assert {"checkpoint damaged": 1} == follower.health.lost
            assert 1 == ended(follower)
        (state / checkpoint.NAME).unlink()


def test_a_state_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could replace the checkpoint. Root's folder is as safe as root."""
    journals.clean(tmp_path / "engine")
    state = tmp_path / "state"
    state.mkdir()
    owner = os.stat(state).st_uid
    if owner == 0:
        os.chown(state, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LedgerError, match=r"belongs to user \d+, who could change what"):
        Follower(tmp_path, state)


def test_a_state_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    journals.clean(tmp_path / "engine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="is a link"):
        Follower(tmp_path, tmp_path / "state")


def test_the_state_is_its_users_alone_and_leaves_no_drafts(tmp_path: Path) -> None:
    journals.clean(tmp_path / "engine")
    state = tmp_path / checkpoint.HIDDEN
    before = os.umask(0)
    try:
        with following(tmp_path):
            pass
        (state / "checkpoint.0123456789abcdef.new").write_text("of a sidecar that was killed")
        with following(tmp_path):
            pass
    finally:
        os.umask(before)
    assert 0o700 == state.stat().st_mode & 0o777
    assert {"checkpoint": 0o600, "lock": 0o600} == {
        path.name: path.stat().st_mode & 0o777 for path in state.iterdir()
    }


def test_a_journal_that_is_removed_and_made_again_is_followed_on(tmp_path: Path) -> None:
    """Its counters do not fall, and later requests are counted."""
    engine = Engine(tmp_path / "engine")
    engine.serve()
    with following(tmp_path) as follower:
        before = counted(follower.audits)
        shutil.rmtree(tmp_path / "engine")
        follower.poll()
        assert rose(before, counted(follower.audits))
        engine.writer.recreate()
        engine.rotate()
        engine.serve()
        follower.poll()
        assert rose(before, counted(follower.audits))
        assert 2 == ended(follower)
    engine.stop()


def test_journals_of_ended_engines_that_come_back_are_not_counted_again(tmp_path: Path) -> None:
    """As after a volume was unmounted and mounted; a restart of the sidecar in between changes nothing."""
    folder, aside = tmp_path / "journals", tmp_path / "aside"
    folder.mkdir()
    for number in range(3):
        engine = Engine(folder / f"engine-{number}", wall_seconds=1.7e9 + number)
        engine.serve()
        engine.stop()
    with following(folder, folder=tmp_path / "state") as follower:
        before = counted(follower.audits)
        folder.rename(aside)
        folder.mkdir()
        follower.poll()
        assert {} == follower.journals
    with following(folder, folder=tmp_path / "state") as follower:
        folder.rmdir()
        aside.rename(folder)
        follower.poll()
        assert before == counted(follower.audits)
        shutil.rmtree(folder / "engine-1")
        follower.poll()
        other = Engine(folder / "engine-1", wall_seconds=1.8e9)
        other.serve()
        follower.poll()
        assert before != counted(follower.audits), "another journal with the name is read"
    other.stop()


def test_it_stops_between_batches_and_saves(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "engine")
    engine.serve()
    stop = threading.Event()
    with following(tmp_path) as follower:
        thread = threading.Thread(target=follower.follow, args=(stop,))
        thread.start()
        engine.serve()
        time.sleep(2 * sidecar_follower.POLL_SECONDS)
        stop.set()
        thread.join(HANGS)
        assert not thread.is_alive()
    saved = checkpoint.load(tmp_path / checkpoint.HIDDEN)
    assert saved is not None
    assert (
        2 == serialize.restore(bytes(saved.journals[0].engine_audit), FollowedAudit(tmp_path)).closed.requests
    )
    engine.stop()


# --- the label of metrics -----------------------------------------------------------------------------------


def labels(follower: Follower) -> list[str]:
    with follower.lock:
        return [engine_label(engine_audit) for engine_audit in follower.audits]


def test_a_restarted_engine_continues_its_series(tmp_path: Path) -> None:
    """Also with another process id and another release; the info metric says which."""
    first = Engine(tmp_path / "engine-1", model="m")
    first.serve()
    with following(tmp_path) as follower:
        before = counted(follower.audits)
        first.stop()
        second = Engine(tmp_path / "engine-2", 7, 1.8e9, "m", version="0.33.0")
        second.serve()
        follower.poll()
        after = counted(follower.audits)
        assert 1 == len(set(labels(follower)))
    second.stop()

    assert before.keys() == after.keys()
    assert rose(before, after)


def test_live_engines_of_one_model_have_numbers_that_a_restart_keeps(tmp_path: Path) -> None:
    engines = [Engine(tmp_path / f"engine-{number}", number, model="m") for number in range(3)]
    with following(tmp_path) as follower:
        assert [f"m / engine {number}" for number in range(3)] == labels(follower)
        engines[1].stop()
        follower.poll()
        engines[1] = Engine(tmp_path / "engine-3", 9, model="m")
        follower.poll()
        assert "m / engine 1" == labels(follower)[-1]
        follower.save()
    with following(tmp_path) as follower:
        assert [0, 1, 2, 1] == [int(label[-1]) for label in labels(follower)]
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize(
    "settings, label",
    [
        ({}, "vllm / engine 0"),
        ({"model": "m", "engine_index": 3}, "m / engine 3"),
        ({"model": "m", "instance": "node-1", "instance_given": False}, "m / engine 0"),
        ({"model": "m", "instance": "left", "instance_given": True}, "m / engine 0 on left"),
    ],
)
def test_the_label_of_an_engine(settings: dict[str, Any], label: str, tmp_path: Path) -> None:
    journals.write(tmp_path / "engine", HISTORY, configuration=settings)
    with following(tmp_path) as follower:
        assert [label] == labels(follower)
