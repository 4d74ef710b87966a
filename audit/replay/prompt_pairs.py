"""Pair the prompts of prefill and decode engines that share a store, while the engines run.

:mod:`kvledger.audit.analysis.calls` pairs the requests of whole journals by the same rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .followed_audit import FollowedAudit
from .metrics_state import PRODUCER, WaitingPrompt

BEFORE_SECONDS = 120.0
"""A prompt reaches its decode engine at most so long after its prefill engine."""

HORIZON_SECONDS = 15.0
"""How late a journal may be read, and how far the clocks of two hosts may differ."""


def pair(audits: Sequence[FollowedAudit], now: float) -> None:
    """Decide for the waiting requests of all engines, as far as it is certain at Unix time ``now``."""
    for audit in audits:
        shared = audit.metrics.shared
        if not shared.waiting and not shared.unknown:
            continue
        producers = [one for one in audits if one.metrics.kv_role == PRODUCER and one.model == audit.model]
        for prompt in shared.unknown:
            audit.metrics.share("unknown", prompt.tokens)
        kept = [prompt for prompt in shared.waiting if not _decided(audit, prompt, producers, now)]
        shared.changes += len(shared.waiting) - len(kept) + len(shared.unknown)
        shared.waiting, shared.unknown = kept, []


def _decided(
    audit: FollowedAudit, prompt: WaitingPrompt, producers: Sequence[FollowedAudit], now: float
) -> bool:
    """Count a prompt under its role, if it can be decided; one that no prefill engine had is not shared."""
    if any(one.metrics.shared.take(prompt.key) for one in producers):
        audit.metrics.share("consumer", prompt.tokens)
        return True
    there = [one for one in producers if not _gone_before(one, prompt.arrived - BEFORE_SECONDS)]
    early = now < prompt.closed + HORIZON_SECONDS
    if early and not (producers and all(_read_to(one) > prompt.arrived for one in there)):
        return False
    if not producers or not all(_knows(one, prompt.arrived) for one in there):
        audit.metrics.share("unknown", prompt.tokens)
    return True


def _gone(producer: FollowedAudit) -> bool:
    return producer.auditor.ledger.stopped is not None or producer.journal.lost_tails > 0


def _gone_before(producer: FollowedAudit, seconds: float) -> bool:
    return _gone(producer) and producer.auditor.ledger.read_to < seconds


def _read_to(producer: FollowedAudit) -> float:
    """The Unix time up to which the requests of a prefill engine are known, by the clock of any host."""
    return math.inf if _gone(producer) else producer.auditor.ledger.read_to - HORIZON_SECONDS


def _knows(producer: FollowedAudit, arrived: float) -> bool:
    """Whether all requests are known that a prefill engine got shortly before this Unix time."""
    since = producer.metrics.shared.since
    lost = producer.auditor.ledger.sums.hook_failures or producer.journal.lost_tails
    return not lost and (not since or since <= arrived - BEFORE_SECONDS)
