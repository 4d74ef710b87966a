"""Whether all workers of an engine hold the same version of the weights.

The engine core asks all workers for a method and numbers the calls; each worker numbers those that it makes.
If a call failed, or did nothing, on some of them, and a step runs before the caller repeats it, the model
computes with a mixture of two versions.
"""

from __future__ import annotations

from .. import events as ev
from ..bounded_tables import keep_newest
from .accounts import enter
from .entries import Entry, WorkersDiffer
from .ledger_state import LedgerState
from .weights import MODEL, Weights
from .weights_of_requests import adapter_of

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
