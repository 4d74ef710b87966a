"""The ledger of blocks, kept from the events of level ``blocks`` alone.

A block about which nothing is known has no record. If not all holders of a block are known, ``holders_known``
is false and its reference count is not checked. The engine reports a block's state
(:class:`~kvledger.audit.events.BlockStatesReported`) and, with a touch or a free, its count. The ledger
compares both with its own and then adopts them, so that one fault is reported once.

``BlockLedger`` judges nothing: it passes subjects to ``audit/checks``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from ... import events as ev
from ..account import Account, Life
from . import isolation, postings, reads, weights_of_blocks
from .entries import BlockFinding
from .holdings import Following, Holdings
from .pool import calls
from .postings import ENGINE_REPORTS, OPERATIONS, report_unfreed

_APPLYING = OPERATIONS | postings.HASHES | ENGINE_REPORTS

_SCHEDULING = {
    ev.LookedUp,
    ev.Matched,
    ev.AdmissionFailed,
    ev.Admitted,
    ev.LookupsCounted,
    ev.LoadPlanned,
    ev.SavePlanned,
    ev.BlocksSaved,
    ev.BlocksPromised,
    ev.Stepped,
    ev.Repeated,
}
"""Events of a step that come after the step's pool calls. A step may be emitted only together with a later
event; a finished load comes after them."""


def _ends(holdings: Holdings, event: ev.Finished) -> None:
    if event.request in holdings.held:
        holdings.ending[event.request] = event.at


def _census(holdings: Holdings, event: ev.Census) -> None:
    if holdings.deferred and not holdings.requests.is_in_flight:
        report_unfreed(holdings)


_TABLES: tuple[Following, ...] = (
    {ev.Finished: _ends, ev.Census: _census},
    isolation.FOLLOWING,
    {ev.BlocksSaved: weights_of_blocks.saved},
    reads.OF_REWRITES,
    reads.OF_READS,
    reads.OF_WINDOWS,
    reads.OF_STATES,
)

_FOLLOWING = {
    kind: tuple(table[kind] for table in _TABLES if kind in table)
    for kind in {kind for table in _TABLES for kind in table}
}
"""What follows from an event of requests, in this order."""


class BlockLedger(Holdings):
    """Blocks of one engine, kept from its events in order."""

    EVENTS: ClassVar[frozenset[type[ev.Event]]] = frozenset((*_APPLYING, ev.PoolCalls))

    def identify(self, request: int, isolation: ev.Isolation | None) -> None:
        """Note the isolation classes of a request; None: they were not recorded."""
        if isolation is None:
            self.isolation.pop(request, None)
        else:
            self.isolation[request] = isolation

    def apply(self, event: ev.Event) -> list[BlockFinding]:
        """Post one event of blocks; return its subjects for the checks."""
        self.findings = []
        self.cached_before, self.cached_in_group = [], []
        for call in calls(event) if type(event) is ev.PoolCalls else (event,):
            _APPLYING[type(call)](self, call)
        return self.findings

    def follows(self, event: ev.Event) -> bool:
        """Whether anything about blocks may follow from an event of requests."""
        kind = type(event)
        return (
            kind in _FOLLOWING
            or bool(self.newly_cached and kind not in _SCHEDULING)
            or bool(self.preempted_cached)
        )

    def after(self, event: ev.Event) -> list[BlockFinding]:
        """Called after any other event is posted; return the subjects about blocks that follow from it."""
        self.findings, self.invalid_hits = [], []
        kind = type(event)
        if self.newly_cached and kind not in _SCHEDULING:
            postings.check_pending(self)
        if self.preempted_cached:
            reads.check_preempted(self)
        for follow in _FOLLOWING.get(kind, ()):
            follow(self, event)
        return self.findings

    def looked_up(self, event: ev.StoreKeys) -> None:
        """Note the keys of a request in the connector's store."""
        if event.chunk_tokens > 0:
            self.store_keys[event.request] = event.chunk_tokens, event.keys

    def lost(self, request: int, life: int, start: int, end: int, cause: str) -> None:
        """Note that external tokens [start, end) of a life were lost for ``cause``."""
        reads.lost(self, request, life, start, end, cause)

    def load_failed(self, request: int, life: Life, failed: Collection[int]) -> list[BlockFinding]:
        """Blocks failed to load for a life that has ended. Return the subjects about those still cached."""
        self.findings = []
        reads.failed_after_the_end(self, request, life, failed)
        return self.findings

    def life_ends(self, account: Account, life: Life, cause: str) -> list[BlockFinding]:
        """A life ends; its account has the last counts. Return the subjects about its blocks."""
        self.findings = []
        reads.life_ends(self, account, life, cause)
        reads.windows_end(self, account.request)
        reads.states_end(self, account.request)
        reads.rewrites_end(self, account.request)
        return self.findings
