"""Journals replayed: each into a book of its own, books together into one audit.

The outer ring: this module reads files. A :class:`EngineAudit` is also what a live journal is followed
into, so that its figures of ended requests only ever rise. Memory is bounded by open requests: an
account is summed up when it closes, and let go unless somebody keeps it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..analysis.reconciliation import EngineCounters, Reconciliation
from ..causes import ENGINE_ENDED, UNKNOWN
from ..checks.auditor import Auditor, Verdict
from ..checks.registry import Violation
from ..errors import LedgerError
from ..events import EngineStarted, Event, Finished
from ..journal.folder import Batch, Reader, find_journals
from ..ledger.account import Account, Line, Statement
from ..ledger.ledger import Totals, Watch
from .metrics_state import TALLIED, MetricsState
from .parallel import Run, here, is_remote
from .windows import EVERYTHING, Window
from .worker_journals import AFTER_PLANNING, Workers

if TYPE_CHECKING:
    from ..release_semantics import Meaning

Severity: tuple[Verdict, ...] = ("clean", "unknown", "violated")
"""Verdicts, the worse ones last."""

JOURNAL = "journal"
"""The folder of journals inside one that a demo leaves."""

HINTS = 10_000
"""How many request ids are remembered, so as to suggest one for a mistyped one."""


class EngineAudit:
    """One engine's journal, audited, with the sums of what has ended.

    ``closed`` are the totals of ended requests, ``requests`` their number by verdict and outcome,
    ``unknown`` the number of unknown ones by the reason; with a ``window`` only of those in it.
    ``tallies`` is what metrics need beyond, whatever the window; without ``tally`` it stays empty.
    ``on_closed`` are told of every account that closes, with its verdict, before it is let go.
    ``beside`` is what the engine's own counters say, for whoever scrapes them.
    ``read_seconds`` is when the journal was last read to its end (0.0: never), Unix time,
    ``checkpoint_seconds`` when this was last saved.
    ``keep`` keeps every account in ``accounts``; ``watch(request_id)`` keeps the accounts, and
    their statements' lines, of those that it names.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: bool = False,
        watch: Watch | None = None,
        window: Window = EVERYTHING,
        tally: bool = True,
    ) -> None:
        self.path = path
        self.window = window
        self.tallies = MetricsState()
        self.auditor = Auditor(keep_closed=True, watch=watch, sighted=self._sighted)
        self.requests: dict[tuple[str, str], int] = {}
        self.reconciliation = Reconciliation()
        self.accounts: list[Account] = []
        self.notes: list[str] = []
        self.events = 0
        self.unknown: dict[str, int] = {}
        self.on_closed: list[Callable[[Account, Verdict], None]] = []
        self.beside: EngineCounters | None = None
        self.workers = Workers(path)
        self.read_seconds = 0.0
        self.checkpoint_seconds = 0.0
        self._keep = keep
        self._tally = tally
        self._chosen = Totals()
        self._found: dict[str, bool] = {}

    def feed(self, number: int, event: Event) -> list[Violation]:
        """Audit one event; the findings that are new."""
        auditor = self.auditor
        heard: list[Violation] = []
        if 0 <= self.workers.next_step <= auditor.ledger.step and type(event) in AFTER_PLANNING:
            heard = self._hear_workers()
        found = auditor.feed(event, number)
        if heard:
            found = heard + found
        tally = TALLIED.get(type(event)) if self._tally else None
        if tally is not None:
            tally(self.tallies, event, auditor.ledger.named)
        if found and self.window.bounded:
            self._found.update(dict.fromkeys((v.request for v in found if v.request), False))
        if auditor.ledger.closed:
            self._take_closed(event)
        return found

    def _hear_workers(self) -> list[Violation]:
        """Audit what workers did in the steps up to now; the findings that are new."""
        ledger = self.auditor.ledger
        return [
            violation
            for event in self.workers.upto(ledger.step)
            for violation in self.auditor.feed(replace(event, at=ledger.at), ledger.number)
        ]

    def read(self, reader: Reader, lock: AbstractContextManager[object] | None = None) -> None:
        """Audit what the journal holds by now, holding ``lock`` for a batch at a time."""
        for _ in self.batches(reader, lock):
            pass

    def batches(
        self, reader: Reader, lock: AbstractContextManager[object] | None = None
    ) -> Iterator[tuple[Batch, list[Violation]]]:
        """As :meth:`read`, giving each batch when it is audited, with the findings that are new."""
        feed, hold = self.feed, lock or nullcontext()
        begun = time.time()
        asked = False
        for batch in reader.poll():
            found: list[Violation] = []
            with hold:
                if not asked and (started := self.engine or _started(batch)) is not None:
                    self.workers.poll(started.configuration.get("transfer"))
                    asked = True
                number = batch.first_event
                for event in batch.events:
                    new = feed(number, event)
                    if new:
                        found += new
                    number += 1
                self.events += len(batch.events)
            yield batch, found
        if reader.ended:
            with hold:
                self._hear_workers()
                self.workers.close()
        self.read_seconds = begun  # what came since may not have been seen

    def _take_closed(self, event: Event | None = None) -> None:
        closed = self.auditor.ledger.closed
        bounded = self.window.bounded
        for account in closed.values():
            verdict = self._verdict(account)
            kind = (verdict, account.outcome or UNKNOWN)
            if self._tally:
                self.tallies.close(account, verdict, event)
            self.auditor.violating.discard(account.request)
            if bounded and not self._choose(account):
                continue
            self.requests[kind] = self.requests.get(kind, 0) + 1
            self._sort(account)
            for tell in self.on_closed:
                tell(account, verdict)
        closed.clear()

    def _sighted(self, id: str, at: int, account: Account | None) -> None:
        self.tallies.sighted(id, at, account)

    def _choose(self, account: Account) -> bool:
        """Whether a request that ended is in the window; then it is in the sums."""
        has = self.window.has(account, self.began_seconds)
        if has:
            self._chosen.add(account)
        if account.request_id in self._found:
            self._found[account.request_id] = has
        return has

    def _sort(self, account: Account) -> None:
        self.reconciliation.add(account)
        if account.unknown is not None:
            self.unknown[account.unknown] = self.unknown.get(account.unknown, 0) + 1
        if self._keep or account.lines is not None:
            self.accounts.append(account)

    def _verdict(self, account: Account) -> Verdict:
        if account.request in self.auditor.violating:
            return "violated"
        return "unknown" if account.unknown is not None else "clean"

    def end(self, *, stopped: bool) -> None:
        """The engine is gone, and its open requests with it.

        They ended there if observation did so in good order (``stopped``), and where nobody saw it if
        not, or if the engine went on unobserved. Called at the end of a journal that was followed.
        """
        ledger = self.auditor.ledger
        if not stopped or ledger.stopped == "detached":
            ledger.lose_open()
            self._take_closed()
        for request in list(ledger.open):
            self.feed(ledger.number, Finished(ledger.at, request, ENGINE_ENDED, -1, -1, -1, -1, -1))
        ledger.forget_steps()

    def absorb(self, other: EngineAudit) -> None:
        """Add the sums of another engine, which has ended, so that it can be let go."""
        self.auditor.absorb(other.auditor)
        self.reconciliation.merge(other.reconciliation)
        self.tallies.merge(other.tallies)
        self.events += other.events
        for kind, requests in other.requests.items():
            self.requests[kind] = self.requests.get(kind, 0) + requests
        for reason, requests in other.unknown.items():
            self.unknown[reason] = self.unknown.get(reason, 0) + requests

    def remark(self, reader: Reader) -> None:
        """Note how ``reader`` came to its end."""
        self.notes += [str(damage) for damage in reader.damage]
        if not reader.ended:
            self.notes.append("the engine is alive, this is up to now")
        elif not reader.stopped:
            self.notes.append("the engine did not end in good order, its last moments may be missing")

    def finish(self) -> None:
        """No more will come: reconcile what is still open as it stands."""
        for account in self.open():
            self._sort(account)

    def open(self) -> list[Account]:
        """The accounts that are still open, as they stand; none where the window has an end."""
        found = list(self.auditor.ledger.open.values()) if self.window.until is None else []
        for account in found:
            if account.request_id in self._found:
                self._found[account.request_id] = True
        return found

    def totals(self) -> Totals:
        """Sums over all requests, open ones included."""
        if not self.window.bounded:
            return self.auditor.ledger.totals()
        totals = self._chosen.copy()
        for account in self.open():
            totals.add(account)
        return totals

    @property
    def violations(self) -> list[Violation]:
        """Findings, drifts too, in requests of the window; those of no request by when they were seen."""
        found = self.auditor.violations
        if not self.window.bounded:
            return found
        self.open()
        began = self.began_seconds or 0.0
        return [
            violation
            for violation in found
            if (
                self._found.get(violation.request, False)
                if violation.request
                else self.window.holds(began + violation.at / 1e6)
            )
        ]

    @property
    def verdict(self) -> Verdict:
        """``violated`` for a violation in the window, else ``unknown`` where there are doubts."""
        if not self.window.bounded:
            return self.auditor.verdict
        violated = any(verdict == "violated" for verdict, _ in self.requests)
        if violated or any(violation.severity == "violation" for violation in self.violations):
            return "violated"
        return "unknown" if self.doubts else "clean"

    @property
    def doubts(self) -> list[str]:
        """Why the verdict can't be clean. What was lost counts for every window."""
        return self.auditor.doubts_with(self.totals().unknown_requests)

    @property
    def closed(self) -> Totals:
        """Totals of the requests that have ended."""
        return self._chosen if self.window.bounded else self.auditor.ledger.ended

    @property
    def began_seconds(self) -> float | None:
        """Unix time of the instant from which the journal's times count; None: not seen."""
        return None if self.engine is None else self.engine.began_seconds

    @property
    def remarks(self) -> list[str]:
        """How it was read, and why its verdict can't be clean."""
        reasons = [f"in {requests} of them: {reason}" for reason, requests in self.unknown.items()]
        return [*self.notes, *self.doubts, *reasons]

    @property
    def engine(self) -> EngineStarted | None:
        """What the engine said of itself when it started."""
        return self.auditor.ledger.engine

    @property
    def created(self) -> float:
        """Since when its sums count, Unix time: the start of the engine, or of what was left to read."""
        return self.engine.wall_seconds if self.engine else 0.0

    @property
    def model(self) -> str:
        """The model that the engine serves, "" where that was not said."""
        return str(self.engine.configuration.get("model", "")) if self.engine else ""

    @property
    def meanings(self) -> dict[str, str]:
        """By figure that the engine reports, what its release means by it."""
        return {figure: row.says for figure, row in self._meanings().items()}

    @property
    def words(self) -> dict[str, str]:
        """As :attr:`meanings`, each in a word for machines."""
        return {figure: row.word for figure, row in self._meanings().items()}

    def _meanings(self) -> dict[str, Meaning]:
        from ..release_semantics import meanings

        if self.engine is None:
            return {}
        return meanings(self.engine.version, v0=self.engine.adapter.startswith("v0"))

    @property
    def name(self) -> str:
        """The engine's name in findings and labels."""
        return self.auditor.engine or self.path.name


def _started(batch: Batch) -> EngineStarted | None:
    return next((event for event in batch.events if isinstance(event, EngineStarted)), None)


class Audit:
    """The audit of one journal or several, one :class:`EngineAudit` each."""

    def __init__(self, books: list[EngineAudit]) -> None:
        self.books = books

    @property
    def verdict(self) -> Verdict:
        """The worst of the books' verdicts."""
        return max((book.verdict for book in self.books), key=Severity.index)

    @property
    def totals(self) -> Totals:
        """Sums over all accounts of all engines."""
        totals = Totals()
        for book in self.books:
            totals.merge(book.totals())
        return totals

    @property
    def reconciliation(self) -> Reconciliation:
        """All engines' figures, reconciled."""
        merged = Reconciliation()
        for book in self.books:
            merged.merge(book.reconciliation)
        return merged

    @property
    def violations(self) -> list[Violation]:
        """All findings, drifts too, by engine and first sight."""
        return [violation for book in self.books for violation in book.violations]

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how it was read: torn tails, doubts. Named where several."""
        if len(self.books) == 1:
            return self.books[0].remarks
        return [f"{book.path.name}: {note}" for book in self.books for note in book.remarks]


def audit_paths(
    paths: Iterable[Path],
    *,
    keep: bool = False,
    watch: Watch | None = None,
    window: Window = EVERYTHING,
    tally: bool = True,
    run: Run = here,
) -> Audit:
    """Replay every journal at or under ``paths``. Raises :class:`LedgerError` if there is none.

    ``run`` says who replays them; what is kept and watched must be replayed here.
    """
    return Audit(list(run(partial(_replay, keep=keep, watch=watch, window=window, tally=tally), find(paths))))


def find(paths: Iterable[Path]) -> list[Path]:
    """Every journal at or under ``paths``, each once. Raises :class:`LedgerError` if there is none.

    An address elsewhere is taken for a journal's. A path that is not there and has ``*``, ``?`` or
    ``[`` in it is a pattern, as in a shell.
    """
    return list(dict.fromkeys(journal for path in paths for one in named(path) for journal in _journals(one)))


def named(path: Path) -> list[Path]:
    """The path itself, or what there is for it as a pattern."""
    if is_remote(path) or not has_magic(str(path)) or path.exists():
        return [path]
    found = sorted(map(Path, glob(str(path), recursive=True)))
    if not found:
        raise LedgerError(f"Nothing is called {path}.")
    return found


def _journals(path: Path) -> list[Path]:
    """The journals at or under ``path``, or under those of the demo that left this folder."""
    if is_remote(path):
        return [path]
    try:
        return find_journals([path])
    except LedgerError:
        if not os.path.isdir(path / JOURNAL):  # which is false where nobody may look
            raise
        return find_journals([path / JOURNAL])


def _replay(path: Path, *, keep: bool, watch: Watch | None, window: Window, tally: bool) -> EngineAudit:
    book = EngineAudit(path, keep=keep, watch=watch, window=window, tally=tally)
    with Reader(path) as reader:
        book.read(reader)
        book.remark(reader)
    book.finish()
    return book


class RequestStatement:
    """One request's account with every posting on it, and what was found in it."""

    def __init__(self, book: EngineAudit, account: Account) -> None:
        self.engine = book.name
        self.path = book.path
        self.account: Statement = account.freeze()
        self.lines: list[Line] = account.lines or []
        self.findings = [
            violation for violation in book.auditor.violations if violation.request == account.request_id
        ]


def statement(
    paths: Sequence[Path], request_id: str, *, window: Window = EVERYTHING, run: Run = here
) -> RequestStatement:
    """Replay ``paths`` for one request: by its id, the client's id, or a beginning that only one has.

    vLLM appends ``-`` and eight digits to the id that its client gave or got. Of several requests
    of one id the last is taken. ``run`` must be in this process. Raises :class:`LedgerError` if there is
    none, or more than one.
    """
    seen: list[str] = []

    def watched(name: str) -> bool:
        if len(seen) < HINTS:
            seen.append(name)
        return name.startswith(request_id)

    audit = audit_paths(paths, watch=watched, window=window, run=run)
    found = [(book, account) for book in audit.books for account in book.accounts]
    names = {account.request_id for _, account in found}
    name = pick(request_id, names, seen, ", ".join(map(str, paths)))
    return RequestStatement(*[pair for pair in found if pair[1].request_id == name][-1])


def pick(request_id: str, names: set[str], hints: Sequence[str], where: str) -> str:
    """The one of ``names`` that ``request_id`` means: itself, else ``request_id-...``, else a beginning.

    Raises :class:`LedgerError` if there is none, with some of ``hints``, or more than one.
    """
    names = {name for name in names if name.startswith(request_id)}
    for narrower in ({request_id}, {name for name in names if name.startswith(f"{request_id}-")}):
        names = names & narrower or names
    if not names:
        hint = ", ".join(_close(request_id, hints))
        raise LedgerError(f"No request of {where} is called {request_id!r}; there are {hint or 'none'}.")
    if len(names) > 1:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        raise LedgerError(f"{len(names)} requests begin with {request_id!r}: {shown}.")
    return names.pop()


def _close(request_id: str, seen: Sequence[str]) -> Sequence[str]:
    """A few names worth trying."""
    return get_close_matches(request_id, seen, n=3, cutoff=0.5) or seen[:3]
