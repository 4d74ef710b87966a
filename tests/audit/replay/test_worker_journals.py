"""Workers' journals, read together with the journal of their engine."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.checks.false_reports import index_of
from tests.audit.checks.test_connector import STEP, with_worker, worker_step

from kvledger.audit.events import (
    BlocksMoved,
    ContentCounted,
    Delivered,
    EngineRaised,
    EngineStopped,
    Event,
    Gap,
    Snapshot,
    WorkerStepped,
)
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.reader import Position, Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay import checkpoint, worker_journals
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journals import Audit, audit_paths
from kvledger.audit.replay.windows import Window
from kvledger.exporters.facts import kept
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.sidecar.follower import Follower

ENGINES = {"transfer": "t", "groups": 1, "deferred_loads": False}
STARTED = {"transfer": "t", "rank": 0}
IDLE = worker_step(STEP, started=False)
"""A worker's step with the promised blocks in its metadata, which never begins the load."""


def engine(folder: Path, words: str = "A0+160 s40 o+ F") -> Path:
    return journals.write(folder / "engine-1-7-0", with_worker(words), configuration={**ENGINES})


def worker(folder: Path, *recorded: Event, transfer: str = "t", name: str = "worker-1-8-0") -> Path:
    return journals.write(folder / name, recorded, configuration={**STARTED, "transfer": transfer})


def violation_ids(audit: Audit) -> list[str]:
    return [violation.id for violation in audit.violations]


def test_a_workers_journal_is_read_with_its_engines(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, IDLE)

    audit = audit_paths([tmp_path])

    assert (1, ["connector/promise-not-loaded"]) == (len(audit.engines), violation_ids(audit))
    assert ("violated", {"never_loaded": 160}) == (audit.verdict, audit.totals.voided)


def test_a_path_to_the_engine_alone_includes_its_workers(tmp_path: Path):
    worker(tmp_path, IDLE)

    assert ["connector/promise-not-loaded"] == violation_ids(audit_paths([engine(tmp_path)]))


@pytest.mark.parametrize(
    "recorded",
    [(worker_step(STEP),), (worker_step(STEP + 1_000, started=False),), (Gap(0, 1, "full"), IDLE)],
    ids=["it loads", "a step that the engine never took", "events of it were lost"],
)
def test_a_worker_without_proof_of_a_skipped_load_is_clean(tmp_path: Path, recorded: tuple[Event, ...]):
    engine(tmp_path)
    worker(tmp_path, *recorded)

    assert "clean" == audit_paths([tmp_path]).verdict


def test_an_exception_of_a_worker_is_a_doubt_of_its_engine(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, worker_step(STEP), EngineRaised(0, "connector.start_load_kv", "OSError", True))

    audit = audit_paths([tmp_path])

    assert ("unknown", 0) == (audit.verdict, audit.totals.unknown_requests)
    assert ["the engine raised OSError in connector.start_load_kv"] == audit.engines[0].doubts


@pytest.mark.parametrize(
    ("window", "verdict"),
    [
        (Window(), "unknown"),
        (Window(since=journals.STARTED.began_seconds), "unknown"),
        (Window(since=journals.STARTED.began_seconds + 31), "clean"),
        (Window(until=journals.STARTED.began_seconds + 29), "clean"),
        (Window(until=journals.STARTED.began_seconds + 31), "unknown"),
    ],
    ids=["everything", "since the start", "since later", "until before", "until later"],
)
def test_an_exception_of_a_worker_has_a_time_of_its_own(tmp_path: Path, window: Window, verdict: str):
    """Its journal may be read before the engine's: then no event of the engine says when it was."""
    engine(tmp_path)
    worker(tmp_path, worker_step(STEP), EngineRaised(30_000_000, "connector.start_load_kv", "OSError", True))

    assert verdict == audit_paths([tmp_path], window=window).verdict


def test_the_worker_of_another_engine_is_ignored(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, IDLE, transfer="another")

    assert "clean" == audit_paths([tmp_path]).verdict


def test_find_journals_returns_a_workers_journal_only_by_its_own_path(tmp_path: Path):
    alone = worker(tmp_path, worker_step(STEP))

    assert [engine(tmp_path)] == find_journals([tmp_path])
    assert [alone] == find_journals([alone])


def test_every_worker_of_an_engine_is_read(tmp_path: Path):
    """The second of two workers does not load, so the model reads blocks without KV on it."""
    second = WorkerStepped(0, STEP, 1, False, list(range(100, 110)), 0, -1, True, [], [], [], [])
    engine(tmp_path)
    worker(tmp_path, worker_step(STEP))
    worker(tmp_path, second, name="worker-1-9-0")

    assert ["connector/promise-not-loaded"] == violation_ids(audit_paths([tmp_path]))


def test_a_worker_that_writes_after_its_engine_gives_one_finding(tmp_path: Path):
    """The worker writes after the engine; the finding comes with the worker's events, once."""
    stream = with_worker("A0+160 s40 o+ (s1 o+)x3 F")
    half = index_of(stream, Delivered, 1)
    folder = tmp_path / "engine-1-7-0"
    writer = JournalWriter(folder)
    writer.rotate()
    started = replace(journals.STARTED, configuration={**ENGINES})
    writer.write([started, Snapshot(0, 0, [], 0), *stream[:half]])
    with Reader(folder) as reader:
        engine_audit = EngineAudit(folder)
        engine_audit.read(reader)
        assert [] == engine_audit.violations
        worker(tmp_path, IDLE)
        writer.write([*stream[half:], EngineStopped(1_000_000, "shutdown")])
        writer.close()
        engine_audit.read(reader)

    (violation,) = engine_audit.violations
    assert ("connector/promise-not-loaded", 0) == (violation.id, violation.repeats)
    assert (160, 0) == (engine_audit.totals().promised, engine_audit.totals().loaded)


def test_a_restarted_follower_audits_each_step_of_a_worker_once(tmp_path: Path):
    """It stops twice: after steps that were audited, and with a step that the engine has not taken yet."""
    stream = with_worker("A0+160 s40 o+ (s1 o+)x3 F")
    half = index_of(stream, Delivered, 1)
    sealed = [ContentCounted(0, STEP + later, 0, 3, 2, 1, 100, 7) for later in (0, 0, 1, 2)]
    raised = [EngineRaised(0, "connector.start_load_kv", "OSError", False) for _ in range(2)]
    state = tmp_path / checkpoint.HIDDEN
    writers = [JournalWriter(tmp_path / name) for name in ("engine-1-7-0", "worker-1-8-0")]
    for writer, configuration in zip(writers, (ENGINES, STARTED), strict=True):
        writer.rotate()
        started = replace(journals.STARTED, configuration={**configuration})
        writer.write([started, Snapshot(0, 0, [], 0)])
    parts: list[tuple[list[Event], list[Event]]] = [
        (stream[:half], [worker_step(STEP), *sealed[:1], *raised[:1]]),
        (stream[half : half + 1], [*sealed[1:3], *raised[1:]]),
        ([*stream[half + 1 :], EngineStopped(1_000_000, "shutdown")], sealed[3:]),
    ]
    for of_engine, of_worker in parts:
        writers[1].write(of_worker)
        writers[0].write(of_engine)
        follower = Follower(tmp_path, state, fold=False)
        follower.catch_up(threading.Event())
        follower.close()
    for writer in writers:
        writer.close()

    whole = audit_paths([tmp_path]).engines[0]
    followed = follower.journals["engine-1-7-0"].engine_audit
    assert whole.auditor.ledger.sums.contents == followed.auditor.ledger.sums.contents
    assert (12, 8) == tuple(whole.auditor.ledger.sums.contents[name] for name in ("sealed", "compared"))
    assert whole.auditor.ledger.sums.engine_errors == followed.auditor.ledger.sums.engine_errors
    assert 2 == sum(followed.auditor.ledger.sums.engine_errors.values())
    assert whole.totals() == followed.totals()


def test_a_follower_does_not_follow_a_worker_as_an_engine(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, IDLE)
    follower = Follower(tmp_path)
    follower.catch_up(threading.Event())

    assert ["engine-1-7-0"] == list(follower.journals)
    assert "violated" == follower.journals["engine-1-7-0"].engine_audit.verdict


def test_a_worker_of_another_engine_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However many engines are audited: restarts leave many journals of engines and of workers."""
    for number in range(5):
        worker(tmp_path, IDLE, transfer=f"other-{number}", name=f"worker-{number}-8-0")
    opened: list[str] = []

    def counting(path: Path, start: Position) -> Reader:
        opened.append(path.name)
        return Reader(path, start)

    monkeypatch.setattr(worker_journals, "Reader", counting)
    for number in range(5):
        folder = tmp_path / f"engine-{number}-7-0"
        journals.write(folder, with_worker("A0+160 s40 o+ F"), configuration={**ENGINES})
        engine_audit = EngineAudit(folder)
        with Reader(folder) as reader:
            engine_audit.read(reader)

    assert sorted(opened) == [f"worker-{number}-8-0" for number in range(5)]


def test_transfers_of_a_worker_are_read_with_its_engines(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, BlocksMoved(0, STEP, 0, False, 0, "key", True, [3], b"0" * 16))

    (audited,) = audit_paths([tmp_path]).engines

    assert {"unmatched": 1} == audited.auditor.ledger.sums.transfers


@pytest.mark.parametrize("first", [3, -1])
def test_kept_facts_have_what_a_worker_did_not_load(first: int, tmp_path: Path):
    """The journal is compacted after its ``first`` events, and again after each later one."""
    stream = with_worker("A0+160 s40 o+ (s1 o+)x3 F")
    folder = tmp_path / "engine-1-7-0"
    worker(tmp_path, IDLE)
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write([replace(journals.STARTED, configuration={**ENGINES}), Snapshot(0, 0, [], 0)])
    for batch in [stream[:first], *([event] for event in stream[first:])]:
        writer.write(batch)
        assert "" == compact(folder).problem
    writer.close()
    assert "" == compact(folder).problem

    rolled = summarize([tmp_path])
    shutil.rmtree(tmp_path / kept.FOLDER)
    assert rolled == summarize([tmp_path])
    assert (160, 0) == (rolled[-1].promised, rolled[-1].loaded)
