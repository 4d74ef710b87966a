"""Observing the engines that tests build: the plugin that ``pytest --kvledger`` registers.

Every vLLM scheduler that a test builds is observed, and every KV cache manager built without a scheduler
(at level ``blocks``). A test that breaks an invariant fails, with the finding in its report. An engine
that outlives the test that built it, such as one in a module fixture, is observed until the end of that
test. A test whose scheduler cannot be observed fails too, with the reason, unless it allows that. What is
found goes into the properties of the test, from which ``pytest_plugin`` makes the summary.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any
from unittest.mock import NonCallableMock

import pytest

from ..checks.auditor import Found
from ..checks.registry import Violation
from ..engines import blocks_out_of_reach, choose, host_version
from ..engines.content.attached import worker_of
from ..engines.pool.pool_watch import ManagerObserver
from ..engines.v1_since_0_27 import V1Observer
from ..journal.recorder import MemoryRecorder
from ..repro.assertions import refusal
from .engine_end import FirstStep
from .plugin import ImportWatch
from .pytest_audits import AuditedInstance, KeptJournals, TestAudits
from .pytest_settings import (
    ALLOWED,
    DRIFT,
    ENGINES,
    EXAMINED,
    FIXTURE,
    HOW_TO_ALLOW,
    LEFT_ALONE,
    NEXT,
    NOT_LISTED,
    UNOBSERVED,
    VIOLATION,
    Wanted,
    wanted,
)

SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager"
CORE = "vllm.v1.engine.core"


PASSED_BY = "its steps were no calls of scheduler.schedule(), but of the class's method"
"""Why a scheduler was not observed that took steps."""


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

    def __init__(self, *, stacks: bool) -> None:
        self._ended: list[AuditedInstance] = []
        """The engines of the test that has just ended."""
        self._breaks = ""
        """The first invariant that one of its schedulers breaks and that `repro` can show; "": none."""
        self._wanted = Wanted("", frozenset())
        self._keep_closed = False
        """Whether the running test may ask for the accounts of requests that have ended."""
        self._stacks = stacks
        """Whether each block operation keeps its Python stack."""
        self._audited: list[AuditedInstance] = []
        self.running = TestAudits()
        """The same, for the fixture ``kvledger_audit``."""
        self._cores: list[Any] = []
        self._building = 0
        """How many ``__init__`` calls of vLLM's classes are running, one within the other."""
        self._wrapped: list[tuple[type, str, Any]] = []
        """Class, attribute name and original of each wrapped attribute."""
        self._expected: list[FirstStep] = []
        """The schedulers of the running test, each observed from its first step on."""
        self._unobserved: list[str] = []
        """Why schedulers of the running test could not be observed."""
        self._left_alone: list[str] = []
        """Why blocks could not be."""
        self._imports = ImportWatch((SCHEDULER, MANAGER, CORE), self._wrap)
        """Wraps vLLM's classes also if a test, or an engine that it builds, is the first to import them."""

    # --- engines that a test builds --------------------------------------------------------------

    def _wrap(self) -> None:
        """Wrap vLLM's three classes, if they are imported."""
        for name, attribute, wrap, observe in (
            (SCHEDULER, "Scheduler", self._observe_instances, self._expect_first_step),
            (MANAGER, "KVCacheManager", self._observe_instances, self._observe_manager),
            (CORE, "EngineCore", self._after_init, self._cores.append),
        ):
            class_ = getattr(sys.modules.get(name), attribute, None)
            if class_ is not None and not any(class_ is wrapped for wrapped, *_ in self._wrapped):
                wrap(class_, observe)

    def _expect_first_step(self, scheduler: Any) -> None:
        if self._wanted.level:
            self._expected.append(FirstStep(scheduler, self._observe_scheduler))

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

    def _after_init(self, class_: Any, built: Callable[[Any], None]) -> None:
        original = class_.__init__

        @functools.wraps(original)
        def init(instance: Any, *args: Any, **kwargs: Any) -> None:
            original(instance, *args, **kwargs)
            built(instance)

        self._set(class_, "__init__", init)

    def _set(self, class_: Any, name: str, function: Any) -> None:
        self._wrapped.append((class_, name, class_.__dict__[name]))
        setattr(class_, name, function)

    def _observe_scheduler(self, scheduler: Any) -> None:
        if not self._wanted.level:
            return
        sink = MemoryRecorder()
        try:
            observer_class, level = choose(scheduler), self._wanted.level
            reason = blocks_out_of_reach(scheduler) if level != "tokens" else ""
            if reason:
                self._left_alone.append(f"observed at level tokens only: {reason}")
                level = "tokens"
            observer = observer_class(
                scheduler, sink, version=host_version(), level=level, stacks=self._stacks
            )
            self._keep(observer, sink)
            if level == "content":
                self._verify_contents(observer)
            _keep_mocks(scheduler, scheduler.kv_cache_manager, getattr(scheduler, "connector", None))
        except Exception as error:
            self._unobserved.append(f"{type(error).__name__}: {error}")

    def _verify_contents(self, observer: Any) -> None:
        """Verify the KV in the blocks of an engine whose worker runs here, as ``attach`` does."""
        worker = self._worker(observer.scheduler)
        if worker is None or not isinstance(observer, V1Observer):
            self._left_alone.append("observed at level blocks only: its engine has no worker in this process")
            return
        observer.watch_worker()
        observer.watch_content(worker)
        if observer.content is None:
            self._left_alone.append("observed at level blocks only: vLLM's log says why")

    def _worker(self, scheduler: Any) -> Any:
        """The worker of the engine core that has this scheduler; None if no core of this process has it."""
        return next((worker_of(core) for core in self._cores if core.scheduler is scheduler), None)

    def _observe_manager(self, manager: Any) -> None:
        if self._wanted.level in ("", "tokens"):
            return
        sink = MemoryRecorder()
        try:
            observer = ManagerObserver(manager, sink, version=host_version(), stacks=self._stacks)
            self._keep(observer, sink)
        except Exception as error:  # without a scheduler, no figure is missed
            self._left_alone.append(f"{type(error).__name__}: {error}")

    def _keep(self, observer: Any, sink: MemoryRecorder) -> None:
        audited = AuditedInstance(observer, sink, keep_closed=self._keep_closed)
        self._audited.append(audited)
        self.running.add(audited)

    # --- pytest's hooks --------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Wrap vLLM's classes before the fixtures of a test run."""
        self._wanted = wanted(item)
        self._keep_closed = FIXTURE in getattr(item, "fixturenames", ())
        self.running = TestAudits()
        self._wrap()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test that broke an invariant; add the findings to the report of a test that fails anyway."""
        try:
            result = yield
        except BaseException:
            text = self._report(item)
            if text:
                item.add_report_section("call", "kvledger", text)
            raise
        text = self._report(item)
        if text:
            pytest.fail(text, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep the journals of a test that failed, and say which command reads them."""
        report = yield
        if call.when == "call":
            ended, self._ended = self._ended, []
            journals = KeptJournals(item.config)
            try:
                if not (report.failed and ended):
                    journals.drop(item.nodeid)
                elif journals.folder is not None:
                    command = journals.keep(item.nodeid, ended, self._breaks)
                    report.user_properties.append((NEXT, command))
                    report.sections.append(("kvledger: its journal is kept, next", command))
            except OSError as error:
                report.sections.append(("kvledger: its journal could not be kept", str(error)))
        return report

    def _report(self, item: pytest.Item) -> str:
        """End the audits of a test: its findings become properties; the text is that of its failure."""
        audited, self._audited = self._audited, []
        self._ended, self._breaks = audited, ""
        self._cores.clear()
        left_alone, self._left_alone = self._left_alone, []
        unobserved, self._unobserved = self._unobserved, []
        unobserved += [PASSED_BY for expected in self._expected if expected.missed]
        self._expected.clear()
        properties, lines = item.user_properties, list[str]()
        if audited:
            properties.append((ENGINES, f"{self._wanted.level} {len(audited)}"))
        properties += [(LEFT_ALONE, reason) for reason in (*unobserved, *left_alone)]
        if UNOBSERVED not in self._wanted.allowed:
            lines += [f"kvledger: a scheduler was not observed: {why}. {HOW_TO_ALLOW}" for why in unobserved]
        for instance in audited:
            violations, failures = instance.end()
            lines += [f"kvledger: {phrase}" for phrase in failures]
            properties.append((EXAMINED, instance.examined))
            for violation in violations:
                kind = self._kind(violation)
                properties.append((kind, f"{violation.id}: {violation.message}"))
                if kind == VIOLATION:
                    lines += [f"{violation.id}: {violation.message}", *violation.story]
                    rebuilt = instance.has_scheduler and not refusal(violation.id)
                    self._breaks = self._breaks or (violation.id if rebuilt else "")
            for row in instance.not_listed:
                kind = self._kind(row)
                properties.append((NOT_LISTED, f"{kind} {row.id} {row.findings - row.listed}"))
                lines += [f"{row.id}: {row.shown}"] if kind == VIOLATION else []
        return "\n".join(lines)

    def _kind(self, violation: Violation | Found) -> str:
        if violation.severity != "violation":
            return DRIFT
        return ALLOWED if violation.id in self._wanted.allowed else VIOLATION

    def pytest_unconfigure(self) -> None:
        """Restore vLLM's classes."""
        self._imports.end()
        while self._wrapped:
            setattr(*self._wrapped.pop())
