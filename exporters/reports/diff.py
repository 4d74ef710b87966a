"""Two traces beside each other: what changed, by how much, and where a figure's meaning changed with it.

The ledger's figures mean the same whatever engine they are of; what the engine itself reports does
not, so every release's meaning is told where the two differ (``audit/release_semantics.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...audit.replay.journals import Audit, audit_paths
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window
from .audit import share, structs_csv
from .terminal import figures_table, percent, title


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both: a count, a share ``of`` some tokens (1 is all of them), or a mean ``per``."""

    name: str
    before: float | None
    after: float | None
    of: str = ""
    per: str = ""

    @property
    def label(self) -> str:
        """The name, and what it is divided by."""
        if self.of:
            return f"{self.name}, of {self.of}"
        return f"{self.name} per {self.per}" if self.per else self.name


class MeaningChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure that the engine reports means in each of the two."""

    figure: str
    before: str
    after: str


class TraceComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said of two traces."""

    before: list[str]
    after: list[str]
    verdicts: tuple[str, str]
    figures: list[Figure]
    findings: dict[str, tuple[int, int]]
    meanings: list[MeaningChange]


def compare(
    before: Sequence[Path], after: Sequence[Path], *, window: Window = EVERYTHING, run: Run = here
) -> TraceComparison:
    """Audit both. Raises :class:`LedgerError` for a path that holds no journal."""
    one, other = (audit_paths(paths, window=window, with_metrics=False, run=run) for paths in (before, after))
    figures = [
        msgspec.structs.replace(was, after=now.before)
        for was, now in zip(_figures(one), _figures(other), strict=True)
    ]
    return TraceComparison(
        before=_engines(one),
        after=_engines(other),
        verdicts=(one.verdict, other.verdict),
        figures=figures,
        findings=_findings(one, other),
        meanings=_meanings(one, other),
    )


def _figures(audit: Audit) -> Iterator[Figure]:
    """One trace's figures, each as ``before``."""
    totals = audit.totals
    known = totals.requests - totals.unknown_requests
    yield _figure("requests", totals.requests)
    yield _figure("unknown requests", totals.unknown_requests)
    yield _figure("prompt tokens", totals.prompt_tokens)
    for name in ("local", "external", "computed", "unattained"):
        yield _figure(name, share(getattr(totals, name), totals.prompt_tokens), of="prompt tokens")
    yield _figure("scheduled tokens", totals.scheduled)
    for name, tokens in (
        ("first prompt", totals.first_prompt),
        ("first output", totals.first_output),
        ("rework", sum(totals.rework.values())),
        ("rejected", totals.rejected),
        ("overrun", totals.overrun),
    ):
        yield _figure(name, share(tokens, totals.scheduled), of="scheduled tokens")
    yield _figure("scheduled tokens", share(totals.scheduled, known), per="request")
    yield _figure("preemptions", share(totals.preemptions, totals.requests), per="request")
    yield _figure("promised tokens", totals.promised)
    yield _figure("loaded", share(totals.loaded, totals.promised), of="promised tokens")


def _figure(name: str, figure: float | None, of: str = "", per: str = "") -> Figure:
    return Figure(name=name, before=figure, after=None, of=of, per=per)


def _engines(audit: Audit) -> list[str]:
    started = [book.engine for book in audit.engines]
    names = [f"{each.engine} {each.version}" if each else "unknown" for each in started]
    return sorted(dict.fromkeys(names))


def _findings(one: Audit, other: Audit) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for place, audit in enumerate((one, other)):
        for violation in audit.violations:
            counts = list(found.get(violation.id, (0, 0)))
            counts[place] += 1
            found[violation.id] = (counts[0], counts[1])
    return dict(sorted(found.items()))


def _meanings(one: Audit, other: Audit) -> list[MeaningChange]:
    before, after = _meant(one), _meant(other)
    return [
        MeaningChange(figure=figure, before=before.get(figure, ""), after=after.get(figure, ""))
        for figure in {**before, **after}
        if before.get(figure) != after.get(figure)
    ]


def _meant(audit: Audit) -> dict[str, str]:
    """By figure what it means in the trace's releases, each said once."""
    said: dict[str, list[str]] = {}
    for book in audit.engines:
        for figure, says in book.meanings.items():
            words = said.setdefault(figure, [])
            if says not in words:
                words.append(says)
    return {figure: " Or: ".join(words) for figure, words in said.items()}


def as_csv(found: TraceComparison) -> str:
    """A line a figure, header first; an empty cell where there is none."""
    return structs_csv(Figure, found.figures)


def drawn(found: TraceComparison) -> Group:
    """For a terminal."""
    parts: list[RenderableType] = [_figures_table(found)]
    if found.findings:
        table = figures_table("Findings", "before", "after")
        for name, (was, now) in found.findings.items():
            table.add_row(Text(name), f"{was:,}", f"{now:,}")
        parts += [Text(), table]
    if found.meanings:
        parts += [Text(), title("What the engine's own figures mean", "The ledger's mean the same in both.")]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for heading in ("figure", "before", "after"):
            table.add_column(heading, overflow="fold", ratio=None if heading == "figure" else 1)
        for row in found.meanings:
            table.add_row(Text(row.figure), Text(row.before or "not told"), Text(row.after or "not told"))
        parts.append(table)
    else:
        parts += [Text(), Text("What the engine's own figures mean is the same in both.", style="dim")]
    return Group(*parts)


def _figures_table(found: TraceComparison) -> Table:
    table = figures_table("", "before", "after", "change")
    table.add_row(Text("engine"), ", ".join(found.before), ", ".join(found.after), "")
    table.add_row(Text("verdict"), *found.verdicts, "")
    for row in found.figures:
        table.add_row(Text(row.label), _shown(row.before, row), _shown(row.after, row), _change(row))
    return table


def _shown(figure: float | None, row: Figure) -> str:
    if figure is None:
        return "-"
    if row.of:
        return percent(figure)
    return f"{figure:,.2f}" if row.per else f"{figure:,.0f}"


def _change(row: Figure) -> str:
    if row.before is None or row.after is None or row.before == row.after:
        return ""
    change = row.after - row.before
    if row.of:
        return f"{change * 100:+.1f} points"
    if not row.before:
        return f"{change:+,.2f}" if row.per else f"{change:+,.0f}"
    return f"{100 * change / row.before:+.1f} %"
