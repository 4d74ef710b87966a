"""The invariants of the KV connector, each violated and nearly violated."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.false_reports import (
    altered,
    audited,
    report,
    violation_ids,
    with_after,
    with_report,
    without_drifts,
)
from tests.engines.observed import observe
from tests.histories import events
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import Attach, start

from kvledger.audit.checks.coverage import coverage
from kvledger.audit.events import (
    Admitted,
    BlocksPromised,
    Census,
    Delivered,
    EngineStarted,
    Event,
    FreeCompleted,
    FreeDelayed,
    HandedOver,
    LoadFailed,
    LoadFinished,
    Matched,
    SavePlanned,
    Stepped,
    TiersReported,
    Tracked,
    WorkerStepped,
)
from kvledger.audit.ledger.lives import OVERDUE_SECONDS

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss


# --- connector/promise-not-loaded ----------------------------------------------------------------


@violates("connector/promise-not-loaded")
def test_a_resumed_request_without_its_load_in_the_metadata_is_found():
    """LMCache#1969: 18 tokens promised to the second life, none in the step's connector metadata."""
    stream = events(34, "A0+0 s34 o+ (s1 o+)x14 P A16+18 C0 s15 o+ F")

    (violation,) = audited(stream).violations

    assert ("connector/promise-not-loaded", 2) == (violation.id, violation.life)
    assert (
        "The connector promised 18 external tokens to request request-0 from position 16 on, but they "
        "were not loaded before the request ran (blocks never filled: 1000, 1001)."
    ) == violation.message
    assert [1000, 1001] == violation.figures["blocks"]


@violates("connector/promise-not-loaded")
def test_half_of_the_promised_tokens_missing_from_the_metadata_is_found():
    (violation,) = audited(events(200, "A32+128 C64 s40 o+ F")).violations

    assert (64, 96) == (violation.figures["tokens"], violation.figures["start"])


@violates("connector/promise-not-loaded")
def test_a_request_that_runs_before_its_load_has_finished_is_found():
    assert ["connector/promise-not-loaded"] == violation_ids(events(200, "A0+160a s40 o+ F"))


@violates("connector/promise-not-loaded")
def test_a_message_names_at_most_eight_blocks():
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
        "A64+96 F",
        "A0+160 s40 P o+ A0+0 s201 o+ F",
        "A0+160 s40 F",
    ],
)
def test_promised_tokens_loaded_reported_failed_or_never_read_are_clean(words: str):
    assert [] == violation_ids(events(200, words))


# --- connector/failed-load-counted ---------------------------------------------------------------


@violates("connector/failed-load-counted")
@pytest.mark.parametrize("words", ["A0+160 L64 s136 o+ F", "A0+160 s40 L64 o s136 o+ F"])
def test_a_failed_load_stays_counted_as_external(words: str):
    auditor = audited(with_report(events(200, words), report(200, 0, 160)))

    (violation,) = without_drifts(auditor)

    assert ("connector/failed-load-counted", "drift") == (violation.id, violation.severity)
    assert {
        "external_tokens": 160,
        "promised_tokens": 160,
        "failed_tokens": 96,
    } == violation.figures
    assert "clean" == auditor.verdict, "a drift does not change the verdict"


@near_miss("connector/failed-load-counted")
def test_a_load_that_fails_in_a_later_life_is_no_drift():
    stream = events(100, "A0+60 s30 L o P A0+96 L32 s68 o+ F")

    assert [] == violation_ids(with_report(stream, report(100, 0, 60)))


@near_miss("connector/failed-load-counted")
def test_a_new_lookup_after_a_completely_failed_load_is_no_drift():
    stream = events(200, "A0+160 L0 A0+0 s200 o+ F")

    assert [] == violation_ids(with_report(stream, report(200, 0, 0)))


# --- connector/negative-match --------------------------------------------------------------------


@violates("connector/negative-match")
def test_a_negative_match_is_found_once():
    """There is one finding, although the engine then uses the negative number."""
    stream = altered(events(100, "A64+8 s28 o+ F"), Matched, external_tokens=-16)
    stream = altered(stream, Admitted, external_tokens=-16, computed_tokens=48)

    assert "connector/negative-match" == violation_ids(stream)[0]
    assert 1 == violation_ids(stream).count("connector/negative-match")


@near_miss("connector/negative-match")
@pytest.mark.parametrize("answer", [None, 0])
def test_a_match_of_none_or_0_tokens_is_clean(answer: int | None):
    stream = altered(events(100, "A64+8 s28 o+ F"), Matched, external_tokens=answer)

    assert [] == violation_ids(stream)


# --- connector/tracker-lag and connector/save-gap --------------------------------------------------

DECODED = "A0+0 s64 o+ (s1 o+)x20 F"


def tracking(
    tracked: int, computed: int = 84, *, saved: int = 64, due: int = 64, recent: int = 2, orders: int = 0
) -> list[Event]:
    """A decoded request with the connector's counts near its end, and an order to save ``orders`` tokens."""
    event = Tracked(5_000, 0, 20, tracked, saved, due, computed, recent)
    order = [SavePlanned(2_000, 0, 1, 0, orders)] if orders else []
    return with_after(events(64, DECODED), Delivered, -1, *order, event)


@violates("connector/tracker-lag")
def test_a_connector_that_counts_only_the_prompt_lags():
    """LMCache#2821: its list of tokens does not grow with the decoded tokens."""
    (violation,) = audited(tracking(64)).violations

    assert "connector/tracker-lag" == violation.id
    assert (
        "The connector knows 64 of the 84 tokens that request request-0 has computed. It is 20 tokens "
        "behind, and at most 2 are in flight."
    ) == violation.message


@near_miss("connector/tracker-lag")
@pytest.mark.parametrize("tracked", [82, 83, 84, 90])
def test_a_connector_behind_by_the_tokens_in_flight_or_ahead_is_clean(tracked: int):
    assert [] == violation_ids(tracking(tracked))


def saving(start: int, *saved: tuple[int, int]) -> list[Event]:
    """Saves of a decoded request of which a lookup found 64 tokens, 16 of them in the local cache."""
    orders = [SavePlanned(2_000, 0, 1, *each) for each in (*saved, (start, start + 32))]
    return with_after(events(64, DECODED), Delivered, -1, Matched(1_900, 0, 1, 16, 48, True), *orders)


@violates("connector/save-gap")
@pytest.mark.parametrize("saved", [[], [(64, 96)]])
def test_a_save_above_what_the_connector_holds_is_found(saved: list[tuple[int, int]]):
    """LMCache#4508: each repeated lookup counts the found tokens as stored once more."""
    (violation,) = audited(saving(128, *saved)).violations

    assert ("connector/save-gap", saved[0][1] if saved else 64, 128) == (
        violation.id, violation.figures["saved_tokens"], violation.figures["due_tokens"]
    )  # fmt: skip


@near_miss("connector/save-gap")
@pytest.mark.parametrize(
    ("start", "saved"), [(0, []), (64, []), (65, []), (96, [(64, 96)])],
    ids=["from the beginning", "at the end of the found tokens", "of a full hit", "after the last save"],
)  # fmt: skip
def test_a_save_that_leaves_nothing_out(start: int, saved: list[tuple[int, int]]):
    assert [] == violation_ids(saving(start, *saved))


@violates("connector/save-gap")
def test_a_due_chunk_that_is_not_saved_is_found():
    (violation,) = audited(tracking(84, saved=32)).violations

    assert ("connector/save-gap", {"saved_tokens": 32, "due_tokens": 64}) == (
        violation.id,
        violation.figures,
    )


@near_miss("connector/save-gap")
@pytest.mark.parametrize(
    "figures",
    [
        {"saved": 64, "due": 64},
        {"saved": 84, "due": 64},
        {"saved": 0, "due": -1},
        {"saved": 0, "due": 64, "orders": 64},
    ],
)
def test_chunks_saved_or_not_due_or_saved_in_an_earlier_life_are_clean(figures: dict[str, int]):
    assert [] == violation_ids(tracking(84, **figures))


# --- connector/never-finished ----------------------------------------------------------------------


def census_at(seconds: int) -> Census:
    return Census(seconds * 1_000_000, 9, [], 0, 1, 1)


@violates("connector/never-finished")
def test_a_load_that_never_finishes_is_found():
    stream = events(200, "A64+96a F")[:-1]

    (violation,) = audited([*stream, census_at(OVERDUE_SECONDS + 1)]).violations

    assert ("connector/never-finished", 96) == (violation.id, violation.figures["tokens"])


@violates("connector/never-finished")
def test_blocks_of_an_ended_request_that_are_never_freed_are_found():
    stream = [*events(200, "A0+0 s200 o+ F"), FreeDelayed(9_000, 0, 1, "request-0", 13)]

    (violation,) = audited([*stream, census_at(OVERDUE_SECONDS + 1)]).violations

    assert (
        "The connector has kept 13 blocks of request request-0, which ended 600 seconds ago."
    ) == violation.message


@near_miss("connector/never-finished")
def test_a_load_that_is_not_yet_overdue_is_clean():
    assert [] == violation_ids([*events(200, "A64+96a F")[:-1], census_at(OVERDUE_SECONDS - 1)])


@near_miss("connector/never-finished")
def test_a_load_that_finished_is_clean():
    stream = events(200, "A64+96a F")[:-1]

    assert [] == violation_ids([*stream, LoadFinished(9_000, 0, 160), census_at(OVERDUE_SECONDS + 1)])


@near_miss("connector/never-finished")
def test_delayed_blocks_that_were_freed_are_clean():
    delayed = [FreeDelayed(9_000, 0, 1, "request-0", 13), FreeCompleted(9_500, 0, 2)]

    assert [] == violation_ids([*events(200, "A0+0 s200 o+ F"), *delayed, census_at(OVERDUE_SECONDS + 1)])


# --- connector/handed-over -------------------------------------------------------------------------


def handed(words: str, computed: int, blocks: int, *, trimmed: bool = True) -> list[Event]:
    """A 100-token prompt's history, and what the connector is handed at its end; a block has 16 tokens."""
    handed_over = HandedOver(10_000, 0, 9, "request-0", computed, blocks, 16 * blocks, trimmed)
    return [*events(100, words), handed_over]


@violates("connector/handed-over")
def test_blocks_beyond_the_computed_tokens_are_found():
    """Of 96 promised tokens 32 are loaded, the rest fails, and the request is aborted."""
    (violation,) = audited(handed("A0+96 L32 F", 32, 6)).violations

    assert (
        "At the end of request request-0 the connector was handed 6 blocks for 96 tokens, but only 32 were "
        "hits, loaded or scheduled."
    ) == violation.message


@violates("connector/handed-over")
def test_blocks_that_do_not_hold_the_computed_tokens_are_found():
    assert ["connector/handed-over"] == violation_ids(handed("A0+0 s100 o+ F", 100, 6))


@violates("connector/handed-over")
def test_a_count_that_rises_after_the_end_is_found():
    assert ["connector/handed-over"] == violation_ids(handed("A0+0 s100 o+ F", 105, 7))


@near_miss("connector/handed-over")
@pytest.mark.parametrize(
    ("words", "computed", "blocks"),
    [
        ("A0+0 s100 o+ F", 100, 7),
        ("A0+0 s100 o+ s1 F", 101, 7),
        ("A0+96 L32 F", 32, 2),
        ("A0+0 s100 o+ P F", 0, 0),
        ("F", 0, 0),
    ],
)
def test_the_blocks_of_the_computed_tokens_are_clean(words: str, computed: int, blocks: int):
    assert [] == violation_ids(handed(words, computed, blocks))


@near_miss("connector/handed-over")
def test_every_block_of_the_request_is_clean_on_a_release_that_hands_over_all():
    assert [] == violation_ids(handed("A0+96 L32 F", 32, 6, trimmed=False))


@near_miss("connector/handed-over")
def test_blocks_without_positions_are_not_compared():
    stream = handed("A0+0 s100 o+ F", 100, 1)

    assert [] == violation_ids(altered(stream, HandedOver, room_tokens=-1))


# --- connector/failed-block-kept -------------------------------------------------------------------


def failed_blocks(attach: Attach = id) -> None:
    """Request r loads ten blocks of 16 tokens; blocks 4 and 5 of them fail."""
    driver = start(attach, connector="scripted")
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:6])
    driver.run()


@violates("connector/failed-block-kept")
@pytest.mark.parametrize(("kept", "tokens"), [(80, 16), (96, 32), (65, 1)])
def test_a_count_above_the_first_failed_block_is_found_at_level_tokens(kept: int, tokens: int):
    _, stream = observe(failed_blocks)
    auditor = audited(altered(stream, LoadFailed, computed_tokens=kept))

    found = next(v for v in auditor.violations if v.id == "connector/failed-block-kept")

    assert ("r", 64, tokens) == (found.request, found.figures["start"], found.figures["tokens"])


@violates("connector/failed-block-kept")
def test_a_failure_for_which_the_engine_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    """Up to 0.18 the engine looks only at the blocks that the first admission of a request hit or loaded."""
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_update_requests_with_invalid_blocks", lambda *_, **__: (set(), 0, set()))
    _, stream = observe(failed_blocks)
    (found,) = (v for v in audited(stream).violations if v.id == "connector/failed-block-kept")

    assert ("r", 64, 136) == (found.request, found.figures["start"], found.figures["tokens"])


def neighbour_without_a_load(attach: Attach = id) -> None:
    """Request b computes its prompt in the step whose output says that blocks of request r failed."""
    driver = start(attach, connector="scripted")
    driver.connector.answer_lookups("r", 160)
    driver.connector.answer_lookups("b", 0)
    driver.add("r", 200, 3)
    driver.add("b", 40, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:6])
    driver.run()


@near_miss("connector/failed-block-kept")
def test_a_failure_of_a_neighbours_blocks_needs_no_answer_of_a_request():
    _, stream = observe(neighbour_without_a_load)

    assert [] == [v for v in audited(stream).violations if v.severity == "violation"]


@violates("connector/failed-block-kept")
def test_a_count_kept_after_a_load_that_failed_whole_is_found():
    _, stream = observe(SCENARIOS["load_failure_as_a_whole_sync"])
    auditor = audited(altered(stream, LoadFailed, computed_tokens=160))

    found = next(v for v in auditor.violations if v.id == "connector/failed-block-kept")

    assert (0, 160) == (found.figures["start"], found.figures["tokens"])


@near_miss("connector/failed-block-kept")
def test_a_load_that_failed_whole_keeps_no_token():
    _, stream = observe(SCENARIOS["load_failure_as_a_whole_sync"])

    assert [] == [v for v in audited(stream).violations if v.severity == "violation"]


@near_miss("connector/failed-block-kept")
def test_the_tokens_below_the_first_failed_block_may_be_kept():
    _, stream = observe(failed_blocks)

    assert [] == [v for v in audited(stream).violations if v.severity == "violation"]


def failed_block_hit_later(attach: Attach = id) -> None:
    """The request of a failed load is aborted, so its cached blocks stay unfilled; the next one hits them."""
    driver = start(attach, connector="scripted")
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[4:10])
    driver.abort("r")
    driver.add("next", 200, 3, shares=("r", 200))
    driver.run()


@pytest.mark.parametrize(
    ("level", "ids"), [("tokens", set()), ("blocks", {"blocks/hash-content", "blocks/read-invalid"})]
)
def test_who_hits_a_failed_block_later_is_found_from_level_blocks_on(level: str, ids: set[str]):
    _, stream = observe(failed_block_hit_later, level)
    auditor = audited(stream)
    examined = coverage(next(event for event in stream if isinstance(event, EngineStarted)))

    assert ids == {found.id for found in auditor.violations if found.severity == "violation"}
    assert ("ownership" in examined.not_examined) is (level == "tokens")


# --- connector/handed-unloaded ---------------------------------------------------------------------


@violates("connector/handed-unloaded")
def test_an_abort_during_an_asynchronous_load_hands_over_tokens_that_were_not_loaded():
    (drift,) = audited(handed("A0+96a F", 96, 6)).violations

    assert ("connector/handed-unloaded", "drift") == (drift.id, drift.severity)
    assert "told 96 computed tokens and handed 6 blocks, but 96 of these tokens were not" in drift.message


@near_miss("connector/handed-unloaded")
@pytest.mark.parametrize(
    ("words", "computed", "blocks"), [("A0+96a L96 F", 96, 6), ("A0+96a F", 0, 0), ("A0+96 s4 o+ F", 100, 7)]
)
def test_a_handover_of_loaded_tokens_is_clean(words: str, computed: int, blocks: int):
    found = audited(handed(words, computed, blocks)).violations

    assert [] == [v for v in found if v.id == "connector/handed-unloaded"]


# --- events of a worker --------------------------------------------------------------------------


def promised(request: int = 0, step: int = 1, blocks: int = 10) -> BlocksPromised:
    """A promise of 160 tokens from position 0 on, in blocks 100, 101, ... of 16 tokens."""
    return BlocksPromised(0, request, step, 0, 16 * blocks, 16, list(range(100, 100 + blocks)))


def worker_step(step: int = 1, **how: Any) -> WorkerStepped:
    """A worker's step that loads the promised blocks, with other fields as in ``how``."""
    fields: dict[str, Any] = {
        "started": True,
        "loaded_blocks": list(range(100, 110)),
        "layers": 2,
        "saves": -1,
        "saved": True,
        "failed_blocks": [],
        "received": [],
        "failed": [],
        "sent": [],
    }
    return WorkerStepped(0, step, 0, **(fields | how))


def with_worker(words: str, *more: Event, after: type[Event] = Stepped, tokens: int = 200) -> list[Event]:
    """A history with its promised blocks, and a worker's events after the first event of a kind."""
    stream = events(tokens, words)
    stream = with_after(stream, Admitted, 0, promised(step=step_of(stream)))
    return with_after(stream, after, 0, *more)


def step_of(stream: list[Event]) -> int:
    """The step of the first admission."""
    return next(event.step for event in stream if isinstance(event, Admitted))


STEP = step_of(events(200, "A0+160 s40 o+ F"))
LATE = pytest.mark.parametrize("after", [Stepped, Delivered], ids=["in time", "late"])


@violates("connector/promise-not-loaded")
@LATE
def test_a_worker_that_never_begins_a_load_is_found(after: type[Event]):
    """The worker's event may come before or after the step's output: the account is the same."""
    auditor = audited(with_worker("A0+160 s40 o+ F", worker_step(STEP, started=False), after=after))

    (violation,) = auditor.violations
    (account,) = auditor.ledger.accounts()
    assert (
        "but they were not loaded before the request ran: "
        "a worker never began the load (blocks never filled: 100, " in (violation.message)
    )
    assert (160, 0, {"never_loaded": 160}) == (account.promised, account.loaded, account.voided)


@violates("connector/promise-not-loaded")
@pytest.mark.parametrize(
    ("later", "loaded_blocks", "tokens"), [(1, [], 160), (0, list(range(100, 105)), 80)], ids=["none", "half"]
)
def test_a_worker_that_skips_all_or_half_of_a_load_is_found(
    later: int, loaded_blocks: list[int], tokens: int
):
    """The first load shows that worker and scheduler number steps alike; the second is the one skipped."""
    stream = with_worker("A0+160 s40 o+ P A0+160 s41 o+ s1 o+ F", worker_step(STEP))
    second = [event for event in stream if isinstance(event, Admitted)][1]
    stream = with_after(stream, Admitted, 1, promised(step=second.step))
    skipping = worker_step(second.step + later, loaded_blocks=loaded_blocks, saves=1)

    (violation,) = audited(with_after(stream, Delivered, 2, skipping)).violations

    assert ("connector/promise-not-loaded", 2) == (violation.id, violation.life)
    assert tokens == violation.figures["tokens"]


@violates("connector/promise-not-loaded")
@LATE
def test_a_failed_load_that_the_engine_ignores_is_found(after: type[Event]):
    auditor = audited(
        with_worker("A0+160 s40 o+ F", worker_step(STEP, failed_blocks=[104, 105]), after=after)
    )

    (violation,) = auditor.violations
    (account,) = auditor.ledger.accounts()
    assert "a worker reported that the load failed (blocks never filled: 104, 105)" in violation.message
    assert (64, {"never_loaded": 96}) == (account.loaded, account.voided)


@near_miss("connector/promise-not-loaded")
@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("A0+160 s40 o+ F", {}),
        ("A0+160 s40 o+ F", {"loaded_blocks": None, "started": False}),
        ("A0+160 s40 L64 o s136 o+ F", {"failed_blocks": list(range(104, 110))}),
        ("A0+160 s40 P o+ A0+0 s201 o+ F", {"failed_blocks": [104]}),
    ],
    ids=["as planned", "opaque", "heeded", "preempted"],
)
def test_a_worker_that_follows_its_metadata_is_clean(words: str, how: dict[str, Any]):
    assert [] == violation_ids(with_worker(words, worker_step(STEP, **how)))


@near_miss("connector/promise-not-loaded")
def test_a_worker_that_numbers_steps_differently_is_ignored():
    shifted = worker_step(STEP + 1), worker_step(STEP + 2, loaded_blocks=[], saves=1)

    assert [] == violation_ids(with_worker("A0+160 s40 o+ (s1 o+)x4 F", *shifted, after=Delivered))


@near_miss("connector/promise-not-loaded")
def test_a_worker_whose_step_numbers_are_unconfirmed_is_ignored():
    assert [] == violation_ids(
        with_worker("A0+160 s40 o+ F", worker_step(STEP, loaded_blocks=list(range(100, 105))))
    )


@near_miss("connector/promise-not-loaded")
def test_a_worker_without_events_is_no_finding():
    assert [] == violation_ids(with_worker("A0+160 s40 o+ F"))


@violates("connector/load-unpromised")
def test_a_load_into_blocks_without_promised_tokens_is_found():
    stray = worker_step(STEP + 1, loaded_blocks=[7, 8])
    stream = with_worker("A0+160 s40 o+ s1 o+ F", worker_step(STEP), stray, after=Delivered)

    (violation,) = audited(stream, groups=1, deferred_loads=False).violations

    assert (
        "Worker 0 loads into 2 blocks that no request's external tokens were promised for: 7, 8."
        == violation.message
    )


@near_miss("connector/load-unpromised")
@pytest.mark.parametrize(
    ("configuration", "how"),
    [
        ({"groups": 1, "deferred_loads": False}, {"loaded_blocks": [99, *range(100, 110)]}),
        ({"groups": 2, "deferred_loads": False}, {"loaded_blocks": [7]}),
        ({"groups": 1, "deferred_loads": True}, {"loaded_blocks": [7]}),
        ({}, {"loaded_blocks": [7]}),
    ],
    ids=["from within the local hit", "several groups", "deferred", "not said"],
)
def test_a_load_whose_promise_may_be_missing_is_no_finding(
    configuration: dict[str, Any], how: dict[str, Any]
):
    stream = with_worker(
        "A0+160 s40 o+ s1 o+ F", worker_step(STEP), worker_step(STEP + 1, **how), after=Delivered
    )

    assert [] == violation_ids(stream, **configuration)


@violates("connector/save-gap")
def test_a_worker_that_does_not_wait_for_its_saves_is_found():
    assert ["connector/save-gap"] == violation_ids(
        with_worker("A0+160 s40 o+ F", worker_step(STEP, saves=1, saved=False))
    )


@near_miss("connector/save-gap")
@pytest.mark.parametrize("how", [{"saves": 1}, {"saves": 0, "saved": False}, {"saves": -1, "saved": False}])
def test_awaited_saves_no_saves_and_unknown_saves_are_clean(how: dict[str, Any]):
    assert [] == violation_ids(with_worker("A0+160 s40 o+ F", worker_step(STEP, **how)))


@violates("connector/never-finished")
def test_a_load_finished_by_workers_and_still_awaited_by_the_engine_is_found():
    stream = with_worker("A0+160a", worker_step(STEP, received=["request-0"]), after=Admitted)
    late = Census((OVERDUE_SECONDS + 1) * 1_000_000, 5, [], 0, 10, 64)

    (violation,) = audited([*stream, late]).violations

    assert violation.message.endswith("The workers have reported that it is finished.")


# --- connector/tiers-do-not-sum -------------------------------------------------------------------


def with_tiers(asked: int, nth: int = 0, **tiers: int) -> list[Event]:
    """An admission of 32 local and 128 external tokens, and a preemption, with tiers of one admission."""
    stream = events(200, "A32+128 L s40 o+ P A32+128 L s41 o+ F")
    reported = TiersReported(0, 0, 1, asked, list(tiers), list(tiers.values()))
    return with_after(stream, Admitted, nth, reported)


@violates("connector/tiers-do-not-sum")
@pytest.mark.parametrize(
    ("tiers", "named"),
    [
        ({"host": 96}, "96 tokens: host 96."),
        ({"host": 96, "disk": 64}, "160 tokens: host 96, disk 64."),
        ({"host": 160, "disk": -32}, "128 tokens: host 160, disk -32."),
        ({}, "0 tokens: none."),
    ],
)
def test_tiers_that_do_not_sum_to_the_external_tokens_are_found(tiers: dict[str, int], named: str):
    (violation,) = audited(with_tiers(128, **tiers)).violations

    assert "connector/tiers-do-not-sum" == violation.id
    assert (
        "The engine asked the connector for the tiers of 128 external tokens of request request-0, and its "
        f"tiers have {named}"
    ) == violation.message


@near_miss("connector/tiers-do-not-sum")
@pytest.mark.parametrize(
    "tiers", [{"host": 128}, {"host": 96, "disk": 32}, {"host": 96, "external_unspecified": 32}]
)
def test_tiers_that_sum_to_the_external_tokens_are_clean(tiers: dict[str, int]):
    assert [] == violation_ids(with_tiers(128, **tiers))
    assert [] == violation_ids(with_tiers(128, nth=1, **tiers))
