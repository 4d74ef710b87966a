"""The external tokens of an account by the tier that the connector reported."""

from __future__ import annotations

import pytest
from tests.audit.checks.false_reports import audited, with_after
from tests.histories import events

from kvledger.audit.causes import TIER_UNKNOWN
from kvledger.audit.events import Admitted, TiersReported
from kvledger.audit.figures.totals import Totals

BY_TIER = ("promised_by_tier", "loaded_by_tier", "voided_by_tier", "loaded_again_by_tier")


def totals(words: str, *tiers: dict[str, int], asked: int = 128) -> Totals:
    """The totals of one request of 200 tokens; ``tiers`` are those of its first admissions."""
    stream = events(200, words)
    for nth, one in enumerate(tiers):
        reported = TiersReported(0, 0, 1, asked, list(one), list(one.values()))
        stream = with_after(stream, Admitted, nth, reported)
    sums = Totals()
    for account in audited(stream).ledger.accounts():
        sums.add(account)
    return sums


def by_tier(sums: Totals) -> list[dict[str, int]]:
    """Promised, loaded, failed or cancelled, and repeat loads, by tier."""
    return [getattr(sums, name) for name in BY_TIER]


def test_a_promise_that_is_loaded_whole_keeps_its_tiers():
    sums = totals("A32+128 L s40 o+ F", {"host": 96, "disk": 32})

    assert [{"host": 96, "disk": 32}] * 2 + [{}, {}] == by_tier(sums)


def test_of_a_promise_of_one_tier_the_tier_of_each_part_is_known():
    sums = totals("A32+128 L64 s104 o+ F", {"host": 128})

    assert [{"host": 128}, {"host": 64}, {"host": 64}, {}] == by_tier(sums)


def test_of_a_promise_of_several_tiers_the_tier_of_a_part_is_not_known():
    sums = totals("A32+128 L64 s104 o+ F", {"host": 96, "disk": 32})

    assert [{"host": 96, "disk": 32}, {TIER_UNKNOWN: 64}, {TIER_UNKNOWN: 64}, {}] == by_tier(sums)


@pytest.mark.parametrize("tiers", [{"host": 96}, {"host": 96, "disk": 64}])
def test_tiers_that_do_not_sum_to_the_promise_are_not_known(tiers: dict[str, int]):
    assert [{TIER_UNKNOWN: 128}] * 2 + [{}, {}] == by_tier(totals("A32+128 L s40 o+ F", tiers))


def test_a_repeat_load_has_the_tier_of_its_own_life():
    sums = totals("A0+128 L s72 o+ P A0+128 L s73 o+ F", {"host": 128}, {"disk": 128})

    assert {"disk": 128} == sums.loaded_again_by_tier
    assert {"host": 128, "disk": 128} == sums.promised_by_tier


def test_a_cancelled_promise_has_its_tier():
    assert {"disk": 128} == totals("A32+128a F:aborted", {"disk": 128}).voided_by_tier


def test_an_admission_whose_tiers_were_not_asked_for_is_in_no_tier():
    """As after a preemption: 128 tokens of 256 have a tier."""
    sums = totals("A0+128 L s72 o+ P A0+128 L s73 o+ F", {"host": 128})

    assert (256, {"host": 128}) == (sums.promised, sums.promised_by_tier)
    assert {} == sums.loaded_again_by_tier


def test_without_reports_nothing_is_in_a_tier():
    assert [{}] * 4 == by_tier(totals("A32+128 L s40 o+ F"))


def test_the_settled_figures_do_not_depend_on_tiers():
    plain, tiered = totals("A32+128 L s40 o+ F"), totals("A32+128 L s40 o+ F", {"host": 128})

    assert (plain.local, plain.external, plain.computed) == (tiered.local, tiered.external, tiered.computed)
