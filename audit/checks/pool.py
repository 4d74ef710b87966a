"""Checks of a token pool that has a slot for each token: each slot is used for one thing."""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import Entry, SlotsKept, SlotsMissing
from .registry import REMOVE_ENGINE, SGLANG_11970, SGLANG_22273, Witness, invariant


@invariant(
    "pool/slots",
    on=(SlotsMissing,),
    stop_now=REMOVE_ENGINE,
    message="{missing} of {size} slots are in no count after step {last_step}: {free} free, "
    "{evictable} cached, {protected} cached and used, {held} held by sessions, {uncached} of requests. "
    "{since}",
    references=(SGLANG_11970, SGLANG_22273),
    near_misses=(
        "a difference that the next account does not have: the engine was between two changes of its counts",
        "tokens that a streaming session holds between its turns",
        "a request that has ended and keeps the slot of the step in flight",
    ),
)
def slots(entry: Entry) -> Iterator[Witness]:
    """Each slot of the token pool is free, cached, cached and used, held by a session, or of a request.

    Violated when two accounts in a row have the same difference between the sum of these and the pool's size.
    Slots that are in no count are never used again: the pool becomes smaller until the engine restarts. Slots
    that are in two counts may be given to two requests.
    """
    subject = entry.subject
    assert isinstance(subject, SlotsMissing)
    free, evictable, protected, held, uncached, size = subject.slots
    figures: dict[str, int | str] = {
        "size": size,
        "last_step": subject.last_step,
        "free": free,
        "evictable": evictable,
        "protected": protected,
        "held": held,
        "uncached": uncached,
        "since": _since(subject),
    }
    if subject.missing > 0:
        yield Witness(missing=subject.missing, **figures)
    else:
        yield Witness(
            "{missing} slots more than the {size} of the pool are counted after step {last_step}: "
            "{free} free, {evictable} cached, {protected} cached and used, {held} held by sessions, "
            "{uncached} of requests. {since}",
            missing=-subject.missing,
            **figures,
        )


def _since(subject: SlotsMissing) -> str:
    """What was done since the slots were counted before."""
    if subject.first_step < 0:
        return "They were not counted before."
    what = f": {subject.done}." if subject.done else "; no request ended or was preempted since."
    return f"It was not so after step {subject.first_step}{what}"


@invariant(
    "pool/protected-at-rest",
    on=(SlotsKept,),
    severity="drift",
    once=True,
    tokens="protected",
    message="{protected} cached tokens are protected, and no request has been open for {seconds} seconds.",
    near_misses=(
        "a streaming session is open: it uses what its turns have cached",
        "a copy to the host that is under way ends within ten seconds",
    ),
)
def protected_at_rest(entry: Entry) -> Iterator[Witness]:
    """Cached tokens are protected from eviction only while a request or a session uses them.

    SGLang up to 0.5.6 looks for the ends of its copies to the host only when it schedules a prefill. An idle
    engine so keeps tokens protected, and its gauges count them as used, until the next request comes.
    """
    subject = entry.subject
    assert isinstance(subject, SlotsKept)
    yield Witness(protected=subject.protected, seconds=subject.seconds)
