"""Finds the findings of a journal, and chooses the one that is meant.

:func:`findings` reads a journal from its beginning. :func:`choose` must not take that long for a journal of
many requests, so it divides the journal into parts of whole segments and audits the parts in parallel. Each
segment begins with a snapshot, from which an audit can start. Requests that are open where a part ends belong
to that part: its audit reads on until they have ended. The next part knows them from its snapshot only, and
audits none of them.

A part does not know what blocks contained before it began. So a finding that depends on an earlier part can
be missed; where the parts have no violation that was asked for, the journal is read from its beginning.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..checks.auditor import Auditor
from ..checks.registry import Violation, catalogue
from ..errors import LedgerError
from ..events import Snapshot
from ..journal.format import segments
from ..journal.reader import Batch, Position, Reader
from ..ledger.account import Account
from ..ledger.blocks.ledger import BlockLedger
from ..replay.engine_audit import EngineAudit
from ..replay.find import journals_at
from ..replay.parallel import begin_worker, cores, is_remote, size_bytes
from ..replay.worker_journals import WorkerJournals

LEAD_US = 60_000_000
"""How long before a finding the cut begins, in microseconds, where no request says it."""

PART_BYTES = 8 << 20
"""The least size of a part. Reading a smaller journal takes less time than starting processes."""

READ_ON = 1
"""How many times its own length a part reads on for requests that are open at its end. A request that is open
for longer has no finding in any part."""


class Seen(msgspec.Struct, frozen=True):
    """A finding in a journal, and where it is: ``number`` of its event, ``segment`` to read from."""

    id: str
    request_id: str
    """Empty if the finding concerns no single request."""
    severity: str
    engine: str
    release: str
    message: str
    at: int
    step: int
    number: int
    segment: int
    journal: Path


class Wanted(NamedTuple):
    """Which findings are asked for; None: any. ``request``: the beginning of its id."""

    finding: str | None = None
    request: str | None = None

    def has(self, violation: Violation) -> bool:
        """Whether this one is."""
        if self.finding not in (None, violation.id):
            return False
        return self.request is None or (violation.request or "").startswith(self.request)

    @property
    def needs_blocks(self) -> bool:
        """Whether an audit must read the events of blocks, which are about half of its work."""
        return self.finding is None or self.finding.startswith("blocks/")


class Part(NamedTuple):
    """Some segments of one journal, from ``first`` to ``last``, or the whole journal.

    ``before``: the segment before ``first``, or ``first`` where there is none.
    """

    journal: Path
    first: int | None = None
    last: int | None = None
    before: int | None = None


class Ambiguous(LedgerError):
    """Several findings could be meant; ``findings`` lists them."""

    def __init__(self, findings: list[Seen]) -> None:
        super().__init__("The journal has several findings; choose one with --finding or --request.")
        self.findings = findings


def choose(path: Path, finding: str | None, request: str | None) -> Seen:
    """The finding that is meant: of the only id that violations have, the first one of a request.

    Drifts count where there are no violations, or if one is asked for. Raises :class:`Ambiguous`.
    """
    wanted = Wanted(finding, request)
    parts = [part for journal in journals_at([path]) for part in _parts(journal)]
    found = _first_of_each(_in_parallel(parts, wanted), wanted)
    divided = any(part.first is not None for part in parts)
    if divided and not any(_answers(seen, wanted) for seen in found):
        found = _first_of_each(findings(path, finding=finding, request=request), wanted)
    if not found:
        asked = " and ".join(filter(None, (finding, request and f"request {request}")))
        raise LedgerError(f"The journal has no finding{f' of {asked}' if asked else ''}.")
    meant = [seen for seen in found if seen.severity != "drift"] or found
    if len(meant) > 1:
        raise Ambiguous(found)
    return meant[0]


def _answers(seen: Seen, wanted: Wanted) -> bool:
    """Whether a finding of a part needs no reading from the journal's beginning."""
    return wanted.finding is not None or seen.severity != "drift"


def _first_of_each(found: Iterable[Seen], wanted: Wanted) -> list[Seen]:
    """The first finding of each id; one of a request, which says more, if there is any."""
    by_id: dict[str, Seen] = {}
    for seen in found:
        if not by_id.setdefault(seen.id, seen).request_id:
            by_id[seen.id] = seen
        if wanted.finding is not None and seen.request_id:
            break
    return list(by_id.values())


# --- one part or the whole --------------------------------------------------------------------------------


def findings(path: Path, *, finding: str | None = None, request: str | None = None) -> Iterator[Seen]:
    """Every finding of the journals at ``path``, in order; only those asked for."""
    for journal in journals_at([path]):
        yield from _findings(Part(journal), Wanted(finding, request))


def _findings(part: Part, wanted: Wanted) -> Iterator[Seen]:
    """The findings of one part of a journal."""
    audited = _AuditedPart(part, wanted)
    start = None if part.first is None else Position(segment=part.first, event=-1)
    with Reader(part.journal, start) as reader:
        for batch, new in audited.batches(reader):
            for violation in new:
                if wanted.has(violation) and audited.has(violation):
                    yield audited.seen(violation, batch)


class _AuditedPart:
    """The audit of one part of a journal, and what says where its findings are."""

    def __init__(self, part: Part, wanted: Wanted) -> None:
        self._part = part
        self._wanted = wanted
        if part.first is None:
            audit = EngineAudit(part.journal)
            audit.on_closed.append(self._closed)
            self._auditor = audit.auditor
            """Audits the part: as the whole journal is, or the wanted check alone."""
            self._audited: Callable[[Reader], Iterator[tuple[Batch, list[Violation]]]] = audit.batches
            """The batches of a reader, each with its findings."""
        else:
            checked = [row for row in catalogue().values() if wanted.finding in (None, row.id)]
            self._auditor = Auditor(keep_closed=True, invariants=checked)
            self._audited = self._lean
        self._segments: list[tuple[int, int]] = []
        """Each segment with the time of its first event."""
        self._came: dict[str, int] = {}
        """When each request came whose account closed in the present batch."""
        self._before: frozenset[str] = frozenset()
        """The requests that were open where the part begins; they belong to the part before."""
        self._left: frozenset[str] | None = None
        """The requests that were open where the part ends; None before the end."""

    def _closed(self, account: Account, _: Any = None) -> None:
        self._came[account.request_id] = account.added_at

    def batches(self, reader: Reader) -> Iterator[tuple[Batch, list[Violation]]]:
        """Each batch and its findings, until the part and its requests have ended."""
        for batch, new in self._audited(reader):
            if batch.begins_segment and batch.events:
                self._begin_segment(batch)
            yield batch, new
            self._came.clear()
            if self._left is not None and self._is_over(batch):
                return

    def _lean(self, reader: Reader) -> Iterator[tuple[Batch, list[Violation]]]:
        """Audit only what the finding needs: without sums, and without blocks if it is not about blocks."""
        feed, closed = self._auditor.feed, self._auditor.ledger.closed
        skipped = frozenset() if self._wanted.needs_blocks else BlockLedger.EVENTS
        for batch in reader.poll():
            new: list[Violation] = []
            for number, event in enumerate(batch.events, batch.first_event):
                if type(event) not in skipped:
                    new += feed(event, number)
                    if closed:
                        for account in closed.values():
                            self._closed(account)
                        closed.clear()
            yield batch, new

    def _begin_segment(self, batch: Batch) -> None:
        segment = batch.start.segment
        self._segments.append((segment, batch.events[0].at))
        snapshot = next((event for event in batch.events if type(event) is Snapshot), None)
        rows = frozenset(row.request_id for row in snapshot.rows) if snapshot is not None else frozenset()
        if segment == self._part.first != self._part.before:
            self._before = rows
        if self._left is None and self._part.last is not None and segment > self._part.last:
            self._left = rows - self._before

    def _is_over(self, batch: Batch) -> bool:
        """Whether the requests of the part have ended, or as much as the part was read again."""
        part = self._part
        assert part.first is not None and part.last is not None and self._left is not None
        if batch.start.segment > part.last + READ_ON * (part.last - part.first + 1):
            return True
        open_now = (account.request_id for account in self._auditor.ledger.living.values())
        return self._left.isdisjoint(open_now)

    def has(self, violation: Violation) -> bool:
        """Whether a finding belongs to this part."""
        if self._left is not None:
            return violation.request in self._left
        return violation.request not in self._before

    def seen(self, violation: Violation, batch: Batch) -> Seen:
        """A finding, with the segment to read from: the one in which its request came."""
        ledger, request = self._auditor.ledger, violation.request or ""
        open_accounts = ledger.living.values()
        since = self._came.get(request, max(0, violation.at - LEAD_US))
        since = next((each.added_at for each in open_accounts if each.request_id == request), since)
        segment = max((number for number, at in self._segments if at <= since), default=None)
        return Seen(
            violation.id,
            request,
            violation.severity,
            violation.engine,
            ledger.engine.version if ledger.engine is not None else "",
            violation.message,
            violation.at,
            violation.step,
            batch.first_event + len(batch.events),
            segment or self._part.before or self._segments[0][0],
            self._part.journal,
        )


# --- many parts -------------------------------------------------------------------------------------------


def _parts(journal: Path) -> list[Part]:
    """The parts of a journal, the same on every machine."""
    whole = [Part(journal)]
    if is_remote(journal) or not journal.is_dir() or size_bytes(journal) < 2 * PART_BYTES:
        return whole
    if WorkerJournals(journal).beside():  # they can only be read along from the beginning
        return whole
    parts: list[Part] = []
    first = before = None
    size = 0
    for number, path in segments(journal).items():
        first = number if first is None else first
        size += size_bytes(path)
        if size >= PART_BYTES:
            parts.append(Part(journal, first, number, before or first))
            first, before, size = None, number, 0
    if first is not None:
        parts.append(Part(journal, first, number, before or first))
    return parts


def _in_parallel(parts: Sequence[Part], wanted: Wanted) -> Iterator[Seen]:
    """The first findings of each id in each part, in the order of the parts."""
    search = partial(_first_of_part, wanted=wanted)
    processes = min(cores(), len(parts))
    if processes < 2:
        for part in parts:
            yield from search(part)
        return
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=begin_worker)
    try:
        for future in [pool.submit(search, part) for part in parts]:
            yield from future.result()
    except BrokenProcessPool:
        raise LedgerError("A process that read the journal was killed.") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:  # they read ahead of what was needed
            process.terminate()


def _first_of_part(part: Part, wanted: Wanted) -> list[Seen]:
    return _first_of_each(_findings(part, wanted), wanted)
