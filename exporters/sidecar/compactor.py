"""Compacts the followed journals at an interval, with ``kvledger compact`` in a process of its own.

A process of low priority, so that it delays neither a scrape nor the engine. It goes on with each journal
where it ended, so it reads every event once.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from ...audit.errors import LedgerError
from ...audit.replay.windows import duration
from .journal_finder import Notify

COMPACT = "import os; os.nice(10); from kvledger.cli import main; main()"
LOOK_SECONDS = 0.2
"""How often a running process is looked at."""


def seconds_of(words: str) -> float:
    """The interval that ``--compact`` names; 0: they are never compacted. Raises LedgerError."""
    return duration(words) if words else 0.0


class Compactor:
    """Compacts the journals in ``folder`` every ``seconds``."""

    def __init__(self, folder: Path, seconds: float, notify: Notify) -> None:
        if not folder.is_dir():
            raise LedgerError(f"{folder} is no folder of journals, so there is nothing to compact.")
        self._folder = folder
        self._seconds = seconds
        self._notify = notify
        """Called with a sentence when a compaction failed."""
        self._stop = threading.Event()
        """Ends the thread, and the process that runs."""
        self._thread = threading.Thread(target=self._run, name="kvledger-compact", daemon=True)
        """Waits, compacts, and waits again."""
        self._problem = ""
        """The last sentence of a process that failed; it is not repeated."""

    def start(self) -> None:
        """Begin; the first time after one interval."""
        self._thread.start()

    def close(self) -> None:
        """End, together with the process that runs. What it wrote is whole or not counted."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * LOOK_SECONDS)

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            problem = self._compact()
            if problem and problem != self._problem:
                self._notify(f"The journals were not compacted: {problem}")
            self._problem = problem

    def _compact(self) -> str:
        """Compact once; returns what went wrong."""
        command = [sys.executable, "-c", COMPACT, "compact", str(self._folder), "--jobs", "1"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            while process.poll() is None:
                if self._stop.wait(LOOK_SECONDS):
                    process.terminate()
                    return ""
            lines = (process.stderr.read() if process.stderr else "").splitlines()
        return (lines or [f"exit code {process.returncode}."])[-1] if process.returncode else ""
