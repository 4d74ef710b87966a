"""The drifts of the lookups, drafts and samples that an engine counts, each found and nearly found."""

from __future__ import annotations

import pytest
from tests.audit.checks.false_reports import (
    altered,
    audited,
    drift_ids,
    index_of,
    violation_ids,
    with_after,
)
from tests.histories import events, weave

from kvledger.audit.events import (
    Admitted,
    Delivered,
    DraftsCounted,
    Event,
    Finished,
    LookupsCounted,
    RequestAdded,
)

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

Lookups = tuple[int, int, int]
"""Requests, queried and hit tokens."""

NONE = (0, 0, 0)


def counted(
    stream: list[Event], local: Lookups, external: Lookups, nth: int = 0, failed: Lookups = NONE
) -> list[Event]:
    """The stream with what the engine counted for its nth admission."""
    return with_after(stream, Admitted, nth, LookupsCounted(10_000, 1, *local, *external, *failed))


# --- metrics/lookup-never-ran ----------------------------------------------------------------------


@violates("metrics/lookup-never-ran")
def test_lookups_of_a_request_aborted_in_remote_wait_are_found():
    stream = counted(events(300, "A64+128 F"), (1, 300, 64), (1, 236, 128))

    (finding,) = audited(stream).violations
    assert ("metrics/lookup-never-ran", "local", 300, 1) == (
        finding.id,
        finding.figures["source"],
        finding.figures["query_tokens"],
        finding.repeats,
    )


@violates("metrics/lookup-never-ran")
@violates("metrics/lookup-load-failed")
def test_lookups_before_a_load_that_fails_completely_are_counted_twice():
    """The request is admitted again, not after a preemption: both admissions are exported."""
    stream = counted(events(200, "A0+160 L0 A0+0 s200 o+ F"), (1, 200, 0), (1, 200, 160))
    stream = counted(stream, (1, 200, 0), (1, 200, 0), nth=1)

    assert ["metrics/lookup-load-failed", "metrics/lookup-never-ran"] == drift_ids(stream)
    assert [] == violation_ids(stream)


@near_miss("metrics/lookup-never-ran")
@pytest.mark.parametrize(
    ("words", "local", "external"),
    [("F", None, NONE), ("A32+128 L s168 o+ F", (1, 300, 32), (1, 268, 128))],
    ids=["not admitted", "loaded and run"],
)
def test_a_request_that_was_not_admitted_or_ran_is_clean(
    words: str, local: Lookups | None, external: Lookups
):
    stream = events(300, words)

    assert [] == drift_ids(stream if local is None else counted(stream, local, external))


@near_miss("metrics/lookup-never-ran")
def test_an_engine_that_counts_no_lookups_miscounts_none():
    assert [] == drift_ids(counted(events(300, "A64+128 F"), (-1, -1, -1), (-1, -1, -1)))


# --- metrics/lookup-load-failed and metrics/lookup-resumed-missing ---------------------------------


@violates("metrics/lookup-load-failed")
@pytest.mark.parametrize(
    "words", ["A0+160 L64 s136 o+ F", "A0+160 s40 L64 o s136 o+ F", "A0+160 s40 L64 F:error"]
)
def test_external_hits_that_failed_to_load_are_found(words: str):
    """An asynchronous load, a synchronous one, and one that ends the request."""
    stream = counted(events(200, words), (1, 200, 0), (1, 200, 160))

    assert ["metrics/lookup-load-failed"] == drift_ids(stream)


@violates("metrics/lookup-resumed-missing")
@near_miss("metrics/lookup-load-failed")
def test_lookups_after_a_preemption_are_counted_apart():
    """Their failed load is not counted as a hit, because nothing of them is exported."""
    stream = counted(events(100, "A0+0 s60 o P A0+96 L32 s68 o+ F"), (1, 100, 0), (1, 100, 0))
    stream = counted(stream, (1, 100, 0), (1, 100, 96), nth=1)

    assert ["metrics/lookup-resumed-missing"] == drift_ids(stream)


@near_miss("metrics/lookup-resumed-missing")
@near_miss("metrics/lookup-load-failed")
def test_the_lookups_of_a_first_admission_are_clean():
    stream = counted(events(200, "A32+128 L s40 o+ F"), (1, 200, 32), (1, 168, 128))

    assert [] == drift_ids(stream)


# --- metrics/lookup-exempt-counted -----------------------------------------------------------------


def exempt(stream: list[Event]) -> list[Event]:
    """The stream of a request that may not read a cache."""
    return altered(stream, Admitted, counted=False)


@violates("metrics/lookup-exempt-counted")
def test_external_lookups_of_a_request_that_may_not_read_a_cache_are_found():
    stream = counted(exempt(events(100, "A0+0 s100 o+ F")), NONE, (1, 100, 0))

    assert ["metrics/lookup-exempt-counted"] == drift_ids(stream)
    assert [] == violation_ids(stream)


@near_miss("metrics/lookup-exempt-counted")
def test_a_request_that_counts_in_neither_cache_is_clean():
    stream = counted(exempt(events(100, "A0+0 s100 o+ F")), NONE, NONE)

    assert [] == drift_ids(stream) + violation_ids(stream)


@near_miss("metrics/lookup-exempt-counted")
def test_an_engine_without_a_prefix_cache_counts_external_lookups_only():
    stream = counted(exempt(events(100, "A0+64 L s36 o+ F")), NONE, (1, 100, 64))

    assert [] == drift_ids(stream, prefix_caching=False) + violation_ids(stream, prefix_caching=False)


@near_miss("tokens/lookup-counted-once")
def test_another_count_of_an_exempt_request_is_a_violation():
    stream = counted(exempt(events(100, "A0+0 s100 o+ F")), NONE, (2, 200, 0))

    assert ["tokens/lookup-counted-once"] == violation_ids(stream)


# --- metrics/lookup-attempt-counted ----------------------------------------------------------------


@violates("metrics/lookup-attempt-counted")
def test_lookups_without_an_admission_are_found():
    stream = events(100, "A64+0 s36 o+ F")
    stream = counted(stream, (3, 300, 192), (1, 36, 0), failed=(2, 200, 128))

    assert ["metrics/lookup-attempt-counted"] == drift_ids(stream)
    assert [] == violation_ids(stream)


@near_miss("metrics/lookup-attempt-counted")
def test_failed_attempts_that_are_not_counted_are_clean():
    stream = counted(events(100, "A64+0 s36 o+ F"), (1, 100, 64), (1, 36, 0), failed=(2, 200, 128))

    assert [] == drift_ids(stream) + violation_ids(stream)


def test_lookups_beyond_the_failed_attempts_are_a_violation():
    stream = counted(events(100, "A64+0 s36 o+ F"), (4, 400, 256), (1, 36, 0), failed=(2, 200, 128))

    assert ["tokens/lookup-counted-once"] == violation_ids(stream)


# --- drafts ----------------------------------------------------------------------------------------


def drafts_counted(stream: list[Event], nth: int, *figures: int) -> list[Event]:
    """The stream with what the engine counted for its nth output, after the requests that it ended."""
    index = index_of(stream, Delivered, nth) + 1
    while index < len(stream) and isinstance(stream[index], Finished):
        index += 1
    return [*stream[:index], DraftsCounted(10_000, *figures), *stream[index:]]


PAST_STOP = events(50, "A0+0 s50 o+ s4 o3/3 F-2")
"""Three drafts and one more token are sampled. The output ends with the second draft."""
PADDED = events(64, "A63+0 s4/3 o0/3 s1 o+ F")
"""A request with one token to compute is padded by three."""


@violates("metrics/drafts-past-stop")
def test_accepted_drafts_that_a_stop_cuts_off_are_found():
    (finding,) = audited(drafts_counted(PAST_STOP, 1, 1, 3, 3)).violations

    assert ("metrics/drafts-past-stop", 1) == (finding.id, finding.figures["cut_tokens"])


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_a_sequence_ends_with_its_stop_not_with_the_accepted_drafts_behind_it(cut: int):
    account = audited(events(50, f"A0+0 s50 o+ s4 o3/3 F-{cut}")).ledger.account("request-0")

    assert account is not None
    assert 50 + 1 + 4 - cut == account.sequence_tokens, "what usage, spans and metrics call the output"


@near_miss("metrics/drafts-past-stop")
@pytest.mark.parametrize(
    ("words", "accepted"),
    [
        ("A0+0 s50 o+ s4 o3/3 F-2", 2),
        ("A0+0 s50 o+ s4 o3/3 F-1", 3),
        ("A0+0 s50 o+ s4 o3/3 F", 3),
        ("A0+0 s50 o+ s4 o0/3 F-0", 0),
    ],
    ids=["not counted", "only the last token is cut", "all are output", "none is accepted"],
)
def test_accepted_drafts_that_are_output_or_not_counted_are_clean(words: str, accepted: int):
    assert [] == drift_ids(drafts_counted(events(50, words), 1, 1, 3, accepted))


@violates("metrics/padding-as-drafts")
def test_drafts_in_the_first_step_of_a_life_are_padding():
    (finding,) = audited(drafts_counted(PADDED, 0, 1, 3, 0)).violations

    assert ("metrics/padding-as-drafts", 3) == (finding.id, finding.figures["padding_tokens"])


@near_miss("metrics/padding-as-drafts")
def test_padding_that_is_not_counted_and_proposed_drafts_are_clean():
    assert [] == drift_ids(drafts_counted(PADDED, 0, 0, 0, 0))
    assert [] == drift_ids(drafts_counted(events(50, "A0+0 s50 o+ s4 o1/3 s1 o+ F"), 1, 1, 3, 1))


@near_miss("metrics/padding-as-drafts")
def test_the_canvas_of_a_diffusion_model_is_no_padding():
    stream = drafts_counted(events(64, "A48+0 s16/16 o F"), 0, 1, 16, 0)

    assert [] == drift_ids(stream, sampled_beside_drafts=0)


# --- metrics/samples-counted-each ------------------------------------------------------------------


def named(*ids: str, prompts: tuple[int, int] = (50, 50)) -> list[Event]:
    """Two requests that run together, with these ids."""
    words = f"a.A0+0 b.A0+0 a.s{prompts[0]}&b.s{prompts[1]} a.o+&b.o+ a.F b.F"
    stream = weave(dict(enumerate(prompts)), words)
    for number, name in enumerate(ids):
        stream = altered(stream, RequestAdded, number, request_id=name)
    return stream


@violates("metrics/samples-counted-each")
def test_two_samples_of_one_request_are_found():
    (finding,) = audited(named("0_cmpl-x-0-1a2b3c4d", "1_cmpl-x-0-1a2b3c4d")).violations

    assert ("metrics/samples-counted-each", "cmpl-x-0-1a2b3c4d") == (
        finding.id,
        finding.figures["client_request"],
    )


@near_miss("metrics/samples-counted-each")
@pytest.mark.parametrize(
    ("ids", "prompts"),
    [
        (("cmpl-x-0-1a2b3c4d", "cmpl-x-1-1a2b3c4d"), (50, 50)),
        (("0_run-1a2b3c4d", "1_run-5e6f7a8b"), (50, 50)),
        (("0_run", "1_run"), (50, 50)),
        (("0_run-1a2b3c4d", "1_run-1a2b3c4d"), (50, 51)),
    ],
    ids=["two requests", "two random ends", "no random end", "two prompts"],
)
def test_requests_with_similar_ids_are_no_samples(ids: tuple[str, str], prompts: tuple[int, int]):
    assert [] == drift_ids(named(*ids, prompts=prompts))
