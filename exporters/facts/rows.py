"""Makes the rows of a request from its account, once it has ended or at the end of its journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import astuple

from ...audit import events as ev
from ...audit.analysis.cache_misses import Groups, missed_ranges, never_came, several_groups_of
from ...audit.analysis.costs import Loads, before_first_output, first_output_at
from ...audit.analysis.source_differences import Reconciliation
from ...audit.analysis.step_model import StepModel
from ...audit.causes import BLOCKS, ENDED_FIRST, INVALID_HIT, PREEMPTED, PREEMPTIONS, RESET
from ...audit.causes import CACHE_RESET as MISSED_BY_RESET
from ...audit.checks.registry import Violation
from ...audit.events import EngineStarted
from ...audit.figures.declared import FIGURES
from ...audit.figures.figure import LABELS
from ...audit.figures.row import figures
from ...audit.figures.sums import add_tokens
from ...audit.journal.host_folders import journal_name
from ...audit.ledger.account import Account
from ...audit.ledger.weights import first_version
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.observers import Steps
from ..trace.groups import tier_names
from ..trace.time_series import COUNTED_REQUESTS, TICKS, RequestCounts, Series
from .schema import LOAD_COLUMNS, Row, Value

MISSED = "missed"
"""The figure of ``causes`` that tells why prompt tokens missed the caches."""

NOT_COMPUTED = (ENDED_FIRST, INVALID_HIT)
"""Causes of misses that were never computed."""

_LOST_LATE = {**dict.fromkeys(PREEMPTIONS, PREEMPTED), RESET: MISSED_BY_RESET}
"""The cause of misses that follow a preemption, by the cause of the preemption."""

_READ = [figure.read for figure in FIGURES if not figure.sql]
_ALSO_OF_UNKNOWN = [figure.of_unknown for figure in FIGURES if not figure.sql]
_BY_CAUSE = [(figure.name, figure.read) for figure in FIGURES if figure.causes]


def block_size(audit: EngineAudit) -> int:
    """Tokens per block of the engine's cache; 0 where the engine did not report it."""
    size = audit.engine.configuration.get("block_size") if audit.engine else None
    return size if isinstance(size, int) and size > 0 else 0


class Head(NamedTuple):
    """What the rows of all accounts of a batch share. ``began_us``: 0 if no engine was seen to start."""

    engine: str
    journal: str
    began_us: int
    began: int | None
    model: str
    rank: int
    block_tokens: int
    groups: Groups | None
    lookahead: bool
    last_at: int


def head(audit: EngineAudit, journal: str) -> Head:
    """What the rows of a batch share, after it was audited."""
    began_us = _began_us(audit)
    began = None if audit.began_seconds is None else began_us
    size = block_size(audit)
    groups = several_groups_of(audit.auditor.ledger.blocks.pools.get(0))
    lookahead = bool(audit.engine and audit.engine.configuration.get("hash_lookahead_tokens"))
    return Head(
        audit.name, journal, began_us, began, audit.model, audit.rank, size, groups, lookahead, audit.last_at
    )


def request_row(head: Head, account: Account, verdict: str | None) -> Row:
    """The row of ``requests``, in the order of its columns."""
    known = account.unknown is None
    began_us = head.began_us
    settled = account.settlements[0].at if known and account.settlements else None
    return (
        head.engine,
        head.journal,
        account.request,
        account.request_id,
        account.outcome or None,
        account.unknown,
        verdict,
        began_us + account.added_at,
        ended_us(began_us, account),
        None if settled is None else began_us + settled,
        _plus(began_us, first_output_at(account) if known else None),
        *(figures(account) if known else _figures_of_unknown(account)),
        missed_tokens(account) if known else None,
        account.sequence_tokens if known else None,
        *(_loads(account) if known else _NO_LOADS),
        len(account.lives) if known else None,
        account.waited(head.last_at) if known else None,
        head.model,
        head.began,
        head.rank,
        *(label.read(account) for label in LABELS),
        first_version(account) if known else None,
        tier_names(account) or None if known else None,
    )


_NO_LOADS = (None,) * len(LOAD_COLUMNS)


def _loads(account: Account) -> tuple[int, ...]:
    if not account.promised:
        return (0,) * len(LOAD_COLUMNS)
    loads = Loads()
    loads.add(account)
    return astuple(loads)


def missed_tokens(account: Account) -> int:
    """The ledger's own count of misses, which the causes must sum to."""
    missed = account.first_prompt + sum(end - start for start, end, _ in account.executed_again)
    if account.closed_at >= 0:
        missed += sum(end - start for start, end in never_came(account))
    return missed


def _figures_of_unknown(account: Account) -> Iterator[Value]:
    for read, of_unknown in zip(_READ, _ALSO_OF_UNKNOWN, strict=True):
        yield read(account) if of_unknown else None


def cause_rows(head: Head, account: Account) -> Iterator[Row]:
    """The rows of ``causes``: each figure that has causes, and why prompt tokens missed the caches."""
    if account.unknown is not None:
        return
    of_request = _of_request(head, account)
    early: Mapping[str, int] = {}
    waited = 0
    if account.rework:
        early, waited = before_first_output(account)
    for figure, read in _BY_CAUSE:
        for cause, tokens in read(account).items():
            if figure != "rework":
                yield (*of_request, figure, cause, tokens, None, None, None)
                continue
            delay, waits = early.get(cause, 0), waited if cause in PREEMPTIONS else 0
            delays = (delay, waits) if delay or waits else (None, None)
            percent = account.more_blocks_percent
            more = percent if cause == BLOCKS and percent >= 0 else None
            yield (*of_request, figure, cause, tokens, *delays, more)
    yield from _missed_rows(of_request, account, head)


def _of_request(head: Head, account: Account) -> Row:
    """How the rows of all tables but ``requests`` begin."""
    return (head.engine, head.journal, account.request, ended_us(head.began_us, account))


def _missed_rows(of_request: Row, account: Account, head: Head) -> Iterator[Row]:
    missed: dict[str, int] = {}
    for start, end, cause in missed_ranges(account, head.block_tokens, head.groups, lookahead=head.lookahead):
        add_tokens(missed, cause, end - start)
    first = first_output_at(account)
    late = {
        _LOST_LATE.get(life.ended_by, "")
        for life in account.lives
        if first is not None and life.ended_at > first
    }
    for cause, tokens in missed.items():
        early = first is not None and cause not in NOT_COMPUTED and cause not in late
        yield (*of_request, MISSED, cause, tokens, *((tokens, 0) if early else (None, None)), None)


def chunk_rows(head: Head, account: Account) -> Iterator[Row]:
    """The rows of ``chunks``: what each chunk of a session after the first one settled as."""
    if account.unknown is not None or len(account.settlements) < 2:
        return
    began_us, of_request = head.began_us, _of_request(head, account)
    first = began_us + account.settlements[0].at
    for chunk in account.settlements[1:]:
        sources = (chunk.local, chunk.external, chunk.computed, chunk.unattained)
        yield (*of_request, first, began_us + chunk.at, *sources)


def difference_rows(head: Head, account: Account) -> Iterator[Row]:
    """The rows of ``differences``: why settled, planned and reported tokens of a request differ."""
    if account.unknown is not None:
        return
    of_request = _of_request(head, account)
    found = Reconciliation()
    found.add(account)
    for step, differences in (("to_plan", found.to_plan), ("to_reported", found.to_reported)):
        for cause, difference in differences.items():
            yield (*of_request, step, cause, *astuple(difference.figures))


def finding_rows(audit: EngineAudit, journal: str, found: Sequence[Violation]) -> list[Row]:
    """The rows of ``findings``, each when it was first seen."""
    return [_finding_row(audit, journal, one) for one in found]


def _finding_row(audit: EngineAudit, journal: str, found: Violation) -> Row:
    return (
        audit.name,
        journal,
        found.id,
        found.severity,
        found.request,
        found.life,
        found.step,
        None if audit.began_seconds is None else _began_us(audit) + found.at,
        found.message,
        found.tenant or None,
        found.session or None,
        found.tokens,
    )


def _began_us(audit: EngineAudit) -> int:
    """The engine's second 0 in microseconds since 1970; 0 if no engine was seen to start."""
    return round((audit.began_seconds or 0.0) * 1e6)


def ended_us(began_us: int, account: Account) -> int | None:
    """When a request ended, in microseconds since 1970; None while it is open."""
    return began_us + account.closed_at if account.closed_at >= 0 else None


def _plus(began_us: int, at: int | None) -> int | None:
    return None if at is None else began_us + at


# --- What the facts keep of an engine.


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as far as its journal was read.

    ``busy_us``: time of its steps in the window. ``model``: the model of its step time. ``block_tokens``: 0
    if the engine did not report it. ``rows_from_seconds``: Unix time before which only sums by the hour are
    kept of the window's requests; None: it has all rows. ``forgotten_hashes``: evicted blocks that the audit
    does not remember any more, so that tokens in them count as never seen before.
    """

    journal: str
    path: str
    name: str
    engine: EngineStarted | None
    connector: str
    block_tokens: int
    busy_us: int
    model: StepModel
    rows_from_seconds: float | None = None
    forgotten_hashes: int = 0
    cut: list[str] = []
    """Of which invariants not all findings are rows."""


def engine_facts(audit: EngineAudit) -> EngineFacts:
    """What the facts keep of an engine."""
    return EngineFacts(
        journal=journal_name(audit.path),
        path=str(audit.path),
        name=audit.name,
        engine=audit.engine,
        connector=audit.connector,
        block_tokens=block_size(audit),
        busy_us=audit.of(Steps).sums.busy_us,
        model=audit.of(Steps).model,
        forgotten_hashes=sum(pool.forgotten_hashes for pool in audit.auditor.ledger.blocks.pools.values()),
        cut=audit.cut,
    )


# --- What an engine did over time: requests running and waiting, preemptions, and resets of its prefix
# cache.
#
# The figures are kept in a :class:`~kvledger.exporters.trace.time_series.Series`, and are rows of
# ``activity`` when the journal was read.

LEVELS = ("running", "waiting")
COUNTED = frozenset((*COUNTED_REQUESTS, ev.CacheReset))
"""The events that change what is counted."""

CountsState = tuple[int, list[int]]
"""See :attr:`~kvledger.exporters.trace.time_series.RequestCounts.state`."""


class Activity:
    """Follows one engine, batch by batch."""

    def __init__(self, audit: EngineAudit) -> None:
        self.series = Series()
        """Requests, preemptions and resets."""
        self._audit = audit
        """The audit that reads the journal; it knows the clock and the window."""
        self._counts = RequestCounts()

    @property
    def at_end(self) -> CountsState:
        """The requests in the engine after the last batch."""
        return self._counts.state

    def go_on(self, series: Series, counts: CountsState) -> None:
        """Go on from an earlier activity of the same engine."""
        self.series, self._counts = series, RequestCounts(*counts)

    def add(self, events: Iterable[ev.Event]) -> None:
        """Add a batch."""
        began = self._audit.began_seconds or 0.0
        holds = self._audit.window.holds
        for event in events:
            if type(event) not in COUNTED:
                continue
            changed, reset = self._counts.feed(event), isinstance(event, ev.CacheReset) and event.succeeded
            if (changed or reset) and holds(wall := began + event.at / 1e6):
                levels = (self._counts.running, self._counts.waiting)
                self.series.level(wall, dict(zip(LEVELS, levels, strict=True)))
                if isinstance(event, ev.Preempted):
                    self.series.count(wall, "preemptions")
                if reset:
                    self.series.count(wall, "resets")


def activity_rows(engine: str, journal: str, series: Series) -> Iterator[Row]:
    """The buckets of a series as rows of ``activity``."""
    width = series.width_ticks
    for place in sorted({*series.counts, *series.levels}):
        levels, counts = series.levels.get(place, {}), series.counts.get(place, {})
        yield (
            engine,
            journal,
            round(place * width * 1_000_000 / TICKS),
            round(width * 1_000_000 / TICKS),
            *(levels.get(name) for name in LEVELS),
            counts.get("preemptions", 0),
            counts.get("resets", 0),
        )
