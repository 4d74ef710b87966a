"""What lost work cost: tokens turned into seconds of engine time and into delay of the first token.

A price is seconds per token, from the model of step time (:mod:`.step_model`). It is *marginal*: the constant
time of a step is charged to no token. Without an accepted model, or where a coefficient is not known, seconds
are None. Waiting is measured and has no price.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec

from .. import causes
from ..figures.sums import Sums, merge_tokens
from ..ledger.account import Account, Life
from .step_model import LEAST_OBSERVATIONS, NO_STEPS, StepModel, fit
from .step_times import StepSample

REWORK = "rework"
REJECTED = "rejected"
OVERRUN = "overrun"
KINDS = (REWORK, REJECTED, OVERRUN)
"""Lost work: computed again, rejected drafts, and computed past the stop."""

SAVED = "saved"
"""Loaded external tokens, which were not computed."""

MOST_BETWEEN_FITS = 16_384
"""Observations after which the model of a live engine is fitted again."""

PREFILL, DECODE, DRAFT = "prefill", "decode", "draft"
"""What a token was computed as, which decides its price."""

DELAYS = 512
"""The largest number of requests whose delay is kept for one cause."""

NOT_SAVED = (causes.FAILED, causes.NOT_PLANNED, causes.NEVER_LOADED)
"""Causes for which promised tokens were computed in place of the load."""


MOST_AVOIDED = 0.9
"""The share of lost tokens for which :class:`MoreBlocks` is named."""


class MoreBlocks(msgspec.Struct, frozen=True):
    """So many percent more blocks would have avoided so many lost tokens."""

    percent: int
    tokens: int


class Delays(Sums):
    """Delays of the first token: tokens that a request computed before it, and microseconds it waited."""

    requests: int = 0
    sample: StepSample = msgspec.field(default_factory=lambda: StepSample(most=DELAYS))

    def add(self, request: int, tokens: int, waited_us: int = 0) -> None:
        """Add one request, by its number."""
        self.requests += 1
        self.sample.add(request, tokens, waited_us)

    def seconds(self, price: float | None) -> PricedDelays:
        """The delays with the ``price`` of a prefill token."""
        if price is None:
            return PricedDelays(requests=self.requests)
        return PricedDelays(
            requests=self.requests,
            seconds=[(tokens * price + us / 1e6, self.sample.weight) for _, tokens, us in self.sample.rows],
        )


class PricedDelays(Sums):
    """Delays in seconds, each with the number of requests that it stands for."""

    requests: int = 0
    seconds: list[tuple[float, int]] = []

    def quantile(self, share: float) -> float | None:
        """The delay that this share of the requests does not exceed; None if no delay is known."""
        rows = sorted(self.seconds)
        rest = share * sum(weight for _, weight in rows)
        for value, weight in rows:
            rest -= weight
            if rest <= 0:
                return value
        return None


class LostTokens(Sums):
    """Tokens of lost work of one kind and cause, by what they were computed as, and the delays caused."""

    tokens: dict[str, int] = {}
    requests: int = 0
    delays: Delays = msgspec.field(default_factory=Delays)
    avoidable: dict[int, int] = {}
    """Tokens by how many percent more blocks would have avoided them, as far as known."""


class Loads(Sums):
    """External loads. ``waited_us``: from an admission with an asynchronous load to the end of the load."""

    asynchronous: int = 0
    waited_us: int = 0
    asynchronous_tokens: int = 0
    synchronous_tokens: int = 0
    not_saved_tokens: int = 0
    """Promised tokens that were computed because their load failed or did not happen."""
    vain_us: int = 0
    """The part of ``waited_us`` after which no promised token was loaded."""

    def add(self, account: Account) -> None:
        """Add one request's loads."""
        for life in account.lives:
            self.add_life(life)

    def add_life(self, life: Life) -> None:
        """Add the load of one life, if it has one."""
        if life.asynchronous:
            until = _load_end(life)
            if until is None:
                return
            self.asynchronous += 1
            self.waited_us += until - life.began_at
            self.asynchronous_tokens += life.loaded
            if not life.loaded:
                self.vain_us += until - life.began_at
        else:
            self.synchronous_tokens += life.loaded
        self.not_saved_tokens += sum(life.voided.get(cause, 0) for cause in NOT_SAVED)


class CostTally(Sums):
    """Lost work and loads of some requests of one engine, in tokens. Memory grows with the causes only."""

    lost: dict[str, LostTokens] = {}
    """By kind, or by kind and cause (``rework/blocks``)."""
    loads: Loads = msgspec.field(default_factory=Loads)

    def add(self, account: Account) -> None:
        """Add one request. An unknown account adds nothing."""
        if account.unknown is not None:
            return
        if account.rework:
            early, waited = before_first_output(account)
            for cause, tokens in account.rework.items():
                row = self._row(f"{REWORK}/{cause}", PREFILL, tokens)
                delay = early.get(cause, 0)
                waits = waited if cause in causes.PREEMPTIONS else 0
                if delay or waits:
                    row.delays.add(account.request, delay, waits)
                if cause == causes.BLOCKS and account.more_blocks_percent >= 0:
                    add_avoidable(row.avoidable, {account.more_blocks_percent: tokens})
        if account.rejected:
            self._row(REJECTED, DRAFT, account.rejected)
        if account.overrun:
            self._row(OVERRUN, overrun_kind(account), account.overrun)
        if account.promised:
            self.loads.add(account)

    def _row(self, key: str, kind: str, tokens: int) -> LostTokens:
        row = self.lost.get(key)
        if row is None:
            row = self.lost[key] = LostTokens()
        row.tokens[kind] = row.tokens.get(kind, 0) + tokens
        row.requests += 1
        return row


class LostWork(Sums):
    """Lost work of one kind and cause in seconds, which several engines can share.

    ``seconds`` is None if the price of some of its tokens is not known.
    """

    tokens: int = 0
    requests: int = 0
    seconds: float | None = 0.0
    delays: PricedDelays = msgspec.field(default_factory=PricedDelays)
    avoidable: dict[int, int] = {}
    """As in :class:`LostTokens`."""

    @property
    def more_blocks(self) -> MoreBlocks | None:
        """The fewest blocks that would have avoided most of the tokens; None if that is not known."""
        sum_ = 0
        for percent, tokens in sorted(self.avoidable.items()):
            sum_ += tokens
            if sum_ >= MOST_AVOIDED * self.tokens:
                return MoreBlocks(percent=percent, tokens=sum_)
        return None


class PricedLoads(Sums):
    """External loads of one connector. ``saved_seconds``: the time to compute the loaded tokens."""

    loads: int = 0
    waited_seconds: float = 0.0
    vain_seconds: float = 0.0
    asynchronous_tokens: int = 0
    synchronous_tokens: int = 0
    not_saved_tokens: int = 0
    saved_seconds: float | None = 0.0
    asynchronous_saved_seconds: float | None = 0.0
    not_saved_seconds: float | None = 0.0


class Costs(Sums):
    """The costs of one or several engines. ``busy_us``: time of all their steps."""

    busy_us: int = 0
    lost: dict[str, LostWork] = {}
    loads: dict[str, PricedLoads] = {}
    """By connector."""

    @property
    def lost_seconds(self) -> float | None:
        """Seconds of all lost work; None if some are not known."""
        return total(row.seconds for row in self.lost.values())


def priced(tally: CostTally, model: StepModel, busy_us: int, connector: str) -> Costs:
    """A tally in seconds, by the prices of its engine."""
    costs = Costs(busy_us=busy_us)
    for key, row in tally.lost.items():
        costs.lost[key] = LostWork(
            tokens=sum(row.tokens.values()),
            requests=row.requests,
            seconds=total(seconds(model, kind, tokens) for kind, tokens in row.tokens.items()),
            delays=row.delays.seconds(model.prefill_seconds),
            avoidable=dict(row.avoidable),
        )
    loads = tally.loads
    if loads.asynchronous or loads.synchronous_tokens or loads.not_saved_tokens:
        asynchronous = seconds(model, PREFILL, loads.asynchronous_tokens)
        costs.loads[connector] = PricedLoads(
            loads=loads.asynchronous,
            waited_seconds=loads.waited_us / 1e6,
            vain_seconds=loads.vain_us / 1e6,
            asynchronous_tokens=loads.asynchronous_tokens,
            synchronous_tokens=loads.synchronous_tokens,
            not_saved_tokens=loads.not_saved_tokens,
            saved_seconds=plus(asynchronous, seconds(model, PREFILL, loads.synchronous_tokens)),
            asynchronous_saved_seconds=asynchronous,
            not_saved_seconds=seconds(model, PREFILL, loads.not_saved_tokens),
        )
    return costs


def seconds(model: StepModel, kind: str, tokens: int) -> float | None:
    """Seconds that ``tokens`` took to compute; None if their price is not known."""
    if not tokens:
        return 0.0
    price = {
        PREFILL: model.prefill_seconds,
        DECODE: model.decode_seconds,
        DRAFT: model.draft_seconds,
    }[kind]
    return None if price is None else price * tokens


def add_avoidable(into: dict[int, int], more: dict[int, int]) -> None:
    """Add tokens by percent of more blocks."""
    for percent, tokens in more.items():
        into[percent] = into.get(percent, 0) + tokens


def plus(one: float | None, other: float | None) -> float | None:
    """The sum; None if a part is not known."""
    return None if one is None or other is None else one + other


def total(parts: Iterable[float | None]) -> float | None:
    """The sum; None if a part is not known."""
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def overrun_kind(account: Account) -> str:
    """What tokens past the stop of a request were computed as: decoding once it had an output."""
    return DECODE if account.sequence_tokens > account.prompt_tokens else PREFILL


def first_output_at(account: Account) -> int | None:
    """When the first output came; None if none did, or the prompt had no KV then."""
    if account.incomplete or not account.settlements or account.pooling:
        return None
    if account.sequence_tokens <= account.prompt_tokens:
        return None
    return account.settlements[0].at


def before_first_output(account: Account) -> tuple[dict[str, int], int]:
    """Prompt tokens computed again before the first output, by cause, and microseconds waited since the first
    preemption before it. A cause is left out if it also lost KV after the first output."""
    first = first_output_at(account)
    if first is None:
        return {}, 0
    late = {life.ended_by for life in account.lives if life.ended_at > first}
    early: dict[str, int] = {}
    for start, end, cause in account.executed_again:
        if cause not in late:
            early[cause] = early.get(cause, 0) + end - start
    return early, sum(_waits_after_preemption(account.lives, first))


def _waits_after_preemption(lives: list[Life], first: int) -> Iterator[int]:
    for life, following in pairwise(lives):
        if life.ended_by in causes.PREEMPTIONS and 0 <= life.ended_at <= following.began_at <= first:
            yield following.began_at - life.ended_at


def _load_end(life: Life) -> int | None:
    """When the wait for an asynchronous load ended; None if that is not known."""
    if life.load_ended_at >= 0:
        return life.load_ended_at
    return life.ended_at if not life.ran and life.ended_at >= 0 else None


# --- counters that only rise ----------------------------------------------------------------------------


class CostCounters(Sums):
    """The time of lost work and of loads while requests end, for metrics. It never falls.

    It is kept in whole microseconds, because a sum of floats depends on the order in which journals are added
    and may fall slightly. Tokens are priced when their request ends, by the model of that time; before the
    first accepted model they wait.
    """

    lost_us: dict[str, int] = {}
    """By kind of :data:`KINDS`."""
    waiting: dict[str, dict[str, int]] = {}
    """Tokens without a price yet, by kind (or ``saved``) and what they were computed as."""
    saved_us: int = 0
    """What computing the loaded external tokens would have taken."""
    load_wait_us: int = 0
    """Time that requests waited for asynchronous loads."""
    model: StepModel = NO_STEPS
    """The latest model."""
    fit_at: int = 4 * LEAST_OBSERVATIONS
    """The number of observations at which a model is fitted next."""

    def close(self, account: Account, sample: StepSample) -> None:
        """Add a request that ended, and fit the model again where it is due."""
        if sample.seen >= self.fit_at:
            self.fit_at = sample.seen + min(sample.seen, MOST_BETWEEN_FITS)
            self.model = fit(sample)
            self._price()
        if account.unknown is not None:
            return
        if account.rework:
            self._wait(REWORK, PREFILL, sum(account.rework.values()))
        if account.rejected:
            self._wait(REJECTED, DRAFT, account.rejected)
        if account.overrun:
            self._wait(OVERRUN, overrun_kind(account), account.overrun)
        if account.promised:
            loads = Loads()
            loads.add(account)
            self.load_wait_us += loads.waited_us
            self._wait(SAVED, PREFILL, loads.asynchronous_tokens + loads.synchronous_tokens)
        if self.waiting:
            self._price()

    def _wait(self, key: str, kind: str, tokens: int) -> None:
        if tokens:
            row = self.waiting.setdefault(key, {})
            row[kind] = row.get(kind, 0) + tokens

    def _price(self) -> None:
        for key, row in self.waiting.items():
            for kind in list(row):
                took = seconds(self.model, kind, row[kind])
                if took is None:
                    continue
                del row[kind]
                took_us = round(took * 1e6)
                if key == SAVED:
                    self.saved_us += took_us
                else:
                    self.lost_us[key] = self.lost_us.get(key, 0) + took_us
        self.waiting = {key: row for key, row in self.waiting.items() if row}

    def merge(self, more: CostCounters) -> None:
        """Add the counters of another engine, which ran later."""
        merge_tokens(self.lost_us, more.lost_us)
        self.saved_us += more.saved_us
        self.load_wait_us += more.load_wait_us
        self.model = more.model
