"""The drifts of an engine's prompt figures, each found and nearly found."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.audit.checks.false_reports import altered, audited, drift_ids, report, violation_ids, with_report
from tests.histories import WOVEN, events

from kvledger.audit.events import Event, Reported, RequestAdded

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

MATCHED_AGAIN = "A0+32 L s56 o P A0+160 L s40 o+ F"
"""vLLM#36752: the request is preempted in mid-prefill, and the connector matches again."""
SESSION = "A0+0 s20 o+ s1 o+ S X10 s10 o+ F"
"""The second chunk keeps 21 tokens and adds 10."""


# --- metrics/prompt-missing ----------------------------------------------------------------------


@violates("metrics/prompt-missing")
def test_a_prompt_that_ends_before_its_first_output_is_in_no_figure():
    auditor = audited(events(300, "A0+0 s128 o F"), figures="first")

    (finding,) = auditor.violations
    assert ("metrics/prompt-missing", "drift", 128) == (
        finding.id,
        finding.severity,
        finding.figures["tokens"],
    )
    assert "clean" == auditor.verdict, "a drift does not change the verdict"


@near_miss("metrics/prompt-missing")
@pytest.mark.parametrize("words", ["F", "A64+128 F", "A0+0 s300 o+ s1 F:aborted"])
def test_a_request_that_never_ran_or_had_an_output_is_not_missing(words: str):
    stream = events(300, words)
    if "o+" in words:
        stream = with_report(stream, report(300, 0, 0), output=0)

    assert [] == drift_ids(stream, figures="first")


@near_miss("metrics/prompt-missing")
def test_an_engine_that_reports_no_prompt_misses_none():
    assert [] == drift_ids(events(300, "A0+0 s128 o F"), figures="none")


def test_a_drift_is_found_once_an_engine():
    """The first request is named, and later ones are counted."""
    first, second = (events(300, "A0+0 s128 o F", request=number) for number in (0, 1))

    (finding,) = audited([*first, *second], figures="first").violations

    assert ("request-0", 1) == (finding.request, finding.repeats)


# --- metrics/session-chunk-missing and metrics/session-chunk-whole --------------------------------


@violates("metrics/session-chunk-missing")
def test_a_later_chunk_without_a_report_is_missing():
    stream = with_report(events(20, SESSION), report(20, 0, 0), output=0)

    assert ["metrics/session-chunk-missing"] == drift_ids(stream, figures="first")


@near_miss("metrics/session-chunk-missing")
@near_miss("metrics/session-chunk-whole")
def test_a_later_chunk_that_is_reported_alone_is_clean():
    stream = with_report(with_report(events(20, SESSION), report(20, 0, 0), output=0), report(10, 0, 0))

    assert [] == drift_ids(stream, figures="first")


@violates("metrics/session-chunk-whole")
def test_a_later_chunk_that_is_reported_with_what_it_keeps_is_found():
    stream = with_report(with_report(events(20, SESSION), report(20, 0, 0), output=0), report(31, 0, 0))

    assert ["metrics/session-chunk-whole"] == drift_ids(stream, figures="mixed")


# --- the work of a prompt --------------------------------------------------------------------------


@violates("metrics/full-hit-token-missing")
def test_a_full_hit_without_a_computed_token_is_found():
    stream = with_report(events(96, "A0+96 L R1 s1 o+ F"), report(96, 0, 96))

    assert ["metrics/full-hit-token-missing"] == drift_ids(stream)


@near_miss("metrics/full-hit-token-missing")
@pytest.mark.parametrize(
    ("words", "event"),
    [("A96+0 s1 o+ F", report(97, 96, 0)), ("A0+97 L R1 s1 o+ F", report(97, 0, 97, computed=1))],
)
def test_a_full_hit_with_its_computed_token_is_clean(words: str, event: Reported):
    assert [] == drift_ids(with_report(events(97, words), event))


@violates("metrics/replay-missing")
def test_a_replayed_window_that_is_reported_as_cached_only_is_found():
    stream = with_report(events(100, "A64+0 R16:replay s52 o+ F"), report(100, 64, 0))

    assert ["metrics/replay-missing"] == drift_ids(stream)
    assert {"tokens": 16, "computed_tokens": 36, "executed_tokens": 52} == audited(stream).violations[
        0
    ].figures


@near_miss("metrics/replay-missing")
@pytest.mark.parametrize(
    ("words", "event"),
    [
        ("A64+0 s36 o+ F", report(100, 64, 0)),
        ("A0+0 s100 o+ F", report(100, 0, 0)),
        ("A64+0 R16:replay s52 o+ F", report(100, 48, 0)),
    ],
    ids=["no replay", "the hit was dropped", "counted as computed"],
)
def test_a_window_that_is_not_replayed_or_is_counted_is_clean(words: str, event: Reported):
    assert "metrics/replay-missing" not in drift_ids(with_report(events(100, words), event))


@violates("metrics/recomputed-prompt-missing")
@pytest.mark.parametrize("words", ["A0+0 s32 o P A0+0 s64 o+ F", "A0+48 s16 L16 o s48 o+ F"])
def test_prompt_tokens_computed_twice_and_reported_once_are_found(words: str):
    stream = with_report(events(64, words), report(64, 0, 48 if "+48" in words else 0))

    assert "metrics/recomputed-prompt-missing" in drift_ids(stream)


@near_miss("metrics/recomputed-prompt-missing")
@pytest.mark.parametrize(
    ("words", "output"),
    [("A0+0 s64 o+ s1 o+ P A0+0 s66 o+ F", 0), ("A0+0 s32 o P A32+0 s32 o+ F", -1)],
    ids=["after the first output", "its own tokens are hit again"],
)
def test_prompt_tokens_computed_once_before_the_first_output_are_clean(words: str, output: int):
    assert [] == drift_ids(with_report(events(64, words), report(64, 0, 0), output))


@violates("metrics/chunks-in-one-step")
def test_a_prompt_computed_in_chunks_is_in_the_step_of_its_first_output():
    stream = with_report(events(200, "A0+0 s128 o s72 o+ F"), report(200, 0, 0))

    assert ["metrics/chunks-in-one-step"] == drift_ids(stream)


@near_miss("metrics/chunks-in-one-step")
@pytest.mark.parametrize("words", ["A0+0 s200 o+ F", "A0+0 s128 o P A128+0 s72 o+ F"])
def test_a_prompt_computed_in_one_step_of_a_life_is_in_that_step(words: str):
    assert [] == drift_ids(with_report(events(200, words), report(200, 0, 0)))


# --- the sources of a prompt -----------------------------------------------------------------------


@violates("metrics/later-source-missing")
@pytest.mark.parametrize(("figures", "external"), [("first", 32), ("last", 160)])
def test_sources_of_one_admission_are_found_where_the_kv_came_in_two(figures: str, external: int):
    """Settled: 104 external and 96 computed."""
    stream = with_report(events(200, MATCHED_AGAIN), report(200, 0, external))

    assert ["metrics/later-source-missing"] == drift_ids(stream, figures=figures)
    assert [] == violation_ids(stream, figures=figures)


@violates("metrics/later-source-missing")
def test_sources_of_a_pooling_request_are_compared_when_it_is_settled():
    stream = events(80, "A0+0 s16 o P A32+0 s48 o F", pooling=True)

    assert ["metrics/later-source-missing"] == drift_ids(with_report(stream, report(80, 0, 0)))


@near_miss("metrics/later-source-missing")
@pytest.mark.parametrize(
    ("words", "event", "output"),
    [
        ("A0+0 s200 o+ s1 o+ P A160+0 s42 o+ F", report(200, 0, 0), 0),
        ("A0+160 L s20 o P A0+160 L s40 o+ F", report(200, 0, 160), -1),
        ("A0+160 L64 s136 o+ F", report(200, 0, 160), -1),
        (MATCHED_AGAIN, report(200, 0, 104), -1),
    ],
    ids=["after the first output", "the same again", "a failed load", "reported by position"],
)
def test_sources_that_are_as_settled_or_explained_otherwise_are_clean(
    words: str, event: Reported, output: int
):
    assert "metrics/later-source-missing" not in drift_ids(with_report(events(200, words), event, output))


@violates("metrics/failed-hit-reported")
def test_a_local_hit_that_a_failed_load_made_invalid_is_found():
    stream = with_report(WOVEN[0].events(), Reported(10_000, 1, 80, 64, 0, 16, 64))

    assert ["metrics/recomputed-prompt-missing", "metrics/failed-hit-reported"] == drift_ids(stream)


@near_miss("metrics/failed-hit-reported")
@pytest.mark.parametrize("local", [64, 32])
def test_a_load_that_fails_above_the_local_hit_leaves_it_valid(local: int):
    stream = events(200, "A64+96 s40 L32 o s104 o+ F" if local == 64 else "A64+96 s40 L-32 o s168 o+ F")
    event = report(200, 64, 96) if local == 64 else report(200, 32, 0)

    assert "metrics/failed-hit-reported" not in drift_ids(with_report(stream, event))


def transferred(stream: list[Event]) -> list[Event]:
    """The stream of a request whose KV a prefill engine hands over."""
    return altered(stream, RequestAdded, transferred=True)


@violates("metrics/transfer-as-cached")
def test_tokens_handed_over_and_reported_as_cached_are_found():
    stream = with_report(transferred(events(200, "A32+128 L s40 o+ F")), report(200, 32, 128))

    (finding,) = audited(stream).violations
    assert ("metrics/transfer-as-cached", 128) == (finding.id, finding.figures["external_tokens"])


@near_miss("metrics/transfer-as-cached")
def test_tokens_of_a_store_or_not_counted_as_cached_are_clean():
    stream = events(200, "A32+128 L s40 o+ F")

    assert [] == drift_ids(with_report(stream, report(200, 32, 128)))
    assert [] == drift_ids(with_report(transferred(stream), report(200, 32, 128, cached=32)))


@violates("metrics/cache-write-overstated")
def test_hits_of_a_later_admission_that_count_as_written_are_found():
    """At the first output 192 tokens are cached, 32 of them by the first admission; 96 were computed."""
    stream = with_report(events(200, MATCHED_AGAIN), replace(report(200, 0, 32), written_tokens=160))

    assert "metrics/cache-write-overstated" in drift_ids(stream)


@near_miss("metrics/cache-write-overstated")
@pytest.mark.parametrize("written", [-1, 0, 96])
def test_a_request_may_write_what_it_computed(written: int):
    stream = with_report(events(100, "A0+0 s100 o+ F"), replace(report(100, 0, 0), written_tokens=written))

    assert [] == drift_ids(stream)
