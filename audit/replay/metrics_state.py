"""What metrics need beyond totals: counted as it happens, or when an account closes.

One struct a book, of plain numbers, dicts and lists, so that a checkpoint carries it whole. Nothing
here is fed by a step or an output: the events in :data:`METRICS_HANDLERS` are rare, and accounts close once.
Tokens are what their names say; ``*_seconds`` are seconds, of points in time since 1970.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from .. import events as ev
from ..ledger.account import Account
from ..ledger.positions import COMPUTED, EXTERNAL, LOCAL

TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
"""A caller's trace context: trace id, span id, flags. https://www.w3.org/TR/trace-context/#traceparent-header"""

VERDICTS = ("clean", "violated", "unknown")

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Upper bounds for parts of one: none at all and nearly all are told apart from some."""

REWORK = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75)
TIMES = (0, 1, 2, 3, 5, 8, 13, 21)
WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


PLANNED = (LOCAL, EXTERNAL, COMPUTED)
ENDED_WITH_OUTPUT = ("stopped", "length", "length_capped", "repetition")
"""Outcomes that come with an output, and so after the front end has heard all that was before."""

Open = Mapping[int, Account]


class Exemplar(msgspec.Struct, frozen=True):
    """One request that stands for others: its id, the caller's trace id ("" if none), its figure."""

    request_id: str
    trace_id: str
    value: float
    at_seconds: float


class Distribution(msgspec.Struct):
    """How often a figure was at most each of ``bounds`` and above the one before.

    ``counts`` has one more item than ``bounds``, for what is above all. ``exemplars`` holds the
    latest request of each item that had one. The sum is kept in whole ``millionths``: in floats it would
    depend on the order in which journals are added, and fall by a hair.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    millionths: int = 0
    exemplars: dict[int, Exemplar] = {}

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Distribution:
        """Nothing observed yet."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Count one figure."""
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.millionths += round(value * 1e6)
        if exemplar is not None:
            self.exemplars[place] = exemplar

    def merge(self, other: Distribution) -> None:
        """Add what another observed."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.millionths += other.millionths
        self.exemplars = self.exemplars | other.exemplars

    @property
    def sum(self) -> float:
        """Of all figures, each to the millionth."""
        return self.millionths / 1e6

    @property
    def observed(self) -> int:
        """How many figures were counted."""
        return sum(self.counts)


class LookupCounts(msgspec.Struct):
    """Look-ups of one cache: how many, the tokens they asked for, and the tokens it had."""

    lookups: int = 0
    queried: int = 0
    hit: int = 0

    def add(self, lookups: int, queried: int, hit: int) -> None:
        """Count some more."""
        self.lookups += lookups
        self.queried += queried
        self.hit += hit


class ViolationCount(msgspec.Struct):
    """How often an invariant was seen broken, when last, and in which request ("" in none)."""

    times: int = 0
    last_seconds: float = 0.0
    request_id: str = ""
    trace_id: str = ""


def _no_lookups() -> dict[str, LookupCounts]:
    return {"local": LookupCounts(), "external": LookupCounts()}


class MetricsState(msgspec.Struct):
    """One engine's tallies, from its first event on.

    ``clock_seconds``: Unix time of the engine's microsecond 0, as its latest start or segment says;
    ``created_seconds``: when it came under observation. ``lookups`` is what the engine counted.
    ``transferred_tokens``: settled external ones that a prefill engine handed over.
    ``planned`` and ``planned_negative`` keep what was planned above and below zero apart.
    ``sequence_tokens``: prompt and output of ended requests, by verdict. ``hook_us``: microseconds in
    hooks in the ``hook_steps`` steps in which they were timed.

    For comparing with the engine's own counters, as they happen: what it ``reported`` to its front
    end, in all and of requests that ended unknown here; the look-ups of admissions (``admitted``),
    of them those after a preemption (``resumed``); ``preemptions_with_output`` of requests that ended by
    themselves, and so had output after each, and the ``most_preemptions`` of one; the
    ``largest_prompt`` reported.
    ``from_start``: nothing had run when it came under observation.
    """

    clock_seconds: float = 0.0
    created_seconds: float = 0.0
    lookups: dict[str, LookupCounts] = msgspec.field(default_factory=_no_lookups)
    preemptions: dict[str, int] = {}
    hook_us: int = 0
    hook_steps: int = 0
    gaps_of_known_size: int = 0
    gaps_of_unknown_size: int = 0
    lost_events: int = 0
    transferred_tokens: int = 0
    planned: dict[str, int] = {}
    planned_negative: dict[str, int] = {}
    sequence_tokens: dict[str, int] = {}
    violations: dict[str, ViolationCount] = {}
    begun: bool = False
    from_start: bool = False
    reported: dict[str, int] = {}
    reported_unknown: dict[str, int] = {}
    admitted: dict[str, LookupCounts] = msgspec.field(default_factory=_no_lookups)
    resumed: dict[str, LookupCounts] = msgspec.field(default_factory=_no_lookups)
    preemptions_with_output: int = 0
    most_preemptions: int = 0
    largest_prompt: int = 0
    cached_share: Distribution = msgspec.field(default_factory=lambda: Distribution.over(SHARES))
    rework_share: Distribution = msgspec.field(default_factory=lambda: Distribution.over(REWORK))
    preempted: Distribution = msgspec.field(default_factory=lambda: Distribution.over(TIMES))
    remote_wait: Distribution = msgspec.field(default_factory=lambda: Distribution.over(WAIT_SECONDS))

    def seconds(self, at: int) -> float:
        """Unix time of an event's ``at``."""
        return self.clock_seconds + at / 1e6

    # --- while it runs --------------------------------------------------------------------------------

    def started(self, event: ev.EngineStarted, _: Open) -> None:
        """The engine, or a segment of its journal, begins."""
        self.clock_seconds = event.wall_seconds - event.at / 1e6
        if not self.created_seconds:
            self.created_seconds = event.wall_seconds

    def began(self, event: ev.Snapshot, _: Open) -> None:
        """A segment says who lives; the first says whether anything was before it."""
        if not self.begun:
            self.begun = True
            self.from_start = event.step == 0 and not event.rows

    def looked_up(self, event: ev.LookupsCounted, _: Open) -> None:
        """The engine counted look-ups; -1 stands for what it does not count."""
        if event.local_requests >= 0:
            self.lookups["local"].add(event.local_requests, event.local_queries, event.local_hits)
        if event.external_requests >= 0:
            self.lookups["external"].add(event.external_requests, event.external_queries, event.external_hits)

    def preempt(self, event: ev.Preempted, _: Open) -> None:
        """A request was preempted."""
        _add(self.preemptions, event.cause, 1)

    def admit(self, event: ev.Admitted, open: Open) -> None:
        """A life began: its look-ups, as the engine should count them."""
        account = open.get(event.request)
        if account is None:
            return
        local, sequence = event.local_tokens, account.sequence_tokens
        asked = {"local": (1, sequence, local)} if event.counted else {}
        if sequence != local:
            asked["external"] = (1, sequence - local, event.external_tokens)
        for cache, figures in asked.items():
            self.admitted[cache].add(*figures)
            if event.resumed:
                self.resumed[cache].add(*figures)

    def report(self, event: ev.Reported, _: Open) -> None:
        """The engine told its front end where a prompt came from."""
        for source, tokens in zip(
            PLANNED, (event.local_tokens, event.external_tokens, event.computed_tokens), strict=True
        ):
            _add(self.reported, source, tokens)
        self.largest_prompt = max(self.largest_prompt, event.prompt_tokens)

    def census(self, event: ev.Census, _: Open) -> None:
        """The hooks were timed in some steps."""
        if event.hook_us >= 0:
            self.hook_us += event.hook_us
            self.hook_steps += event.hook_steps

    def gap(self, event: ev.Gap, _: Open) -> None:
        """Events were lost."""
        if event.lost_events < 0:
            self.gaps_of_unknown_size += 1
        else:
            self.gaps_of_known_size += 1
            self.lost_events += event.lost_events

    def count_violation(self, id: str, at: int, account: Account | None) -> None:
        """An invariant was seen broken, be it the first time or again."""
        sights = self.violations.get(id)
        if sights is None:
            sights = self.violations[id] = ViolationCount()
        sights.times += 1
        sights.last_seconds = self.seconds(at)
        sights.request_id = "" if account is None else account.request_id
        sights.trace_id = "" if account is None else trace_id(account)

    def merge(self, other: MetricsState) -> None:
        """Add those of another engine of the same name, which ran later."""
        if self.created_seconds and other.created_seconds:
            self.created_seconds = min(self.created_seconds, other.created_seconds)
        self.created_seconds = self.created_seconds or other.created_seconds
        self.clock_seconds = other.clock_seconds or self.clock_seconds
        for name in (
            "transferred_tokens",
            "hook_us",
            "hook_steps",
            "gaps_of_known_size",
            "gaps_of_unknown_size",
            "lost_events",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("preemptions", "planned", "planned_negative", "sequence_tokens"):
            for key, more in getattr(other, name).items():
                _add(getattr(self, name), key, more)
        for cache, asked in other.lookups.items():
            self.lookups[cache].add(asked.lookups, asked.queried, asked.hit)
        for id, sights in other.violations.items():
            known = self.violations.get(id)
            times = known.times if known else 0
            self.violations[id] = msgspec.structs.replace(sights, times=times + sights.times)
        for name in ("cached_share", "rework_share", "preempted", "remote_wait"):
            getattr(self, name).merge(getattr(other, name))

    # --- when an account closes -------------------------------------------------------------------------

    def close(self, account: Account, verdict: str, event: ev.Event | None) -> None:
        """A request has ended, with ``event`` if it is known; of an unknown one only its size counts."""
        sequence = account.sequence_tokens
        if account.unknown is not None:
            # What the engine says of its length is all there may be, where the arrival was not seen.
            said = event.sequence_tokens if type(event) is ev.Finished else -1
            _add(self.sequence_tokens, verdict, max(sequence, said))
            for source, tokens in zip(PLANNED, account.reported or (), strict=False):
                _add(self.reported_unknown, source, tokens)
            return
        _add(self.sequence_tokens, verdict, sequence)
        if account.outcome in ENDED_WITH_OUTPUT:
            self.preemptions_with_output += account.preemptions
            self.most_preemptions = max(self.most_preemptions, account.preemptions)
        if account.transferred:
            self.transferred_tokens += sum(settled.external for settled in account.settlements)
        self._plan(account)
        self._spread(account)

    def _plan(self, account: Account) -> None:
        if account.plan is None:
            return
        local, external = account.plan
        settled = account.settlements
        prompt = settled[0].prompt_tokens if settled else account.prompt_tokens
        for source, tokens in (
            (LOCAL, local),
            (EXTERNAL, external),
            (COMPUTED, prompt - local - external),
        ):
            _add(self.planned if tokens >= 0 else self.planned_negative, source, abs(tokens))

    def _spread(self, account: Account) -> None:
        prompt = sum(s.prompt_tokens - s.carried for s in account.settlements)
        if prompt > 0:
            cached = sum(s.local + s.external for s in account.settlements)
            self._observe(self.cached_share, cached / prompt, account)
        if account.scheduled:
            again = sum(account.rework.values())
            self._observe(self.rework_share, again / account.scheduled, account)
        self._observe(self.preempted, account.preemptions, account)
        waited = remote_wait(account)
        if waited is not None:
            self._observe(self.remote_wait, waited / 1e6, account)

    def _observe(self, spread: Distribution, value: float, account: Account) -> None:
        at_seconds = self.seconds(account.closed_at)
        spread.observe(value, Exemplar(account.request_id, trace_id(account), value, at_seconds))


METRICS_HANDLERS: dict[type[ev.Event], Callable[[MetricsState, Any, Open], None]] = {
    ev.EngineStarted: MetricsState.started,
    ev.Snapshot: MetricsState.began,
    ev.Admitted: MetricsState.admit,
    ev.Reported: MetricsState.report,
    ev.LookupsCounted: MetricsState.looked_up,
    ev.Preempted: MetricsState.preempt,
    ev.Gap: MetricsState.gap,
    ev.Census: MetricsState.census,
}
"""What is told of which event, after the ledger has posted it, with the accounts that are open."""


def remote_wait(account: Account) -> int | None:
    """Microseconds in which it waited for loads, in all; None if it never did.

    A wait lasts until its load is reported finished or failed, or its life ends before it ran. A life
    that ran without having heard of its load has no wait that is known.
    """
    waits = []
    for life in account.lives:
        if not life.asynchronous:
            continue
        until = life.load_ended_at
        if until < 0 and not life.ran:
            until = life.ended_at
        if until >= 0:
            waits.append(until - life.began_at)
    return sum(waits) if waits else None


def trace_id(account: Account) -> str:
    """The caller's trace id, 32 hexadecimal digits; "" where none is known."""
    context = TRACEPARENT.fullmatch(account.traceparent or "")
    return context[1] if context else ""


def _add(table: dict[str, int], key: str, more: int) -> None:
    table[key] = table.get(key, 0) + more
