"""The v0 adapter on the real v0 scheduler. These tests need vLLM 0.9 (`scripts/releases.py run 0.9.1-v0`).

0.9.1 keeps the result of a lookup whose admission failed (vLLM PR #18957); 0.9.2 releases it.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.core.scheduler", exc_type=ImportError)

from tests.engines.observed import audited, findings
from tests.scenarios.v0 import driver
from tests.scenarios.v0.audit import SCENARIOS
from tests.scenarios.v0.audit import audited as report
from tests.scenarios.v0.driver import Attach, V0Driver, start
from tests.scenarios.v0.scenarios import CLEAN, CROWDED, VARIANTS
from tests.scenarios.v0.stale_lookups import STALE, UNFIXED
from vllm.core.scheduler import Scheduler

from kvledger.audit import events as ev
from kvledger.audit.engines.v0.observer import V0Observer
from kvledger.audit.hooks import MAX_FAILURES, EngineMismatch
from kvledger.audit.journal.recorder import MemoryRecorder

RELEASES_LOOKUPS = hasattr(Scheduler, "remove_seq_from_computed_blocks_tracker")
"""0.9.2 and later."""
STALE_LOOKUP = "tokens/stale-lookup"
OBSERVERS = sorted({name for hook in V0Observer.HOOKS for name in (hook.before, hook.after) if name})


def attached(sink: MemoryRecorder, scheduler: Any) -> V0Observer:
    observer = V0Observer(scheduler, sink, version="0.9")
    observer.start()
    return observer


def observe(scenario: Any, **setup: Any) -> tuple[V0Driver, list[ev.Event]]:
    """Run a scenario with an observer on its scheduler; return the driver and all events in order."""
    sink, observers = MemoryRecorder(), []

    def attach(scheduler: Any) -> None:
        observers.append(attached(sink, scheduler))

    driver = scenario(attach, **setup)
    for observer in observers:
        observer.stop("exit")
    return driver, sink.take()


@pytest.mark.parametrize("name", SCENARIOS)
def test_accounts_balance(name: str) -> None:
    result = report(name)

    assert result.balanced
    assert [] == result.doubts
    assert {id_ for id_, _ in result.findings} <= {STALE_LOOKUP}


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_workload_raises_no_alarm(name: str) -> None:
    assert [] == report(name).findings


@pytest.mark.parametrize("name", STALE)
def test_a_kept_lookup_is_found_before_0_9_2(name: str) -> None:
    result = report(name)

    assert ((STALE_LOOKUP, "r") in result.findings) is not RELEASES_LOOKUPS
    assert not (RELEASES_LOOKUPS and result.findings)


@pytest.mark.parametrize("name", UNFIXED)
def test_0_9_2_keeps_the_lookup_of_an_ignored_swapped_group(name: str) -> None:
    """The scheduler ignores an infeasible swapped group without freeing it."""
    driver, events = observe(SCENARIOS[name])

    assert {(STALE_LOOKUP, "r")} == findings(audited(events))
    assert driver.kept_lookups()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CROWDED)
def test_a_random_crowd_balances(name: str, seed: int) -> None:
    result = report(name, seed=seed)

    assert result.balanced
    assert [] == result.doubts
    without_finding = RELEASES_LOOKUPS or "uncached" in name
    assert (set() if without_finding else {STALE_LOOKUP}) == {id_ for id_, _ in result.findings}


def test_a_stale_hit_is_found_with_the_tokens_of_lookup_and_cache() -> None:
    """The lookup hits 64 tokens when no blocks are free; none of these is cached when blocks are free."""
    _, events = observe(STALE["too_few_blocks_at_first"])
    kept = [event for event in events if isinstance(event, ev.LookupKept)]
    if RELEASES_LOOKUPS:
        assert [] == kept
        return
    (violation,) = audited(events).violations

    assert [(64, 0, False)] == [(k.local_tokens, k.cached_tokens, k.ended) for k in kept]
    assert "the 64 local tokens that step 6 had found" in violation.message
    assert "the cache holds 0 now" in violation.message


# --- figures, to the token ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_prefixes_are_local_hits(variant: str) -> None:
    _, events = observe(CLEAN[f"shared_prefix{variant}"])
    ledger = audited(events).ledger
    settled = {name: ledger.closed[name].freeze().settled for name in ("first", "second", "same", "shorter")}

    assert {
        "first": (0, 100),
        "second": (64, 36),
        "same": (96, 0),  # its last token is executed again
        "shorter": (80, 15),
    } == {name: (one.local, one.computed) for name, one in settled.items() if one is not None}
    same = ledger.closed["same"].freeze()
    assert {"full_hit": 1} == same.rework
    assert 1 + 3 == same.scheduled - same.overrun


def test_blocks_still_to_be_computed_are_no_hit() -> None:
    _, events = observe(CLEAN["together"])
    ledger = audited(events).ledger

    assert 32 == ledger.closed["b"].freeze().first_prompt


def test_a_swapped_out_request_continues_its_life() -> None:
    driver, events = observe(CLEAN["too_few_blocks_swapped"])
    late = audited(events).ledger.closed["late"].freeze()

    assert driver.scheduler.num_cumulative_preemption
    assert 1 == len(late.lives)
    assert {} == late.rework


def test_tokens_computed_again_after_a_preemption_are_rework() -> None:
    _, events = observe(CLEAN["preempted_once_uncached"])
    late = audited(events).ledger.closed["late"].freeze()

    assert ["blocks", "finished"] == [life.ended_by for life in late.lives]
    assert late.rework["blocks"] == late.lives[0].discarded


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_in_flight_at_the_end_is_overrun(asynchronous: bool) -> None:
    """The asynchronous output processor looks for stops one step late."""
    _, events = observe(CLEAN["plain_asynchronous" if asynchronous else "plain"])
    accounts = audited(events).ledger.closed.values()

    overrun = sum(account.overrun for account in accounts)
    assert (overrun > 0) is asynchronous


# --- unexpected state of the engine ---------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "id_"), [(16, "tokens/balance"), (-16, "tokens/unexplained-drop")])
def test_a_count_changed_by_hand_is_found(tokens: int, id_: str) -> None:
    def scenario(attach: Attach) -> V0Driver:
        driver = start(attach, chunked_prefill=True, max_batched_tokens=64)
        group = driver.add("r", 200, 3)
        driver.add("s", 20, 9)
        driver.step()
        group.first_seq.data._num_computed_tokens += tokens
        driver.step()
        driver.step()
        return driver

    _, events = observe(scenario)

    assert {(id_, "r")} == findings(audited(events))


def test_a_group_of_two_sequences_is_unknown_without_a_violation() -> None:
    def scenario(attach: Attach) -> V0Driver:
        from vllm.sequence import Sequence

        driver = start(attach)
        add = driver.scheduler.add_seq_group

        def twice(group: Any) -> None:
            first = group.first_seq
            group.seqs = [first, Sequence(77, first.inputs, 16)]
            add(group)

        driver.scheduler.add_seq_group = twice
        driver.add("two", 20)
        driver.scheduler.add_seq_group = add
        driver.add("r", 20, 3)
        driver.scheduler.waiting.popleft()
        driver.run()
        return driver

    _, events = observe(scenario)
    auditor = audited(events)

    assert [] == auditor.violations
    assert ["1 accounts are unknown"] == auditor.doubts


# --- failing observers ----------------------------------------------------------------------------

CROWD = CROWDED["crowd_chunked_asynchronous"]


@pytest.fixture(scope="module")
def bare() -> dict[str, list[int]]:
    return CROWD().outputs


def test_an_observed_engine_gives_the_outputs_of_a_bare_engine(bare: dict[str, list[int]]) -> None:
    assert bare == observe(CROWD)[0].outputs


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_hook_that_raises_changes_nothing_and_is_reported(
    name: str, bare: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: V0Observer, *_: Any, **__: Any) -> None:
        raise RuntimeError("a broken observer")

    monkeypatch.setattr(V0Observer, name, broken)
    driver, events = observe(CROWD)
    failures = [event for event in events if isinstance(event, ev.HookFailed)]
    unknown = [account for account in audited(events).ledger.accounts() if account.unknown]

    assert bare == driver.outputs
    assert len(failures) <= 2 * MAX_FAILURES
    assert bool(failures) == bool(unknown)


def test_a_sink_that_raises_changes_nothing(bare: dict[str, list[int]]) -> None:
    class Broken(MemoryRecorder):
        def record(self, event: ev.Event) -> None:
            raise OSError("no space left on device")

    assert bare == CROWD(lambda scheduler: attached(Broken(), scheduler)).outputs


def test_detaching_leaves_no_trace() -> None:
    driver = start()
    parts = (driver.scheduler, driver.scheduler.block_manager)
    before = [set(vars(part)) for part in parts]
    sink = MemoryRecorder()
    observer = attached(sink, driver.scheduler)
    driver.add("r", 50, 3)
    driver.run()
    observer.stop("detached")

    assert before == [set(vars(part)) for part in parts]
    assert "clean" == audited(sink.take()).verdict


def test_after_a_late_attach_running_requests_are_unknown_and_new_ones_clean() -> None:
    driver = start(chunked_prefill=True, max_batched_tokens=64)
    driver.add("early", 100, 6)
    driver.step()
    sink = MemoryRecorder()
    observer = attached(sink, driver.scheduler)
    driver.add("late", 100, 3)
    driver.run()
    observer.stop("exit")
    auditor = audited(sink.take())

    assert [] == auditor.violations
    assert "the trace begins while the request runs" == auditor.ledger.closed["early"].unknown
    assert auditor.ledger.closed["late"].unknown is None


@pytest.mark.parametrize("name", CROWDED)
def test_a_snapshot_may_be_wanted_between_any_steps(name: str) -> None:
    class Demanding(MemoryRecorder):
        steps = 0

        def record(self, event: ev.Event) -> None:
            self.steps += isinstance(event, ev.Stepped)
            self.wants_snapshot = self.steps % 7 == 0
            super().record(event)

    sink = Demanding()
    CROWDED[name](lambda scheduler: attached(sink, scheduler))
    auditor = audited(sink.take())

    assert {violation.id for violation in auditor.violations} <= {STALE_LOOKUP}
    assert [] == auditor.doubts
    assert not (RELEASES_LOOKUPS and auditor.violations)


def test_a_host_that_differs_is_refused_and_untouched() -> None:
    scheduler = start().scheduler

    def free_seq(seq: Any, now: float) -> None:
        raise AssertionError("never called")

    scheduler.free_seq = free_seq
    before = dict(vars(scheduler))
    with pytest.raises(EngineMismatch, match=r"free_seq takes .*now"):
        attached(MemoryRecorder(), scheduler)
    assert before == vars(scheduler)


def test_several_tokens_a_step_are_refused() -> None:
    scheduler = start().scheduler
    scheduler.scheduler_config.num_lookahead_slots = 3

    with pytest.raises(EngineMismatch, match="several tokens a step"):
        attached(MemoryRecorder(), scheduler)


def test_no_token_id_of_a_prompt_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event may contain a token id of a prompt; these ids are too large for counts."""
    prompt = list(range(900_000_000, 900_000_100))
    monkeypatch.setattr(driver, "tokens", lambda count, _: prompt[:count])
    _, events = observe(CLEAN["plain"])

    assert len(events) > 10
    assert not any(str(token) in repr(event) for event in events for token in prompt)


def test_adapter_priority_and_group_of_a_request_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEDGER_GROUP", "^team-(.)")

    def scenario(attach: Attach, **setup: Any) -> V0Driver:
        v0 = start(attach, policy="priority", max_loras=1, **setup)
        v0.add("team-a-1", 40, 2, lora=1, priority=3)
        v0.add("nobody", 40, 2)
        v0.run()
        return v0

    _, events = observe(scenario)

    arrived = {event.request_id: event.labels for event in events if isinstance(event, ev.RequestAdded)}
    labels = arrived["team-a-1"]
    assert labels is not None and labels.lora and ("a", 3) == (labels.group, labels.priority)
    assert arrived["nobody"] is None
