"""The sidecar's threads beside the reader: each has a heartbeat, and begins again when it failed.

A thread that ended by an error used to leave figures that stood still under a healthy page. Now the error is
logged by its type, ``/-/healthy`` is 503 until the thread runs again, and it runs again after a second, then
two, four and so on up to a minute. The reader's error ends the sidecar (``serve.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...audit.text import failure
from ..metrics.values import Health, ThreadHealth

LONGEST_PAUSE_SECONDS = 60.0
Beat = Callable[[], None]
Work = Callable[[Beat], None]
"""What a thread does until it is told to stop. It calls its argument while it works as it should."""


StartThread = Callable[[str, Work], threading.Thread]
"""Starts a thread of this name."""


def start_thread(name: str, work: Work) -> threading.Thread:
    """A thread that nobody watches."""
    thread = threading.Thread(target=work, args=(ignore_beat,), name=f"kvledger-{name}", daemon=True)
    thread.start()
    return thread


def ignore_beat() -> None:
    """The heartbeat of work that nobody watches."""


class Threads:
    """Starts threads until ``stop`` is set. ``health`` has their heartbeats, ``notify`` gets what failed."""

    def __init__(self, health: Health, notify: Callable[[str], object], stop: threading.Event) -> None:
        self._health = health
        self._notify = notify
        self._stop = stop

    def start(self, name: str, work: Work, silent_seconds: float = 120.0) -> threading.Thread:
        """Start a thread; it counts as dead when it raised, or was silent for so long."""
        one = self._health.threads[name] = ThreadHealth(time.time(), silent_seconds)
        thread = threading.Thread(
            target=self._run, args=(name, work, one), name=f"kvledger-{name}", daemon=True
        )
        thread.start()
        return thread

    def _run(self, name: str, work: Work, one: ThreadHealth) -> None:
        def beat() -> None:
            one.beat_at, one.failed = time.time(), False

        pause = 1.0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                work(beat)
                return
            except BaseException as error:
                one.failed = True
                one.restarts += 1
                if time.monotonic() - began > LONGEST_PAUSE_SECONDS:  # it had worked for a while
                    pause = 1.0
                self._notify(
                    f"The {name} thread failed ({failure(error)}). It begins again in {pause:.0f} s."
                )
            self._stop.wait(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
