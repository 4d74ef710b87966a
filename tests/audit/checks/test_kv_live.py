"""Comparing KV events with the cache while both grow finds what comparing them in one pass finds."""

from __future__ import annotations

import random
from collections.abc import Sequence

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
from tests.audit.checks.test_kv_events import found as found_whole

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.checks.registry import Violation
from kvledger.audit.events import Event, KVEventsReceived
from kvledger.audit.ledger import kv_events
from kvledger.audit.ledger.blocks.contents import Contents
from kvledger.audit.ledger.entries import Entry
from kvledger.audit.ledger.kv_events import CLEARED, REMOVED, STORED, KVComparison, KVEventCounts


class Live:
    """Feeds a comparison second by second, as the sidecar does."""

    def __init__(self) -> None:
        self.comparison, self.counts = KVComparison(), KVEventCounts()
        self.comparison.began = BEGAN
        self.contents = Contents()
        self.comparison.cache.feed(POOL, self.contents.read(POOL))
        self.auditor = Auditor(debug=True)

    def run(
        self,
        stream: Sequence[KVEventsReceived],
        cache: Sequence[Sequence[Event]] = CACHE,
        *,
        end: int = END,
        late: float = 0.0,
        ended: bool = True,
    ) -> list[Violation]:
        """``late``: how long after its publication each batch is received."""
        events = sorted((event for some in cache for event in some), key=lambda event: event.at)
        batches, place = list(stream), 0
        for second in range(end + 1):
            while place < len(events) and events[place].at <= at(second):
                self.comparison.cache.feed(events[place], self.contents.read(events[place]))
                place += 1
            now = BEGAN + second
            for each in [one for one in batches if one.published_seconds + late <= now]:
                batches.remove(each)
                self.comparison.receive(each, now, self.counts)
            self.note(now, now)
        if ended:
            self.note(BEGAN + end, BEGAN + end, ended=True)
        return self.auditor.violations

    def note(self, now: float, until: float, *, ended: bool = False) -> None:
        self.comparison.advance(now, until, self.counts, ended=ended)
        for subject, step, when in self.comparison.differences():
            self.auditor.check([Entry(0, step, when, subject, None)])


def found(stream: Sequence[KVEventsReceived], **more: object) -> list[Violation]:
    return Live().run(stream, **more)  # type: ignore[arg-type]


RESET_CACHE = [*CACHE[:4], reset(70), cached(80, 7, 60), CACHE[5]]
RESET_STREAM = [*STREAM[:4], batch(4, 80, (CLEARED, 0), (STORED, 60)), STREAM[5]]

CASES: dict[str, tuple[list[KVEventsReceived], Sequence[Sequence[Event]]]] = {
    "whole": (STREAM, CACHE),
    "a gap": (without(2, 3), CACHE),
    "two gaps": (without(1, 3), CACHE),
    "received in another order": ([STREAM[0], *STREAM[3:], *STREAM[1:3]], CACHE),
    "received twice": ([*STREAM, *STREAM[2:4]], CACHE),
    "the recording began later": (STREAM[2:], CACHE),
    "the recording ended sooner": (STREAM[:4], CACHE),
    "a store is not announced": (saying(1), CACHE),
    "a removal is not announced": (saying(2), CACHE),
    "a reset is announced": (RESET_STREAM, RESET_CACHE),
    "a reset is not announced": (STREAM, [*CACHE[:4], reset(70), *CACHE[4:]]),
    "a store of no block": (saying(3, (STORED, 70), (STORED, 99)), CACHE),
    "a removal of no block": (saying(3, (STORED, 70), (REMOVED, 99)), CACHE),
    "a clearing without a reset": (saying(3, (STORED, 70), (CLEARED, 0)), CACHE),
    "a repeated store": (saying(3, (STORED, 60), (STORED, 70)), CACHE),
    "a repeated store before a reset": (
        [
            *STREAM[:4],
            batch(4, 65, (STORED, 60)),
            batch(5, 70, (CLEARED, 0)),
            batch(6, 80, (STORED, 60)),
            batch(7, 100, (STORED, 80)),
        ],
        RESET_CACHE,
    ),
    "a gap before the last batch": (without(4), CACHE),
    "a tier is missing": (
        [batch(0, 1, (STORED, 50), tier=""), *STREAM[1:], batch(6, 110, (STORED, 50), tier="CPU")],
        CACHE,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_pass_and_many_find_the_same(name: str) -> None:
    stream, cache = CASES[name]
    figures = [
        sorted((each.id, str(sorted(each.figures.items()))) for each in some)
        for some in (found_whole(stream, cache=cache), found(stream, cache=cache))
    ]

    assert figures[0] == figures[1]


def test_a_store_that_is_repeated_before_a_reset_is_a_drift_alone() -> None:
    stream, cache = CASES["a repeated store before a reset"]

    assert ["events/stored-but-cached"] == [each.id for each in found(stream, cache=cache)]


def test_a_gap_before_the_last_batch_is_found_when_the_engine_ends() -> None:
    (gap,) = found(without(4))

    assert (4, [7]) == (gap.figures["first"], gap.figures["stored_blocks"])


def test_a_gap_is_found_while_the_engine_runs_and_names_what_was_in_it() -> None:
    live = Live()
    (gap,) = live.run(without(2, 3), ended=False)

    assert ("events/gap", [5], [5]) == (gap.id, gap.figures["stored_blocks"], gap.figures["removed_blocks"])
    assert (1, 2, 4) == (live.counts.gaps, live.counts.lost_batches, live.counts.batches)
    assert {"stored": 4} == live.counts.announced and 4 == live.counts.agreed


def test_the_last_changes_after_a_lost_one_of_the_same_content_are_compared() -> None:
    cache = [*CACHE[:3], cached(99, 5, 50)]
    stream = [*STREAM[:2], batch(3, 41), batch(4, 99, (STORED, 50))]
    live = Live()
    (gap,) = live.run(stream, cache, end=100)

    assert [5] == gap.figures["removed_blocks"]
    assert (3, 0) == (live.counts.agreed, live.counts.not_compared)


def test_batches_that_come_within_the_horizon_are_not_lost() -> None:
    live = Live()

    assert [] == live.run(STREAM, late=kv_events.HORIZON_SECONDS - 5, ended=False)
    assert (0, 6) == (live.counts.gaps, live.counts.agreed)


def test_only_what_has_no_counterpart_yet_is_kept() -> None:
    live, choose = Live(), random.Random(1)
    cache: list[list[Event]] = []
    stream: list[KVEventsReceived] = []
    held: dict[int, int] = {}
    copies = 0
    for step in range(1, 2000):
        block, said = choose.randrange(1, 50), []
        if block in held:
            cache.append(evicted(step, block))
            said.append((REMOVED, held.pop(block)))
            copies += said[0][1] in held.values()
        else:
            held[block] = choose.randrange(1, 90)
            cache.append(cached(step, block, held[block]))
            said.append((STORED, held[block]))
        stream.append(batch(step - 1, step, *said))

    found = live.run(stream, cache, end=2000, ended=False)
    assert [("events/removed-but-cached", copies)] == [(each.id, each.repeats + 1) for each in found]
    assert 1999 == live.counts.agreed
    assert live.comparison.kept <= 2 and len(live.comparison.blocks) <= 50
    assert [] == live.comparison.cache.changes


def test_an_engine_without_a_recording_keeps_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MOST", 3)
    live = Live()

    assert [] == live.run(STREAM[5:], [*CACHE[:5]], end=90, ended=False)
    assert live.counts.not_compared and live.comparison.kept <= 3
    assert [] == live.run(STREAM[5:], [CACHE[5]], ended=True)
