"""Replay whole journals: batch by batch, account by account, or several into one audit.

Every report that needs more than sums reads a journal with :func:`each_batch` or :func:`each_account`.
A journal that an engine is still writing to is followed with :meth:`EngineAudit.batches` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..analysis.calls import FoundRequests
from ..analysis.source_differences import Reconciliation
from ..checks.auditor import Verdict
from ..checks.coverage import Coverage, of_all
from ..checks.findings import Found, together
from ..checks.registry import Violation
from ..client_ids import rank
from ..figures.totals import Totals
from ..journal.host_folders import journal_name
from ..journal.reader import Position, Reader
from ..ledger.account import Account, AccountStatement, Line
from ..ledger.ledger_state import Watch
from ..pool_calls import AnyEvent
from ..text import shown_id, utc
from .engine_audit import EngineAudit
from .event_journals import compare_events
from .find import journals_at, pick_request, pick_requests
from .observed import ObserverKind
from .observers import KeptAccounts, Reconciled, taken
from .parallel import Run, here, readable
from .request_span import request_span
from .shared_transfers import compare_transfers
from .window_start import skip_to_window
from .windows import EVERYTHING, Window

VERDICT_ORDER: tuple[Verdict, ...] = ("clean", "unknown", "violated")
"""Verdicts, the worst one last."""

HINTS = 10_000
"""How many request ids are remembered to suggest one for a mistyped id."""


class ReplayedBatch(NamedTuple):
    """What one batch of a journal added to an audit.

    ``accounts`` closed in this batch. The last batch of :func:`each_batch` has no events: its accounts
    are the requests that are still open at the journal's end.
    """

    events: list[AnyEvent]
    findings: list[Violation]
    accounts: list[Account]


def each_batch(audit: EngineAudit, start: Position | None = None) -> Iterator[ReplayedBatch]:
    """Replay the journal of ``audit`` to its end, one batch at a time, from ``start`` if the audit is there.

    ``audit`` must have an observer that keeps accounts; they are taken from it, so memory is bounded by open
    requests. ``audit.last_at`` is the time of the batch's last event.
    """
    with Reader(audit.path, start) as reader:
        for batch, findings in audit.batches(reader):
            yield ReplayedBatch(batch.events, findings, taken(audit))
        audit.note_end(reader)
    audit.finish()
    yield ReplayedBatch([], [], taken(audit))


def each_account(audit: EngineAudit, start: Position | None = None) -> Iterator[Account]:
    """Replay the journal of ``audit``: accounts as they close, then those still open at its end.

    What no account of the audit's window needs may be skipped.
    """
    for batch in each_batch(audit, start or skip_to_window(audit)):
        yield from batch.accounts


class Audit:
    """The audit of one journal or several, one :class:`EngineAudit` each."""

    def __init__(self, engines: list[EngineAudit]) -> None:
        self.engines = engines
        """One audit for each journal, in the order of the journals."""

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any engine."""
        return max((engine.verdict for engine in self.engines), key=VERDICT_ORDER.index)

    @property
    def totals(self) -> Totals:
        """Sums over all accounts of all engines."""
        totals = Totals()
        for engine in self.engines:
            totals.merge(engine.totals())
        return totals

    @property
    def reconciliation(self) -> Reconciliation:
        """All engines' figures, reconciled."""
        merged = Reconciliation()
        for engine in self.engines:
            merged.merge(engine.of(Reconciled).sums)
        return merged

    @property
    def violations(self) -> list[Violation]:
        """All findings, drifts included, by engine and then in the order they were first seen."""
        return [violation for engine in self.engines for violation in engine.violations]

    @property
    def found(self) -> list[Found]:
        """How many findings each invariant has in all engines, listed in :attr:`violations` or not."""
        return together(row for engine in self.engines for row in engine.found)

    @property
    def coverage(self) -> Coverage:
        """What was examined in all engines."""
        return of_all([engine.coverage for engine in self.engines])

    @property
    def notes(self) -> list[str]:
        """What a reader should know about the journals: torn tails, doubts. Several journals are named."""
        if len(self.engines) == 1:
            return self.engines[0].all_notes
        return [
            f"{journal_name(engine.path)}: {note}" for engine in self.engines for note in engine.all_notes
        ]


def audit_paths(
    paths: Iterable[Path],
    observers: Sequence[ObserverKind] = (),
    *,
    window: Window = EVERYTHING,
    run: Run = here,
) -> Audit:
    """Replay every journal at or under ``paths``, and reconcile them. Raises LedgerError if there is none.

    ``observers``: what is counted, too; classes of ``observers.py``. ``run`` decides which processes replay
    the journals. The other arguments are those of :class:`EngineAudit`.
    """
    observers = (Reconciled, *observers)
    replay = partial(_replay, observers=observers, window=window)
    audits = list(readable(run, replay, journals_at(paths)))
    compare_journals(audits)
    return Audit(audits)


def compare_journals(audits: Sequence[EngineAudit]) -> None:
    """Add the findings for which a journal is compared with others: recorded KV events, a shared store."""
    for audit in audits:
        compare_events(audit)
    compare_transfers(audits)


def _replay(
    path: Path,
    *,
    observers: Sequence[ObserverKind] = (),
    watch: Watch | None = None,
    window: Window = EVERYTHING,
) -> EngineAudit:
    audit = EngineAudit(path, observers, watch=watch, window=window)
    with Reader(path, skip_to_window(audit)) as reader:
        audit.read(reader)
        audit.note_end(reader)
    audit.finish()
    return audit


def _replay_requests(path: Path, *, watch: Watch, window: Window) -> EngineAudit:
    """Replay as much of a journal as the requests need that are watched; their accounts are kept."""
    part = request_span(path, watch)
    if part is None:
        return _replay(path, observers=(KeptAccounts,), watch=watch, window=window)
    audit = EngineAudit(path, (KeptAccounts,), watch=watch, window=window)
    part.replay(audit)
    return audit


class RequestStatement:
    """One request's account statement: its figures, every posting, and the findings in it."""

    def __init__(self, audit: EngineAudit, account: Account) -> None:
        self.engine = audit.name
        """The engine's name in findings."""
        self.path = audit.path
        """The journal in which the request was found."""
        self.account: AccountStatement = account.freeze()
        """The account's figures, frozen."""
        self.lines: list[Line] = account.lines or []
        """Every posting to the account, in order."""
        self.findings = [
            violation for violation in audit.auditor.violations if violation.request == account.request_id
        ]
        """The findings in this request."""
        self.began_seconds = audit.began_seconds
        """Unix time from which the journal's times count; None if no engine was seen to start."""
        self.found = FoundRequests(self.account, audit.name, audit.kv_role, audit.began_seconds or 0.0)
        """The account as a part of a client's call."""
        self.suffixed = audit.random_suffixes
        """Whether the engine's release appends random digits to ids."""

    def when(self, at: int) -> str:
        """A time of the journal in UTC; in seconds since an unknown start if no engine was seen to start."""
        if self.began_seconds is None:
            return f"{at / 1e6:.3f} s"
        return utc(self.began_seconds + at / 1e6, milliseconds=True)

    @property
    def request_id(self) -> str:
        """The engine's id of the request."""
        return self.account.request_id

    @property
    def traceparent(self) -> str | None:
        """The caller's trace context."""
        return self.account.traceparent


def statements(
    paths: Sequence[Path], asked: str, *, window: Window = EVERYTHING, run: Run = here
) -> list[RequestStatement]:
    """Replay ``paths`` for the requests that ``asked`` names: one, or all of a client's call.

    ``asked`` is any id by which a client knows them, see :mod:`kvledger.audit.client_ids`. Of several
    requests with the same engine id, the last one is taken. ``run`` must be :func:`here`. Raises LedgerError
    if none matches.
    """
    asked = shown_id(asked)
    seen: dict[str, None] = {}

    def watched(name: str) -> bool:
        if len(seen) < HINTS:
            seen[name] = None
        return rank(asked, name, name) >= 0 or rank(asked, name, suffixed=False) >= 0

    # Only a whole replay knows of #N, a request whose arrival was not observed.
    replay = partial(_replay, observers=(KeptAccounts,)) if asked.startswith("#") else _replay_requests
    engines = list(readable(run, partial(replay, watch=watched, window=window), journals_at(paths)))
    compare_journals(engines)
    found = [
        RequestStatement(engine, account) for engine in engines for account in engine.of(KeptAccounts).sums
    ]
    suffixed = any(engine.random_suffixes for engine in engines if engine.engine)
    picked = pick_requests(asked, found, list(seen), ", ".join(map(str, paths)), suffixed=suffixed)
    return list({(each.engine, each.request_id): each for each in picked}.values())


def statement(
    paths: Sequence[Path], asked: str, *, window: Window = EVERYTHING, run: Run = here
) -> RequestStatement:
    """Replay ``paths`` for one request, see :func:`statements`. Raises LedgerError if several match."""
    found = statements(paths, asked, window=window, run=run)
    return pick_request(asked, found, [], ", ".join(map(str, paths)), suffixed=found[0].suffixed)
