"""KV events of the real scheduler, and of a real engine over ZeroMQ, beside the blocks that were observed."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.engines.observed import observe
from tests.engines.own_process import python
from tests.exporters.sidecar.test_follower import following
from tests.exporters.sidecar.test_live_routing import counts, same
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.kv_stream import KEY, Publisher, compare

from kvledger.audit.analysis.routing import EVENT_LOST, EVICTED, STORED_SINCE
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStarted, Event, KVEventsReceived
from kvledger.audit.hash_key import HashKey
from kvledger.audit.journal.reader import Reader
from kvledger.audit.ledger.kv_events import (
    AGAIN,
    CLEARED,
    ORPHAN,
    REMOVED,
    STORED,
    CopyRemoved,
    Found,
    KVEventCounts,
    Unfounded,
    kv_events,
)
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.recorded_events import routing
from kvledger.exporters.kv_events import Received, decoded

PUBLISHING = [
    name
    for name in SCENARIOS
    if not any(word in name for word in ("encoder", "no_caching")) and not SCENARIOS[name].lacking()
]


class Compared(NamedTuple):
    """What the comparison of a scenario found, and the stream."""

    found: list[Found]
    counts: KVEventCounts
    stream: list[KVEventsReceived]

    @property
    def others(self) -> list[tuple[int, int]]:
        """What was found beside removals of copies: its kind, and how many KV events it is about."""
        others = [each for each, _, _ in self.found if not isinstance(each, CopyRemoved)]
        return [(each.kind, each.total) for each in others if isinstance(each, Unfounded)] or others


FAULTS = {
    "hits_reported_full": [(AGAIN, 6)],
    "hits_reported_window": [(AGAIN, 9), (STORED, 3)],
    "prompt_ends_within_a_block": [(ORPHAN, 2)],
}
"""Scenarios in which every release that can run them publishes wrong KV events."""


def driven(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Event], EngineStarted, list[KVEventsReceived]]:
    """Drive a scenario with KV events enabled: the events of the engine, its start, and the stream."""
    monkeypatch.setenv("KVLEDGER_EVENTS_KEY", KEY)
    publishers = list[Publisher]()

    def drive(attach: Any) -> None:
        SCENARIOS[name](lambda scheduler: (publishers.append(Publisher(scheduler)), attach(scheduler)))

    _, events = observe(drive, "blocks")
    (publisher,) = publishers
    started = next(event for event in events if isinstance(event, EngineStarted))
    key = HashKey(KEY).print
    assert (key, 5557) == tuple(started.configuration[name] for name in ("hash_key", "kv_events_port"))
    stream = publisher.stream()
    assert not sum(batch.unreadable for batch in stream)
    return events, started, stream


def compared(name: str, monkeypatch: pytest.MonkeyPatch) -> Compared:
    """Drive a scenario with KV events enabled, and compare them with the blocks."""
    events, _, stream = driven(name, monkeypatch)
    found, counts = compare(events, stream, step_by_step=True)
    assert (0, 0) == (counts.gaps, counts.lost_batches)
    whole = Compared(*compare(events, stream), stream)
    assert sorted(found, key=repr) == sorted(whole.found, key=repr)
    return whole


def copies_removed(stream: Sequence[KVEventsReceived]) -> int:
    """How many removals a stream announces of hashes of which it has announced more stores than removals."""
    blocks, copies = Counter[int](), 0
    for batch in stream:
        for event, _ in kv_events(batch):
            if event.kind == CLEARED:
                blocks.clear()
            else:
                blocks[event.hash_id] += 1 if event.kind == STORED else -1
                copies += event.kind == REMOVED and blocks[event.hash_id] > 0
    return copies


@pytest.mark.parametrize("name", PUBLISHING)
def test_kv_events_of_a_scenario_equal_its_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compared(name, monkeypatch)

    assert FAULTS.get(name, []) == whole.others
    if name not in FAULTS:
        assert copies_removed(whole.stream) == len(whole.found)
    assert (0, 0) == (whole.counts.in_flight, whole.counts.before)


def test_a_crowd_caches_the_same_tokens_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared("crowd_hybrid", monkeypatch).found


def test_token_ids_are_not_in_the_journal() -> None:
    event = ["BlockStored", [7], None, [31337] * 16, 16, None, "GPU"]
    payload = msgspec.msgpack.encode([1.0, [event], 0])

    stored = decoded(Received(0, payload, False), 0, 0, HashKey(KEY))

    assert 31337 not in stored.rows and 7 not in stored.rows
    assert b"\xcd\x7ai" not in msgspec.msgpack.encode(stored)
    with pytest.raises(LedgerError, match="16"):
        HashKey("short")


# --- over ZeroMQ ----------------------------------------------------------------------------------------

LOST = {5, 6, *range(20, 40)}


def free_ports() -> list[int]:
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def hash_ids(recording: Path, sequences: set[int]) -> list[tuple[int, int]]:
    """What the batches with these numbers say: kind and hash id."""
    batches = []
    with Reader(recording) as reader:
        for batch in reader.poll():
            batches += [each for each in batch.events if isinstance(each, KVEventsReceived)]
    wanted = {batch.sequence: batch for batch in batches if batch.sequence in sequences}
    said = [event for sequence in sorted(wanted) for event, _ in kv_events(wanted[sequence])]
    return [(event.kind, event.hash_id) for event in said]


@pytest.mark.whole_engine
def test_a_real_engines_kv_events_equal_its_blocks_and_each_loss_is_found(tmp_path: Path) -> None:
    python("-m", "tests.engines.kv_events_run", tmp_path, ",".join(map(str, LOST)), *map(str, free_ports()))
    result = json.loads((tmp_path / "result.json").read_text())
    whole, lossy = (audit_paths([tmp_path / name]) for name in ("whole", "lossy"))

    assert result["preemptions"] and "clean" == whole.verdict
    assert any("batches of KV events agree with the cache" in note for note in whole.notes)
    gaps = [each for each in lossy.violations if each.severity == "violation"]
    assert [("events/gap", 5, 6), ("events/gap", 20, 39)] == [
        (gap.id, gap.figures["first"], gap.figures["last"]) for gap in gaps
    ]
    (recording,) = (tmp_path / "whole").glob("events-*")
    for gap in gaps:
        numbers = set(range(int(gap.figures["first"]), int(gap.figures["last"]) + 1))
        truth = hash_ids(recording, numbers)
        kinds = [kind for kind, _ in truth]
        assert [kinds.count(kind) for kind in (STORED, REMOVED, CLEARED)] == [
            gap.figures[name] for name in ("stores", "removals", "resets")
        ]
        if len(truth) <= 8:
            shown = "\n".join(gap.story)
            assert all(f"h{hash_id & 2**64 - 1:x}" in shown for _, hash_id in truth)
    _check_routing(tmp_path)
    _check_sidecar(tmp_path)


def _check_sidecar(folder: Path) -> None:
    """A sidecar over both recordings counts what the commands find."""
    for name in ("whole", "lossy"):
        with following(folder / name) as follower:
            live = counts(follower)
            same(folder / name, live)
            (audit,) = follower.audits
            gaps = [each for each in audit.violations if each.severity == "violation"]
        lost = LOST if name == "lossy" else set[int]()
        assert (len(lost), 0) == (live.lost_batches, live.not_routed)
        assert ["events/gap"] * live.gaps == [each.id for each in gaps]
        for gap in gaps:
            assert set(range(int(gap.figures["first"]), int(gap.figures["last"]) + 1)) <= lost


def _check_routing(folder: Path) -> None:
    """The causes add up in both recordings, and only the lossy one has lost events among them."""
    for name, lost in (("whole", set()), ("lossy", {"missed", "surplus"})):
        result = routing(journals_at([folder / name]))
        causes = result.causes()
        missed, surplus = (
            sum(tokens for (each, _), (_, tokens) in causes.items() if each == side)
            for side in ("missed", "surplus")
        )
        assert 50 < len(result.rows)
        assert missed - surplus == sum(row.predicted - row.found for row in result.rows)
        assert lost == {side for side, cause in causes if cause == EVENT_LOST}
        assert {EVENT_LOST, EVICTED, STORED_SINCE} >= {cause for _, cause in causes}
