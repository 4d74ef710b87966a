"""The pytest plugin ``kvledger``: its options, and nothing else until one of them asks for it.

    pytest --kvledger                 fail each test whose vLLM engine breaks an invariant
    pytest --kvledger=tokens          the same, observing tokens only
    kvledger = blocks                 the same for every run, in the ini file

pytest imports this file in every run of an environment that has kvledger, so the file imports the
standard library and pytest only. What observes engines is in ``pytest_observer``.
"""

from __future__ import annotations

import argparse

import pytest

NAME = "kvledger"
"""The name of the entry point, of the option and of the ini option."""
LEVELS = ("tokens", "blocks")
"""As ``audit.engines.LEVELS``, which cannot be imported here."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add ``--kvledger``, ``--kvledger-allow`` and ``--kvledger-stacks``, and the ini option ``kvledger``."""
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


def pytest_configure(config: pytest.Config) -> None:
    """Register the observing plugin if the option or the ini file names a level."""
    level = config.getoption("--kvledger") or config.getini(NAME)
    if not level:
        return
    if level not in LEVELS:
        raise pytest.UsageError(f"ini option kvledger: {_unknown(level)}")
    from .pytest_observer import LedgerPlugin

    allowed, stacks = config.getoption("--kvledger-allow"), config.getoption("--kvledger-stacks")
    config.pluginmanager.register(LedgerPlugin(level, allowed, stacks=stacks), "kvledger-observer")


def _level(text: str) -> str:
    if text not in LEVELS:
        raise argparse.ArgumentTypeError(f"{_unknown(text)}. Before a path, write --kvledger=blocks")
    return text


def _unknown(level: str) -> str:
    return f"{level!r} is not a level; the levels are {', '.join(LEVELS)}"
