"""The pytest plugin ``kvledger``: its options and summary; it observes nothing until it is asked for.

    pytest --kvledger                 fail each test whose vLLM engine breaks an invariant
    pytest --kvledger=tokens          the same, observing tokens only
    pytest --kvledger=content         the same, verifying the KV in the blocks too, where a test runs a worker
    kvledger = blocks                 the same for every run, in the ini file
    @pytest.mark.kvledger             the same for one test
    def test(kvledger_audit): ...     the same, and the test can read the figures

pytest imports this file in every run of an environment that has kvledger, so the file imports the
standard library and pytest only. What observes engines is in ``pytest_observer``. What was found travels in
the properties of each test's report, so that it reaches the JUnit file and, with pytest-xdist, the summary.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from .pytest_settings import (
    ALLOWED,
    DEFAULT,
    DRIFT,
    ENGINES,
    EXAMINED,
    LEFT_ALONE,
    LEVELS,
    NAME,
    NEXT,
    NOT_LISTED,
    VIOLATION,
    run_level,
    unknown_level,
    wanted,
)

OBSERVER = "kvledger-observer"
"""The name of the plugin that observes."""
MOST_COMMANDS = 5
"""Failing tests whose next command the summary has."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options ``--kvledger...`` and the ini options of the same names."""
    for name in (NAME, __name__):
        if not pluginmanager.has_plugin(name):  # pytest refuses to register one module under two names
            pluginmanager.set_blocked(name)
    group = parser.getgroup(NAME, "audit the KV-cache accounting of vLLM engines")
    group.addoption(
        "--kvledger",
        nargs="?",
        const="blocks",
        default=None,
        type=_level,
        metavar="LEVEL",
        help="Observe every vLLM scheduler that a test builds and fail a test that breaks an invariant. "
        "LEVEL is tokens or blocks (the default).",
    )
    group.addoption(
        "--kvledger-allow",
        action="append",
        default=[],
        metavar="ID",
        help="Let tests break this invariant. Repeatable.",
    )
    group.addoption(
        "--kvledger-stacks",
        action="store_true",
        help="Record the Python stack of every block operation (slow).",
    )
    parser.addini(NAME, "Observe vLLM engines in every run, at level tokens or blocks.", default="")
    parser.addini("kvledger_allow", "Invariants that tests may break, one a line.", "linelist", [])
    parser.addini(
        "kvledger_stacks", "Record the Python stack of every block operation (slow).", "bool", False
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the summary, and the observing plugin if an option names a level."""
    given = config.option.kvledger
    if given and given not in LEVELS:  # the path of a test, in `pytest --kvledger test_x.py`
        others = config.args if config.args_source is config.ArgsSource.ARGS else []
        config.option.kvledger, config.args = DEFAULT, [given, *others]
        config.args_source = config.ArgsSource.ARGS
    config.addinivalue_line(
        "markers",
        "kvledger(level='blocks', allow=[]): observe the vLLM engines of this test and fail it if they break "
        "an invariant that allow does not list; level is tokens, blocks or off.",
    )
    level = run_level(config)
    config.pluginmanager.register(Summary(level), "kvledger-summary")
    if level:
        _observe(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check the markers, and observe if a test asks for it by its marker or by the fixture."""
    levels = {wanted(item).level for item in items}  # of every test, so that every marker is checked
    if levels - {""} and not config.pluginmanager.has_plugin(OBSERVER):
        _observe(config)


@pytest.fixture
def kvledger_audit(request: pytest.FixtureRequest) -> Any:
    """The audit of the vLLM engines that this test builds: violations, totals, verdict, account(id)."""
    observer: Any = request.config.pluginmanager.get_plugin(OBSERVER)
    if not wanted(request.node).level:
        pytest.fail("kvledger_audit: this test is marked kvledger(level='off')", pytrace=False)
    return observer.running


def _observe(config: pytest.Config) -> None:
    from .pytest_observer import LedgerPlugin

    stacks = config.getoption("--kvledger-stacks") or config.getini("kvledger_stacks")
    config.pluginmanager.register(LedgerPlugin(stacks=stacks), OBSERVER)


class Summary:
    """A section of the terminal summary: how many engines were observed, and what was found in which test."""

    def __init__(self, level: str) -> None:
        self._level = level
        """The level of the run; "" if only marked tests are observed."""
        self._engines: Counter[str] = Counter()
        """Observed engines and managers, by level."""
        self._left_alone: Counter[str] = Counter()
        """Engines that could not be observed, by the reason."""
        self._examined: Counter[str] = Counter()
        """Engines, by what was examined of them."""
        self._findings: dict[str, Counter[str]] = {VIOLATION: Counter(), DRIFT: Counter(), ALLOWED: Counter()}
        """Findings of each kind, by invariant."""
        self._next: list[str] = []
        """The command that reads the journals of a failing test, each."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the properties of a test."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == ENGINES:
                level, _, engines = str(value).partition(" ")
                self._engines[level] += int(engines)
            elif name == LEFT_ALONE:
                self._left_alone[str(value)] += 1
            elif name == EXAMINED:
                self._examined[str(value)] += 1
            elif name == NEXT:
                self._next.append(str(value))
            elif name == NOT_LISTED:
                kind, id, number = str(value).split()
                self._findings[kind][id] += int(number)
            elif name in self._findings:
                self._findings[name][str(value).partition(":")[0]] += 1

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the section if this run observes engines."""
        if not (self._level or self._engines or self._left_alone):
            return
        terminalreporter.section(NAME)
        violations = sum(self._findings[VIOLATION].values())
        for level in self._engines or [self._level or DEFAULT]:
            terminalreporter.write_line(
                f"kvledger: {self._engines[level]} engines observed at level {level}, "
                f"{sum(self._left_alone.values())} left alone, {violations} violations"
            )
        for words, engines in self._examined.items():
            terminalreporter.write_line(f"kvledger: {engines} examined {words}".rstrip())
        for reason, engines in self._left_alone.items():
            terminalreporter.write_line(f"kvledger: {engines} left alone: {reason}")
        for line in self._lines():
            terminalreporter.write_line(line)

    def _lines(self) -> Iterable[str]:
        for kind, ids in self._findings.items():
            for id, times in sorted(ids.items()):
                yield f"{kind.partition('.')[2]}  {id}  {times}"
        if self._findings[VIOLATION]:
            yield "`kvledger explain ID` explains an invariant."
        if self._next:
            yield f"The journals of failing tests are kept: {len(self._next)}. Next:"
            yield from (f"    {command}" for command in self._next[:MOST_COMMANDS])


def _level(text: str) -> str:
    if text not in LEVELS and not os.path.exists(text.partition("::")[0]):
        raise argparse.ArgumentTypeError(unknown_level(text))
    return text
