"""Postings of changes of weights, and of lives that begin after one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .. import events as ev
from ..figures.sums import add_tokens
from .account import Account
from .accounts import add_line, enter
from .blocks import weights_of_blocks
from .blocks.weights_of_blocks import HitWeights
from .entries import Entry, OlderOutputs, ResetRefused, StaleKV
from .ledger_state import LedgerState
from .life import Life
from .unchanged_steps import activate_all
from .weights import BEFORE, MODEL, UNKNOWN, age_cause, extend, spans
from .weights_of_requests import adapter_of, is_suspect, oldest_of, outputs, weights_of

HIT, LOAD = "hit", "load"
"""Where KV of older weights comes from."""

EQUAL = "equal"
"""Calls after which all weights were those of before, by a digest."""

CHANGES = (ev.DECLARED, ev.DETECTED, ev.POSSIBLE, ev.LABELLED, EQUAL)
"""What is counted of weights, by name."""


def _weights_changed(state: LedgerState, event: ev.WeightsChanged) -> None:
    weights, counted = state.weights, state.sums.weights_changes
    if event.changes and event.version > weights.version:
        _begin_version(state, event)
        weights.possible.add(event.version)
    if not event.changes:
        add_tokens(counted, EQUAL if event.equal else event.kind, 1)
    elif not event.is_certain:
        add_tokens(counted, event.kind, 1)
    elif event.version in weights.possible:
        weights.possible.discard(event.version)
        add_tokens(counted, event.kind, 1)
    enter(state, event)


def _begin_version(state: LedgerState, event: ev.WeightsChanged) -> None:
    """What is computed from here on is of other weights. Steps in flight keep those that they have."""
    activate_all(state)
    weights = state.weights
    accounts = [each for each in state.living.values() if event.adapter in ("", adapter_of(each))]
    for account in accounts:
        for flight in account.in_flight:
            _begin(account, flight.life)
            flight.weights = weights_of(weights, account, flight)
    weights.version = event.version
    weights.changes.setdefault(event.adapter, []).append(event.version)
    for account in accounts:
        if account.life is not None:
            now = weights.of(adapter_of(account))
            _begin(account, account.life)
            extend(account.life.made, account.computed, now, now)
        whose = f"the weights of {event.adapter}" if event.adapter else "the weights"
        label = f" ({event.label})" if event.label else ""
        add_line(state, account, f"{whose} changed: version {event.version}{label}")


def take_versions(state: LedgerState, event: ev.Snapshot) -> None:
    """A segment begins: take over the versions that are not known, because their events are not read."""
    weights = state.weights
    for adapter, version in event.weights.items():
        numbers = weights.changes.setdefault(adapter, [])
        if not numbers or numbers[-1] < version:
            numbers.append(version)
            weights.cached_since = UNKNOWN
    weights.version = max([weights.version, *event.weights.values()])


def _begin(account: Account, life: Life) -> None:
    """Before the first change, all of a life is of version 0, as far as it is known."""
    if not life.made:
        life.made.append(BEFORE if account.unknown is None else (0, UNKNOWN, UNKNOWN))


def admitted(state: LedgerState, event: ev.Admitted) -> None:
    """A life began: what it has hit, and what it is to load, may be of older weights."""
    weights, account = state.weights, state.living.get(event.request)
    life = account.life if account is not None else None
    if account is None or life is None:
        return
    now, local = weights.of(adapter_of(account)), max(0, event.local_tokens)
    found = weights_of_blocks.hits(state.blocks, event.request, local)
    made, rows = found if found is not None else ([(0, UNKNOWN, UNKNOWN)], [])
    current = weights.cached_since >= now
    for start, _, version, oldest in spans(made, 0, local):
        is_known = oldest != UNKNOWN or not current
        extend(life.made, start, *((version, oldest) if is_known else (now, now)))
    _judge(state, account, life, HIT, (0, local), rows)
    if event.external_tokens > 0:
        extend(life.made, local, UNKNOWN, UNKNOWN)
    extend(life.made, max(0, account.computed), now, now)
    if event.external_tokens > 0 and not event.asynchronous:
        loaded(state, account)
    if local and weights.refused is not None:
        subject, weights.refused = ResetRefused(*weights.refused, local), None
        state.entries.append(Entry(state.number, event.step, state.at, subject, account))
    weights.cached_since = min(weights.cached_since, oldest_of(life))


def loaded(state: LedgerState, account: Account) -> None:
    """A life loads, or an asynchronous load has finished: its blocks have their hashes now."""
    life, end = account.life, account.computed
    if life is None or not life.made or life.local >= end:
        return
    start, now = max(0, life.local), state.weights.of(adapter_of(account))
    if all(oldest != UNKNOWN for *_, oldest in spans(life.made, start, end)):
        return  # the life began before the first change
    for first, version, oldest in weights_of_blocks.loads(state.blocks, account.request, start, end):
        extend(life.made, first, version, oldest)
    _judge(state, account, life, LOAD, (start, end), ())
    extend(life.made, end, now, now)
    state.weights.cached_since = min(state.weights.cached_since, oldest_of(life))


def _judge(
    state: LedgerState,
    account: Account,
    life: Life,
    source: str,
    positions: tuple[int, int],
    rows: Iterable[HitWeights],
) -> None:
    """Count the tokens of a hit, or of a load, whose chain is of older weights, and enter them."""
    weights, adapter = state.weights, adapter_of(account)
    now, tokens, first, least = weights.of(adapter), 0, -1, weights.version
    for start, end, _, oldest in spans(life.made, *positions):
        age = weights.age(adapter, now, oldest)
        if age:
            counted = account.older_hits if source == HIT else account.older_loads
            add_tokens(counted, age_cause(age), end - start)
        if is_suspect(age):
            first, tokens, least = (start if first < 0 else first), tokens + end - start, min(least, oldest)
    if tokens:
        tokens_of = "hit tokens" if source == HIT else "loaded tokens"
        before = f"version {least}" if least else "the weights before the first change"
        add_line(state, account, f"{tokens} {tokens_of} have KV of {before}")
    if tokens and account.unknown is None:
        writer = next((row[4] for row in rows if row[1] > first and row[3] < now), "")
        subject = StaleKV(source, tokens, first, least, now, writer)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def finished(state: LedgerState, account: Account) -> None:
    """A request ended. Enter the outputs that it sampled over its own KV of older weights."""
    if account.unknown is not None or account.older_hits or account.older_loads:
        return
    rows = [row for row in outputs(account, account.sequence_tokens) if is_suspect(row[4])]
    tokens = sum(end - start for start, end, *_ in rows)
    if tokens:
        least, newest = min(row[3] for row in rows), max(row[2] for row in rows)
        subject = OlderOutputs(tokens, least, newest)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _cache_reset(state: LedgerState, event: ev.CacheReset) -> None:
    """A reset: no block of the cache is older than what requests hold that run on."""
    weights = state.weights
    if event.succeeded:
        lives = [account.life for account in state.living.values() if account.life is not None]
        weights.cached_since = min([weights.version, *map(oldest_of, lives)])
        weights.refused, weights.reset_version = None, weights.version
    elif weights.age(MODEL, weights.version, weights.reset_version) > 0:
        weights.refused = state.step, weights.version
    enter(state, event)


WEIGHTS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.WeightsChanged: _weights_changed,
    ev.CacheReset: _cache_reset,
}
"""Postings by event."""
