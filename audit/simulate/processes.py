"""Runs simulations in other processes: several at a time, and under any release's interpreter.

vLLM is imported once for each release, in a process of which the workers are forks
(``traffic/processes.py``). A worker gets one job a line and answers one line. The traffic and what a run
led to are files in a folder of the caller, because they are large.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .. import temporary
from ..errors import LedgerError
from ..release_semantics import release as parsed
from ..repro.bisect import built, given, vllm_of
from ..text import printable
from ..traffic.processes import START_SECONDS, Workers, imported, serve_lines
from ..traffic.reader import Traffic
from .rows import Run

MODULE = "kvledger.audit.simulate.processes"
LONGEST_SECONDS = 7 * 86_400.0
"""A simulation that takes longer is given up."""

PROGRESS_SECONDS = 0.5
"""How often a worker notes how far it is."""


class Job(msgspec.Struct, kw_only=True):
    """One simulation. ``traffic``, ``result`` and ``progress`` are files. Without ``traffic`` the answer is
    the release's version. ``betas`` None: by step; else microseconds of each feature of a step. ``since``:
    only requests that came then or later are counted."""

    traffic: str = ""
    result: str = ""
    progress: str = ""
    setup: dict[str, Any] = {}
    betas: list[float] | None = None
    rate: float = 1.0
    closed: bool = False
    since: int = 0


class Answer(msgspec.Struct):
    """A worker's answer. ``error``: why there is no result."""

    version: str = ""
    error: str = ""


_loaded: dict[str, Traffic] = {}
"""The traffic that this process read last, by its file."""


def answer(job: Job) -> Answer:
    """Do one job in this process."""
    try:
        from ..engines import host_version

        if not job.traffic:
            return Answer(version=imported())
        run = _run(job)
        Path(job.result).write_bytes(msgspec.msgpack.encode(run))
        return Answer(version=host_version())
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")


def _run(job: Job) -> Run:
    from .engine import Timing, by_step, by_time

    traffic = _loaded.get(job.traffic)
    if traffic is None:
        _loaded.clear()
        traffic = _loaded[job.traffic] = load(Path(job.traffic))
    noted = 0.0

    def progress(share: float) -> None:
        nonlocal noted
        now = time.monotonic()
        if job.progress and now - noted > PROGRESS_SECONDS:
            noted = now
            Path(job.progress).write_text(f"{share:.4f}")

    if job.betas is None:
        return by_step(traffic, job.setup, progress, since=job.since)
    timing = Timing(job.betas, job.rate, job.closed, job.since)
    return by_time(traffic, job.setup, timing, progress)


def load(path: Path) -> Traffic:
    """The traffic in a file."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Traffic)


def serve() -> None:
    """Answer jobs from standard input until it ends, and fork workers that do the same."""
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Job).decode
    serve_lines(lambda line: encode(answer(decode(line))))


class Simulators:
    """The workers of one release: as many as ``workers``, each started when it is first needed."""

    def __init__(self, command: Sequence[str], workers: int) -> None:
        self._command = tuple(command)
        self._workers = Workers(self._command, workers, MODULE)
        self.version = ""
        """The release's version; "" until it was asked."""

    def start(self) -> str:
        """Import vLLM and return its version. Raises LedgerError."""
        found = _answered(self._workers.parent.line.ask(msgspec.json.encode(Job()), START_SECONDS))
        if found.error:
            raise LedgerError(f"vLLM's scheduler can't be built by {' '.join(self._command)}: {found.error}")
        self.version = found.version
        return found.version

    def run(self, job: Job) -> Run:
        """One simulation; waits for a worker. Raises LedgerError."""
        found = _answered(self._workers.ask(msgspec.json.encode(job), LONGEST_SECONDS))
        if found.error:
            raise LedgerError(f"the simulation failed: {found.error}")
        return msgspec.msgpack.decode(Path(job.result).read_bytes(), type=Run)

    def stop(self) -> None:
        """End all processes."""
        self._workers.stop()


def _answered(line: bytes | None) -> Answer:
    return Answer(error="the process ended") if line is None else msgspec.json.decode(line, type=Answer)


class Away(NamedTuple):
    """A simulation for another machine. ``command`` stands in front of the interpreter's options; (): that of
    the other machine's own process."""

    command: tuple[str, ...]
    job: Job


def run_away(order: Away, traffic: bytes) -> tuple[str, bytes | str]:
    """Simulate in this process's machine: the release's version, and the encoded run or why there is none.

    The traffic is encoded.
    """
    with temporary.folder("kvledger-simulate-") as folder:
        place = Path(folder)
        (place / "traffic").write_bytes(traffic)
        job = msgspec.structs.replace(
            order.job, traffic=str(place / "traffic"), result=str(place / "result"), progress=""
        )
        command = order.command or (sys.executable,)
        simulators = Simulators(command, 1)
        try:
            version = simulators.start()
            return version, msgspec.msgpack.encode(simulators.run(job))
        except LedgerError as error:
            return simulators.version, str(error)
        finally:
            simulators.stop()


def each_done(
    jobs: Sequence[tuple[Any, Simulators, Job]], workers: int, look: Any = None
) -> Iterator[tuple[Any, Run | LedgerError]]:
    """The key of each job and what it led to, in the order in which they end. ``look``: called while it
    waits."""
    threads = ThreadPoolExecutor(max(1, workers))
    try:
        waiting: dict[Future[Run], Any] = {
            threads.submit(simulators.run, job): key for key, simulators, job in jobs
        }
        while waiting:
            done, _ = wait(waiting, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
            if look is not None:
                look()
            for future in done:
                error = future.exception()
                if error is not None and not isinstance(error, LedgerError):
                    raise error
                yield waiting.pop(future), error if error is not None else future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def shares(files: Sequence[Path]) -> list[float]:
    """How far the jobs with these progress files are."""
    found = []
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            found.append(float(file.read_text()))
    return found


def same_release(one: str, other: str) -> bool:
    """Whether two versions name one release, whatever a build adds."""
    return one.partition("+")[0] == other.partition("+")[0]


# --- which interpreter has a release ---------------------------------------------------------------------


class Environments:
    """The interpreter of each release."""

    def __init__(self, pythons: Sequence[str]) -> None:
        self._given = given(pythons)
        """Releases by ``--python``."""
        self._here = ""
        """The release that this interpreter has; "" until it was asked."""

    def command(self, release: str) -> Sequence[str]:
        """What stands in front of the options of the interpreter. "": the release that runs here.

        Raises LedgerError.
        """
        if not release:
            if self.here == "none":
                raise LedgerError("there is no vLLM here: name a release, and its interpreter with --python")
            return (sys.executable,)
        for each in self._given:
            if same_release(each.release.partition(" ")[0], release):
                return each.command
        if same_release(self.here, release):
            return (sys.executable,)
        plain = release.partition("+")[0]
        if not parsed(plain):
            raise LedgerError(f"{printable(release)!r} is no release of vLLM, such as 0.24.0")
        try:
            [environment] = built(Path(), plain)
        except (LedgerError, ValueError):
            raise LedgerError(
                f"there is no environment with vLLM {plain}: give the interpreter of one with "
                f"--python {plain}=INTERPRETER"
            ) from None
        return environment.command

    @property
    def here(self) -> str:
        """The release that this interpreter has, or "none"."""
        if not self._here:
            try:
                self._here = vllm_of(sys.executable)
            except LedgerError:
                self._here = "none"
        return self._here

    def between(self, first: str, last: str) -> list[str]:
        """The releases between two others of which there is an environment, in the order from the one to the
        other."""
        low, high = sorted((parsed(first), parsed(last)))
        names = [each.release.partition(" ")[0] for each in self._given]
        names += [] if self.here == "none" else [self.here]
        with contextlib.suppress(LedgerError):  # not in a checkout, or none is built
            names += [each.release for each in built(Path(), f"{_text(low)}..{_text(high)}")]
        found = {parsed(name): name for name in reversed(names) if low < parsed(name) < high}
        return [found[number] for number in sorted(found, reverse=parsed(first) > parsed(last))]


def _text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))
