"""The times to a request's first output and from there to its last: each microsecond has one cause.

The first time begins when the scheduler receives the request, and ends when the scheduler receives the first
output. The front end's share is not in it: vLLM's ``time_to_first_token`` begins at the front end's arrival
time. Its ``time_per_output_token`` is the second time divided by the output tokens after the first
(https://docs.vllm.ai/en/latest/design/metrics.html).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .. import causes
from .account import Account

PREFILL_PLACE = list(causes.FIRST_TOKEN).index(causes.PREFILL)
DECODE_PLACE = list(causes.OUTPUT_TIME).index(causes.DECODE)

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


def _divide(account: Account, names: Iterable[str], place: int, since: int, until: int) -> tuple[int, ...]:
    spent = dict.fromkeys(names, 0)
    at = since
    for *stage, end in _stages(account, until):
        if end > at:
            spent[stage[place]] += end - at
            at = end
    return tuple(spent.values())


def _stages(account: Account, until: int) -> Iterator[tuple[str, str, int]]:
    """What a request did one after the other: the cause before its first output, the one after, and the end.

    A life runs from its first step on; before that, an asynchronous one waits for its load. The output of a
    step may come after a preemption.
    """
    waiting, run = (causes.QUEUED, causes.DECODE_PREEMPTED), causes.PREFILL
    for life in account.lives:
        end = until if life.ended_at < 0 else life.ended_at
        runs = life.ran_at >= 0
        ran_at = life.ran_at if runs else end
        yield *waiting, life.began_at
        if life.asynchronous:
            loads = life.load_ended_at >= 0 or not runs
            loaded_at = life.load_ended_at if life.load_ended_at >= 0 else ran_at
            yield causes.REMOTE_LOAD if loads else causes.UNATTRIBUTED, causes.DECODE_LOADING, loaded_at
            yield causes.READY, causes.DECODE_LOADING, ran_at
        else:
            yield run if runs else causes.UNATTRIBUTED, causes.DECODE_LOADING, ran_at
        yield run, causes.DECODE_AGAIN, min(life.output_at, end) if life.output_at >= 0 else end
        yield run, causes.DECODE, end
        run = causes.PREFILL_AGAIN if runs else run
        waiting = _PREEMPTED if life.ended_by in causes.PREEMPTIONS else _LOAD_FAILED
    yield *waiting, until
