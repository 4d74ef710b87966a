"""Audits every scenario of the corpus on the installed vLLM: `python -m tests.scenarios.matrix`.

Prints one JSON line per scenario and no other line: the findings, the verdict and its doubts, the settled
split of each prompt (local, external, computed and unattained tokens), the accounts that do not balance and
the accounts that are still open. The engine publishes KV events, which are compared with its blocks.
``left_out`` has the reasons why a scenario can't run on this host, and ``raised`` the exception that ended
it. Arguments name the scenarios to run; without arguments all run.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.scenarios.kv_stream import KEY, Publisher, compare

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.engines import blocks_out_of_reach
from kvledger.audit.hash_key import VARIABLE
from kvledger.audit.ledger.account import AccountStatement, Settlement
from kvledger.audit.ledger.entries import Entry
from kvledger.audit.traffic.driver import Observation


def main(names: list[str]) -> None:
    """Run the named scenarios, or all."""
    from tests.scenarios.corpus import SCENARIOS

    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name in names or SCENARIOS:
            print(json.dumps({"scenario": name, **outcome(SCENARIOS[name])}), file=stdout, flush=True)


def outcome(scenario: Callable[..., Any]) -> dict[str, Any]:
    """The audit of one scenario, as it is printed."""
    lacking = scenario.lacking() if hasattr(scenario, "lacking") else []
    if lacking:
        return {"left_out": lacking}
    auditor = Auditor(keep_closed=True, debug=True)
    os.environ[VARIABLE] = KEY
    observation, publishers, error = Observation(""), list[Publisher](), ""

    def attach(scheduler: Any) -> None:
        if not blocks_out_of_reach(scheduler):
            publishers.append(Publisher(scheduler))
        observation(scheduler)

    try:
        scenario(attach)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    events = observation.stop("detached")
    auditor.feed_all(events)
    if len(publishers) == 1:
        for subject, step, at in compare(events, publishers[0].stream())[0]:
            auditor.check([Entry(0, step, at, subject, None)])
    accounts = list(auditor.ledger.accounts())
    result: dict[str, Any] = {
        "findings": [[found.id, found.request, found.tokens] for found in auditor.violations],
        "verdict": auditor.verdict,
        "settled": {account.request_id: list(map(_sources, account.settlements)) for account in accounts},
        "doubts": auditor.doubts,
        "unbalanced": [account.request_id for account in accounts if not balances(account.freeze())],
        "open": [account.request_id for account in auditor.ledger.open.values()],
    }
    return {**result, "raised": error} if error else result


def _sources(settled: Settlement) -> list[int]:
    return [settled.local, settled.external, settled.computed, settled.unattained]


def balances(account: AccountStatement) -> bool:
    """Whether every sum of a frozen account is right."""
    work = account.first_prompt + account.first_output + sum(account.rework.values())
    return bool(
        account.unknown is None
        and account.scheduled == work + account.rejected + account.overrun
        and account.promised == account.loaded + sum(account.voided.values())
        and account.suspense == 0
        and all(
            s.local + s.external + s.computed + s.unattained == s.prompt_tokens - s.carried
            for s in account.settlements
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
