"""A failing observer never disturbs serving: each fault here leaves the engine's outputs unchanged."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.hiding import attributes_read, hidden, host_classes, optional_attributes
from tests.engines.observed import audited, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import engine_setup, start

from kvledger.audit import events as ev
from kvledger.audit.engines import choose, host_version
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.entry.attach import AuditError, attach
from kvledger.audit.errors import LedgerError
from kvledger.audit.hooks import MAX_FAILURES, EngineMismatch
from kvledger.audit.journal.memory_recorder import MemoryRecorder
from kvledger.audit.traffic.driver import Driver

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
    assert all(failure.error.startswith("RuntimeError at test_harmless.py:") for failure in failures)  # type: ignore[attr-defined]
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
