"""The prefix-cache lookups of every admission of a run, beside the engine's own counters of lookups.

Here: the totals and the named differences, from the journal's events and the engine's counters. Not
here: prompt tokens by source (run.py), nor anything printed.

A lookup queries the engine's own prefix cache with the whole sequence, and the KV connector with the
tokens that the cache missed. The engine exports its counts for the lookups of first admissions
(``vllm:prefix_cache_queries``, ``vllm:external_prefix_cache_queries`` and the two ``_hits``). It also counts
the lookups of resumed requests, but does not export them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..analysis.source_differences import Figures, planned, why_reported
from ..causes import UNEXPLAINED
from ..events import AdmissionFailed, Admitted, Event
from ..ledger.account import Account
from ..ledger.ledger import Ledger

COUNTERS = {
    "local_queries": "vllm:prefix_cache_queries",
    "local_hits": "vllm:prefix_cache_hits",
    "external_queries": "vllm:external_prefix_cache_queries",
    "external_hits": "vllm:external_prefix_cache_hits",
}


class LookupTotals(msgspec.Struct):
    """Tokens queried and hit in both caches; ``lookups`` is the number of lookups (-1: not counted)."""

    lookups: int = 0
    local_queries: int = 0
    local_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0

    def __add__(self, other: LookupTotals) -> LookupTotals:
        """The sum of both."""
        return LookupTotals(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: LookupTotals) -> LookupTotals:
        """The difference; figures may be negative."""
        return LookupTotals(*(a - b for a, b in zip(self._values(), other._values(), strict=True)))

    def __bool__(self) -> bool:
        """Whether any tokens are counted; ``lookups`` alone does not matter."""
        return any(getattr(self, name) for name in COUNTERS)

    def _values(self) -> tuple[int, ...]:
        return msgspec.structs.astuple(self)


Differences = dict[str, LookupTotals]
"""Signed differences by cause, as in :mod:`~kvledger.audit.analysis.source_differences`."""


class LookupReport:
    """Lookups of admissions, of the engine's counters and of its reports, and the differences."""

    def __init__(self, events: Iterable[tuple[int, Event]], counters: dict[str, float]) -> None:
        self.admitted = LookupTotals()
        """Lookups of every observed admission."""
        self.counters: LookupTotals | None = None
        """The engine's own counters; None where they are not known."""
        self.reported: LookupTotals | None = None
        """The engine-reported prompt figures, taken as one lookup per request; None if it never reports."""
        self.to_counters: Differences = {}
        """The differences that lead from :attr:`admitted` to :attr:`counters`."""
        self.to_reported: Differences = {}
        """The differences that lead from :attr:`counters` to :attr:`reported`."""
        self._resumed = LookupTotals()
        """Lookups after a preemption, which the engine's counters leave out."""
        self._failed = LookupTotals()
        """Lookups of attempts that led to no admission."""
        self._first: dict[int, LookupTotals] = {}
        """Lookups of admissions that are not after a preemption, by request."""
        accounts = self._read(events)
        if set(COUNTERS.values()) <= counters.keys():
            exported = {name: int(counters[metric]) for name, metric in COUNTERS.items()}
            self.counters = LookupTotals(-1, **exported)
            events_lost = any(account.unknown is not None for account in accounts)
            self.to_counters = self._explain_counters(self.counters, events_lost)
            if any(account.reported is not None for account in accounts):
                self.reported = LookupTotals()
                for account in accounts:
                    self._add_report(account)

    def _read(self, events: Iterable[tuple[int, Event]]) -> list[Account]:
        """Sum up the lookups of all admissions; returns every account."""
        ledger = Ledger(keep_closed=True)
        for number, event in events:
            for entry in ledger.apply(event, number):
                if isinstance(entry.subject, Admitted | AdmissionFailed) and entry.account is not None:
                    self._add_lookup(entry.subject, entry.account)
        return list(ledger.accounts())

    def _add_lookup(self, event: Admitted | AdmissionFailed, account: Account) -> None:
        tokens, local = account.sequence_tokens, event.local_tokens
        if isinstance(event, AdmissionFailed):
            if not account.preemptions:
                attempts = event.attempts
                self._failed += LookupTotals(attempts, attempts * tokens, attempts * local)
            return
        lookup = LookupTotals(1, tokens, local, tokens - local, event.external_tokens)
        if not event.counted:
            lookup.local_queries = lookup.local_hits = 0
        self.admitted += lookup
        if event.resumed:
            self._resumed += lookup
        else:
            self._first[account.request] = self._first.get(account.request, LookupTotals()) + lookup

    def _explain_counters(self, counters: LookupTotals, events_lost: bool) -> Differences:
        """Name the lookups that the engine does not export, or counts more than once."""
        named: Differences = {}
        if self._resumed:
            named["resumed"] = LookupTotals() - self._resumed
        left = counters - self.admitted + self._resumed
        left.lookups = 0
        if not left:
            return named
        if left == msgspec.structs.replace(self._failed, lookups=0):
            named["failed_attempts"] = self._failed
        else:
            named["unknown_here" if events_lost else UNEXPLAINED] = left
        return named

    def _add_report(self, account: Account) -> None:
        """Add what the engine reported of one request, and name its difference from the first lookup."""
        assert self.reported is not None
        lookup = self._first.get(account.request, LookupTotals())
        report = LookupTotals()
        figures = None if account.reported is None else Figures(*account.reported)
        if figures is not None and account.unknown is None:
            report = LookupTotals(
                1, figures.total, figures.local, figures.total - figures.local, figures.external
            )
            self.reported += report
        if report == lookup:
            return
        cause = "unknown_here"
        if account.unknown is None:
            cause = why_reported(account, planned(account), figures)
        self.to_reported[cause] = self.to_reported.get(cause, LookupTotals()) + report - lookup
