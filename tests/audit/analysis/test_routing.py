"""Predicted and found tokens of requests on two engines, and the cause of each difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvledger.audit import events as ev
from kvledger.audit.analysis.cache_misses import SLIDING, Group
from kvledger.audit.analysis.routing import (
    COPY_REMOVED,
    ELSEWHERE,
    EVENT_LOST,
    EVICTED,
    EXTERNAL,
    INDEX,
    LAST_TOKEN,
    LOAD_FAILED,
    NEVER_STORED,
    NOT_USED,
    OTHER_SALT,
    PART,
    RESTARTED,
    STORED_SINCE,
    UNKNOWN,
    EngineSide,
    RecentCounts,
    RoutedCache,
    RoutedRequest,
    Row,
    Sides,
    TokensIndex,
    UncountedIndex,
    contents_of,
    row_of,
)
from kvledger.audit.causes import WINDOW
from kvledger.audit.ledger.kv_events import CLEARED, REMOVED, STORED, Change, kv_events
from kvledger.audit.replay.recorded_events import asked_in_order

SIZE = 16
PROMPT = [11, 12, 13, 14]
"""The hash ids of a prompt of 70 tokens."""


SALTED = [91, 92, 93, 94]
"""The hash ids of the same tokens under another salt."""
TOKENS = {hash_id: place for ids in (PROMPT, SALTED) for place, hash_id in enumerate(ids, 1)}


def stored(*ids: int) -> list[tuple[int, int]]:
    return [(STORED, number) for number in ids]


def removed(*ids: int) -> list[tuple[int, int]]:
    return [(REMOVED, number) for number in ids]


RESET = [(CLEARED, 0)]


def changes(said: Sequence[tuple[int, int]]) -> list[Change]:
    return [Change(kind, number, n, n, n, 0, n, -1) for n, (kind, number) in enumerate(said)]


def batches(said: Sequence[tuple[float, int, int]]) -> list[tuple[float, ev.KVEventsReceived]]:
    found = []
    for n, (received, kind, number) in enumerate(said):
        ids = [] if kind == CLEARED else [number]
        row = [kind, 0, 0, SIZE, 0, len(ids), *ids]
        found.append((received, ev.KVEventsReceived(0, 0, n, received, 0, ["GPU"], row)))
    return found


class Told(RecentCounts, kw_only=True):
    """Our own index of one engine, by the content of the blocks, and the batches from which it was made."""

    batches: list[tuple[float, ev.KVEventsReceived]]
    contents: Mapping[int, int] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        for at, batch in self.batches:
            for event, _ in kv_events(batch):
                if event.kind == CLEARED:
                    self.clear(at)
                else:
                    self.add(at, self.contents.get(event.hash_id, event.hash_id), event.kind)


def cache_of(some: Sequence[Change], *, whole: bool = True) -> RoutedCache:
    """A cache with these changes."""
    cache = RoutedCache()
    cache.block_tokens, cache.whole = SIZE, whole
    for number, change in enumerate(some):
        if change.kind == CLEARED:
            cache.recent.clear(number, change)
        else:
            cache.recent.add(number, change.hash_id, change.kind, change)
    return cache


def engine(
    cache: Sequence[tuple[int, int]],
    told: Sequence[tuple[int, int]] | None = None,
    *,
    late: Sequence[tuple[int, int]] = (),
    lost: Sequence[int] = (),
    whole: bool = True,
) -> EngineSide:
    """An engine with these changes. ``told`` before the request arrives at 100, ``late`` after it."""
    history = changes(cache)
    said = [(1.0, *each) for each in (cache if told is None else told)] + [(200.0, *each) for each in late]
    batch = batches(said)
    return EngineSide(
        cache_of(history, whole=whole),
        Told(batches=batch),
        Told(batches=batch, contents=TOKENS),
        0.0,
        math.inf,
        {},
        {history[n] for n in lost},
        object(),
        batch[0][0] if batch else math.inf,
    )


def request(local: int, *, hashes: Sequence[int] = PROMPT, **more: Any) -> RoutedRequest:
    fields: dict[str, Any] = {"engine": 0, "prompt_tokens": 70, "external": 0, "failed": 0} | more
    return RoutedRequest("r", 7, fields.pop("engine"), fields.pop("prompt_tokens"), list(hashes), 100.0, 1000,
                         1000, local, fields["external"], fields["failed"])  # fmt: skip


def row(asked: RoutedRequest, *engines: EngineSide, held: Mapping[int, int] | None = None) -> Row:
    found = row_of(dict(enumerate(engines)), asked, held)
    assert found.predicted - found.found == sum(found.missed.values()) - sum(found.surplus.values())
    return found


def test_an_index_that_is_right_differs_in_nothing():
    found = row(request(64), engine(stored(*PROMPT)))

    assert (64, 64, {}, {}) == (found.predicted, found.found, found.missed, found.surplus)


@pytest.mark.parametrize(
    ("side", "local", "causes"),
    [
        (engine([*stored(*PROMPT), *removed(13)], stored(*PROMPT)), 32, {EVICTED: 16 + 16}),
        (engine([*stored(*PROMPT), *removed(13)], stored(*PROMPT), lost=[4]), 32, {EVENT_LOST: 32}),
        (engine([*stored(*PROMPT), *removed(13, 14)], stored(*PROMPT), lost=[5]), 32,
         {EVICTED: 16, EVENT_LOST: 16}),
        (engine([*stored(*PROMPT), *RESET], stored(*PROMPT)), 0, {EVICTED: 64}),
        (engine([*stored(*PROMPT), *RESET], stored(*PROMPT), lost=[4]), 0, {EVENT_LOST: 64}),
        (engine(stored(11, 12), stored(*PROMPT)), 32, {NEVER_STORED: 32}),
        (engine(stored(11, 12), stored(*PROMPT), whole=False), 32, {UNKNOWN: 32}),
        (engine(stored(*PROMPT)), 32, {NOT_USED: 32}),
    ],
    ids=["evicted", "removal lost", "one of two lost", "reset", "reset lost", "never stored", "not whole",
         "not used"],
)  # fmt: skip
def test_predicted_tokens_that_were_not_found(side: EngineSide, local: int, causes: dict[str, int]):
    found = row(request(local), side)

    assert (causes, {}) == (found.missed, found.surplus)


@pytest.mark.parametrize(
    ("side", "asked", "causes"),
    [
        (engine(stored(*PROMPT), stored(11), late=stored(12, 13, 14)), request(64), {STORED_SINCE: 48}),
        (engine(stored(*PROMPT), stored(11, 13, 14), lost=[1]), request(64), {EVENT_LOST: 48}),
        (engine(stored(11)), request(16, external=48), {EXTERNAL: 48}),
        (engine(stored(11)), request(20, external=44), {PART: 4, EXTERNAL: 44}),
        (engine([], whole=False), request(16), {UNKNOWN: 16}),
    ],
    ids=["announced later", "store lost", "the connector's store", "part of a block", "from before"],
)
def test_found_tokens_that_were_not_predicted(side: EngineSide, asked: RoutedRequest, causes: dict[str, int]):
    found = row(asked, side)

    assert ({}, causes) == (found.missed, found.surplus)


WINDOWS = {11: 211, 12: 212, 13: 213, 14: 214}
"""By the hash id of a block of full attention: that of the same tokens in a group of sliding windows."""


def with_windows(side: EngineSide) -> EngineSide:
    """The engine has a group of windows, of which a hit needs the last block."""
    side.cache.others = [Group(1, SIZE, SLIDING, SIZE)]
    for place, hash_id in enumerate(PROMPT, 1):
        side.cache.in_groups[1, place * SIZE, hash_id] = WINDOWS[hash_id]
    return side


@pytest.mark.parametrize(
    ("said", "then", "lost", "local", "causes"),
    [
        ([*PROMPT, 212, 214], [], [], 64, ({}, {})),
        ([*PROMPT, 212], [], [], 32, ({}, {})),
        ([*PROMPT, 212, 214], [214], [], 32, ({EVICTED: 32}, {})),
        ([*PROMPT, 212, 214], [214], [6], 32, ({EVENT_LOST: 32}, {})),
        ([*PROMPT, 212, 214], [214, 13], [], 32, ({EVICTED: 32}, {})),
        ([*PROMPT, 212], [-214], [], 64, ({}, {STORED_SINCE: 32})),
    ],
    ids=["at the last block", "before it", "evicted", "removal lost", "both evicted", "announced later"],
)
def test_a_promise_ends_where_all_groups_have_what_they_need(
    said: list[int], then: list[int], lost: list[int], local: int, causes: tuple[dict[str, int], ...]
):
    """``then``: removed since, or, if negative, stored since."""
    late = [(REMOVED, each) if each > 0 else (STORED, -each) for each in then]
    side = with_windows(engine([*stored(*said), *late], stored(*said), lost=lost))

    found = row(request(local), side)

    assert causes == (found.missed, found.surplus)


def test_an_index_of_one_group_promises_what_the_window_lacks():
    side = with_windows(engine(stored(*PROMPT, 212)))

    assert {WINDOW: 32} == row(request(32), side, held={0: 4}).missed


def test_tokens_that_only_another_engine_had():
    here, there = engine([*stored(*PROMPT), *removed(12)], stored(11, 12)), engine(stored(*PROMPT))
    found = row(request(16), here, there)

    assert (1, 64, 32, 16) == (found.best, found.predicted, found.predicted_here, found.found)
    assert {EVICTED: 16, ELSEWHERE: 32} == found.missed


def test_an_engine_that_is_gone_promises_nothing():
    here, gone = engine(stored(11)), engine(stored(*PROMPT))._replace(ended=99.0)

    assert (16, {}) == (row(request(16), here, gone).predicted, row(request(16), here, gone).missed)
    assert {ELSEWHERE: 48} == row(request(16), here, gone._replace(ended=101.0)).missed


def restarted(*said: tuple[int, int]) -> tuple[EngineSide, EngineSide]:
    """An engine, and the one that was started after it at the same address; it says this before 100."""
    gone = engine(stored(*PROMPT))._replace(ended=50.0)
    return gone, engine(said)._replace(address=gone.address, began=51.0)


def test_a_restarted_engine_has_nothing_of_what_the_one_before_announced():
    found = row(request(0, engine=1), *restarted())

    assert (64, 0, {RESTARTED: 64}) == (found.predicted, found.found, found.missed)


def test_the_first_batch_of_a_restarted_engine_tells_the_index():
    found = row(request(16, engine=1), *restarted(*stored(11)))

    assert (16, 16, {}) == (found.predicted, found.found, found.missed)
    assert {} == row(request(0, engine=1), *restarted(*stored(77))).missed


def test_a_restart_explains_no_request_of_another_engine():
    gone, again = restarted()

    assert {} == row(request(0, engine=2), gone, again, engine([])).missed
    assert {ELSEWHERE: 64} == row(request(0, engine=2), gone, again._replace(address=object()), engine([]),
                                  engine(stored(*PROMPT))).missed  # fmt: skip


def test_the_block_with_the_last_token_is_always_computed():
    found = row(request(48, prompt_tokens=64), engine(stored(*PROMPT)))

    assert {LAST_TOKEN: 16} == found.missed


def test_tokens_whose_load_failed():
    found = row(request(16, external=48, failed=48), engine(stored(*PROMPT)))

    assert {LOAD_FAILED: 48} == found.missed


def test_what_the_request_itself_caches_came_after_its_lookup():
    own = Change(STORED, 12, 5, 5, 1000, 0, 12, 7)
    side = engine(stored(11), stored(*PROMPT))._replace(cache=cache_of([*changes(stored(11)), own]))

    assert {NEVER_STORED: 48} == row(request(16), side).missed


def test_two_blocks_with_one_hash_are_held_until_both_are_removed():
    side = engine([*stored(11, 11), *removed(11)])

    assert {} == row(request(16, hashes=[11]), side).missed


def test_a_block_above_one_whose_event_was_lost_has_the_same_cause():
    """The best engine is another one, so the surplus begins above the block that the index lacks."""
    here = engine(stored(*PROMPT), stored(12, 13, 14), lost=[0])
    found = row(request(64), here, engine(stored(11, 12)))

    assert (1, 32, 0, 64) == (found.best, found.predicted, found.predicted_here, found.found)
    assert {EVENT_LOST: 32} == found.surplus


def test_an_index_that_does_not_count_lacks_what_is_cached_in_another_block():
    side = engine([*stored(*PROMPT, 12), *removed(12)])
    asked = request(64)
    held = asked_in_order(
        UncountedIndex({}), [(asked, {0: side})], [(at, 0, batch) for at, batch in side.announced.batches]
    )

    assert {0: 1} == held[0, asked.number]
    assert {COPY_REMOVED: 48} == row_of({0: side}, asked, held[0, asked.number], TOKENS).surplus
    assert {} == row(asked, side).surplus


def test_an_index_with_a_rule_of_its_own():
    assert {INDEX: 64} == row(request(64), engine(stored(*PROMPT)), held={}).surplus


# --- salts and adapters -----------------------------------------------------------------------------------


def by_tokens(asked: RoutedRequest, *engines: EngineSide) -> Row:
    """The row by an index that does not know salts."""
    sides: Sides = dict(enumerate(engines))
    told = [(at, n, batch) for n, each in enumerate(engines) for at, batch in each.by_tokens.batches]
    held = asked_in_order(TokensIndex(TOKENS), [(asked, sides)], told)
    found = row_of(sides, asked, held[asked.engine, asked.number], TOKENS)
    assert found.predicted - found.found == sum(found.missed.values()) - sum(found.surplus.values())
    return found


def test_the_same_tokens_under_another_salt_are_promised_and_not_found():
    found = by_tokens(request(0), engine(stored(*SALTED)))

    assert (64, 0, {OTHER_SALT: 64}) == (found.predicted, found.found, found.missed)


def test_an_index_that_knows_salts_promises_nothing():
    found = row(request(0), engine(stored(*SALTED)))

    assert (0, 0, {}, {}) == (found.predicted, found.found, found.missed, found.surplus)


@pytest.mark.parametrize(
    ("side", "local", "causes"),
    [
        (engine(stored(*PROMPT, *SALTED)), 64, {}),
        (engine([*stored(*SALTED, *PROMPT), *removed(13)], stored(*SALTED, *PROMPT)), 32, {EVICTED: 32}),
        (engine([*stored(*SALTED, *PROMPT), *removed(13, 14)], [*stored(*SALTED, *PROMPT), *removed(13, 14)]),
         32, {OTHER_SALT: 32}),
        (engine([*stored(*PROMPT), *removed(13)], stored(*PROMPT)), 32, {EVICTED: 32}),
        (engine([*stored(*PROMPT), *removed(13)], stored(*PROMPT), lost=[4]), 32, {EVENT_LOST: 32}),
    ],
    ids=["both salts cached", "evicted, the event comes", "evicted, the event came", "no other salt", "lost"],
)  # fmt: skip
def test_a_block_that_was_announced_under_its_own_salt_has_its_own_cause(
    side: EngineSide, local: int, causes: dict[str, int]
):
    assert causes == by_tokens(request(local), side).missed


def test_another_engine_has_the_tokens_under_another_salt_only():
    here, there = engine(stored(11)), engine(stored(11, 92, 93))
    found = by_tokens(request(16), here, there)

    assert (1, 48, 16) == (found.best, found.predicted, found.found)
    assert {OTHER_SALT: 32} == found.missed
    assert {ELSEWHERE: 32} == by_tokens(request(16), here, engine(stored(11, 12, 13))).missed


def test_a_restarted_engine_had_the_tokens_under_another_salt():
    gone = engine(stored(*SALTED))._replace(ended=50.0)
    again = engine([])._replace(address=gone.address, began=51.0)

    assert {RESTARTED: 64} == by_tokens(request(0, engine=1), gone, again).missed


def test_the_tokens_of_blocks_are_read_from_stores_only():
    rows_of = [STORED, 0, 0, SIZE, 0, 2, 11, 12, REMOVED, 0, 0, 0, 0, 1, 13, STORED, 0, 0, SIZE, 12, 1, 14]
    batch = ev.KVEventsReceived(0, 0, 0, 1.0, 0, ["GPU"], rows_of, contents=[1, 2, 0])

    assert {11: 1, 12: 2} == contents_of([batch])


# --- what a router itself predicted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("side", "local", "blocks", "missed", "surplus"),
    [
        (engine(stored(*PROMPT)), 64, 4, {}, {}),
        (engine(stored(*PROMPT)), 64, 1, {}, {INDEX: 48}),
        (engine([*stored(*PROMPT), *removed(13, 14)]), 32, 4, {INDEX: 32}, {}),
        (engine([*stored(*PROMPT), *removed(13)], stored(*PROMPT)), 32, 4, {EVICTED: 32}, {}),
        (engine(stored(11, 12)), 32, 3, {INDEX: 16}, {}),
        (engine([*stored(*PROMPT, 12), *removed(12)]), 64, 1, {}, {COPY_REMOVED: 48}),
        (engine([*stored(*PROMPT, 12), *removed(12), *stored(12)]), 64, 1, {}, {INDEX: 48}),
    ],
    ids=[
        "right",
        "too little",
        "evicted, and told",
        "evicted, not told yet",
        "never stored",
        "dropped at the removal of a copy",
        "stored once more since",
    ],
)
def test_the_causes_of_a_routers_own_prediction(
    side: EngineSide, local: int, blocks: int, missed: dict[str, int], surplus: dict[str, int]
):
    found = row(request(local), side, held={0: blocks})

    assert (missed, surplus) == (found.missed, found.surplus)


def test_a_router_that_has_not_heard_of_a_restart():
    gone, again = restarted(*stored(77))
    fresh = again._replace(address=object())

    assert {RESTARTED: 64} == row(request(0, engine=1), gone, again, held={1: 4}).missed
    assert {INDEX: 64} == row(request(0, engine=1), gone, fresh, held={1: 4}).missed
