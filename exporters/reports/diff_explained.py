"""What `kvledger diff A B --explain` adds: which part of the difference each change has.

The simulations are in ``audit/simulate``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from ...audit.errors import LedgerError
from ...audit.faults.catalogue import ReleaseRule, release_rules
from ...audit.journal.host_folders import read
from ...audit.replay.find import journals_at
from ...audit.replay.parallel import Run, cores, here
from ...audit.replay.windows import Window
from ...audit.simulate.explanation import Explainer, Explanation, Row, change
from ...audit.simulate.processes import Environments, Simulators
from ...audit.simulate.study import Calibration, Stage, Study, recording
from ...audit.text import printable
from ..answer import BAD, GOOD, Answer, Lines, Records, Table, Words, notes, percent
from ..terminal import share_progress
from . import diff

SIDES = ("BEFORE", "AFTER")

LISTED = 4
"""Changes that the first line names."""

ORDER_MATTERS = (
    "Each row has one change more than the row above it. Another order gives other parts: what a change does "
    "depends on what was changed before it."
)


class Explained(msgspec.Struct, frozen=True):
    """Two traces compared, and which part of the difference each change has."""

    comparison: diff.TraceComparison
    explanation: Explanation


def explained(
    paths: Sequence[Path],
    *,
    pythons: Sequence[str],
    closed: bool,
    jobs: int = 0,
    window: Window,
    run: Run = here,
    by: str = "",
) -> Explained:
    """Compare the two, and simulate the way from one to the other. Raises LedgerError if it can't."""
    before, after = (_journal(name, place) for name, place in zip(SIDES, paths, strict=True))
    environments = Environments(pythons)
    shared: dict[tuple[str, ...], Simulators] = {}
    with ExitStack() as stack, share_progress("reading the journal") as stage:
        stack.callback(_stop, shared)

        def study(name: str, journal: Path) -> Study:
            made = _study(name, journal, environments, stage, shared, closed=closed, jobs=jobs, window=window)
            return stack.enter_context(made)

        one, other = (study(name, journal) for name, journal in zip(SIDES, (before, after), strict=True))
        versions = one.traffic.version, other.traffic.version
        for version in versions:
            environments.command(version)  # before anything takes long
        explainer = Explainer(one, other, environments.between(*versions))
        comparison = diff.compare([before], [after], window=window, run=run, by=by)
        return Explained(comparison, explainer.explain())


def _stop(shared: dict[tuple[str, ...], Simulators]) -> None:
    for each in shared.values():
        each.stop()


def _journal(name: str, place: Path) -> Path:
    journals = journals_at([place])
    if len(journals) != 1:
        raise LedgerError(
            f"--explain takes one journal on each side, and {name} has {len(journals)}: name one"
        )
    return journals[0]


def _study(
    name: str,
    journal: Path,
    environments: Environments,
    stage: Stage,
    shared: dict[tuple[str, ...], Simulators],
    *,
    closed: bool,
    jobs: int,
    window: Window,
) -> Study:
    try:
        events = (event for _, event in read(journal))
        return Study(
            recording(events, since=window.since, until=window.until),
            commands=environments.command,
            workers=jobs or cores(),
            closed=closed,
            stage=stage,
            shared=shared,
        )
    except LedgerError as error:
        raise LedgerError(f"{name} can't be simulated: {error}") from None


# --- the answer -----------------------------------------------------------------------------------------


def answer(found: Explained, *, verbose: bool = False) -> Answer:
    """The parts in one sentence and whether they are trusted, then every row, rules and the other order; then
    the comparison."""
    one = found.explanation
    compared = diff.answer(found.comparison, verbose=verbose)
    return Answer(
        data=found,
        sentences=[_sentence(one), *_trusted(one)],
        parts=[_table(one), _rules(one), notes(_remarks(one)), Lines(compared.sentences), *compared.parts],
        records=_records(one),
        plain=lambda: {
            **{name: getattr(found.comparison, name) for name in found.comparison.__struct_fields__},
            "explanation": one,
        },
        code=one.code,
    )


def _trusted(one: Explanation) -> Iterator[str]:
    if one.doubts:
        yield Words("The explanation does not trust itself:", BAD)
        yield from (f"  {printable(doubt)}" for doubt in one.doubts)
    else:
        yield Words(" ".join(_calibrated(one)), GOOD)
    if one.interrupted:
        yield Words("Interrupted: the rows that had not ended are missing.", BAD)


def _calibrated(one: Explanation) -> Iterator[str]:
    sides: tuple[tuple[str, Calibration], ...] = (("before", one.before), ("after", one.after))
    yield "Calibrated: by step both recordings come out to the token:"
    yield "; ".join(f"{name} {each.requests:,} requests on vLLM {each.release}" for name, each in sides) + "."


def _sentence(one: Explanation) -> str:
    """``Hits fell from 46.0 % to 36.5 %: num_gpu_blocks 40 -> 20 -8.1 points, traffic -1.4 points.``"""
    first, last = one.rows[0].outcome, one.rows[-1].outcome
    if one.interrupted or one.rows[-1].kind != "residual" or len(one.rows) < 3:
        return "The difference is not explained."
    shares = [each.hit_share + each.external_share for each in (first, last)]
    verb = "fell" if shares[1] < shares[0] else "rose" if shares[1] > shares[0] else "stayed"
    parts = [(row.changed, 100 * _hits(row)) for row in one.rows[1:] if abs(_hits(row)) >= 0.0005]
    parts.sort(key=lambda part: -abs(part[1]))
    named = ", ".join(f"{printable(name)} {points:+.1f} points" for name, points in parts[:LISTED])
    whole = f"Hits {verb} from {percent(shares[0])} to {percent(shares[1])}"
    return f"{whole}: {named}." if named else f"{whole}, and no change has a part in that."


def _hits(row: Row) -> float:
    return 0.0 if row.change is None else row.change.hit_share + row.change.external_share


FIGURES = {
    "hits": "hit_share",
    "external": "external_share",
    "rework": "rework_tokens",
    "preempted": "preemptions",
}
"""The figures of a row, by heading."""


def _table(one: Explanation) -> Table:
    """Every row, each figure with its change; external hits only where there are any."""
    external = any(row.outcome.external_share for row in one.rows)
    shown = {head: name for head, name in FIGURES.items() if head != "external" or external}
    rows = []
    for row in one.rows:
        cells: list[object] = [printable(row.changed)]
        for name in shown.values():
            change = None if row.change is None else getattr(row.change, name)
            value, points = getattr(row.outcome, name), name.endswith("share")
            cells.append(percent(value) if points else value)
            cells.append(
                ""
                if change is None
                else f"{100 * change:+.2f}"
                if points and change
                else f"{change:+,}"
                if change
                else "0"
            )
        rows.append(tuple(cells))
    return Table(rows, "changed" + "".join(f" | {head} | change" for head in shown))


def _rules(one: Explanation) -> Lines:
    """The rules of each row, as proved by a setting or as candidates."""
    lines = []
    for row in one.rows:
        if row.kind == "rule":
            lines.append(f"{printable(row.changed)} turns one rule on or off:")
        elif row.rules:
            words = "Candidates: the figures change here, and these rules begin or end here, but no setting"
            lines.append(f"{printable(row.changed)}. {words} turns them off:")
        elif row.kind == "release" and row.change:
            lines.append(f"{printable(row.changed)}. No known rule begins or ends here.")
        lines += [f"  {_rule(release_rules()[id])}" for id in row.rules]
    return Lines(lines, "Rules of the releases")


def _rule(rule: ReleaseRule) -> str:
    links = ", ".join(name for name, _ in rule.named_links)
    return f"{rule.title} ({rule.span}; {links})"


def _remarks(one: Explanation) -> Iterator[str]:
    yield ORDER_MATTERS
    yield from (*_other_order(one), *_large_residuals(one))
    for each in one.refused:
        yield f"The steps of {each}. Steps take what the refused model says, which only orders the requests."
    yield from (f"Not simulated: {printable(each)}" for each in one.missing)


def _large_residuals(one: Explanation) -> Iterator[str]:
    """What a reader should know if the simulation is further off than what it explains."""
    residuals = [abs(_hits(row)) for row in one.rows if row.kind == "residual"]
    parts = [abs(_hits(row)) for row in one.rows if row.kind not in ("recorded", "residual")]
    if max(residuals, default=0.0) > max(parts, default=0.0):
        yield (
            "A residual is larger than every part of the hits: the simulation by time is further from the "
            "recordings than the changes are from one another."
        )


def _other_order(one: Explanation) -> Iterator[str]:
    """The parts of the traffic and of all else, if the traffic is changed first."""
    simulated = [row for row in one.rows if row.changed.startswith("residual: before")]
    moved = [row.outcome for row in one.rows if row.kind == "traffic"]
    if one.traffic_first is None or not simulated or not moved:
        return
    traffic = change(simulated[0].outcome, one.traffic_first)
    rest = change(one.traffic_first, moved[0])
    yield (
        f"With the traffic changed first: traffic {100 * traffic.hit_share:+.2f} points of hits, release and "
        f"settings together {100 * rest.hit_share:+.2f}."
    )


def _records(one: Explanation) -> Records:
    """One line per row; changes are empty in the first."""
    figures = FIGURES.values()
    rows = (
        [
            *(row.kind, row.changed, row.outcome.release),
            *(getattr(row.outcome, name) for name in figures),
            *(None if row.change is None else getattr(row.change, name) for name in figures),
            " ".join(row.rules),
        ]
        for row in one.rows
    )
    return Records(
        ["kind", "changed", "release", *figures, *(f"{name}_change" for name in figures), "rules"], rows
    )
