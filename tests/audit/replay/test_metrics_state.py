"""What metrics need beyond totals: counted once, of what was seen, and carried whole by a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import GOLDEN, events

from kvledger.audit.events import EngineStarted, Event, Gap, LookupsCounted, RequestAdded
from kvledger.audit.replay.distribution import Distribution
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.metrics_state import MetricsState

TRACE = "0af7651916cd43dd8448eb211c80319c"


def book(*stream: Event) -> EngineAudit:
    fed = EngineAudit(Path("nowhere"))
    for number, event in enumerate([journals.STARTED, *stream]):
        fed.feed(number, event)
    return fed


def tallies(*stream: Event) -> MetricsState:
    return book(*stream).metrics


def test_a_distribution_puts_a_figure_at_a_bound_below_it() -> None:
    spread = Distribution.over((0.0, 0.5))
    for figure in (0.0, 0.2, 0.5, 0.7):
        spread.observe(figure)

    assert [1, 2, 1] == spread.counts
    assert (4, 1.4) == (spread.observed, spread.sum)


def test_lookups_that_the_engine_does_not_count_add_nothing() -> None:
    told = tallies(LookupsCounted(1, 1, 2, 30, 16, -1, -1, -1), LookupsCounted(2, 2, 1, 10, 0, 1, 10, 5))

    assert (3, 40, 16) == msgspec.structs.astuple(told.lookups["local"])
    assert (1, 10, 5) == msgspec.structs.astuple(told.lookups["external"])


def test_gaps_of_unknown_size_lose_no_number_of_events() -> None:
    told = tallies(Gap(1, 7, "x"), Gap(2, -1, "x"), Gap(3, 2, "x"))

    assert (2, 1, 9) == (told.gaps_of_known_size, told.gaps_of_unknown_size, told.lost_events)


def test_preemptions_are_counted_as_they_happen() -> None:
    assert {"blocks": 1, "reset": 1} == tallies(
        *events(200, "A0+0 s200 o+ P A0+0 s201 o+ P:reset")
    ).preemptions


def test_the_cached_share_is_a_share_of_settled_tokens() -> None:
    """160 of 200 in the second life, of which the first 32 and 56 had come to be before."""
    spread = tallies(*events(200, journals.CLEAN)).cached_share

    assert (1, 104 / 200) == (spread.observed, spread.sum)


def test_a_wait_ends_when_the_load_does() -> None:
    stream = events(200, "A0+160a L s40 o+ F")
    admitted = next(event for event in stream if type(event).__name__ == "Admitted")
    loaded = next(event for event in stream if type(event).__name__ == "LoadFinished")

    assert (loaded.at - admitted.at) / 1e6 == tallies(*stream).remote_wait.sum


@pytest.mark.parametrize("words", ["A0+160 s40 o+ F", "A160+0 s40 o+ F"])
def test_a_synchronous_load_or_none_is_no_wait(words: str) -> None:
    assert 0 == tallies(*events(200, words)).remote_wait.observed


def test_an_unknown_request_is_in_no_distribution() -> None:
    """Its tokens are counted as unknown, by what the engine says of its length at least."""
    stream = events(200, "A0+0 s200 o+ F")
    told = tallies(*stream[:-1], Gap(stream[-1].at, 3, "x"), stream[-1])

    assert 0 == told.cached_share.observed == told.preempted.observed
    assert {"unknown": 201} == told.sequence_tokens


def test_a_repeated_violation_is_counted_and_dated() -> None:
    told = book(*journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168))
    sights = told.metrics.violations

    assert {violation.id for violation in told.auditor.violations} == set(sights)
    for violation in told.auditor.violations:
        assert 1 + violation.repeats == sights[violation.id].times
        assert "request-0" == sights[violation.id].request_id
    assert 1.7e9 < sights["tokens/negative"].last_seconds < 1.7e9 + 1


def test_a_segments_clock_holds_from_then_on() -> None:
    """Clocks are set right while an engine runs; when it came under observation stays what it was."""
    told = tallies(EngineStarted(5_000_000, 1.7e9 + 65, *msgspec.structs.astuple(journals.STARTED)[2:]))

    assert (1.7e9, 1.7e9 + 66) == (told.created_seconds, told.seconds(6_000_000))


@pytest.mark.parametrize(
    ("traceparent", "known"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        ("hello", ""),
        (None, ""),
    ],
)
def test_an_exemplar_has_the_callers_trace_id(traceparent: str | None, known: str) -> None:
    added, *rest = events(200, "A0+0 s200 o+ F")
    assert isinstance(added, RequestAdded)
    spread = tallies(replace(added, traceparent=traceparent), *rest).cached_share

    assert [("request-0", known)] == [(e.request_id, e.trace_id) for e in spread.exemplars.values()]


@pytest.mark.parametrize(("transferred", "tokens"), [(True, 160), (False, 0)])
def test_tokens_transferred_by_a_prefill_engine_are_kept_apart(transferred: bool, tokens: int) -> None:
    added, *rest = events(200, "A0+160 L s40 o+ F")
    assert isinstance(added, RequestAdded)
    told = book(replace(added, transferred=transferred), *rest)

    assert 160 == told.closed.external
    assert tokens == told.metrics.transferred_tokens


def test_negative_planned_tokens_are_kept_apart() -> None:
    told = tallies(*events(200, "A40+-8 s168 o+ F"))

    assert ({"external": 8}, {"local": 40, "computed": 168}) == (told.planned_negative, told.planned)


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: row.title)
def test_a_checkpoint_gives_back_the_same(row: Any) -> None:
    told = tallies(*row.events())

    assert told == msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=MetricsState)


def test_every_request_of_a_verdict_has_its_tokens_there() -> None:
    for row in GOLDEN:
        fed = book(*row.events())
        assert {verdict for verdict, _ in fed.requests} == set(fed.metrics.sequence_tokens)
        assert fed.metrics.preempted.observed == fed.closed.requests - fed.closed.unknown_requests


def test_two_engines_of_one_name_are_added() -> None:
    """All that a metric shows; what compares with one process's counters is that process's own."""
    once = tallies(*journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168))
    twice = MetricsState()
    for _ in range(2):
        twice.merge(once)

    assert (1.7e9, 2, 2) == (twice.created_seconds, twice.preemptions["blocks"], twice.cached_share.observed)
    assert {id: 2 * sights.times for id, sights in once.violations.items()} == {
        id: sights.times for id, sights in twice.violations.items()
    }
    assert {verdict: 2 * tokens for verdict, tokens in once.sequence_tokens.items()} == twice.sequence_tokens
    assert 1 == once.cached_share.observed


def test_a_sum_does_not_depend_on_the_order() -> None:
    """A sum of floats does, and a counter that falls by a hair looks like a reset."""
    spreads = []
    for figures in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]):
        spread = Distribution.over((1.0,))
        for figure in figures:
            one = Distribution.over((1.0,))
            one.observe(figure)
            spread.merge(one)
        spreads.append(spread)

    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    assert 0.6 == spreads[0].sum == spreads[1].sum
