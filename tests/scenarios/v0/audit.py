"""Audits every scenario of vLLM's v0 scheduler (0.9.1, 0.9.2).

``python -m tests.scenarios.v0.audit`` prints one JSON line per scenario: the findings, whether all accounts
are closed and balance, and the doubts. An exception in a scenario ends the program.
"""

from __future__ import annotations

from typing import Any

import msgspec
from tests.scenarios.v0.scenarios import CLEAN, CROWDED, V0Scenario
from tests.scenarios.v0.stale_lookups import STALE, UNFIXED

SCENARIOS: dict[str, V0Scenario] = {**CLEAN, **STALE, **UNFIXED, **CROWDED}


class V0Report(msgspec.Struct):
    """The audit of one scenario. ``balanced``: every account is closed and its sums are right."""

    scenario: str
    findings: list[tuple[str, str | None]]
    balanced: bool
    doubts: list[str]


def audited(name: str, **more: Any) -> V0Report:
    """Run a scenario under observation and audit its events."""
    from kvledger.audit.checks.auditor import Auditor
    from kvledger.audit.engines import host_version
    from kvledger.audit.engines.v0.observer import V0Observer
    from kvledger.audit.journal.recorder import MemoryRecorder

    sink, observers = MemoryRecorder(), []

    def attach(scheduler: Any) -> None:
        observer = V0Observer(scheduler, sink, version=host_version())
        observer.start()
        observers.append(observer)

    SCENARIOS[name](attach, **more)
    for observer in observers:
        observer.stop("exit")
    auditor = Auditor(keep_closed=True, debug=True)
    auditor.feed_all(sink.take())
    findings = sorted({(violation.id, violation.request) for violation in auditor.violations}, key=str)
    return V0Report(name, findings, _balanced(auditor.ledger), auditor.doubts)


def _balanced(ledger: Any) -> bool:
    if ledger.open:
        return False
    for account in ledger.accounts():
        frozen = account.freeze()
        work = frozen.first_prompt + frozen.first_output + sum(frozen.rework.values())
        if frozen.scheduled != work + frozen.rejected + frozen.overrun or frozen.suspense:
            return False
        for settled in frozen.settlements:
            sources = settled.local + settled.external + settled.computed + settled.unattained
            if sources != settled.prompt_tokens - settled.carried:
                return False
    return True


def main() -> int:
    """Print one JSON line per scenario."""
    import logging

    logging.disable(logging.WARNING)
    for name in SCENARIOS:
        print(msgspec.json.encode(audited(name)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
