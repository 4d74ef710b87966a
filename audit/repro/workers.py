"""Drives candidates in other processes, in parallel and within a budget of time.

vLLM is imported once, in a process that the workers are forks of (``traffic/processes.py``). It may run under
another interpreter, whose environment has another vLLM. A worker gets one workload a line
and answers with one outcome a line. Which candidate is taken depends on their order alone, not on how many
workers there are or which of them is done first, so a journal always shrinks to the same file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import IO, Any

import msgspec

from .. import temporary
from ..errors import LedgerError
from ..traffic.processes import START_SECONDS, Workers, imported, serve_lines
from ..traffic.script import Workload
from .drive import Outcome, drive

LONGEST_DRIVE_SECONDS = 60.0
"""A candidate that takes longer is given up: the scheduler may run without end."""

MODULE = "kvledger.audit.repro.workers"
ENDED = "the worker ended, or the scheduler did not return"
NO_ANSWER = "the process ended, or did not import vLLM within {:.0f} s"


class OutOfTime(Exception):
    """The budget is spent."""


class Job(msgspec.Struct):
    """What a worker is asked for. Without a workload it answers with its vLLM's version.

    ``v0``: the workloads are for the v0 scheduler.
    """

    finding: str = ""
    workload: Workload | None = None
    statement: bool = False
    v0: bool = False


class Answer(msgspec.Struct):
    """A worker's answer: an outcome, or why there is none."""

    outcome: Outcome | None = None
    version: str = ""
    error: str = ""


def answer(job: Job) -> Answer:
    """Do one job in this process."""
    try:
        if job.workload is None:
            return Answer(version=imported(v0=job.v0))
        return Answer(drive(job.workload, job.finding, statement=job.statement))
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")


def serve() -> None:
    """Answer jobs from standard input until it ends, and fork workers that do the same."""
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Job).decode
    serve_lines(lambda line: encode(answer(decode(line))))


class Pool:
    """Drives workloads until ``deadline`` (of ``time.monotonic``). ``workers`` 0: in this process."""

    def __init__(self, workers: int, python: str = sys.executable, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        self.driven = 0
        """How many candidates were driven."""
        self.failed = 0
        """How many of them could not be driven, ``error`` says why the first could not."""
        self.error = ""
        """Why the first of them could not be driven."""
        self.on_driven: Callable[[], None] | None = None
        """Called after each candidate."""
        self._known: dict[bytes, Answer] = {}
        """Answers by encoded job."""
        self.workers = Workers((python,), workers, MODULE) if workers else None
        """Drive the candidates; None: this process does."""
        self._threads = ThreadPoolExecutor(workers) if workers else None
        """One thread for each worker, which waits for its answer."""

    def version(self, *, v0: bool = False, seconds: float = START_SECONDS) -> str:
        """The vLLM version of the workers, once they have imported it; they may take ``seconds``."""
        job = msgspec.json.encode(Job(v0=v0))
        if self.workers is None:
            found = answer(Job(v0=v0))
        else:
            seconds = min(max(seconds, 0.001), START_SECONDS)
            line = self.workers.parent.line.ask(job, seconds)
            found = (
                msgspec.json.decode(line, type=Answer) if line else Answer(error=NO_ANSWER.format(seconds))
            )
        if not found.version:
            raise LedgerError(f"kvledger repro can't build vLLM's scheduler here: {found.error}.")
        if self._threads is not None and self.workers is not None:
            # Where vLLM has threads nothing can fork, and each worker imports it.
            list(self._threads.map(lambda worker: worker.ask(job, START_SECONDS), self.workers.all))
        return found.version

    def drive(self, workload: Workload, finding: str, *, statement: bool = False) -> Outcome | None:
        """Drive one workload, whatever the deadline."""
        return self._ask(Job(finding, workload, statement), LONGEST_DRIVE_SECONDS).outcome

    def first(
        self, workloads: Iterable[Workload], finding: str, accept: Callable[[Workload, Outcome], bool]
    ) -> tuple[Workload, Outcome] | None:
        """The first of the workloads, in order, whose outcome is accepted. Raises :class:`OutOfTime`."""
        for workload, found in self._in_order(workloads, finding):
            self.driven += 1
            if self.on_driven is not None:
                self.on_driven()
            if found.outcome is None:
                self.failed += 1
                self.error = self.error or found.error
            elif accept(workload, found.outcome):
                return workload, found.outcome
        return None

    def _in_order(self, workloads: Iterable[Workload], finding: str) -> Iterator[tuple[Workload, Answer]]:
        """Every workload and its answer in order; as many are under way as there are workers."""
        jobs = iter(workloads)
        if self._threads is None:
            for workload in jobs:
                self._check_time()
                yield workload, self._ask(Job(finding, workload), LONGEST_DRIVE_SECONDS)
            return
        waiting: list[tuple[Workload, Future[Answer]]] = []
        ahead = 2 * self._threads._max_workers
        try:
            while True:
                for workload in itertools.islice(jobs, ahead - len(waiting)):
                    job = Job(finding, workload)
                    waiting.append((workload, self._threads.submit(self._ask, job, LONGEST_DRIVE_SECONDS)))
                if not waiting:
                    return
                self._check_time()
                workload, future = waiting.pop(0)
                yield workload, _result(future, self.deadline)
        finally:
            for _, future in waiting:
                future.cancel()

    def _check_time(self) -> None:
        if time.monotonic() >= self.deadline:
            raise OutOfTime

    def _ask(self, job: Job, seconds: float) -> Answer:
        key = msgspec.json.encode(job)
        known = self._known.get(key)
        if known is not None:
            return known
        if self.workers is None:
            found = answer(job)
        else:
            line = self.workers.ask(key, seconds)
            found = msgspec.json.decode(line, type=Answer) if line is not None else Answer(error=ENDED)
        self._known[key] = found
        return found

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.workers is not None:
            self.workers.stop()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[Answer], deadline: float) -> Answer:
    try:
        return future.result(timeout=max(0.0, deadline - time.monotonic()))
    except FutureTimeout:
        raise OutOfTime from None


# --- Runs a generated file: without network, in a folder of its own, with bounded memory and time.
#
# Such a file holds text of a journal as constants only (``exporters/repro/pytest_file.py`` sees to that).
# What is here holds even if that law were broken. It hides no files: the file runs as the user.

LAUNCHER = Path(__file__).with_name("launcher.py")

LIMIT_SECONDS = 600.0
"""Importing vLLM took up to five minutes where ten processes shared two cores."""
MEMORY_BYTES = 8 << 30
"""Private memory of each process. A scheduler of vLLM takes 0.6 GiB, with CUDA's libraries some more."""
FILE_BYTES = 64 << 20
"""The longest file that it can write, its output included."""
READ_BYTES = 1 << 20
"""What is read of its output, from the end."""


class Ended(msgspec.Struct, frozen=True):
    """How a process ended. ``code`` None: it was ended because its time was over."""

    code: int | None
    out: str
    err: str
    seconds: float


@functools.cache
def network_open() -> str:
    """Why a process can't be kept from the network here; empty: it can."""
    asked = subprocess.run([sys.executable, "-I", str(LAUNCHER)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if not asked.returncode else "the attempt failed"


def bounds(limit: float = LIMIT_SECONDS) -> str:
    """What holds for a file that runs here for ``limit`` seconds at most, in a sentence."""
    network = (
        f"with your network, which can't be closed here ({network_open()})"
        if network_open()
        else "without network"
    )
    return f"{network}, in an empty folder, with at most {MEMORY_BYTES >> 30} GiB of memory and {limit:.0f} s"


def run(command: Sequence[str], limit: float = LIMIT_SECONDS, importable: Sequence[str | Path] = ()) -> Ended:
    """Run a command, and end what it leaves behind. ``importable``: folders whose modules it may import."""
    program = shutil.which(command[0])
    if program is None:
        raise LedgerError(f"{command[0]} can't be run: there is no such program")
    began = time.monotonic()
    with temporary.folder() as place, contextlib.ExitStack() as files:
        work = Path(place, "work")
        work.mkdir()
        out, err = (files.enter_context(open(Path(place, each), "w+b")) for each in ("out", "err"))
        launch = [sys.executable, "-I", str(LAUNCHER), "open" if network_open() else "closed"]
        launch += [str(MEMORY_BYTES), str(FILE_BYTES), str(int(limit + 1) * (os.cpu_count() or 1))]
        process = subprocess.Popen(
            [*launch, os.path.abspath(program), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=work,
            env=_environ(work, importable),
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(code, _end(out), _end(err), time.monotonic() - began)


def _environ(work: Path, importable: Sequence[str | Path]) -> dict[str, str]:
    """This process's environment with the folder as home; packages of the user's home are still found."""
    ours = ("KVLEDGER_", "XDG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    base = environ.get("PYTHONUSERBASE") or site.getuserbase()
    found = [*importable, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, found))} if found else {}
    return environ | paths | {"HOME": str(work), "TMPDIR": str(work), "PYTHONUSERBASE": base}


def _end(file: IO[bytes]) -> str:
    """The end of what was written."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
    return file.read().decode(errors="replace")
