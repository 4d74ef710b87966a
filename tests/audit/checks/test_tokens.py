"""The invariants of one request's tokens, each broken and nearly broken."""

from __future__ import annotations

import pytest
from tests.audit.checks.false_reports import (
    audited,
    found,
    miscounted,
    place,
    report,
    reported,
    told,
    with_after,
    without,
)
from tests.histories import events

from kvledger.audit.checks.tokens import source_sum, suspense
from kvledger.audit.events import (
    AdmissionFailed,
    Admitted,
    Census,
    Delivered,
    Event,
    Finished,
    LookedUp,
    LookupKept,
    LookupsCounted,
    Preempted,
    RolledBack,
    Stepped,
)
from kvledger.audit.ledger.account import Account
from kvledger.audit.ledger.frozen import Settlement
from kvledger.audit.ledger.subjects import Entry

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

ASKED_AGAIN = "A0+32 L s56 o P A0+160 L s40 o+ F"
"""vLLM#36752: preempted in mid-prefill, and the connector asked again."""


def census(step: int, *row: int) -> Census:
    """One request's counters at rest: computed, in flight, placeholders, sequence."""
    return Census(10_000, step, [0, *row], 0, 0, 0)


# --- tokens/negative -----------------------------------------------------------------------------


@violates("tokens/negative")
def test_external_asked_again_makes_the_local_hit_negative():
    """vLLM#36752 on 0.18.1: 32 of the first admission less 160 of the second."""
    stream = reported(events(200, ASKED_AGAIN), report(200, -128, 160))

    assert ["tokens/negative", "tokens/set-once"] == found(stream)


@violates("tokens/negative")
def test_more_hits_than_tokens():
    stream = told(events(100, "A64+0 s36 o+ F"), Admitted, local_tokens=128, computed_tokens=128)

    assert "tokens/negative" in found(stream)


@near_miss("tokens/negative")
def test_a_whole_prompt_may_be_a_hit():
    stream = reported(events(96, "A0+96 L R1 s1 o+ F"), report(96, 0, 96))

    assert [] == found(stream)


@near_miss("tokens/negative")
@near_miss("tokens/source-sum")
@near_miss("tokens/set-once")
def test_the_last_token_of_a_full_hit_is_added_back_up_to_0_19():
    """PromptTokenStats of 0.17: 96 cached of 97, one recomputed, reported as 97 local and 1."""
    stream = reported(events(97, "A96+0 s1 o+ F"), report(97, 97, 0, computed=1, cached=96))

    assert [] == found(stream)


# --- tokens/source-sum ---------------------------------------------------------------------------


@violates("tokens/source-sum")
def test_a_negative_hit_clamped_leaves_the_sum_wrong():
    """vLLM#36752 on 0.19.1: 168 + 0 + 160 of 200."""
    stream = reported(events(200, ASKED_AGAIN), report(200, 0, 160, computed=168))

    assert ["tokens/source-sum", "tokens/set-once"] == found(stream)


@violates("tokens/source-sum")
def test_our_own_settlement_is_held_to_the_same():
    account = Account(0, "request-0", 100, at=0)
    settlement = Settlement(100, 20, 10, 10, 50, 0, at=0, step=1)

    (witness,) = source_sum(Entry(0, 1, 0, settlement, account))

    assert {"total_tokens": 70, "prompt_tokens": 80} == witness.figures


@near_miss("tokens/source-sum")
def test_a_session_settles_its_later_chunk_alone():
    assert [] == found(events(20, "A0+0 s20 o+ s1 o+ S X10 s10 o+ F"))


# --- tokens/set-once -----------------------------------------------------------------------------


@violates("tokens/set-once")
def test_reported_twice():
    once = reported(events(100, "A64+0 s36 o+ s1 o+ F"), report(100, 64, 0), output=0)

    assert ["tokens/set-once"] == found(reported(once, report(100, 64, 0)))


@violates("tokens/set-once")
def test_figures_of_the_last_admission_where_the_first_is_meant():
    stream = reported(events(200, ASKED_AGAIN), report(200, 0, 160))

    (violation,) = audited(stream, figures="first").violations

    assert "tokens/set-once" == violation.id
    assert (160, 32) == (
        violation.figures["external_tokens"],
        violation.figures["plan_external_tokens"],
    )


@violates("tokens/set-once")
def test_figures_of_the_first_admission_where_the_last_is_meant():
    stream = reported(events(200, ASKED_AGAIN), report(200, 0, 32))

    assert ["tokens/set-once"] == found(stream, figures="last")


@near_miss("tokens/set-once")
@pytest.mark.parametrize(("figures", "external"), [("first", 32), ("last", 160)])
def test_each_version_reports_the_admission_that_it_means(figures: str, external: int):
    stream = reported(events(200, ASKED_AGAIN), report(200, 0, external))

    assert [] == found(stream, figures=figures)


@near_miss("tokens/set-once")
def test_the_last_admission_is_the_last_before_the_first_output():
    """0.20 to 0.26, preempted in decode: the figures were taken already."""
    stream = events(64, "A0+0 s64 o+ s1 o+ P A64+0 s2 o+ F")

    assert [] == found(reported(stream, report(64, 0, 0), output=0), figures="last")


@near_miss("tokens/set-once")
def test_an_admission_whose_load_failed_wholly_never_ran():
    stream = reported(events(200, "A0+160 L0 A0+0 s200 o+ F"), report(200, 0, 0))

    assert [] == found(stream)


@near_miss("tokens/set-once")
def test_a_session_may_report_each_chunk():
    stream = reported(events(20, "A16+0 s4 o+ S X10 s10 o+ F"), report(20, 16, 0), output=0)

    assert [] == found(reported(stream, report(30, 20, 0)))


# --- tokens/balance and tokens/unexplained-drop --------------------------------------------------


@violates("tokens/balance")
def test_rejected_drafts_stay_counted():
    stream = miscounted(events(50, "A0+0 s50 o+ s4 o1/3 s1 o+ F"), 2, +2)

    assert ["tokens/balance"] == found(stream)


@violates("tokens/balance")
def test_a_promise_counted_twice():
    stream = told(events(200, "A0+160 s40 L o+ F"), Admitted, computed_tokens=320)

    assert ["tokens/balance"] == found(stream)


@near_miss("tokens/balance")
@near_miss("tokens/unexplained-drop")
@pytest.mark.parametrize(
    "words",
    [
        "A0+0 s50 s4 o+ s4 o1/3 s4 o0/3 o3/3 F",
        "A0+0 s50 o+ s1 P o+ A32+0 s20 o+ F",
        "A0+0 s50 o+ s4 P o1/3 A32+0 s21 o+ F",
        "A0+48a L s2 o+ F",
        "A0+32 s18 L16 o s34 o+ F",
        "A0+50 L R1 s1 o+ F",
        "A32+0 R16:replay s34 o+ F",
    ],
)
def test_counts_that_move_for_a_cause(words: str):
    assert [] == found(events(50, words))


@violates("tokens/unexplained-drop")
def test_the_count_falls_and_nobody_says_why():
    stream = miscounted(events(50, "A0+0 s20 o s30 o+ F"), 1, -20)

    assert ["tokens/unexplained-drop"] == found(stream)


@violates("tokens/unexplained-drop")
def test_a_roll_back_that_nobody_saw():
    stream = without(events(96, "A0+96 L R1 s1 o+ F"), RolledBack)

    assert ["tokens/unexplained-drop"] == found(stream)


# --- tokens/beyond-sequence ----------------------------------------------------------------------

STREAMED: list[Event] = events(50, "A0+0 s50 o+ s4 o1/3 s4 o3/3 F")


@violates("tokens/beyond-sequence")
def test_rejected_drafts_left_at_the_end():
    """61 executed of a sequence of 57: more than the two rejected ones were kept."""
    stream = told(STREAMED, Finished, computed_tokens=61)

    assert ["tokens/balance", "tokens/beyond-sequence"] == found(stream)


@violates("tokens/beyond-sequence")
def test_a_count_above_the_sequence_at_rest():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 52, 0, 0, 51))

    assert "tokens/beyond-sequence" in found(stream)


@violates("tokens/beyond-sequence")
def test_the_last_token_was_never_fed():
    stream = told(events(50, "A0+0 s50 o+ F"), Finished, computed_tokens=51)

    assert "tokens/beyond-sequence" in found(stream)


@near_miss("tokens/beyond-sequence")
@near_miss("tokens/in-flight")
def test_drafts_in_flight_stand_past_the_sequence():
    """54 computed of a sequence of 51, four of them unanswered."""
    stream = events(50, "A0+0 s50 o+ s4/3 s4/3 o3/3 o3/3 F")

    assert [] == found(with_after(stream, Stepped, 1, census(2, 54, 4, 4, 51)))


@near_miss("tokens/beyond-sequence")
@near_miss("tokens/in-flight")
def test_stopped_within_the_accepted_drafts():
    assert [] == found(events(50, "A0+0 s50 o+ s4 s4/3 o3/3 F-2"))


@near_miss("tokens/beyond-sequence")
def test_pooling_executes_its_whole_sequence():
    assert [] == found(events(80, "A32+0 s16 o s32 o F", pooling=True))


@near_miss("tokens/beyond-sequence")
def test_aborted_with_a_step_in_flight():
    assert [] == found(events(50, "A0+0 s50 o+ s1 s1 F:aborted"))


# --- tokens/in-flight ----------------------------------------------------------------------------


@violates("tokens/in-flight")
def test_an_answer_that_was_not_drained():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 50, 50, 0, 51))

    assert ["tokens/in-flight"] == found(stream)


@violates("tokens/in-flight")
def test_a_placeholder_left_behind():
    """vLLM 0.32, a synchronous load failure under asynchronous scheduling."""
    stream = events(200, "A0+160 s40 s1 L64 o s136 o o+ s1 o+ F")
    stream = with_after(stream, Delivered, 2, census(3, 200, 0, 1, 201))

    assert ["tokens/in-flight"] == found(stream)


@violates("tokens/in-flight")
def test_negative_placeholders():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 50, 0, -2, 51))

    assert ["tokens/in-flight"] == found(stream)


@near_miss("tokens/in-flight")
@near_miss("tokens/reset-on-preemption")
def test_output_in_flight_at_a_preemption_stays_in_flight():
    stream = events(40, "A0+0 s40 o+ s1 P o+ A32+0 s10 o+ F")

    assert [] == found(with_after(stream, Preempted, 0, census(2, 0, 1, 0, 41)))


@near_miss("tokens/in-flight")
def test_an_engine_without_such_counts():
    stream = with_after(events(50, "A0+0 s50 o+ s1 o+ F"), Delivered, 0, census(1, 50, -1, -1, -1))

    assert [] == found(stream)


# --- tokens/reset-on-preemption ------------------------------------------------------------------


@violates("tokens/reset-on-preemption")
@pytest.mark.parametrize("kept", [{"computed_tokens": 64}, {"held_blocks": 4}])
def test_something_outlives_the_preemption(kept: dict[str, int]):
    stream = told(events(64, "A0+0 s64 o+ P A0+0 s65 o+ F"), Preempted, **kept)

    assert ["tokens/reset-on-preemption"] == found(stream)


@near_miss("tokens/reset-on-preemption")
def test_a_resumed_request_that_loaded_holds_tokens_without_a_preemption():
    """Its status is preempted while it waits; nothing was preempted."""
    stream = events(64, "A0+0 s64 o+ P A0+48a L s17 o+ F")

    assert [] == found(with_after(stream, Admitted, 1, census(1, 48, 0, 0, 65)))


# --- tokens/stale-lookup -------------------------------------------------------------------------


@violates("tokens/stale-lookup")
def test_a_hit_kept_from_a_failed_attempt():
    """vLLM#18957: 64 tokens found in step 1, used in step 2 when the cache has none."""
    stream = told(events(100, "A64+0 s36 o+ F"), LookedUp, step=0)

    (violation,) = audited(stream).violations

    assert "tokens/stale-lookup" == violation.id
    assert (
        "Request request-0 was admitted in step 1 with 64 local tokens, but its last "
        "prefix-cache lookup, in step 0, found 64."
    ) == violation.message


@violates("tokens/stale-lookup")
def test_a_hit_that_the_cache_does_not_have():
    stream = told(events(100, "A64+0 s36 o+ F"), LookedUp, local_tokens=0)

    assert ["tokens/stale-lookup"] == found(stream)


@violates("tokens/stale-lookup")
def test_a_hit_that_nobody_asked_for():
    assert ["tokens/stale-lookup"] == found(without(events(100, "A64+0 s36 o+ F"), LookedUp))


def kept(stream: list[Event], local: int, cached: int, *, ended: bool = False) -> list[Event]:
    """The stream, a look-up of step 0 standing in for that of its first admission, or left over."""
    said = LookupKept(10, 0, 1, 0, local, cached, ended)
    at = place(stream, Finished if ended else Admitted)
    stream = [*stream[:at], said, *stream[at:]]
    return stream if ended else told(stream, LookedUp, step=0, local_tokens=local)


@violates("tokens/stale-lookup")
@pytest.mark.parametrize(
    ("local", "cached"),
    [(64, 0), (64, 48), (64, 64), (0, 64)],
    ids=["none is left", "less is left", "all is left", "there is more now"],
)
def test_an_answer_that_was_kept_is_used(local: int, cached: int):
    """vLLM#18957, as the v0 adapter sees it: the answer of a failed attempt, and the cache now."""
    stream = kept(events(100, f"A{local}+0 s{100 - local} o+ F"), local, cached)

    (violation,) = audited(stream).violations

    assert "tokens/stale-lookup" == violation.id
    assert (local, cached, 0) == tuple(
        violation.figures[name] for name in ("local_tokens", "cached_tokens", "looked_up_step")
    )


@violates("tokens/stale-lookup")
def test_a_lookup_result_that_outlives_its_request():
    """vLLM#18957: of a request that was ignored, or aborted after an attempt that failed."""
    stream = kept(events(100, "F:ignored"), 0, 0, ended=True)

    (violation,) = audited(stream).violations

    assert (
        "Request request-0 has ended, but the engine still keeps the result of its lookup in step 0 "
        "(0 tokens), and nothing will release it."
    ) == violation.message


@near_miss("tokens/stale-lookup")
def test_an_answer_of_none_is_kept_while_there_is_none():
    assert [] == found(kept(events(100, "A0+0 s100 o+ F"), 0, 0))


@near_miss("tokens/stale-lookup")
def test_later_chunks_go_by_the_hit_of_the_first():
    """v0 remembers a prompt's hit from chunk to chunk: one look-up, one admission."""
    assert [] == found(events(200, "A64+0 s64 o s64 o s8 o+ F"))


@near_miss("tokens/stale-lookup")
def test_the_tail_of_a_block_given_up_for_a_longer_external_hit():
    """70 found, 6 of them less than a block; 32 external from 64 up reach further."""
    stream = told(events(100, "A64+32 L s4 o+ F"), LookedUp, local_tokens=70)

    assert [] == found(stream)


@near_miss("tokens/stale-lookup")
def test_a_hit_within_the_replayed_window_is_given_up():
    assert [] == found(told(events(100, "A0+0 s100 o+ F"), LookedUp, local_tokens=16))


@near_miss("tokens/stale-lookup")
@near_miss("tokens/lookup-counted-once")
def test_asked_again_after_a_failed_attempt():
    stream = events(100, "A0+0 s100 o+ F")
    failed = AdmissionFailed(10, 0, 0, "not_allocated", 64, 0, 3)
    counted = LookupsCounted(10_000, 1, 1, 100, 0, 1, 100, 0)
    stream = [stream[0], LookedUp(10, 0, 0, 64), failed, *stream[1:]]

    assert [] == found(with_after(stream, Stepped, 0, counted))


# --- tokens/lookup-counted-once ------------------------------------------------------------------


@violates("tokens/lookup-counted-once")
@pytest.mark.parametrize(
    "counted",
    [(2, 200, 128, 1, 36, 0), (1, 100, 128, 1, 36, 0), (1, 100, 64, 2, 72, 0), (0, 0, 0, 1, 36, 0)],
)
def test_look_ups_that_are_not_those_of_the_admission(counted: tuple[int, ...]):
    stream = events(100, "A64+0 s36 o+ F")

    assert ["tokens/lookup-counted-once"] == found(
        with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, *counted))
    )


@near_miss("tokens/lookup-counted-once")
def test_an_engine_that_counts_only_what_it_has():
    """No connector; and a request that may not read the cache is not counted."""
    stream = told(events(100, "A0+0 s100 o+ F"), Admitted, counted=False)

    assert [] == found(with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, 0, 0, 0, -1, -1, -1)))


@near_miss("tokens/lookup-counted-once")
def test_a_whole_local_hit_asks_the_connector_for_nothing():
    stream = events(96, "A96+0 R1 s1 o+ F")

    assert [] == found(with_after(stream, Stepped, 0, LookupsCounted(10_000, 1, 1, 96, 96, 0, 0, 0)))


# --- tokens/suspense -----------------------------------------------------------------------------


@violates("tokens/suspense")
def test_work_done_again_that_nothing_explains():
    """No stream is known that leads here; the ledger posts it rather than guess a cause."""
    stream = events(64, "A0+0 s64 o+ s1 o+ F")
    account = audited(stream).ledger.closed["request-0"]
    account.suspense = 5

    (witness,) = suspense(Entry(9, 9, 9, stream[-1], account))

    assert {"suspense_tokens": 5} == witness.figures


@near_miss("tokens/suspense")
def test_work_done_again_after_a_preemption_is_rework():
    assert [] == found(events(64, "A0+0 s64 o+ s1 o+ P A0+0 s66 o+ F"))
