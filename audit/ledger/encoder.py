"""Postings of the encoder cache: reads by requests, evictions, and the engine's own count of free space.

An output is *read* by a request in each step that schedules positions of its input. The workers remove what
they are told to, then compute what the step orders, then read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .. import events as ev
from .account import Account, EncoderInput
from .accounts import account_of, add_line, enter
from .entries import EncoderBudget, EncoderOutputEvicted, EncoderOutputMissing, EncoderOutputsKept, Entry
from .ledger_state import LedgerState

READERS_KEPT = 64
"""So many ended readers of one output may be kept beside the open requests."""


def _inputs_seen(state: LedgerState, event: ev.EncoderInputsSeen) -> None:
    account = account_of(state, event.request)
    account.encoder_inputs = [EncoderInput(*event.rows[at : at + 4]) for at in range(0, len(event.rows), 4)]
    enter(state, event, account)


def _cache_seen(state: LedgerState, event: ev.EncoderCacheSeen) -> None:
    cache = state.encoder
    if event.entries is not None and cache.size < 0:
        cache.clear()
        cache.size, cache.shared, cache.loads = event.size, event.shared, event.loads
        rows = event.entries
        cache.entries = dict(zip(rows[::2], rows[1::2], strict=True))
        cache.at_workers = dict.fromkeys(cache.entries)
    enter(state, event)
    _compare_budget(state, event.free, event.step, None)
    _compare_held(state, event)


def _cache_used(state: LedgerState, event: ev.EncoderCacheUsed) -> None:
    """Post the operations of one step, then what its requests read."""
    cache, rows = state.encoder, event.rows
    enter(state, event)
    if cache.size < 0:
        return
    users: dict[int, Account] = {}
    reserved: set[tuple[int, int]] = set()
    computed: list[int] = []
    removed: list[int] = []
    last = None
    for at in range(0, len(rows), 3):
        code, request, of = rows[at : at + 3]
        if code == ev.ENCODER_EVICTED:
            _evicted(state, of, event.step)
        elif code == ev.ENCODER_REMOVED:
            removed.append(of)
        elif code == ev.ENCODER_CLEARED:
            cache.clear()
        else:
            account = account_of(state, request)
            if of >= len(account.encoder_inputs):
                cache.forget()
                return
            item = account.encoder_inputs[of]
            if code == ev.ENCODER_COMPUTED:
                computed.append(item.identity)
                account.encoder_computed += item.embeddings
                continue
            users[request] = account
            if code == ev.ENCODER_RESERVED:
                reserved.add((request, of))
                last = account
                if cache.shared:
                    cache.entries[item.identity] = item.embeddings
    for identity in removed:
        cache.at_workers.pop(identity, None)
    cache.at_workers.update(dict.fromkeys(computed))
    if cache.shared:
        for request, account in users.items():
            _read(state, account, {of for user, of in reserved if user == request}, event.step)
    _compare_budget(state, event.free, event.step, last if cache.shared else None)


def _read(state: LedgerState, account: Account, reserved: set[int], step: int) -> None:
    """Post the inputs that a step reads for one request; it computes or loads those ``reserved``."""
    cache, life, tokens = state.encoder, account.life, _scheduled(state, account, step)
    if life is None or not tokens:  # it was looked at, and not scheduled
        return
    start, end = account.computed - tokens, account.computed
    for of, item in enumerate(account.encoder_inputs):
        if item.start >= end or item.end <= start or item.identity not in cache.entries:
            continue
        if of in reserved and cache.loads:
            cache.at_workers.setdefault(item.identity)
        if account.encoder_read.get(of) != life.number:
            account.encoder_read[of] = life.number
            if of not in reserved:
                account.encoder_cached += item.embeddings
                add_line(state, account, f"{item.embeddings} encoder embeddings cached from {item.start}")
            else:
                add_line(state, account, f"{item.embeddings} encoder embeddings ordered from {item.start}")
        _note_reader(state, item.identity, account.request)
        if item.identity not in cache.at_workers:
            cache.at_workers[item.identity] = None  # it is reported once
            subject = EncoderOutputMissing(item, min(item.end, end) - max(item.start, start), step)
            _subject(state, subject, step, account)


def _note_reader(state: LedgerState, identity: int, request: int) -> None:
    """Note that a request reads an output; those that have ended are forgotten from time to time."""
    readers = state.encoder.readers.setdefault(identity, {})
    readers[request] = None
    if len(readers) > 2 * len(state.living) + READERS_KEPT:
        state.encoder.readers[identity] = {each: None for each in readers if each in state.living}


def _scheduled(state: LedgerState, account: Account, step: int) -> int:
    """The tokens that ``step`` schedules for a request."""
    row = state.last_step.get(account.request)
    return row[1] if row is not None and state.posted_step == step else 0


def _evicted(state: LedgerState, identity: int, step: int) -> None:
    """An output leaves the cache; a subject for each request that has not read it to its end."""
    cache = state.encoder
    cache.entries.pop(identity, None)
    for account, item in _unfinished(state, identity):
        computed = account.computed - _scheduled(state, account, step)
        if computed < item.end:
            subject = EncoderOutputEvicted(item, item.end - max(computed, item.start), step)
            _subject(state, subject, step, account)
    cache.readers.pop(identity, None)


def _unfinished(state: LedgerState, identity: int) -> Iterator[tuple[Account, EncoderInput]]:
    """The inputs of this identity that running requests have begun to read, the last of each request."""
    for request in state.encoder.readers.get(identity, ()):
        account = state.living.get(request)
        if account is None or account.life is None:
            continue
        number = account.life.number
        read = [account.encoder_inputs[of] for of, life in account.encoder_read.items() if life == number]
        items = [item for item in read if item.identity == identity]
        if items:
            yield account, max(items, key=lambda item: item.end)


def _compare_budget(state: LedgerState, free: int, step: int, account: Account | None) -> None:
    """Compare the engine's free embeddings with the entries, or without shared entries with the size."""
    cache = state.encoder
    used = cache.used() if cache.shared else 0
    if cache.size < 0 or used is None:
        return
    expected = cache.size - used
    differs = free != expected if cache.shared else free > expected
    if differs and not cache.budget_differs:
        _subject(state, EncoderBudget(cache.size, free, expected, cache.shared, step), step, account)
    cache.budget_differs = differs


def _compare_held(state: LedgerState, event: ev.EncoderCacheSeen) -> None:
    """Compare what requests hold with the engine's count of evictable embeddings, and with its requests."""
    cache = state.encoder
    sizes = [cache.entries.get(identity, -1) for identity in event.held]
    if cache.size < 0 or event.freeable < 0 or -1 in sizes:
        return
    expected = cache.size - sum(sizes)
    differs = event.freeable != expected
    if differs and not cache.evictable_differs:
        subject = EncoderBudget(cache.size, event.freeable, expected, True, event.step, evictable=True)
        _subject(state, subject, event.step, None)
    cache.evictable_differs = differs
    living = {account.request_id for account in state.living.values()} if event.ended else ()
    for request_id, outputs in event.ended.items():
        if request_id not in living:
            _subject(state, EncoderOutputsKept(request_id, outputs, event.step), event.step, None)


def _subject(
    state: LedgerState,
    subject: EncoderBudget | EncoderOutputEvicted | EncoderOutputMissing | EncoderOutputsKept,
    step: int,
    account: Account | None,
) -> None:
    state.entries.append(Entry(state.number, step, state.at, subject, account))


ENCODER: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.EncoderInputsSeen: _inputs_seen,
    ev.EncoderCacheSeen: _cache_seen,
    ev.EncoderCacheUsed: _cache_used,
}
"""Postings by event."""
