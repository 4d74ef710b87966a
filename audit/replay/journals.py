"""Compare what an engine loaded with what other engines stored, in engines that share a store.

Each engine's ledger judges its own transfers (``ledger/transfer_fingerprints.py``). A load of a block
that another engine stored is kept there, and compared here once all journals are read. Engines belong
together if they have one ``KVLEDGER_CONTENT_KEY``: then equal hashes have equal ids, and equal bytes equal
fingerprints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..analysis.calls import CallAccount, FoundRequests
from ..analysis.source_differences import Reconciliation
from ..checks.auditor import Found, Verdict, together
from ..checks.coverage import Coverage, of_all
from ..checks.registry import Violation
from ..client_ids import rank
from ..events import AnyEvent
from ..figures.totals import Totals
from ..journal.host_folders import journal_name
from ..journal.reader import Position
from ..ledger.account import Account, AccountStatement, Line
from ..ledger.content_postings import DIGITS, differences
from ..ledger.entries import ContentTransfer, Entry
from ..ledger.ledger_state import VERSIONS_KEPT, ForeignLoad, Stored, Watch
from ..text import shown_id, utc
from .engine_audit import EngineAudit, ObserverKind
from .find import journals_at, pick_request, pick_requests
from .journal_parts import request_span, skip_to_window
from .observers import KeptAccounts, Reconciled, taken
from .parallel import Run, here, readable
from .recorded_events import compare_events
from .windows import EVERYTHING, Window


def compare_transfers(engines: Sequence[EngineAudit]) -> None:
    """Judge the loads that were kept, and add what was found to the audits of the engines that loaded."""
    sharing: dict[str, list[EngineAudit]] = {}
    for engine in engines:
        custody = engine.auditor.ledger.custody
        if custody.fleet_store:
            sharing.setdefault(custody.key_name, []).append(engine)
    for group in sharing.values():
        whole = not any(engine.doubts for engine in group)
        for engine in group:
            _compare(engine, group, whole)


def _compare(engine: EngineAudit, together: Sequence[EngineAudit], whole: bool) -> None:
    """``whole``: no journal lacks events, so a version that was not seen was not stored."""
    custody, counts = engine.auditor.ledger.custody, engine.auditor.ledger.sums
    loads, custody.foreign, custody.foreign_digits = custody.foreign, [], 0
    judged: dict[tuple[object, ...], ContentTransfer] = {}
    at: dict[tuple[object, ...], int] = {}
    for load in (ForeignLoad(*each) for each in loads):
        versions, complete = _versions(load, together)
        if any(load.prints == version[0] for version, _ in versions):
            counts.count_transfer(load.counted_as, -1)
            counts.count_transfer("moved")
        elif versions and complete and whole:
            counts.count_transfer(load.counted_as, -1)
            counts.count_transfer("transfer_differed")
            found = _subject(load, versions)
            key: tuple[object, ...] = (found.how, found.layers, found.part, found.reader)
            known = judged.get(key)
            judged[key] = found if known is None else known._replace(blocks=[*known.blocks, load.block])
            at.setdefault(key, load.at)
    sizes = engine.auditor.ledger.contents.block_tokens
    for key, found in judged.items():
        subject = found._replace(tokens=len(found.blocks) * sizes.get(found.group, 0))
        engine.enter(Entry(0, found.step, at[key], subject, None))


def _versions(load: ForeignLoad, engines: Sequence[EngineAudit]) -> tuple[list[tuple[Stored, str]], bool]:
    """What was stored under the hash of a load, with the engines that stored it; whether this is all."""
    place = load.hash_id, load.worker, load.group
    versions: list[tuple[Stored, str]] = []
    complete = True
    for engine in engines:
        stored = engine.auditor.ledger.custody.stored.get(place, [])
        complete = complete and len(stored) < VERSIONS_KEPT
        versions += [(version, engine.name) for version in stored]
    return versions, complete


def _subject(load: ForeignLoad, versions: Sequence[tuple[Stored, str]]) -> ContentTransfer:
    how, layers, part = differences(load.prints, [version[0] for version, _ in versions])
    (_, stored_step, _, writer), name = versions[-1]
    sources = [
        f"  stored in step {step} of {engine}: block {source}, filled by request {filler or 'not known'}"
        for (_, step, source, filler), engine in versions
    ]
    return ContentTransfer(
        load.worker,
        load.group,
        load.pool,
        [load.block],
        load.step,
        how,
        layers,
        part,
        len(load.prints) // (2 * DIGITS),
        load.reader,
        stored_step,
        f"{writer or 'not known'} in {name}",
        sources,
        load.prints,
    )


# --- journals ------------------------------------------------------------------------------------------
#
# Replay whole journals: batch by batch, account by account, or several into one audit.
#
# Every report that needs more than sums reads a journal with :func:`each_batch` or :func:`each_account`. A
# journal that an engine is still writing to is followed with :meth:`EngineAudit.batches` instead.


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
    for batch, findings in audit.replay(start):
        yield ReplayedBatch(batch.events, findings, taken(audit))
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
    for _ in audit.replay(skip_to_window(audit)):
        pass
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
        self.found = FoundRequests(
            CallAccount.of(account), audit.name, audit.kv_role, audit.began_seconds or 0.0
        )
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
