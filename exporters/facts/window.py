"""The audit of a window of a compacted journal: its sums come from kept rows."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from ...audit.analysis.reconciliation import Differences, Figures, Reconciliation, add_difference
from ...audit.causes import BEGAN_BEFORE, UNKNOWN
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.sums import EngineSums, WindowSums
from ...audit.replay.windows import Window
from .kept import Session
from .sums import by_group
from .tables import Facts, Files, Kept, mount

ENDED = "closed_time IS NOT NULL"
"""Requests that are open at the end are in the audit itself."""


def begin_window(audit: EngineAudit, session: Session, window: Window, kept: Files) -> None:
    """Give an audit that was restored where the session ends the sums of the window, from ``kept`` rows.

    The audit has all sums of a window without bounds.
    """
    audit.notes += session.damage
    if not window.bounded:
        return
    doubts, auditor = session.doubts, audit.auditor
    findings = [violation for violation, _ in auditor.placed_violations()]
    auditor.place_findings(doubts.placed(findings, window, audit.began_seconds or 0.0))
    connection = duckdb.connect()
    try:
        mount(connection, {}, window, kept=[Kept("", "", kept)])
        found = Facts(connection)
        audit.begin_with(
            WindowSums(
                sums=EngineSums(
                    totals=by_group(found, (), ENDED)[()].totals,
                    requests=_requests(found),
                    unknown=_unknown(found),
                    reconciliation=_reconciliation(found),
                    events=audit.sums.events,
                ),
                losses=doubts.losses.within(window),
                failures=doubts.failures.within(window),
                errors=doubts.errors_within(window),
                unobserved_from=doubts.unobserved_from,
                in_window=_in_window(found, [one.request for one in findings if one.request]),
            )
        )
    finally:
        connection.close()
    for id in auditor.not_kept:
        audit.notes.append(f"more requests violate {id} than findings are kept: some may be missing here")


def _requests(facts: Facts) -> dict[tuple[str, str], int]:
    rows = facts.rows(
        f"SELECT verdict, coalesce(outcome, '{UNKNOWN}'), count(*) FROM requests "
        f"WHERE {ENDED} AND unknown IS DISTINCT FROM '{BEGAN_BEFORE}' GROUP BY ALL"
    )
    return {(verdict, outcome): requests for verdict, outcome, requests in rows}


def _unknown(facts: Facts) -> dict[str, int]:
    query = f"SELECT unknown, count(*) FROM requests WHERE {ENDED} AND unknown IS NOT NULL GROUP BY ALL"
    return dict(facts.rows(query))


def _reconciliation(facts: Facts) -> Reconciliation:
    names = ("local", "external", "computed", "unattained")
    of = {"": names, "plan_": names[:3], "reported_": names[:3]}
    sums = ", ".join(f"sum({prefix}{name})" for prefix, some in of.items() for name in some)
    ((reports, *values),) = facts.rows(f"SELECT count(reported_local), {sums} FROM requests WHERE {ENDED}")
    tokens = [int(value or 0) for value in values]
    found = Reconciliation(Figures(*tokens[:4]), Figures(*tokens[4:7]), Figures(*tokens[7:]), reports)
    steps: dict[str, Differences] = {"to_plan": found.to_plan, "to_reported": found.to_reported}
    moved = ", ".join(f"sum({name})" for name in names)
    query = f"SELECT step, cause, count(*), {moved} FROM differences WHERE {ENDED} GROUP BY ALL"
    for step, cause, requests, *values in facts.rows(query):
        add_difference(steps[step], cause, Figures(*map(int, values)), requests)
    return found


def _in_window(facts: Facts, requests: Sequence[str]) -> dict[str, bool]:
    """For each request with a finding, whether it ended in the window."""
    inside = {str(name) for (name,) in facts.rows(f"SELECT request_id FROM requests WHERE {ENDED}")}
    return {name: name in inside for name in requests}
