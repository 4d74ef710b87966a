"""Clocks: why requests wait for their first admission, and how the requests of a step share its time.

Also what the time to a first token, and from the first to the last, consists of.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import sub
from typing import Literal

import msgspec

from .. import causes
from .account import Account, Life

# --- queue clock ---------------------------------------------------------------------------------------
#
# Why requests waited for their first admission: one clock for all of them.
#
# The clock adds up the time of each cause for which steps left requests waiting. A request's part is the
# difference of two readings, so it costs the same however long the queue is.


_PLACE = {cause: place for place, cause in enumerate(causes.QUEUE)}
_NEXT_STEP, _UNKNOWN = _PLACE[causes.QUEUED_NEXT_STEP], _PLACE[causes.QUEUED_UNKNOWN]
_NONE = (0,) * len(_PLACE)


class QueueClock(msgspec.Struct):
    """Microseconds since the journal's beginning by cause, in the order of ``causes.QUEUE``."""

    recorded: bool = False
    """Whether the observer records what ended the admissions of steps."""
    cause: str = causes.QUEUED_UNKNOWN
    """The cause that holds now."""
    since: int = 0
    """Since when it holds."""
    spent: list[int] = msgspec.field(default_factory=lambda: [0] * len(_PLACE))
    """The time of each cause until then."""
    waiting: dict[int, int | tuple[int, ...]] = {}
    """By request without an admission: the reading from which its time counts. Until a step has left it
    waiting, the time of its arrival; from then on the time between is a part of the next step's."""

    def _read(self, at: int) -> list[int]:
        reading = list(self.spent)
        reading[_PLACE.get(self.cause, _UNKNOWN)] += at - self.since
        return reading

    def begin(self, request: int, at: int, *, seen: bool) -> None:
        """The request waits. ``seen``: its arrival is an event; else a step may have left it waiting."""
        missed = not seen or self.cause == causes.QUEUED_PAUSED
        self.waiting[request] = tuple(self._read(at)) if missed else at

    def set(self, cause: str, at: int) -> None:
        """A step left requests waiting for this cause."""
        self.spent, self.cause, self.since = self._read(at), cause, at
        for request in reversed(self.waiting):
            arrived = self.waiting[request]
            if not isinstance(arrived, int):
                break
            reading = list(self.spent)
            reading[_NEXT_STEP] -= at - arrived
            self.waiting[request] = tuple(reading)

    def read_anew(self) -> None:
        """Let the present reading be 0; only differences are ever used. A cause that holds for nobody is
        forgotten, but not a pause, which also holds for requests that are still to come."""
        left = {request: found for request, found in self.waiting.items() if not isinstance(found, int)}
        if self.cause != causes.QUEUED_PAUSED and not left:
            self.cause, self.since = causes.QUEUED_UNKNOWN, 0
        self.waiting |= {request: tuple(map(sub, reading, self.spent)) for request, reading in left.items()}
        self.spent = [0] * len(_PLACE)

    def end(self, request: int, waited: int, at: int) -> tuple[int, ...]:
        """The parts of the time that the request waited: it is admitted, or it ends."""
        began = self.waiting.pop(request, at - waited)
        if self.recorded and not isinstance(began, int):
            return tuple(map(sub, self._read(at), began))
        place = _NEXT_STEP if self.recorded else _UNKNOWN
        return *_NONE[:place], waited, *_NONE[place + 1 :]


# --- step clock ----------------------------------------------------------------------------------------
#
# How the requests of a step share its time: by the tokens that each has in the step.
#
# A step lasts until the next one is scheduled. Steps with the same tokens follow each other unrecorded, and
# the shares in them are equal, so only the time from one change to the next is needed. The clock adds up the
# time of one token. A request's share is the difference of two readings, times its tokens.
#
# Readings are whole numbers, so that a difference does not depend on where a replay began.


UNIT = 20
"""A reading of 1 is 2 to the power of -20 microseconds."""

_MODULUS = (1 << 63) - 1
"""Readings begin again at 2 to the power of 63, so that a checkpoint can hold them."""


class StepClock(msgspec.Struct):
    """The time that one token of each step took, added up."""

    reading: int = 0
    """The sum up to the last change."""
    since: int = 0
    """The time of the last change."""
    tokens: int = 0
    """The tokens of the present step."""

    def read(self, at: int) -> int:
        """The sum up to ``at``."""
        if not self.tokens:
            return self.reading
        return (self.reading + (at - self.since << UNIT) // self.tokens) & _MODULUS

    def read_anew(self, lives: Iterable[Life]) -> None:
        """Let the present reading be 0; only differences are ever used. ``lives``: all that have tokens."""
        for life in lives:
            life.shared_to = life.shared_to - self.reading & _MODULUS
        self.reading = 0

    def change(self, at: int, tokens: int) -> None:
        """A step with other tokens begins."""
        self.reading, self.since, self.tokens = self.read(at), at, tokens


def share(life: Life, clock: StepClock, at: int, tokens: int) -> None:
    """Add the life's share up to ``at``; from there it has ``tokens`` in each step."""
    if life.step_tokens or tokens:
        reading = clock.read(at)
        if own := life.step_tokens:
            life.own += own * (reading - life.shared_to & _MODULUS)
        life.step_tokens, life.shared_to = tokens, reading if tokens else 0


def prefill_parts(account: Account, prefill: int) -> tuple[int, int]:
    """The request's own part of its ``prefill`` microseconds, and the rest. All shares are added."""
    for life in account.lives:
        if life.ran_at >= 0:
            return _parts(life.own, prefill)
    return _parts(0, prefill)


def decode_parts(account: Account, decode: int) -> tuple[int, int]:
    """The request's own part of its ``decode`` microseconds, and the rest. All shares are added."""
    own = 0
    for life in account.lives:
        if life.output_at >= 0:
            own += life.own - life.own_at_output
    return _parts(own, decode)


def _parts(own: int, whole: int) -> tuple[int, int]:
    microseconds = own + (1 << UNIT - 1) >> UNIT
    return microseconds, whole - microseconds


# --- token times ---------------------------------------------------------------------------------------
#
# The times to a request's first output and from there to its last: each microsecond has one cause.
#
# The first time begins when the scheduler receives the request, and ends when the scheduler receives the
# first output. The front end's share is not in it: vLLM's ``time_to_first_token`` begins at the front end's
# arrival time. Its ``time_per_output_token`` is the second time divided by the output tokens after the first
# (https://docs.vllm.ai/en/latest/design/metrics.html).


PREFILL_PLACE = list(causes.FIRST_TOKEN).index(causes.PREFILL)
DECODE_PLACE = list(causes.OUTPUT_TIME).index(causes.DECODE)

assert next(iter(causes.FIRST_TOKEN)) == causes.QUEUED and DECODE_PLACE == 0
_NOTHING_ELSE = (0,) * (PREFILL_PLACE - 1), (0,) * (len(causes.FIRST_TOKEN) - 1 - PREFILL_PLACE)
_NEVER_INTERRUPTED = (0,) * (len(causes.OUTPUT_TIME) - 1)
"""The microseconds of all other causes, of a request that waited once and then ran to its end."""

_QUEUED = causes.QUEUED, causes.DECODE_PREEMPTED
_READY = causes.READY, causes.DECODE_LOADING
_PREEMPTED = causes.PREEMPTED, causes.DECODE_PREEMPTED
_LOAD_FAILED = causes.LOAD_FAILED, causes.DECODE_LOAD_FAILED


def first_token(account: Account, until: int) -> tuple[int, ...]:
    """Microseconds from the arrival to the first output at ``until``, by cause.

    In the order of :data:`~kvledger.audit.causes.FIRST_TOKEN`.
    """
    life = account.lives[0] if len(account.lives) == 1 else None
    if life is not None and life.ended_at < 0 and not life.asynchronous:
        began = life.began_at
        if account.added_at <= began <= life.ran_at <= until:  # it waited once, and then ran
            return (began - account.added_at, *_NOTHING_ELSE[0], until - began, *_NOTHING_ELSE[1])
    return _divide(account, causes.FIRST_TOKEN, 0, account.added_at, until)


def output_time(account: Account, since: int, until: int) -> tuple[int, ...]:
    """Microseconds from the first output at ``since`` to the last one at ``until``, by cause.

    In the order of :data:`~kvledger.audit.causes.OUTPUT_TIME`.
    """
    life = account.lives[0] if len(account.lives) == 1 else None
    if life is not None and life.ended_at < 0 and 0 <= life.ran_at <= life.output_at <= since <= until:
        return until - since, *_NEVER_INTERRUPTED
    return _divide(account, causes.OUTPUT_TIME, 1, since, until)


def _divide(
    account: Account, names: Iterable[str], place: Literal[0, 1], since: int, until: int
) -> tuple[int, ...]:
    """Microseconds by cause. Each stage has a cause before the first output and, at ``place`` 1, after it.

    A life runs from its first step on; before that, an asynchronous one waits for its load. The output of a
    step may come after a preemption.
    """
    spent = dict.fromkeys(names, 0)
    at, waiting, prefill = since, _QUEUED, causes.PREFILL
    for life in account.lives:
        end = until if life.ended_at < 0 else life.ended_at
        runs = life.ran_at >= 0
        ran_at = life.ran_at if runs else end
        loaded_at, admitted = ran_at, prefill if runs else causes.UNATTRIBUTED
        if life.asynchronous:
            admitted = causes.REMOTE_LOAD if life.load_ended_at >= 0 or not runs else causes.UNATTRIBUTED
            loaded_at = life.load_ended_at if life.load_ended_at >= 0 else ran_at
        output_at = min(life.output_at, end) if life.output_at >= 0 else end
        for stage, upto in (
            (waiting, life.began_at),
            ((admitted, causes.DECODE_LOADING), loaded_at),
            (_READY, ran_at),
            ((prefill, causes.DECODE_AGAIN), output_at),
            ((prefill, causes.DECODE), end),
        ):
            if upto > at:
                spent[stage[place]] += upto - at
                at = upto
        prefill = causes.PREFILL_AGAIN if runs else prefill
        waiting = _PREEMPTED if life.ended_by in causes.PREEMPTIONS else _LOAD_FAILED
    spent[waiting[place]] += until - at
    return tuple(spent.values())
