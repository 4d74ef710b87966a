"""Checks of requests as a whole: each is queued once and makes progress, and the engine with it."""

from __future__ import annotations

from collections.abc import Iterator

from ..ledger.entries import Entry, Livelocked, Misqueued, Stalled, StoodStill
from .registry import VLLM_39734, VLLM_49674, VLLM_53130, Witness, invariant


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


@invariant(
    "requests/queued-once",
    on=(Misqueued,),
    message="Request {request} is open and in none of the scheduler's queues, so no step will schedule it.",
    near_misses=(
        "a request that waits for a load, a grammar or a client's next chunk: it is queued meanwhile",
        "an ended request whose blocks a connector keeps: it is in no queue",
        "a request that was put into a queue and never added to the engine, as tests do",
    ),
)
def queued_once(entry: Entry) -> Iterator[Witness]:
    """An open request is in exactly one of the scheduler's queues, and an ended one is in none.

    Violated when the queues of running and of waiting requests together have more or fewer places than there
    are open requests. A request in no queue is never scheduled again; one that is in two, or that has ended,
    is scheduled where nobody expects it, which mostly ends the engine.
    """
    subject = entry.subject
    assert isinstance(subject, Misqueued)
    if subject.open and subject.places:
        yield Witness(
            "Request {request} is in {places} places of the scheduler's queues.", places=subject.places
        )
    elif subject.open:
        yield Witness(places=0)
    else:
        noun = "place" if subject.places == 1 else "places"
        yield Witness(
            f"Request {{ended}} has ended and is still in the scheduler's queues, at {{places}} {noun}.",
            ended=subject.request_id,
            places=subject.places,
        )


@invariant(
    "requests/standstill",
    on=(StoodStill,),
    message="{calls} calls of schedule() in a row scheduled nothing, in {seconds} seconds, though {ready} "
    "requests can run; {request} is the first of them.",
    references=(VLLM_39734, VLLM_53130),
    near_misses=(
        "an engine that is paused",
        "requests that wait for a load, a grammar or a client's next chunk",
        "a step in flight: the next one waits for its output",
        "a request that waits for a connector that keeps blocks or has no answer yet, for ten minutes",
        "requests that wait while paused sessions keep all places of running requests, for ten minutes",
    ),
)
def standstill(entry: Entry) -> Iterator[Witness]:
    """An engine schedules a step while an open request waits for nothing else.

    Violated when 1,024 calls of `schedule()` in a row schedule nothing, though no step is in flight and a
    request could run. Such an engine answers nobody any more, for example because the prompt at the head of
    its queue is larger than its pool. If no request runs, and there is a connector or a session that waits
    for its client, it is found after ten minutes.
    """
    subject = entry.subject
    assert isinstance(subject, StoodStill)
    several = (
        "{calls} calls of schedule() in a row scheduled nothing, in {seconds} seconds, though {ready} "
        "requests can run; {request} is the first of them. {sessions} sessions wait for their client's next "
        "chunk and keep the places of running requests."
    )
    yield Witness(
        several if subject.sessions else None,
        calls=subject.calls,
        seconds=subject.seconds,
        ready=subject.ready,
        sessions=subject.sessions,
    )


@invariant(
    "requests/livelock",
    on=(Livelocked,),
    message="{steps} steps in a row, in {seconds} seconds, scheduled {tokens} tokens and gave none of the "
    "{open} open requests a new one; {request} was preempted {preemptions} times.",
    references=(VLLM_49674,),
    near_misses=(
        "requests that are computed again once, after a reset of the cache or a failed load",
        "one request that is preempted again and again while another goes on",
    ),
)
def livelock(entry: Entry) -> Iterator[Witness]:
    """Steps give some open request a token with KV that it did not have before, or end a request.

    Violated when at least 512 steps in a row do neither, and have computed the tokens of all open requests
    twice by then. To compute each of them once again is enough to go on.
    """
    subject = entry.subject
    assert isinstance(subject, Livelocked)
    yield Witness(
        steps=subject.steps,
        seconds=subject.seconds,
        tokens=subject.tokens,
        open=subject.requests,
        preemptions=subject.preemptions,
    )
