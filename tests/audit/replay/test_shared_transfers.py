"""What a decode engine loaded is what a prefill engine stored, or a finding names both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.audit.checks.test_custody import HASH, SENT, Engine, prints
from tests.journals import STARTED

from kvledger.audit.checks.registry import Violation
from kvledger.audit.engines.pool.hash_tracker import hash_ids, shared_key
from kvledger.audit.events import BlocksMoved, EngineStarted, EngineStopped, Event, Gap, Snapshot
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.journals import audit_paths
from kvledger.exporters.facts.compact import compact
from kvledger.exporters.reports.audit import report
from kvledger.exporters.reports.page import gather

CHANGED = prints((11, 12), (21, 9), (31, 32))


def journal(folder: Path, engine: Engine, *more: Event, fleet: bool = True, stopped: bool = True) -> Path:
    """Write an engine's events; it shares its store with the engines of its key."""
    events = [
        replace(each, fleet_store=fleet, own_store=False) if isinstance(each, BlocksMoved) else each
        for each in engine.events
        if not isinstance(each, EngineStarted)
    ]
    writer = JournalWriter(folder)
    writer.rotate()
    (started,) = (each for each in engine.events if isinstance(each, EngineStarted))
    writer.write([replace(STARTED, configuration=started.configuration), Snapshot(0, 0, [], 0), *events])
    writer.write([*more, *([EngineStopped(1_000_000, "shutdown")] if stopped else [])])
    writer.close()
    return folder


def prefill(*versions: bytes, key: str = "k", hash_id: int = HASH) -> Engine:
    """An engine that stores a block, with these fingerprints one after the other."""
    engine = Engine()
    engine.begin(0, 1, 1, hash_id=hash_id)
    for data in versions:
        engine.moved(1, True, 1, data, key=key)
    return engine


def decode(data: bytes = SENT, key: str = "k") -> Engine:
    """An engine that loads the block under the same hash."""
    engine = Engine()
    engine.begin(0, 1, 2)
    engine.moved(1, False, 2, data, key=key)
    return engine


Written = Callable[..., tuple[list[Violation], dict[str, int]]]


def audited(*places: Path) -> tuple[list[Violation], dict[str, int]]:
    """The findings about contents, and the counts of the last engine."""
    audit = audit_paths(places)
    counts = audit.engines[-1].auditor.ledger.sums.transfers
    found = [each for each in audit.violations if each.id.startswith("content/")]
    return found, {name: count for name, count in counts.items() if count}


def test_a_block_that_another_engine_stored_is_compared(tmp_path: Path) -> None:
    places = journal(tmp_path / "a", prefill(SENT)), journal(tmp_path / "b", decode())

    assert ([], {"moved": 1}) == audited(*places)
    assert ([], {"unknown": 1}) == audited(places[1])


@pytest.mark.violates("content/transfer")
def test_other_bytes_than_another_engine_stored_are_a_finding(tmp_path: Path) -> None:
    places = journal(tmp_path / "a", prefill(SENT)), journal(tmp_path / "b", decode(CHANGED))

    (found,), counts = audited(*places)

    assert {"transfer_differed": 1} == counts
    assert ("content/transfer", "violation") == (found.id, found.severity)
    assert (([1], "values"), 1) == ((found.figures["layers"], found.figures["part"]), found.step)
    assert "held KV of request r0 in vllm 0.32.0 pid 4000" in found.message
    assert "violated" == audit_paths(places).verdict


def test_a_report_has_the_verdict_of_the_audit(tmp_path: Path) -> None:
    """From the journals, and from what compact kept of them."""
    places = journal(tmp_path / "a", prefill(SENT)), journal(tmp_path / "b", decode(CHANGED))
    replayed = gather(places).report
    for each in places:
        compact(each)
    rolled = gather(places).report

    assert ["violated", "violated"] == [replayed.verdict, rolled.verdict]
    assert replayed.violations == rolled.violations == report(audit_paths(places)).violations


@pytest.mark.near_miss("content/transfer")
@pytest.mark.parametrize(
    "case", ["another version", "another key", "another hash", "undeclared", "lost events", "torn"]
)
def test_no_finding_where_the_stored_bytes_may_not_be_known(tmp_path: Path, case: str) -> None:
    """A prefix that was computed twice, engines of other fleets, and journals that lack events."""
    source = prefill(
        SENT,
        *([CHANGED] if case == "another version" else []),
        key="other" if case == "another key" else "k",
        hash_id=HASH + (case == "another hash"),
    )
    more = [Gap(900_000, 1, "queue full")] if case == "lost events" else []
    fleet = case != "undeclared"
    first = journal(tmp_path / "a", source, *more, fleet=fleet, stopped=case != "torn")
    second = journal(tmp_path / "b", decode(CHANGED), fleet=fleet)

    found, counts = audited(first, second)

    assert [] == found
    assert {"moved" if case == "another version" else "unknown": 1} == counts


class Pool:
    """A pool that publishes no KV events."""


def hash_id(monkeypatch: pytest.MonkeyPatch, key: str) -> int:
    monkeypatch.setenv("KVLEDGER_CONTENT_KEY", key)
    return hash_ids(shared_key(Pool()))(b"a hash of a block")


def test_hash_ids_are_equal_in_engines_with_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    own = hash(b"a hash of a block")
    keys = ("a key of two engines", "another key of two")
    one, two = (hash_id(monkeypatch, key) for key in keys)

    assert hash_id(monkeypatch, keys[0]) == one != two
    assert own not in (one, two)
    assert own == hash_id(monkeypatch, "guessed") == hash_id(monkeypatch, "")
