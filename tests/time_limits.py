"""Limits that only a test exceeds which hangs, works without end, or takes memory without end."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

HANGS = 60.0
"""Seconds after which something that takes a moment hangs."""

RUN_HANGS = 1_800.0
"""The same of a process that runs real engines, or builds their environment."""

CPU_SECONDS = 10.0
"""How much CPU time what takes some milliseconds may take."""


MEMORY_BYTES = 512 << 20
"""How much memory the reading of a few kilobytes may take beside what the process has already."""


@contextmanager
def limited_memory() -> Iterator[None]:
    """Let an allocation beyond ``MEMORY_BYTES`` raise MemoryError."""
    with open("/proc/self/status") as status:
        (data,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


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
