"""Sums of tokens over accounts."""

from __future__ import annotations

import msgspec

from ..causes import BEGAN_BEFORE
from .account import Account


class Totals(msgspec.Struct):
    """Sums over accounts: tokens, and counts of requests and preemptions."""

    requests: int = 0
    unknown_requests: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    local: int = 0
    external: int = 0
    computed: int = 0
    unattained: int = 0
    plan_requests: int = 0
    plan_local: int = 0
    plan_external: int = 0
    scheduled: int = 0
    first_prompt: int = 0
    first_output: int = 0
    rework: dict[str, int] = {}
    rejected: int = 0
    overrun: int = 0
    in_flight: int = 0
    hit_again: int = 0
    loaded_again: int = 0
    promised: int = 0
    loaded: int = 0
    voided: dict[str, int] = {}
    discarded: dict[str, int] = {}
    invalid_hits: int = 0
    began_before: int = 0
    """Unknown requests that began before the first kept segment of a rotated journal: no loss."""

    @property
    def doubtful_requests(self) -> int:
        """Unknown requests that make a verdict unknown."""
        return self.unknown_requests - self.began_before

    def add(self, account: Account) -> None:
        """Add an account. An unknown account adds only to the requests and preemptions."""
        self.requests += 1
        self.preemptions += account.preemptions
        if account.unknown is not None:
            self.unknown_requests += 1
            self.began_before += account.unknown == BEGAN_BEFORE
            return
        for settlement in account.settlements:
            self.prompt_tokens += settlement.prompt_tokens - settlement.carried
            self.local += settlement.local
            self.external += settlement.external
            self.computed += settlement.computed
            self.unattained += settlement.unattained
            self.invalid_hits += settlement.invalid_hits
        if account.plan is not None:
            self.plan_requests += 1
            self.plan_local += account.plan[0]
            self.plan_external += account.plan[1]
        self.scheduled += account.scheduled
        self.first_prompt += account.first_prompt
        self.first_output += account.first_output
        self.rejected += account.rejected
        self.overrun += account.overrun
        if account.in_flight:
            self.in_flight += sum(f.tokens - f.posted for f in account.in_flight if not f.overrun)
        self.hit_again += account.hit_again
        self.loaded_again += account.loaded_again
        self.promised += account.promised
        self.loaded += account.loaded
        for sums, tokens in (
            (self.rework, account.rework),
            (self.voided, account.voided),
            (self.discarded, account.discarded),
        ):
            if tokens:
                merge_tokens(sums, tokens)

    def merge(self, other: Totals) -> None:
        """Add another's sums."""
        for name in self.__struct_fields__:
            sum_, more = getattr(self, name), getattr(other, name)
            if isinstance(sum_, dict):
                merge_tokens(sum_, more)
            else:
                setattr(self, name, sum_ + more)

    def copy(self) -> Totals:
        """An independent copy."""
        return msgspec.structs.replace(
            self,
            rework=dict(self.rework),
            voided=dict(self.voided),
            discarded=dict(self.discarded),
        )


def add_tokens(table: dict[str, int], key: str, tokens: int) -> None:
    """Add tokens to one cause of a table."""
    table[key] = table.get(key, 0) + tokens


def merge_tokens(into: dict[str, int], table: dict[str, int]) -> None:
    """Add a table of tokens by cause to another."""
    for key, tokens in table.items():
        into[key] = into.get(key, 0) + tokens
