"""Sums of groups of requests: figures, waiting, percentiles, and lost work by engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from ...audit.analysis.costs import PREFILL, REWORK, CostTally, Loads, LostTokens
from ...audit.analysis.source_differences import Differences, Figures, Reconciliation, add_difference
from ...audit.causes import BEGAN_BEFORE, UNKNOWN
from ...audit.figures.declared import FIGURES
from ...audit.figures.sums import Sums
from ...audit.figures.totals import Totals
from ...audit.replay.engine_audit import EngineAudit, WindowDoubts
from ...audit.replay.observers import Lost, Reconciled
from ...audit.replay.windows import EVERYTHING, Window
from .hours import HOUR_CAUSES, HOUR_DIFFERENCES, HOURS, LOST, Hourly, hours_of, lost_columns, rows_of
from .kept import OPEN_HOUR, Session, hour_time
from .schema import LOAD_COLUMNS
from .tables import ONLY_SUMS, REST, Facts, Files, KeptRows, close, connect, mount, quoted

PERCENTILES = (50, 95, 99)

Percentiles = dict[str, dict[str, float | None]]
"""By column, then by percent."""

Group = tuple[str, ...]
"""The values of the columns that requests are grouped by; empty: all requests."""


class GroupSums(Sums):
    """The sums of one group.

    ``figures`` are the sums of all columns of figures; ``totals`` has those of all requests by cause, too.
    ``tallies``: lost work and loads in tokens, by journal.
    """

    figures: dict[str, int] = {}
    totals: Totals = msgspec.field(default_factory=Totals)
    waited_us: int = 0
    missed: int = 0
    """Prompt tokens that missed the caches."""
    tallies: dict[str, CostTally] = {}
    percentiles: Percentiles = {}


def by_group(
    facts: Facts,
    columns: Sequence[str],
    where: str = "",
    percentiles: Sequence[str] = (),
    *,
    group_costs: bool = False,
) -> dict[Group, GroupSums]:
    """The sums of each group, and of all requests as the group ``()``, which alone has sums by cause.

    ``columns`` and ``where`` are SQL over ``requests``. Only with ``group_costs`` groups have their rework in
    ``tallies``.
    """
    groups: dict[Group, GroupSums] = {(): GroupSums()}
    found = sums_by(facts, HOURS, ("journal",), _NAMES, columns=columns, where=where)
    for (*group, journal), values in found.items():
        for name in {(), tuple(group)}:
            groups.setdefault(name, GroupSums()).merge(_sums(journal, values))
    for figure in FIGURES:
        if not figure.causes:
            setattr(groups[()].totals, figure.name, groups[()].figures.get(figure.name, 0))
    _add_causes(facts, groups, where)
    if columns and group_costs:
        _add_rework(facts, groups, columns, where)
    if percentiles:
        facts.need_rows("--percentiles")
        for grouped in {tuple(columns), ()}:
            _add_percentiles(facts, groups, grouped, where, percentiles)
    for one in groups.values():
        one.figures = {figure.name: one.figures.get(figure.name, 0) for figure in FIGURES}
    return groups


Key = tuple[Any, ...]


def sums_by(
    facts: Facts,
    table: Hourly,
    keys: Sequence[str],
    names: Sequence[str],
    *,
    columns: Sequence[str] = (),
    where: str = "",
    having: str = "",
) -> dict[Key, list[int]]:
    """Sums of a table, by the group of their request and by expressions over the table's own columns.

    ``columns`` and ``where`` are expressions over requests, ``having`` one over the table's rows. Hours of
    which sums are kept are answered from these where they know the columns, and all others from rows.
    """
    summed = facts.summed(columns, where)
    sql = {one.column.name: one.sql for one in table.sums}
    grouped = dict(zip(groups(columns), columns, strict=True))
    clause = f" WHERE {having}" if having else ""
    rows = rows_of(table, grouped, REST if summed else "", where)
    asked = [(rows, [sql[name] for name in names])]
    if summed:
        asked.append((hours_of(table, grouped, where), [f"sum({name})" for name in names]))
    parts = [
        f"SELECT {', '.join((*grouped, *keys, *sums))} FROM {rows}{clause} GROUP BY ALL"
        for rows, sums in asked
    ]
    found: dict[Key, list[int]] = {}
    width = len(columns)
    for row in facts.rows(" UNION ALL ".join(parts)):
        key = (*map(str, row[:width]), *row[width : width + len(keys)])
        values = [int(value or 0) for value in row[width + len(keys) :]]
        before = found.get(key)
        found[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]
    return found


def groups(columns: Sequence[str]) -> list[str]:
    """What the columns of groups are called in SQL."""
    return [f"g{place}" for place in range(len(columns))]


# --- requests -------------------------------------------------------------------------------------------

_LOADS = tuple(column.name for column in LOAD_COLUMNS)
_NAMES = (
    *(figure.name for figure in FIGURES),
    "waited_microseconds",
    "missed",
    *_LOADS,
    *(name for lost in LOST for name in lost_columns(lost)),
)


def _sums(journal: str, values: Sequence[int]) -> GroupSums:
    """The sums of :data:`_NAMES` of one journal."""
    of = dict(zip(_NAMES, values, strict=True))
    tally = CostTally(loads=Loads(*(of[name] for name in _LOADS)))
    for lost in LOST:
        key, computed_as = lost
        tokens, requests = (of[name] for name in lost_columns(lost))
        if tokens:
            tally.merge(CostTally({key: LostTokens({computed_as: tokens}, requests)}))
    return GroupSums(
        figures={figure.name: of[figure.name] for figure in FIGURES},
        waited_us=of["waited_microseconds"],
        missed=of["missed"],
        tallies={journal: tally},
    )


# --- causes ---------------------------------------------------------------------------------------------

_WITH_CAUSES = ", ".join(f"'{figure.name}'" for figure in FIGURES if figure.causes)
_BY_CAUSE = ("journal", "figure", "cause", "more_blocks_percent")


def _add_causes(facts: Facts, groups: dict[Group, GroupSums], where: str) -> None:
    everything = groups[()]
    found = sums_by(
        facts,
        HOUR_CAUSES,
        _BY_CAUSE,
        ("tokens", "requests"),
        where=where,
        having=f"figure IN ({_WITH_CAUSES})",
    )
    for (journal, figure, cause, percent), (tokens, requests) in found.items():
        everything.totals.merge(Totals(**{figure: {cause: tokens}}))  # type: ignore[arg-type]
        if figure == REWORK:
            everything.merge(_rework(journal, cause, percent, tokens, requests))


def _add_rework(facts: Facts, groups: dict[Group, GroupSums], columns: Sequence[str], where: str) -> None:
    found = sums_by(
        facts,
        HOUR_CAUSES,
        _BY_CAUSE,
        ("tokens", "requests"),
        columns=columns,
        where=where,
        having=f"figure = '{REWORK}'",
    )
    for (*group, journal, _, cause, percent), (tokens, requests) in found.items():
        groups[tuple(group)].merge(_rework(journal, cause, percent, tokens, requests))


def _rework(journal: str, cause: str, percent: int | None, tokens: int, requests: int) -> GroupSums:
    avoidable = {} if percent is None else {percent: tokens}
    lost = LostTokens({PREFILL: tokens}, requests, avoidable=avoidable)
    return GroupSums(tallies={journal: CostTally({f"{REWORK}/{cause}": lost})})


# --- percentiles ----------------------------------------------------------------------------------------


def _add_percentiles(
    facts: Facts,
    groups: dict[Group, GroupSums],
    columns: Sequence[str],
    where: str,
    percentiles: Sequence[str],
) -> None:
    shares = ", ".join(str(percent / 100) for percent in PERCENTILES)
    selected = [*columns, *(f"quantile_disc({column}, [{shares}])" for column in percentiles)]
    query = f"SELECT {', '.join(selected)} FROM requests" + (f" WHERE ({where})" if where else "")
    for row in facts.rows(f"{query} GROUP BY ALL" if columns else query):
        groups[tuple(map(str, row[: len(columns)]))].percentiles = {
            column: dict(zip(map(str, PERCENTILES), found or [None] * len(PERCENTILES), strict=True))
            for column, found in zip(percentiles, row[len(columns) :], strict=True)
        }


# --- The audit of a window of a compacted journal: its sums come from kept rows.


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
