"""Commands of kvledger that the sidecar runs in processes of their own: the compaction, and ``show``.

Such a process has a low priority, so that it delays neither a scrape nor the engine. The compaction goes on
with each journal where it ended, so it reads every event once. docs/decisions/0022 says why it is a process.
``show`` prints the account of a request that a visitor of the page asks for; no account is kept for that.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...audit.errors import LedgerError, Missed
from ...audit.replay.parallel import size_bytes
from ...audit.replay.windows import duration
from ...audit.text import utc
from ..answer import bytes_text
from ..metrics.values import Health
from .follower import Notify, ignore
from .threads import Beat, StartThread, ignore_beat, start_thread

COMMAND = "import os; os.nice(10); from kvledger.cli import main; main()"
"""Runs a command of kvledger at low priority."""

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
        inform: Notify = ignore,
    ) -> None:
        if not folder.is_dir():
            raise LedgerError(f"{folder} is no folder of journals, so there is nothing to compact.")
        if keep:
            duration(keep)
        self.health = Health()
        """The figures of the sidecar."""
        age = ["--keep", keep] if keep else []
        words = ["journals", "compact", str(folder), "--jobs", "1", *age]
        self._command = [sys.executable, "-c", COMMAND, *words]
        self._seconds = seconds
        """The time between two processes."""
        self._notify = notify
        self._inform = inform
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
        done = finished(self._command, MOST_SECONDS, self._goes_on)
        if done is None:
            took = f"it took longer than {MOST_SECONDS:,.0f} s and was ended."
            return None if self._stop.is_set() else took
        if done.returncode == SOME_NOT:
            self.health.compacted_at = time.time()
        return _last_line(done) if done.returncode else ""

    def _goes_on(self) -> bool:
        self._beat()
        return not self._stop.is_set()


def finished(
    command: Sequence[str],
    seconds: float,
    goes_on: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str] | None:
    """Run a process to its end; None: it took longer than ``seconds`` or was not to go on, and was ended."""
    ends = time.monotonic() + seconds
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", env=environment
    ) as process:
        while True:
            try:
                out, error = process.communicate(timeout=LOOK_SECONDS)
                return subprocess.CompletedProcess(command, process.returncode, out, error)
            except subprocess.TimeoutExpired:
                if not goes_on() or time.monotonic() > ends:
                    _end(process)
                    return None


def _end(process: subprocess.Popen[str]) -> None:
    """End a process, and its writing to the pipe."""
    process.terminate()
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The sentence with which a process failed."""
    return (done.stderr.splitlines() or [f"exit code {done.returncode}."])[-1]


# --- the account of one request -------------------------------------------------------------------------

SHOW_SECONDS = 10.0
"""How long journals are read for one account; a connection lasts 15 s."""

SHOW_BYTES = 64 << 20
"""Journals of more bytes are not read for one account."""

SHOW_MEMORY = 512 << 20
"""The memory of the process that reads; beyond it that process fails, and not the sidecar."""

SHOWN_CHARACTERS = 1 << 20
"""A longer account is not sent."""

LIMITED = (
    f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({SHOW_MEMORY}, {SHOW_MEMORY})); "
    f"resource.setrlimit(resource.RLIMIT_CPU, ({2 * SHOW_SECONDS:.0f}, {2 * SHOW_SECONDS:.0f})); {COMMAND}"
)
"""Ends by itself, too, if the sidecar was killed meanwhile."""


class Shown(NamedTuple):
    """What ``kvledger show`` printed: an HTTP status, the account, and sentences about it."""

    status: int
    text: str
    sentences: list[str]


class AccountReader:
    """Reads the account of a request from journals, one at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        """Held while an account is read."""
        self._stop = threading.Event()
        """Ends the process that runs."""

    def read(self, where: Path, journals: Iterable[Path], asked: str, cut_off: Callable[[], bool]) -> Shown:
        """The account of ``asked`` in the journals at ``where``, which are ``journals``.

        ``cut_off`` says whether nobody waits for the answer any more.
        """
        command = f"kvledger show {shlex.quote(str(where))} REQUEST prints it."
        size = sum(map(size_bytes, journals))
        if size > SHOW_BYTES:
            limit = f"more than the {bytes_text(SHOW_BYTES)} that are read for a page"
            return Shown(503, "", [f"The journals have {bytes_text(size)}, {limit}. {command}"])
        if not self._turn.acquire(blocking=False):
            return Shown(429, "", ["Another account is being read; ask again."])
        try:
            done = finished(
                [sys.executable, "-c", LIMITED, "show", "--", str(where), asked],
                SHOW_SECONDS,
                lambda: not (self._stop.is_set() or cut_off()),
                {**os.environ, "COLUMNS": "", "FORCE_COLOR": "", "PYTHONIOENCODING": "utf-8"},
            )
        finally:
            self._turn.release()
        if done is None:
            return Shown(503, "", [f"Reading took longer than {SHOW_SECONDS:.0f} s and was ended. {command}"])
        if len(done.stdout) > SHOWN_CHARACTERS:
            return Shown(503, "", [f"The account is too long for a page. {command}"])
        if done.stdout:
            return Shown(200, done.stdout, done.stderr.splitlines())
        if (last := _last_line(done)).startswith("MemoryError"):
            return Shown(503, "", [f"Reading took more than the memory that it may have. {command}"])
        return Shown(404 if done.returncode == LedgerError.exit_code else 500, "", [last])

    def close(self) -> None:
        """End the process that runs."""
        self._stop.set()
