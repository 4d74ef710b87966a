"""Time windows: which requests of a journal a report includes.

A request belongs to the window in which it ended, with its whole account. A request that is still open
belongs to windows without an end. ``journal_parts.py`` says from where a journal is replayed.
"""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..errors import LedgerError
from ..events import EngineStarted
from ..figures.sums import Sums
from ..journal.format import segments
from ..journal.reader import Position, Reader

if TYPE_CHECKING:
    from ..ledger.account import Account

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SPAN = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_DAYS = {"today": 0, "yesterday": 1}
_CLOCK = re.compile(r"(?:(today|yesterday) ?)?(?:(\d{1,2}):(\d{2})(?::(\d{2}))?)?")


class Window(msgspec.Struct, frozen=True):
    """From ``since`` up to and excluding ``until``, in Unix seconds; None: no bound."""

    since: float | None = None
    until: float | None = None

    @property
    def bounded(self) -> bool:
        """Whether the window has a bound."""
        return self.since is not None or self.until is not None

    def holds(self, wall_seconds: float) -> bool:
        """Whether this time is in the window."""
        return (self.since is None or self.since <= wall_seconds) and (
            self.until is None or wall_seconds < self.until
        )

    def touches(self, since: float, until: float) -> bool:
        """Whether a time from ``since`` to ``until``, both included, is in the window."""
        return (self.since is None or self.since <= until) and (self.until is None or since < self.until)

    def has(self, account: Account, began_seconds: float | None) -> bool:
        """Whether a request is in the window. ``began_seconds``: when the engine started; None: not known."""
        if not self.bounded:
            return True
        if account.closed_at < 0:
            return self.until is None
        return began_seconds is not None and self.holds(began_seconds + account.closed_at / 1e6)


EVERYTHING = Window()


class LossesInWindow(Sums):
    """Counts the losses that may lie in a window.

    Lost events happened after the event before the loss and before the event after it. A request that ended
    at another time has its own account, which is unknown if the loss touched it.
    """

    times: int = 0
    since: float = -1.0
    """Unix time of the event before a loss that no event has followed yet; -1: there is none."""

    def place(self, window: Window, lost: bool, before: float, at: float) -> None:
        """Take an event at Unix time ``at``, after one at ``before``; ``lost``: it reports a loss."""
        if lost:
            self.since = before if self.since < 0 else self.since
        elif self.since >= 0:
            self.times += window.touches(self.since, at)
            self.since = -1.0

    def merge(self, more: LossesInWindow) -> None:
        """Add later losses."""
        self.times += more.times
        self.since = more.since

    def count(self, window: Window) -> int:
        """How many losses the window may include."""
        return self.times + (self.since >= 0 and window.touches(self.since, math.inf))


def last_start(path: Path) -> EngineStarted | None:
    """The newest description of an engine in a journal's folder; None: none can be read.

    A machine's clock may be corrected while an engine runs. So the newest description has the best time.
    """
    numbers: list[int] = []
    with suppress(LedgerError, OSError):
        numbers = sorted(segments(path), reverse=True)
    for number in numbers:
        with suppress(LedgerError, OSError), Reader(path, Position(segment=number, event=-1)) as reader:
            batch = next(reader.poll(), None)  # None: the newest segment is just begun
            for event in batch.events if batch is not None else ():
                if isinstance(event, EngineStarted):
                    return event
    return None


def duration(words: str) -> float:
    """Seconds of ``15s``, ``90m``, ``2h30m`` or ``2d``. Raises :class:`LedgerError` for anything else."""
    seconds = seconds_of(words.strip())
    if not seconds:
        raise LedgerError(f"{words!r} is no time such as 15s, 90m, 2h30m or 2d.")
    return seconds


def seconds_of(words: str) -> float | None:
    """The same; None for anything else."""
    if _SPAN.fullmatch(words) is None:
        return None
    return sum(float(number) * UNITS[unit] for number, unit in _PART.findall(words))


def window(since: str = "", until: str = "", now: float | None = None) -> Window:
    """Parse the window that a user typed: ISO times, ``15:12``, ``yesterday``, or ``15m`` before now.

    A time without a zone is in this machine's zone. Hours before now begin at a whole minute, for which kept
    rows have the time of engine steps, and days at a whole hour, of which sums are kept. Raises
    :class:`LedgerError`.
    """
    now = time.time() if now is None else now
    parsed = Window(instant(since, now), instant(until, now))
    if parsed.since is not None and parsed.until is not None and parsed.since >= parsed.until:
        raise LedgerError(f"Nothing lies between --since {since} and --until {until}.")
    return parsed


def instant(words: str, now: float) -> float | None:
    """The Unix time that a user typed; None for no words. Raises :class:`LedgerError`."""
    if not words:
        return None
    span = seconds_of(words)
    if span is not None:
        whole = {"h": 60, "d": 3600}.get(words[-1])
        return (now - span) // whole * whole if whole else now - span
    clock = _CLOCK.fullmatch(words)
    try:
        if clock is not None:
            return _on_a_day(clock, now)
        # Python 3.10 does not know the Z of ISO 8601.
        return datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", words)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise LedgerError(
            f"{words!r} is no time: write 2026-01-31T12:00:00+00:00, 2026-01-31, 15:12, yesterday 15:12, or "
            "90s, 15m, 2h30m, 1d ago."
        ) from None


def _on_a_day(clock: re.Match[str], now: float) -> float:
    """A time of this machine's clock, or a midnight; without a day the last such time before ``now``."""
    day, hour, minute, second = clock.groups()
    today = datetime.fromtimestamp(now)
    at = today.replace(hour=int(hour or 0), minute=int(minute or 0), second=int(second or 0), microsecond=0)
    back = _DAYS[day] if day else int(at > today)
    return (at - timedelta(days=back)).timestamp()
