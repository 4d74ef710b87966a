"""The audit of a window of a compacted journal: its sums come from kept rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...audit.analysis.costs import CostTally
from ...audit.analysis.source_differences import Differences, Figures, Reconciliation, add_difference
from ...audit.causes import BEGAN_BEFORE, UNKNOWN
from ...audit.figures.totals import Totals
from ...audit.replay.engine_audit import EngineAudit, WindowDoubts
from ...audit.replay.observers import Lost, Reconciled
from ...audit.replay.windows import EVERYTHING, Window
from .hours import HOUR_DIFFERENCES, HOURS
from .kept import OPEN_HOUR, Session, hour_time
from .sums import by_group, sums_by
from .tables import ONLY_SUMS, Facts, Files, KeptRows, close, connect, mount, quoted


def _ended(files: Files) -> Files:
    """The files of requests that have ended. Those that are open at the end are in the audit itself."""
    return {table: [path for path in paths if f"={OPEN_HOUR}/" not in path] for table, paths in files.items()}


def begin_window(audit: EngineAudit, session: Session, window: Window, kept: KeptRows) -> None:
    """Give an audit that was restored where the session ends the sums of the window, from ``kept`` rows.

    The audit has all sums of a window without bounds.
    """
    audit.notes.extend(session.damage)
    if session.rows_from_in(window) is not None:
        audit.notes.append(ONLY_SUMS.format(journal=session.journal, time=hour_time(session.rows_from)))
    if not window.bounded:
        return
    doubts, sums = session.doubts, audit.sums
    findings = audit.auditor.violations
    placed = doubts.placed(findings, window, audit.began_seconds or 0.0)
    for kept_finding, (_, inside) in zip(sums.findings.kept.values(), placed, strict=True):
        kept_finding.in_window = inside
    with _mounted(kept, window) as found:
        _take_sums(audit, found, kept)
        sums.journal.window = WindowDoubts(
            losses=doubts.losses.within(window),
            failures=doubts.failures.within(window),
            unobserved_from=doubts.unobserved_from,
            errors=doubts.errors_within(window),
            requests=_in_window(found, session, window, [one.request for one in findings if one.request]),
        )


def take_sums(audit: EngineAudit, kept: KeptRows) -> None:
    """Give an audit the sums of all ``kept`` rows of requests that have ended, in the place of its own."""
    with _mounted(kept, EVERYTHING) as found:
        _take_sums(audit, found, kept)


@contextmanager
def _mounted(kept: KeptRows, window: Window) -> Iterator[Facts]:
    connection = connect()
    try:
        mount(connection, {}, window, kept=[kept._replace(files=_ended(kept.files), rest=_ended(kept.rest))])
        yield Facts(connection)
    finally:
        close(connection)


def _take_sums(audit: EngineAudit, found: Facts, kept: KeptRows) -> None:
    sums, everything = audit.sums, by_group(found, ())[()]
    sums.ledger.ended = everything.totals
    sums.journal.requests, sums.journal.unknown = _requests(found), _unknown(found)
    sums.observed[Reconciled.__name__] = _reconciliation(found, everything.totals)
    sums.observed[Lost.__name__] = everything.tallies.get(kept.journal, CostTally())
    audit.sums = sums


def _requests(facts: Facts) -> dict[tuple[str, str], int]:
    keys = ("verdict", f"coalesce(outcome, '{UNKNOWN}')")
    counted = f"unknown IS DISTINCT FROM '{BEGAN_BEFORE}'"
    found = sums_by(facts, HOURS, keys, ("requests",), where=counted)
    return {(verdict, outcome): requests for (verdict, outcome), (requests,) in found.items()}


def _unknown(facts: Facts) -> dict[str, int]:
    found = sums_by(facts, HOURS, ("unknown",), ("requests",), where="unknown IS NOT NULL")
    return {unknown: requests for (unknown,), (requests,) in found.items()}


def _reconciliation(facts: Facts, totals: Totals) -> Reconciliation:
    sources = ("local", "external", "computed")
    found = Reconciliation(
        settled=Figures(*(totals.of(name) for name in (*sources, "unattained"))),
        plan=Figures(*(totals.of(f"plan_{name}") for name in sources)),
        reported=Figures(*(totals.of(f"reported_{name}") for name in sources)),
        reports=totals.reports,
    )
    steps: dict[str, Differences] = {"to_plan": found.to_plan, "to_reported": found.to_reported}
    names = ("requests", "local", "external", "computed", "unattained")
    for (step, cause), (requests, *values) in sums_by(
        facts, HOUR_DIFFERENCES, ("step", "cause"), names
    ).items():
        add_difference(steps[step], cause, Figures(*values), requests)
    return found


def _in_window(facts: Facts, session: Session, window: Window, requests: Sequence[str]) -> dict[str, bool]:
    """For each request with a finding, whether it ended in the window."""
    found = {
        name: window.holds(session.ended_us[name] / 1e6) for name in requests if name in session.ended_us
    }
    others = [name for name in requests if name not in found]
    listed = ", ".join(map(quoted, others))
    query = f"SELECT request_id FROM requests WHERE request_id IN ({listed})"
    inside = {str(name) for (name,) in facts.rows(query)} if others else set()
    return found | {name: name in inside for name in others}
