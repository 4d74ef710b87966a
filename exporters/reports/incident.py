"""`kvledger incident`: what changed since a time before, and the likeliest cause in one sentence."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...audit.causes import MISSES
from ...audit.errors import LedgerError
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window, instant, window
from ...audit.text import utc
from ..answer import DIM, Answer, Words, counted, listed, records
from ..facts.sides import TENANT, UNLABELLED, Side, sides_at
from .diff import FigureChange, SettingChange, change_table, most_changed, setting_changes, settings_table
from .incident_rules import WITHOUT_EFFECT, Change, felt, likeliest

BEFORE, YESTERDAY = "before", "yesterday"
LENGTH = "30m"
"""How long an incident is if nobody says when it began."""

DAY = 86_400.0
NAMED = 2
"""How many causes a person sees without -v."""

NOTHING = "Nothing changed."


class NamedCause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, as :class:`~.incident_rules.Cause` has it; ``next`` are commands."""

    name: str
    text: str
    now: str
    next: list[str]


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that ended in a time, beside those of a time before. Pairs are before and then."""

    since: float | None
    until: float | None
    against: str
    requests: tuple[int, int]
    verdicts: tuple[str, str]
    felt: list[str]
    """What became worse for users."""
    causes: list[NamedCause]
    """The likeliest first."""
    settings: list[SettingChange]
    figures: list[FigureChange]
    misses: list[FigureChange]
    notes: list[str] = []


def incident(
    paths: Sequence[Path],
    *,
    at: str = "",
    since: str = "",
    against: str = BEFORE,
    run: Run = here,
) -> Incident:
    """Compare the requests that ended from ``since`` to ``at`` with those of the time that ``against`` names.

    Times are as :func:`~kvledger.audit.replay.windows.window` takes them; an age counts from ``at``.
    ``against`` is ``before`` (the day before ``since``), ``yesterday`` (the same time a day before), or a
    path.
    Raises LedgerError.
    """
    now = time.time()
    until = instant(at, now)
    begin = window(since or LENGTH, now=now if until is None else until).since
    assert begin is not None
    if until is not None and begin >= until:
        raise LedgerError(f"Nothing lies between --since {since} and --at {at}.")
    then = Window(begin, until)
    before, after = _sides(paths, then, against, now, run)
    if not before.audit.engines or not before.of("requests"):
        raise LedgerError(
            f"There is nothing to compare with: no request ended {_when(against, then)}. --against names "
            "yesterday, or journals of a time when all was well."
        )
    if not after.audit.engines:
        raise LedgerError(f"No engine was observed from {utc(begin)} on: --since or --at names another time.")
    changes = [row for row in setting_changes(before.audit, after.audit) if row.setting not in WITHOUT_EFFECT]
    change = Change(before=before, after=after, settings=changes)
    named = {"path": shlex.join(map(str, paths)), "since": utc(begin).replace(" UTC", "Z").replace(" ", "T")}
    return Incident(
        since=begin,
        until=until,
        against=against,
        requests=(before.of("requests"), after.of("requests")),
        verdicts=(before.audit.verdict, after.audit.verdict),
        felt=felt(change),
        causes=[
            NamedCause(
                name=cause.name,
                text=cause.text,
                now=cause.now,
                next=[f"kvledger {one.strip()}" for one in cause.next.format(**named).split(";") if one],
            )
            for cause in likeliest(change)
        ],
        settings=changes,
        figures=list(_figures(before, after)),
        misses=_misses(before, after),
        notes=after.audit.notes,
    )


def _sides(paths: Sequence[Path], then: Window, against: str, now: float, run: Run) -> tuple[Side, Side]:
    """The side that ``against`` names, and that of the incident."""
    assert then.since is not None
    if against not in (BEFORE, YESTERDAY):
        (before,), (after,) = sides_at([Path(against)], [EVERYTHING], run), sides_at(paths, [then], run)
        return before, after
    until = then.since
    if against == YESTERDAY:
        until = min((now if then.until is None else then.until) - DAY, then.since)
    before, after = sides_at(paths, [Window(then.since - DAY, until), then], run)
    return before, after


def _when(against: str, then: Window) -> str:
    if against == BEFORE:
        return f"in the day before {utc(then.since or 0.0)}"
    return "at the same time yesterday" if against == YESTERDAY else f"in {against}"


# --- what changed -----------------------------------------------------------------------------------------


def _figures(before: Side, after: Side) -> Iterator[FigureChange]:
    def both(name: str, figure: str, per: str = "requests") -> FigureChange:
        was, now = (side.mean(figure, per) for side in (before, after))
        return FigureChange(name=name, before=was, after=now, per="request")

    def times(name: str, figure: str) -> FigureChange:
        row = both(f"{name}, ms", figure, "first_tokens")
        was, now = (None if each is None else each / 1e3 for each in (row.before, row.after))
        return msgspec.structs.replace(row, before=was, after=now)

    def parts(name: str, figure: str, whole: str, of: str) -> FigureChange:
        return FigureChange(
            name=name, before=before.share(figure, whole), after=after.share(figure, whole), of=of
        )

    yield FigureChange(name="hits", before=before.hits, after=after.hits, of="prompt tokens")
    yield parts("promised by the connector", "promised", "prompt_tokens", "prompt tokens")
    yield times("time to first token", "first_token_microseconds")
    yield times("queued", "queued_microseconds")
    yield FigureChange(
        name="time to first token, 95th percentile, ms",
        before=_milliseconds(before.first_token_p95),
        after=_milliseconds(after.first_token_p95),
    )
    yield both("preemptions", "preemptions")
    yield parts("rework", "rework", "scheduled", "scheduled tokens")
    yield parts("rejected drafts", "rejected", "scheduled", "scheduled tokens")
    yield FigureChange(name="requests", before=before.rate, after=after.rate, per="second")
    yield both("prompt tokens", "prompt_tokens")
    yield both("output tokens, computed first", "first_output")
    yield FigureChange(name="resets of the cache", before=before.resets, after=after.resets)
    yield FigureChange(name="engines", before=before.engines, after=after.engines)
    for id in sorted({*before.findings, *after.findings}):
        yield FigureChange(name=id, before=before.findings.get(id, 0), after=after.findings.get(id, 0))
    tenants = [side.labels.get(TENANT, {}) for side in (before, after)]
    for tenant in sorted({*tenants[0], *tenants[1]} - {*UNLABELLED}):
        was, now = (
            side.of("requests") and of.get(tenant, {}).get("requests", 0) / side.of("requests")
            for of, side in zip(tenants, (before, after), strict=True)
        )
        yield FigureChange(name=tenant, before=was, after=now, of="requests")


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _misses(before: Side, after: Side) -> list[FigureChange]:
    return most_changed(
        FigureChange(
            name=text, before=before.miss_share(cause), after=after.miss_share(cause), of="prompt tokens"
        )
        for cause, text in MISSES.items()
        if cause in before.missed or cause in after.missed
    )


# --- the answer -------------------------------------------------------------------------------------------


def answer(found: Incident, *, verbose: bool = False) -> Answer:
    """The likeliest cause, then what changed. ``verbose``: all causes, and figures that are equal."""
    return Answer(
        data=found,
        sentences=list(_sentences(found, verbose)),
        parts=[
            settings_table(found.settings),
            change_table("Figures=label", found.figures, verbose),
            change_table("Misses, of prompt tokens=name", found.misses, verbose),
        ],
        records=records(FigureChange, found.figures),
    )


def _sentences(found: Incident, verbose: bool) -> Iterator[str]:
    named = found.causes if verbose else found.causes[:NAMED]
    for place, cause in enumerate(named):
        yield f"{'Next likeliest' if place else 'Likeliest cause'}: {cause.text}"
        if cause.now:
            yield f"  Now: {cause.now}"
        yield from (f"  Next: {command}" for command in (cause.next if not place or verbose else []))
    if left := len(found.causes) - len(named):
        yield Words(f"{counted(left, 'more cause')}: -v prints all.", DIM)
    if not found.causes:
        yield "No cause that kvledger knows changed; the tables show what did." if found.felt else NOTHING
    if found.felt:
        yield f"Worse for users: {listed(found.felt)}."
    elif found.causes:
        yield "Hits, first tokens and preemptions of all requests together did not become worse."
    before, after = found.verdicts
    yield f"{after}{'' if before == after else f', before: {before}'}."
    yield Words(_compared(found), DIM)
    yield from (Words(note, DIM) for note in found.notes)


def _compared(found: Incident) -> str:
    before, after = found.requests
    until = "now" if found.until is None else utc(found.until)
    with_what = {
        BEFORE: f"the day before: {counted(before, 'request')}",
        YESTERDAY: f"the same time yesterday: {counted(before, 'request')}",
    }.get(found.against, f"{found.against}: {counted(before, 'request')}")
    return f"{utc(found.since or 0.0)} to {until}: {counted(after, 'request')}. Compared with {with_what}."
