"""The audit of a window of a compacted journal: its sums come from kept rows."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from ...audit.analysis.costs import CostTally
from ...audit.analysis.reconciliation import Differences, Figures, Reconciliation, add_difference
from ...audit.causes import BEGAN_BEFORE, UNKNOWN
from ...audit.figures.totals import Totals
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.observers import Lost, Reconciled
from ...audit.replay.sums import WindowDoubts
from ...audit.replay.windows import Window
from .kept import OPEN_HOUR, Session
from .sums import by_group
from .tables import Facts, Files, KeptRows, mount, quoted


def _ended(kept: Files) -> Files:
    """The files of requests that have ended. Those that are open at the end are in the audit itself."""
    return {table: [path for path in paths if f"={OPEN_HOUR}/" not in path] for table, paths in kept.items()}


def begin_window(audit: EngineAudit, session: Session, window: Window, kept: Files) -> None:
    """Give an audit that was restored where the session ends the sums of the window, from ``kept`` rows.

    The audit has all sums of a window without bounds.
    """
    audit.notes.extend(session.damage)
    if not window.bounded:
        return
    doubts, sums = session.doubts, audit.sums
    findings = audit.auditor.violations
    placed = doubts.placed(findings, window, audit.began_seconds or 0.0)
    for kept_finding, (_, inside) in zip(sums.findings.kept.values(), placed, strict=True):
        kept_finding.in_window = inside
    connection = duckdb.connect()
    try:
        mount(connection, {}, window, kept=[KeptRows("", "", _ended(kept))])
        found = Facts(connection)
        totals = by_group(found, ())[()].totals
        sums.ledger.ended = totals
        sums.journal.requests, sums.journal.unknown = _requests(found), _unknown(found)
        sums.journal.window = WindowDoubts(
            losses=doubts.losses.within(window),
            failures=doubts.failures.within(window),
            unobserved_from=doubts.unobserved_from,
            errors=doubts.errors_within(window),
            requests=_in_window(found, [one.request for one in findings if one.request]),
        )
        sums.observed[Reconciled.__name__] = _reconciliation(found, totals)
        sums.observed[Lost.__name__] = CostTally()
        audit.sums = sums
    finally:
        connection.close()
    for id in sums.findings.not_kept:
        audit.notes.append(f"more requests violate {id} than findings are kept: some may be missing here")


def _requests(facts: Facts) -> dict[tuple[str, str], int]:
    rows = facts.rows(
        f"SELECT verdict, coalesce(outcome, '{UNKNOWN}'), count(*) FROM requests "
        f"WHERE unknown IS DISTINCT FROM '{BEGAN_BEFORE}' GROUP BY ALL"
    )
    return {(verdict, outcome): requests for verdict, outcome, requests in rows}


def _unknown(facts: Facts) -> dict[str, int]:
    query = "SELECT unknown, count(*) FROM requests WHERE unknown IS NOT NULL GROUP BY ALL"
    return dict(facts.rows(query))


def _reconciliation(facts: Facts, totals: Totals) -> Reconciliation:
    sources = ("local", "external", "computed")
    found = Reconciliation(
        settled=Figures(*(totals.of(name) for name in (*sources, "unattained"))),
        plan=Figures(*(totals.of(f"plan_{name}") for name in sources)),
        reported=Figures(*(totals.of(f"reported_{name}") for name in sources)),
        reports=totals.reports,
    )
    steps: dict[str, Differences] = {"to_plan": found.to_plan, "to_reported": found.to_reported}
    query = (
        "SELECT step, cause, count(*), sum(local), sum(external), sum(computed), sum(unattained) "
        "FROM differences GROUP BY ALL"
    )
    for step, cause, requests, *values in facts.rows(query):
        add_difference(steps[step], cause, Figures(*map(int, values)), requests)
    return found


def _in_window(facts: Facts, requests: Sequence[str]) -> dict[str, bool]:
    """For each request with a finding, whether it ended in the window."""
    listed = ", ".join(map(quoted, requests))
    query = f"SELECT request_id FROM requests WHERE request_id IN ({listed})"
    inside = {str(name) for (name,) in facts.rows(query)} if requests else set()
    return {name: name in inside for name in requests}
