"""Figures that metrics need beyond the totals: each is counted once and carried by a checkpoint."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests import journals
from tests.histories import GOLDEN, events

from kvledger.audit.events import EngineStarted, Event, Gap, LookupsCounted, RequestAdded
from kvledger.audit.figures.declared import BY_NAME, FIRST_TOKEN_SECONDS, OUTPUT_TOKEN_SECONDS
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.audit.replay.metrics_state import Distribution, MetricsState

TRACE = "0af7651916cd43dd8448eb211c80319c"


def audited(*stream: Event) -> FollowedAudit:
    audit = FollowedAudit(Path("nowhere"))
    for number, event in enumerate([journals.STARTED, *stream]):
        audit.feed(number, event)
    return audit


def metrics_after(*stream: Event) -> MetricsState:
    return audited(*stream).metrics


def test_a_value_equal_to_a_bound_is_counted_below_it() -> None:
    spread = Distribution.over((0.0, 0.5))
    for figure in (0.0, 0.2, 0.5, 0.7):
        spread.observe(figure)

    assert [1, 2, 1] == spread.counts
    assert (4, 1.4) == (spread.observed, spread.sum)


def test_lookups_that_the_engine_does_not_count_add_nothing() -> None:
    metrics = metrics_after(
        LookupsCounted(1, 1, 2, 30, 16, -1, -1, -1), LookupsCounted(2, 2, 1, 10, 0, 1, 10, 5)
    )

    assert (3, 40, 16) == msgspec.structs.astuple(metrics.lookups["local"])
    assert (1, 10, 5) == msgspec.structs.astuple(metrics.lookups["external"])


def test_gaps_of_unknown_size_add_nothing_to_the_lost_events() -> None:
    metrics = metrics_after(Gap(1, 7, "x"), Gap(2, -1, "x"), Gap(3, 2, "x"))

    assert (2, 1, 9) == (metrics.gaps_of_known_size, metrics.gaps_of_unknown_size, metrics.lost_events)


def test_preemptions_are_counted_as_they_happen() -> None:
    assert {"blocks": 1, "reset": 1} == metrics_after(
        *events(200, "A0+0 s200 o+ P A0+0 s201 o+ P:reset")
    ).preemptions


def test_the_cached_share_is_a_share_of_settled_tokens() -> None:
    """The second life hits 160 of 200 tokens, but the first life had already computed 56 of these."""
    spread = metrics_after(*events(200, journals.CLEAN)).cached_share

    assert (1, 104 / 200) == (spread.observed, spread.sum)


def test_the_wait_for_remote_kv_ends_when_the_load_finishes() -> None:
    stream = events(200, "A0+160a L s40 o+ F")
    admitted = next(event for event in stream if type(event).__name__ == "Admitted")
    loaded = next(event for event in stream if type(event).__name__ == "LoadFinished")

    assert (loaded.at - admitted.at) / 1e6 == metrics_after(*stream).remote_wait.sum


@pytest.mark.parametrize("words", ["A0+160 s40 o+ F", "A160+0 s40 o+ F"])
def test_a_synchronous_load_or_no_load_is_no_wait(words: str) -> None:
    assert 0 == metrics_after(*events(200, words)).remote_wait.observed


def test_the_times_of_a_request_are_in_the_histograms_that_figures_declare() -> None:
    """The events of a history are 10 microseconds apart: 20 until the admission, 20 until the first output,
    and 50 for two further tokens."""
    spreads = metrics_after(*events(32, "A0+0 s32 o+ s1 o+ s1 o+ F")).spreads

    assert (1, 40) == (
        spreads["first_token_microseconds"].observed,
        spreads["first_token_microseconds"].millionths,
    )
    assert {"queued_microseconds": 20, "prefill_microseconds": 20} == {
        name: spread.millionths
        for name, spread in spreads.items()
        if BY_NAME[name].part_of and spread.observed
    }
    assert (1, 25) == (
        spreads["later_tokens_microseconds"].observed,
        spreads["later_tokens_microseconds"].millionths,
    )


def test_a_request_with_one_output_has_no_time_per_output_token() -> None:
    spreads = metrics_after(*events(32, "A0+0 s32 o+ F")).spreads

    assert 1 == spreads["first_token_microseconds"].observed
    assert 0 == spreads["later_tokens_microseconds"].observed


def test_a_request_without_output_is_in_no_histogram_of_times() -> None:
    assert not any(
        spread.observed for spread in metrics_after(*events(32, "A0+0 s16 o F:aborted")).spreads.values()
    )


def test_the_buckets_are_those_of_vllm() -> None:
    buckets = pytest.importorskip("vllm.v1.metrics.buckets")

    assert FIRST_TOKEN_SECONDS == buckets.TIME_TO_FIRST_TOKEN_BUCKETS
    assert OUTPUT_TOKEN_SECONDS == buckets.INTER_TOKEN_LATENCY_BUCKETS


def test_an_unknown_request_is_in_no_distribution() -> None:
    """Its tokens are counted as unknown, at least as many as the engine reports as its length."""
    stream = events(200, "A0+0 s200 o+ F")
    metrics = metrics_after(*stream[:-1], Gap(stream[-1].at, 3, "x"), stream[-1])

    assert 0 == metrics.cached_share.observed == metrics.preempted.observed
    assert {"unknown": 201} == metrics.sequence_tokens


def test_a_repeated_violation_is_counted_and_dated() -> None:
    audit = audited(*journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168))
    sights = audit.metrics.violations

    assert {violation.id for violation in audit.auditor.violations} == set(sights)
    for violation in audit.auditor.violations:
        assert 1 + violation.repeats == sights[violation.id].times
        assert "request-0" == sights[violation.id].request_id
    assert 1.7e9 < sights["tokens/negative"].last_seconds < 1.7e9 + 1


def test_the_clock_of_a_new_segment_applies_from_then_on() -> None:
    """A clock may be corrected while an engine runs; the start of the observation stays the same."""
    metrics = metrics_after(
        EngineStarted(5_000_000, 1.7e9 + 65, *msgspec.structs.astuple(journals.STARTED)[2:])
    )

    assert (1.7e9, 1.7e9 + 66) == (metrics.created_seconds, metrics.seconds(6_000_000))


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        ("hello", ""),
        (None, ""),
    ],
)
def test_an_exemplar_has_the_callers_trace_id(traceparent: str | None, trace_id: str) -> None:
    added, *rest = events(200, "A0+0 s200 o+ F")
    assert isinstance(added, RequestAdded)
    spread = metrics_after(replace(added, traceparent=traceparent), *rest).cached_share

    assert [("request-0", trace_id)] == [(e.request_id, e.trace_id) for e in spread.exemplars.values()]


@pytest.mark.parametrize(("transferred", "tokens"), [(True, 160), (False, 0)])
def test_tokens_transferred_by_a_prefill_engine_are_counted_separately(
    transferred: bool, tokens: int
) -> None:
    added, *rest = events(200, "A0+160 L s40 o+ F")
    assert isinstance(added, RequestAdded)
    audit = audited(replace(added, transferred=transferred), *rest)

    assert 160 == audit.closed.external
    assert tokens == audit.metrics.transferred_tokens


def test_negative_planned_tokens_are_counted_separately() -> None:
    metrics = metrics_after(*events(200, "A40+-8 s168 o+ F"))

    assert ({"external": 8}, {"local": 40, "computed": 168}) == (metrics.planned_negative, metrics.planned)


def test_requests_and_tokens_are_counted_under_the_same_verdicts() -> None:
    for row in GOLDEN:
        audit = audited(*row.events())
        assert {verdict for verdict, _ in audit.journal.requests} == set(audit.metrics.sequence_tokens)
        assert audit.metrics.preempted.observed == audit.closed.requests - audit.closed.unknown_requests


def test_two_engines_with_the_same_name_are_added() -> None:
    """Everything that a metric shows is added; figures compared with one process's counters are not."""
    once = metrics_after(
        *journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    )
    twice = MetricsState()
    for _ in range(2):
        twice.merge(once)

    assert (1.7e9, 2, 2) == (twice.created_seconds, twice.preemptions["blocks"], twice.cached_share.observed)
    assert {id: 2 * sights.times for id, sights in once.violations.items()} == {
        id: sights.times for id, sights in twice.violations.items()
    }
    assert {verdict: 2 * tokens for verdict, tokens in once.sequence_tokens.items()} == twice.sequence_tokens
    assert 1 == once.cached_share.observed


def test_a_merged_sum_does_not_depend_on_the_order() -> None:
    """A plain sum of floats does, and a counter that falls slightly looks like a reset."""
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
