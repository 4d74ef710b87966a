"""Curves over time, of each engine: what ran and waited, preemptions, and where prompt tokens came from.

Tokens are counted when they were settled, of the requests of the window.
"""

from __future__ import annotations

from ..trace.time_series import MOST, TICKS, Series, wider
from .activity import LEVELS
from .tables import Facts

SOURCES = ("local", "external", "computed", "unattained")


def curves(facts: Facts) -> list[Series]:
    """A series for each journal, in the order of their names."""
    found: dict[str, Series] = {}
    _add_activity(facts, found)
    _add_settled(facts, found)
    return [found[journal] for journal in sorted(found)]


def _add_activity(facts: Facts, found: dict[str, Series]) -> None:
    widths = dict(facts.rows("SELECT journal, max(width_microseconds) FROM activity GROUP BY ALL"))
    query = f"SELECT journal, epoch_us(time), {', '.join(LEVELS)}, preemptions FROM activity ORDER BY ALL"
    for journal, start_us, *levels, preemptions in facts.rows(query):
        series = found.get(journal)
        if series is None:
            width = max(1, widths[journal] * TICKS // 1_000_000)
            series = found[journal] = Series(width_ticks=width)
        if None not in levels:
            series.level(start_us / 1e6, dict(zip(LEVELS, levels, strict=True)))
        if preemptions:
            series.count(start_us / 1e6, "preemptions", preemptions)


def _add_settled(facts: Facts, found: dict[str, Series]) -> None:
    """Count prompt tokens in spans of time that a curve of this length would put together anyway."""
    ((first_us, last_us),) = facts.rows(
        f"SELECT epoch_us(min(settled_time)), epoch_us(max(settled_time)) FROM ({_EXTENT})"
    )
    if first_us is None:
        return
    ticks = (last_us - first_us) * TICKS // 1_000_000
    width = 1
    while wider(width) * 4 * MOST < ticks:
        width = wider(width)
    sums = ", ".join(f"sum({source})" for source in SOURCES)
    place = f"epoch_us(settled_time) * {TICKS} // {width * 1_000_000}"
    for journal, at, *tokens in facts.rows(
        f"SELECT journal, {place}, {sums} FROM ({_SETTLED}) GROUP BY ALL ORDER BY ALL"
    ):
        series = found.setdefault(journal, Series())
        for source, amount in zip(SOURCES, tokens, strict=True):
            if amount:
                series.count(at * width / TICKS, source, int(amount))


_COLUMNS = ", ".join(SOURCES)
_ONLY_SUMS = (
    "kept.hours JOIN (SELECT journal, rows_from_time FROM engines) USING (journal) "
    "WHERE hour < rows_from_time"
)
_EXTENT = f"SELECT settled_time FROM requests UNION ALL SELECT hour FROM {_ONLY_SUMS}"
_SETTLED = (
    f"SELECT journal, settled_time, {_COLUMNS} FROM requests WHERE settled_time IS NOT NULL "
    f"UNION ALL SELECT journal, settled_time, {_COLUMNS} FROM chunks "
    "UNION ALL SELECT journal, first_settled_time, "
    f"{', '.join(f'-{source}' for source in SOURCES)} FROM chunks "
    f"UNION ALL SELECT journal, hour, {_COLUMNS} FROM {_ONLY_SUMS}"
)
"""What was settled when: the first chunk of a session has what its row has beyond the later chunks. Of hours
that have only sums, all tokens are placed at the hour in which their requests ended."""
