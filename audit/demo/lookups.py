"""What the caches were asked: every admission's look-ups, beside the engine's counters of them.

Here: the figures and the named differences, from the journal's events and what the engine counted.
Not here: prompt tokens by source (differences.py), nor anything printed.

A look-up asks the engine's own cache for the whole sequence, and the connector for what the cache
did not have. The engine counts those of first admissions (``vllm:prefix_cache_queries``,
``vllm:external_prefix_cache_queries`` and the two ``_hits``); of a request that resumes it keeps
count too, and exports none of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..analysis.reconciliation import Figures, planned, why_reported
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


class Asked(msgspec.Struct):
    """Tokens that two caches were asked for, and had; ``lookups`` says how often (-1: not told)."""

    lookups: int = 0
    local_queries: int = 0
    local_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0

    def add(self, other: Asked, sign: int = 1) -> None:
        """Add ``other``, or with ``sign`` -1 take it away."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in COUNTERS)


Differences = dict[str, Asked]
"""By cause; signed, like those of :class:`~kvledger.audit.analysis.reconciliation.Step`."""


class Lookups:
    """Look-ups as admitted, as counted and as reported, and what lies between.

    ``admitted`` are those of every admission that was seen; ``counters`` is None where the engine
    did not tell its own. ``reported`` is what its reports make of them, one look-up a request, and
    None where it never reports.
    """

    def __init__(self, events: Iterable[tuple[int, Event]], counters: dict[str, float]) -> None:
        self.admitted = Asked()
        self.counters: Asked | None = None
        self.reported: Asked | None = None
        self.to_counters: Differences = {}
        self.to_reported: Differences = {}
        self._resumed = Asked()
        self._failed = Asked()
        self._first: dict[int, Asked] = {}
        ledger = Ledger(keep_closed=True)
        for number, event in events:
            for entry in ledger.apply(event, number):
                if isinstance(entry.subject, Admitted | AdmissionFailed) and entry.account is not None:
                    self._look_up(entry.subject, entry.account)
        accounts = list(ledger.accounts())
        if set(COUNTERS.values()) <= counters.keys():
            told = {ours: int(counters[theirs]) for ours, theirs in COUNTERS.items()}
            self.counters = Asked(-1, **told)
            self._count(any(account.unknown is not None for account in accounts))
            if any(account.reported is not None for account in accounts):
                self.reported = Asked()
                for account in accounts:
                    self._report(account, self.reported)

    def _look_up(self, said: Admitted | AdmissionFailed, account: Account) -> None:
        tokens, local = account.sequence_tokens, said.local_tokens
        asked = Asked(1, tokens, local, tokens - local, said.external_tokens)
        if isinstance(said, AdmissionFailed):
            if not account.preemptions:
                self._failed.add(Asked(said.attempts, said.attempts * tokens, said.attempts * local))
            return
        if not said.counted:
            asked.local_queries = asked.local_hits = 0
        self.admitted.add(asked)
        if said.resumed:
            self._resumed.add(asked)
        else:
            self._first.setdefault(account.request, Asked()).add(asked)

    def _count(self, unknown: bool) -> None:
        """From admissions to counters: what the engine does not export, or counts too often."""
        assert self.counters is not None
        if self._resumed:
            self.to_counters["resumed"] = Asked()
            self.to_counters["resumed"].add(self._resumed, -1)
        left = Asked(0)
        left.add(self.counters)
        left.add(self.admitted, -1)
        left.add(self._resumed)
        left.lookups = 0
        if not left:
            return
        attempts = self._failed.lookups
        if left == msgspec.structs.replace(self._failed, lookups=0):
            self.to_counters["failed_attempts"] = msgspec.structs.replace(left, lookups=attempts)
        else:
            self.to_counters["unknown_here" if unknown else UNEXPLAINED] = left

    def _report(self, account: Account, sum_: Asked) -> None:
        """From counters to reports: one request's look-up and what the engine told of it."""
        asked = self._first.get(account.request, Asked())
        told = Asked()
        figures = None if account.reported is None else Figures(*account.reported)
        if figures is not None and account.unknown is None:
            beyond = figures.total - figures.local
            told = Asked(1, figures.total, figures.local, beyond, figures.external)
            sum_.add(told)
        if told == asked:
            return
        cause = "unknown_here"
        if account.unknown is None:
            cause = why_reported(account, planned(account), figures)
        difference = self.to_reported.setdefault(cause, Asked())
        difference.add(told)
        difference.add(asked, -1)
