"""Compacts the followed journals at an interval, with ``kvledger journals compact`` in a process of its own.

The process has a low priority, so that it delays neither a scrape nor the engine. It goes on with each
journal where it ended, so it reads every event once. docs/decisions/0022 says why it is a process.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

from ...audit.errors import LedgerError, Missed
from ...audit.replay.windows import duration
from ...audit.text import utc
from ..metrics.values import Health
from .follower import Notify
from .threads import Beat, StartThread, ignore_beat, start_thread

COMPACT = "import os; os.nice(10); from kvledger.cli import main; main()"
BEAT_SECONDS = 10.0
"""How often the thread says that it waits."""

LOOK_SECONDS = 0.2
"""How often a running process is looked at."""

MOST_SECONDS = 6 * 3600.0
"""How long a process may take, before it is ended. What it wrote is whole or not counted."""

END_SECONDS = 10.0
"""How long a process may take to end after SIGTERM, before it is killed."""

SOME_NOT = Missed.exit_code
"""The exit code of a compaction that some journals were left out of."""


def seconds_of(words: str) -> float:
    """The interval that ``--compact`` names; 0: they are never compacted. Raises LedgerError."""
    return duration(words) if words else 0.0


class Compactor:
    """Compacts the journals in ``folder`` every ``seconds``, one process at a time.

    ``keep``: the age up to which rows are kept, such as ``30d``; "": all are. ``health`` has when it last
    succeeded and how often it failed.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        notify: Notify,
        *,
        keep: str = "",
        inform: Notify | None = None,
    ) -> None:
        if not folder.is_dir():
            raise LedgerError(f"{folder} is no folder of journals, so there is nothing to compact.")
        if keep:
            duration(keep)
        self.health = Health()
        """The figures of the sidecar."""
        age = ["--keep", keep] if keep else []
        self._command = [
            sys.executable,
            "-c",
            COMPACT,
            "journals",
            "compact",
            str(folder),
            "--jobs",
            "1",
            *age,
        ]
        self._seconds = seconds
        """The time between two processes."""
        self._notify = notify
        self._inform = inform or (lambda _: None)
        self._stop = threading.Event()
        """Ends the thread, and the process that runs."""
        self._beat: Beat = ignore_beat
        """Says that the thread works."""
        self._thread: threading.Thread | None = None
        """Runs the processes, once it is started."""
        self._problem = ""
        """The last sentence of a process that failed; it is not repeated."""

    def start(self, start: StartThread = start_thread) -> None:
        """Begin; the first time after one interval."""
        self._thread = start("compact", self._run)

    def close(self) -> None:
        """End, together with the process that runs. What it wrote is whole or not counted."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2 * LOOK_SECONDS)

    def _run(self, beat: Beat = ignore_beat) -> None:
        self._beat = beat
        due = time.monotonic() + self._seconds
        while not self._stop.wait(min(BEAT_SECONDS, max(0.0, due - time.monotonic()))):
            beat()
            if time.monotonic() >= due:
                self._once()
                due = time.monotonic() + self._seconds

    def _once(self) -> None:
        """Compact, and say how it went."""
        began = time.monotonic()
        problem = self._compact()
        if problem is None:
            return
        self.health.compact_seconds = time.monotonic() - began
        if problem:
            self.health.compact_failures += 1
            if problem != self._problem:
                last = utc(self.health.compacted_at) if self.health.compacted_at else "never"
                self._notify(f"Not all journals were compacted: {problem} The last success: {last}.")
        else:
            self.health.compacted_at = time.time()
            self._inform(f"Compacted the journals in {self.health.compact_seconds:.1f} s.")
        self._problem = problem

    def _compact(self) -> str | None:
        """Compact once; returns what went wrong, or None if it was told to stop."""
        ends = time.monotonic() + MOST_SECONDS
        with subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            while True:
                try:
                    _, text = process.communicate(timeout=LOOK_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    self._beat()
                    late = time.monotonic() > ends
                    if late or self._stop.is_set():
                        _end(process)
                        return f"it took longer than {MOST_SECONDS:,.0f} s and was ended." if late else None
        if process.returncode == SOME_NOT:
            self.health.compacted_at = time.time()
        lines = text.splitlines()
        return (lines or [f"exit code {process.returncode}."])[-1] if process.returncode else ""


def _end(process: subprocess.Popen[str]) -> None:
    """End a process, and its writing to the pipe."""
    process.terminate()
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
