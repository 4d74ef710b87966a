"""Violations and near misses of the invariants of the encoder cache."""

from __future__ import annotations

import pytest
from tests.audit.checks.false_reports import audited, violation_ids, without_drifts

from kvledger.audit.events import (
    ENCODER_CLEARED,
    ENCODER_COMPUTED,
    ENCODER_EVICTED,
    ENCODER_HIT,
    ENCODER_REMOVED,
    ENCODER_RESERVED,
    Admitted,
    Delivered,
    EncoderCacheSeen,
    EncoderCacheUsed,
    EncoderInputsSeen,
    Event,
    Finished,
    LookedUp,
    Preempted,
    RequestAdded,
    Stepped,
)

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

CAT, DOG = 11, 22
SIZE = 100


def seen(free: int = SIZE, entries: list[int] | None = None, **of: bool) -> EncoderCacheSeen:
    shared, loads = of.get("shared", True), of.get("loads", False)
    return EncoderCacheSeen(0, 0, SIZE, free, shared, loads, [] if entries is None else entries)


def arrives(request: int, *inputs: tuple[int, int, int]) -> list[Event]:
    """A request of 100 tokens with inputs: identity, first position, positions (one embedding each)."""
    rows = [number for identity, start, length in inputs for number in (identity, start, length, length)]
    return [
        RequestAdded(0, request, f"r{request}", 100),
        LookedUp(0, request, 1, 0),
        Admitted(0, request, 1, False, 0, 0, False, 0),
        EncoderInputsSeen(0, request, rows),
    ]


def step(number: int, free: int, rows: list[int], **scheduled: tuple[int, int]) -> list[Event]:
    """A step that schedules tokens of requests, up to so many computed ones, and uses the cache so."""
    changed = [
        each
        for name, (tokens, computed) in scheduled.items()
        for each in (int(name[1:]), tokens, 0, computed)
    ]
    return [Stepped(0, number, changed, []), EncoderCacheUsed(0, number, free, rows)]


def computes(request: int, of: int = 0) -> list[int]:
    return [ENCODER_RESERVED, request, of, ENCODER_COMPUTED, request, of]


OUTPUT = Delivered(0, [0, 0], [])
"""The output of a chunk of request 0."""


# --- encoder/free-space --------------------------------------------------------------------------


@violates("encoder/free-space")
def test_more_free_space_than_the_entries_leave_is_found():
    events = [seen(), *arrives(0, (CAT, 0, 30)), *step(1, 80, computes(0), r0=(50, 50))]

    (violation,) = without_drifts(audited(events))

    assert ("encoder/free-space", "r0") == (violation.id, violation.request)
    assert {"size": SIZE, "free": 80, "expected": 70, "step": 1} == violation.figures


@violates("encoder/free-space")
def test_more_free_space_than_the_cache_has_is_found_in_an_encoder_decoder_model():
    events = [seen(shared=False), *arrives(0, (CAT, 0, 30)), *step(1, 160, computes(0), r0=(50, 50))]

    (violation,) = without_drifts(audited(events))

    assert "160 embeddings of its encoder cache as free, which has 100" in violation.message


def held(freeable: int, *identities: int, **ended: int) -> EncoderCacheSeen:
    """A census of a cache that has the cat's 30 embeddings, and what requests hold of it."""
    return EncoderCacheSeen(0, 1, SIZE, 70, True, False, None, freeable, list(identities), ended)


CAT_READ = [seen(), *arrives(0, (CAT, 0, 30)), *step(1, 70, computes(0), r0=(50, 50))]


@violates("encoder/free-space")
@pytest.mark.parametrize(
    ("census", "figures"),
    [
        (held(SIZE, CAT), {"size": SIZE, "free": SIZE, "expected": 70, "step": 1}),
        (held(70), {"size": SIZE, "free": 70, "expected": SIZE, "step": 1}),
        (held(70, CAT, gone=1), {"ended": "gone", "outputs": 1, "step": 1}),
    ],
    ids=["evictable-though-held", "held-by-none-and-kept", "held-by-an-ended-request"],
)
def test_outputs_that_are_held_and_those_that_can_be_evicted_are_the_whole_cache(
    census: EncoderCacheSeen, figures: dict[str, int]
):
    (violation,) = without_drifts(audited([*CAT_READ, census]))

    assert ("encoder/free-space", figures) == (violation.id, violation.figures)


@near_miss("encoder/free-space")
@pytest.mark.parametrize(
    "events",
    [
        [seen(shared=False), *arrives(0, (CAT, 0, 30)), *step(1, SIZE, computes(0), r0=(50, 50))],
        [seen(40, [CAT, 30, DOG, -1]), *arrives(0, (7, 0, 30)), *step(1, 10, computes(0), r0=(50, 50))],
        [seen(70, [CAT, 30]), EncoderCacheUsed(0, 1, SIZE, [ENCODER_CLEARED, -1, 0])],
        [*CAT_READ, held(70, CAT), held(SIZE)],
        [*CAT_READ, held(-1, CAT), held(SIZE, DOG)],
        [*CAT_READ, held(70, CAT, r0=1)],
        [
            seen(),
            *arrives(0, (CAT, 0, 30)),
            *step(1, 70, computes(0), r0=(100, 100)),
            Delivered(0, [0, 1], []),
            Finished(0, 0, "stopped", 100, 0, 0, 101, 1),
            seen(70, [CAT, 30]),
        ],
    ],
    ids=[
        "freed-in-its-step",
        "an-entry-of-unknown-size",
        "cleared",
        "held-and-released",
        "not-counted",
        "held-by-an-open-request",
        "kept-after-its-request",
    ],
)
def test_free_space_that_the_entries_leave_is_right(events: list[Event]):
    assert [] == violation_ids(events)


# --- encoder/evicted-while-read ------------------------------------------------------------------


def begun_twice(*then: Event) -> list[Event]:
    """Request 0 has an image at two places; a step ends within the second one."""
    inputs = ((CAT, 0, 16), (CAT, 40, 16))
    return [seen(), *arrives(0, *inputs), *step(1, 84, computes(0), r0=(50, 50)), OUTPUT, *then]


@violates("encoder/evicted-while-read")
def test_an_output_that_is_evicted_within_its_second_place_is_found():
    evicted = [ENCODER_EVICTED, -1, CAT]
    events = begun_twice(*step(2, 84, [*evicted, *computes(0, 1)], r0=(50, 100)))

    (violation,) = without_drifts(audited(events))

    assert ("encoder/evicted-while-read", "r0", 6) == (violation.id, violation.request, violation.tokens)
    assert 50 == violation.figures["start"]


@near_miss("encoder/evicted-while-read")
@pytest.mark.parametrize(
    "events",
    [
        [
            seen(),
            *arrives(0, (CAT, 0, 16)),
            *step(1, 84, computes(0), r0=(50, 50)),
            OUTPUT,
            EncoderCacheUsed(0, 2, SIZE, [ENCODER_EVICTED, -1, CAT]),
        ],
        begun_twice(
            Preempted(0, 0, 2, "blocks", 50, 0, 0, 0, 0, True),
            EncoderCacheUsed(0, 2, SIZE, [ENCODER_EVICTED, -1, CAT]),
        ),
        begun_twice(
            Finished(0, 0, "aborted", 50, 0, 0, 100, 0),
            EncoderCacheUsed(0, 2, SIZE, [ENCODER_EVICTED, -1, CAT]),
        ),
    ],
    ids=["read-to-its-end", "preempted", "aborted"],
)
def test_an_output_that_no_running_request_reads_may_be_evicted(events: list[Event]):
    assert [] == violation_ids(events)


# --- encoder/not-at-worker -----------------------------------------------------------------------


@violates("encoder/not-at-worker")
@pytest.mark.parametrize(
    "before",
    [
        [ENCODER_RESERVED, 0, 0],
        [*computes(0), ENCODER_REMOVED, -1, DOG, ENCODER_REMOVED, -1, CAT],
    ],
    ids=["never-computed", "computed-in-the-step-that-removes-it"],
)
def test_an_output_that_is_reserved_and_not_computed_is_found_by_its_reader(before: list[int]):
    removed = ENCODER_REMOVED in before
    events = [
        seen(),
        *arrives(0, (CAT, 0, 16)),
        *arrives(1, (CAT, 0, 16)),
        *step(1, 84, before[:3] if not removed else computes(0), r0=(0, 0)),
        *([EncoderCacheUsed(0, 1, 84, [ENCODER_REMOVED, -1, CAT])] if removed else []),
        *step(2, 84, [ENCODER_HIT, 1, 0], r1=(50, 50)),
    ]

    (violation,) = without_drifts(audited(events))

    assert ("encoder/not-at-worker", "r1", 16) == (violation.id, violation.request, violation.tokens)


@near_miss("encoder/not-at-worker")
@pytest.mark.parametrize(
    "events",
    [
        [
            seen(),
            *arrives(0, (CAT, 0, 16)),
            *arrives(1, (CAT, 0, 16)),
            *step(1, 84, [ENCODER_HIT, 1, 0, *computes(0)], r0=(50, 50), r1=(50, 50)),
        ],
        [
            seen(84, [CAT, 16]),
            *arrives(0, (CAT, 0, 16)),
            *step(
                1,
                84,
                [ENCODER_EVICTED, -1, CAT, *computes(0), ENCODER_REMOVED, -1, CAT],
                r0=(50, 50),
            ),
        ],
        [
            seen(loads=True),
            *arrives(0, (CAT, 0, 16)),
            *step(1, 84, [ENCODER_RESERVED, 0, 0], r0=(50, 50)),
        ],
        [seen(84, [CAT, 16]), *arrives(0, (CAT, 0, 16)), *step(1, 84, [ENCODER_HIT, 0, 0], r0=(50, 50))],
    ],
    ids=["computed-in-the-step", "removed-and-computed-again", "loaded", "there-before-the-trace"],
)
def test_an_output_that_a_worker_has_is_read(events: list[Event]):
    assert [] == violation_ids(events)
