"""Drives a real scheduler, with a mutant or without, and says what an audit finds.

Every scenario of `tests.scenarios.corpus` and the first random histories of `tests.differential` are driven
three times: observed at level `tokens`, observed at level `blocks`, and with the exported checks alone.
"""

from __future__ import annotations

import functools
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LEVELS = ("tokens", "blocks")
CHECKS = "checks"
"""In place of a level: the exported checks alone."""
HISTORIES = 100
STEPS = 3_000
"""After so many steps a scenario gives up: the engine stands still by then."""
SECONDS = 10
"""How long one drive may take; an engine that never stops is stopped then."""

Found = tuple[str, str | None]
"""The id of an invariant, and the request that a finding names."""


@dataclass
class Seen:
    """What one drive showed."""

    raised: str = ""
    """The exception that ended it."""
    findings: dict[Found, str] = field(default_factory=dict)
    """The violations, each with its sentence."""
    doubts: list[str] = field(default_factory=list)
    """Why the verdict can't be clean, besides violations."""
    figures: str = ""
    """The accounts as text, to see whether a mutant changed anything."""


class TooLong(BaseException):
    """A drive took longer than SECONDS."""


class Broken(BaseException):
    """The exported checks raised; no engine catches this."""


@contextmanager
def limited() -> Iterator[None]:
    """Limits on seconds and steps, and no log: what a mutant makes vLLM log is of no use."""
    from kvledger.audit.traffic.driver import Driver

    def stop(*_: Any) -> None:
        raise TooLong

    before, steps = signal.signal(signal.SIGALRM, stop), Driver.run.__defaults__
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    Driver.run.__defaults__ = (STEPS,)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        Driver.run.__defaults__ = steps
        logging.disable(disabled)


def warm_up() -> None:
    """Import vLLM, and have it read a drafter: both take longer than a drive may."""
    from tests.scenarios.driving import start

    start(connector="scripted")
    start(drafts=2, drafter="eagle")


@functools.cache
def drives() -> dict[str, Callable[[Any], Any]]:
    """Every drive by name; each passes its scheduler to the argument."""
    from tests.differential.player import play
    from tests.differential.random_histories import draw
    from tests.scenarios.corpus import runnable

    warm_up()

    def history(seed: int, attach: Any) -> None:
        played = play(draw(seed), attach)
        if played.raised:
            raise RuntimeError(played.raised)

    scenarios: dict[str, Callable[[Any], Any]] = dict(runnable())
    return scenarios | {f"history {seed}": functools.partial(history, seed) for seed in range(HISTORIES)}


def _drive(drive: Callable[[Any], Any], attach: Callable[[Any], None]) -> str:
    """Drive, and return the exception that ended it as a line; empty if none did."""
    try:
        with limited():
            drive(attach)
    except TooLong:
        return f"it ran for {SECONDS} seconds"
    except Broken:
        return ""
    except Exception as error:
        line = f"{type(error).__name__}: {error}".split("\n")[0].rstrip(": ")
        return line.removeprefix("RuntimeError: ") if "Error: " in line[14:] else line
    return ""


def observed(drive: Callable[[Any], Any], level: str) -> Seen:
    """What the audit at one level shows."""
    from kvledger.audit.checks.auditor import Auditor
    from kvledger.audit.traffic.driver import Observation

    observation = Observation(level)
    seen = Seen(_drive(drive, observation))
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(observation.stop())
    for found in auditor.violations:
        if found.severity == "violation":
            seen.findings.setdefault((found.id, found.request), found.message)
    seen.doubts = auditor.doubts
    seen.figures = repr([_figures(account.freeze()) for account in auditor.ledger.accounts()])
    return seen


def _figures(account: Any) -> Any:
    from tests.columns import columns, statement_figures

    return columns(statement_figures(account))


def checked(drive: Callable[[Any], Any]) -> Seen:
    """What the exported checks show of each call; the first finding ends the drive."""
    from kvledger.audit.entry import kv_invariants

    ids = [str(check.__doc__).partition(":")[0] for check in kv_invariants.CHECKS]
    seen = Seen()

    def attach(scheduler: Any) -> None:
        for name in kv_invariants.METHODS:
            method = kv_invariants.checked(getattr(type(scheduler), name))
            setattr(scheduler, name, _ending(functools.partial(method, scheduler)))

    def _ending(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except AssertionError as error:
                id, _, words = str(error).split("\n")[0].partition(": ")
                if id not in ids:
                    raise
                seen.findings[id, None] = words
                raise Broken from error

        return call

    seen.raised = _drive(drive, attach)
    return seen


def seen(name: str, level: str) -> Seen:
    """What one drive shows at one level; the level `checks` are the exported checks."""
    drive = drives()[name]
    return checked(drive) if level == CHECKS else observed(drive, level)
