"""Checks of a request as a whole: that it makes progress."""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.subjects import Entry, Stalled
from .registry import Witness, invariant


@invariant(
    "requests/stalled",
    on=(Stalled,),
    message="No step has scheduled request {request} for {steps} steps and {seconds} seconds, "
    "while others ran.",
    near_misses=(
        "a request that waits its turn: no request that came later and is no more urgent runs",
        "a request that waits for an asynchronous load, which is connector/never-finished after ten minutes",
        "a session that waits for its next chunk",
        "a running request that steps leave out while earlier prompts take the whole token budget",
        "an engine with LoRA, where a request may wait for a free adapter while others pass",
    ),
)
def stalled(entry: Entry) -> Iterator[Witness]:
    """A request that runs is scheduled again, and a request that waits is not overtaken for ever.

    Violated when no step schedules a running request, or a waiting one that later requests overtook, though
    other requests run: its client waits for ever. A census finds this after ten minutes; for a request that
    runs, after 4,096 steps that took at least a minute.
    """
    subject = entry.subject
    assert isinstance(subject, Stalled)
    if subject.runs:
        yield Witness(steps=subject.steps, seconds=subject.seconds)
    else:
        yield Witness(
            "Request {request} has waited for {steps} steps and {seconds} seconds, and requests that came "
            "later run.",
            steps=subject.steps,
            seconds=subject.seconds,
        )
