"""Drives candidates in other processes, in parallel and within a budget of time.

vLLM is imported once, in a process that the workers are forks of (``traffic/processes.py``). It may run under
another interpreter, whose environment has another vLLM. A worker gets one workload a line
and answers with one outcome a line. Which candidate is taken depends on their order alone, not on how many
workers there are or which of them is done first, so a journal always shrinks to the same file.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import msgspec

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
