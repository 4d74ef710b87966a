"""The ledger gives the golden figures; `tests/differential` compares it with an oracle on other histories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from tests.audit.checks.false_reports import audited, with_after
from tests.columns import CAUSES, by_cause, by_title, expect_row, statement_figures
from tests.drawn import drawn_histories
from tests.histories import GOLDEN, WOVEN, Golden, Woven, compressed, events, request_id, weave, whole_outputs
from tests.positions import SUMS

from kvledger.audit import events as ev
from kvledger.audit.causes import TIER_UNKNOWN
from kvledger.audit.events import Admitted, Event, TiersReported
from kvledger.audit.figures.totals import Totals
from kvledger.audit.ledger.account import COMPUTED, EXTERNAL, PositionRanges
from kvledger.audit.ledger.blocks.holdings import MOST_PERCENT, BlockDemand
from kvledger.audit.ledger.blocks.pool import calls

Ledger = pytest.importorskip("kvledger.audit.ledger.ledger").Ledger


# --- The ledger gives the golden figures; `tests/differential` compares it with an oracle on other histories.


def post(ledger: Any, event: Event) -> None:
    """Post one event and ignore its entries."""
    entries = ledger.apply(event)
    if entries is not None:
        for _ in entries:
            pass


def ledger_of(events: Iterable[Event]) -> Any:
    """A ledger after all events, with closed accounts kept."""
    ledger = Ledger(keep_closed=True)
    for event in events:
        post(ledger, event)
    return ledger


def figures_of(ledger: Any, request: int) -> dict[str, Any]:
    """The figures of one account, named as in a golden row."""
    statement = ledger.account(request_id(request))
    assert statement is not None
    return {**statement_figures(statement), "unknown": statement.unknown}


def expect(row: Golden, figures: dict[str, Any]) -> None:
    """Every column of one golden row; nothing is in flight at its end, or unknown."""
    expect_row(row, figures)
    assert (0, None) == (figures["in_flight"], figures["unknown"])


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_golden_history(row: Golden) -> None:
    """The figures are right to the token."""
    expect(row, figures_of(ledger_of(row.events()), 0))


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_golden_history_with_repeated_steps(row: Golden) -> None:
    """The same figures when unchanged steps are written as one ``Repeated``."""
    expect(row, figures_of(ledger_of(compressed(row.events())), 0))


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_golden_history_with_whole_outputs(row: Golden) -> None:
    """The same figures when outputs are written as ``DeliveredWhole``."""
    expect(row, figures_of(ledger_of(whole_outputs(row.events())), 0))


@pytest.mark.parametrize("woven", WOVEN, ids=by_title)
def test_requests_that_share_steps_have_separate_accounts(woven: Woven) -> None:
    """Each request has the figures of its own row."""
    ledger = ledger_of(woven.events())

    for number, row in enumerate(woven.rows):
        expect(row, figures_of(ledger, number))


def test_totals_are_the_sum_of_the_accounts() -> None:
    """Every known account is counted once, open or closed."""
    for history in drawn_histories():
        ledger = ledger_of(history)
        frozen = [account.freeze() for account in ledger.accounts()]
        accounts, totals = [account for account in frozen if account.unknown is None], ledger.totals()

        assert (len(frozen), len(frozen) - len(accounts)) == (totals.requests, totals.unknown_requests)
        for name in set(SUMS) - set(CAUSES):
            assert sum(getattr(account, name) for account in accounts) == getattr(totals, name), name
        for name in CAUSES:
            expected: Counter[str] = Counter()
            for account in accounts:
                expected.update(by_cause(getattr(account, name)))
            assert expected == by_cause(getattr(totals, name)), name


# --- steady decode --------------------------------------------------------------------------------


def posted_at_once(events: Iterable[Event]) -> Any:
    """A ledger whose accounts are read after every event, so that none lags behind."""
    ledger = Ledger(keep_closed=True)
    for event in events:
        post(ledger, event)
        ledger.open  # noqa: B018
    return ledger


LONG = (
    "a.A0+0 b.A16+0 a.s40&b.s8 a.o+&b.o+ (a.s1&b.s1 a.o+&b.o+)x20 a.P (b.s1 b.o+)x9 b.F a.A32+0 a.s29 a.o+ F",
    "a.A0+0 b.A16+0 a.s40&b.s8 a.s1&b.s1 a.o+&b.o+ (a.s1&b.s1 a.o+&b.o+)x20 a.P a.o+&b.o+ b.F",
    "a.A0+0 b.A16+0 a.s40&b.s8 a.o+&b.o+ (a.s1&b.s1 a.o+&b.o+)x9 a.s1&b.s4/3 a.o+&b.o1/3 a.s1&b.s1 a.o+&b.o+"
    " (a.s1&b.s1 a.o+&b.o+)x9 a.F b.F",
)


@pytest.mark.parametrize("words", LONG)
@pytest.mark.parametrize("repeats", [False, True])
def test_steady_accounts_equal_accounts_posted_at_once(words: str, repeats: bool) -> None:
    stream = weave({0: 40, 1: 24}, words)
    stream = compressed(stream) if repeats else stream
    lazy, eager = ledger_of(stream), posted_at_once(stream)

    assert [account.freeze() for account in eager.accounts()] == [a.freeze() for a in lazy.accounts()]
    assert eager.totals() == lazy.totals()


def test_steady_decode_is_posted_when_the_account_is_read() -> None:
    ledger = Ledger()
    for event in weave({0: 40}, "A0+0 s40 o+ (s1 o+)x50"):
        post(ledger, event)

    assert {0} == ledger.steady.keys()
    assert 50 == ledger.open[0].first_output
    assert {0} == ledger.steady.keys()


def test_reading_accounts_changes_nothing() -> None:
    for history in drawn_histories():
        lazy, eager = ledger_of(history), posted_at_once(history)

        assert [account.freeze() for account in eager.accounts()] == [a.freeze() for a in lazy.accounts()]


# --- ranges of positions, where a whole history would be long-winded --------------------------------------


def test_external_tokens_of_one_life_are_withdrawn_by_position():
    """Tokens of another life and computed tokens stay; only tokens whose first origin it was are counted."""
    positions = PositionRanges()
    positions.fill(0, 32, EXTERNAL, 1)
    positions.fill(0, 96, EXTERNAL, 2)
    positions.fill(96, 120, COMPUTED, 2)

    assert 48 == positions.withdraw(16, 80, 2)
    assert {"local": 0, "external": 48, "computed": 24, "unattained": 48} == positions.tally(0, 120)


# --- the external tokens of an account by the tier that the connector reported ----------------------------


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


# --- how many more blocks would have let preempted requests run on ----------------------------------------


POOL = 10


def preempted(*, free: int, shared: int = 0) -> BlockDemand:
    """Request 1 gives up ``free`` blocks for good and ``shared`` blocks that another request holds."""
    demand = BlockDemand()
    blocks = range(free + shared)
    demand.free(1, 5, blocks, [int(block >= free) for block in blocks])
    demand.preempt(1)
    return demand


def test_the_need_is_the_largest_until_the_request_is_admitted_again() -> None:
    demand = preempted(free=4)
    for used in (6, 8, 7):
        demand.see(used)
    demand.hold(1, 3)
    demand.see(POOL)

    assert 20 == demand.end(1, POOL)
    assert not demand.known(1)


def test_a_pool_that_was_never_too_small_lacked_one_block() -> None:
    demand = preempted(free=2)
    demand.see(8)

    assert 10 == demand.end(1, POOL)


def test_a_shared_block_counts_once_its_other_holder_gives_it_up() -> None:
    demand = preempted(free=3, shared=2)
    demand.see(9)
    demand.free(2, 6, [3, 4, 9], [0, 0, 0])
    demand.see(7)

    assert 20 == demand.end(1, POOL)


def test_blocks_given_up_in_an_earlier_step_are_not_kept() -> None:
    demand = BlockDemand()
    demand.free(1, 4, [7, 8, 9], [0, 0, 0])
    demand.free(1, 5, [1], [0])
    demand.preempt(1)
    demand.see(POOL)

    assert 10 == demand.end(1, POOL)


def test_several_preempted_requests_count_together() -> None:
    demand = preempted(free=4)
    demand.free(2, 6, [5, 6], [0, 0])
    demand.preempt(2)
    demand.see(8)

    assert [40, 40] == [demand.end(1, POOL), demand.end(2, POOL)]


def test_a_need_is_not_known_without_a_preemption_or_after_a_loss_or_beyond_the_bound() -> None:
    assert -1 == BlockDemand().end(1, POOL)
    lost = preempted(free=4)
    lost.forget()
    assert -1 == lost.end(1, POOL)
    far = preempted(free=4)
    far.see(POOL + POOL * MOST_PERCENT)
    assert -1 == far.end(1, POOL)


# --- poolCalls is split into one event for each call ------------------------------------------------------


AT, STEP, CALLS_POOL = 9, 4, 1
POOL_CODE = 8 * CALLS_POOL

CALLS = {
    "allocated": (
        [POOL_CODE + ev.ALLOCATED, 7, 0, 1, 2, 30, 31],
        ev.BlocksAllocated(AT, STEP, CALLS_POOL, "allocate", [7, 0, 2, 30, 31]),
    ),
    "one block allocated to each request": (
        [POOL_CODE + ev.ALLOCATED_EACH, -1, 0, 1, 4, 30, 31, 7, 8],
        ev.BlocksAllocated(AT, STEP, CALLS_POOL, "allocate", [7, 0, 1, 30, 8, 0, 1, 31]),
    ),
    "cached, owner known by its table": (
        [POOL_CODE + ev.CACHED, -1, 0, 2 * -3, 3, 30, 5, 16],
        ev.BlocksCached(AT, STEP, CALLS_POOL, [-1, 0, -3, 1, 30, 5, 16]),
    ),
    "touched": (
        [POOL_CODE + ev.TOUCHED, 7, 0, 0, 4, 30, 31, 2, 1],
        ev.BlocksTouched(AT, STEP, CALLS_POOL, 7, 0, "hit", [30, 31], [2, 1]),
    ),
    "freed without a table": (
        [POOL_CODE + ev.FREED, -1, -1, 0, 2, 30, 0],
        ev.BlocksFreed(AT, STEP, CALLS_POOL, -1, -1, "hit", [30], [0]),
    ),
    "cached": (
        [POOL_CODE + ev.CACHED, 7, 0, 2 * 20, 6, 30, 1 << 62, 16, 31, 5, 32],
        ev.BlocksCached(AT, STEP, CALLS_POOL, [7, 0, 20, 2, 30, 1 << 62, 16, 31, 5, 32]),
    ),
    "cached, earlier hashes replaced": (
        [POOL_CODE + ev.CACHED, 7, 0, 2 * 20 + 1, 3, 30, 5, 16],
        ev.BlocksCached(AT, STEP, CALLS_POOL, [7, 0, 20, 1, 30, 5, 16], True),
    ),
    "table reported": (
        [ev.TABLES_REPORTED, -1, -1, 0, 5, 7, 0, 16, 1, 30],
        ev.TablesReported(AT, STEP, [7, 0, 16, 1, 30]),
    ),
    "table removed": ([ev.TABLES_REMOVED, 7, -1, 0, 0], ev.TablesRemoved(AT, [7])),
}


def read(*rows: list[int]) -> list[ev.Event]:
    return list(
        calls(ev.PoolCalls(AT, STEP, ["hit", "allocate"], [number for row in rows for number in row]))
    )


@pytest.mark.parametrize("call", list(CALLS))
def test_each_kind_of_call_is_decoded(call: str) -> None:
    row, event = CALLS[call]

    assert [event] == read(row)


def test_calls_are_decoded_in_order() -> None:
    rows, events = zip(*CALLS.values(), strict=True)

    assert [*events, *events] == read(*rows, *rows)


def test_calls_of_a_later_step_have_its_number() -> None:
    removed = [ev.TABLES_REMOVED, 7, -1, 0, 0]
    rows = [
        removed,
        [ev.IN_STEP, -1, -1, STEP + 2, 0],
        [ev.FREED, 7, 0, 0, 2, 30, 0],
        CALLS["table reported"][0],
    ]

    assert [STEP, STEP + 2, STEP + 2] == [getattr(event, "step", STEP) for event in read(*rows)]


def test_each_call_has_the_stack_of_the_event() -> None:
    (allocated,) = calls(ev.PoolCalls(AT, STEP, ["allocate"], [ev.ALLOCATED, 7, 0, 0, 1, 30], ["here"]))

    assert ev.BlocksAllocated(AT, STEP, 0, "allocate", [7, 0, 1, 30], ["here"]) == allocated
