"""Limits that only a test exceeds which hangs, or works without end, on a busy machine too."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

HANGS = 60.0
"""Seconds after which something that takes a moment hangs."""

RUN_HANGS = 1_800.0
"""The same of a process that runs real engines, or builds their environment."""

CPU_SECONDS = 10.0
"""How much CPU time what takes some milliseconds may take."""


class TooLong(BaseException):
    """Something hangs, or works without end."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise :class:`TooLong` in the main thread after ``HANGS``, or after ``CPU_SECONDS`` of work."""

    def out_of_time(*_: object) -> None:
        raise TooLong

    timers = (
        (signal.SIGALRM, signal.ITIMER_REAL, HANGS),
        (signal.SIGPROF, signal.ITIMER_PROF, CPU_SECONDS),
    )
    before = {number: signal.signal(number, out_of_time) for number, _, _ in timers}
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
