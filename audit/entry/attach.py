"""``kvledger.attach``: audit an engine of this process, for notebooks and tests.

    with kvledger.attach(llm) as audit:
        llm.generate(...)
    audit.violations

The events stay in memory; ``audit.save(folder)`` writes them as a journal. Leaving the block restores every
wrapped attribute. What :mod:`kvledger.exporters.notebook` adds are the answers of the commands.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..checks.auditor import Auditor, Found, Listed, Verdict
from ..checks.coverage import Coverage, count_words, ledger_coverage, verdict_words
from ..checks.registry import Violation
from ..engines import LEVELS, choose, host_version, is_scheduler
from ..engines.content.attached import worker_of
from ..engines.v1_since_0_27 import V1Observer
from ..errors import LedgerError
from ..events import AnyEvent, Event, Gap
from ..figures.totals import Totals
from ..hooks import EngineMismatch
from ..journal.recorder import MemoryRecorder, write_journal
from ..journal.writer import JournalWriter
from ..ledger.account import Account, AccountStatement
from ..ledger.ledger import Ledger
from ..release_semantics import has_random_suffix
from ..replay.find import pick_request
from .weights import WeightsOfRequest, weights_of_request

if TYPE_CHECKING:
    from ..journal.recorder import Recorder

Kind = TypeVar("Kind", bound="LiveAudit")


class AuditError(AssertionError):
    """A step broke an invariant under ``strict=True``; ``violation`` is the finding."""

    def __init__(self, violation: Violation) -> None:
        super().__init__("\n".join([f"{violation.id}: {violation.message}", *violation.story]))
        self.violation = violation


class LiveAudit(Listed):
    """One attached scheduler and its accounts so far. Several threads may read it while the engine runs."""

    def __init__(self, scheduler: Any, worker: Any, *, strict: bool, level: str, stacks: bool) -> None:
        self._strict = strict
        """Whether a violation raises at its step."""
        self._sink = MemoryRecorder()
        """Events that are not audited yet."""
        self._events: list[bytes] = []
        """All events so far, encoded, for :meth:`save`."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._lock = threading.RLock()
        """Held while events are audited, and while something is read off what they add up to."""
        self._auditor = Auditor(keep_closed=True)
        observer_class = choose(scheduler)
        self._observer = observer_class(
            scheduler, self._sink, version=host_version(scheduler), level=level, stacks=stacks
        )
        self._observer.start(self._boundary if strict else None)
        self._observer.weights.watch_model(worker)
        if isinstance(self._observer, V1Observer):
            self._observer.watch_worker()
            if level == "content":
                self._observer.watch_content(worker)

    def _findings(self) -> list[Violation]:
        with self._caught_up() as auditor:
            return list(auditor.violations)

    @property
    def found(self) -> list[Found]:
        """How many findings each invariant has; exact also where the two lists are cut."""
        with self._caught_up() as auditor:
            return auditor.totals

    @property
    def coverage(self) -> Coverage:
        """What was examined so far, and what was not."""
        with self._caught_up() as auditor:
            return ledger_coverage(auditor.ledger)

    def __repr__(self) -> str:
        """The verdict, what it covers, and the number of findings."""
        return f"{verdict_words(self.verdict, self.coverage)}. {count_words(self.found)}"

    @property
    def ledger(self) -> Ledger:
        """The ledger after all events so far; it changes as the engine runs."""
        with self._caught_up() as auditor:
            return auditor.ledger

    @property
    def totals(self) -> Totals:
        """Sums over all accounts so far."""
        with self._caught_up() as auditor:
            return auditor.ledger.totals()

    @property
    def verdict(self) -> Verdict:
        """``clean``, ``violated`` or ``unknown``."""
        with self._caught_up() as auditor:
            return auditor.verdict

    def account(self, request_id: str) -> AccountStatement:
        """The account statement of one request, by any id that its client knows.

        That is the engine's id, the id of the response, its ``X-Request-Id``, or a trace id. Raises
        LedgerError if no observed request has that name, or several have, as the samples of a call.
        """
        with self._caught_up():
            return self._account(request_id).freeze()

    def _account(self, request_id: str) -> Account:
        accounts = list(self._auditor.ledger.accounts())
        hints = [account.request_id for account in accounts]
        observer = self._observer
        suffixed = has_random_suffix(observer.ENGINE, observer.version)
        return pick_request(request_id, accounts, hints, "this audit", suffixed=suffixed)

    def weights(self, request_id: str) -> WeightsOfRequest:
        """Under which weights the tokens of one request were computed, and which outputs are suspect.

        The request is named as for :meth:`account`.
        """
        self._observer.weights.look_now()
        with self._caught_up() as auditor:
            return weights_of_request(auditor.ledger.weights, self._account(request_id))

    def save(self, folder: str | Path) -> Path:
        """Write the events so far as a journal, for every command; returns its folder. Raises LedgerError.

        A journal that is saved before the end counts its open requests as unknown.
        """
        try:
            self._write(Path(folder)).close()
        except OSError as error:
            raise LedgerError(f"{folder} can't be written: {error.strerror}.") from error
        return Path(folder)

    def _write(self, folder: Path) -> JournalWriter:
        decode = msgspec.msgpack.Decoder(list[AnyEvent]).decode
        with self._caught_up():
            every = list(self._events)
        return write_journal(folder, (list[Event](decode(encoded)) for encoded in every))

    def detach(self) -> None:
        """Restore every wrapped attribute; the accounts stay readable. Idempotent."""
        self._observer.stop("detached")
        with self._lock:
            self._catch_up()

    def __enter__(self: Kind) -> Kind:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    @contextmanager
    def _caught_up(self) -> Iterator[Auditor]:
        """The auditor after all events so far, which no other thread feeds meanwhile."""
        with self._lock:
            self._catch_up()
            yield self._auditor

    def _catch_up(self) -> list[Violation]:
        new: list[Violation] = []
        if self._observer.pools is not None:
            self._observer.pools.emit_all_calls()
        if self._observer.content is not None:
            self._observer.content.emit_counts()
        events = self._sink.take()
        if events:
            self._keep(events)
        for event in events:
            new += self._auditor.feed(event)
        return new

    def _keep(self, events: list[Event]) -> None:
        """Keep the events for reports. Never raises: the engine may be waiting."""
        try:
            self._events.append(self._encode(events))
        except Exception:  # such as a request id that is no Unicode
            self._events.append(self._encode([Gap(events[-1].at, len(events), "not encodable")]))

    def _boundary(self) -> None:
        with self._lock:
            new = self._catch_up()
        for violation in new:
            if violation.severity == "violation":
                raise AuditError(violation)


def attach(target: object, *, strict: bool = False, level: str = "tokens", stacks: bool = False) -> LiveAudit:
    """Audit a ``Scheduler``, ``EngineCore``, ``LLMEngine`` or ``LLM`` of vLLM, or a ``Scheduler`` of SGLang.

    The scheduler must be in this process.
    ``strict`` raises :class:`AuditError` at the step that violates (for tests, not for serving).
    ``level`` is ``tokens``, ``blocks`` to observe the block pool as well, or ``content`` to verify the KV in
    the blocks too; with ``stacks`` each block operation keeps its Python stack (slow, for tests).
    Raises :class:`LedgerError` if the scheduler runs in another process or is of an unknown release.
    """
    return attached(LiveAudit, target, strict=strict, level=level, stacks=stacks)


def attached(kind: type[Kind], target: object, *, strict: bool, level: str, stacks: bool) -> Kind:
    """The same, as an audit of a class."""
    if level not in LEVELS:
        raise LedgerError(f"There is no level {level!r}; it is one of {', '.join(LEVELS)}.")
    try:
        scheduler = _scheduler_of(target)
        return kind(scheduler, _worker_of(target), strict=strict, level=level, stacks=stacks)
    except EngineMismatch as mismatch:
        raise LedgerError(f"This engine can't be observed: {mismatch}.") from mismatch


def _worker_of(target: Any) -> Any:
    """vLLM's worker, if it is reachable from ``target`` in this process; else None."""
    core = target
    for name in _PATH[:-1]:
        core = getattr(core, name, core)
    return worker_of(core)


_PATH = ("llm_engine", "engine_core", "engine_core", "scheduler")


def _scheduler_of(target: Any) -> Any:
    scheduler = target
    for name in _PATH:
        scheduler = getattr(scheduler, name, scheduler)
    if not is_scheduler(scheduler):
        raise LedgerError(
            f"No scheduler is reachable from this {type(target).__name__} in this process; set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 before the engine is made, or observe it through "
            "the plugin by setting KVLEDGER_DIR."
        )
    return scheduler


# --- Recorders with new journals in ``$KVLEDGER_DIR``, for the plugin.

logger = logging.getLogger("kvledger")

_counter = itertools.count()


def recorder_in_folder(prefix: str) -> Recorder:
    """A recorder with a new journal in ``$KVLEDGER_DIR``, after old journals have made room for it."""
    from ..journal.catalogue import limits, make_room
    from ..journal.recorder import Recorder

    name = f"{prefix}-{time.time_ns() // 1_000_000}-{os.getpid()}-{next(_counter)}"
    folder, bounds = Path(os.environ["KVLEDGER_DIR"]), limits()
    for removed in make_room(folder, bounds.folder_bytes):
        logger.info("kvledger removed the journal of an ended engine, %s", removed.name)
    return Recorder(folder / name, bounds)
