"""Observing the engines that tests build: the plugin that ``pytest --kvledger`` registers.

Every vLLM scheduler that a test builds is observed, and every KV cache manager built without a scheduler
(at level ``blocks``). A test that breaks an invariant fails, with the finding in its report. An engine
that outlives the test that built it, such as one in a module fixture, is observed until the end of that
test. An engine that kvledger cannot observe runs on, and the summary counts it with the reason.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import NonCallableMock

import pytest

from ..checks.auditor import Auditor
from ..checks.registry import Violation
from ..engines import choose, host_version
from ..engines.pool.manager_observer import ManagerObserver
from ..events import HookFailed
from ..hooks import Hooks
from ..journal.memory_recorder import MemoryRecorder

SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager"


class _AuditedInstance:
    """One scheduler or KV cache manager that a test built, its observer and its audit."""

    def __init__(self, observer: Any, sink: MemoryRecorder) -> None:
        self._observer = observer
        self._sink = sink
        self._auditor = Auditor()
        observer.start()

    def end(self) -> tuple[list[Violation], list[str]]:
        """The violations, and a phrase for each failure of a check or hook, which may hide further ones."""
        self._observer.stop("detached")
        events = self._sink.take()
        self._auditor.feed_all(events)
        broken = [f"a check failed: {name}" for name in self._auditor.check_failures]
        broken += [f"the hook on {e.hook} failed: {e.error}" for e in events if isinstance(e, HookFailed)]
        return self._auditor.violations, broken


class _ObservedMock:
    """Calls go through the observing wrapper; every other attribute is the mock's own, such as call_count."""

    def __init__(self, observed: Callable[..., Any], mock: NonCallableMock) -> None:
        vars(self).update(_observed=observed, _mock=mock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._observed(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_mock"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mock, name, value)


def _keep_mocks(*owners: Any) -> None:
    """Give a test that replaced a method by a mock its mock back, with the observing wrapper inside."""
    for owner in owners:
        for name, wrapper in list(vars(owner).items()) if owner is not None else ():
            mock = getattr(wrapper, "__wrapped__", None) if inspect.isfunction(wrapper) else None
            if isinstance(mock, NonCallableMock):
                setattr(owner, name, _ObservedMock(wrapper, mock))


class LedgerPlugin:
    """Observes the engines that the running test builds, and reports on them when the test ends."""

    def __init__(self, level: str, allowed: list[str], *, stacks: bool) -> None:
        self._level = level
        """``tokens`` or ``blocks``."""
        self._allowed = allowed
        """Invariants that a test may break."""
        self._stacks = stacks
        """Whether each block operation keeps its Python stack."""
        self._audited: list[_AuditedInstance] = []
        """What the running test built and is being observed."""
        self._building = 0
        """How many ``__init__`` calls of vLLM's classes are running, one within the other."""
        self._wrapped: list[tuple[type, str, Any]] = []
        """Class, attribute name and original of each wrapped attribute."""
        self._built: list[Any] = []
        """Schedulers that have not run a step yet."""
        self.observed = 0
        """Engines and managers observed so far."""
        self.left_alone: dict[str, int] = {}
        """How many engines could not be observed, by the reason."""
        self.violations = 0
        """Violations reported so far, without the allowed ones."""

    # --- engines that a test builds --------------------------------------------------------------

    def _wrap(self) -> None:
        """Wrap vLLM's two classes, once a test module has imported them."""
        for name, attribute, observe in (
            (SCHEDULER, "Scheduler", lambda scheduler: self._built.append(scheduler)),
            (MANAGER, "KVCacheManager", self._observe_manager),
        ):
            class_ = getattr(sys.modules.get(name), attribute, None)
            if class_ is not None and not any(class_ is wrapped for wrapped, *_ in self._wrapped):
                self._observe_instances(class_, observe)
                if name == SCHEDULER:
                    self._observe_from_first_step(class_)

    def _observe_from_first_step(self, class_: Any) -> None:
        """Begin to observe a scheduler at its first ``schedule()``.

        Until then a test may replace the connector and add requests in any state. Nothing is lost: the
        snapshot at that point describes every request that waits.
        """
        original = class_.schedule

        @functools.wraps(original)
        def schedule(instance: Any, *args: Any, **kwargs: Any) -> Any:
            if any(built is instance for built in self._built):
                self._built = [built for built in self._built if built is not instance]
                self._observe_scheduler(instance)
                return instance.schedule(*args, **kwargs)
            return original(instance, *args, **kwargs)

        self._set(class_, "schedule", schedule)
        self._observe_methods_bound_before(class_)

    def _observe_methods_bound_before(self, class_: Any) -> None:
        """Observe ``scheduler.update_from_output(scheduler.schedule(), output)`` in a test's first step.

        Python binds ``update_from_output`` before it calls ``schedule``, which begins the observation.
        """
        original = class_.update_from_output

        @functools.wraps(original)
        def update_from_output(instance: Any, *args: Any, **kwargs: Any) -> Any:
            observing = instance.update_from_output
            called_by_hook = sys._getframe(1).f_globals.get("__name__") == Hooks.__module__
            if inspect.isfunction(observing) and not called_by_hook:
                return observing(*args, **kwargs)
            return original(instance, *args, **kwargs)

        self._set(class_, "update_from_output", update_from_output)

    def _observe_instances(self, class_: Any, observe: Any) -> None:
        original = class_.__init__

        @functools.wraps(original)
        def init(instance: Any, *args: Any, **kwargs: Any) -> None:
            self._building += 1
            try:
                original(instance, *args, **kwargs)
            finally:
                self._building -= 1
            if not self._building:
                observe(instance)

        self._set(class_, "__init__", init)

    def _set(self, class_: Any, name: str, function: Any) -> None:
        self._wrapped.append((class_, name, class_.__dict__[name]))
        setattr(class_, name, function)

    def _observe_scheduler(self, scheduler: Any) -> None:
        sink = MemoryRecorder()
        try:
            observer_class = choose(scheduler)
            observer = observer_class(
                scheduler, sink, version=host_version(), level=self._level, stacks=self._stacks
            )
            self._keep(_AuditedInstance(observer, sink))
            _keep_mocks(scheduler, scheduler.kv_cache_manager, getattr(scheduler, "connector", None))
        except Exception as error:  # a release that kvledger does not know fails no test
            self._leave_alone(error)

    def _observe_manager(self, manager: Any) -> None:
        if self._level != "blocks":
            return
        sink = MemoryRecorder()
        try:
            observer = ManagerObserver(manager, sink, version=host_version(), stacks=self._stacks)
            self._keep(_AuditedInstance(observer, sink))
        except Exception as error:
            self._leave_alone(error)

    def _leave_alone(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.left_alone[reason] = self.left_alone.get(reason, 0) + 1

    def _keep(self, audited: _AuditedInstance) -> None:
        self._audited.append(audited)
        self.observed += 1

    # --- pytest's hooks --------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Wrap vLLM's classes before the fixtures of a test run."""
        self._wrap()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test that broke an invariant; add the findings to the report of a test that fails anyway."""
        try:
            result = yield
        except BaseException:
            text = self._report()
            if text:
                item.add_report_section("call", "kvledger", text)
            raise
        text = self._report()
        if text:
            pytest.fail(text, pytrace=False)
        return result

    def _report(self) -> str:
        audited, self._audited, self._built = self._audited, [], []
        lines: list[str] = []
        for instance in audited:
            violations, failures = instance.end()
            lines += [f"kvledger: {phrase}" for phrase in failures]
            for violation in violations:
                if violation.severity == "violation" and violation.id not in self._allowed:
                    self.violations += 1
                    lines += [f"{violation.id}: {violation.message}", *violation.story]
        return "\n".join(lines)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print how many engines were observed, and how many could not be and why."""
        terminalreporter.write_line(
            f"kvledger: {self.observed} engines observed at level {self._level}, "
            f"{sum(self.left_alone.values())} left alone, {self.violations} violations"
        )
        for reason, engines in self.left_alone.items():
            terminalreporter.write_line(f"kvledger: {engines} left alone: {reason}")

    def pytest_unconfigure(self) -> None:
        """Restore vLLM's classes."""
        while self._wrapped:
            setattr(*self._wrapped.pop())
