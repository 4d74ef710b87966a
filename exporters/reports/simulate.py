"""What `kvledger simulate` does: recorded traffic on other releases and configurations, and its tables.

The simulation itself is in ``audit/simulate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from ...audit.errors import LedgerError
from ...audit.figures.declared import BY_NAME, parts_of
from ...audit.journal.host_folders import read
from ...audit.replay.find import journals_at
from ...audit.replay.parallel import Run, cores
from ...audit.replay.request_traces import is_request_trace
from ...audit.replay.windows import Window
from ...audit.simulate import study as of
from ...audit.simulate.processes import Environments
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
from .. import writers
from ..answer import (
    BAD,
    STRONG,
    Answer,
    Bars,
    Lines,
    Table,
    Words,
    milliseconds,
    notes,
    percent,
    records,
    signed,
)
from ..terminal import share_progress
from .costs import FirstTokens, later_tokens_sentence

CAUSES = ("local", "external", "computed", "unattained", "rework", "overrun", "rejected")
"""Figures of tokens whose differences are printed."""


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
    with share_progress("reading the journal") as stage:
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
    events = (event for _, event in read(journals[0]))
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


# --- the answer -----------------------------------------------------------------------------------------


def answer(one: Simulated) -> Answer:
    """What was found and whether it is trusted, then the tables, then what differs; charts for a page."""
    differences = () if one.calibration is None else one.calibration.differences
    names = {} if one.calibration is None else one.calibration.names
    return Answer(
        one,
        list(_sentences(one)),
        [
            Table(
                [
                    (
                        printable(names.get(row.request, str(row.request))),
                        row.figure,
                        row.recorded,
                        row.simulated,
                    )
                    for row in differences
                ],
                "request | figure | recorded | simulated",
            ),
            *_charts(one),
            _tokens(one),
            _times(one),
            notes(_remarks(one)),
            _causes(one),
            _differences(one),
        ],
        records(Outcome, one.outcomes, "totals"),
        code=one.code,
    )


def html(one: Simulated) -> str:
    """The answer as a page."""
    heading = f"The same traffic on other configurations, recorded on {one.engine}"
    return writers.page(answer(one), heading, "simulated traffic")


def _sentences(one: Simulated) -> Iterator[str]:
    """What was found, whether the simulation is calibrated, and whether it trusts itself."""
    if one.goal and one.found is None:
        yield f"No value of {one.setting} that was tried meets {one.goal}."
    elif one.goal:
        yield f"{one.setting}={one.found:,} is the smallest value that meets {one.goal}, to 1 %."
    if one.calibration is not None:
        yield from _calibrated(one.calibration)
    if one.interrupted:
        yield Words("Interrupted: the configurations that had not ended are missing.", BAD)


def _calibrated(found: Calibration) -> Iterator[str]:
    if found.exact:
        yield (
            f"Calibrated. By step the recording comes out to the token: {found.requests:,} requests, "
            f"{found.steps:,} steps on vLLM {found.release}."
        )
    else:
        yield (
            f"Not calibrated. By step {found.differing:,} of {found.requests:,} requests differ from the "
            f"recording; {found.simulated_steps:,} steps in place of {found.steps:,}."
        )
    if found.by_time_points is not None:
        differing, points = found.differing_by_time or 0, found.by_time_points
        yield f"By time {differing:,} requests differ, and the hits by {points:+.2f} points."
    if found.doubts:
        yield Words("The simulation does not trust itself:", BAD)
        yield from (f"  {printable(doubt)}" for doubt in found.doubts)


def named(outcome: Outcome) -> str:
    """The name of a configuration, and whether it is saturated."""
    return printable(outcome.name) + (" (saturated)" if outcome.saturated else "")


def _tokens(one: Simulated) -> Table:
    """What the cache and the scheduler did."""
    releases = len({outcome.release for outcome in one.outcomes}) > 1
    figures = attrgetter("hit_share", "external_share", "rework_tokens", "preemptions", "steps")
    rows = [
        (named(each), *((printable(each.release),) if releases else ()), *figures(each))
        for each in one.outcomes
    ]
    release = "vLLM | " if releases else ""
    return Table(rows, f" | {release}hits:% | external:% | rework | preempted | steps", "Tokens")


def _times(one: Simulated) -> Table:
    """How long it took, of the configurations for which that is known."""
    rows = []
    for each in one.outcomes:
        if each.engine_seconds is None or each.load is None:
            continue
        times = (each.first_token_p50, each.first_token_p95, each.token_p50, each.token_p95, each.queued_p95)
        shown = (None if value is None else 1e3 * value for value in times)
        rows.append((named(each), each.engine_seconds, each.load, *shown))
    columns = "first token p50:ms | p95:ms | per token p50:ms | p95:ms | queued p95:ms"
    return Table(rows, f" | engine s:,.1f | load:% | {columns}", "Times")


def _charts(one: Simulated) -> Iterator[Bars]:
    """A chart for each figure that is known of any configuration and not 0 in all."""
    for title, legend, name, text in CHARTS:
        values = [(named(each), getattr(each, name)) for each in one.outcomes]
        rows = [(called, value, text(value)) for called, value in values if value is not None]
        if any(value for _, value, _ in rows):
            yield Bars(rows, title, legend)


CHARTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("Local hits", "Share of prompt tokens.", "hit_share", percent),
    ("Preemptions", "Of running requests.", "preemptions", "{:,.0f}".format),
    ("Time to first token", "95th percentile.", "first_token_p95", lambda one: milliseconds(1e3 * one)),
    ("Engine seconds", "In which a step ran.", "engine_seconds", "{:,.1f} s".format),
)
"""Title, legend, figure and how it is written."""


def _remarks(one: Simulated) -> Iterator[str]:
    """What is to be known of the tables."""
    if one.calibration is None:
        assumed = ", ".join(f"{name}={value}" for name, value in ASSUMED.items())
        yield f"Of a request trace no settings are known: {assumed}, where --set does not say otherwise."
    if one.refused:
        steps = "Steps take what the refused model says, which only orders the requests."
        if one.calibration is None:
            steps = (
                "Each request ends before the next one comes; --steps-of takes the step times of a journal."
            )
        yield f"Seconds are unknown: {one.refused}. {steps}"
    saturated = [printable(each.name) for each in one.outcomes if each.saturated]
    if saturated:
        yield (
            f"Saturated: in {', '.join(saturated)} more and more requests wait, so waiting times depend on "
            "how long the traffic lasts."
        )
    for each in one.outcomes:
        if each.error:
            yield f"{printable(each.name)} ended early: {printable(each.error)}"


def _causes(one: Simulated) -> Lines:
    """First token and time per token by cause, of each configuration."""
    lines = list[str]()
    for each in one.outcomes:
        if each.engine_seconds is None or not each.totals.first_tokens:
            continue
        figures = {name: getattr(each.totals, name) for name in BY_NAME}
        names = parts_of("later_tokens_microseconds")
        later = {name.removesuffix("_microseconds"): figures[name] for name in names}
        lines += [
            Words(printable(each.name), STRONG),
            f"  {FirstTokens.of(figures).sentence()}",
            f"  {later_tokens_sentence(later, figures['later_tokens'])}",
        ]
    return Lines(lines, "First token and time per token by cause")


def _differences(one: Simulated) -> Table:
    """How many more tokens each configuration has than the recorded one as simulated, by what they were."""
    base = next((each for each in one.outcomes if each.name == BY_TIME), None)
    rows = [
        (printable(each.name), *(signed(each.totals.of(name) - base.totals.of(name)) for name in CAUSES))
        for each in one.outcomes
        if base is not None and each.name not in (BY_TIME, RECORDED)
    ]
    return Table(rows, ["", *CAUSES], "Tokens more than as recorded")
