"""Histories of an engine's cache beside its stream of KV events, whole and with one thing wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.audit.checks.kv_histories import (
    BEGAN,
    CACHE,
    END,
    POOL,
    STREAM,
    at,
    batch,
    cached,
    evicted,
    reset,
    saying,
    without,
)

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import Violation
from kvledger.audit.events import Event, Gap, KVEventsReceived
from kvledger.audit.ledger.blocks.contents import Contents
from kvledger.audit.ledger.entries import Entry
from kvledger.audit.ledger.kv_events import (
    CLEARED,
    REMOVED,
    STORED,
    KVComparison,
    KVEventCounts,
)

violates, near_miss = pytest.mark.violates, pytest.mark.near_miss


def compared(
    stream: Sequence[KVEventsReceived], cache: Sequence[Sequence[Event]] = CACHE, end: int = END
) -> tuple[KVComparison, KVEventCounts]:
    """Compare two whole accounts in one pass."""
    comparison, counts, contents = KVComparison(), KVEventCounts(), Contents()
    comparison.began = BEGAN
    for event in [POOL, *(event for some in cache for event in some)]:
        comparison.cache.feed(event, contents.read(event))
    for each in stream:
        comparison.receive(each, BEGAN + end, counts)
    comparison.advance(BEGAN + end, BEGAN + end, counts, ended=True)
    return comparison, counts


def counted(stream: Sequence[KVEventsReceived], **more: Any) -> KVEventCounts:
    return compared(stream, **more)[1]


def found(stream: Sequence[KVEventsReceived], **more: Any) -> list[Violation]:
    auditor = Auditor(debug=True)
    for subject, step, when in compared(stream, **more)[0].differences():
        auditor.check([Entry(0, step, when, subject, None)])
    return auditor.violations


def test_a_whole_stream_agrees_with_the_cache() -> None:
    counts = counted(STREAM)

    assert ([], {"stored": 5, "removed": 1}) == (found(STREAM), counts.matched)
    assert (0, 0, 0) == (counts.in_flight, counts.before, counts.repeated)


@violates("events/gap")
def test_a_gap_names_the_changes_that_were_in_it() -> None:
    (gap,) = found(without(2, 3))

    assert "events/gap" == gap.id
    assert (2, 3, 1, 1) == tuple(gap.figures[name] for name in ("first", "last", "stores", "removals"))
    assert ([5], [5]) == (gap.figures["stored_blocks"], gap.figures["removed_blocks"])
    assert "batches" in gap.message and 60 == gap.step


def test_each_gap_is_a_finding_of_its_own() -> None:
    gaps = found(without(1, 3))

    assert [(1, [6]), (3, [5])] == [(gap.figures["first"], gap.figures["stored_blocks"]) for gap in gaps]


@near_miss("events/gap")
@pytest.mark.parametrize(
    "stream",
    [
        [STREAM[0], *STREAM[3:], *STREAM[1:3]],
        [*STREAM, *STREAM[2:4]],
        STREAM[2:],
        STREAM[:4],
    ],
    ids=["replayed later", "received twice", "the recording began later", "the recording ended sooner"],
)
def test_batches_that_are_not_lost(stream: list[KVEventsReceived]) -> None:
    assert [] == found(stream)


def test_changes_outside_the_recording_are_counted_and_not_judged() -> None:
    assert (2, 0) == (counted(STREAM[2:]).before, counted(STREAM[2:]).in_flight)
    assert (0, 2) == (counted(STREAM[:4]).before, counted(STREAM[:4]).in_flight)


@violates("events/not-announced")
@pytest.mark.parametrize(("sequence", "what"), [(1, "blocks cached"), (2, "blocks evicted")])
def test_a_change_that_no_event_announces(sequence: int, what: str) -> None:
    (finding,) = found(saying(sequence))

    assert ("events/not-announced", what) == (finding.id, finding.figures["what"])
    assert [6 if sequence == 1 else 5] == finding.figures["blocks"]


@violates("events/not-announced")
def test_a_reset_that_no_event_announces() -> None:
    cache = [*CACHE[:4], reset(70), *CACHE[4:]]
    (finding,) = found(STREAM, cache=cache)

    assert (CLEARED, 2) == (CLEARED, finding.figures["hashes"])
    assert "resets of the cache" == finding.figures["what"]


@near_miss("events/not-announced")
def test_a_reset_that_is_announced_removes_every_block() -> None:
    cache = [*CACHE[:4], reset(70), cached(80, 7, 60), CACHE[5]]
    stream = [*STREAM[:4], batch(4, 80, (CLEARED, 0), (STORED, 60)), STREAM[5]]

    assert [] == found(stream, cache=cache)
    assert 1 == counted(stream, cache=cache).matched["cleared"]


@near_miss("events/not-announced")
def test_the_last_changes_may_not_be_published_yet() -> None:
    assert [] == found(STREAM, cache=[*CACHE, cached(101, 9, 90)])
    assert 1 == counted(STREAM, cache=[*CACHE, cached(101, 9, 90)]).in_flight


@violates("events/not-in-cache")
@pytest.mark.parametrize(
    ("said", "what"),
    [
        (((STORED, 70), (STORED, 99)), "stored blocks"),
        (((STORED, 70), (REMOVED, 99)), "removed blocks"),
        (((STORED, 70), (CLEARED, 0)), "all blocks cleared"),
    ],
)
def test_an_event_without_a_change_of_the_cache(said: tuple[tuple[int, int], ...], what: str) -> None:
    (finding,) = found(saying(3, *said))

    assert ("events/not-in-cache", what, 3) == (finding.id, finding.figures["what"], finding.figures["batch"])


@violates("events/stored-but-cached")
@near_miss("events/not-in-cache")
def test_a_store_of_a_cached_block_is_a_repeated_report() -> None:
    stream = saying(3, (STORED, 60), (STORED, 70))
    (drift,) = found(stream)

    assert ("events/stored-but-cached", "drift", 1) == (drift.id, drift.severity, drift.figures["number"])
    assert 1 == counted(stream).repeated


@near_miss("events/stored-but-cached")
def test_a_hash_that_was_removed_is_stored_again() -> None:
    assert [] == found(STREAM)


@violates("events/parent-not-announced")
@pytest.mark.parametrize("parent", [99, 50], ids=["never announced", "removed"])
def test_a_store_after_a_parent_that_the_stream_does_not_have(parent: int) -> None:
    (finding,) = found(saying(3, (STORED, 70, parent)))

    assert ("events/parent-not-announced", 1, 3) == (
        finding.id, finding.figures["number"], finding.figures["batch"]
    )  # fmt: skip
    assert f"stored h46 after h{parent:x}" in finding.story[0]


@near_miss("events/parent-not-announced")
@pytest.mark.parametrize(
    "stream",
    [
        saying(3, (STORED, 70, 60)),
        saying(4, (STORED, 50), (STORED, 50, 50))[:5],
        saying(3, (STORED, 70, 99), spec="sliding_window 64"),
        saying(3, (STORED, 70, 99), spec=""),
        [*STREAM[:1], *saying(3, (STORED, 70, 60))[2:]],
        saying(3, (STORED, 70, 99))[2:],
    ],
    ids=[
        "announced",
        "in this batch",
        "of a window",
        "of an unknown kind",
        "in a lost batch",
        "before the recording",
    ],
)
def test_a_store_whose_parent_may_be_in_the_index(stream: list[KVEventsReceived]) -> None:
    assert "events/parent-not-announced" not in {each.id for each in found(stream)}


@violates("events/parent-not-announced")
def test_a_parent_is_judged_again_after_a_reset_that_follows_lost_batches() -> None:
    cache = [*CACHE[:4], reset(70), cached(80, 7, 50), CACHE[5]]
    stream = [STREAM[0], *STREAM[2:4], batch(4, 80, (CLEARED, 0), (STORED, 50, 70)), STREAM[5]]

    assert ["events/gap", "events/parent-not-announced"] == sorted(
        each.id for each in found(stream, cache=cache)
    )


@near_miss("events/not-in-cache")
def test_two_blocks_with_one_hash_are_stored_and_removed_twice() -> None:
    cache = [cached(1, 5, 50), cached(20, 6, 50), evicted(40, 5), evicted(60, 6), cached(100, 8, 80)]
    stream = [
        batch(0, 1, (STORED, 50)),
        batch(1, 20, (STORED, 50)),
        batch(2, 40, (REMOVED, 50)),
        batch(3, 60, (REMOVED, 50)),
        batch(4, 100, (STORED, 80)),
    ]

    assert ["events/removed-but-cached"] == [each.id for each in found(stream, cache=cache)]
    assert ["events/gap"] == [each.id for each in found(stream[:3] + stream[4:], cache=cache)][:1]


COPIES = [
    cached(1, 5, 50), cached(20, 6, 50), evicted(40, 5), cached(60, 7, 50), evicted(80, 7), evicted(90, 6),
]  # fmt: skip
"""Content 50 is cached in two blocks, then in one, in two, in one, and in none."""


def copies_said(*removals: int) -> list[KVEventsReceived]:
    """A stream that announces every store of these, and the removals after these steps."""
    said = [(1, STORED), (20, STORED), (60, STORED), *((step, REMOVED) for step in removals)]
    return [batch(number, step, (kind, 50)) for number, (step, kind) in enumerate(sorted(said))]


@violates("events/removed-but-cached")
def test_a_removal_of_a_block_whose_hash_stays_cached() -> None:
    (finding,) = found(copies_said(40, 80, 90), cache=COPIES)

    assert ("events/removed-but-cached", 5, 40, 1, 80) == (
        finding.id, finding.figures["block"], finding.step, finding.repeats, finding.last_step
    )  # fmt: skip
    assert "step 40: evicted h32, block 5 of pool 0" == finding.story[0]


@near_miss("events/removed-but-cached")
def test_the_last_block_with_a_hash_is_removed() -> None:
    assert [] == found(STREAM)


@near_miss("events/removed-but-cached")
def test_one_reset_drops_two_blocks_with_a_hash() -> None:
    cache = [cached(1, 5, 50), cached(20, 6, 50), reset(40), cached(60, 7, 50), evicted(80, 7)]
    stream = [
        batch(0, 1, (STORED, 50)),
        batch(1, 20, (STORED, 50)),
        batch(2, 50, (CLEARED, 0)),
        batch(3, 60, (STORED, 50)),
        batch(4, 80, (REMOVED, 50)),
    ]

    assert [] == found(stream, cache=cache)


@near_miss("events/not-announced")
def test_a_stream_of_contents_announces_only_the_removal_of_the_last_block() -> None:
    assert [] == found(copies_said(90), cache=COPIES)
    assert 2 == counted(copies_said(90), cache=COPIES).copies
    later = batch(3, 100, (STORED, 80))
    silent = found([*copies_said(), later], cache=[*COPIES, cached(100, 8, 80)])
    assert [("events/not-announced", [6])] == [(each.id, each.figures["blocks"]) for each in silent]


@near_miss("events/not-in-cache")
def test_a_journal_that_is_not_whole_proves_nothing_of_an_event() -> None:
    assert [] == found(STREAM, cache=[*CACHE[:2], [Gap(at(30), 3, "full")], *CACHE[3:]])
    assert [] == found(STREAM, cache=CACHE[:5], end=99)  # the engine's journal ends before the last batch


@near_miss("events/not-in-cache")
def test_blocks_of_another_tier_are_not_in_the_engines_cache() -> None:
    stream = [*STREAM[:3], batch(3, 50, (STORED, 50), tier="CPU"), *_renumbered(STREAM[3:])]

    assert [] == found(stream)
    assert 1 == counted(stream).other_tiers


def _renumbered(stream: list[KVEventsReceived]) -> list[KVEventsReceived]:
    from msgspec.structs import replace

    return [replace(each, sequence=each.sequence + 1) for each in stream]


@violates("events/tier-missing")
def test_events_without_a_tier_beside_those_of_another_tier() -> None:
    stream = [batch(0, 1, (STORED, 50), tier=""), *STREAM[1:], batch(6, 110, (STORED, 50), tier="CPU")]

    assert ["events/tier-missing"] == [each.id for each in found(stream)]


@near_miss("events/tier-missing")
def test_a_release_that_never_names_tiers() -> None:
    stream = [
        KVEventsReceived(
            0, 0, each.sequence, each.published_seconds, 0, [], [*each.rows[:2], -1, *each.rows[3:]]
        )
        for each in STREAM
    ]

    assert [] == found(stream)


@violates("events/gap")
def test_a_change_that_may_have_been_made_earlier_is_paired_with_the_nearest_event() -> None:
    """Content 50 is cached and evicted again and again, at most eight steps before the journal says so."""
    cache = [
        change
        for n in range(12)
        for change in (cached(2 * n + 1, 5 + n % 3, 50), evicted(2 * n + 2, 5 + n % 3))
    ]
    stream = [batch(n, n + 1, (STORED if n % 2 == 0 else REMOVED, 50)) for n in range(24)]
    (gap,) = found([each for each in stream if each.sequence not in (12, 13)], cache=cache, end=24)

    assert ("events/gap", 12, 13) == (gap.id, gap.figures["first"], gap.figures["last"])
    assert "step 13: cached" in gap.story[0] and "step 14: evicted" in gap.story[1]
