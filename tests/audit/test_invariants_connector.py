"""The invariants of the KV connector, each broken and nearly broken."""

from __future__ import annotations

import pytest
from tests.audit.lies import audited, found, report, reported, told
from tests.histories import events

from kvledger.audit.events import Admitted, Matched

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss


# --- connector/promise-not-loaded ----------------------------------------------------------------


@violates("connector/promise-not-loaded")
def test_a_resumed_request_whose_load_is_not_planned():
    """LMCache#1969: 18 tokens promised to the second life, none in the step's plan."""
    stream = events(34, "A0+0 s34 o+ (s1 o+)x14 P A16+18 C0 s15 o+ F")

    (violation,) = audited(stream).violations

    assert ("connector/promise-not-loaded", 2) == (violation.id, violation.life)
    assert (
        "18 external tokens promised to request request-0 from position 16 up were never loaded, "
        "yet it ran over them (blocks never filled: 1000, 1001)."
    ) == violation.message
    assert [1000, 1001] == violation.figures["blocks"]


@violates("connector/promise-not-loaded")
def test_half_of_a_promise_in_the_plan():
    (violation,) = audited(events(200, "A32+128 C64 s40 o+ F")).violations

    assert (64, 96) == (violation.figures["tokens"], violation.figures["start"])


@violates("connector/promise-not-loaded")
def test_a_request_that_runs_before_its_load_has_finished():
    assert ["connector/promise-not-loaded"] == found(events(200, "A0+160a s40 o+ F"))


@violates("connector/promise-not-loaded")
def test_many_blocks_are_not_all_named():
    (violation,) = audited(events(400, "A0+320 C0 s80 o+ F")).violations

    assert "(blocks never filled: 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007 and 12 more)" in (
        violation.message
    )
    assert list(range(1000, 1020)) == violation.figures["blocks"]


@near_miss("connector/promise-not-loaded")
@pytest.mark.parametrize(
    "words",
    [
        "A0+160 C160 s40 o+ F",
        "A0+160 s40 L64 o s136 o+ F",
        "A0+160 L64 s136 o+ F",
        "A64+96 F",
        "A0+160 s40 P o+ A0+0 s201 o+ F",
        "A0+160 s40 F",
    ],
)
def test_a_promise_kept_or_reported_failed_or_never_read(words: str):
    assert [] == found(events(200, words))


@near_miss("connector/promise-not-loaded")
def test_a_plan_that_cannot_be_read_is_not_held_against_it():
    assert [] == found(events(200, "A0+160 s40 L o+ F"))


# --- connector/failed-load-counted ---------------------------------------------------------------


@violates("connector/failed-load-counted")
@pytest.mark.parametrize("words", ["A0+160 L64 s136 o+ F", "A0+160 s40 L64 o s136 o+ F"])
def test_a_failed_load_stays_counted_as_external(words: str):
    auditor = audited(reported(events(200, words), report(200, 0, 160)))

    (violation,) = auditor.violations

    assert ("connector/failed-load-counted", "drift") == (violation.id, violation.severity)
    assert {
        "external_tokens": 160,
        "promised_tokens": 160,
        "failed_tokens": 96,
    } == violation.figures
    assert "clean" == auditor.verdict, "a drift makes no verdict"


@near_miss("connector/failed-load-counted")
def test_a_load_that_fails_in_a_later_life():
    stream = events(100, "A0+60 s30 L o P A0+96 L32 s68 o+ F")

    assert [] == found(reported(stream, report(100, 0, 60)))


@near_miss("connector/failed-load-counted")
def test_a_load_that_failed_wholly_is_looked_up_anew():
    stream = events(200, "A0+160 L0 A0+0 s200 o+ F")

    assert [] == found(reported(stream, report(200, 0, 0)))


# --- connector/negative-match --------------------------------------------------------------------


@violates("connector/negative-match")
def test_a_match_shorter_than_the_local_hit():
    """One finding, though the engine then takes it at its word."""
    stream = told(events(100, "A64+8 s28 o+ F"), Matched, external_tokens=-16)
    stream = told(stream, Admitted, external_tokens=-16, computed_tokens=48)

    assert "connector/negative-match" == found(stream)[0]
    assert 1 == found(stream).count("connector/negative-match")


@near_miss("connector/negative-match")
@pytest.mark.parametrize("answer", [None, 0])
def test_no_answer_and_nothing(answer: int | None):
    stream = told(events(100, "A64+8 s28 o+ F"), Matched, external_tokens=answer)

    assert [] == found(stream)
