"""The time to a request's first output: each microsecond has one cause.

The time begins when the scheduler receives the request, and ends when the scheduler receives the first
output. The front end's share is not in it: vLLM's ``time_to_first_token`` begins at the front end's arrival
time (https://docs.vllm.ai/en/latest/design/metrics.html).
"""

from __future__ import annotations

from .. import causes
from .account import Account
from .life import Life

_PLACE = {cause: place for place, cause in enumerate(causes.FIRST_TOKEN)}


def first_token(account: Account, until: int) -> tuple[int, ...]:
    """Microseconds from the arrival to the first output at ``until``, by cause.

    In the order of :data:`~kvledger.audit.causes.FIRST_TOKEN`.
    """
    spent = [0] * len(_PLACE)
    at, waiting, ran = account.added_at, causes.QUEUED, False
    for life in account.lives:
        spent[_PLACE[waiting]] += life.began_at - at
        at = until if life.ended_at < 0 else life.ended_at
        _spend_life(spent, life, at, causes.PREFILL_AGAIN if ran else causes.PREFILL)
        ran = ran or life.ran_at >= 0
        waiting = causes.PREEMPTED if life.ended_by in causes.PREEMPTIONS else causes.LOAD_FAILED
    # The output of a step may come after a preemption.
    spent[_PLACE[waiting]] += until - at
    return tuple(spent)


def _spend_life(spent: list[int], life: Life, end: int, prefill: str) -> None:
    """A life runs from its first step on; before that, an asynchronous one waits for its load."""
    if not life.asynchronous:
        spent[_PLACE[prefill if life.ran_at >= 0 else causes.UNATTRIBUTED]] += end - life.began_at
        return
    ran_at = life.ran_at if life.ran_at >= 0 else end
    loaded_at = life.load_ended_at if life.load_ended_at >= 0 else ran_at
    load = causes.UNATTRIBUTED if life.load_ended_at < 0 <= life.ran_at else causes.REMOTE_LOAD
    spent[_PLACE[load]] += loaded_at - life.began_at
    spent[_PLACE[causes.READY]] += ran_at - loaded_at
    spent[_PLACE[prefill]] += end - ran_at
