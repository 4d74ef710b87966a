"""One side of a comparison: what requests, engines and findings of a time amount to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import msgspec

from ...audit import text
from ...audit.analysis.step_model import FEATURES, StepModel
from ...audit.analysis.step_times import Work
from ...audit.figures.figure import BY_NAME, GROUPED
from ...audit.figures.sums import added
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import Audit, compare_journals
from ...audit.replay.observers import Steps
from ...audit.replay.parallel import Run
from ...audit.replay.windows import Window
from ...audit.text import counted, utc
from .dataset import facts_of_windows
from .groups import KEYS, as_text
from .misses import Sampled, misses_by_group, sampled_misses
from .replayed import Wanted
from .sums import Group, GroupSums, by_group
from .tables import Facts

Key = TypeVar("Key", bound=Hashable)

Figures = Mapping[str, int]
"""Sums of figures by the figure's name."""

UNLABELLED = tuple(label.none for label in GROUPED if label.none)

TENANT, ADAPTER, PRIORITY, JOURNAL, OUTCOME = "tenant", "adapter", "priority", "journal", "outcome"


class Side(msgspec.Struct, kw_only=True):
    """What the requests that ended in a time, and the engines that served them, amount to.

    ``seconds``: in which engines ran, each from the first end of a request to its last; None: not known.
    ``labels``: figures by kind of label, then by its value. ``by_engine``: figures by tenant and journal.
    ``findings``: number of findings by invariant. ``started``: journals of engines that started then.
    ``died``: a sentence for each engine that ended in the window without shutting down, or raised.
    ``resets``: of prefix caches.
    """

    audit: Audit
    seconds: float | None = None
    figures: Figures = {}
    voided: Mapping[str, int] = {}
    """Promised tokens that were not loaded, by cause."""
    missed: Mapping[str, int] = {}
    sampled: Sampled = Sampled()
    """What became before of the contents that prompts missed."""
    labels: Mapping[str, Mapping[str, Figures]] = {}
    by_engine: Mapping[tuple[str, str], Figures] = {}
    outcomes: Mapping[str, int] = {}
    first_token_p95: float | None = None
    """Seconds."""
    findings: Mapping[str, int] = {}
    started: frozenset[str] = frozenset()
    died: Sequence[str] = ()
    engines: int = 0
    resets: int = 0
    work: Work = Work()
    busy_us: int = 0
    models: Sequence[StepModel] = ()
    levels: Sequence[str] = ()

    def of(self, figure: str) -> int:
        """The sum of a figure."""
        return self.figures.get(figure, 0)

    def share(self, figure: str, whole: str) -> float | None:
        """A figure as a part of another; None where that is 0."""
        return ratio(self.of(figure), self.of(whole))

    @property
    def requests(self) -> int:
        """Requests whose figures are known."""
        return self.of("requests") - self.of("unknown_requests")

    @property
    def hits(self) -> float | None:
        """The share of prompt tokens that were hit or loaded."""
        return ratio(self.of("local") + self.of("external"), self.of("prompt_tokens"))

    def miss_share(self, cause: str) -> float | None:
        """The share of prompt tokens that missed the caches for this cause."""
        return ratio(self.missed.get(cause, 0), self.of("prompt_tokens"))

    @property
    def rate(self) -> float | None:
        """Requests a second."""
        return ratio(self.of("requests"), self.seconds)

    @property
    def busy(self) -> float | None:
        """Seconds of engine time that steps took, a second."""
        return ratio(self.busy_us / 1e6, self.seconds)

    def mean(self, figure: str, of: str = "requests") -> float | None:
        """A figure per request."""
        return ratio(self.of(figure), self.requests if of == "requests" else self.of(of))

    def predicted_us(self, model: StepModel) -> float:
        """How long the work of this side takes by a model of step time, in microseconds."""
        return sum(
            1e6 * (coefficient.seconds or 0.0) * amount
            for name, amount in zip(FEATURES, self.work, strict=True)
            if (coefficient := model.coefficients.get(name)) is not None
        )


def ratio(part: float | None, whole: float | None) -> float | None:
    """A part of a whole; None where either is not known, or the whole is 0."""
    return part / whole if part is not None and whole else None


def sides_at(paths: Sequence[Path], windows: Sequence[Window], run: Run) -> list[Side]:
    """The sides of the requests at ``paths`` that ended in each window. Raises LedgerError.

    Each journal is replayed once for all of them, and all groups are sums of one query.
    """
    wanted = Wanted(audit=True, activity=True)
    with facts_of_windows(paths, windows, run=run, wanted=wanted) as found:
        for one in found:
            compare_journals(one.audits)
        return [_side(one, window) for one, window in zip(found, windows, strict=True)]


def _side(found: Facts, window: Window) -> Side:
    columns = _columns(found)
    groups = by_group(found, list(columns.values()))
    everything = groups[()]
    by_one = {name: _by(groups, itemgetter(place)) for place, name in enumerate(columns)}
    outcomes, served = by_one.pop(OUTCOME), by_one[JOURNAL]
    audits = list(zip(found.audits, found.engines, strict=True))
    died = {engine.journal: text for audit, engine in audits if (text := _died(audit, window))}
    started = {engine.journal for audit, engine in audits if _started(audit, window)}
    here = {*served, *started, *died}
    audits = [pair for pair in audits if pair[1].journal in here] or [
        pair for pair in audits if _ran(pair[0], window)
    ]
    engines = [audit for audit, _ in audits]
    steps = [audit.of(Steps) for audit in engines]
    seconds, resets, first_token_p95 = _times(found)
    audit = Audit(engines)
    return Side(
        audit=audit,
        seconds=seconds,
        figures=everything.figures,
        voided=dict(everything.totals.voided),
        missed=misses_by_group(found, {(): everything}, (), "")[()].tokens,
        sampled=sampled_misses(found),
        labels=by_one,
        by_engine=_by(groups, itemgetter(*map(list(columns).index, (TENANT, JOURNAL)))),
        outcomes={outcome: figures["requests"] for outcome, figures in outcomes.items()},
        first_token_p95=first_token_p95,
        findings=Counter({row.id: row.findings for row in audit.found}),
        started=frozenset(started if window.since is not None else ()),
        died=list(died.values()),
        engines=len(engines),
        resets=resets,
        work=sum((each.sums.work for each in steps), Work()),
        busy_us=sum(each.sums.busy_us for each in steps),
        models=[engine.model for _, engine in audits if not engine.model.refused],
        levels=sorted({audit.engine.level for audit in engines if audit.engine}),
    )


def _ran(audit: EngineAudit, window: Window) -> bool:
    began = audit.began_seconds
    return began is not None and window.touches(began, began + audit.last_at / 1e6)


def _started(audit: EngineAudit, window: Window) -> bool:
    return audit.began_seconds is not None and window.holds(audit.began_seconds)


def _died(audit: EngineAudit, window: Window) -> str:
    """How an engine went wrong in a window with a beginning, without a dot; "" if it did not."""
    if window.since is None:
        return ""
    journal, ledger = audit.journal, audit.auditor.ledger
    if journal.window.errors:
        return f"{audit.name} raised {', '.join(sorted(journal.window.errors))}"
    last = journal.gone_by if journal.gone_by < inf else journal.whole_until
    if not journal.lost_tails or not window.touches(journal.whole_until, last):
        return ""
    left = counted(len(ledger.open), "request")
    return f"{audit.name} ended without shutting down after {utc(journal.whole_until)}, with {left} open"


def _times(facts: Facts) -> tuple[float | None, int, float | None]:
    """Seconds in which engines ran, resets, and the 95th percentile of the time to first token."""
    [(resets,)] = facts.rows("SELECT coalesce(sum(resets), 0) FROM activity")
    if facts.gone:
        return None, int(resets), None
    [(first_token,)] = facts.rows("SELECT quantile_disc(first_token_microseconds / 1e6, 0.95) FROM requests")
    spans = facts.rows(
        "SELECT epoch_us(min(closed_time)), epoch_us(max(closed_time)) FROM requests "
        "WHERE closed_time IS NOT NULL GROUP BY journal ORDER BY 1"
    )
    return _together(spans), int(resets), first_token


def _together(spans: Iterable[tuple[int, int]]) -> float | None:
    """Seconds that spans in microseconds cover, in the order of their beginnings; None without a span."""
    covered, until = 0, None
    for begin, end in spans:
        covered += max(0, end - (begin if until is None else max(begin, until)))
        until = end if until is None else max(until, end)
    return None if until is None else covered / 1e6


def _tenant(facts: Facts) -> str:
    """Whose a request is. Of salts no sums by the hour are kept."""
    if facts.gone:
        return KEYS["group"]
    columns = ", ".join(BY_NAME[label].column for label in text.TENANT)
    return f"coalesce({columns}, '{BY_NAME['group'].none}')"


def _columns(facts: Facts) -> dict[str, str]:
    """The expressions by which all requests are grouped, by the name of what each gives."""
    columns = {
        TENANT: _tenant(facts),
        ADAPTER: KEYS["lora"],
        JOURNAL: as_text("journal"),
        OUTCOME: KEYS["outcome"],
    }
    return columns if facts.gone else columns | {PRIORITY: KEYS["priority"]}


def _by(groups: Mapping[Group, GroupSums], key: Callable[[Group], Key]) -> dict[Key, Figures]:
    """The figures by what ``key`` gives of a group."""
    found: dict[Key, dict[str, int]] = {}
    for group, sums in groups.items():
        if group:
            added(found.setdefault(key(group), {}), sums.figures)
    return dict(found)
