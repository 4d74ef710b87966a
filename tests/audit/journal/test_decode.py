"""Batches that no engine wrote: refused with a sentence, in bounded memory and time."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import fields
from tests import journals

from kvledger.audit import events as ev
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal import format as seg
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.reader import Damage, NewerBatch, Reader, UnreadableBatch, decode_batch
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.text import _cleaners, cut_id, printable, shown_id

HUGE = 1 << 62


def encoded(*events: Any) -> memoryview:
    return memoryview(msgspec.msgpack.encode([0, 0, list(events)]))


def calls(*rows: int, by: tuple[str, ...] = ("f",)) -> ev.PoolCalls:
    return ev.PoolCalls(5, 1, by, list(rows))


IMPOSSIBLE = [
    (ev.Repeated(5, -1), "Expected `int` >= 0 in event 1 of the batch"),
    (ev.Repeated(5, HUGE), "Expected `int` <= 4294967296 in event 1 of the batch"),
    (ev.Repeated(-5, 1), "Expected `int` >= 0 in event 1 of the batch"),
    (ev.Snapshot(5, 1, [], -1), "Expected `int` >= 0 in event 1 of the batch"),
    (ev.Snapshot(5, 1, [], HUGE), "Expected `int` <= 4096 in event 1 of the batch"),
    (
        ev.Snapshot(5, 1, [ev.SnapshotRow(1, "r", -8, True, 0, 0, 0, 8, 0)], 0),
        "request 1 has -8 prompt tokens",
    ),
    (
        ev.Snapshot(5, 1, [ev.SnapshotRow(1, "r", 8, True, HUGE, 0, 0, 8, 0)], 0),
        "request 1 has a count beyond",
    ),
    (ev.RequestAdded(5, 1, "r", -8), "prompt_tokens is -8"),
    (ev.RequestAdded(5, 1, "r", HUGE), f"prompt_tokens is {HUGE}"),
    (ev.Stepped(5, 1, [1, 8, 0], []), "changed does not hold four numbers for each request"),
    (ev.Stepped(5, 1, [1, -8, 0, 8], []), "a request has a negative number of scheduled tokens"),
    (ev.Stepped(5, 1, [1, HUGE, 0, 8], []), "changed holds a number beyond"),
    (ev.Delivered(5, [1], []), "changed does not hold two numbers for each request"),
    (ev.DeliveredWhole(5, [1, 2], b"1"), "2 requests have 1 counts of sampled tokens"),
    (ev.Census(5, 1, [1, 2, 3], 0, 0, 0), "rows does not hold five numbers for each request"),
    (ev.Census(5, 1, [], 0, 0, 0, misqueued={"r": -1}), "a request has a negative number of places"),
    (ev.PoolSeen(5, 1, 0, 9, 0, 8, 0, [0, 16]), "groups does not hold three numbers for each group"),
    (ev.PoolSeen(5, 1, 0, 9, 0, 8, 0, [0, 0, 2]), "a block of a group holds no token"),
    (ev.PoolSeen(5, 1, 0, -9, 0, 8, 0, []), "blocks is -9"),
    (calls(0, 1, 0), "rows ends within the header of a call"),
    (calls(0, 1, 0, 0, -5), "a call is followed by -5 numbers"),
    (calls(0, 1, 0, 0, HUGE), "rows ends before its last call does"),
    (calls(0, 1, 0, 0, 2, 7), "rows ends before its last call does"),
    (calls(0, 1, 0, 1, 1, 7), "a call names operation 1 of 1"),
    (calls(2, 1, 0, 0, 1, 7), "a call of kind 2 is followed by 1 numbers"),
    (calls(3, 1, 0, 0, 2, 7, 7), "a call of kind 3 is followed by 2 numbers"),
    (calls(4, -1, -1, 0, 4, 1, 0, 8, -3), "a call has a count of -3"),
    (ev.BlocksCached(5, 1, 0, [1, 0, 8, HUGE]), "rows ends before its last row does"),
    (ev.BlocksCached(5, 1, 0, [1, 0, 8, -1]), "rows has a count of -1"),
    (ev.BlockCopied(5, 1, 0, 1, 0, "f", [7], False), "a copy has no source and target"),
    (ev.BlocksPromised(5, 1, 1, 0, 16, 0, [7]), "block_tokens is 0"),
    (ev.BlocksAllocated(5, 1, 0, "f", [1, 0, 9]), "rows ends before its last row does"),
    (ev.BlocksFreed(5, 1, 0, 1, 0, "f", [7], []), "1 blocks have 0 reference counts"),
    (ev.TablesReported(5, 1, [1, 0, 8, -HUGE]), f"rows has a count of {-HUGE}"),
]


@pytest.mark.parametrize(("event", "phrase"), IMPOSSIBLE, ids=lambda value: type(value).__name__)
def test_an_impossible_event_makes_its_batch_unreadable(tmp_path: Path, event: ev.Event, phrase: str) -> None:
    folder = tmp_path / "engine-1-2-3"
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write([journals.STARTED, ev.Snapshot(0, 0, [], 0)])
    writer.write([event])
    writer.write([ev.EngineStopped(9, "shutdown")])
    writer.close()
    damage: list[Damage] = []

    kinds = [type(each) for _, each in read(folder, damage=damage)]

    assert [ev.EngineStarted, ev.Snapshot, ev.Gap, ev.EngineStopped] == kinds
    assert ["unreadable batch"] == [one.reason for one in damage]
    assert phrase in damage[0].detail
    assert "unknown" == audit_paths([folder]).verdict


def test_a_snapshot_with_many_steps_in_flight_is_replayed_in_bounded_time(tmp_path: Path) -> None:
    """Each of the steps in flight was one turn of a loop for each repeated step."""
    request = ev.SnapshotRow(1, "r", 8, False, 8, 0, 0, 9, 0)
    stream = [
        ev.Snapshot(1, 1, [request], 4096),
        ev.Stepped(2, 2, [1, 1, 0, 9], []),
        ev.Repeated(3, 1 << 32),
    ]

    audit = audit_paths([journals.write(tmp_path / "engine-1-2-3", stream)])

    assert "unknown" == audit.verdict


# --- memory -------------------------------------------------------------------------------------------------


def test_a_large_batch_of_tiny_events_is_refused_before_it_is_decoded() -> None:
    tiny = bytes([0x93, 16, 1, 1])
    data = memoryview(b"\x93\x00\x00\xdd" + (15_000_000).to_bytes(4, "big") + tiny * 15_000_000)
    tracemalloc.start()

    with pytest.raises(UnreadableBatch, match=r"a batch of 60,000,008 bytes holds more than 2 events"):
        decode_batch(data)

    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("count", [seg.MOST_SNAPSHOT_ROWS + 1, (1 << 32) - 1])
def test_a_snapshot_of_more_requests_than_an_engine_holds_is_refused(count: int) -> None:
    rows = b"\xdd" + count.to_bytes(4, "big") + bytes(seg.LARGEST_EVENT_BYTES)
    data = b"\x93\x00\x00\x91" + bytes([0x95, 23, 1, 1]) + rows + b"\x00"

    with pytest.raises(UnreadableBatch):
        decode_batch(memoryview(data))


def test_another_event_larger_than_the_bound_is_refused() -> None:
    census = ev.Census(1, 1, [1] * (seg.LARGEST_EVENT_BYTES + 5), 0, 0, 0)

    with pytest.raises(UnreadableBatch, match="is no snapshot of an engine"):
        decode_batch(encoded(journals.STARTED, census))


def test_a_large_snapshot_of_many_requests_is_read() -> None:
    rows = [ev.SnapshotRow(i, f"{i:064}", 8, True, 0, 0, 0, 8, 0) for i in range(120_000)]

    payload = decode_batch(encoded(journals.STARTED, ev.Snapshot(0, 0, rows, 0)))

    assert 120_000 == len(payload.events[1].rows)


def test_the_writer_keeps_the_bounds_of_the_reader(tmp_path: Path) -> None:
    large = ev.Census(1, 1, [1 << 40] * (seg.LARGEST_EVENT_BYTES // 9 + 5), 0, 0, 0)
    writer = JournalWriter(tmp_path)
    writer.rotate()
    writer.write([journals.STARTED, ev.Snapshot(0, 0, [], 0)])
    writer.write([ev.Repeated(1, 1), large, ev.Repeated(2, 1)])
    writer.close()

    events = [event for _, event in read(tmp_path)]

    assert [ev.Gap(1, 1, "an event is too large")] == [e for e in events if isinstance(e, ev.Gap)]
    assert [1, 2] == [event.at for event in events if isinstance(event, ev.Repeated)]


# --- what is no event at all --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "batch",
    [
        [0, 0, [["x", 1]]],
        [0, 0, [[None, 1], [99, 2]]],
        [0, 0, [[-5, 1]]],
        [0, 0, [[[], 1]]],
        [0, 0, [7]],
        [0, 0, 7],
        [-1, 0, []],
        [0, 1 << 63, []],
        7,
    ],
)
def test_bytes_that_are_no_events_are_unreadable_and_no_newer_schema(batch: Any) -> None:
    with pytest.raises(UnreadableBatch):
        decode_batch(memoryview(msgspec.msgpack.encode(batch)))


def test_a_deeply_nested_batch_is_unreadable() -> None:
    with pytest.raises((UnreadableBatch, NewerBatch)):
        decode_batch(memoryview(b"\x93\x00\x00\x91" + b"\x91" * 500_000 + b"\x90"))


@pytest.mark.parametrize("special", ["fifo", "folder", "loop", "device"])
def test_what_is_no_file_but_named_like_a_segment_is_damage(tmp_path: Path, special: str) -> None:
    folder = journals.clean(tmp_path / "engine-1-2-3")
    path = folder / "00000002.kvl"
    if special == "fifo":
        os.mkfifo(path)
    elif special == "folder":
        path.mkdir()
    elif special == "loop":
        path.symlink_to(path)
    else:
        path.symlink_to("/dev/zero")
    damage: list[Damage] = []

    kinds = [type(event) for _, event in read(folder, damage=damage)]

    assert ev.EngineStopped in kinds and ev.Gap is kinds[-1]
    assert ["00000002.kvl"] == [one.segment for one in damage]
    assert "unknown" == audit_paths([folder]).verdict
    with pytest.raises(LedgerError):
        find_journals([path])


def test_a_fifo_in_the_place_of_the_lock_does_not_block(tmp_path: Path) -> None:
    folder = journals.clean(tmp_path / "engine-1-2-3")
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")

    reader = Reader(folder)
    list(reader.poll())

    assert reader.ended


# --- text ---------------------------------------------------------------------------------------------------


def test_every_field_with_text_is_made_printable() -> None:
    for kind in get_args(ev.AnyEvent):
        cleaned = {name for name, _ in _cleaners(kind)}
        text = {
            field.name
            for field in fields(kind)
            if any(word in str(field.type) for word in ("str", "SnapshotRow", "RequestLabels"))
        }
        assert text == cleaned, kind.__name__


def test_control_and_format_characters_are_escaped_when_an_event_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "engine-1-2-3"
    hostile = "a\x1b[2J\x9b\x00\u202e\u2066b\nc"
    stream = [ev.RequestAdded(1, 1, hostile, 8), ev.FreeDelayed(2, 1, 1, hostile, 3)]
    journals.write(folder, stream, configuration={"model": hostile})

    events = [event for _, event in read(folder)]

    shown = "a\\x1b[2J\\x9b\\x00\\u202e\\u2066b\\nc"
    assert [shown, shown] == [e.request_id for e in events if isinstance(e, ev.RequestAdded | ev.FreeDelayed)]
    assert [shown] == [e.configuration["model"] for e in events if isinstance(e, ev.EngineStarted)]


def test_printable_text_stays_as_it_is() -> None:
    for text in ("cmpl-1", "приклад", "模型", "a b", 'say "x"', "\\x1b"):
        assert text == printable(text) == shown_id(text)


def test_a_long_id_is_cut_and_two_long_ids_stay_apart() -> None:
    first, second = cut_id("r" * 300 + "1"), cut_id("r" * 300 + "2")

    assert [256, 256] == [len(first), len(second)]
    assert first != second
    assert first == cut_id(first) == shown_id(first)
    assert "r" * 256 == cut_id("r" * 256)
    assert 256 >= len(shown_id("\x1b" * 400))
