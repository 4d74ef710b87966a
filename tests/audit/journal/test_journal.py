"""The journal on disk: the reader never returns a wrong event, and it reports every loss."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.time_limits import HANGS

from kvledger.audit import events as ev
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal import format as seg
from kvledger.audit.journal import writer as writing
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.format import is_live
from kvledger.audit.journal.host_folders import read, tail
from kvledger.audit.journal.possible_events import impossible
from kvledger.audit.journal.reader import Damage, Position, Reader
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.text import ID_CHARACTERS

Numbered = Sequence[tuple[int, ev.Event]]


def started(at: int = 0) -> ev.EngineStarted:
    return ev.EngineStarted(at, 1.7e9, "vllm", "0.32", "v1", "tokens", 7, {"block_size": 16})


def snapshot(at: int = 0, step: int = 0) -> ev.Snapshot:
    return ev.Snapshot(at, step, [ev.SnapshotRow(3, "r-3", 40, False, 40, 0, 0, 41, 0)], 0)


def stepped(number: int) -> ev.Stepped:
    return ev.Stepped(number * 100, number, [3, 1, 0, 40 + number], [])


def write_segments(folder: Path, count: int = 3, batches: int = 4) -> list[ev.Event]:
    """Write and close a journal of ``count`` segments; return the events by event number."""
    journal = JournalWriter(folder)
    written: list[ev.Event] = []
    for _ in range(count):
        journal.rotate()
        at = len(written) * 100
        for batch in [[started(at), snapshot(at)]] + [
            [stepped(len(written) + 2 + 2 * b), stepped(len(written) + 3 + 2 * b)] for b in range(batches - 1)
        ]:
            journal.write(batch)
            written += batch
    journal.close()
    return written


def present(numbered: Numbered, written: list[ev.Event]) -> set[int]:
    """The numbers of the events read, without gaps. Each event must equal the one written."""
    numbers = set()
    for number, event in numbered:
        if isinstance(event, ev.Gap):
            continue
        assert written[number] == event
        numbers.add(number)
    return numbers


def gaps(numbered: Numbered) -> list[ev.Gap]:
    return [event for _, event in numbered if isinstance(event, ev.Gap)]


# --- round trip -----------------------------------------------------------------------------------


NUMBERS = st.integers(-1, 2**53)
HASHES = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=ID_CHARACTERS)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """A value of a field's type: a number that a count may be, or printable text."""
    if get_origin(hint) is Annotated:
        (bounds,) = hint.__metadata__
        return (st.floats if hint.__origin__ is float else st.integers)(bounds.ge, bounds.le)
    if hint is int:
        return NUMBERS
    if hint is str:
        return TEXT
    if hint is float:
        return st.floats(allow_nan=False)
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=8)
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return st.dictionaries(values(key), values(value), max_size=4)
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of(*(values(one) for one in get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return structs(hint)
    return st.from_type(hint)


def flattened(parts: Sequence[Sequence[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def flat(width: int) -> st.SearchStrategy[list[int]]:
    """Rows of ``width`` numbers, one after the other."""
    return st.lists(st.lists(NUMBERS, min_size=width, max_size=width), max_size=3).map(flattened)


def counted(header: int, per_item: int) -> st.SearchStrategy[list[int]]:
    """Rows that begin with ``header`` numbers, the last of which counts the items of the row."""
    items = st.integers(0, 3).flatmap(
        lambda count: st.tuples(
            st.lists(NUMBERS, min_size=header - 1, max_size=header - 1),
            st.just([count]),
            st.lists(HASHES, min_size=count * per_item, max_size=count * per_item),
        )
    )
    return st.lists(items, max_size=3).map(lambda rows: flattened(flattened(rows)))


@st.composite
def calls_of_a_pool(draw: st.DrawFn) -> dict[str, Any]:
    by, rows = draw(st.lists(TEXT, min_size=1, max_size=3)), []
    for code in draw(st.lists(st.integers(0, 7), max_size=4)):
        tables = code == ev.TABLES_REPORTED
        follow = draw(counted(4, 1) if tables else st.lists(HASHES, max_size=4).map(lambda some: some * 6))
        header = [code + 8 * draw(st.integers(0, 3)), draw(NUMBERS), draw(NUMBERS)]
        rows += [*header, draw(st.integers(0, len(by) - 1)), len(follow), *follow]
    return {"by": by, "rows": rows}


@st.composite
def hits_verified(draw: st.DrawFn) -> dict[str, Any]:
    request_ids, rows = draw(st.lists(TEXT, min_size=1, max_size=3)), []
    for blocks in draw(st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3), max_size=3)):
        head = [draw(st.integers(0, len(request_ids) - 1)), draw(NUMBERS), draw(NUMBERS), len(blocks)]
        rows += [*head, *flattened(blocks)]
    return {"request_ids": request_ids, "rows": rows, "differed": draw(flat(2))}


@st.composite
def blocks_moved(draw: st.DrawFn) -> dict[str, Any]:
    blocks, size = draw(st.lists(NUMBERS, max_size=3)), 16 * draw(st.integers(1, 3))
    prints = draw(st.binary(min_size=size * len(blocks), max_size=size * len(blocks)))
    return {"blocks": blocks, "prints": prints, "differed": draw(flat(2))}


@st.composite
def blocks_sketched(draw: st.DrawFn) -> dict[str, Any]:
    blocks, projections = draw(st.lists(NUMBERS, max_size=3)), draw(st.integers(1, 4))
    size = 8 * projections * draw(st.integers(1, 3)) * len(blocks)
    sketches = draw(st.binary(min_size=size, max_size=size))
    return {"blocks": blocks, "projections": projections, "sketches": sketches}


@st.composite
def kv_events(draw: st.DrawFn) -> dict[str, Any]:
    tiers, rows = draw(st.lists(TEXT, max_size=3)), []
    for hashes in draw(st.lists(st.lists(HASHES, max_size=3), max_size=3)):
        tier = draw(st.integers(-1, len(tiers) - 1))
        rows += [
            draw(st.integers(0, 2)),
            draw(NUMBERS),
            tier,
            draw(NUMBERS),
            draw(HASHES),
            len(hashes),
            *hashes,
        ]
    counts = {name: draw(st.integers(0, 9)) for name in ("stream", "sequence", "unreadable")}
    return {"tiers": tiers, "rows": rows, **counts}


def equally_long(*names: str, of: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(of, max_size=6).map(lambda some: dict.fromkeys(names, some))


@st.composite
def tiers_reported(draw: st.DrawFn) -> dict[str, Any]:
    tiers = draw(st.dictionaries(TEXT, NUMBERS, max_size=4))
    return {"tiers": list(tiers), "tokens": list(tiers.values())}


@st.composite
def encoder_cache_used(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.integers(0, 2**53)
    operations = st.tuples(st.integers(ev.ENCODER_HIT, ev.ENCODER_CLEARED), sizes, sizes)
    return {"rows": flattened(draw(st.lists(operations, max_size=4)))}


def sized(rows: list[int]) -> list[int]:
    return [max(0, one) for one in rows]


LAYOUTS: dict[type[Any], st.SearchStrategy[dict[str, Any]]] = {
    ev.Stepped: st.fixed_dictionaries({"changed": flat(4).map(lambda rows: [abs(one) for one in rows])}),
    ev.Delivered: st.fixed_dictionaries({"changed": flat(2)}),
    ev.DeliveredWhole: st.binary(max_size=8).map(lambda b: {"sampled": b, "requests": list(range(len(b)))}),
    ev.Census: st.fixed_dictionaries({"rows": flat(5)}),
    ev.PoolSeen: st.fixed_dictionaries({"groups": flat(3).map(lambda rows: [max(1, one) for one in rows])}),
    ev.PoolCalls: calls_of_a_pool(),
    ev.BlocksCached: st.fixed_dictionaries({"rows": counted(4, 3)}),
    ev.BlockCopied: st.fixed_dictionaries({"blocks": st.lists(NUMBERS, min_size=2, max_size=2)}),
    ev.ContentWatched: st.fixed_dictionaries(
        {"blocks": st.integers(0, 9), "groups": flat(4).map(lambda rows: [max(1, one) for one in rows])}
    ),
    ev.ContentCounted: st.fixed_dictionaries(
        dict.fromkeys(("sealed", "verified", "scrubbed", "bytes", "microseconds"), st.integers(0, 2**53))
    ),
    ev.HitsVerified: hits_verified(),
    ev.ScrubDiffered: st.fixed_dictionaries({"rows": flat(4)}),
    ev.BlocksMoved: blocks_moved(),
    ev.BlocksSketched: blocks_sketched(),
    ev.KVEventsReceived: kv_events(),
    ev.TiersReported: tiers_reported(),
    ev.EncoderInputsSeen: st.fixed_dictionaries({"rows": flat(4).map(sized)}),
    ev.EncoderCacheSeen: st.fixed_dictionaries(
        {"size": st.integers(0, 2**53), "entries": st.none() | flat(2)}
    ),
    ev.EncoderCacheUsed: encoder_cache_used(),
    ev.BlocksAllocated: st.fixed_dictionaries({"rows": counted(3, 1)}),
    ev.BlocksTouched: equally_long("blocks", "references", of=NUMBERS),
    ev.BlocksFreed: equally_long("blocks", "references", of=NUMBERS),
    ev.TablesReported: st.fixed_dictionaries({"rows": counted(4, 1)}),
}
"""Fields whose numbers have a layout."""

ISOLATION = st.none() | flat(2)


def structs(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any event of this type that an engine can emit."""
    hints = get_type_hints(kind, include_extras=True)
    drawn = {name: values(hints[name]) for name in kind.__struct_fields__}
    if "isolation" in drawn:
        drawn["isolation"] = ISOLATION
    layout = LAYOUTS.get(kind, st.just({}))
    made = st.builds(
        lambda fields, shaped: kind(**{**fields, **shaped}), st.fixed_dictionaries(drawn), layout
    )
    return made.filter(lambda event: kind is ev.SnapshotRow or not impossible([event]))


EVENTS = get_args(ev.AnyEvent)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@examples(25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_every_event_is_read_as_it_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, kind: type[Any], data: st.DataObject
) -> None:
    recorded = data.draw(st.lists(structs(kind), min_size=1, max_size=4))
    folder = tmp_path_factory.mktemp("journal")
    journal = JournalWriter(folder)

    journal.write(recorded)
    journal.close()

    assert list(enumerate(recorded)) == list(read(folder))


@pytest.mark.parametrize(
    ("event", "phrase"),
    [
        (ev.HitsVerified(1, 1, 0, ["a"], [0, 0, 0, -2], []), "rows has a count of -2"),
        (ev.HitsVerified(1, 1, 0, ["a"], [0, 0, 0, 2, 5, 1], []), "rows ends before its last row does"),
        (ev.HitsVerified(1, 1, 0, ["a"], [1, 0, 0, 0], []), "a run of blocks is of request 1 of 1"),
        (ev.HitsVerified(1, 1, 0, [], [], [5]), "differed does not hold 2 numbers for each block"),
        (ev.ScrubDiffered(1, 1, 0, [0, 1, 2]), "rows does not hold 4 numbers for each block"),
        (ev.ContentWatched(1, 0, 0, 9, [0, 0, 1, 1], "k", 1.0, []), "a block of a group holds no token"),
        (ev.ContentWatched(1, 0, 0, 9, [0, 1], "k", 1.0, []), "groups does not hold four numbers"),
        (ev.ContentCounted(1, 1, 0, -1, 0, 0, 0, 0), "sealed is -1"),
        (ev.BlocksMoved(1, 1, 0, True, 0, "k", True, [5], b"x" * 15), "1 blocks have 15 bytes"),
        (ev.BlocksMoved(1, 1, 0, True, 0, "k", True, [5], b""), "1 blocks have 0 bytes"),
        (ev.BlocksMoved(1, 1, 0, True, 0, "k", True, [], b"x" * 16), "0 blocks have 16 bytes"),
        (ev.BlocksMoved(1, 1, 0, True, 0, "k", True, [], b"", [5]), "differed does not hold 2 numbers"),
        (ev.EncoderInputsSeen(1, 0, [5, 0, 4]), "rows does not hold 4 numbers for each input"),
        (ev.EncoderInputsSeen(1, 0, [5, 0, -4, 4]), "an input has a negative size"),
        (ev.EncoderCacheSeen(1, 0, 9, 9, True, False, [5]), "entries does not hold 2 numbers"),
        (ev.EncoderCacheSeen(1, 0, -9, 9, True, False), "size is -9"),
        (ev.EncoderCacheUsed(1, 0, 9, [0, 1]), "rows does not hold 3 numbers for each operation"),
        (ev.EncoderCacheUsed(1, 0, 9, [6, 1, 1]), "an operation has the code 6"),
        (ev.EncoderCacheUsed(1, 0, 9, [0, 1, -1]), "an operation is of input -1 of request 1"),
        (ev.BlocksSketched(1, 1, 0, 0, "k", 0, [], b""), "a sketch has 0 projections"),
        (ev.BlocksSketched(1, 1, 0, 0, "k", 2, [5], b"x" * 17), "1 blocks have 17 bytes of sketches"),
        (ev.BlocksSketched(1, 1, 0, 0, "k", 2, [5], b"x" * 8), "1 blocks have 8 bytes of sketches"),
        (ev.BlocksSketched(1, 1, 0, 0, "k", 2, [], b"x" * 16), "0 blocks have 16 bytes of sketches"),
    ],
)
def test_impossible_contents_are_named(event: ev.Event, phrase: str) -> None:
    assert phrase in impossible([event])


def test_every_event_type_is_tested() -> None:
    named = vars(ev).values()
    defined = {kind for kind in named if isinstance(kind, type)} - {ev.Event}

    tagged = {
        kind for kind in defined if issubclass(kind, ev.Event) and kind.__struct_config__.tag is not None
    }
    assert tagged == set(EVENTS)


def test_a_large_write_is_split_but_the_first_two_events_stay_together(tmp_path: Path) -> None:
    rows = [ev.SnapshotRow(i, "r" * 40, 1, True, 0, 0, 0, 1, 0) for i in range(4000)]
    many = [stepped(i) for i in range(20_000)]
    journal = JournalWriter(tmp_path)

    journal.write([started(), ev.Snapshot(0, 0, rows, 0), *many])
    journal.close()

    batches = list(Reader(tmp_path).poll())
    assert [ev.EngineStarted, ev.Snapshot] == [type(e) for e in batches[0].events[:2]]
    assert 20_002 == sum(len(batch.events) for batch in batches)
    assert len(batches) > 3


def test_batches_end_at_their_size_limit_for_any_event_sizes(tmp_path: Path) -> None:
    """Large events after small ones and the other way round, 256 in each write."""
    large: list[ev.Event] = [ev.Stepped(n, n, list(range(400)), []) for n in range(256)]
    small: list[ev.Event] = [ev.Repeated(n, n) for n in range(256)]
    journal = JournalWriter(tmp_path)
    written = [started(), snapshot(), *small, *large, *large, *small, *small]

    journal.write([started(), snapshot()])
    for events in (small, large, large, small, small):
        journal.write(events)
    journal.close()

    assert list(enumerate(written)) == list(read(tmp_path))
    sizes = [len(msgspec.msgpack.encode(batch.events)) for batch in Reader(tmp_path).poll()]
    assert max(sizes) <= writing.BATCH_BYTES + 5
    assert sorted(sizes)[-2] > writing.BATCH_BYTES // 2


# --- the tail ------------------------------------------------------------------------------------


def test_a_torn_tail_loses_only_the_last_batch(tmp_path: Path) -> None:
    written = write_segments(tmp_path / "whole", count=1)
    path = tmp_path / "whole" / "00000001.kvl"
    data = path.read_bytes()
    last = list(Reader(tmp_path / "whole").poll())[-1].start.offset
    torn = tmp_path / "torn.kvl"

    for cut in range(last + 1, len(data)):
        torn.write_bytes(data[:cut])
        damage: list[Damage] = []
        numbered = list(read(torn, damage=damage))

        assert set(range(len(written) - 2)) == present(numbered, written)
        assert [ev.Gap(written[-3].at, -1, "torn tail")] == gaps(numbered)
        assert [Damage("torn.kvl", last, "torn tail", -1)] == damage


def test_a_complete_tail_without_an_engine_stop_loses_nothing(tmp_path: Path) -> None:
    write_segments(tmp_path)
    reader = Reader(tmp_path)

    assert [] == [b for b in reader.poll() if isinstance(b.events[0], ev.Gap)]
    assert reader.ended
    assert not reader.stopped
    assert [] == reader.damage


def test_a_reader_knows_that_the_engine_stopped(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot(), ev.EngineStopped(9, "shutdown")])
    journal.close()
    reader = Reader(tmp_path)

    list(reader.poll())

    assert reader.stopped


def test_half_a_frame_of_a_live_writer_is_not_read_yet(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    path = tmp_path / "00000001.kvl"
    half = path.read_bytes()
    with path.open("ab") as file:
        file.write(b"\x30\x00\x00\x00half")
    reader = Reader(tmp_path)

    assert [2] == [len(batch.events) for batch in reader.poll()]
    assert [] == list(reader.poll())
    assert [] == reader.damage

    os.truncate(path, len(half))  # the writer removes half a frame and writes the next one in its place
    journal.write([stepped(1)])
    assert [[stepped(1)]] == [batch.events for batch in reader.poll()]
    journal.close()
    assert [] == list(reader.poll())
    assert reader.ended
    assert [] == reader.damage


# --- damage ---------------------------------------------------------------------------------------


def test_any_changed_byte_is_found_and_never_read_as_another_event(tmp_path: Path) -> None:
    written = write_segments(tmp_path / "good", count=3, batches=3)
    for victim in ("00000001.kvl", "00000002.kvl", "00000003.kvl"):
        good = (tmp_path / "good" / victim).read_bytes()
        bad = tmp_path / "bad"
        shutil.copytree(tmp_path / "good", bad)
        for position in range(len(good)):
            for flip in (0x01, 0x80, 0xFF):
                changed = bytearray(good)
                changed[position] ^= flip
                (bad / victim).write_bytes(changed)
                damage: list[Damage] = []
                numbered = list(read(bad, damage=damage))
                numbers = present(numbered, written)
                assert [victim] == [one.segment for one in damage]
                missing = len(written) - len(numbers)
                assert missing
                assert gaps(numbered)[0].lost_events in (missing, -1)
                after = int(victim[:8]) * len(written) // 3
                assert set(range(after, len(written))) <= numbers
        shutil.rmtree(bad)


def test_corruption_is_reported_with_segment_byte_and_count(tmp_path: Path) -> None:
    written = write_segments(tmp_path)
    second = [b for b in Reader(tmp_path).poll() if b.start.segment == 2][1]
    path = tmp_path / "00000002.kvl"
    data = bytearray(path.read_bytes())
    data[second.start.offset + 12] ^= 4
    path.write_bytes(data)
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert set(range(len(written))) - set(range(10, 16)) == present(numbered, written)
    byte = second.start.offset
    reason = f"corrupt segment 00000002.kvl at byte {byte}"
    assert [(10, ev.Gap(written[9].at, 6, reason))] == [one for one in numbered if isinstance(one[1], ev.Gap)]
    assert [Damage("00000002.kvl", byte, "corrupt segment", 6)] == damage
    assert f"corrupt segment at 00000002.kvl byte {byte}: 6 events lost" == str(damage[0])


def test_a_run_of_zeros_is_damage_and_not_empty_frames(tmp_path: Path) -> None:
    write_segments(tmp_path, count=1)
    with (tmp_path / "00000001.kvl").open("ab") as file:
        file.write(bytes(4096))
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert [-1] == [gap.lost_events for gap in gaps(numbered)]
    assert 1 == len(damage)


def test_a_live_corrupt_segment_is_reported_at_once_and_reading_resumes_in_the_next(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    size = (tmp_path / "00000001.kvl").stat().st_size
    journal.write([stepped(1)])
    journal.write([stepped(2)])
    with (tmp_path / "00000001.kvl").open("r+b") as file:
        file.seek(size + 10)
        file.write(b"\xff")
    reader = Reader(tmp_path)

    assert [2, 1] == [len(batch.events) for batch in reader.poll()]
    assert [-1] == [damage.lost_events for damage in reader.damage]
    assert [] == list(reader.poll())
    journal.rotate()
    journal.write([started(5), snapshot(5)])
    assert [(4, True)] == [(batch.first_event, batch.begins_segment) for batch in reader.poll()]
    assert 1 == len(reader.damage)
    journal.close()


@pytest.mark.parametrize(
    ("removed", "first", "lost"), [((2,), 8, 8), ((1,), 0, 8), ((1, 2), 0, 16), ((2, 3), 8, 16)]
)
def test_removed_segments_are_a_gap_of_the_right_size(
    tmp_path: Path, removed: tuple[int, ...], first: int, lost: int
) -> None:
    written = write_segments(tmp_path, count=4)
    for number in removed:
        (tmp_path / seg.segment_name(number)).unlink()
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert len(written) - lost == len(present(numbered, written))
    assert [(first, lost, "segments removed")] == [
        (number, event.lost_events, event.reason) for number, event in numbered if isinstance(event, ev.Gap)
    ]
    assert [lost] == [one.lost_events for one in damage]


def test_only_the_batch_with_a_wrong_type_is_skipped(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    journal.write([ev.Repeated(1, "many")])  # type: ignore[arg-type]
    journal.write([stepped(2)])
    journal.close()
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert [0, 1, 2, 3] == [number for number, _ in numbered]
    assert [1] == [gap.lost_events for gap in gaps(numbered)]
    assert ["unreadable batch"] == [one.reason for one in damage]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_segment_without_a_batch_is_damage(tmp_path: Path, number: int) -> None:
    """With the segment after it removed, it would otherwise read as one that rotation removed."""
    write_segments(tmp_path)
    path = tmp_path / f"0000000{number}.kvl"
    path.write_bytes(path.read_bytes()[: len(seg.HEADER)])
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert 1 == len(gaps(numbered))
    assert [("corrupt segment", path.name)] == [(one.reason, one.segment) for one in damage]


def test_a_copy_of_a_segment_under_a_later_name_is_not_read_twice(tmp_path: Path) -> None:
    written = write_segments(tmp_path)
    shutil.copy(tmp_path / "00000001.kvl", tmp_path / "00000009.kvl")

    numbered = list(read(tmp_path))

    assert list(range(len(written))) == [
        number for number, event in numbered if not isinstance(event, ev.Gap)
    ]
    assert 1 == len(gaps(numbered))


# --- paths without a journal, newer journals --------------------------------------------------------


def test_the_refusal_of_a_newer_schema_names_both_versions(tmp_path: Path) -> None:
    write_segments(tmp_path)
    path = tmp_path / "00000001.kvl"
    path.write_bytes(path.read_bytes().replace(seg.HEADER, seg.header(9)))

    with pytest.raises(LedgerError, match=r"schema 9 .* up to schema 2"):
        list(read(tmp_path))
    with pytest.raises(LedgerError, match=r"schema 9 .* up to schema 2"):
        find_journals([tmp_path])


def test_an_unknown_event_tag_is_refused_as_a_newer_schema(tmp_path: Path) -> None:
    class Invented(ev.Event, frozen=True, array_like=True, tag=99):
        pass

    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot(), Invented(3)])
    journal.close()

    with pytest.raises(LedgerError, match=r"event tag 99"):
        list(read(tmp_path))


def test_fields_appended_by_a_newer_version_are_ignored(tmp_path: Path) -> None:
    class Longer(ev.Event, frozen=True, array_like=True, tag=16):
        times: int
        more: str

    journal = JournalWriter(tmp_path)
    journal.write([Longer(3, 4, "new")])
    journal.close()

    assert [(0, ev.Repeated(3, 4))] == list(read(tmp_path))


def make_empty(path: Path) -> None:
    path.mkdir()


def make_foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("hello")


def make_foreign_file(path: Path) -> None:
    path.write_text("hello\nworld\n")


def make_empty_file(path: Path) -> None:
    path.touch()


def make_foreign_segments(path: Path) -> None:
    path.mkdir()
    (path / "00000001.kvl").write_text("hello\nworld\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "There is no {}."),
        (make_empty, "{} is empty: no journal was written there yet."),
        (make_foreign_folder, "{} holds no kvledger journal."),
        (
            lambda path: (path / "worker-1-2-0").mkdir(parents=True),
            "{} holds journals of workers and none of an engine: its scheduler was not observed.",
        ),
        (make_foreign_file, "{} is not a kvledger journal."),
        (make_empty_file, "{} is empty."),
        (make_foreign_segments, "{} is not a kvledger journal: no segment in it has a journal's header."),
    ],
)
def test_a_path_without_a_journal_gives_one_clear_sentence(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "it"
    make(path)

    with pytest.raises(LedgerError) as raised:
        find_journals([path])

    assert message.format(path) == str(raised.value)
    assert 2 == raised.value.exit_code


def test_journals_are_found_in_folders_of_journals_and_as_files(tmp_path: Path) -> None:
    write_segments(tmp_path / "engine-2")
    write_segments(tmp_path / "engine-1")
    make_foreign_folder(tmp_path / "other")
    one = tmp_path / "engine-1"

    assert [one, tmp_path / "engine-2"] == find_journals([tmp_path, one])
    assert [one / "00000002.kvl"] == find_journals([str(one / "00000002.kvl")])


def test_a_single_segment_is_read_without_a_gap(tmp_path: Path) -> None:
    written = write_segments(tmp_path)

    numbered = list(read(tmp_path / "00000002.kvl"))

    assert list(enumerate(written))[8:16] == numbered


# --- positions ------------------------------------------------------------------------------------


def test_reading_resumed_at_any_batch_gives_all_remaining_events(tmp_path: Path) -> None:
    write_segments(tmp_path)
    (tmp_path / "00000002.kvl").unlink()
    everything = list(read(tmp_path))
    batches = list(Reader(tmp_path).poll())

    seen = 0
    for batch in batches:
        start = msgspec.json.decode(msgspec.json.encode(batch.start), type=Position)
        assert everything[seen:] == list(read(tmp_path, start=start))
        seen += len(batch.events)
    assert len(everything) == seen


def test_a_position_in_a_segment_removed_since_is_a_gap(tmp_path: Path) -> None:
    write_segments(tmp_path)
    start = list(Reader(tmp_path).poll())[1].start
    (tmp_path / "00000001.kvl").unlink()

    numbered = list(read(tmp_path, start=start))

    assert (2, ev.Gap(0, 6, "segments removed")) == numbered[0]
    assert 8 == numbered[1][0]


def test_reading_may_begin_at_any_segment(tmp_path: Path) -> None:
    written = write_segments(tmp_path)

    numbered = list(read(tmp_path, start=Position(segment=2, event=-1)))

    assert list(enumerate(written))[8:] == numbered
    assert [ev.EngineStarted, ev.Snapshot] == [type(event) for _, event in numbered[:2]]


# --- bounds ---------------------------------------------------------------------------------------


def fill(journal: JournalWriter, events: int) -> None:
    """Write events as an observer does, with a snapshot whenever the journal wants a rotation."""
    journal.write([started(), snapshot()])
    for number in range(0, events, 10):
        if journal.wants_rotation:
            journal.rotate()
            journal.write([started(number * 100), snapshot(number * 100)])
        journal.write([stepped(n) for n in range(number, number + 10)])


def test_the_size_bound_holds_and_the_oldest_segments_are_removed_first(tmp_path: Path) -> None:
    limits = Limits(segment_bytes=2_000, folder_bytes=10_000)
    journal = JournalWriter(tmp_path, limits)

    fill(journal, 5_000)
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    kept = sorted(seg.segments(tmp_path))
    journal.close()

    assert 6_000 < total <= 10_000
    assert list(range(kept[0], kept[-1] + 1)) == kept
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 2_500
    numbered = list(read(tmp_path))
    assert isinstance(numbered[0][1], ev.Gap)
    assert numbered[0][1].lost_events == numbered[1][0]
    assert 1 == len(gaps(numbered))
    assert 0 == journal.lost_events


def test_without_rotation_the_size_bound_still_holds(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, Limits(segment_bytes=1_000, folder_bytes=4_000))
    journal.write([started(), snapshot()])
    for number in range(2_000):
        journal.write([stepped(number)])
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    journal.close()

    assert total <= 4_000
    assert journal.lost_events > 1_000
    assert journal.wants_rotation


def test_a_segment_begins_soon_after_the_clock_was_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = 30.0
    monkeypatch.setattr(time, "time", lambda: wall)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    wall += 0.9
    assert not journal.wants_rotation
    wall = 1.7e9
    assert journal.wants_rotation
    journal.rotate()
    journal.write([started(), snapshot()])
    assert not journal.wants_rotation
    journal.close()


def test_expired_segments_are_removed_while_the_engine_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: now)
    journal = JournalWriter(tmp_path, Limits(age_seconds=60))
    journal.write([started(), snapshot()])
    now += 59
    assert not journal.wants_rotation
    now += 2
    assert journal.wants_rotation
    journal.rotate()
    journal.write([started(), snapshot()])
    now += 59
    journal.idle()
    assert [1, 2] == list(seg.segments(tmp_path))
    now += 2
    journal.idle()
    assert [2] == list(seg.segments(tmp_path))
    journal.close()


# --- a disk that fails -----------------------------------------------------------------------------


class Disk:
    """An ``os.write`` that fails with ENOSPC after ``room`` more bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("room", [0, 1, 7, 8, 9, 20])
def test_events_lost_on_a_full_disk_become_a_gap_when_there_is_room_again(
    tmp_path: Path, disk: Disk, room: int
) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    size = (tmp_path / "00000001.kvl").stat().st_size
    disk.room = room
    journal.write([stepped(1), stepped(2)])
    journal.write([stepped(3)])
    assert size == (tmp_path / "00000001.kvl").stat().st_size
    assert not journal.wants_rotation
    disk.room = None
    journal.idle()
    assert journal.wants_rotation
    journal.write([stepped(4)])
    journal.rotate()
    journal.write([started(500), snapshot(500)])
    journal.close()
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert [
        (0, started()),
        (1, snapshot()),
        (5, ev.Gap(300, 3, "No space left on device")),
        (6, stepped(4)),
        (7, started(500)),
        (8, snapshot(500)),
    ] == numbered
    assert [] == damage
    assert 3 == journal.lost_events
    assert journal.write_failures >= 2


def test_a_half_written_frame_that_cannot_be_truncated_ends_its_segment(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    with monkeypatch.context() as context:
        context.setattr(os, "ftruncate", broken_call)
        disk.room = 11
        journal.write([stepped(1), stepped(2)])
    disk.room = None
    journal.write([stepped(3)])
    assert journal.wants_rotation
    journal.rotate()
    journal.write([started(500), snapshot(500)])
    journal.close()
    damage: list[Damage] = []

    numbered = list(read(tmp_path, damage=damage))

    assert [0, 1, 2, 5, 6] == [number for number, _ in numbered]
    assert [3] == [gap.lost_events for gap in gaps(numbered)]
    assert [("00000001.kvl", "torn tail", 3)] == [
        (one.segment, one.reason, one.lost_events) for one in damage
    ]


def test_a_failed_rotation_keeps_the_old_segment_and_is_retried_later(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal = JournalWriter(tmp_path, Limits(segment_bytes=1))
    journal.write([started(), snapshot()])
    disk.room = 5
    journal.rotate()
    journal.write([started(1), snapshot(1)])
    disk.room = None
    assert ["00000001.kvl"] == sorted(path.name for path in seg.segments(tmp_path).values())
    assert not journal.wants_rotation  # each try costs the engine a snapshot
    journal.write([stepped(1)])
    now += writing.RETRY_SECONDS
    assert journal.wants_rotation
    journal.rotate()
    journal.write([started(2), snapshot(2)])
    journal.close()

    numbered = list(read(tmp_path))

    assert [
        (0, started()),
        (1, snapshot()),
        (4, ev.Gap(1, 2, "No space left on device")),
        (5, stepped(1)),
        (6, started(2)),
        (7, snapshot(2)),
    ] == numbered
    assert [1, 2] == list(seg.segments(tmp_path))


def test_a_disk_full_from_the_start_is_a_gap_before_the_first_event(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.0)
    journal = JournalWriter(tmp_path)
    disk.room = 0
    journal.write([started(), snapshot()])
    journal.write([stepped(1)])
    disk.room = None
    journal.write([stepped(2)])
    assert journal.wants_rotation
    journal.rotate()
    journal.write([started(7), snapshot(7)])
    journal.close()

    assert [(0, ev.Gap(7, 4, "not written")), (4, started(7)), (5, snapshot(7))] == list(read(tmp_path))


def test_only_the_event_that_cannot_be_encoded_is_lost(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    bad_events: Any = [ev.Repeated(1, object()), ev.Repeated(1, 2**80), "no event"]  # type: ignore[arg-type]

    journal.write([started(), snapshot(), bad_events[0], stepped(1), *bad_events[1:], stepped(2)])
    journal.close()

    assert [0, 1, 3, 4, 7, 8] == [number for number, _ in read(tmp_path)]
    assert [1, 2] == [gap.lost_events for gap in gaps(list(read(tmp_path)))]
    assert 3 == journal.lost_events


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 4)),
        st.tuples(st.just("room"), st.integers(0, 120)),
        st.sampled_from([("uncut", 0), ("rotate", 0), ("mend", 0), ("mend", 0), ("idle", 0), ("poll", 0)]),
    ),
    max_size=40,
)


@examples(100)
@given(operations=OPERATIONS)
def test_event_numbers_and_gaps_add_up_under_any_failures(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    """A late reader and a follower get every event at its number, or a Gap that covers it."""
    folder = tmp_path_factory.mktemp("journal")
    tried: list[ev.Event] = []
    followed: list[tuple[int, ev.Event]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "RETRY_SECONDS", 0.0)
        disk = Disk(patch)
        cut = os.ftruncate
        journal = JournalWriter(folder)
        reader = Reader(folder)
        for what, amount in operations:
            if what == "write":
                batch: list[ev.Event] = [stepped(len(tried) + n) for n in range(amount)]
                journal.write(batch)
                tried += batch
            elif what == "rotate" or journal.wants_rotation:
                journal.rotate()
                segment_start = [started(len(tried)), snapshot(len(tried))]
                journal.write(segment_start)
                tried += segment_start
            elif what == "idle":
                journal.idle()
            elif what == "poll":
                for one in reader.poll():
                    followed += enumerate(one.events, one.first_event)
            elif what == "uncut":
                patch.setattr(os, "ftruncate", broken_call)
            else:
                disk.room = amount if what == "room" else None
                patch.setattr(os, "ftruncate", cut)
        journal.close()
    for one in reader.poll():
        followed += enumerate(one.events, one.first_event)

    numbered = list(read(folder))
    assert numbered == followed
    real = [event for _, event in numbered if not isinstance(event, ev.Gap)]
    in_order = iter(tried)
    assert all(event in in_order for event in real)
    assert len(tried) == len(real) + journal.lost_events
    expected = 0
    for number, event in numbered:
        if not isinstance(event, ev.Gap):
            assert expected == number
            expected += 1
        elif event.lost_events < 0:
            assert (number, event) == numbered[-1]
        elif number == expected:  # a gap that the reader inserts
            expected += event.lost_events
        else:  # a gap that the writer wrote, which has a number
            assert expected + event.lost_events == number
            expected = number + 1


def broken_call(*_: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


LIMITED = """
import resource, sys, pathlib
sys.path.insert(0, sys.argv[1])
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.events import Repeated
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
journal = JournalWriter(pathlib.Path(sys.argv[2]))
for number in range(2000):
    journal.write([Repeated(number, 1)])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.write([Repeated(2000, 1)])
journal.close()
print(journal.lost_events)
"""


def test_a_real_file_size_limit_is_survived(tmp_path: Path) -> None:
    source = str(Path(__file__).parents[3] / "src")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, source, str(tmp_path / "j")],
        capture_output=True,
        text=True,
        check=True,
    )
    numbered = list(read(tmp_path / "j"))

    lost = int(done.stdout)
    assert lost > 1000
    assert [lost] == [gap.lost_events for gap in gaps(numbered)]
    assert "File too large" == gaps(numbered)[0].reason
    assert (2001, ev.Repeated(2000, 1)) == numbered[-1]


# --- the lock, killed writers ---------------------------------------------------------------------


def test_a_journal_is_live_until_its_writer_closes(tmp_path: Path) -> None:
    assert not is_live(tmp_path)
    journal = JournalWriter(tmp_path)
    assert is_live(tmp_path)
    journal.close()
    journal.close()
    assert not is_live(tmp_path)


def test_a_folder_has_only_one_writer(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    with pytest.raises(BlockingIOError):
        JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    journal.close()
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path)
    assert not is_live(tmp_path)


def test_a_folder_that_was_removed_is_made_again_and_read_on_without_a_gap(tmp_path: Path) -> None:
    """A reader that had read everything before continues with the next segment."""
    journal = JournalWriter(tmp_path / "engine")
    journal.write([started(), snapshot(), ev.Repeated(1, 1)])
    reader = Reader(tmp_path / "engine")
    assert 3 == sum(len(batch.events) for batch in reader.poll())
    assert not journal.removed
    shutil.rmtree(tmp_path / "engine")
    assert journal.removed

    journal.recreate()
    assert not journal.removed and journal.wants_rotation and is_live(tmp_path / "engine")
    journal.rotate()
    journal.write([started(), snapshot(), ev.Repeated(2, 2)])
    journal.close()

    assert [started(), snapshot(), ev.Repeated(2, 2)] == [
        event for batch in reader.poll() for event in batch.events
    ]
    assert [] == reader.damage
    assert reader.ended


def test_a_lock_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Without the lock, readers would think that the engine is gone."""
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    (tmp_path / "lock").unlink()
    assert not is_live(tmp_path)
    assert journal.removed

    journal.recreate()

    assert is_live(tmp_path)
    assert not journal.removed
    journal.close()


def test_the_size_bound_counts_what_is_left_after_a_removal(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, Limits(segment_bytes=1, folder_bytes=1000))
    for _ in range(3):
        journal.rotate()
        journal.write([started(), snapshot()])
    last = max(tmp_path.glob("*.kvl"))
    last.unlink()
    journal.recreate()
    for _ in range(20):
        journal.rotate()
        journal.write([started(), snapshot()])

    assert sum(path.stat().st_size for path in tmp_path.glob("*.kvl")) <= 1000
    journal.close()


def test_files_of_a_journal_are_not_for_everybody(tmp_path: Path) -> None:
    """The sidecar reads them as the same user, or by a common group."""
    before = os.umask(0)
    try:
        journal = JournalWriter(tmp_path)
        journal.write([started(), snapshot()])
        journal.close()
    finally:
        os.umask(before)

    assert {0o640} == {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert ["00000001.kvl", "lock"] == sorted(path.name for path in tmp_path.iterdir())


ENDLESS = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from kvledger.audit.journal.writer import JournalWriter, Limits
from kvledger.audit.events import EngineStarted, Repeated, Snapshot
journal = JournalWriter(pathlib.Path(sys.argv[2]), Limits(segment_bytes=20_000))
number = 0
while True:
    if journal.wants_rotation or not number:
        journal.rotate()
        start = EngineStarted(number, 0.0, "vllm", "0", "v1", "tokens", 1, {})
        journal.write([start, Snapshot(number, 0, [], 0)])
    journal.write([Repeated(number + n, number + n) for n in range(50)])
    number += 50
    print(number, flush=True)
"""


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    source = str(Path(__file__).parents[3] / "src")
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, source, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


def test_after_a_kill_a_prefix_is_read_and_the_journal_is_not_live(
    tmp_path: Path, endless: subprocess.Popen[str]
) -> None:
    assert endless.stdout is not None
    printed = [int(endless.stdout.readline()) for _ in range(200)]
    assert is_live(tmp_path)

    endless.send_signal(signal.SIGKILL)
    endless.wait()

    assert not is_live(tmp_path)
    reader = Reader(tmp_path)
    repeated = [
        event.times for batch in reader.poll() for event in batch.events if isinstance(event, ev.Repeated)
    ]
    assert list(range(len(repeated))) == repeated
    assert printed[-1] <= len(repeated)
    assert reader.ended
    assert not reader.stopped


# --- following ------------------------------------------------------------------------------------


def test_a_live_journal_is_followed_across_segments_in_another_process(
    tmp_path: Path, endless: subprocess.Popen[str]
) -> None:
    assert endless.stdout is not None
    endless.stdout.readline()
    stop = threading.Event()
    rotations = 0
    times = []
    for number, (event_number, event) in enumerate(tail(tmp_path, 0.01, stop)):
        assert number == event_number
        rotations += isinstance(event, ev.EngineStarted)
        if isinstance(event, ev.Repeated):
            times.append(event.times)
        if rotations == 6:
            stop.set()
        if number % 100 == 0:
            endless.stdout.readline()  # otherwise the writer blocks on a full pipe

    assert list(range(len(times))) == times
    assert rotations >= 6


def test_following_ends_when_the_writer_has_closed_and_all_events_are_read(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, Limits(segment_bytes=2_000))
    followed: list[tuple[int, ev.Event]] = []
    follower = threading.Thread(target=lambda: followed.extend(tail(tmp_path, 0.005)))
    follower.start()

    fill(journal, 3_000)
    time.sleep(0.05)
    journal.write([ev.EngineStopped(1, "exit")])
    journal.close()
    follower.join(HANGS)

    assert not follower.is_alive()
    assert list(range(len(followed))) == [number for number, _ in followed]
    assert ev.EngineStopped(1, "exit") == followed[-1][1]
    assert len(seg.segments(tmp_path)) > 5


def test_segments_removed_under_a_slow_reader_are_a_gap(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path, Limits(segment_bytes=2_000, folder_bytes=6_000))
    journal.write([started(), snapshot()])
    reader = Reader(tmp_path)
    assert [2] == [len(batch.events) for batch in reader.poll()]
    first = (tmp_path / "00000001.kvl").stat().st_ino

    fill(journal, 3_000)
    numbered = [one for batch in reader.poll() for one in enumerate(batch.events, batch.first_event)]
    journal.close()

    assert first not in {path.stat().st_ino for path in tmp_path.iterdir()}
    gap_index = next(i for i, (_, event) in enumerate(numbered) if isinstance(event, ev.Gap))
    number, gap = numbered[gap_index]
    assert gap_index > 0  # the removed segment was open, and was read to its end
    assert isinstance(gap, ev.Gap)
    assert numbered[gap_index + 1][0] == number + gap.lost_events
    assert isinstance(numbered[gap_index + 1][1], ev.EngineStarted)
    assert 1 == len(gaps(numbered))


def test_following_ends_when_stop_is_set(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write([started(), snapshot()])
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()

    assert 2 == len(list(tail(tmp_path, 0.01, stop)))
    journal.close()


def test_a_reader_waits_for_the_first_segment(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    reader = Reader(tmp_path)
    assert [] == list(reader.poll())
    assert not reader.ended
    journal.write([started(), snapshot()])
    assert [2] == [len(batch.events) for batch in reader.poll()]
    journal.close()
    assert [] == list(reader.poll())
    assert reader.ended
