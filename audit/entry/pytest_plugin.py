"""A pytest plugin: every vLLM scheduler that a test builds comes under the ledger, at level ``blocks``.

    pytest -p kvledger.audit.entry.pytest_plugin [--kvledger-level tokens] [--kvledger-allow ID]

A test in which an invariant is violated fails, with the report in the failure. A KV cache manager that
is built without a scheduler is watched as well, at level ``blocks``. What is built for longer than a
test (a fixture of a module) is watched until the end of the first one. A host that does not fit is left
alone, and counted with the reason at the end.
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
from ..engines import LEVELS, choose, host_version
from ..engines.pool.manager_observer import ManagerObserver
from ..events import HookFailed
from ..journal.recorder import MemoryRecorder

SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kvledger-level``, ``--kvledger-allow`` and ``--kvledger-stacks``."""
    group = parser.getgroup("kvledger")
    group.addoption("--kvledger-level", choices=LEVELS, default="blocks", help="what is observed")
    group.addoption(
        "--kvledger-allow",
        action="append",
        default=[],
        metavar="ID",
        help="an invariant that may be violated",
    )
    group.addoption("--kvledger-stacks", action="store_true", help="keep the stack of every block operation")


def pytest_configure(config: pytest.Config) -> None:
    """Be there for every test."""
    config.pluginmanager.register(Plugin(config), "kvledger-ledger")


class _Watched:
    """One scheduler or manager, and what came of it."""

    def __init__(self, observer: Any, sink: MemoryRecorder) -> None:
        self._observer = observer
        self._sink = sink
        self._auditor = Auditor()
        observer.start()

    def end(self) -> tuple[list[Violation], list[str]]:
        """What was found, and why that may not be all."""
        self._observer.stop("detached")
        events = self._sink.take()
        self._auditor.feed_all(events)
        broken = [f"a check failed: {name}" for name in self._auditor.check_failures]
        broken += [f"the observer of {e.hook} failed: {e.error}" for e in events if isinstance(e, HookFailed)]
        return self._auditor.violations, broken


class _Mocked:
    """A mock that is observed when it is called, and is asked and told about its calls as before."""

    def __init__(self, observed: Callable[..., Any], mock: NonCallableMock) -> None:
        vars(self).update(_observed=observed, _mock=mock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._observed(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_mock"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mock, name, value)


def _keep_mocks(*owners: Any) -> None:
    """Where a test has put a mock in a method's place, what wraps it passes for the mock."""
    for owner in owners:
        for name, found in list(vars(owner).items()) if owner is not None else ():
            mock = getattr(found, "__wrapped__", None) if inspect.isfunction(found) else None
            if isinstance(mock, NonCallableMock):
                setattr(owner, name, _Mocked(found, mock))


class Plugin:
    """Watches what the present test builds."""

    def __init__(self, config: pytest.Config) -> None:
        self._level: str = config.getoption("--kvledger-level")
        self._allowed: list[str] = config.getoption("--kvledger-allow")
        self._stacks: bool = config.getoption("--kvledger-stacks")
        self._watched: list[_Watched] = []
        self._building = 0
        self._wrapped: list[tuple[type, str, Any]] = []
        """Classes, with what each had of its own."""
        self._built: list[Any] = []
        self.watched = 0
        self.left_alone: dict[str, int] = {}
        """How many engines, by the reason."""
        self.found = 0
        self.broken: list[str] = []

    # --- what is built ---------------------------------------------------------------------------

    def _wrap(self) -> None:
        """As soon as a test module has imported vLLM, the two classes tell us of their instances."""
        for name, attribute, observe in (
            (SCHEDULER, "Scheduler", lambda scheduler: self._built.append(scheduler)),
            (MANAGER, "KVCacheManager", self._observe_manager),
        ):
            found = getattr(sys.modules.get(name), attribute, None)
            if found is not None and not any(found is wrapped for wrapped, *_ in self._wrapped):
                self._tell_of_instances(found, observe)
                if name == SCHEDULER:
                    self._begin_at_first_step(found)

    def _begin_at_first_step(self, class_: Any) -> None:
        """A test may give its scheduler another connector, and requests of any state, before that.

        Nothing is lost: who waits then, untouched, is known wholly.
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

    def _tell_of_instances(self, class_: Any, observe: Any) -> None:
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
            made = choose(scheduler)
            observer = made(scheduler, sink, version=host_version(), level=self._level, stacks=self._stacks)
            self._keep(_Watched(observer, sink))
            _keep_mocks(scheduler, scheduler.kv_cache_manager, getattr(scheduler, "connector", None))
        except Exception as error:  # what does not fit is no fault of the test
            self._leave_alone(error)

    def _observe_manager(self, manager: Any) -> None:
        if self._level != "blocks":
            return
        sink = MemoryRecorder()
        try:
            observer = ManagerObserver(manager, sink, version=host_version(), stacks=self._stacks)
            self._keep(_Watched(observer, sink))
        except Exception as error:
            self._leave_alone(error)

    def _leave_alone(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.left_alone[reason] = self.left_alone.get(reason, 0) + 1

    def _keep(self, watched: _Watched) -> None:
        self._watched.append(watched)
        self.watched += 1

    # --- what pytest calls -----------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Before the fixtures of a test."""
        self._wrap()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail the test whose engine violated something; say it beside a failure of the test's own."""
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
        watched, self._watched, self._built = self._watched, [], []
        lines: list[str] = []
        for one in watched:
            violations, broken = one.end()
            self.broken += broken
            lines += [f"kvledger: {phrase}" for phrase in broken]
            for violation in violations:
                if violation.severity == "violation" and violation.id not in self._allowed:
                    self.found += 1
                    lines += [f"{violation.id}: {violation.message}", *violation.story]
        return "\n".join(lines)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """How much was watched, and what was not and why."""
        terminalreporter.write_line(
            f"kvledger: {self.watched} engines watched at level {self._level}, "
            f"{sum(self.left_alone.values())} left alone, {self.found} violations"
        )
        for reason, engines in self.left_alone.items():
            terminalreporter.write_line(f"kvledger: {engines} left alone: {reason}")

    def pytest_unconfigure(self) -> None:
        """The classes are as they were."""
        while self._wrapped:
            setattr(*self._wrapped.pop())
