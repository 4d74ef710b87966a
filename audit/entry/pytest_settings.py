"""How each test is to be observed: options of the run, the ini file, markers and the fixture.

Standard library and pytest only, as in ``pytest_plugin``.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

NAME = "kvledger"
"""The name of the entry point, of the option, of the ini option and of the marker."""
LEVELS = ("tokens", "blocks", "content")
"""As ``audit.engines.LEVELS``, which cannot be imported here."""
DEFAULT = "blocks"
"""The level of a test that is observed and names none."""
OFF = "off"
"""The level at which a marked test is not observed."""
FIXTURE = "kvledger_audit"

UNOBSERVED = "unobserved"
"""The word by which a test allows that an engine is not observed, as it allows an invariant."""
HOW_TO_ALLOW = f"Mark the test kvledger(allow={UNOBSERVED!r}), or run with --kvledger-allow={UNOBSERVED}"

ENGINES, LEFT_ALONE = "kvledger.engines", "kvledger.left_alone"
EXAMINED, NOT_LISTED, NEXT = "kvledger.examined", "kvledger.not_listed", "kvledger.next"
VIOLATION, DRIFT, ALLOWED = "kvledger.violation", "kvledger.drift", "kvledger.allowed"
"""Names of a test's properties."""


class Wanted(NamedTuple):
    """How one test is to be observed."""

    level: str
    """A level; "" if the test is not observed."""
    allowed: frozenset[str]
    """Invariants that the test may break; ``unobserved`` if its engines need not be observed."""


def wanted(item: pytest.Item) -> Wanted:
    """How a test is to be observed: its nearest marker decides the level, and all of them what is allowed.

    Raises UsageError for a marker that is not understood.
    """
    config = item.config
    allowed = {*config.getoption("--kvledger-allow"), *config.getini("kvledger_allow")}
    level = run_level(config)
    if not level and FIXTURE in getattr(item, "fixturenames", ()):
        level = DEFAULT
    for place, marker in enumerate(item.iter_markers(NAME)):
        named, more = _arguments(item, marker)
        allowed |= more
        if not place:
            level = named or level or DEFAULT
    return Wanted("" if level == OFF else level, frozenset(allowed))


def _arguments(item: pytest.Item, marker: pytest.Mark) -> tuple[str, set[str]]:
    """The level and the allowed invariants that one marker names."""
    given = dict(marker.kwargs)
    level, allow = given.pop("level", ""), given.pop("allow", ())
    if marker.args or given:
        raise pytest.UsageError(f"{item.nodeid}: the marker kvledger takes level=... and allow=[...] only")
    if level not in ("", *LEVELS, OFF):
        raise pytest.UsageError(f"{item.nodeid}: marker kvledger: {unknown_level(level)}, {OFF}")
    return level, {allow} if isinstance(allow, str) else set(allow)


def run_level(config: pytest.Config) -> str:
    """The level for tests without a marker; "" if they are not observed."""
    level: str = config.getoption("--kvledger") or config.getini(NAME)
    if level and level not in LEVELS:
        raise pytest.UsageError(f"ini option kvledger: {unknown_level(level)}")
    return level


def unknown_level(level: str) -> str:
    return f"{level!r} is not a level; the levels are {', '.join(LEVELS)}"
