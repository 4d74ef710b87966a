"""What `kvledger simulate` does: recorded traffic on other releases and configurations, and the table of it.

The simulation itself is in ``audit/simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ...audit.errors import LedgerError
from ...audit.figures.declared import BY_NAME, parts_of
from ...audit.journal.reader import Reader
from ...audit.replay.block_traces import is_request_trace
from ...audit.replay.find import journals_at
from ...audit.replay.parallel import Run, cores
from ...audit.replay.windows import Window
from ...audit.simulate import settings as of
from ...audit.simulate.environments import Environments
from ...audit.simulate.request_trace import ASSUMED, traced
from ...audit.simulate.study import (
    BY_TIME,
    RECORDED,
    Calibration,
    Goal,
    Outcome,
    Source,
    Study,
    goal,
    recording,
)
from ...audit.text import printable
from ..csv_cells import csv_of
from . import terminal
from .first_token import FirstTokens, later_tokens_sentence, shown

CAUSES = ("local", "external", "computed", "unattained", "rework", "overrun", "rejected")
"""Figures of tokens whose differences are printed."""

NONE = "none"
"""Stands for the time of a token that no request had."""


class Simulated(msgspec.Struct, kw_only=True):
    """Everything for one engine. ``found``: the smallest value that meets the goal; None: none was found, or
    no goal was given. ``refused``: why no seconds are told. ``interrupted``: by Ctrl-C, so rows are
    missing. ``calibration``: None for a request trace, of which nothing was recorded."""

    engine: str
    version: str
    calibration: Calibration | None
    refused: str
    outcomes: list[Outcome]
    goal: str = ""
    setting: str = ""
    found: int | None = None
    interrupted: bool = False

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against it."""
        return self.calibration is None or self.calibration.trusted

    @property
    def code(self) -> int:
        """0; 1: the goal was not met; 3: the simulation does not trust itself, or was interrupted."""
        if not self.trusted or self.interrupted or any(each.error for each in self.outcomes):
            return 3
        return 1 if self.goal and self.found is None else 0


def run(
    paths: Sequence[Path],
    *,
    releases: Sequence[str],
    settings: Sequence[str],
    pythons: Sequence[str],
    rate: float,
    closed: bool,
    find: str,
    wanted: str,
    jobs: int = 0,
    window: Window,
    block_tokens: int = 0,
    steps_of: Path | None = None,
    away: Run | None = None,
) -> Simulated:
    """Calibrate, then simulate each release with each setting.

    Of a request trace: ``block_tokens``, if its lines do not say it; and a journal whose step times are
    taken. ``away``: where configurations are simulated, if not here.
    """
    if bool(find) != bool(wanted):
        raise LedgerError('--find NAME and --for "FIGURE >= VALUE" go together')
    target = goal(wanted) if wanted else None
    if find:
        find = of.parsed(f"{find}=1")[0]
    changes = [of.parsed(word) for word in settings]
    variants = _variants(releases, changes, rate)
    environments = Environments(pythons)
    with progress() as stage:
        if len(paths) == 1 and is_request_trace(paths[0]):
            if window.bounded:
                raise LedgerError("a request trace has no times for --since and --until")
            if steps_of is None and (rate != 1.0 or closed):
                raise LedgerError(
                    "a request trace has no times for --rate and --closed-loop without --steps-of"
                )
            source = traced(
                paths[0],
                block_tokens=block_tokens,
                version=next(iter(releases), ""),
                settings=changes,
                steps=None if steps_of is None else _recording([steps_of], window).steps,
            )
        else:
            source = _recording(paths, window)
        with Study(
            source,
            commands=environments.command,
            workers=jobs or cores(),
            rate=rate,
            closed=closed,
            stage=stage,
            away=away,
        ) as study:
            return _studied(study, variants, changes, find, target, wanted)


def _recording(paths: Sequence[Path], window: Window) -> Source:
    journals = journals_at(paths)
    if len(journals) != 1:
        raise LedgerError(f"simulate takes one journal, and here are {len(journals)}: name one")
    with Reader(journals[0]) as reader:
        events = (event for batch in reader.poll() for event in batch.events)
        return recording(events, since=window.since, until=window.until)


def _single(changes: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The settings that have one value."""
    names = [name for name, _ in changes]
    return [each for each in changes if names.count(each[0]) == 1]


def _variants(releases: Sequence[str], changes: Sequence[tuple[str, Any]], rate: float) -> list[of.Variant]:
    """Each value of a setting by itself, with each release; a setting that is given twice has several
    rows."""
    combined: list[tuple[tuple[str, Any], ...]] = [()]
    for name in dict.fromkeys(name for name, _ in changes):
        values = [value for other, value in changes if other == name]
        combined = [(*each, (name, value)) for each in combined for value in values]
    found = [of.Variant(release, each) for release in releases or [""] for each in combined]
    return [each for each in found if each.release or each.settings or rate != 1.0]


def _studied(
    study: Study,
    variants: Sequence[of.Variant],
    changes: Sequence[tuple[str, Any]],
    find: str,
    target: Goal | None,
    wanted: str,
) -> Simulated:
    calibration, outcomes = None, []
    if study.source.recorded is not None:
        outcomes.append(study.outcome(RECORDED, study.traffic.version, study.recorded))
        calibration, by_time = study.calibrate(_single(changes))
        outcomes += [by_time] if by_time is not None else []
    result = Simulated(
        engine=f"vLLM {study.traffic.version}".strip(),
        version=study.traffic.version,
        calibration=calibration,
        refused=study.model.refused,
        outcomes=outcomes,
        goal=wanted,
        setting=find,
    )
    try:
        for outcome in study.variants(variants) if not find else ():
            result.outcomes.append(outcome)
        if find and target is not None:
            base = variants[0] if variants else of.Variant()
            values = {}
            for value, outcome in study.find(find, target, base):
                values[value] = outcome
                result.outcomes.append(outcome)
            met = [value for value, outcome in values.items() if target.met(outcome)]
            result.found = min(met) if met else None
    except KeyboardInterrupt:
        result.interrupted = True
    places = {variant.name: place for place, variant in enumerate(variants, 1)}
    result.outcomes.sort(key=lambda outcome: places.get(outcome.name, 0))  # they end in another order
    return result


# --- what is printed ------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """A table as text: its title, the heads of its columns, the first of which is empty, and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def render(one: Simulated) -> Group:
    """The answer and whether it is trusted, then the tables, then what differs."""
    *figures, differences = tables(one)
    return terminal.blocks(
        Group(*answer(one)),
        None if one.calibration is None else _table(_calibration_cells(one.calibration)),
        *map(_table, figures),
        terminal.notes(list(remarks(one))),
        _causes(one),
        _table(differences),
    )


def _table(cells: Cells) -> Table | None:
    """The table on a terminal; None if it has no row. A title stands over the first column."""
    if not cells.rows:
        return None
    table = terminal.figures_table(*cells.columns)
    for row in cells.rows:
        table.add_row(*row)
    return table


def tables(one: Simulated) -> list[Cells]:
    """What cache and scheduler did, how long it took, and how the tokens differ from the recorded ones."""
    return [_token_cells(one), _time_cells(one), _difference_cells(one)]


def answer(one: Simulated) -> list[Text]:
    """Whether the simulation is calibrated, whether it trusts itself, and what was found."""
    found = one.calibration
    lines = [] if found is None else _calibrated(found)
    if one.goal:
        lines.append(Text(_found(one), style="bold"))
    if one.interrupted:
        lines.append(Text("Interrupted: the configurations that had not ended are missing.", style="red"))
    return lines


def _calibrated(found: Calibration) -> list[Text]:
    if found.exact:
        words = (
            f"By step the recording comes out to the token: {found.requests:,} requests, "
            f"{found.steps:,} steps on vLLM {found.release}."
        )
        head = Text.assemble(("Calibrated. ", "bold green"), words)
    else:
        words = (
            f"By step {found.differing:,} of {found.requests:,} requests differ from the recording; "
            f"{found.simulated_steps:,} steps in place of {found.steps:,}."
        )
        head = Text.assemble(("Not calibrated. ", "bold red"), words)
    lines = [head]
    if found.by_time_points is not None:
        lines.append(
            Text(
                f"By time {found.differing_by_time or 0:,} requests differ, and the hits by "
                f"{found.by_time_points:+.2f} points."
            )
        )
    if found.doubts:
        lines.append(Text("The simulation does not trust itself:", style="red"))
        lines += [Text(f"  {printable(doubt)}") for doubt in found.doubts]
    return lines


def _found(one: Simulated) -> str:
    if one.found is None:
        return f"No value of {one.setting} that was tried meets {one.goal}."
    return f"{one.setting}={one.found:,} is the smallest value that meets {one.goal}, to 1 %."


def _calibration_cells(found: Calibration) -> Cells:
    rows = [
        (
            printable(found.names.get(each.request, str(each.request))),
            each.figure,
            str(each.recorded),
            str(each.simulated),
        )
        for each in found.differences
    ]
    return Cells("", ("request", "figure", "recorded", "simulated"), rows)


def named(outcome: Outcome) -> str:
    """The name of a configuration, and whether it is saturated."""
    return printable(outcome.name) + (" (saturated)" if outcome.saturated else "")


def _token_cells(one: Simulated) -> Cells:
    """What the cache and the scheduler did."""
    releases = len({outcome.release for outcome in one.outcomes}) > 1
    columns = ("vLLM",) if releases else ()
    rows = [
        (
            named(each),
            *((printable(each.release),) if releases else ()),
            terminal.percent(each.hit_share),
            terminal.percent(each.external_share),
            f"{each.rework_tokens:,}",
            f"{each.preemptions:,}",
            f"{each.steps:,}",
        )
        for each in one.outcomes
    ]
    return Cells("Tokens", ("", *columns, "hits", "external", "rework", "preempted", "steps"), rows)


def _time_cells(one: Simulated) -> Cells:
    """How long it took, of the configurations for which that is known."""
    rows = []
    for each in one.outcomes:
        if each.engine_seconds is None or each.load is None:
            continue
        times = (each.first_token_p50, each.first_token_p95, each.token_p50, each.token_p95, each.queued_p95)
        texts = (NONE if value is None else shown(1e3 * value) for value in times)
        rows.append((named(each), f"{each.engine_seconds:,.1f}", terminal.percent(each.load), *texts))
    first = ("first token p50", "p95", "per token p50", "p95", "queued p95")
    return Cells("Times", ("", "engine s", "load", *first), rows)


def remarks(one: Simulated) -> Iterator[str]:
    """What is to be known of the tables."""
    if one.calibration is None:
        assumed = ", ".join(f"{name}={value}" for name, value in ASSUMED.items())
        yield f"Of a request trace no settings are known: {assumed}, where --set does not say otherwise."
    if one.calibration is None and one.refused:
        yield (
            f"Seconds are unknown: {one.refused}. Each request ends before the next one comes; --steps-of "
            "takes the step times of a journal."
        )
    elif one.refused:
        yield (
            f"Seconds are unknown: {one.refused}. Steps take what the refused model says, "
            "which only orders the "
            "requests."
        )
    saturated = [each.name for each in one.outcomes if each.saturated]
    if saturated:
        yield (
            f"Saturated: in {', '.join(map(printable, saturated))} more and more requests "
            "wait, so waiting times "
            "depend on how long the traffic lasts."
        )
    for each in one.outcomes:
        if each.error:
            yield f"{printable(each.name)} ended early: {printable(each.error)}"


def _causes(one: Simulated) -> Group | None:
    """First token and time per token by cause, of each configuration."""
    lines = []
    for each in one.outcomes:
        if each.engine_seconds is None or not each.totals.first_tokens:
            continue
        figures = {name: getattr(each.totals, name) for name in BY_NAME}
        lines.append(Text(printable(each.name), style="bold"))
        lines.append(Text(f"  {FirstTokens.of(figures).sentence()}"))
        later = {
            name.removesuffix("_microseconds"): figures[name]
            for name in parts_of("later_tokens_microseconds")
        }
        lines.append(Text(f"  {later_tokens_sentence(later, figures['later_tokens'])}"))
    return Group(*lines) if lines else None


def _difference_cells(one: Simulated) -> Cells:
    """How many more tokens each configuration has than the recorded one as simulated, by what they were."""
    base = next((each for each in one.outcomes if each.name == BY_TIME), None)
    rows = [
        (printable(each.name), *(f"{each.totals.of(name) - base.totals.of(name):+,}" for name in CAUSES))
        for each in one.outcomes
        if base is not None and each.name not in (BY_TIME, RECORDED)
    ]
    return Cells("Tokens more than as recorded", ("tokens more than as recorded", *CAUSES), rows)


def as_csv(one: Simulated) -> str:
    """One line per configuration: all that is no table."""
    names = [name for name in Outcome.__struct_fields__ if name != "totals"]
    return csv_of(names, ([getattr(each, name) for name in names] for each in one.outcomes))


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal; elsewhere nothing is printed."""
    out = terminal.console(stderr=True)
    if not out.is_terminal:
        yield lambda words, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("reading the journal", total=1.0)
        yield lambda words, share: bar.update(task, description=words, completed=share)
