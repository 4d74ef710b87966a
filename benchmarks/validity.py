"""Whether a measured round counts: its journal shows that the hooks observed everything.

Hooks that fail cost next to nothing. So a figure is only worth printing if the journal that was written
meanwhile contains every request and every step, and audits clean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from kvledger.audit import events as ev
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.reader import Reader


class InvalidRound(Exception):
    """A round does not count; the message says why."""


def require_complete(journal: Path, request_ids: Collection[str], steps: int | None = None) -> None:
    """Raise :class:`InvalidRound` unless ``journal`` holds these requests and steps, and audits clean.

    Requests that ran before observation began are unknown to the audit by design; no other may be.
    """
    try:
        reasons = list(_reasons(journal, request_ids, steps))
    except LedgerError as error:
        reasons = [f"its journal can't be read: {error}"]
    if reasons:
        raise InvalidRound(f"this round does not count: {'; '.join(reasons)}")


def _reasons(journal: Path, request_ids: Collection[str], steps: int | None) -> Iterator[str]:
    auditor = Auditor()
    recorded: set[str] = set()
    running_before: set[int] | None = None
    recorded_steps = failures = gaps = 0
    first_failure = ""
    for number, event in _events(journal):
        auditor.feed(event, number)
        match event:
            case ev.RequestAdded():
                recorded.add(event.request_id)
            case ev.Snapshot() if running_before is None:
                recorded.update(row.request_id for row in event.rows)
                running_before = {row.request for row in event.rows if not row.fresh}
            case ev.Stepped():
                recorded_steps += 1
            case ev.Repeated():
                recorded_steps += event.times
            case ev.HookFailed():
                failures += 1
                first_failure = first_failure or f"{event.hook}: {event.error}"
            case ev.Gap():
                gaps += 1
    if running_before is None:
        yield "its journal is empty"
        return
    if failures:
        yield f"hooks failed {failures} times, first {first_failure}"
    if gaps:
        yield f"the journal lost events {gaps} times"
    missing = set(request_ids) - recorded
    if missing:
        yield f"{len(missing)} of {len(request_ids)} requests are not in the journal"
    if steps is not None and recorded_steps != steps:
        yield f"the journal has {recorded_steps} of {steps} steps"
    unknown = auditor.ledger.totals().unknown_requests - len(running_before)
    if unknown > 0:
        yield f"{unknown} requests that arrived under observation are unknown to the audit"
    if auditor.findings.check_failures:
        yield f"checks failed: {', '.join(auditor.findings.check_failures)}"
    violations = [each for each in auditor.violations if each.severity == "violation"]
    if violations:
        yield f"the audit found {len(violations)} violations, first {violations[0].message}"


def _events(journal: Path) -> Iterator[tuple[int, ev.Event]]:
    with Reader(journal) as reader:
        for batch in reader.poll():
            yield from enumerate(batch.events, batch.first_event)
