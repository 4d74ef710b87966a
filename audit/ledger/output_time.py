"""The time from a request's first output to its last: each microsecond has one cause.

vLLM's ``time_per_output_token`` is this time divided by the output tokens after the first
(https://docs.vllm.ai/en/latest/design/metrics.html).
"""

from __future__ import annotations

from .. import causes
from .account import Account

_PLACE = {cause: place for place, cause in enumerate(causes.OUTPUT_TIME)}


def output_time(account: Account, since: int, until: int) -> tuple[int, ...]:
    """Microseconds from the first output at ``since`` to the last one at ``until``, by cause.

    In the order of :data:`~kvledger.audit.causes.OUTPUT_TIME`.
    """
    spent = [0] * len(_PLACE)
    at, waiting = since, causes.DECODE_PREEMPTED
    for life in account.lives:
        end = until if life.ended_at < 0 else life.ended_at
        ran_at = life.ran_at if life.ran_at >= 0 else end
        output_at = life.output_at if life.output_at >= 0 else end
        for cause, upto in (
            (waiting, life.began_at),
            (causes.DECODE_LOADING, ran_at),
            (causes.DECODE_AGAIN, output_at),
            (causes.DECODE, end),
        ):
            if upto > at:
                spent[_PLACE[cause]] += upto - at
                at = upto
        preempted = life.ended_by in causes.PREEMPTIONS
        waiting = causes.DECODE_PREEMPTED if preempted else causes.DECODE_LOAD_FAILED
    spent[_PLACE[waiting]] += until - at
    return tuple(spent)
