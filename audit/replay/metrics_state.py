"""What metrics need beyond the ledger's totals, counted at rare events and when an account closes.

There is one :class:`MetricsState` for each engine. It consists of plain numbers, dicts and lists, so that a
checkpoint holds all of it. Also here: distributions, and the prompts that two engines share.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from .. import events as ev
from ..analysis.block_states import BlockStates
from ..bounded_tables import keep_newest
from ..causes import BEGAN_BEFORE, EVICTED, WITH_LAST_OUTPUT
from ..client_ids import part_of
from ..figures.declared import BY_NAME, FIGURES
from ..figures.figure import GROUPED, value_of
from ..figures.sums import NoSum, Sums
from ..figures.totals import Totals
from ..ledger.account import COMPUTED, EXTERNAL, LOCAL, UNATTAINED, Account
from ..ledger.blocks.contents import Change
from ..ledger.kv_events import KVEventCounts
from ..ledger.weights import outputs_of
from ..release_semantics import has_random_suffix

# --- distribution --------------------------------------------------------------------------------------
#
# A histogram of one value per request, and the exemplar of each bucket.


class Exemplar(msgspec.Struct, frozen=True):
    """One request as an example of a bucket: its id, the caller's trace id ("" if none) and its value."""

    request_id: str
    trace_id: str
    value: float
    at_seconds: float


class Distribution(Sums):
    """A histogram: how often a value was at most each of ``bounds`` and above the bound before.

    ``counts`` has one more item than ``bounds``, for values above all of them. ``exemplars`` holds the
    latest request of each bucket that has one. The sum is kept in whole ``millionths``, because a sum of
    floats would depend on the order in which journals are added, and might even fall slightly.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    millionths: int = 0
    exemplars: dict[int, Exemplar] = {}

    @classmethod
    def over(cls, bounds: tuple[float, ...]) -> Distribution:
        """An empty histogram."""
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, exemplar: Exemplar | None = None) -> None:
        """Count one value."""
        place = bisect_left(self.bounds, value)
        self.counts[place] += 1
        self.millionths += round(value * 1e6)
        if exemplar is not None:
            self.exemplars[place] = exemplar

    def merge(self, other: Distribution) -> None:
        """Add the counts of another histogram."""
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.millionths += other.millionths
        self.exemplars = self.exemplars | other.exemplars

    @property
    def sum(self) -> float:
        """The sum of all values, each rounded to a millionth."""
        return self.millionths / 1e6

    @property
    def observed(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


# --- shared prompts ------------------------------------------------------------------------------------
#
# Find out which prompts of an engine with ``kv_role`` ``kv_consumer`` a prefill engine counts, too.
#
# A transfer that the router asked for is marked in the request. Where prefill and decode engines share a
# store, nothing marks the request of the decode engine, and a router may also send it a prompt that no
# prefill engine had. So it waits here until a prefill engine of the same model has, or has not, a request of
# the same call, prompt, sample and length (``request_traces.py``).


PRODUCER, CONSUMER = "kv_producer", "kv_consumer"

MOST_PREFILLED = 1 << 12
"""Requests of a prefill engine that are remembered."""

MOST_WAITING = 1 << 12
"""Requests of a decode engine that wait. What is more is unknown at once."""


class WaitingPrompt(msgspec.Struct, frozen=True, array_like=True):
    """An ended request of a decode engine. Times are Unix times."""

    key: int
    """Names the call, prompt, sample and length."""
    arrived: float
    closed: float
    tokens: dict[str, int]
    """Settled prompt tokens by source."""


class SharedPrompts(Sums):
    """What one engine has of prompts that two engines may share."""

    prefilled: dict[int, list[float]] = {}
    """A prefill engine's requests by their key: when they arrived, as far as no decode engine has them."""
    since: float = 0.0
    """The Unix time from which all of these are known; 0.0: all are."""
    waiting: list[WaitingPrompt] = []
    """A decode engine's requests that are not decided."""
    unknown: list[WaitingPrompt] = []
    """Those for which there is no room."""
    changes: int = 0
    """How often something was decided."""

    def prefill(self, request_id: str, prompt_tokens: int, arrived: float, *, suffixed: bool) -> None:
        """Remember a request that a prefill engine got."""
        key = key_of(request_id, prompt_tokens, suffixed=suffixed)
        self.prefilled[key] = [*self.prefilled.pop(key, ()), arrived]
        self._bound()

    def _bound(self) -> None:
        for times in keep_newest(self.prefilled, MOST_PREFILLED):
            self.since = max(self.since, *times)

    def wait(self, prompt: WaitingPrompt) -> None:
        """Let a decode engine's request wait."""
        self.waiting.append(prompt)
        if len(self.waiting) > MOST_WAITING:
            self.unknown.append(self.waiting.pop(0))

    def take(self, key: int) -> bool:
        """Whether this prefill engine had the request; it is then no other request's."""
        times = self.prefilled.pop(key, [])
        if times[1:]:
            self.prefilled[key] = times[1:]
        self.changes += bool(times)
        return bool(times)

    def merge(self, other: SharedPrompts) -> None:
        """Add those of another engine of the same name, which ran later."""
        for key, times in other.prefilled.items():
            self.prefilled[key] = [*self.prefilled.get(key, ()), *times]
        self._bound()
        self.since = max(self.since, other.since)
        self.waiting += other.waiting
        self.unknown += other.unknown


def key_of(request_id: str, prompt_tokens: int, *, suffixed: bool) -> int:
    """A number for the call, prompt, sample and length of a request."""
    words = "\0".join(map(str, (*part_of(request_id, suffixed=suffixed), prompt_tokens)))
    return int.from_bytes(blake2b(words.encode(), digest_size=7).digest(), "big")


# --- metrics state -------------------------------------------------------------------------------------
#
# What metrics need beyond the ledger's totals, counted at rare events and when an account closes.
#
# There is one :class:`MetricsState` for each engine. It consists of plain numbers, dicts and lists, so that
# a checkpoint holds all of it. Steps and outputs are not counted here: the events in
# :data:`METRICS_HANDLERS` are rare, and an account closes once. ``*_seconds`` are seconds; points in time
# are Unix time.


TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
"""A caller's trace context: trace id, span id, flags. https://www.w3.org/TR/trace-context/#traceparent-header"""

VERDICTS = ("clean", "violated", "unknown")

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Bounds for a share from 0 to 1, which separate none at all and nearly all from the rest."""

REWORK = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75)
TIMES = (0, 1, 2, 3, 5, 8, 13, 21)
WAIT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


STAY_SECONDS = (0.1, 1, 10, 60, 300, 900, 3600, 14400, 86400)
"""Bounds for how long content stays in a block."""

PLANNED = (LOCAL, EXTERNAL, COMPUTED)

ROLES = ("prefill", "decode", "producer", "consumer", "unknown")
"""The parts that two engines have in one prompt, see :func:`role_of`; unknown: another one may have it."""

_KV_ROLES = {PRODUCER: "producer", CONSUMER: "consumer"}
"""Our words for vLLM's ``kv_role`` of an engine. One with ``kv_both`` has no role of its own."""

MOST_VALUES = 64
"""Requests with further values of a label are counted as :data:`OTHER`."""

OTHER = "other"


class LookupCounts(Sums):
    """Lookups of one cache: how many, the tokens they queried, and the tokens that hit."""

    lookups: int = 0
    queried: int = 0
    hit: int = 0

    def add(self, lookups: int, queried: int, hit: int) -> None:
        """Add some lookups."""
        self.lookups += lookups
        self.queried += queried
        self.hit += hit


class ViolationCount(Sums):
    """How often an invariant was violated, when last, and in which request ("" if in none)."""

    times: int = 0
    last_seconds: float = 0.0
    request_id: str = ""
    trace_id: str = ""

    def merge(self, more: ViolationCount) -> None:
        """Add later violations."""
        times = self.times + more.times
        self.times, self.last_seconds = times, more.last_seconds
        self.request_id, self.trace_id = more.request_id, more.trace_id


def _no_spreads() -> dict[str, Distribution]:
    return {figure.name: Distribution.over(figure.histogram.bounds) for figure in FIGURES if figure.histogram}


def _no_lookups() -> dict[str, LookupCounts]:
    return {"local": LookupCounts(), "external": LookupCounts()}


class MetricsState(Sums):
    """What metrics need of one engine, from its first event on; :meth:`merge` says what is a sum."""

    clock_seconds: NoSum[float] = 0.0
    """Unix time of the engine's microsecond 0, by its latest EngineStarted."""
    created_seconds: NoSum[float] = 0.0
    """Unix time at which observation of the engine began."""
    lookups: dict[str, LookupCounts] = msgspec.field(default_factory=_no_lookups)
    """Lookups as the engine counted them, by cache."""
    preemptions: dict[str, int] = {}
    """Preemptions by cause."""
    hook_us: int = 0
    """Microseconds spent in hooks during the timed steps."""
    hook_steps: int = 0
    """How many steps were timed."""
    gaps_of_known_size: int = 0
    """Gaps whose number of lost events is known."""
    gaps_of_unknown_size: int = 0
    """Gaps whose number of lost events is not known."""
    lost_events: int = 0
    """Events lost in gaps of known size."""
    transferred_tokens: int = 0
    """Settled external tokens that a prefill engine transferred."""
    kv_role: NoSum[str] = ""
    """vLLM's ``kv_role`` of the engine; "" without a connector."""
    disaggregated: dict[str, dict[str, int]] = {}
    """Settled prompt tokens of prompts that two engines share, by the role in this one and the source."""
    shared: SharedPrompts = msgspec.field(default_factory=SharedPrompts)
    """Requests of engines that share a store, until it is known which two belong together."""
    suffixed: NoSum[bool] = True
    """Whether the engine's release appends random digits to ids."""
    planned: dict[str, int] = {}
    """Planned tokens by source, where the figure is not negative."""
    planned_negative: dict[str, int] = {}
    """Planned tokens by source, where the figure is negative; without the sign."""
    sequence_tokens: dict[str, int] = {}
    """Prompt and output tokens of ended requests, by verdict."""
    violations: dict[str, ViolationCount] = {}
    """Violations by invariant, repeated ones included."""
    begun: NoSum[bool] = False
    """Whether a snapshot was read."""
    from_start: NoSum[bool] = False
    """Whether the engine had run nothing when observation began."""
    reported: NoSum[dict[str, int]] = {}
    """Prompt tokens by source, as the engine reported them to its front end."""
    reported_unknown: NoSum[dict[str, int]] = {}
    """The part of ``reported`` that belongs to requests with unknown accounts."""
    admitted: NoSum[dict[str, LookupCounts]] = msgspec.field(default_factory=_no_lookups)
    """Lookups of admissions, by cache, as the engine should count them."""
    resumed: NoSum[dict[str, LookupCounts]] = msgspec.field(default_factory=_no_lookups)
    """The part of ``admitted`` that came after a preemption."""
    tiers: dict[str, int] = {}
    """External tokens by tier, as the connector reported them to the engine."""
    untiered: int = 0
    """External tokens whose tiers do not sum to them."""
    preemptions_with_output: NoSum[int] = 0
    """Preemptions of requests that ended with an output, so that the front end knows of them."""
    most_preemptions: NoSum[int] = 0
    """Most preemptions of one such request."""
    largest_prompt: NoSum[int] = 0
    """Tokens of the largest prompt that the engine reported."""
    ended_outputs: NoSum[int] = 0
    """Output tokens of ended requests, also of those with unknown accounts: the front end counts them all."""
    aborted_outputs: NoSum[int] = 0
    """The part of them that belongs to aborted requests: a client that has gone may not have got them."""
    aborted_requests: NoSum[int] = 0
    largest_output: NoSum[int] = 0
    """Output tokens of the request that had most."""
    exempts: NoSum[bool] = True
    """Whether the engine has a prefix cache, so that a request without a local lookup may read no cache."""
    cached_share: Distribution = msgspec.field(default_factory=lambda: Distribution.over(SHARES))
    rework_share: Distribution = msgspec.field(default_factory=lambda: Distribution.over(REWORK))
    preempted: Distribution = msgspec.field(default_factory=lambda: Distribution.over(TIMES))
    remote_wait: Distribution = msgspec.field(default_factory=lambda: Distribution.over(WAIT_SECONDS))
    spreads: dict[str, Distribution] = msgspec.field(default_factory=_no_spreads)
    """The histograms that figures declare, by figure."""
    blocks: NoSum[BlockStates] = msgspec.field(default_factory=lambda: BlockStates(distributed=False))
    """The pools' blocks, if the level is ``blocks``."""
    labels: NoSum[dict[str, dict[str, Totals]]] = {}
    """Totals of ended requests by label and value; without the label they are in none."""
    block_lifetime: Distribution = msgspec.field(default_factory=lambda: Distribution.over(STAY_SECONDS))
    block_idle: Distribution = msgspec.field(default_factory=lambda: Distribution.over(STAY_SECONDS))
    block_reuse: Distribution = msgspec.field(default_factory=lambda: Distribution.over(STAY_SECONDS))
    kv_events: KVEventCounts = msgspec.field(default_factory=KVEventCounts)
    """What the engine's recorded KV events said, if a follower reads them."""
    pool_blocks: NoSum[int] = 0
    """Blocks that requests can use, by the last census; 0: none was read."""
    pool_free_blocks: NoSum[int] = 0
    """Those of them that no request held."""

    def seconds(self, at: int) -> float:
        """Unix time of an event's ``at``."""
        return self.clock_seconds + at / 1e6

    # --- while it runs --------------------------------------------------------------------------------

    def started(self, event: ev.EngineStarted) -> None:
        """Take the engine's clock; an EngineStarted begins every segment."""
        self.clock_seconds = event.wall_seconds - event.at / 1e6
        self.exempts = event.configuration.get("prefix_caching") is not False
        self.kv_role = str(event.configuration.get("kv_role") or "")
        self.suffixed = has_random_suffix(event.engine, event.version)
        if not self.created_seconds:
            self.created_seconds = event.wall_seconds

    def began(self, event: ev.Snapshot) -> None:
        """Note, at the first snapshot, whether anything had run before."""
        if not self.begun:
            self.begun = True
            self.from_start = event.step == 0 and not event.rows
            self.shared.since = 0.0 if self.from_start else self.created_seconds

    def arrive(self, event: ev.RequestAdded) -> None:
        """Remember a request of a prefill engine, for the decode engine that gets its prompt."""
        if self.kv_role == PRODUCER:
            arrived = self.seconds(event.at)
            self.shared.prefill(event.request_id, event.prompt_tokens, arrived, suffixed=self.suffixed)

    def looked_up(self, event: ev.LookupsCounted) -> None:
        """Add the lookups that the engine counted; -1: it does not count them."""
        if event.local_requests >= 0:
            self.lookups["local"].add(event.local_requests, event.local_queries, event.local_hits)
        if event.external_requests >= 0:
            self.lookups["external"].add(event.external_requests, event.external_queries, event.external_hits)

    def preempt(self, event: ev.Preempted) -> None:
        """Count a preemption."""
        _add(self.preemptions, event.cause, 1)

    def admit(self, event: ev.Admitted, account: Account) -> None:
        """Count the lookups of an admission, as the engine should count them."""
        local, sequence = event.local_tokens, account.sequence_tokens
        lookups = {"local": (1, sequence, local)} if event.counted else {}
        if sequence != local and (event.counted or not self.exempts):
            lookups["external"] = (1, sequence - local, event.external_tokens)
        for cache, figures in lookups.items():
            self.admitted[cache].add(*figures)
            if event.resumed:
                self.resumed[cache].add(*figures)

    def tier(self, event: ev.TiersReported) -> None:
        """Count external tokens by their tiers."""
        if sum(event.tokens) != event.external_tokens:
            self.untiered += event.external_tokens
            return
        for tier, tokens in zip(event.tiers, event.tokens, strict=True):
            _add(self.tiers, tier, tokens)

    def report(self, event: ev.Reported) -> None:
        """Add the sources of a prompt, as the engine reported them."""
        for source, tokens in zip(
            PLANNED, (event.local_tokens, event.external_tokens, event.computed_tokens), strict=True
        ):
            _add(self.reported, source, tokens)
        self.largest_prompt = max(self.largest_prompt, event.prompt_tokens)

    def census(self, event: ev.Census) -> None:
        """Add the time spent in hooks, and take the pool's counts. The pool's first block holds nothing."""
        self.pool_blocks, self.pool_free_blocks = max(0, event.blocks - 1), event.free_blocks
        if event.hook_us >= 0:
            self.hook_us += event.hook_us
            self.hook_steps += event.hook_steps

    def gap(self, event: ev.Gap) -> None:
        """Count a gap, but not the segments that rotation removed before the first event seen."""
        if event.reason == ev.REMOVED and not self.begun:
            return
        self.shared.since = max(self.shared.since, self.seconds(event.at))
        if event.lost_events < 0:
            self.gaps_of_unknown_size += 1
        else:
            self.gaps_of_known_size += 1
            self.lost_events += event.lost_events

    def use_blocks(self, event: ev.Event, changes: Sequence[Change]) -> None:
        """Follow the blocks: their states, how long content stays, and when it is hit again."""
        if self.blocks.feed(event, changes) is None:
            return
        for seconds in self.blocks.idle_seconds:
            self.block_reuse.observe(seconds)
        for stay in self.blocks.ended:
            if stay.left_by != EVICTED:
                continue
            if stay.cached_at >= 0:
                self.block_lifetime.observe((stay.left_at - stay.cached_at) / 1e6)
            if stay.released_at >= 0:
                self.block_idle.observe((stay.left_at - stay.released_at) / 1e6)

    def count_violation(self, id: str, at: int, account: Account | None) -> None:
        """Count one violation of an invariant, repeated or not."""
        count = self.violations.get(id)
        if count is None:
            count = self.violations[id] = ViolationCount()
        count.times += 1
        count.last_seconds = self.seconds(at)
        count.request_id = "" if account is None else account.request_id
        count.trace_id = "" if account is None else trace_id(account)

    def merge(self, other: MetricsState) -> None:
        """Add the state of another engine with the same name, which ran later."""
        if self.created_seconds and other.created_seconds:
            self.created_seconds = min(self.created_seconds, other.created_seconds)
        self.created_seconds = self.created_seconds or other.created_seconds
        self.clock_seconds = other.clock_seconds or self.clock_seconds
        super().merge(other)
        self.kv_role, self.suffixed = other.kv_role or self.kv_role, other.suffixed
        for label, rows in other.labels.items():
            for value, totals in rows.items():
                self.of_label(label, value).merge(totals)
        self.blocks.seen |= other.blocks.seen
        self.blocks.use.merge(other.blocks.use)

    def of_label(self, label: str, value: str) -> Totals:
        """The totals of one value of a label, or of :data:`OTHER` beyond the most values."""
        values = self.labels.setdefault(label, {})
        if value not in values and len(values) >= MOST_VALUES:
            value = OTHER
        return values.setdefault(value, Totals())

    # --- when an account closes -------------------------------------------------------------------------

    def close(self, account: Account, verdict: str, event: ev.Event | None) -> None:
        """Add an account that closed with ``event``; of an unknown account only its size is added."""
        self._output(account)
        sequence = account.sequence_tokens
        if account.unknown is not None:
            # If the request's arrival was not seen, its length is known only from the engine.
            reported_tokens = event.sequence_tokens if type(event) is ev.Finished else -1
            if account.unknown != BEGAN_BEFORE:
                _add(self.sequence_tokens, verdict, max(sequence, reported_tokens))
            for source, tokens in zip(PLANNED, account.reported or (), strict=False):
                _add(self.reported_unknown, source, tokens)
            return
        _add(self.sequence_tokens, verdict, sequence)
        if account.outcome in WITH_LAST_OUTPUT:  # the front end has every earlier report of it
            self.preemptions_with_output += account.preemptions
            self.most_preemptions = max(self.most_preemptions, account.preemptions)
        if account.transferred:
            self.transferred_tokens += sum(settled.external for settled in account.settlements)
        self._share(account)
        if account.labels is not None:
            self._label(account)
        self._plan(account)
        self._spread(account)

    def _output(self, account: Account) -> None:
        outputs = outputs_of(account)
        self.ended_outputs += outputs
        self.largest_output = max(self.largest_output, outputs)
        if account.outcome == "aborted":
            self.aborted_outputs += outputs
            self.aborted_requests += 1

    def _share(self, account: Account) -> None:
        """Count the prompt under its role, or let it wait until its prefill engine is known."""
        role = role_of(account, self.kv_role)
        if not role or not account.settlements:
            return
        tokens = dict.fromkeys((LOCAL, EXTERNAL, COMPUTED, UNATTAINED), 0)
        for settled in account.settlements:
            for source in tokens:
                tokens[source] += getattr(settled, source)
        if role != "consumer":
            self.share(role, tokens)
            return
        key = key_of(account.request_id, account.prompt_tokens, suffixed=self.suffixed)
        arrived, closed = self.seconds(account.added_at), self.seconds(max(0, account.closed_at))
        self.shared.wait(WaitingPrompt(key, arrived, closed, tokens))

    def share(self, role: str, tokens: Mapping[str, int]) -> None:
        """Count a prompt that another engine has, too."""
        sources = self.disaggregated.setdefault(role, {})
        for source, count in tokens.items():
            _add(sources, source, count)

    def _label(self, account: Account) -> None:
        for label in GROUPED:
            if found := value_of(label, account):
                self.of_label(label.name, found).add(account)

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
        for name, spread in self.spreads.items():
            figure = BY_NAME[name]
            value, per = figure.read(account), BY_NAME[figure.per].read(account) if figure.per else 1
            if per and (value if figure.part_of else value is not None):
                self._observe(spread, value / per / 1e6, account)

    def _observe(self, spread: Distribution, value: float, account: Account) -> None:
        at_seconds = self.seconds(account.closed_at)
        spread.observe(value, Exemplar(account.request_id, trace_id(account), value, at_seconds))


METRICS_HANDLERS: dict[type[ev.Event], Callable[[MetricsState, Any], None]] = {
    ev.EngineStarted: MetricsState.started,
    ev.Snapshot: MetricsState.began,
    ev.RequestAdded: MetricsState.arrive,
    ev.Reported: MetricsState.report,
    ev.TiersReported: MetricsState.tier,
    ev.LookupsCounted: MetricsState.looked_up,
    ev.Preempted: MetricsState.preempt,
    ev.Gap: MetricsState.gap,
    ev.Census: MetricsState.census,
}
"""The method called for each type of event, after the ledger has posted it; for an admission, ``admit``."""


def role_of(account: Account, kv_role: str) -> str:
    """The part that an engine has in a prompt, one of :data:`ROLES`; "" if the prompt is its alone.

    ``prefill`` and ``decode`` are what the router asked for in ``kv_transfer_params``. Without them the
    engine's ``kv_role`` counts: of a ``producer`` and a ``consumer`` with a shared store.
    """
    if account.transferred:
        return "decode"
    return "prefill" if account.remote_decode else _KV_ROLES.get(kv_role, "")


def remote_wait(account: Account) -> int | None:
    """Microseconds that a request waited for asynchronous loads; None if it never did.

    A wait lasts until the load is reported finished or failed, or until the life ends before it ran. If a
    life ran without a report about its load, the length of its wait is not known.
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
    """The caller's trace id, 32 hexadecimal digits; "" if it is not known."""
    context = TRACEPARENT.fullmatch(account.traceparent or "")
    return context[1] if context else ""


def _add(table: dict[str, int], key: str, more: int) -> None:
    table[key] = table.get(key, 0) + more
