"""The times to a request's first output and from there to its last: each microsecond has one cause.

The first time begins when the scheduler receives the request, and ends when the scheduler receives the first
output. The front end's share is not in it: vLLM's ``time_to_first_token`` begins at the front end's arrival
time. Its ``time_per_output_token`` is the second time divided by the output tokens after the first
(https://docs.vllm.ai/en/latest/design/metrics.html).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .. import causes
from .account import Account

PREFILL_PLACE = list(causes.FIRST_TOKEN).index(causes.PREFILL)
DECODE_PLACE = list(causes.OUTPUT_TIME).index(causes.DECODE)

_QUEUED = causes.QUEUED, causes.DECODE_PREEMPTED
_READY = causes.READY, causes.DECODE_LOADING
_PREEMPTED = causes.PREEMPTED, causes.DECODE_PREEMPTED
_LOAD_FAILED = causes.LOAD_FAILED, causes.DECODE_LOAD_FAILED


def first_token(account: Account, until: int) -> tuple[int, ...]:
    """Microseconds from the arrival to the first output at ``until``, by cause.

    In the order of :data:`~kvledger.audit.causes.FIRST_TOKEN`.
    """
    return _divide(account, causes.FIRST_TOKEN, 0, account.added_at, until)


def output_time(account: Account, since: int, until: int) -> tuple[int, ...]:
    """Microseconds from the first output at ``since`` to the last one at ``until``, by cause.

    In the order of :data:`~kvledger.audit.causes.OUTPUT_TIME`.
    """
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
