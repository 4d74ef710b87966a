"""The invariants of one request's tokens, each violated and nearly violated."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.false_reports import (
    altered,
    audited,
    index_of,
    miscounted,
    report,
    violation_ids,
    with_after,
    with_report,
    without,
    without_drifts,
)
from tests.audit.checks.watched import Watched
from tests.histories import events
from tests.scenarios.driving import Driver

from kvledger.audit.checks.tokens import source_sum, suspense
from kvledger.audit.events import (
    AdmissionFailed,
    Admitted,
    Census,
    Delivered,
    Event,
    Extended,
    Finished,
    LookedUp,
    LookupKept,
    LookupsCounted,
    Matched,
    Preempted,
    RequestAdded,
    RolledBack,
    Stepped,
)
from kvledger.audit.ledger.account import Account, Settlement
from kvledger.audit.ledger.entries import Entry
from kvledger.audit.planted.fault import planted
from kvledger.audit.planted.table import BY_NAME

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

MATCHED_AGAIN = "A0+32 L s56 o P A0+160 L s40 o+ F"
"""vLLM#36752: the request is preempted in mid-prefill, and the connector matches again."""


def census(step: int, *row: int) -> Census:
    """One request's counters at rest: computed, in flight, placeholders, sequence."""
    return Census(10_000, step, [0, *row], 0, 0, 0)


# --- tokens/negative -----------------------------------------------------------------------------


@violates("tokens/negative")
def test_a_second_external_match_makes_the_local_hit_negative():
    """vLLM#36752 on 0.18.1: 32 of the first admission less 160 of the second."""
    stream = with_report(events(200, MATCHED_AGAIN), report(200, -128, 160))

    assert ["tokens/negative", "tokens/set-once"] == violation_ids(stream)


@violates("tokens/negative")
def test_more_hits_than_prompt_tokens_are_found():
    stream = altered(events(100, "A64+0 s36 o+ F"), Admitted, local_tokens=128, computed_tokens=128)

    assert "tokens/negative" in violation_ids(stream)


@near_miss("tokens/negative")
def test_a_whole_prompt_may_be_a_hit():
    stream = with_report(events(96, "A0+96 L R1 s1 o+ F"), report(96, 0, 96))

    assert [] == violation_ids(stream)


@near_miss("tokens/negative")
@near_miss("tokens/source-sum")
@near_miss("tokens/set-once")
def test_the_last_token_of_a_full_hit_is_added_back_up_to_0_19():
    """PromptTokenStats of 0.17: 96 cached of 97, one recomputed, reported as 97 local and 1 computed."""
    stream = with_report(events(97, "A96+0 s1 o+ F"), report(97, 97, 0, computed=1, cached=96))

    assert [] == violation_ids(stream)


# --- tokens/source-sum ---------------------------------------------------------------------------


@violates("tokens/source-sum")
def test_a_negative_hit_clamped_at_0_makes_the_sum_wrong():
    """vLLM#36752 on 0.19.1: 168 + 0 + 160 of 200."""
    stream = with_report(events(200, MATCHED_AGAIN), report(200, 0, 160, computed=168))

    assert ["tokens/source-sum", "tokens/set-once"] == violation_ids(stream)


@violates("tokens/source-sum")
def test_a_settlement_with_a_wrong_sum_is_found():
    account = Account(0, "request-0", 100, 0)
    settlement = Settlement(100, 20, 10, 10, 50, 0, at=0, step=1)

    (witness,) = source_sum(Entry(0, 1, 0, settlement, account))

    assert {"total_tokens": 70, "prompt_tokens": 80} == witness.figures


# --- tokens/set-once -----------------------------------------------------------------------------


@violates("tokens/set-once")
def test_figures_reported_twice_are_found():
    once = with_report(events(100, "A64+0 s36 o+ s1 o+ F"), report(100, 64, 0), output=0)

    assert ["tokens/set-once"] == violation_ids(with_report(once, report(100, 64, 0)))


@violates("tokens/set-once")
def test_figures_of_the_last_admission_are_found_where_a_release_reports_the_first():
    stream = with_report(events(200, MATCHED_AGAIN), report(200, 0, 160))

    (violation,) = without_drifts(audited(stream, figures="first"))

    assert "tokens/set-once" == violation.id
    assert (160, 32) == (
        violation.figures["external_tokens"],
        violation.figures["plan_external_tokens"],
    )


@violates("tokens/set-once")
def test_figures_of_the_first_admission_are_found_where_a_release_reports_the_last():
    stream = with_report(events(200, MATCHED_AGAIN), report(200, 0, 32))

    assert ["tokens/set-once"] == violation_ids(stream, figures="last")


@near_miss("tokens/set-once")
@pytest.mark.parametrize(("figures", "external"), [("first", 32), ("last", 160)])
def test_a_release_may_report_its_first_or_last_admission(figures: str, external: int):
    stream = with_report(events(200, MATCHED_AGAIN), report(200, 0, external))

    assert [] == violation_ids(stream, figures=figures)


@near_miss("tokens/set-once")
def test_the_last_admission_is_the_last_before_the_first_output():
    """0.20 to 0.26: the engine took its figures before the preemption in decode."""
    stream = events(64, "A0+0 s64 o+ s1 o+ P A64+0 s2 o+ F")

    assert [] == violation_ids(with_report(stream, report(64, 0, 0), output=0), figures="last")


@near_miss("tokens/set-once")
def test_the_last_admission_may_wait_for_its_load_when_the_first_output_arrives():
    """0.20 to 0.25: a step in flight at the preemption brings the output after the next admission."""
    stream = events(32, "A0+0 s32 P o+ F")
    waits = Admitted(50, 0, 2, True, 28, 4, asynchronous=True, computed_tokens=32)
    stream.insert([type(event) for event in stream].index(Delivered), waits)
    stream = with_report(stream, report(32, 28, 4), output=0)

    assert "tokens/set-once" not in violation_ids(stream, figures="last")


@near_miss("tokens/set-once")
def test_an_admission_whose_load_failed_completely_never_ran():
    stream = with_report(events(200, "A0+160 L0 A0+0 s200 o+ F"), report(200, 0, 0))

    assert [] == violation_ids(stream)


@near_miss("tokens/set-once")
def test_a_session_may_report_each_chunk():
    stream = with_report(events(20, "A16+0 s4 o+ S X10 s10 o+ F"), report(20, 16, 0), output=0)

    assert [] == violation_ids(with_report(stream, report(30, 20, 0)))


# --- tokens/balance and tokens/unexplained-drop --------------------------------------------------


@violates("tokens/balance")
def test_rejected_drafts_that_stay_counted_are_found():
    stream = miscounted(events(50, "A0+0 s50 o+ s4 o1/3 s1 o+ F"), 2, +2)

    assert ["tokens/balance"] == violation_ids(stream)


@violates("tokens/balance")
def test_promised_tokens_counted_twice_are_found():
    stream = altered(events(200, "A0+160 s40 L o+ F"), Admitted, computed_tokens=320)

    assert ["tokens/balance"] == violation_ids(stream)


@near_miss("tokens/balance")
@near_miss("tokens/unexplained-drop")
@pytest.mark.parametrize(
    "words",
    [
        "A0+0 s50 o+ s1 P o+ A32+0 s20 o+ F",
        "A0+0 s50 o+ s4 P o1/3 A32+0 s21 o+ F",
        "A0+48a L s2 o+ F",
        "A0+32 s18 L16 o s34 o+ F",
        "A0+50 L R1 s1 o+ F",
        "A32+0 R16:replay s34 o+ F",
    ],
)
def test_counts_that_change_for_a_known_cause_are_clean(words: str):
    assert [] == violation_ids(events(50, words))


@violates("tokens/unexplained-drop")
def test_a_count_that_falls_without_a_cause_is_found():
    stream = miscounted(events(50, "A0+0 s20 o s30 o+ F"), 1, -20)

    assert ["tokens/unexplained-drop"] == violation_ids(stream)


@violates("tokens/unexplained-drop")
def test_a_rollback_without_an_event_is_found():
    stream = without(events(96, "A0+96 L R1 s1 o+ F"), RolledBack)

    assert ["tokens/unexplained-drop"] == violation_ids(stream)


FAILED_WITH_DRAFTS = "A0+32 s18 s4 L16! o s34 {} s{} o+ o+ F"
"""A load fails while a step with three drafts is in flight; its output comes after the next step began."""


@violates("tokens/unexplained-drop")
def test_drafts_rejected_after_a_failed_load_are_found():
    """Positions 48 and 49 are computed a third time, because the engine's count fell from 50 to 48."""
    stream = events(50, FAILED_WITH_DRAFTS.format("o1/3", 4))
    (account,) = audited(stream).ledger.accounts()

    assert ["tokens/unexplained-drop"] == violation_ids(stream)
    assert {"load_failed": 22} == account.rework
    assert (34, 2, 2, 0) == (account.first_prompt, account.first_output, account.rejected, account.overrun)
    assert 0 == account.suspense


@violates("tokens/unexplained-drop")
def test_drafts_of_a_past_life_that_the_engine_subtracts_are_found():
    """vLLM up to 0.26: positions 49 and 50 are computed twice in the second life."""
    stream = miscounted(events(50, "A0+0 s50 o+ s4 P A32+0 s19 o1/3 s4 o+ o+ F"), 3, -2)
    stream = altered(stream, Finished, computed_tokens=53)
    (account,) = audited(stream).ledger.accounts()

    assert ["tokens/unexplained-drop", "tokens/sampled-twice"] == violation_ids(stream)
    assert {"blocks": 22} == account.rework
    assert (50, 3, 2, 0) == (account.first_prompt, account.first_output, account.rejected, account.suspense)


@violates("tokens/unexplained-drop")
def test_a_step_after_a_failed_load_does_not_move_with_drafts_rejected_before():
    """A shared block failed, and the count stays above the hit: the next step starts at position 7."""
    stream = events(5, "A4+0 s3/2 s3/2 L3! o0/2 s6/2 o0/2 s3/2 o0/2 o0/2 F")
    (account,) = audited(stream).ledger.accounts()

    assert "tokens/unexplained-drop" in violation_ids(stream)
    assert (1, 2, 8, 3) == (account.first_prompt, account.first_output, account.rejected, account.overrun)
    assert {"load_failed": 1} == account.rework


@near_miss("tokens/unexplained-drop")
def test_drafts_accepted_after_a_failed_load_are_clean():
    assert [] == violation_ids(events(50, FAILED_WITH_DRAFTS.format("o3/3", 4)))


# --- tokens/beyond-sequence ----------------------------------------------------------------------

DRAFTED: list[Event] = events(50, "A0+0 s50 o+ s4 o1/3 s4 o3/3 F")


@violates("tokens/beyond-sequence")
def test_rejected_drafts_counted_at_the_end_are_found():
    """61 computed tokens of a sequence of 57: more than the two rejected drafts stay counted."""
    stream = altered(DRAFTED, Finished, computed_tokens=61)

    assert ["tokens/balance", "tokens/beyond-sequence"] == violation_ids(stream)


@violates("tokens/beyond-sequence")
def test_a_count_above_the_sequence_length_is_found():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 52, 0, 0, 51))

    assert "tokens/beyond-sequence" in violation_ids(stream)


@violates("tokens/beyond-sequence")
def test_a_count_that_includes_the_last_sampled_token_is_found():
    stream = altered(events(50, "A0+0 s50 o+ F"), Finished, computed_tokens=51)

    assert "tokens/beyond-sequence" in violation_ids(stream)


@near_miss("tokens/beyond-sequence")
@near_miss("tokens/in-flight")
def test_drafts_in_flight_may_exceed_the_sequence_length():
    """54 computed of a sequence of 51, four of them in flight."""
    stream = events(50, "A0+0 s50 o+ s4/3 s4/3 o3/3 o3/3 F")

    assert [] == violation_ids(with_after(stream, Stepped, 1, census(2, 54, 4, 4, 51)))


@near_miss("tokens/beyond-sequence")
@near_miss("tokens/in-flight")
def test_a_stop_within_the_accepted_drafts_is_clean():
    assert [] == violation_ids(events(50, "A0+0 s50 o+ s4 s4/3 o3/3 F-2"))


@near_miss("tokens/beyond-sequence")
def test_an_abort_with_a_step_in_flight_is_clean():
    assert [] == violation_ids(events(50, "A0+0 s50 o+ s1 s1 F:aborted"))


# --- tokens/in-flight ----------------------------------------------------------------------------


@violates("tokens/in-flight")
def test_tokens_in_flight_without_a_step_in_flight_are_found():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 50, 50, 0, 51))

    assert ["tokens/in-flight"] == violation_ids(stream)


@violates("tokens/in-flight")
def test_a_leaked_placeholder_is_found():
    """vLLM 0.32, a synchronous load failure under asynchronous scheduling."""
    stream = events(200, "A0+160 s40 s1 L64 o s136 o o+ s1 o+ F")
    stream = with_after(stream, Delivered, 2, census(3, 200, 0, 1, 201))

    assert ["tokens/in-flight"] == violation_ids(stream)


@violates("tokens/in-flight")
def test_a_leaked_placeholder_of_a_request_that_ran_after_its_failed_load_is_found():
    """The failed tokens are computed again, and the request ends with an error later."""
    stream = events(200, "A0+160 s40 s1 L64 o s136 o o+ s1 o+ F:error")

    assert ["tokens/in-flight"] == violation_ids(altered(stream, Finished, placeholder_tokens=1))


@violates("tokens/in-flight")
def test_a_leaked_placeholder_of_a_request_whose_load_did_not_fail_is_found():
    stream = altered(events(50, "A0+0 s50 o+ s1 o+ F:error"), Finished, placeholder_tokens=1)

    assert ["tokens/in-flight"] == violation_ids(stream)


@near_miss("tokens/in-flight")
def test_a_placeholder_of_a_request_that_its_failed_load_ends_is_clean():
    """Policy `fail`: the same call reports the failure and ends the request, so nothing reads the count."""
    stream = events(200, "A0+160 s40 s1 L64 o F:error")

    assert [] == violation_ids(altered(stream, Finished, placeholder_tokens=2))


@near_miss("tokens/in-flight")
def test_a_request_without_placeholders_needs_no_tokens_in_flight():
    """vLLM up to 0.27 schedules fewer than no tokens with drafts in flight, and then raises."""
    stream = altered(events(50, "A0+0 s50 o+ s1 o+ F"), Stepped, 1, changed=[0, -3, 0, 47])
    stream = with_after(stream, Stepped, 1, census(2, 47, -3, 0, 51))

    assert "tokens/in-flight" not in violation_ids(stream)


@near_miss("tokens/in-flight")
def test_the_placeholder_of_a_pooling_request_at_its_end_is_clean():
    """Under async scheduling, vLLM before 0.32 adds one for an output that a pooling request never has."""
    stream = altered(events(50, "A0+0 s50 o+ F"), RequestAdded, pooling=True)

    assert [] == violation_ids(altered(stream, Finished, placeholder_tokens=1))


@violates("tokens/in-flight")
def test_negative_placeholders_are_found():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 50, 0, -2, 51))

    assert ["tokens/in-flight"] == violation_ids(stream)


@near_miss("tokens/in-flight")
@near_miss("tokens/reset-on-preemption")
def test_output_in_flight_at_a_preemption_stays_in_flight():
    stream = events(40, "A0+0 s40 o+ s1 P o+ A32+0 s10 o+ F")

    assert [] == violation_ids(with_after(stream, Preempted, 0, census(2, 0, 1, 0, 41)))


@near_miss("tokens/in-flight")
def test_an_engine_without_in_flight_counts_is_clean():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 50, -1, -1, -1))

    assert [] == violation_ids(stream)


# --- tokens/reset-on-preemption ------------------------------------------------------------------


@violates("tokens/reset-on-preemption")
@pytest.mark.parametrize("kept", [{"computed_tokens": 64}, {"held_blocks": 4}])
def test_tokens_or_blocks_kept_through_a_preemption_are_found(kept: dict[str, int]):
    stream = altered(events(64, "A0+0 s64 o+ P A0+0 s65 o+ F"), Preempted, **kept)

    assert ["tokens/reset-on-preemption"] == violation_ids(stream)


@near_miss("tokens/reset-on-preemption")
def test_a_resumed_request_may_hold_loaded_tokens_before_it_runs():
    """It waits with status PREEMPTED and holds the tokens that it has loaded since."""
    stream = events(64, "A0+0 s64 o+ P A0+48a L s17 o+ F")

    assert [] == violation_ids(with_after(stream, Admitted, 1, census(1, 48, 0, 0, 65)))


# --- tokens/stale-lookup -------------------------------------------------------------------------


@violates("tokens/stale-lookup")
def test_a_hit_kept_from_a_failed_attempt_is_found():
    """vLLM#18957: the lookup of step 0 hits 64 tokens; the admission in step 1 uses them without a lookup."""
    stream = altered(events(100, "A64+0 s36 o+ F"), LookedUp, step=0)

    (violation,) = audited(stream).violations

    assert "tokens/stale-lookup" == violation.id
    assert (
        "Request request-0 was admitted in step 1 with 64 local tokens, but its last "
        "prefix-cache lookup, in step 0, found 64."
    ) == violation.message


@violates("tokens/stale-lookup")
def test_a_hit_larger_than_its_lookup_is_found():
    stream = altered(events(100, "A64+0 s36 o+ F"), LookedUp, local_tokens=0)

    assert ["tokens/stale-lookup"] == violation_ids(stream)


@violates("tokens/stale-lookup")
def test_a_hit_without_a_lookup_is_found():
    assert ["tokens/stale-lookup"] == violation_ids(without(events(100, "A64+0 s36 o+ F"), LookedUp))


def with_kept_lookup(stream: list[Event], local: int, cached: int, *, ended: bool = False) -> list[Event]:
    """The stream with a kept lookup of step 0, used by the first admission or left over at the end."""
    lookup = LookupKept(10, 0, 1, 0, local, cached, ended)
    index = index_of(stream, Finished if ended else Admitted)
    stream = [*stream[:index], lookup, *stream[index:]]
    return stream if ended else altered(stream, LookedUp, step=0, local_tokens=local)


@violates("tokens/stale-lookup")
@pytest.mark.parametrize(
    ("local", "cached"),
    [(64, 0), (64, 48), (64, 64), (0, 64)],
    ids=["none is left", "less is left", "all is left", "there is more now"],
)
def test_an_admission_that_uses_a_kept_lookup_is_found(local: int, cached: int):
    """vLLM#18957, as the v0 adapter records it: the lookup of a failed attempt, and what is cached now."""
    stream = with_kept_lookup(events(100, f"A{local}+0 s{100 - local} o+ F"), local, cached)

    (violation,) = audited(stream).violations

    assert "tokens/stale-lookup" == violation.id
    assert (local, cached, 0) == tuple(
        violation.figures[name] for name in ("local_tokens", "cached_tokens", "looked_up_step")
    )


@violates("tokens/stale-lookup")
def test_a_kept_lookup_that_outlives_its_request_is_found():
    """vLLM#18957: the request was ignored, or aborted after a failed attempt."""
    stream = with_kept_lookup(events(100, "F:ignored"), 0, 0, ended=True)

    (violation,) = audited(stream).violations

    assert (
        "Request request-0 has ended, but the engine still keeps the result of its lookup in step 0 "
        "(0 tokens), and nothing will release it."
    ) == violation.message


@near_miss("tokens/stale-lookup")
def test_a_kept_lookup_of_0_tokens_is_clean_while_nothing_is_cached():
    assert [] == violation_ids(with_kept_lookup(events(100, "A0+0 s100 o+ F"), 0, 0))


@near_miss("tokens/stale-lookup")
def test_later_chunks_use_the_hit_of_the_first():
    """v0 remembers a prompt's hit from chunk to chunk: one lookup, one admission."""
    assert [] == violation_ids(events(200, "A64+0 s64 o s64 o s8 o+ F"))


@near_miss("tokens/stale-lookup")
def test_a_partial_block_may_be_dropped_for_a_longer_external_hit():
    """70 local tokens, 6 of them in a partial block; 32 external tokens from position 64 reach further."""
    stream = altered(events(100, "A64+32 L s4 o+ F"), LookedUp, local_tokens=70)

    assert [] == violation_ids(stream)


@near_miss("tokens/stale-lookup")
def test_a_hit_within_the_replayed_window_may_be_dropped():
    assert [] == violation_ids(altered(events(100, "A0+0 s100 o+ F"), LookedUp, local_tokens=16))


@near_miss("tokens/stale-lookup")
@near_miss("tokens/lookup-counted-once")
def test_a_new_lookup_after_a_failed_attempt_is_clean():
    stream = events(100, "A0+0 s100 o+ F")
    failed = AdmissionFailed(10, 0, 0, "not_allocated", 64, 0, 3)
    counted = LookupsCounted(10_000, 1, 1, 100, 0, 1, 100, 0)
    stream = [stream[0], LookedUp(10, 0, 0, 64), failed, *stream[1:]]

    assert [] == violation_ids(with_after(stream, Stepped, 0, counted))


# --- tokens/lookup-counted-once ------------------------------------------------------------------


@violates("tokens/lookup-counted-once")
@pytest.mark.parametrize(
    "counted",
    [(2, 200, 128, 1, 36, 0), (1, 100, 128, 1, 36, 0), (1, 100, 64, 2, 72, 0), (0, 0, 0, 1, 36, 0)],
)
def test_counted_lookups_that_differ_from_the_admission_are_found(counted: tuple[int, ...]):
    stream = events(100, "A64+0 s36 o+ F")

    assert ["tokens/lookup-counted-once"] == violation_ids(
        with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, *counted))
    )


@near_miss("tokens/lookup-counted-once")
def test_an_engine_without_a_connector_counts_no_external_lookups():
    """It has no connector, and it does not count a request that may not read the cache."""
    stream = altered(events(100, "A0+0 s100 o+ F"), Admitted, counted=False)

    assert [] == violation_ids(with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, 0, 0, 0, -1, -1, -1)))


def given_up_hit(external_queries: int) -> list[Event]:
    """A hit of 48 tokens, given up after the connector was asked beyond it, with the engine's statistics."""
    stream = altered(events(100, "A0+0 s100 o+ F"), LookedUp, local_tokens=48)
    stream = with_after(stream, LookedUp, 0, Matched(10, 0, 1, 48, 0, False))
    counted = LookupsCounted(10_000, 1, 1, 100, 0, 1, external_queries, 0)
    return with_after(stream, Stepped, 0, counted)


@violates("tokens/lookup-counted-once")
def test_a_given_up_hit_is_not_queried_from_the_connector():
    assert ["tokens/lookup-counted-once"] == violation_ids(given_up_hit(100))


@near_miss("tokens/lookup-counted-once")
def test_a_hit_may_be_given_up_after_the_connector_was_asked_beyond_it():
    """The engine recomputes the last window of a hit, so a hit within the window saves nothing."""
    assert [] == violation_ids(given_up_hit(52))


@near_miss("tokens/lookup-counted-once")
def test_a_hit_may_be_shortened_by_a_lookup_after_the_connector_was_asked():
    """In a hybrid model the groups agree on a shorter hit if nothing external follows it."""
    stream = events(100, "A16+0 s84 o+ F")
    stream = with_after(stream, LookedUp, 0, Matched(10, 0, 1, 48, 0, False))

    assert [] == violation_ids(
        with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, 1, 100, 16, 1, 84, 0))
    )


def aborted(asynchronous: bool, waits: bool) -> Watched:
    """A request of 100 tokens is aborted while another one runs and, with ``waits``, a third one waits."""
    watched = Watched()
    driver = watched.start(asynchronous=asynchronous, max_running=2)
    driver.add("other", 60, 12)
    driver.add("a", 100, 12, shares=("other", 48))
    for _ in range(3):
        driver.step()
    if waits:
        driver.add("late", 40, 3)
    driver.abort("a")
    driver.run()
    return watched


@violates("tokens/lookup-counted-once")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_lookup_that_an_abort_counts_once_more_is_found(asynchronous: bool, waits: bool):
    with planted(BY_NAME["abort-counts-a-lookup"]):
        finding = aborted(asynchronous, waits).finding("tokens/lookup-counted-once")

    assert (1, 0, "local") == tuple(
        finding.figures[name] for name in ("requests", "ledger_requests", "source")
    )


@near_miss("tokens/lookup-counted-once")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_an_abort_counts_no_lookup(asynchronous: bool, waits: bool):
    assert [] == aborted(asynchronous, waits).violation_ids()


def counted_before_the_cut(cut_tokens: int) -> list[Event]:
    """A lookup counted 101 tokens; the connector then cut the prompt to 100."""
    stream = altered(events(100, "A0+0 s100 o+ F"), Admitted, cut_tokens=cut_tokens)
    return with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, 1, 101, 0, 1, 100, 0))


@near_miss("tokens/lookup-counted-once")
def test_a_lookup_may_count_tokens_that_the_connector_then_cuts_off():
    """NIXL cuts the last token off the prompt of a Mamba prefill; before 0.27 the lookup is counted first."""
    assert [] == violation_ids(counted_before_the_cut(1))


@violates("tokens/lookup-counted-once")
def test_a_lookup_that_counts_more_than_the_prompt_is_found():
    assert ["tokens/lookup-counted-once"] == violation_ids(counted_before_the_cut(0))


@near_miss("tokens/lookup-counted-once")
def test_a_full_local_hit_counts_no_external_lookup():
    stream = events(96, "A96+0 R1 s1 o+ F")

    assert [] == violation_ids(with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, 1, 96, 96, 0, 0, 0)))


# --- tokens/suspense -----------------------------------------------------------------------------


@violates("tokens/suspense")
def test_tokens_computed_again_without_a_cause_are_found():
    """No known history leads here; the ledger posts such tokens to suspense and guesses no cause."""
    stream = events(64, "A0+0 s64 o+ s1 o+ F")
    account = audited(stream).ledger.closed["request-0"]
    account.suspense = 5

    (witness,) = suspense(Entry(9, 9, 9, stream[-1], account))

    assert {"suspense_tokens": 5} == witness.figures


# --- tokens/without-token -------------------------------------------------------------------------


def failed_with_a_step_in_flight(watched: Watched, **setup: Any) -> Driver:
    """The load of request r fails while a step that follows it is in flight, if two steps may be."""
    driver = watched.start(connector="scripted", **setup)
    driver.connector.answer_lookups("r", 96)
    driver.add("r", 100, 4)
    driver.schedule()
    if setup:
        driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[2:3])
    driver.run()
    return driver


@violates("tokens/without-token")
def test_a_step_that_computes_a_dropped_output_is_found():
    """vLLM keeps the placeholders of outputs that it drops after a failed load."""
    watched = Watched()
    failed_with_a_step_in_flight(watched, asynchronous=True)

    finding = watched.finding("tokens/without-token")

    assert ("r", 102, 100, 2) == (
        finding.request,
        *(finding.figures[name] for name in ("end_tokens", "sequence_tokens", "tokens")),
    )


@near_miss("tokens/without-token")
def test_a_failed_load_without_a_step_in_flight_drops_no_output():
    watched = Watched()
    failed_with_a_step_in_flight(watched)

    assert [] == watched.violation_ids()


# --- tokens/sampled-twice -------------------------------------------------------------------------

PREEMPTED_IN_FLIGHT: list[Event] = [
    RequestAdded(0, 0, "r", prompt_tokens=8, max_tokens=8),
    Admitted(1, 0, 1, False, 0, 0, False, 0),
    Stepped(2, 1, [0, 8, 0, 8], []),
    Preempted(3, 0, 2, "blocks", 8, 8, 0, 0, 0, True),
    Admitted(4, 0, 3, True, 0, 0, False, 0),
]
"""The prompt's step is in flight when the request is preempted and admitted again."""


@violates("tokens/sampled-twice")
def test_a_request_that_resumes_before_its_output_has_a_token_sampled_twice():
    resumed = [Stepped(5, 3, [0, 8, 0, 8], []), Delivered(6, [0, 1], []), Delivered(7, [0, 1], [])]
    (violation,) = audited([*PREEMPTED_IN_FLIGHT, *resumed]).violations

    assert "tokens/sampled-twice" == violation.id
    assert "a token for position 8, but its sequence had 9 tokens already" in violation.message


@near_miss("tokens/sampled-twice")
@pytest.mark.parametrize(
    "resumed",
    [
        [Stepped(5, 3, [0, 8, 0, 8], []), Delivered(6, [0, 1], [0]), Delivered(7, [], [])],
        [Delivered(5, [0, 1], []), Stepped(6, 3, [0, 9, 0, 9], []), Delivered(7, [], [])],
        [
            Stepped(5, 3, [0, 4, 0, 4], []),
            Delivered(6, [0, 1], []),
            Stepped(7, 4, [0, 5, 0, 9], []),
            Delivered(8, [0, 0], []),
            Delivered(9, [0, 1], []),
        ],
    ],
    ids=["dropped", "before the next life runs", "while a chunk that samples nothing is in flight"],
)
def test_the_output_in_flight_at_a_preemption_may_come_once(resumed: list[Event]):
    assert [] == violation_ids([*PREEMPTED_IN_FLIGHT, *resumed])


PAST_STOP: list[Event] = [
    RequestAdded(0, 0, "s", prompt_tokens=8, max_tokens=1, resumable=True),
    Admitted(1, 0, 1, False, 0, 0, False, 0),
    Stepped(2, 1, [0, 8, 0, 8], []),
    Stepped(3, 2, [0, 1, 0, 9], []),
    Delivered(4, [0, 1], []),
    RolledBack(4, 0, "session", 9, 9),
]
"""A step is in flight when the first turn of a session stops with the sequence's token 9."""
NEXT_TURN: list[Event] = [Extended(5, 0, 12, 9), Stepped(6, 3, [0, 3, 0, 12], [])]


@violates("tokens/sampled-twice")
def test_an_output_of_the_turn_before_that_is_taken_for_the_next_one_is_found():
    (violation,) = audited([*PAST_STOP, *NEXT_TURN, Delivered(7, [], [])]).violations

    assert "tokens/sampled-twice" == violation.id
    assert "a token for position 9, but its sequence had 12 tokens already" in violation.message


@near_miss("tokens/sampled-twice")
@pytest.mark.parametrize(
    "stream",
    [[*NEXT_TURN, Delivered(7, [], [0])], [Delivered(5, [], []), *NEXT_TURN, Delivered(7, [], [])]],
    ids=["dropped", "before the next chunk"],
)
def test_an_output_past_the_stop_of_a_turn_may_be_dropped_or_come_before_the_next(stream: list[Event]):
    assert "tokens/sampled-twice" not in violation_ids([*PAST_STOP, *stream])


# --- tokens/beyond-max-tokens ---------------------------------------------------------------------

THREE_TOKENS = "A0+0 s40 o+ s1 o+ s1 o+ F"


@violates("tokens/beyond-max-tokens")
def test_a_request_that_stops_one_token_late_is_found():
    (violation,) = audited(altered(events(40, THREE_TOKENS), RequestAdded, max_tokens=2)).violations

    assert "tokens/beyond-max-tokens" == violation.id
    assert violation.message.startswith(
        "Request request-0 ended with 3 output tokens, but its client asked for 2"
    )


@near_miss("tokens/beyond-max-tokens")
@pytest.mark.parametrize(
    ("words", "added"),
    [
        (THREE_TOKENS, {"max_tokens": 3}),
        (THREE_TOKENS, {"max_tokens": 2, "resumable": True}),
        (THREE_TOKENS, {"max_tokens": None}),
        ("A0+0 s40 o+ s4/3 o3/3 F-2", {"max_tokens": 3}),
    ],
    ids=["the limit", "a session", "no limit is known", "drafts past the stop"],
)
def test_a_request_with_as_many_tokens_as_its_client_asked_for_is_clean(words: str, added: dict[str, Any]):
    found = audited(altered(events(40, words), RequestAdded, **added)).violations

    assert [] == [violation for violation in found if violation.id == "tokens/beyond-max-tokens"]


# --- tokens/turn-overcounted ----------------------------------------------------------------------

TURNS = "A0+0 s200 o+ S X50 s50 o+ F"


@violates("tokens/turn-overcounted")
def test_a_chunk_that_begins_below_the_computed_count_is_found():
    stream = events(200, TURNS)
    computed = next(event.computed_tokens for event in stream if isinstance(event, Extended))
    found = audited(altered(stream, Extended, turn_tokens=computed - 2)).violations

    (violation,) = [each for each in found if each.id == "tokens/turn-overcounted"]

    assert "the first 2 tokens of the next chunk are never computed" in violation.message


def test_a_turn_that_is_counted_beyond_the_next_prompt_leaves_no_new_tokens():
    stream = altered(events(200, TURNS), Extended, prompt_tokens=150, turn_tokens=140)
    ids = {violation.id for violation in audited(stream).violations}

    assert "tokens/turn-overcounted" in ids and "tokens/source-sum" not in ids


@near_miss("tokens/turn-overcounted")
@pytest.mark.parametrize("above", [0, 1])
def test_a_chunk_that_begins_at_or_above_the_computed_count_is_clean(above: int):
    stream = events(200, TURNS)
    computed = next(event.computed_tokens for event in stream if isinstance(event, Extended))
    found = audited(altered(stream, Extended, turn_tokens=computed + above)).violations

    assert [] == [each for each in found if each.id == "tokens/turn-overcounted"]


@near_miss("tokens/suspense")
def test_drafts_of_a_step_past_a_turns_end_make_the_next_turn_compute_a_token_again():
    """Up to 0.30 they are subtracted from a count that a step of the next turn was scheduled at."""
    auditor = audited(
        [
            RequestAdded(0, 0, "s", prompt_tokens=8, max_tokens=1, resumable=True),
            Admitted(1, 0, 1, False, 0, 0, False, 0),
            Stepped(2, 1, [0, 8, 0, 8], []),
            Stepped(3, 2, [0, 2, 1, 10], []),
            Delivered(4, [0, 1], []),
            RolledBack(4, 0, "session", 10, 10),
            Extended(5, 0, 13, 10),
            Stepped(6, 3, [0, 2, 0, 12], []),
            Delivered(7, [], []),
            Stepped(8, 4, [0, 2, 0, 13], []),
            Delivered(9, [0, 0], []),
            Delivered(10, [0, 1], []),
            Finished(11, 0, "stopped", 13, 0, 0, 14, 1),
        ]
    )
    account = auditor.ledger.account("s")

    assert [] == [v.id for v in auditor.violations if v.severity == "violation"]
    assert (8 + 2 + 1, {"past_stop": 1}) == (account.first_prompt, account.rework)


@near_miss("tokens/unexplained-drop")
@pytest.mark.parametrize("ignored, computed", [((), 10), ((0,), 11)])
def test_drafts_of_a_step_past_a_turns_end_are_subtracted_if_its_output_is_delivered(ignored, computed):
    """vLLM before 0.22 delivers it; later releases throw it away and subtract nothing."""
    stream: list[Event] = [
        RequestAdded(0, 0, "r", prompt_tokens=8, max_tokens=3, resumable=True),
        Admitted(1, 0, 1, False, 0, 0, False, 0),
        Stepped(2, 1, [0, 8, 0, 8], []),
        Stepped(3, 2, [0, 2, 1, 10], []),
        Delivered(4, [0, 1], []),
        Stepped(5, 3, [0, 2, 1, 12], []),
        Delivered(6, [], []),
        RolledBack(7, 0, "session", 11, 11),
        Delivered(8, [], list(ignored)),
        Finished(9, 0, "aborted", computed, -1, 0, 11, 3),
    ]
    auditor = audited(stream)

    assert [] == [violation.id for violation in auditor.violations]
