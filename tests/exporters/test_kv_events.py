"""The recorder of KV events: order, replay, restarts of the publisher, and the formats of releases."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import (
    CLEARED,
    KEYED,
    LOOKAHEAD,
    REMOVED_BLOCKS,
    STORED,
    EngineStarted,
    KVEventsReceived,
)
from kvledger.audit.hash_key import HashKey
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.host_folders import read
from kvledger.exporters.kv_events import Contents, EventRecorder, Received, decoded, key

KEY = HashKey("sixteen characters")


def message(sequence: int, seconds: float, *, replayed: bool = False) -> Received:
    payload = msgspec.msgpack.encode([seconds, [["AllBlocksCleared"]], 0])
    return Received(sequence, payload, replayed)


class Publisher:
    """Sends messages, then stops the recorder. ``past`` is what it repeats when asked."""

    def __init__(self, sent: list[Received], past: list[Received], stop: threading.Event) -> None:
        self._sent, self._past, self._stop = list(sent), past, stop

    def next(self) -> Received | None:
        if self._sent:
            return self._sent.pop(0)
        self._stop.set()
        return None

    def replayed(self, first: int) -> list[Received]:
        return [each._replace(replayed=True) for each in self._past if each.sequence >= first]


def recorded(folder: Path, sent: list[Received], past: list[Received]) -> tuple[Any, list[KVEventsReceived]]:
    stop = threading.Event()
    recorder = EventRecorder(folder, Publisher(sent, past, stop), KEY, "tcp://localhost:5557")
    recorder.run(stop)
    events = [event for _, event in read(recorder.path)]
    started = events[0]
    assert isinstance(started, EngineStarted)
    assert {"hash_key": KEY.print, "kv_events_port": 5557} == started.configuration
    return recorder.sums, [event for event in events if isinstance(event, KVEventsReceived)]


def test_missing_batches_are_asked_for_and_written_in_order(tmp_path: Path):
    every = [message(n, 100.0 + n) for n in range(6)]
    sums, batches = recorded(tmp_path, [*every[:2], *every[4:]], past=every)

    assert list(range(6)) == [each.sequence for each in batches]
    assert (6, 0, 0) == (sums.batches, sums.missing, sums.restarts)


def test_batches_that_nobody_repeats_are_missing(tmp_path: Path):
    every = [message(n, 100.0 + n) for n in range(6)]
    sums, batches = recorded(tmp_path, [*every[:2], *every[4:]], past=[])

    assert ([0, 1, 4, 5], 2) == ([each.sequence for each in batches], sums.missing)


def test_a_restarted_publisher_begins_a_new_stream(tmp_path: Path):
    first, second = [message(n, 100.0 + n) for n in range(3)], [message(n, 200.0 + n) for n in range(2)]
    sums, batches = recorded(tmp_path, [*first, *second], past=[])

    assert [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)] == [(each.stream, each.sequence) for each in batches]
    assert (1, 0) == (sums.restarts, sums.missing)


def test_a_batch_that_came_by_both_sockets_is_written_once(tmp_path: Path):
    every = [message(n, 100.0 + n) for n in range(3)]
    sums, batches = recorded(tmp_path, every, past=every[:2])

    assert ([0, 1, 2], [True, True, False]) == (
        [each.sequence for each in batches],
        [each.replayed for each in batches],
    )
    assert 0 == sums.restarts


def test_a_recording_is_no_journal_of_an_engine(tmp_path: Path):
    recorded(tmp_path, [message(0, 1.0)], past=[])

    with pytest.raises(LedgerError, match="none of an engine"):
        find_journals([tmp_path])


STORED_FIELDS = {
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": [31337] * 32,
    "block_size": 16,
    "lora_id": None,
}
LATER = {
    "medium": "GPU",
    "lora_name": "secret-adapter",
    "extra_keys": [["secret-salt"], None],
    "group_idx": 1,
}


@pytest.mark.parametrize(
    ("event", "group", "tiers"),
    [
        (["BlockStored", *STORED_FIELDS.values()], -1, []),
        (["BlockStored", *STORED_FIELDS.values(), "GPU"], -1, ["GPU"]),
        (["BlockStored", *STORED_FIELDS.values(), *LATER.values(), "full", None], 1, ["GPU"]),
        ({"type": "BlockStored", **STORED_FIELDS, **LATER, "session_id": "x"}, 1, ["GPU"]),
    ],
    ids=["0.9", "0.10", "0.23", "0.24 and later"],
)
def test_a_store_is_read_in_the_format_of_each_release(event: Any, group: int, tiers: list[str]):
    batch = decoded(Received(7, msgspec.msgpack.encode([5.0, [event], 2]), False), 3, 0, KEY)

    ids = [KEY.of_published(number, group) for number in (10, 11, 12)]
    assert [STORED, group, len(tiers) - 1, 16, ids[0], 2, *ids[1:]] == batch.rows
    assert (tiers, 7, 5.0, 2, 0) == (
        batch.tiers,
        batch.sequence,
        batch.published_seconds,
        batch.rank,
        batch.unreadable,
    )
    written = msgspec.msgpack.encode(batch)
    assert b"secret" not in written and msgspec.msgpack.encode(31337) not in written


SINCE_0_24 = {
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "REMOTE",
    "ownership": "disk-0",
    "session_id": "of-a-client",
    "lookahead_token_ids": [[31337], [31337]],
}


def test_what_later_releases_tell_of_a_store_is_kept_without_what_clients_sent():
    event = {"type": "BlockStored", **STORED_FIELDS, **LATER, **SINCE_0_24}
    batch = decoded(Received(7, msgspec.msgpack.encode([5.0, [event], 2]), False), 3, 0, KEY)

    session = KEY.of_tokens(0, list(b"of-a-client"))
    assert ["sliding_window 128"] == batch.kinds
    assert [0, KEYED | LOOKAHEAD, session] == batch.details
    assert ["GPU REMOTE disk-0"] == batch.tiers
    written = msgspec.msgpack.encode(batch)
    assert b"of-a-client" not in written and msgspec.msgpack.encode(31337) not in written


def test_a_block_in_the_engine_s_own_memory_is_in_its_own_tier():
    event = {"type": "BlockStored", **STORED_FIELDS, "medium": "GPU", "locality": "LOCAL"}
    batch = decoded(Received(7, msgspec.msgpack.encode([5.0, [event], 2]), False), 3, 0, KEY)

    assert (["GPU"], []) == (batch.tiers, batch.details)


def test_removals_and_clearings_are_read():
    events = [["BlockRemoved", [11], "CPU"], {"type": "BlockRemoved", "block_hashes": [b"\0" * 24 + b"\x0b"]}]
    payload = msgspec.msgpack.encode([5.0, [*events, {"type": "AllBlocksCleared"}, {"type": "New"}]])
    batch = decoded(Received(0, payload, False), 0, 0, KEY)

    assert [REMOVED_BLOCKS, -1, 0, 0, 0, 1, KEY.of_published(11, 0)] == batch.rows[:7]
    assert [REMOVED_BLOCKS, -1, -1, 0, 0, 1] == batch.rows[7:13]
    assert [CLEARED, -1, -1, 0, 0, 0] == batch.rows[14:]
    assert (["CPU"], 1) == (batch.tiers, batch.unreadable)


def test_damaged_batches_are_counted():
    assert 1 == decoded(Received(0, b"\xc1", False), 0, 0, KEY).unreadable


def test_whole_hashes_and_their_last_eight_bytes_have_one_id():
    whole = bytes(range(32))
    assert KEY.of_published(whole, 3) == KEY.of_published(int.from_bytes(whole[-8:], "big"), 3)
    assert KEY.of_published(whole, 3) == KEY.of_pool(whole + (3).to_bytes(4, "big"))
    assert KEY.of_published(whole, 3) != KEY.of_published(whole, 2)
    assert KEY.of_published(whole, 3) != HashKey("another sixteen c").of_published(whole, 3)


def test_without_a_key_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KVLEDGER_EVENTS_KEY", raising=False)
    with pytest.raises(LedgerError, match="Set KVLEDGER_EVENTS_KEY"):
        key()


def contents(batch: list[dict[str, Any]], known: Contents | None = None) -> list[int]:
    payload = msgspec.msgpack.encode([5.0, [{"type": "BlockStored", **each} for each in batch], 0])
    return decoded(Received(0, payload, False), 0, 0, KEY, contents=known or Contents(KEY)).contents


def stored(hashes: list[int], parent: int | None, tokens: list[int], **more: Any) -> dict[str, Any]:
    return {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": 2, **more}


def test_blocks_of_the_same_tokens_have_one_content_whatever_their_salt():
    plain = contents([stored([1, 2], None, [7, 8, 9, 9])])
    salted = contents(
        [stored([5], None, [7, 8], extra_keys=[["salt"]]), stored([6], 5, [9, 9], lora_name="a")]
    )

    assert plain == salted and 2 == len(set(plain))


@pytest.mark.parametrize(
    "other",
    [
        [stored([1, 2], None, [7, 8, 9, 1])],
        [stored([1, 2], None, [9, 9, 7, 8])],
        [stored([1], None, [9, 9]), stored([2], None, [9, 9])],
    ],
    ids=["another token", "another order", "another place"],
)
def test_blocks_of_other_tokens_or_other_tokens_before_them_differ(other: list[dict[str, Any]]):
    assert contents([stored([1, 2], None, [7, 8, 9, 9])])[1] not in contents(other)


def test_the_content_behind_an_unknown_block_is_unknown():
    known = Contents(KEY)
    assert [0, 0] == contents([stored([3, 4], 2, [7, 8, 9, 9])], known)
    contents([stored([1, 2], None, [7, 8, 9, 9])], known)
    assert 0 not in contents([stored([3, 4], 2, [7, 8, 9, 9])], known)
    assert [0] == contents([stored([3], None, [7])], known)  # fewer tokens than a block has


def test_an_offloading_tier_tells_no_contents_and_takes_none_away():
    """OffloadingConnector of vLLM announces places only: no tokens, and blocks of size 0."""
    known = Contents(KEY)
    contents([stored([1, 2], None, [7, 8, 9, 9])], known)
    after = contents([stored([3], 2, [5, 5])], known)

    assert [0, 0] == contents([stored([1, 2], None, []) | {"block_size": 0, "medium": "CPU"}], known)
    assert after == contents([stored([3], 2, [5, 5])], known)


def test_blocks_that_a_sliding_window_left_out_are_the_first_ones():
    whole = contents([stored([1, 2, 3], None, [7, 8, 9, 9, 5, 6])])
    event = stored([2, 3], None, [7, 8, 9, 9, 5, 6])

    assert whole[1:] == contents([event | {"kv_cache_spec_kind": "sliding_window"}])
    assert [0, 0] == contents([event | {"kv_cache_spec_kind": "mamba"}]) == contents([event])


class Silent:
    """A publisher of nothing; stops the recorder after some waits."""

    def __init__(self, stop: threading.Event) -> None:
        self._waits, self._stop = 3, stop

    def next(self) -> None:
        self._waits -= 1
        if not self._waits:
            self._stop.set()

    def replayed(self, _: int) -> list[Received]:
        return []


@pytest.mark.parametrize("listening", [True, False])
def test_it_is_said_once_if_nothing_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listening: bool
) -> None:
    monkeypatch.setattr("kvledger.exporters.kv_events.SILENT_SECONDS", -1.0)
    stop, said = threading.Event(), list[str]()
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if listening:
            server.listen()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        EventRecorder(tmp_path, Silent(stop), KEY, address).run(stop, said.append)

    assert [] == said if listening else ["nothing listens at" in each for each in said] == [True]


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        [1.0, 2],
        [1.0, {"type": 1}],
        [1.0, None],
        [],
        7,
        [float("nan"), []],
        [float("inf"), []],
        [-1, []],
    ],
)
def test_a_batch_that_is_none_is_counted_and_the_recorder_goes_on(tmp_path: Path, batch: Any):
    broken = Received(1, msgspec.msgpack.encode(batch), False)
    sums, batches = recorded(tmp_path, [message(0, 100.0), broken, message(2, 102.0)], past=[])

    assert (3, 1, 0) == (sums.batches, sums.unreadable, sums.missing)
    assert [0, 1, 0] == [each.unreadable for each in batches]


@pytest.mark.parametrize("number", [1 << 63, (1 << 64) - 1])
def test_a_number_that_no_journal_holds_is_unreadable(tmp_path: Path, number: int):
    stored = ["BlockStored", [1], None, [1, 2], number, None, "GPU"]
    removed = {"type": "BlockRemoved", "block_hashes": [5], "group_idx": number}
    payload = msgspec.msgpack.encode([100.0, [stored, removed, ["AllBlocksCleared"]], 0])
    _, batches = recorded(tmp_path, [Received(0, payload, False)], past=[])

    assert [(2, 6)] == [(each.unreadable, len(each.rows)) for each in batches]
