"""Postings of changes of weights, in the engine and in its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from .. import causes
from .. import events as ev
from ..bounded_tables import keep_newest
from ..figures.sums import add_tokens
from .account import Account, Life, Sampled
from .accounts import activate_all, add_line, enter
from .blocks import reads
from .blocks.reads import HitWeights
from .entries import Entry, OlderOutputs, OutputsMislabelled, ResetRefused, StaleKV, WorkersDiffer
from .ledger_state import LedgerState
from .weights import (
    BEFORE,
    MODEL,
    STAGES,
    UNKNOWN,
    Weights,
    adapter_of,
    age_outputs,
    count,
    extend,
    is_suspect,
    oldest_of,
    outputs,
    spans,
    version_words,
    weights_of,
)

# --- weights of workers --------------------------------------------------------------------------------
#
# Whether all workers of an engine hold the same version of the weights.
#
# The engine core asks all workers for a method and numbers the calls; each worker numbers those that it
# makes. If a call failed, or did nothing, on some of them, and a step runs before the caller repeats it, the
# model computes with a mixture of two versions.


NONE = 0, MODEL
"""Stands for the last call of a method for which the workers were not asked."""

MOST_CALLS = 64
"""Of how many calls the workers' outcomes are kept."""

CHANGES_NOTHING = "finish_weight_update"
"""Does not repair what a failed call left. Each other call is taken for a repetition."""


def asked(weights: Weights, event: ev.WeightsChanged) -> None:
    """All workers were asked for something that may change weights."""
    weights.last_calls[event.by] = event.call, event.adapter
    if event.by != CHANGES_NOTHING:
        weights.differing = {key: of for key, of in weights.differing.items() if of != event.adapter}
    _compare(weights, event.by)


def worker_called(state: LedgerState, event: ev.WorkerWeights) -> None:
    """A worker has made such a call."""
    weights, key = state.weights, (event.by, event.call)
    if event.by == ev.MODEL_LOADS:
        weights.loaded_in = state.step
    else:
        weights.outcomes.setdefault(key, {})[event.worker] = event.raised, event.equal
        keep_newest(weights.outcomes, MOST_CALLS)
        if weights.last_calls.get(event.by, NONE)[0] == event.call:
            _compare(weights, event.by)
    enter(state, event)


def _compare(weights: Weights, by: str) -> None:
    call, adapter = weights.last_calls[by]
    new, old, _ = _sides(weights, (by, call))
    if new and old:
        weights.differing.setdefault((by, call), adapter)


def _sides(weights: Weights, key: tuple[str, int]) -> tuple[list[int], list[int], bool]:
    """The workers with the new weights, those with the old ones, and whether the call raised there.

    A worker where a call raised may have loaded a part.
    """
    outcomes = weights.outcomes.get(key, {})
    raised = sorted(worker for worker, (failed, _) in outcomes.items() if failed)
    if raised:
        return sorted(outcomes.keys() - raised), raised, True
    changed, equal = (
        sorted(worker for worker, (_, equal) in outcomes.items() if equal is answer)
        for answer in (False, True)
    )
    return changed, equal, False


def step_runs(state: LedgerState) -> None:
    """A step runs while workers differ. One of an adapter that no request of the step has is not yet used."""
    weights = state.weights
    scheduled = [row[0] for row in state.last_step.values()] or list(state.steady.values())
    for (by, call), adapter in list(weights.differing.items()):
        accounts = [each for each in scheduled if adapter in (MODEL, adapter_of(each))]
        if accounts or adapter == MODEL:
            del weights.differing[by, call]
            subject = WorkersDiffer(by, call, weights.version, *_sides(weights, (by, call)))
            account = accounts[0] if accounts else None
            state.entries.append(Entry(state.number, state.step, state.at, subject, account))


# --- weights postings ----------------------------------------------------------------------------------
#
# Postings of changes of weights, and of lives that begin after one.


HIT, LOAD = "hit", "load"
"""Where KV of older weights comes from."""

FIGURES = {HIT: "older_hits", LOAD: "older_loads"}
"""Where they are counted."""

EQUAL = "equal"
"""Calls after which all weights were those of before, by a digest."""

CHANGES = (ev.DECLARED, ev.DETECTED, ev.POSSIBLE, ev.LABELLED, EQUAL)
"""What is counted of weights, by name."""


def _weights_changed(state: LedgerState, event: ev.WeightsChanged) -> None:
    weights, counted = state.weights, state.sums.weights_changes
    if event.call and event.kind == ev.POSSIBLE and weights.loaded_in == state.step:
        event = replace(event, kind=ev.DECLARED)  # a worker's model loaded weights in the call
    weights.loaded_in = -1
    if event.changes and event.version > weights.version:
        _begin_version(state, event)
        weights.possible.add(weights.stage)
    if event.kind == ev.LABELLED and state.engine and state.engine.configuration.get("output_labels"):
        _label(state, event.label)
    if event.call:
        asked(weights, event)
    if event.is_look and not event.changes:
        _begin_stage(state, weights.stage + 1, MODEL)
        weights.counted = []
    elif not event.changes:
        add_tokens(counted, EQUAL if event.equal else event.kind, 1)
    elif not event.is_certain:
        add_tokens(counted, event.kind, 1)
    elif weights.stage in weights.possible:
        weights.possible.discard(weights.stage)
        add_tokens(counted, event.kind, 1)
    if event.is_look and event.changes:
        _doubt_stage(state)
    enter(state, event)


def _label(state: LedgerState, label: str) -> None:
    """The engine's output calls the weights so from the next token on."""
    activate_all(state)
    for account in state.living.values():
        earlier = account.labelled or [(0, state.weights.label)]
        account.labelled = [*earlier, (account.sequence_tokens, label)]
    state.weights.label = label


def _begin_version(state: LedgerState, event: ev.WeightsChanged) -> None:
    """What is computed from here on is of other weights."""
    weights, before = state.weights, state.weights.stage
    stage = event.version * STAGES
    if event.is_look:
        weights.found[stage] = before
    accounts = _begin_stage(state, stage, event.adapter)
    for account in accounts:
        whose = f"the weights of {event.adapter}" if event.adapter else "the weights"
        label = f" ({event.label})" if event.label else ""
        when = " since the last look" if event.is_look else ""
        add_line(state, account, f"{whose} changed{when}: version {event.version}{label}")


def _begin_stage(state: LedgerState, stage: int, adapter: str) -> list[Account]:
    """Keep apart what is computed from here on. Returns the accounts that run with weights of ``adapter``.

    Steps in flight at a change run under the weights of before. Of those in flight at a look it is not known
    whether they run before it, so they belong to the stage after it.
    """
    activate_all(state)
    weights, is_look = state.weights, stage % STAGES > 0
    accounts = [each for each in state.living.values() if adapter in (MODEL, adapter_of(each))]
    for account in accounts:
        for flight in () if is_look else account.in_flight:
            _begin(account, flight.life)
            flight.weights = weights_of(weights, account, flight)
    weights.stage = stage
    if is_look:
        weights.looked = stage
    else:
        weights.changes.setdefault(adapter, []).append(stage)
    for account in accounts:
        if account.life is not None:
            now, life = weights.of(adapter_of(account)), account.life
            _begin(account, life)
            starts = [each.start for each in account.in_flight if each.life is life and each.weights is None]
            extend(life.made, min([account.computed, *starts]), now, now)
    return accounts


def _doubt_stage(state: LedgerState) -> None:
    """A look has found a change: what was computed since the look before is of weights that are not known."""
    weights = state.weights
    counted, weights.counted = weights.counted, []
    for account in state.living.values():
        age_outputs(weights, account)
    for account, figure, stage, oldest, tokens in counted:
        is_ended = account.closed_at >= 0 and state.is_counted(account)
        if count(weights, account, figure, stage, oldest, tokens) and is_ended:
            add_tokens(getattr(state.sums.ended, figure), causes.AGE_UNKNOWN, tokens)


def take_versions(state: LedgerState, event: ev.Snapshot) -> None:
    """A segment begins: take over the versions that are not known, because their events are not read."""
    weights = state.weights
    for adapter, version in event.weights.items():
        stages = weights.changes.setdefault(adapter, [])
        if not stages or stages[-1] < version * STAGES:
            stages.append(version * STAGES)
            weights.cached_since = UNKNOWN
        weights.stage = max(weights.stage, version * STAGES)


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
    found = reads.hits(state.blocks, event.request, local)
    made, rows = found if found is not None else ([(0, UNKNOWN, UNKNOWN)], [])
    cached = min(weights.cached_since, now)
    is_current = weights.age(adapter_of(account), now, cached) == 0
    for start, _, stage, oldest in spans(made, 0, local):
        is_known = oldest != UNKNOWN or not is_current
        extend(life.made, start, *((stage, oldest) if is_known else (cached, cached)))
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
    for first, version, oldest in reads.loads(state.blocks, account.request, start, end):
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
    now, tokens, first, least = weights.of(adapter), 0, -1, weights.stage
    for start, end, _, oldest in spans(life.made, *positions):
        age = count(weights, account, FIGURES[source], now, oldest, end - start)
        if is_suspect(age):
            first, tokens, least = (start if first < 0 else first), tokens + end - start, min(least, oldest)
    if tokens:
        tokens_of = "hit tokens" if source == HIT else "loaded tokens"
        version = weights.version_of(adapter, least)
        add_line(state, account, f"{tokens} {tokens_of} have KV of {version_words(version)}")
    if tokens and account.unknown is None:
        older = (row for row in rows if row[1] > first and is_suspect(weights.age(adapter, now, row[3])))
        writer = next((row[4] for row in older), "")
        subject = StaleKV(source, tokens, first, version, weights.version_of(adapter, now), writer)
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def finished(state: LedgerState, account: Account, sequence_tokens: int) -> None:
    """A request ended. Enter the outputs that it sampled over KV of older weights."""
    end = sequence_tokens if sequence_tokens >= 0 else account.sequence_tokens
    rows = [each for each in outputs(account, end) if is_suspect(each[2][3])]
    if account.unknown is not None or not rows:
        return
    weights, adapter = state.weights, adapter_of(account)
    oldest, newest = min(row[2] for *_, row in rows), max(row[1] for *_, row in rows)
    versions = weights.version_of(adapter, oldest), weights.version_of(adapter, newest)
    subjects: list[OlderOutputs | OutputsMislabelled] = list(
        _mislabelled(weights, account, rows, end, versions)
    )
    if not {*account.older_hits, *account.older_loads} - {causes.AGE_UNKNOWN}:
        subjects.append(OlderOutputs(sum(stop - start for start, stop, _ in rows), *versions))
    for subject in subjects:
        state.entries.append(Entry(state.number, state.step, state.at, subject, account))


def _mislabelled(
    weights: Weights,
    account: Account,
    rows: Sequence[tuple[int, int, Sampled]],
    sequence_end: int,
    versions: tuple[int, int],
) -> Iterator[OutputsMislabelled]:
    """The first span of the engine's output that has tokens over KV of older weights, if it has a label."""
    labelled, prompt = account.labelled or [(0, weights.label)], account.prompt_tokens
    ends = [start for start, _ in labelled[1:]] + [sequence_end]
    for (start, label), end in zip(labelled, ends, strict=True):
        tokens = sum(max(0, min(end, last) - max(start, first)) for first, last, _ in rows)
        if label and tokens:
            yield OutputsMislabelled(label, max(0, start - prompt), end - prompt, tokens, *versions)
            return


def _cache_reset(state: LedgerState, event: ev.CacheReset) -> None:
    """A reset: no block of the cache is older than what requests hold that run on."""
    weights = state.weights
    state.slots.note(state.step, "the cache was reset")
    if event.succeeded:
        lives = [account.life for account in state.living.values() if account.life is not None]
        weights.cached_since = min([weights.stage, *map(oldest_of, lives)])
        weights.refused, weights.reset_stage = None, weights.stage
    elif weights.age(MODEL, weights.stage, weights.reset_stage) > 0:
        weights.refused = state.step, weights.version
    enter(state, event)


WEIGHTS: dict[type[ev.Event], Callable[[LedgerState, Any], None]] = {
    ev.WeightsChanged: _weights_changed,
    ev.WorkerWeights: worker_called,
    ev.CacheReset: _cache_reset,
}
"""Postings by event."""
