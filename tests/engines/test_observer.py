"""The observer of a scheduler: it disturbs nothing, records what fails, and says what it counted."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from msgspec.msgpack import Decoder, Encoder

from kvledger.audit.engines import step_log
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.events import Delivered, DeliveredWhole, EngineStarted, Event, Snapshot
from kvledger.audit.journal.recorder import MemoryRecorder

pytest.importorskip("vllm")

from tests.engines.hiding import attributes_read, hidden, host_classes, optional_attributes
from tests.engines.observed import audited, findings, observe
from tests.engines.test_scenarios import KNOWN_FINDINGS, OF_BLOCKS
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import Attach, engine_setup, start

from kvledger.audit import events as ev
from kvledger.audit import hooks
from kvledger.audit.engines import choose, host_version, observer, steps
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.entry.attach import AuditError, attach
from kvledger.audit.errors import LedgerError
from kvledger.audit.events import AnyEvent, Census, EngineRaised, EngineStopped, HookFailed
from kvledger.audit.hooks import MAX_FAILURES, EngineMismatch
from kvledger.audit.ledger import engine_postings
from kvledger.audit.traffic.driver import Driver, EngineSetup
from kvledger.audit.traffic.engine_setup import lacking

# --- A failing observer never disturbs serving: each fault here leaves the engine's outputs unchanged -----


encode_event, decode_event = Encoder().encode, Decoder(AnyEvent).decode

SCENARIO = SCENARIOS["crowd_async_external"]
RENAMED_IN = ("preempt_decode_async", "external_preempted_async", "hybrid_external")
"""Scenarios in which attributes are hidden: a pool whose state is read, a connector, several groups."""
OBSERVERS = sorted({name for hook in V1Observer.HOOKS for name in (hook.before, hook.after) if name})


def outputs(driver: Driver) -> dict[str, list[Any]]:
    """Every token that clients would have received."""
    return {
        request_id: [(o.new_token_ids, str(o.finish_reason)) for o in delivered]
        for request_id, delivered in driver.delivered.items()
    }


@pytest.fixture(scope="module")
def bare() -> dict[str, list[Any]]:
    return outputs(SCENARIO())


def test_an_observed_engine_gives_the_outputs_of_a_bare_engine(bare: dict[str, list[Any]]) -> None:
    driver, _ = observe(SCENARIO)

    assert bare == outputs(driver)


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_observer_that_raises_changes_nothing_and_is_reported(
    name: str, bare: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("canary, as text of a client would be")

    part, _, method = name.rpartition(".")
    monkeypatch.setattr(getattr(V1Observer.PARTS, part) if part else V1Observer, method, broken)
    driver, events = observe(SCENARIO)
    auditor = audited(events)

    assert bare == outputs(driver)
    failures = [event for event in events if type(event).__name__ == "HookFailed"]
    called = len(failures) > 0
    assert "canary" not in repr(events)
    assert events == [decode_event(encode_event(event)) for event in events]
    assert all(failure.error.startswith("RuntimeError at test_observer.py:") for failure in failures)  # type: ignore[attr-defined]
    assert ("unknown" if called else "clean") == auditor.verdict
    assert len(failures) <= 2 * MAX_FAILURES
    if called and len(failures) >= MAX_FAILURES:
        assert any(failure.removed for failure in failures)  # type: ignore[attr-defined]


def run_with_hidden_attribute(name: str, scenario: str) -> tuple[Driver, list[ev.Event], list[str]]:
    """Run a scenario with ``name`` hidden from the hooks; return driver, losses and failed reads."""
    sink, reads = MemoryRecorder(), []
    with ExitStack() as stack:

        def watch(scheduler: Any) -> None:
            choose(scheduler)(scheduler, sink, version=host_version(), level="blocks").start()
            reads.append(stack.enter_context(hidden(name, host_classes(scheduler))))

        driver = SCENARIOS[scenario](watch)
    return driver, [event for event in sink.take() if reports_loss(event)], reads[0]


def reports_loss(event: ev.Event) -> bool:
    """Whether the journal says with this event that something was not recorded."""
    if isinstance(event, ev.RequestAdded):
        return event.isolation is None
    return isinstance(event, ev.HookFailed | ev.Gap)


@pytest.fixture(scope="module")
def bare_runs() -> dict[str, dict[str, list[Any]]]:
    return {name: outputs(SCENARIOS[name]()) for name in RENAMED_IN}


@pytest.mark.parametrize("name", attributes_read("*.py", "pool/*.py"))
def test_a_renamed_attribute_of_the_engine_changes_nothing_and_is_reported(
    name: str, bare_runs: dict[str, dict[str, list[Any]]]
) -> None:
    """The engine still works if any attribute that a hook reads is missing."""
    for scenario, bare_outputs in bare_runs.items():
        driver, lost, reads = run_with_hidden_attribute(name, scenario)

        assert bare_outputs == outputs(driver)
        assert lost or not reads or name in optional_attributes("*.py", "pool/*.py")


@pytest.mark.parametrize("name", ["_block_hash", "block_id", "num_computed_tokens", "num_scheduled_tokens"])
def test_a_hidden_attribute_makes_a_hook_fail(name: str) -> None:
    """Otherwise the test above would prove nothing."""
    _, lost, reads = run_with_hidden_attribute(name, "hybrid_external")

    assert lost and reads


def test_a_sink_that_raises_changes_nothing(bare: dict[str, list[Any]]) -> None:
    class Broken(MemoryRecorder):
        def record(self, event: Any) -> None:
            raise OSError("no space left on device")

    def watch(scheduler: Any) -> None:
        choose(scheduler)(scheduler, Broken(), version=host_version()).start()

    assert bare == outputs(SCENARIO(watch))


@pytest.mark.parametrize("level", ["tokens", "blocks"])
def test_long_lived_parts_have_fewer_than_thirty_attributes(level: str) -> None:
    """CPython 3.11 specialises no method call on an object with more attributes."""
    observers = []

    def watch(scheduler: Any) -> None:
        observer = choose(scheduler)(scheduler, MemoryRecorder(), version=host_version(), level=level)
        observer.start()
        observers.append(observer)

    SCENARIOS["local_hit"](watch)

    (observer,) = observers
    parts = [getattr(observer, name) for name in V1Observer.PARTS._fields]
    watched = [observer, observer.log, *parts]
    for part in vars(observer.pools).values() if observer.pools is not None else ():
        if type(part).__module__.startswith("kvledger."):
            watched.append(part)
    assert {} == {type(each).__name__: len(vars(each)) for each in watched if len(vars(each)) >= 30}


def test_a_host_with_another_signature_is_refused_and_untouched() -> None:
    scheduler = start().scheduler

    def update_from_output(scheduler_output: Any, model_runner_output: Any, extra: int) -> None:
        raise AssertionError("never called")

    scheduler.update_from_output = update_from_output
    before = dict(vars(scheduler))

    with pytest.raises(EngineMismatch, match=r"update_from_output takes .*extra"):
        choose(scheduler)
    with pytest.raises(LedgerError, match="can't be observed"):
        attach(scheduler)
    assert before == vars(scheduler)


def test_detaching_leaves_no_trace() -> None:
    driver = start(connector="scripted")
    scheduler = driver.scheduler
    parts = (scheduler, scheduler.kv_cache_manager, scheduler.connector)
    before = [set(vars(part)) for part in parts]

    with attach(scheduler) as audit:
        driver.add("r", 100, 3)
        driver.run()

    assert before == [set(vars(part)) for part in parts]
    assert audit.account("r").settled is not None
    driver.add("later", 50, 2)
    driver.run()
    with pytest.raises(LedgerError, match="later"):
        audit.account("later")


def test_two_observers_of_one_scheduler_detach_in_any_order() -> None:
    driver = start()
    before = set(vars(driver.scheduler))
    first, second = attach(driver.scheduler), attach(driver.scheduler)
    driver.add("r", 100, 3)
    first.detach()
    driver.run()
    second.detach()

    assert "clean" == second.verdict
    assert second.account("r").outcome
    driver.add("later", 50, 2)
    driver.run()
    remaining = set(vars(driver.scheduler)) - before
    assert all(hasattr(getattr(driver.scheduler, name), "__wrapped__") for name in remaining)


def test_after_a_late_attach_running_requests_are_unknown_and_new_ones_clean() -> None:
    driver = start()
    driver.add("early", 100, 6)
    driver.step()
    driver.step()
    with attach(driver.scheduler) as audit:
        driver.add("late", 100, 3)
        driver.run()

    assert "unknown" == audit.verdict
    assert [] == audit.violations
    assert "the trace begins while the request runs" == audit.account("early").unknown
    assert audit.account("late").unknown is None


def test_strict_raises_at_the_step_that_violates() -> None:
    """Stock 0.32 leaks a placeholder when a synchronous load fails under async scheduling."""
    driver = Driver(engine_setup(connector="scripted", asynchronous=True))
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    with attach(driver.scheduler, strict=True) as audit:
        driver.schedule()
        driver.output(invalid_blocks=driver.blocks("r")[4:10])
        with pytest.raises(AuditError, match="tokens/without-token") as caught:
            driver.run()

    assert "r" == caught.value.violation.request
    assert audit.violations


def test_an_object_without_a_scheduler_is_refused_in_one_sentence() -> None:
    with pytest.raises(LedgerError, match="No scheduler is reachable from this int"):
        attach(3)


# --- an exception that leaves a hooked method of the engine is recorded; the verdict is then not clean ----


LEVELS = pytest.mark.parametrize("level", ["tokens", "blocks"])
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def raised(events: list[Event]) -> list[tuple[str, str]]:
    """Method and exception of each exception that was recorded; no hook may have failed."""
    assert not [event for event in events if isinstance(event, HookFailed)]
    return [(event.method, event.error) for event in events if isinstance(event, EngineRaised)]


def running(attach: Attach, asynchronous: bool) -> Driver:
    """An engine in which `a` decodes and `b` is about to be scheduled."""
    driver = start(attach, connector="scripted", asynchronous=asynchronous)
    driver.add("a", 40, 30)
    for _ in range(3):
        driver.step()
    driver.add("b", 96, 4)
    return driver


@LEVELS
@BOTH
@pytest.mark.parametrize("method", ["get_num_new_matched_tokens", "build_connector_meta"])
@pytest.mark.parametrize("runs_on", [False, True])
def test_a_connector_that_raises_in_schedule_leaves_no_clean_verdict(
    method: str, asynchronous: bool, level: str, runs_on: bool
) -> None:
    def scenario(attach: Attach) -> Driver:
        driver = running(attach, asynchronous)
        driver.connector.script.failing.add(method)
        with pytest.raises(AssertionError, match="of a prompt"):
            driver.step()
        driver.connector.script.failing.clear()
        if runs_on:  # as no engine core does; the observer must survive it
            driver.run()
        return driver

    _, events = observe(scenario, level)
    auditor = audited(events)
    left = [(f"connector.{method}", "AssertionError"), ("schedule", "AssertionError")]

    assert left == raised(events)
    assert "of a prompt" not in repr(events)
    assert (set(), "unknown") == (findings(auditor), auditor.verdict)
    sentence = f"the engine raised AssertionError in connector.{method}, AssertionError in schedule"
    assert sentence in auditor.doubts


@LEVELS
@BOTH
def test_an_exception_while_an_output_is_processed_keeps_the_ends_in_it(
    asynchronous: bool, level: str
) -> None:
    def scenario(attach: Attach) -> Driver:
        driver = running(attach, asynchronous)
        driver.runner.stop_at["a"] = 5
        driver.connector.script.failing.add("request_finished")
        with pytest.raises(AssertionError, match="of a prompt"):
            driver.run()
        driver.connector.script.failing.clear()
        driver.add("c", 50, 3)
        return driver

    _, events = observe(scenario, level)
    auditor = audited(events)

    left = ["update_from_output", "connector.request_finished", "_free_request"]
    assert [(method, "AssertionError") for method in left] == raised(events)
    assert (set(), "unknown") == (findings(auditor), auditor.verdict)
    account = auditor.ledger.account("a")
    assert account is not None and account.outcome == "stopped"


@LEVELS
@BOTH
@pytest.mark.skipif(bool(lacking(["dropped output"])), reason="no such reset in this release")
def test_a_reset_that_raises_leaves_right_figures_and_a_doubt(asynchronous: bool, level: str) -> None:
    """A load is pending, so the reset of the prefix cache raises; the running request was preempted."""

    def scenario(attach: Attach) -> Driver:
        driver = start(attach, connector="scripted", asynchronous=asynchronous)
        driver.connector.answer_lookups("b", (96, True))
        driver.add("a", 40, 9)
        driver.step()
        driver.step()
        driver.add("b", 96, 4)
        driver.step()
        driver.step(finished_recving="all")
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            driver.reset_prefix_cache(running=True)
        driver.run()
        return driver

    _, events = observe(scenario, level)
    auditor = audited(events)

    assert [("reset_prefix_cache", "RuntimeError")] == raised(events)
    assert ["the engine raised RuntimeError in reset_prefix_cache"] == auditor.doubts
    assert set() == findings(auditor)
    assert 0 == auditor.ledger.totals().unknown_requests
    b = auditor.ledger.account("b")
    assert b is not None and b.settled is not None and (96, 0) == (b.settled.external, b.settled.computed)


def test_an_engine_that_raises_nothing_has_no_doubt() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = running(attach, False)
        driver.run()
        return driver

    _, events = observe(scenario)

    assert [] == raised(events)
    assert [] == audited(events).doubts


# --- A census compares the counts of every admitted request, running or waiting, and a last one at the end.


@pytest.fixture
def census_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 1)
    monkeypatch.setattr(steps, "AT_REST_STEPS", 1)


def of(events: list[Event], *invariants: str) -> Any:
    """The first finding; the findings are of these invariants."""
    auditor = audited(events)
    assert set(invariants) == {id for id, _ in findings(auditor)}
    return auditor.violations[0]


def decoding(attach: Attach, **setup: Any) -> Driver:
    """Two requests that decode."""
    driver = start(attach, **setup)
    driver.add("a", 64, 300)
    driver.add("b", 20, 300)
    for _ in range(3):
        driver.step()
    return driver


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_is_never_scheduled_again_is_found_at_the_end(asynchronous: bool) -> None:
    """Its count is 3 too high, so the scheduler waits for tokens that never come."""

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, asynchronous=asynchronous)
        driver.scheduler.requests["a"].num_computed_tokens += 3
        for _ in range(200):
            driver.step()
        return driver

    driver, events = observe(scenario)
    violation = of(events, "tokens/balance", "tokens/beyond-sequence")

    engine = driver.scheduler.requests["a"].num_computed_tokens
    assert ("a", "census") == (violation.request, violation.figures["instant"])
    assert engine == violation.figures["computed_tokens"] == violation.figures["ledger_tokens"] + 3
    assert isinstance(events[-1], EngineStopped) and isinstance(events[-2], Census)


def test_a_request_that_is_never_scheduled_again_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 32)
    monkeypatch.setattr(engine_postings, "STALLED_STEPS", 100)
    monkeypatch.setattr(engine_postings, "STEPS_SECONDS", 0)

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach)
        driver.scheduler.requests["a"].num_computed_tokens += 3
        for _ in range(200):
            driver.step()
        return driver

    auditor = audited(observe(scenario)[1])

    found = {"tokens/balance", "tokens/beyond-sequence", "requests/stalled"}
    assert {(id, "a") for id in found} == findings(auditor)


@pytest.mark.usefixtures("census_after_each_step")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_count_of_a_waiting_request_is_compared(asynchronous: bool) -> None:
    """A preempted request waits for blocks, and its count is not 0."""

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, asynchronous=asynchronous, max_running=2)
        driver.preempt("a")
        driver.add("c", 20, 300)
        driver.scheduler.waiting.remove(driver.scheduler.requests["a"])  # it is never resumed
        driver.scheduler.requests["a"].num_computed_tokens = 16
        for _ in range(3):
            driver.step()
        return driver

    auditor = audited(observe(scenario)[1])
    violation = next(found for found in auditor.violations if found.id == "tokens/balance")

    assert {("tokens/balance", "a"), ("requests/queued-once", "a")} == findings(auditor)
    assert ("a", 16, 0) == (
        violation.request,
        violation.figures["computed_tokens"],
        violation.figures["ledger_tokens"],
    )


@pytest.mark.usefixtures("census_after_each_step")
def test_a_request_that_is_queued_twice_does_not_hide_one_that_is_in_no_queue() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, max_running=2)
        for name in ("c", "d"):
            driver.add(name, 20, 300)
        waiting = driver.scheduler.waiting
        waiting.remove(driver.scheduler.requests["c"])
        waiting.add_request(driver.scheduler.requests["d"])
        for _ in range(3):
            driver.step()
        return driver

    assert {("requests/queued-once", "c"), ("requests/queued-once", "d")} == findings(
        audited(observe(scenario)[1])
    )


@pytest.mark.usefixtures("census_after_each_step")
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_census_after_each_step_finds_nothing_more(name: str) -> None:
    scenario = SCENARIOS[name]
    if scenario.lacking():
        pytest.skip("; ".join(scenario.lacking()))
    _, events = observe(scenario, "blocks")
    auditor = audited(events)

    assert KNOWN_FINDINGS.get(name, set()) | OF_BLOCKS.get(name, set()) == findings(auditor)
    assert [] == auditor.doubts


@pytest.mark.usefixtures("census_after_each_step")
def test_waiting_requests_are_in_a_census_once_they_have_been_admitted() -> None:
    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, max_running=2)
        driver.add("never admitted", 20, 3)
        driver.preempt("a")
        driver.scheduler.waiting.remove(driver.scheduler.requests["a"])
        driver.step()
        driver.step()
        return driver

    driver, events = observe(scenario)
    last = [event for event in events if isinstance(event, Census)][-1]

    assert [0, 0, 0, 0, driver.scheduler.requests["a"].num_tokens] == last.waiting_rows


@pytest.mark.parametrize("where", ["schedule", "update_from_output"])
def test_an_engine_that_is_interrupted_in_a_step_has_no_last_census(where: str) -> None:
    """A signal raises SystemExit anywhere; the counts are then in between."""

    def scenario(attach: Attach) -> Driver:
        driver = decoding(attach, connector="scripted")
        inner = "_update_after_schedule" if where == "schedule" else "_update_request_with_output"
        original = getattr(driver.scheduler, inner)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            raise SystemExit(143)

        setattr(driver.scheduler, inner, interrupted)
        with pytest.raises(SystemExit):
            driver.step()
        delattr(driver.scheduler, inner)
        driver.scheduler.shutdown()
        return driver

    _, events = observe(scenario)

    assert not [event for event in events if isinstance(event, Census)]
    assert isinstance(events[-1], EngineStopped) and "shutdown" == events[-1].reason
    assert set() == findings(audited(events))


# --- the census reports the time of the hooks, measured in some steps of every ``TIMED_STEPS`` ------------


def decode(attach: Any, **_: Any) -> Driver:
    """One request that decodes for 300 steps."""
    driver = Driver(EngineSetup(blocks=64, max_model_len=512))
    attach(driver.scheduler)
    driver.add("long", 16, 300)
    driver.run()
    return driver


def test_some_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 200)

    _, events = observe(decode)

    first = next(event for event in events if isinstance(event, Census))
    assert 0 < first.hook_us
    assert 8 <= first.hook_steps <= 16


def test_a_census_without_a_timed_step_has_no_hook_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 4)
    monkeypatch.setattr(hooks, "TIMED_STEPS", 1 << 20)

    _, events = observe(decode)

    assert {(-1, 0)} == {(event.hook_us, event.hook_steps) for event in events if isinstance(event, Census)}


# --- an output is emitted as differences or whole, whichever is shorter; both mean the same ---------------


STARTED = EngineStarted(0, 0.0, "vllm", "0.32.0", "made up", "tokens", 1, {})
ORDER = [f"r{number}" for number in range(32)]
FEW_CHANGES = [1] * 31 + [2]
MIXED = [2, 3, 4, 1] * 8


class Log:
    """A step log that has emitted one output of every request, and its sink."""

    def __init__(self) -> None:
        self.sink = MemoryRecorder()
        self.log = StepLog(self.sink)
        for name in ORDER:
            self.log.intern(name)
        self.restart()
        self.delivered(FEW_CHANGES)

    def restart(self) -> None:
        self.log.restart(STARTED, Snapshot(0, 0, [], 0))

    def delivered(self, lengths: list[int], order: list[str] = ORDER) -> list[Event]:
        """The events emitted for this output."""
        self.sink.take()
        self.log.delivered(0, lengths, order, order, [])
        return self.sink.take()


def test_an_output_with_few_changes_is_emitted_as_differences() -> None:
    assert [Delivered(0, [1, 3], [])] == Log().delivered([1, 3, *FEW_CHANGES[2:]])


def test_an_output_with_many_changes_is_emitted_whole_and_its_order_once() -> None:
    log = Log()

    assert [DeliveredWhole(0, list(range(32)), bytes(MIXED))] == log.delivered(MIXED)
    assert [DeliveredWhole(0, [], bytes(MIXED[::-1]))] == log.delivered(MIXED[::-1])
    assert [Delivered(0, [31, 5], [])] == log.delivered([*MIXED[:0:-1], 5])


def test_a_length_over_255_is_emitted_as_a_difference() -> None:
    (event,) = Log().delivered([256] * 32)

    assert isinstance(event, Delivered)


def test_a_changed_order_is_emitted_again() -> None:
    log, reversed_order = Log(), ORDER[::-1]
    log.delivered(MIXED)
    log.delivered(MIXED, reversed_order)

    (event,) = log.delivered(MIXED[::-1], reversed_order)

    assert DeliveredWhole(0, list(range(32))[::-1], bytes(MIXED[::-1])) == event


def test_a_new_segment_gets_the_order_again() -> None:
    log = Log()
    log.delivered(MIXED)
    log.restart()
    log.delivered(FEW_CHANGES)

    assert [DeliveredWhole(0, list(range(32)), bytes(MIXED))] == log.delivered(MIXED)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_whole_outputs_and_differences_give_the_same_accounts(
    asynchronous: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from tests.engines.observed import audited, observe
    from tests.scenarios.workloads import crowd

    def scenario(whole: float) -> tuple[set[type[Event]], list[Any]]:
        monkeypatch.setattr(step_log, "WHOLE_SHARE", whole)
        _, events = observe(crowd, seed=seed, requests=40, asynchronous=asynchronous, drafts=3)
        auditor = audited(events)
        assert "clean" == auditor.verdict
        accounts = [account.freeze() for account in auditor.ledger.accounts()]
        figures = [
            (one.request_id, one.first_prompt, one.first_output, one.rework, one.rejected, one.overrun)
            for one in accounts
        ]
        return set(map(type, events)), figures

    (kinds, whole), (others, by_differences) = scenario(-1.0), scenario(1.0)

    assert DeliveredWhole in kinds and DeliveredWhole not in others
    assert whole == by_differences
