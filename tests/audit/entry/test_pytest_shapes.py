"""No test that passes without the plugin fails with it, except by a finding: schedulers of many shapes.

Each source runs without the plugin first. What is wrapped, copied or built in an unusual way must go on as
before, and the schedulers that take steps are observed.
"""

from __future__ import annotations

import textwrap
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("vllm")

from tests.scenarios.driving import start

from kvledger import attach
from kvledger.audit.entry import pytest_plugin

pytest_plugins = ["pytester"]

BEGIN = """
import abc
import copy
import functools
import pickle
from unittest.mock import Mock, create_autospec, patch

import pytest
from tests.scenarios.driving import start
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from kvledger.audit.traffic import engine_setup


def drive(driver):
    driver.add("a", 40, 4)
    driver.step()
    driver.preempt("a")
    driver.run()


def of(monkeypatch, make):
    monkeypatch.setattr(engine_setup, "_scheduler_class", lambda setup: make)
    return start()
"""


@pytest.fixture(scope="module", autouse=True)
def everything_is_imported() -> None:
    """The inner runs forget what they import, and vLLM can't be imported twice."""
    for asynchronous in (False, True):
        driver = start(lambda it: attach(it, level="blocks"), connector="scripted", asynchronous=asynchronous)
        driver.add("a", 40, 4)
        driver.run()


SHAPES: dict[str, tuple[int, str]] = {
    "an abstract mixin": (
        1,
        """
        class Counting(abc.ABC):
            steps = 0

            @abc.abstractmethod
            def name(self): ...

            def schedule(self, *args, **kwargs):
                self.steps += 1
                return super().schedule(*args, **kwargs)

        class Mine(Counting, Scheduler):
            def name(self):
                return "mine"

        def test(monkeypatch):
            driver = of(monkeypatch, Mine)
            drive(driver)
            assert driver.scheduler.steps > 3
        """,
    ),
    "a mixin with slots": (
        1,
        """
        class Slotted:
            __slots__ = ()

            def update_from_output(self, *args):
                return super().update_from_output(*args)

        class Mine(Slotted, AsyncScheduler):
            __slots__ = ("mine",)

        def test(monkeypatch):
            drive(of(monkeypatch, Mine))
        """,
    ),
    "a partial on the class": (
        1,
        """
        def forward(below, self, *args, **kwargs):
            return below(self, *args, **kwargs)

        class Mine(Scheduler):
            add_request = functools.partialmethod(Scheduler.add_request)
            _free_request = functools.partialmethod(Scheduler._free_request)

        def test(monkeypatch):
            drive(of(monkeypatch, Mine))
        """,
    ),
    "built by a partial": (
        1,
        """
        def test(monkeypatch):
            drive(of(monkeypatch, functools.partial(Scheduler)))
        """,
    ),
    "a factory in a fixture": (
        2,
        """
        @pytest.fixture
        def make():
            return lambda **setup: start(**setup)

        def test(make):
            drive(make())
            drive(make(asynchronous=True))
        """,
    ),
    "two schedulers, step by step": (
        2,
        """
        def test():
            one, two = start(), start(asynchronous=True)
            for driver in (one, two):
                driver.add("a", 40, 4)
            while one.scheduler.has_requests() or two.scheduler.has_requests():
                one.step()
                two.step()
        """,
    ),
    "a mock with the scheduler's interface": (
        0,
        """
        def test():
            scheduler = create_autospec(Scheduler, instance=True)
            scheduler.schedule.return_value = 1
            assert scheduler.schedule() == 1
            assert isinstance(Mock(spec=Scheduler), Scheduler)
        """,
    ),
    "methods that a mock replaces": (
        1,
        """
        def test():
            driver = start()
            with patch.object(Scheduler, "schedule", autospec=True, side_effect=Scheduler.schedule) as mock:
                drive(driver)
            assert mock.call_count > 3
        """,
    ),
    "a method of the instance replaced between steps": (
        1,
        """
        def test(monkeypatch):
            driver = start()
            driver.add("a", 40, 4)
            driver.step()
            calls, below = [], driver.scheduler.schedule
            monkeypatch.setattr(driver.scheduler, "schedule", lambda: calls.append(1) or below())
            driver.run()
            assert calls
        """,
    ),
    "a method of the class replaced between steps": (
        1,
        """
        def test(monkeypatch):
            driver = start()
            driver.add("a", 40, 4)
            driver.step()
            below = Scheduler._free_request
            monkeypatch.setattr(Scheduler, "_free_request", lambda self, *a, **k: below(self, *a, **k))
            driver.run()
        """,
    ),
    "the arguments are checked": (
        1,
        """
        import inspect

        def test():
            driver = start()
            names = list(inspect.signature(driver.scheduler.schedule).parameters)
            assert names == list(inspect.signature(Scheduler.schedule).parameters)[1:]
            assert driver.scheduler.schedule.__name__ == "schedule"
            drive(driver)
        """,
    ),
    "never steps": (
        0,
        """
        def test():
            start().add("a", 40, 4)
        """,
    ),
    "its state is copied": (
        1,
        """
        def test():
            driver = start()
            drive(driver)
            assert copy.copy(driver.scheduler).requests is driver.scheduler.requests
        """,
    ),
    "an exception of its own": (
        1,
        """
        class Refuses(Scheduler):
            def add_request(self, request):
                if request.request_id == "b":
                    raise ValueError("no more")
                super().add_request(request)

        def test(monkeypatch):
            driver = of(monkeypatch, Refuses)
            driver.add("a", 40, 4)
            driver.step()
            with pytest.raises(ValueError, match="no more"):
                driver.add("b", 40, 4)
            driver.run()
        """,
    ),
}


def test_a_test_that_passes_without_the_plugin_passes_with_it(pytester: pytest.Pytester) -> None:
    """Each shape is a module of its own. The properties in the junit file count the engines of each."""
    modules = {f"test_{name.replace(' ', '_').translate(NO_MARKS)}": shape for name, shape in SHAPES.items()}
    pytester.makepyfile(
        **{name: BEGIN + textwrap.dedent(source) for name, (_, source) in modules.items()},
    )

    pytester.runpytest_inprocess("-p", "no:kvledger").assert_outcomes(passed=len(SHAPES))
    for level in ("tokens", "blocks"):
        options = ("-p", pytest_plugin.__name__, f"--kvledger={level}", "--junit-xml=junit.xml")
        result = pytester.runpytest_inprocess(*options, "-o", "junit_family=xunit1")
        result.assert_outcomes(passed=len(SHAPES))
        result.stdout.fnmatch_lines(f"kvledger: * engines observed at level {level}, 0 left alone*")
        for module, [properties] in properties_of_modules(pytester).items():
            engines, _ = modules[module]
            assert (f"{level} {engines}" if engines else "") == properties.get("kvledger.engines", ""), module


NO_MARKS = str.maketrans("", "", ",'")


def properties_of_modules(pytester: pytest.Pytester) -> dict[str, list[dict[str, str]]]:
    """The properties of the tests of each module, in the junit file."""
    found: dict[str, list[dict[str, str]]] = {}
    for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase"):
        properties = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        found.setdefault(case.get("classname", ""), []).append(properties)
    return found


PASSED_BY = """
def test():
    driver = start()
    driver.scheduler.schedule = functools.partial(type(driver.scheduler).schedule, driver.scheduler)
    drive(driver)
"""


def test_a_scheduler_whose_steps_pass_by_its_own_method_fails_its_test(pytester: pytest.Pytester) -> None:
    """The class's method is called with the scheduler, so that nothing on the scheduler is."""
    pytester.makepyfile(BEGIN + PASSED_BY)
    result = pytester.runpytest_inprocess("-p", pytest_plugin.__name__, "--kvledger")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines("kvledger: a scheduler was not observed: its steps were no calls of *")


@pytest.mark.parametrize("copier", ["copy.deepcopy(x)", "pickle.loads(pickle.dumps(x))"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_scheduler_is_copied_as_without_the_plugin(
    copier: str, steps: int, pytester: pytest.Pytester
) -> None:
    """A copy that fails without the plugin may fail with it, and one that works must work."""
    source = f"""
        def test():
            driver = start()
            driver.add("a", 40, 4)
            for _ in range({steps}):
                driver.step()
            x = driver.scheduler
            {copier}.schedule()
        """
    pytester.makepyfile(BEGIN + textwrap.dedent(source))

    without = pytester.runpytest_inprocess("-p", "no:kvledger").parseoutcomes()
    result = pytester.runpytest_inprocess("-p", pytest_plugin.__name__, "--kvledger=tokens")

    if "passed" in without:
        result.assert_outcomes(passed=1)
