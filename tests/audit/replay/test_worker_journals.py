"""Workers' journals, read along with that of their engine."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests import journals
from tests.audit.checks.false_reports import place
from tests.audit.checks.test_connector import STEP, with_worker, worked

from kvledger.audit.events import Delivered, EngineStopped, Event, Gap, Snapshot, WorkerStepped
from kvledger.audit.journal.folder import find_journals
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journals import Audit, audit_paths
from kvledger.exporters.sidecar.follower import Follower

ENGINES = {"transfer": "t", "groups": 1, "deferred_loads": False}
STARTED = {"transfer": "t", "rank": 0}
IDLE = worked(STEP, started=False)
"""A worker's step whose plan names the promised blocks, and which never begins to load them."""


def engine(folder: Path, words: str = "A0+160 s40 o+ F") -> Path:
    return journals.write(folder / "engine-1-7-0", with_worker(words), configuration={**ENGINES})


def worker(folder: Path, *said: Event, transfer: str = "t", name: str = "worker-1-8-0") -> Path:
    return journals.write(folder / name, said, configuration={**STARTED, "transfer": transfer})


def found(audit: Audit) -> list[str]:
    return [violation.id for violation in audit.violations]


def test_a_worker_is_heard_where_its_engine_is_audited(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, IDLE)

    audit = audit_paths([tmp_path])

    assert (1, ["connector/promise-not-loaded"]) == (len(audit.engines), found(audit))
    assert ("violated", {"never_loaded": 160}) == (audit.verdict, audit.totals.voided)


def test_the_engine_alone_is_audited_with_its_workers_beside_it(tmp_path: Path):
    worker(tmp_path, IDLE)

    assert ["connector/promise-not-loaded"] == found(audit_paths([engine(tmp_path)]))


@pytest.mark.parametrize(
    "said",
    [(worked(STEP),), (worked(STEP + 1_000, started=False),), (Gap(0, 1, "full"), IDLE)],
    ids=["it loads", "a step that the engine never took", "events of it were lost"],
)
def test_a_worker_that_is_not_to_blame(tmp_path: Path, said: tuple[Event, ...]):
    engine(tmp_path)
    worker(tmp_path, *said)

    assert "clean" == audit_paths([tmp_path]).verdict


def test_the_worker_of_another_engine_is_not_heard(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, IDLE, transfer="another")

    assert "clean" == audit_paths([tmp_path]).verdict


def test_a_workers_journal_is_none_of_an_engine(tmp_path: Path):
    alone = worker(tmp_path, worked(STEP))

    assert [engine(tmp_path)] == find_journals([tmp_path])
    assert [alone] == find_journals([alone])


def test_each_worker_is_heard(tmp_path: Path):
    """The second of two does not load: what it does not hold, the model reads."""
    second = WorkerStepped(0, STEP, 1, False, list(range(100, 110)), 0, -1, True, [], [], [], [])
    engine(tmp_path)
    worker(tmp_path, worked(STEP))
    worker(tmp_path, second, name="worker-1-9-0")

    assert ["connector/promise-not-loaded"] == found(audit_paths([tmp_path]))


def test_a_live_engine_is_followed_and_its_worker_is_late(tmp_path: Path):
    """The worker writes after the engine: the finding comes late, and once."""
    stream = with_worker("A0+160 s40 o+ (s1 o+)x3 F")
    half = place(stream, Delivered, 1)
    folder = tmp_path / "engine-1-7-0"
    writer = JournalWriter(folder)
    writer.rotate()
    started = replace(journals.STARTED, configuration={**ENGINES})
    writer.write([started, Snapshot(0, 0, [], 0), *stream[:half]])
    with Reader(folder) as reader:
        book = EngineAudit(folder)
        book.read(reader)
        assert [] == book.violations
        worker(tmp_path, IDLE)
        writer.write([*stream[half:], EngineStopped(1_000_000, "shutdown")])
        writer.close()
        book.read(reader)

    (violation,) = book.violations
    assert ("connector/promise-not-loaded", 0) == (violation.id, violation.repeats)
    assert (160, 0) == (book.totals().promised, book.totals().loaded)


def test_a_follower_takes_no_worker_for_an_engine(tmp_path: Path):
    engine(tmp_path)
    worker(tmp_path, IDLE)
    follower = Follower(tmp_path)
    follower.catch_up(threading.Event())

    assert ["engine-1-7-0"] == list(follower.journals)
    assert "violated" == follower.journals["engine-1-7-0"].engine_audit.verdict
