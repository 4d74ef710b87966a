"""Sums of cache misses by cause, and of the time that computing them took."""

from __future__ import annotations

from collections import Counter

import msgspec

from ...audit import causes as names
from ...audit.analysis.cache_misses import missed_ranges, never_came
from ...audit.analysis.costs import PREFILL, Delays, LostWork, PricedDelays, first_output_at, plus, seconds
from ...audit.analysis.step_model import StepModel
from ...audit.ledger.account import Account
from ...audit.replay.engine_audit import EngineAudit
from .costs import ModelRow, model_row


class Tally(msgspec.Struct):
    """Misses of one journal, or of several merged."""

    tokens: Counter[str] = msgspec.field(default_factory=Counter)
    requests: Counter[str] = msgspec.field(default_factory=Counter)
    audited: int = 0
    unknown: int = 0
    prompt_tokens: int = 0
    hit: int = 0
    no_hit: int = 0
    levels: list[str] = []
    notes: list[str] = []
    sizes: list[int] = []
    early: dict[str, Delays] = msgspec.field(default_factory=dict)
    """Tokens of the present journal that were computed before the first output, by cause."""
    computed: Counter[str] = msgspec.field(default_factory=Counter)
    """Missed tokens of the present journal that were computed, by cause."""
    seconds: dict[str, float | None] = msgspec.field(default_factory=dict)
    delays: dict[str, PricedDelays] = msgspec.field(default_factory=dict)
    models: list[ModelRow] = msgspec.field(default_factory=list)
    scheduled: int = 0
    preempted: LostWork = msgspec.field(default_factory=LostWork)
    """Tokens computed again after preemptions for lack of free blocks, without seconds."""

    def add(self, account: Account, block_size: int) -> None:
        """Add one request."""
        if account.unknown is not None:
            self.unknown += 1
            return
        self.audited += 1
        self.scheduled += account.scheduled
        if tokens := account.rework.get(names.BLOCKS, 0):
            percent = account.more_blocks_percent
            self.preempted.merge(LostWork(tokens, avoidable={percent: tokens} if percent >= 0 else {}))
        for settlement in account.settlements:
            self.prompt_tokens += settlement.prompt_tokens - settlement.carried
            self.hit += settlement.local + settlement.external
        self.no_hit += account.first_prompt
        self.no_hit += sum(end - start for start, end, _ in account.executed_again)
        if account.closed_at >= 0:
            self.no_hit += sum(end - start for start, end in never_came(account))
        causes: Counter[str] = Counter()
        for start, end, cause in missed_ranges(account, block_size):
            causes[cause] += end - start
        self.tokens.update(causes)
        self.requests.update(causes.keys())
        self._add_costs(account, causes)

    def _add_costs(self, account: Account, causes: Counter[str]) -> None:
        """Add what was computed: all misses but those that never got KV."""
        causes.pop(names.ENDED_FIRST, None)
        causes.pop(names.INVALID_HIT, None)
        self.computed.update(causes)
        first = first_output_at(account)
        if first is None:
            return
        late = {LOST_LATE.get(life.ended_by, "") for life in account.lives if life.ended_at > first}
        for cause, tokens in causes.items():
            if cause not in late:
                self.early.setdefault(cause, Delays()).add(account.request, tokens)

    def price(self, engine_audit: EngineAudit, model: StepModel) -> None:
        """Turn the present journal's tokens into seconds."""
        for cause, tokens in self.computed.items():
            self.seconds[cause] = seconds(model, PREFILL, tokens)
        self.delays = {cause: each.seconds(model.prefill_seconds) for cause, each in self.early.items()}
        self.models = [model_row(engine_audit, model)]
        self.computed, self.early = Counter(), {}

    def merge(self, more: Tally) -> None:
        """Add the misses of another journal, or of a later part of the same if neither is priced yet."""
        self.tokens.update(more.tokens)
        self.requests.update(more.requests)
        self.audited += more.audited
        self.unknown += more.unknown
        self.prompt_tokens += more.prompt_tokens
        self.hit += more.hit
        self.no_hit += more.no_hit
        self.levels += [level for level in more.levels if level not in self.levels]
        self.notes += more.notes
        self.sizes += [size for size in more.sizes if size not in self.sizes]
        for cause, took in more.seconds.items():
            self.seconds[cause] = plus(self.seconds.get(cause, 0.0), took)
        for cause, delays in more.delays.items():
            self.delays.setdefault(cause, PricedDelays()).merge(delays)
        self.models += more.models
        self.scheduled += more.scheduled
        self.preempted.merge(more.preempted)
        self.computed.update(more.computed)
        for cause, early in more.early.items():
            self.early.setdefault(cause, Delays()).merge(early)


LOST_LATE = {names.BLOCKS: names.PREEMPTED, names.RESET: names.CACHE_RESET}
"""The cause of misses that follow a preemption, by the cause of the preemption."""


def block_size(engine_audit: EngineAudit) -> int:
    """Tokens per block of the engine's cache; 0 where the engine did not report it."""
    size = engine_audit.engine.configuration.get("block_size") if engine_audit.engine else None
    return size if isinstance(size, int) and size > 0 else 0
