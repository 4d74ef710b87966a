"""Turns of hand-made changes: the causes that a scheduler alone does not show, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvledger.audit import causes
from kvledger.audit.analysis.trace_reader import (
    ADMIT,
    CACHED,
    DROP,
    EVICT,
    Change,
    RecordedRequest,
    TraceLife,
    TraceReader,
)
from kvledger.audit.analysis.turns import Turn, TurnReader, across_engines

SIZE = 10
HASHES = (11, 12, 13, 14)


def request(
    number: int, at: int, *, prompt: int = 45, hit: int = 0, session: str = "chat"
) -> RecordedRequest:
    """A request that is admitted when it comes and ends a second later."""
    life = TraceLife(sequence_tokens=prompt, hit_tokens=hit, at=at, computed_tokens=prompt)
    found = RecordedRequest(number, number, f"r{number}", prompt, session=session, lives={number: life})
    found.added_at, found.closed_at = at, at + 1_000_000
    return found


def computed(life: int, at: int, hashes: Sequence[int] = HASHES) -> list[Change]:
    """A life computes and caches these blocks."""
    return [(ADMIT, life, 0, (), at), (CACHED, life, 0, list(hashes), at + 1)]


def second_turn(between: Sequence[Change], *, external: bool = False, at: int = 9_000_000) -> Turn:
    """The second of two turns with one prompt begun alike, and what happened between them."""
    reader = TurnReader(SIZE, external)
    reader.add([*computed(0, 0), *between, *computed(1, at, (*HASHES, 15))])
    requests = [request(0, 0), request(1, at, prompt=58)]
    *_, turn = reader.ended(requests, ("engine", "journal"), 0.0, lambda life: f"r{life}")
    return turn


@pytest.mark.parametrize(
    ("between", "external", "cause"),
    [
        ([(EVICT, 7, 0, HASHES, 5_000_000)], False, causes.EVICTED),
        ([(EVICT, 7, 0, HASHES, 5_000_000)], True, causes.TIER),
        ([(DROP, -1, 0, HASHES, 5_000_000)], False, causes.DROPPED),
        ([], False, causes.NOT_HIT),
        ([(EVICT, 7, 0, HASHES, 5_000_000), *computed(7, 9_000_500)], False, causes.BEING_COMPUTED),
    ],
)
def test_each_reusable_token_that_was_not_hit_has_one_cause(
    between: list[Change], external: bool, cause: str
) -> None:
    turn = second_turn(between, external=external)

    assert {cause: 40, causes.BELOW_BLOCK: 5} == turn.lost
    assert 45 == turn.reusable == turn.lost_tokens


def test_an_eviction_names_its_time_and_the_request_that_got_the_block() -> None:
    evicted = second_turn([(EVICT, 7, 0, HASHES, 5_000_000)]).evicted

    assert evicted is not None
    assert (40, 5.0, "r7") == (evicted.tokens, evicted.seconds, evicted.by)


def test_a_turn_whose_prompt_was_not_computed_is_unknown() -> None:
    reader = TurnReader(SIZE)
    reader.add([*computed(0, 0), (ADMIT, 1, 0, (), 9_000_000)])
    requests = [request(0, 0), request(1, 9_000_000, prompt=58)]
    *_, turn = reader.ended(requests, ("engine", "journal"), 0.0, str)

    assert {causes.UNKNOWN: 45} == turn.lost


def test_the_oldest_sessions_are_forgotten_and_counted() -> None:
    reader = TurnReader(SIZE, most=10)
    for number in range(6):
        hashes = [100 * number + place for place in range(1, 5)]
        reader.add(computed(number, number, hashes))
        one = request(number, number, session=f"s{number}")
        list(reader.ended([one], ("engine", "journal"), 0.0, str))

    assert 4 == reader.forgotten
    assert ["s4", "s5"] == list(reader.sessions) and 8 == reader.remembered


def test_turns_of_one_session_are_numbered_over_engines() -> None:
    found = []
    for journal, numbers in (("a", (0, 2)), ("b", (1,))):
        reader = TurnReader(SIZE)
        for number in numbers:
            at = 10_000_000 * number
            reader.add(computed(number, at))
            one = request(number, at, prompt=45 + number, hit=0 if number < 2 else 40)
            found += reader.ended([one], (journal, journal), 0.0, str)

    first, second, third = across_engines(found)
    assert [(1, ""), (2, "r0"), (3, "r1")] == [(turn.number, turn.before) for turn in (first, second, third)]
    assert {causes.OTHER_ENGINE: 45} == second.lost
    assert {causes.OTHER_ENGINE: 6} == third.lost  # the turn before ran elsewhere, 40 tokens were still here


def test_requests_of_which_no_pool_was_seen_have_no_turns() -> None:
    requests = [request(0, 0), request(1, 9_000_000, prompt=58)]

    assert [] == list(TurnReader().read(TraceReader(), [], requests, ("engine", "journal")))
