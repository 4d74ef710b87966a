"""Two traces compared: which settings, findings and figures changed, and which figures changed their meaning.

The ledger's figures mean the same for every engine. The engine's own figures do not: where two releases
differ, their meanings from ``audit/release_semantics.py`` are printed beside each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from ...audit.analysis.costs import KINDS, plus, total
from ...audit.causes import MISSES
from ...audit.figures.declared import BY_NAME, FIGURES
from ...audit.figures.figure import MICROSECONDS, TOKENS
from ...audit.ledger.account import EXTERNAL, LOCAL
from ...audit.replay.journals import Audit, compare_journals
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from ..answer import Answer, Table, counted, listed, percent, points, records, share
from .costs import gathered, part
from .summary import SummaryRow, summary_row

NO_MEANING = "does not apply"
"""For a figure without an entry in ``release_semantics.py`` for this release."""


class FigureChange(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both traces: a count, a share ``of`` tokens (1 is all), or a mean ``per`` request."""

    name: str
    before: float | None
    after: float | None
    of: str = ""
    per: str = ""

    @property
    def label(self) -> str:
        """The name, and the divisor if it has one."""
        if self.of:
            return f"{self.name}, of {self.of}"
        return f"{self.name} per {self.per}" if self.per else self.name

    @property
    def was(self) -> str:
        """The figure before."""
        return self._shown(self.before)

    @property
    def now(self) -> str:
        """The figure after."""
        return self._shown(self.after)

    def _shown(self, figure: float | None) -> str:
        if figure is None:
            return "-"
        if self.of:
            return percent(figure)
        if self.name.endswith(", s"):
            return f"{figure:,.1f}"
        return f"{figure:,.2f}" if self.per else f"{figure:,.0f}"

    @property
    def change(self) -> str:
        """How much the figure changed, in points or percent; "" if it did not, or one is not known."""
        if self.before is None or self.after is None or self.before == self.after:
            return ""
        change = self.after - self.before
        if self.of:
            return points(change)
        if not self.before:
            return f"{change:+,.2f}" if self.per else f"{change:+,.0f}"
        return f"{100 * change / self.before:+.1f} %"


class MeaningChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure that the engine reports means in each of two releases."""

    figure: str
    before: str
    after: str


PROMPTS = "prompt tokens"

HITS_CHANGED = 0.01
"""A smaller change of the share of hits is not explained."""

IDENTITY = frozenset(
    {
        "transfer",
        "engine_key",
        "engine_index",
        "data_parallel_rank",
        "instance",
        "instance_given",
    }
)
"""Settings that say which engine it is. They differ between any two."""


class SettingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that the engines of one trace have and those of the other don't.

    Several engines with several values have them with commas between; "" where none reports the setting.
    """

    setting: str
    before: str
    after: str


class GroupChange(msgspec.Struct, frozen=True, kw_only=True):
    """One group of requests in both traces; None where a trace has no such request."""

    group: str
    before: SummaryRow | None
    after: SummaryRow | None


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two traces compared; pairs are before and after."""

    before: list[str]
    after: list[str]
    verdicts: tuple[str, str]
    settings: list[SettingChange]
    figures: list[FigureChange]
    misses: list[FigureChange]
    """Tokens that missed the caches, by cause, as shares of prompt tokens; the largest change first."""
    findings: dict[str, tuple[int, int]]
    meanings: list[MeaningChange]
    groups: list[GroupChange] = []
    """Most prompt tokens first; empty where no groups were asked for."""


def compare(
    before: Sequence[Path],
    after: Sequence[Path],
    *,
    window: Window = EVERYTHING,
    run: Run = here,
    by: str = "",
) -> TraceComparison:
    """Compare the rows and findings of both. Raises LedgerError for a path that holds no journal.

    ``by`` names groups of requests, as for :func:`~kvledger.exporters.facts.groups.group_columns`.
    """
    one, was, missed_before = _read(before, by, window, run)
    other, now, missed_after = _read(after, by, window, run)
    figures = [
        msgspec.structs.replace(was_figure, after=now_figure.before)
        for was_figure, now_figure in zip(_figures(one), _figures(other), strict=True)
    ]
    return TraceComparison(
        before=_engines(one),
        after=_engines(other),
        verdicts=(one.verdict, other.verdict),
        settings=setting_changes(one, other),
        figures=figures,
        misses=_misses(missed_before, missed_after),
        findings=_findings(one, other),
        meanings=_meanings(one, other),
        groups=_groups(was, now),
    )


def _read(
    paths: Sequence[Path], by: str, window: Window, run: Run
) -> tuple[Audit, dict[str, SummaryRow], dict[str, float]]:
    """The audit of a trace, its groups, and the share of prompt tokens that missed the caches by cause."""
    from ..facts.dataset import facts
    from ..facts.groups import group_columns, group_names
    from ..facts.misses import misses_by_group
    from ..facts.replayed import Wanted
    from ..facts.sums import by_group

    columns = group_columns(by)
    with facts(paths, window=window, run=run, wanted=Wanted(audit=True)) as found:
        compare_journals(found.audits)
        groups = by_group(found, columns)
        missed = misses_by_group(found, groups, (), "")[()]
        rows = [summary_row(group_names(by, name), group) for name, group in groups.items() if name]
        prompts = missed.sums.figures["prompt_tokens"]
        shares = {cause: tokens / prompts for cause, tokens in missed.tokens.items()} if prompts else {}
        return Audit(found.audits), {row.group: row for row in rows}, shares


def _groups(was: dict[str, SummaryRow], now: dict[str, SummaryRow]) -> list[GroupChange]:
    """The groups of both traces."""
    changes = [GroupChange(group=name, before=was.get(name), after=now.get(name)) for name in {**was, **now}]
    return sorted(changes, key=lambda change: (-_prompt(change.before) - _prompt(change.after), change.group))


def _misses(before: dict[str, float], after: dict[str, float]) -> list[FigureChange]:
    changes = [
        FigureChange(
            name=MISSES.get(cause, cause),
            before=before.get(cause, 0.0),
            after=after.get(cause, 0.0),
            of=PROMPTS,
        )
        for cause in {**before, **after}
    ]
    return most_changed(changes)


def most_changed(rows: Iterable[FigureChange]) -> list[FigureChange]:
    """The figures, the largest change first."""
    return sorted(rows, key=lambda row: (-abs(_rise(row)), row.name))


def _rise(row: FigureChange) -> float:
    return (row.after or 0.0) - (row.before or 0.0)


def _prompt(row: SummaryRow | None) -> int:
    return 0 if row is None else row.prompt_tokens


def _figures(audit: Audit) -> Iterator[FigureChange]:
    """The figures of one trace, each in ``before``."""
    totals = audit.totals
    for figure in FIGURES:
        if figure.part_of:
            whole = BY_NAME[figure.part_of]
            yield _figure(figure.words, share(totals.of(figure.name), totals.of(whole.name)), of=whole.words)
        elif figure.unit == MICROSECONDS:
            mean = share(totals.of(figure.name), totals.of(figure.per))
            per = "token" if BY_NAME[figure.per].unit == TOKENS else "request"
            yield _figure(f"{figure.words}, ms", None if mean is None else mean / 1e3, per=per)
        else:
            yield _figure(figure.words, totals.of(figure.name))
    known = totals.requests - totals.unknown_requests
    yield _figure(BY_NAME["scheduled"].words, share(totals.scheduled, known), per="request")
    yield _figure(BY_NAME["preemptions"].words, share(totals.preemptions, totals.requests), per="request")
    yield from _costs(audit)


def _costs(audit: Audit) -> Iterator[FigureChange]:
    """Engine time and what lost work took of it; None where step times follow no model."""
    costs, _ = gathered(audit.engines)
    busy = costs.busy_us / 1e6
    yield _figure("engine time, s", busy or None)
    lost: dict[str, float | None] = dict.fromkeys(KINDS, 0.0)
    for key, row in costs.lost.items():
        kind = key.partition("/")[0]
        lost[kind] = plus(lost[kind], row.seconds)
    for kind, seconds in lost.items():
        yield _figure(f"{kind}, estimated", part(seconds, busy), of="engine time")
    waited = sum(loads.waited_seconds for loads in costs.loads.values())
    yield _figure("waited for loads, s", waited if costs.loads else None)
    saved = total(loads.saved_seconds for loads in costs.loads.values()) if costs.loads else None
    yield _figure("saved by loads, estimated, s", saved)


def _figure(name: str, figure: float | None, of: str = "", per: str = "") -> FigureChange:
    return FigureChange(name=name, before=figure, after=None, of=of, per=per)


def _engines(audit: Audit) -> list[str]:
    started = [engine_audit.engine for engine_audit in audit.engines]
    names = [f"{each.engine} {each.version}" if each else "unknown" for each in started]
    return sorted(dict.fromkeys(names))


def setting_changes(one: Audit, other: Audit) -> list[SettingChange]:
    """The settings that the engines of two audits have differently."""
    return [
        SettingChange(setting=setting, before=before, after=after)
        for setting, before, after in _changed(_settings(one), _settings(other))
    ]


def _changed(before: dict[str, str], after: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """What differs: name, before and after; "" where one side does not have it."""
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield name, before.get(name, ""), after.get(name, "")


def _settings(audit: Audit) -> dict[str, str]:
    """By setting, the values that the engines have."""
    values: dict[str, set[str]] = {}
    for engine_audit in audit.engines:
        if started := engine_audit.engine:
            settings = {"release": started.version, "level": started.level, **started.configuration}
            for setting, value in settings.items():
                if setting not in IDENTITY:
                    values.setdefault(setting, set()).add(str(value))
    return {setting: ", ".join(sorted(found)) for setting, found in values.items()}


def _findings(one: Audit, other: Audit) -> dict[str, tuple[int, int]]:
    before, after = (Counter({row.id: row.findings for row in audit.found}) for audit in (one, other))
    return {id: (before[id], after[id]) for id in sorted({*before, *after})}


def _meanings(one: Audit, other: Audit) -> list[MeaningChange]:
    return [
        MeaningChange(figure=figure, before=before, after=after)
        for figure, before, after in _changed(_meanings_of(one), _meanings_of(other))
    ]


def _meanings_of(audit: Audit) -> dict[str, str]:
    """By figure, what it means in the trace's releases."""
    meanings: dict[str, list[str]] = {}
    for engine_audit in audit.engines:
        for figure, meaning in engine_audit.meanings.items():
            of_figure = meanings.setdefault(figure, [])
            if meaning not in of_figure:
                of_figure.append(meaning)
    return {figure: " Or: ".join(each) for figure, each in meanings.items()}


# --- the answer -----------------------------------------------------------------------------------------


def answer(comparison: TraceComparison, *, verbose: bool = False) -> Answer:
    """How the hits changed and how much else did, then settings, misses, findings and figures that changed.

    ``verbose`` adds unchanged figures.
    """
    figures = {"requests": "", "hits": ":%", "rework": ":%", "preempted": ""}
    columns = "".join(
        f" | {name}, {when}{form}" for name, form in figures.items() for when in ("before", "after")
    )
    groups = [
        (
            each.group,
            *(
                cell
                for pair in zip(_of_group(each.before), _of_group(each.after), strict=True)
                for cell in pair
            ),
        )
        for each in comparison.groups
    ]
    return Answer(
        data=comparison,
        sentences=list(_sentences(comparison)),
        parts=[
            settings_table(comparison.settings),
            change_table(f"Misses, of {PROMPTS}=name", comparison.misses, verbose),
            Table([(id, *both) for id, both in comparison.findings.items()], "Findings | before | after"),
            change_table("Figures=label", comparison.figures, verbose),
            Table(groups, f"Groups{columns}"),
            Table(
                [
                    (row.figure, row.before or NO_MEANING, row.after or NO_MEANING)
                    for row in comparison.meanings
                ],
                "figure | before | after",
                "What the engine's own figures mean in each release",
                "The ledger's figures mean the same in both.",
            ),
        ],
        records=records(FigureChange, comparison.figures),
    )


def _sentences(comparison: TraceComparison) -> Iterator[str]:
    yield _hits(comparison)
    before, after = comparison.verdicts
    yield f"{after}{'' if before == after else f', before: {before}'}."
    engines = [listed(names) for names in (comparison.before, comparison.after)]
    yield f"Engine: {engines[0] if engines[0] == engines[1] else ' -> '.join(engines)}."
    changed = sum(row.before != row.after for row in comparison.figures)
    findings = sum(before != after for before, after in comparison.findings.values())
    kinds = "no findings"
    if comparison.findings:
        kinds = f"{findings} of {counted(len(comparison.findings), 'kind')} of finding changed"
    yield (
        f"{counted(len(comparison.settings), 'setting')} changed; {changed} of "
        f"{counted(len(comparison.figures), 'figure')} changed; {kinds}."
    )


def _hits(comparison: TraceComparison) -> str:
    """How the share of hits changed, and the cause of misses that changed most in the other direction.

    Tokens that are computed again are misses, too, but their first source stays.
    """
    shares = {row.label: row for row in comparison.figures}
    hits = [shares[f"{source}, of {PROMPTS}"] for source in (LOCAL, EXTERNAL)]
    before, after = sum(row.before or 0.0 for row in hits), sum(row.after or 0.0 for row in hits)
    if abs(after - before) < HITS_CHANGED:
        return f"Hits stayed the same: {percent(before)} and {percent(after)} of {PROMPTS}."
    direction = 1 if after < before else -1
    causes = [row for row in comparison.misses if direction * _rise(row) > 0]
    fell, rose = ("fell", "rose") if after < before else ("rose", "fell")
    most = f' Of the misses, "{causes[0].name}" {rose} most: {points(_rise(causes[0]))}.' if causes else ""
    return f"Hits {fell} from {percent(before)} to {percent(after)} of {PROMPTS}.{most}"


def settings_table(changes: Sequence[SettingChange]) -> Table:
    """The settings of engines, before and after."""
    return Table(
        [(row.setting, row.before or "-", row.after or "-") for row in changes], "Settings | before | after"
    )


def change_table(label: str, changes: Sequence[FigureChange], verbose: bool) -> Table:
    """The figures that changed, or all if ``verbose``. ``label``: the first column."""
    rows = [row for row in changes if verbose or row.before != row.after]
    return Table(rows, f"{label} | before=was | after=now | change")


def _of_group(row: SummaryRow | None) -> tuple[int | float | None, ...]:
    if row is None:
        return (None,) * 4
    hits = share(row.local + row.external, row.prompt_tokens)
    return row.requests, hits, row.rework_share, row.preemptions
