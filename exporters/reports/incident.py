"""`kvledger incident`: what changed since a time before, and the likeliest cause in one sentence.

A rule is a function from :class:`Change` to a :class:`Cause`, or to None where its figures changed less than
its threshold or are not known. ``RULES`` has all of them in the order in which causes are named, the roots
before what follows from them: a change that makes other figures change stands before the rules of these
figures. So a smaller pool stands before evictions, and a flood of requests before the time others waited.

One law decides which causes are said (:func:`likeliest`). A cause has an :class:`Effect`: a figure that
became worse for users, and what this figure would be with the cause undone. The cause is said if that
explains ``EXPLAINED`` of the change that the causes before it have left. So what does no harm is no cause,
and what follows from a cause is not said beside it. Violations, deaths, failed loads, starved and aborted
requests are harm themselves. A cause must also begin inside the window: its rule must hold beside the time
just before it (:func:`_eve`), too.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...audit import causes
from ...audit.causes import MISSES
from ...audit.checks.registry import catalogue
from ...audit.errors import LedgerError
from ...audit.replay.parallel import Run, here
from ...audit.replay.windows import EVERYTHING, Window, instant, seconds_of, window
from ...audit.text import utc
from ..answer import DIM, Answer, Words, counted, listed, percent, records
from ..answer import milliseconds as shown
from ..facts.sides import (
    ADAPTER,
    JOURNAL,
    PRIORITY,
    TENANT,
    UNLABELLED,
    Figures,
    Side,
    ratio,
    sides_at,
)
from .diff import FigureChange, SettingChange, change_table, most_changed, setting_changes, settings_table

BEFORE, YESTERDAY = "before", "yesterday"
LENGTH = "30m"
"""How long an incident is if nobody says when it began."""

DAY = 86_400.0
NAMED = 2
"""How many causes a person sees without -v."""

NOTHING = "Nothing changed."


class NamedCause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, as :class:`Cause` has it; ``next`` are commands.

    ``figure``: what it made worse, as a key of ``FIGURES``. ``undone``: what this figure would be without the
    cause. ``share``: the part of its change that this explains; above 1 where other changes went the other
    way. None: the cause is harm itself.
    """

    name: str
    text: str
    now: str
    next: list[str]
    figure: str | None = None
    undone: float | None = None
    share: float | None = None


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
    ``against`` is ``before`` (the day before ``since``), ``yesterday`` (the same time a day before), a span
    such as ``15m`` before ``since``, or a path. Raises LedgerError.
    """
    now = time.time()
    until = instant(at, now)
    begin = window(since or LENGTH, now=now if until is None else until).since
    assert begin is not None
    if until is not None and begin >= until:
        raise LedgerError(f"Nothing lies between --since {since} and --at {at}.")
    then = Window(begin, until)
    before, after, eve = _sides(paths, then, against, now, run)
    if not before.audit.engines or not before.of("requests"):
        raise LedgerError(
            f"There is nothing to compare with: no request ended {_when(against, then)}. --against names "
            "yesterday, or journals of a time when all was well."
        )
    if not after.audit.engines:
        raise LedgerError(f"No engine was observed from {utc(begin)} on: --since or --at names another time.")
    change = Change.of(before, after)
    said, older = likeliest(change, *([] if eve is None else [Change.of(eve, after)]))
    notes = [f"Already before {utc(begin)}: {cause.text} --since names when it began." for cause in older]
    named = {"path": shlex.join(map(str, paths)), "since": utc(begin).replace(" UTC", "Z").replace(" ", "T")}
    return Incident(
        since=begin,
        until=until,
        against=against,
        requests=(before.of("requests"), after.of("requests")),
        verdicts=(before.audit.verdict, after.audit.verdict),
        felt=list(felt(change)),
        causes=[
            NamedCause(
                name=cause.name,
                text=cause.text,
                now=cause.now,
                next=[f"kvledger {one.strip()}" for one in cause.next.format(**named).split(";") if one],
                figure=effect and effect.figure,
                undone=effect and effect.undone,
                share=effect and effect.share,
            )
            for cause, effect in said
        ],
        settings=change.effective,
        figures=list(_figures(before, after)),
        misses=_misses(before, after),
        notes=[*notes, *after.audit.notes],
    )


def _sides(
    paths: Sequence[Path], then: Window, against: str, now: float, run: Run
) -> tuple[Side, Side, Side | None]:
    """The side that ``against`` names, that of the incident, and that of its eve, where there is one."""
    assert then.since is not None
    span = seconds_of(against)
    if against not in (BEFORE, YESTERDAY) and span is None:
        (before,), (after,) = sides_at([Path(against)], [EVERYTHING], run), sides_at(paths, [then], run)
        return before, after, None
    end = now if then.until is None else then.until
    if against == YESTERDAY:
        before, after = sides_at(paths, [Window(then.since - DAY, min(end - DAY, then.since)), then], run)
        return before, after, None
    windows = [Window(then.since - (span or DAY), then.since), then]
    eve = _eve(windows[0], end - then.since)
    before, after, *more = sides_at(paths, [*windows, *([] if eve is None else [eve])], run)
    return before, after, next((side for side in more if side.of("requests")), None)


def _eve(before: Window, seconds: float) -> Window | None:
    """The time just before an incident, as long as it; None if that is all that is compared with.

    What was so in this time already did not begin in the incident.
    """
    assert before.since is not None and before.until is not None
    since = before.until - seconds
    return Window(since, before.until) if since > before.since else None


def _when(against: str, then: Window) -> str:
    if against == BEFORE:
        return f"in the day before {utc(then.since or 0.0)}"
    if seconds_of(against):
        return f"in the {against} before {utc(then.since or 0.0)}"
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
        was, now = (side.share(figure, whole) for side in (before, after))
        return FigureChange(name=name, before=was, after=now, of=of)

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
        if cause.figure is not None and cause.undone is not None and cause.share is not None:
            figure = FIGURES[cause.figure]
            yield (
                f"  Undone, {figure.name} would be {figure.said(cause.undone)}: that explains "
                f"{100 * cause.share:.0f} % of the change."
            )
        if cause.now:
            yield f"  Now: {cause.now}"
        yield from (f"  Next: {command}" for command in (cause.next if not place or verbose else []))
    if left := len(found.causes) - len(named):
        yield Words(f"{counted(left, 'more cause')}: -v prints all.", DIM)
    if not found.causes:
        yield (
            "No cause that kvledger knows changed; the tables show what did."
            if found.felt
            else _nothing(found)
        )
    if found.felt:
        yield f"Worse for users: {listed(found.felt)}."
    elif found.causes:
        yield "Hits, first tokens, preemptions and engine time of all requests together did not become worse."
    before, after = found.verdicts
    yield f"{after}{'' if before == after else f', before: {before}'}."
    yield Words(_compared(found), DIM)
    yield from (Words(note, DIM) for note in found.notes)


def _nothing(found: Incident) -> str:
    if not found.settings:
        return NOTHING
    return f"Nothing became worse, though {counted(len(found.settings), 'setting')} changed."


def _compared(found: Incident) -> str:
    before, after = found.requests
    until = "now" if found.until is None else utc(found.until)
    span = f"the {found.against} before" if seconds_of(found.against) else found.against
    what = {BEFORE: "the day before", YESTERDAY: "the same time yesterday"}.get(found.against, span)
    return (
        f"{utc(found.since or 0.0)} to {until}: {counted(after, 'request')}. Compared with {what}: "
        f"{counted(before, 'request')}."
    )


LEAST_REQUESTS = 20
"""With fewer requests on a side, nothing is concluded from its rates and means."""

POINTS = 0.05
"""A smaller change of a share is not named."""

TIMES = 1.5
"""A mean or rate that changed by a smaller factor is not named."""

LEAST_MILLISECONDS = 5.0
"""A smaller change of a time is not named."""

FLOOD_TIMES = 2.5
FLOOD_SHARE = 0.3
"""A tenant floods if it sends so many times what it sent, and this share of all requests."""

NEW_SHARE = 0.1
"""A label that was not there before is named if so many requests have it."""

SLOWER = 1.25
"""Steps are slower if the same work takes so many times as long."""

BUSIER, LEAST_BUSY = 1.25, 0.1
"""Engine time rose if it is so many times as much, and by so many seconds a second."""

EXPLAINED = 0.25
"""A cause is said if it explains this part of the change of a figure that became worse."""

SAME_WORK = 0.2
"""Steps do the same work if prefill tokens, decoding requests and drafts a step differ by a smaller part."""

PREEMPTIONS = 0.05
"""Preemptions per request that are named."""

READS = (
    "blocks/read-invalid",
    "blocks/uncommitted-hit",
    "blocks/hash-content",
    "blocks/hash-map",
    "blocks/write-shared",
    "blocks/double-allocation",
    "blocks/isolation",
    "connector/failed-block-kept",
)
"""Violations by which answers can be wrong, beside those of contents."""

STANDS = ("requests/standstill", "requests/livelock", "requests/stalled", "requests/queued-once")

WITHOUT_EFFECT = frozenset({"level", "figures", "census_steps", "log_stats", "adapter", "plan", "hash_key"})
"""Settings by which the engine serves no request differently."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides of an incident, and the settings of engines that changed."""

    before: Side
    after: Side
    settings: Sequence[SettingChange] = ()

    @staticmethod
    def of(before: Side, after: Side) -> Change:
        """What the engines of both sides have changed."""
        return Change(before=before, after=after, settings=setting_changes(before.audit, after.audit))

    @property
    def effective(self) -> list[SettingChange]:
        """The settings by which engines serve requests differently."""
        return [row for row in self.settings if row.setting not in WITHOUT_EFFECT]

    @property
    def enough(self) -> bool:
        """Whether both sides have requests enough for rates and means."""
        return min(self.before.requests, self.after.requests) >= LEAST_REQUESTS

    def both(self, value: Callable[[Side], float | None]) -> tuple[float, float] | None:
        """A value on both sides; None where one is not known."""
        return _both(value(self.before), value(self.after))

    def shares(self, figure: str, whole: str) -> tuple[float, float] | None:
        """A share on both sides; None where one is not known."""
        return self.both(lambda side: side.share(figure, whole))

    def means(self, figure: str, of: str = "requests") -> tuple[float, float] | None:
        """A mean on both sides; None where one is not known, or of too few requests."""
        return self.both(lambda side: side.mean(figure, of)) if self.enough else None

    def labels(self, label: str) -> tuple[Mapping[str, Figures], Mapping[str, Figures]]:
        """The figures of each value of a label, on both sides."""
        return self.before.labels.get(label, {}), self.after.labels.get(label, {})


class Figure(NamedTuple):
    """What users and operators feel: its value on a side, when it became worse, and its words."""

    name: str
    value: Callable[[Side], float | None]
    worse: Callable[[float, float], bool]
    said: Callable[[float], str]
    whole: str = ""
    """The figure by which the parts of this one add up, or ""."""


def _ms(microseconds: float) -> str:
    return shown(microseconds / 1e3)


HITS, FIRST, PREEMPTED, BUSY = "hits", "first", "preempted", "busy"
FIGURES: Mapping[str, Figure] = {
    HITS: Figure(
        "the share of prompt tokens that hit",
        lambda side: side.hits,
        lambda before, now: before - now >= POINTS,
        percent,
        "prompt_tokens",
    ),
    FIRST: Figure(
        "the time to first token",
        lambda side: side.mean("first_token_microseconds", "first_tokens"),
        lambda before, now: _rose(before, now, 1e3 * LEAST_MILLISECONDS),
        _ms,
        "first_tokens",
    ),
    PREEMPTED: Figure(
        "preemptions a request",
        lambda side: side.mean("preemptions"),
        lambda before, now: _rose(before, now, PREEMPTIONS),
        "{:.2f}".format,
        "requests",
    ),
    BUSY: Figure(
        "engine time a second",
        lambda side: side.busy,
        lambda before, now: now >= BUSIER * before and now - before >= LEAST_BUSY,
        "{:.2f} s".format,
    ),
}
"""What a cause can make worse."""

PARTS = {HITS: ("local", "external"), FIRST: ("first_token_microseconds",), PREEMPTED: ("preemptions",)}
"""The figures that sum to each, divided by its whole."""


class Effect(NamedTuple):
    """A figure that became worse, and what it would be without a cause."""

    figure: str
    before: float
    now: float
    undone: float

    @property
    def share(self) -> float:
        """The part of the change that the cause explains."""
        return (self.undone - self.now) / (self.before - self.now)


class Cause(NamedTuple):
    """A cause in one sentence with its figures, what helps now, and the command to run next.

    ``now`` and ``next`` may be empty; ``next`` has ``{path}`` and ``{since}``. ``effects``: what the cause
    made worse; None: it is harm itself.
    """

    name: str
    text: str
    now: str = ""
    next: str = ""
    effects: Sequence[Effect] | None = None


Rule = Callable[[Change], Cause | None]


def likeliest(change: Change, *earlier: Change) -> tuple[list[tuple[Cause, Effect | None]], list[Cause]]:
    """The causes that are said, the likeliest first, and those that began before the window.

    ``earlier``: the incident beside other times before it, in which each cause has to hold as well.
    """
    said: list[tuple[Cause, Effect | None]] = []
    older: list[Cause] = []
    left = dict.fromkeys(FIGURES, 1.0)
    for rule in RULES:
        cause = rule(change)
        if cause is None:
            continue
        effect = None
        if cause.effects is not None:
            explained = [one for one in cause.effects if min(one.share, left[one.figure]) >= EXPLAINED]
            if not explained:
                continue
            effect = explained[0]
        if not all(_holds(rule(one)) for one in earlier):
            older.append(cause)
            continue
        for one in cause.effects or ():
            left[one.figure] -= one.share
        said.append((cause, effect))
    return said, older


def _holds(cause: Cause | None) -> bool:
    return cause is not None and (
        cause.effects is None or any(effect.share >= EXPLAINED for effect in cause.effects)
    )


def worse(change: Change, name: str) -> tuple[float, float] | None:
    """A figure before and now, if it became worse; None if it did not, or is not known."""
    figure = FIGURES[name]
    both = change.both(figure.value)
    return both if both is not None and change.enough and figure.worse(*both) else None


def _undone(change: Change, name: str, undone: Callable[[float, float], float | None]) -> list[Effect]:
    """The effect on a figure that became worse; ``undone`` takes the figure before and now."""
    both = worse(change, name)
    value = None if both is None else undone(*both)
    return [] if both is None or value is None else [Effect(name, *both, value)]


def as_before(change: Change, rows: Iterable[Figures]) -> list[Effect]:
    """What would be if these requests had fared as all did before: all figures that are sums of requests."""
    found, some = [], list(rows)
    for name, parts in PARTS.items():
        whole = FIGURES[name].whole

        def undone(before: float, now: float, parts: tuple[str, ...] = parts, whole: str = whole) -> float:
            gained = sum(before * row.get(whole, 0) - sum(row.get(part, 0) for part in parts) for row in some)
            return now + gained / change.after.of(whole)

        found += _undone(change, name, undone)
    return found


def more_hits(change: Change, share: float) -> list[Effect]:
    """What would be if this share of prompt tokens more had hit."""
    return _undone(change, HITS, lambda before, now: now + share)


def less_work(change: Change, part: float) -> list[Effect]:
    """What would be if engines had this part less to do, and requests waited for admission as before."""
    waits = change.means("queued_microseconds", "first_tokens")
    rise = 0.0 if waits is None else waits[1] - waits[0]
    return [
        *_undone(change, BUSY, lambda before, now: now * (1 - part)),
        *_undone(change, FIRST, lambda before, now: now - rise),
    ]


def felt(change: Change) -> Iterator[str]:
    """What became worse for users, in sentences."""
    if hits := worse(change, HITS):
        yield f"hits fell from {percent(hits[0])} to {percent(hits[1])} of prompt tokens"
    late = change.both(lambda side: side.first_token_p95) if change.enough else None
    if first := worse(change, FIRST):
        yield f"the time to first token rose from {_ms(first[0])} to {_ms(first[1])}"
    elif late is not None and _rose(*late, LEAST_MILLISECONDS / 1e3):
        yield (
            "the 95th percentile of the time to first token rose from "
            f"{shown(1e3 * late[0])} to {shown(1e3 * late[1])}"
        )
    if preempted := worse(change, PREEMPTED):
        yield f"preemptions rose from {preempted[0]:.2f} to {preempted[1]:.2f} a request"
    if busy := worse(change, BUSY):
        yield f"steps took {busy[1]:.2f} s of engine time a second, {busy[0]:.2f} s before"
    if new := _new_findings(change, _violations):
        yield f"new violations: {listed(new)}"


def _rose(before: float, after: float, least: float) -> bool:
    """Whether a figure rose by a factor that counts and by ``least``."""
    return after - before >= least and after >= TIMES * before


def _both(before: float | None, after: float | None) -> tuple[float, float] | None:
    return None if before is None or after is None else (before, after)


# --- what engines did wrong -----------------------------------------------------------------------------


def _new_findings(change: Change, wanted: Callable[[str], bool]) -> list[str]:
    """Invariants with findings more often than before, in findings a request."""
    before, after = change.before, change.after
    return [
        id
        for id, found in after.findings.items()
        if wanted(id)
        and found / max(1, after.of("requests"))
        > TIMES * before.findings.get(id, 0) / max(1, before.of("requests"))
    ]


def _violations(id: str) -> bool:
    return catalogue()[id].severity == "violation"


def _found(name: str, change: Change, wanted: Callable[[str], bool], text: str) -> Cause | None:
    ids = _new_findings(change, wanted)
    if not ids:
        return None
    worst = max(ids, key=lambda id: change.after.findings[id])
    numbers = [f"{id} ({counted(change.after.findings[id], 'finding')})" for id in ids]
    return Cause(
        name,
        f"{text}: {listed(numbers)}.",
        catalogue()[worst].stop_now,
        f"audit {{path}} --since {{since}} -v; kvledger explain {worst}",
    )


def wrong_kv(change: Change) -> Cause | None:
    """Requests read KV that is wrong, absent or another's."""

    def is_wrong(id: str) -> bool:
        return _violations(id) and (id.startswith("content/") or id in READS)

    return _found("wrong-kv", change, is_wrong, "Requests read KV that is not theirs or not valid")


def stands_still(change: Change) -> Cause | None:
    """Requests make no progress."""
    return _found("no-progress", change, STANDS.__contains__, "Requests make no progress")


def violated(change: Change) -> Cause | None:
    """Any other violation that is new."""

    def is_other(id: str) -> bool:
        named = id.startswith(("content/", "events/")) or id in READS or id in STANDS
        return _violations(id) and not named

    return _found("violations", change, is_other, "The engine breaks an invariant that it kept before")


def events_lost(change: Change) -> Cause | None:
    """Routers got other KV events than what the cache did."""

    def is_event(id: str) -> bool:
        return id.startswith("events/")

    return _found(
        "events-lost", change, is_event, "KV events were lost, so routers know a cache that is not there"
    )


# --- what operators changed -----------------------------------------------------------------------------


def died(change: Change) -> Cause | None:
    """Engines ended without shutting down, or raised."""
    dead = change.after.died
    if not dead:
        return None
    return Cause(
        "died",
        f"{len(dead)} of {counted(change.after.engines, 'engine')} died: {listed(dead[:3])}.",
        "Look at the engine's log at that time, and start it again.",
        "audit {path} --since {since}",
    )


def settings(change: Change) -> Cause | None:
    """Engines serve with other settings."""
    rows = sorted(change.effective, key=lambda row: row.setting != "release")
    if not rows:
        return None
    pairs = [f"{row.setting} from {row.before or 'none'} to {row.after or 'none'}" for row in rows[:4]]
    more = [f"{len(rows) - 4} more"] if len(rows) > 4 else []
    return Cause(
        "settings",
        f"Engines run with other settings: {listed([*pairs, *more])}.",
        "Go back to the settings before, if they were not meant to change.",
        "doctor faults --vllm " + rows[0].after
        if rows[0].setting == "release"
        else "why {path} --since {since}",
        as_before(change, _new_engines(change)),
    )


def _new_engines(change: Change) -> list[Figures]:
    """The figures of each engine that served nothing before."""
    before, after = change.labels(JOURNAL)
    return [figures for name, figures in after.items() if name not in before]


def restarted(change: Change) -> Cause | None:
    """Engines started with an empty cache."""
    after = change.after
    if not after.started:
        return None
    return Cause(
        "restart",
        f"{len(after.started)} of {counted(after.engines, 'engine')} started in this time, with an empty "
        "prefix cache.",
        "Wait until the cache has filled, or send the common prefixes once.",
        "journals {path}",
        as_before(change, _new_engines(change)),
    )


# --- the caches -----------------------------------------------------------------------------------------


def resets(change: Change) -> Cause | None:
    """The prefix cache was reset more often."""
    before, after = (ratio(side.resets, side.of("requests")) or 0.0 for side in (change.before, change.after))
    if after <= TIMES * before:
        return None
    rises = _rises(change)
    lost = rises.get(causes.CACHE_RESET, 0.0) or rises.get(causes.NOT_KNOWABLE, 0.0)
    return Cause(
        "resets",
        f"The prefix cache was reset {_times(change.after.resets)}; before: {_times(change.before.resets)}.",
        "Find who calls reset_prefix_cache: an update of weights, a sleep, or a script.",
        "why {path} --since {since}",
        more_hits(change, lost),
    )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times" if number else "never"


def loads_fail(change: Change) -> Cause | None:
    """More of the promised tokens were not loaded."""
    shares = change.shares("voided", "promised")
    lost = {
        cause: tokens
        for cause, tokens in change.after.voided.items()
        if cause in (causes.FAILED, causes.NOT_PLANNED, causes.NEVER_LOADED)
    }
    if shares is None or not lost or shares[1] - shares[0] < POINTS:
        return None
    most = causes.external_loss(max(lost, key=lambda cause: lost[cause]))
    return Cause(
        "loads-fail",
        f"Loads of the KV connector fail: {percent(shares[1])} of the promised tokens were not loaded, "
        f"{percent(shares[0])} before; most frequent cause: {most}.",
        "Look at the store and the network between it and the engine; without the connector, tokens are "
        "computed at once.",
        "summary {path} --since {since}",
    )


def store_lost(change: Change) -> Cause | None:
    """The connector promises less of the prompts."""
    shares = change.shares("promised", "prompt_tokens")
    if shares is None or not change.enough or shares[0] - shares[1] < POINTS or shares[0] < TIMES * shares[1]:
        return None
    return Cause(
        "store-lost",
        f"The KV connector finds {percent(shares[1])} of prompt tokens in its store; {percent(shares[0])} "
        "before.",
        "See whether the store was emptied, restarted, or can't be reached.",
        "summary {path} --since {since}",
        more_hits(change, shares[0] - shares[1]),
    )


def drafts_rejected(change: Change) -> Cause | None:
    """More drafts were rejected."""
    shares = change.shares("rejected", "scheduled")
    if shares is None or not _rose(*shares, POINTS):
        return None
    return Cause(
        "drafts-rejected",
        f"Rejected drafts take {percent(shares[1])} of scheduled tokens; {percent(shares[0])} before.",
        "Propose fewer drafts, or look at the draft model.",
        "summary {path} --since {since}",
        less_work(change, _decoding(change.after) * _fewer(change, _tokens_a_decode)),
    )


def _tokens_a_decode(side: Side) -> float | None:
    return ratio(side.of("later_tokens"), side.work.decode_requests)


def _fewer(change: Change, value: Callable[[Side], float | None]) -> float:
    """The part by which a value that fell would make less of what is divided by it."""
    both = change.both(value)
    return 0.0 if both is None or not both[0] else 1 - both[1] / both[0]


def _decoding(side: Side) -> float:
    """The part of engine time that requests had for their outputs, by their share of the tokens of steps."""
    return ratio(side.of("decode_own_microseconds"), side.busy_us) or 0.0


def _prefilling(side: Side) -> float:
    """The same for prompts."""
    return ratio(side.of("prefill_own_microseconds"), side.busy_us) or 0.0


# --- what clients send ----------------------------------------------------------------------------------


def flood(change: Change) -> Cause | None:
    """One tenant asks for far more tokens than before, and so takes blocks and steps from others."""
    if not change.enough:
        return None
    found = []
    before, after = change.labels(TENANT)
    asked = [sum(map(_asked, rows.values())) for rows in (before, after)]
    seconds = [side.seconds for side in (change.before, change.after)]
    for tenant, figures in after.items():
        was = before.get(tenant, {})
        rates = _both(*(ratio(_asked(row), of) for row, of in zip((was, figures), seconds, strict=True)))
        shares = _both(*(ratio(_asked(row), of) for row, of in zip((was, figures), asked, strict=True)))
        if tenant in UNLABELLED or rates is None or shares is None:
            continue
        if (
            shares[1] >= FLOOD_SHARE
            and shares[1] - shares[0] >= 2 * POINTS
            and rates[1] > FLOOD_TIMES * rates[0]
        ):
            found.append((shares[1], tenant, rates, (was, figures)))
    if not found:
        return None
    share, tenant, rates, (was, figures) = max(found, key=lambda one: one[:2])
    asked_before = f"{rates[0]:,.0f} before" if was else "it is new"
    more = figures["scheduled"] / (seconds[1] or 1) - was.get("scheduled", 0) / (seconds[0] or 1)
    sends = ratio(figures["requests"], seconds[1]) or 0.0
    how = f"{sends:,.1f} requests a second of {_asked(figures) / figures['requests']:,.0f} tokens"
    return Cause(
        "flood",
        f"Tenant {tenant} asks for {rates[1]:,.0f} tokens a second; {asked_before}. It sends {how}, "
        f"{percent(share)} of all tokens.{_whose_hits_fell(change, but=tenant)}",
        f"Limit tenant {tenant}, or give it engines of its own.",
        "summary {path} --since {since} --by group",
        [
            *less_work(change, more * (seconds[1] or 0) / max(1, change.after.of("scheduled"))),
            *_undone(change, HITS, lambda before, now: _hits_without(change, tenant, more)),
        ],
    )


def _asked(figures: Figures) -> int:
    """The tokens that clients ask for: prompts and outputs."""
    return figures.get("prompt_tokens", 0) + figures.get("output_tokens", 0)


def _hits_without(change: Change, tenant: str, more: float) -> float | None:
    """What share of the tokens of other tenants would have hit.

    What they lost since before is charged to who computed more, as each computed block evicts another one:
    ``more`` is what the tenant has scheduled more, in tokens a second.
    """

    def of_others(side: Side) -> float | None:
        rows = [row for name, row in side.labels[TENANT].items() if name != tenant]
        return ratio(sum(map(_hit, rows)), sum(row["prompt_tokens"] for row in rows))

    hits = change.both(of_others)
    rates = change.both(lambda side: ratio(side.of("scheduled"), side.seconds))
    if hits is None or rates is None or rates[1] <= rates[0]:
        return None
    return hits[1] + (hits[0] - hits[1]) * more / (rates[1] - rates[0])


def _hit(figures: Figures) -> int:
    return figures.get("local", 0) + figures.get("external", 0)


def new_label(change: Change) -> Cause | None:
    """Many requests have an adapter that was not there before."""
    if not change.enough:
        return None
    before, after = change.labels(ADAPTER)
    total = change.after.of("requests")
    new = {
        name: figures["requests"] / total
        for name, figures in after.items()
        if name not in before and name not in UNLABELLED and figures["requests"] >= NEW_SHARE * total
    }
    if not new:
        return None
    gone = [name for name in before if name not in after and name not in UNLABELLED]
    name = max(new, key=lambda one: new[one])
    instead = f" Requests of {listed(gone)} no longer come." if gone else ""
    return Cause(
        "new-adapter",
        f"Adapter {name} is new: {percent(new[name])} of requests have it, and no KV was cached for "
        f"it before.{instead}",
        "Wait until the cache has filled.",
        "summary {path} --since {since} --by lora",
        as_before(change, [after[name]]),
    )


def traffic(change: Change) -> Cause | None:
    """More requests come."""
    rates = change.both(lambda side: side.rate)
    if rates is None or not change.enough or not rates[1] or rates[1] < TIMES * rates[0]:
        return None
    return Cause(
        "traffic",
        f"{rates[1]:,.1f} requests a second come; {rates[0]:,.1f} before.",
        "Add engines, or limit clients.",
        "summary {path} --since {since} --by 5m",
        less_work(change, 1 - rates[0] / rates[1]),
    )


def _longer(name: str, figure: str, what: str, part: Callable[[Side], float]) -> Rule:
    def rule(change: Change) -> Cause | None:
        means = change.means(figure)
        if means is None or not means[1] or means[1] < TIMES * means[0]:
            return None
        effects = less_work(change, part(change.after) * (1 - means[0] / means[1]))
        if figure == "prompt_tokens":  # the same tokens hit, of prompts as long as before
            effects += _undone(change, HITS, lambda before, now: now * means[1] / means[0])
        return Cause(
            name,
            f"{what} are longer: {means[1]:,.0f} tokens a request; {means[0]:,.0f} before.",
            "",
            "summary {path} --since {since} --percentiles prompt_tokens,output_tokens",
            effects,
        )

    rule.__doc__ = f"{what} are longer."
    return rule


longer_prompts = _longer("longer-prompts", "prompt_tokens", "Prompts", _prefilling)
longer_outputs = _longer("longer-outputs", "first_output", "Outputs", _decoding)


def scattered(change: Change) -> Cause | None:
    """Requests of one tenant go to more engines than before."""
    shares = change.both(_to_one_engine)
    if shares is None or not change.enough or shares[0] - shares[1] < 2 * POINTS:
        return None
    return Cause(
        "routing",
        f"{percent(shares[1])} of requests go to the engine that has most of their tenant; "
        f"{percent(shares[0])} before. Other engines have not cached their prefixes.",
        "Look at the router: it lost its state, or chooses by load alone.",
        "check routing {path}",
        as_before(
            change, (row for (tenant, _), row in change.after.by_engine.items() if tenant not in UNLABELLED)
        ),
    )


def _to_one_engine(side: Side) -> float | None:
    """The share of labelled requests that went to the engine with most of their tenant."""
    most: dict[str, int] = {}
    total = 0
    for (tenant, _), row in side.by_engine.items():
        if tenant not in UNLABELLED:
            most[tenant] = max(most.get(tenant, 0), row["requests"])
            total += row["requests"]
    return ratio(sum(most.values()), total)


# --- the engines' speed ---------------------------------------------------------------------------------


def slower(change: Change) -> Cause | None:
    """The same work takes longer."""
    factor = _times_as_long(change.before, change.after)
    if factor is None or factor < SLOWER:
        return None
    return Cause(
        "slow-steps",
        f"The same work takes the engine {factor:.1f} times as long.",
        "Look at the GPU: clocks, temperature, other processes, and the network between ranks.",
        "export html {path} --since {since} -o report.html",
        [
            *_undone(change, BUSY, lambda before, now: now / factor),
            *_undone(change, FIRST, lambda before, now: now / factor),
        ],
    )


def _times_as_long(before: Side, after: Side) -> float | None:
    """How many times as long the same work takes; None if that is not known.

    By a model of step time of the side before, else by the mean step if steps do the same work on both sides.
    """
    sides = (before, after)
    for model in before.models[:1]:
        was, now = (ratio(side.busy_us, side.predicted_us(model)) for side in sides)
        return ratio(now, was)
    steps = [side.work.steps for side in sides]
    if not all(steps):
        return None
    for amounts in zip(
        *([side.work[place] / side.work.steps for place in (1, 2, 3)] for side in sides), strict=True
    ):
        if max(amounts) - min(amounts) > SAME_WORK * max(amounts):
            return None
    return (after.busy_us / steps[1]) / (before.busy_us / steps[0]) if before.busy_us else None


def loads_slow(change: Change) -> Cause | None:
    """Asynchronous loads of as many tokens take longer, such as those from a prefill engine."""
    waited = f"{causes.REMOTE_LOAD}_microseconds"
    waits, rates = change.means(waited, "first_tokens"), change.shares(waited, "promised")
    if waits is None or rates is None or not _rose(*waits, 1e3 * LEAST_MILLISECONDS):
        return None
    if rates[1] < TIMES * rates[0]:  # more tokens are loaded
        return None
    more = waits[1] * (1 - rates[0] / rates[1])
    return Cause(
        "slow-loads",
        f"Loads of the KV connector are slower: requests wait {_ms(waits[1])} for them, {_ms(waits[0])} "
        f"before; 1,000 promised tokens take {_ms(1e3 * rates[1])}, {_ms(1e3 * rates[0])} before.",
        "Look at the network to the store or the prefill engine, and at how many loads run at once.",
        "summary {path} --since {since}",
        _undone(change, FIRST, lambda before, now: now - more),
    )


def starved(change: Change) -> Cause | None:
    """Less urgent requests wait longer, and urgent ones don't."""
    found = []
    waits: dict[str, float] = {}
    before, after = change.labels(PRIORITY)
    for priority, figures in after.items():
        was = before.get(priority, {})
        means = _both(
            ratio(was.get("queued_microseconds"), was.get("first_tokens")),
            ratio(figures["queued_microseconds"], figures["first_tokens"]),
        )
        if means is None or figures["first_tokens"] < LEAST_REQUESTS:
            continue
        waits[priority] = means[1]
        if _rose(*means, 1e3 * LEAST_MILLISECONDS):
            found.append((means[1], priority, means))
    if not found:
        return None
    most, priority, means = max(found)
    others = {one: us for one, us in waits.items() if int(one) < int(priority) and us < most / TIMES}
    if not others:
        return None
    urgent = min(others, key=int)
    return Cause(
        "starved",
        f"Requests of priority {priority} wait {shown(means[1] / 1e3)} for their admission, "
        f"{shown(means[0] / 1e3)} before; those of priority {urgent} wait {shown(others[urgent] / 1e3)}.",
        "Let fewer requests be urgent, or give them engines of their own.",
        "summary {path} --since {since} --by priority",
    )


# --- what follows from other changes ----------------------------------------------------------------------


def never_seen(change: Change) -> Cause | None:
    """Prompts miss that hit before, though nothing else changed."""
    rises = _rises(change)
    if rises.get(causes.NOT_KNOWABLE, 0.0) < POINTS:
        return None
    if rises.get(causes.EVICTED, 0.0) > rises[causes.NOT_KNOWABLE]:
        return None
    whose = _whose_hits_fell(change)
    blocks = "blocks" in change.after.levels or "content" in change.after.levels
    text = (
        "Prompts no longer begin with a prefix that was seen before"
        if blocks or _is_sampled(change)
        else "Prompts no longer hit: they begin with other tokens, or their blocks were evicted, which level "
        "tokens does not tell"
    )
    return Cause(
        "prefix",
        f"{text}.{whose}",
        "See what clients send first: a time, a name or an id before the shared text makes each prompt new.",
        "summary prefixes {path}" if blocks else "why {path} --since {since}",
        more_hits(change, rises[causes.NOT_KNOWABLE]),
    )


def _whose_hits_fell(change: Change, but: str = "") -> str:
    falls = []
    for label in (TENANT, ADAPTER):
        before, after = change.labels(label)
        for value, figures in after.items():
            was = before.get(value)
            if value in UNLABELLED or value == but or was is None:
                continue
            hits = _both(*(ratio(_hit(one), one["prompt_tokens"]) for one in (was, figures)))
            if hits is not None and hits[0] - hits[1] >= POINTS:
                falls.append((hits[0] - hits[1], label, value, hits))
    if not falls:
        return ""
    _, label, value, hits = max(falls)
    return f" {label.capitalize()} {value} lost most: {percent(hits[0])} hit before, {percent(hits[1])} now."


def evicted(change: Change) -> Cause | None:
    """More blocks were evicted before they were hit."""
    rise = _rises(change).get(causes.EVICTED, 0.0)
    if rise < POINTS:
        return None
    return Cause(
        "evicted",
        f"Blocks were evicted before they were hit again: {100 * rise:+.1f} points of prompt tokens.",
        "Give the cache more blocks, or send requests that share a prefix to the same engine.",
        "whatif {path}",
        more_hits(change, rise),
    )


def _rises(change: Change) -> dict[str, float]:
    """Misses by cause, as shares of prompt tokens: how much they rose.

    Where a sample tells evicted contents from new ones, it divides the two causes.
    """
    before, after = change.before, change.after
    rises = {
        cause: (after.miss_share(cause) or 0.0) - (before.miss_share(cause) or 0.0) for cause in after.missed
    }
    if causes.NEVER_SEEN in rises:  # where it is known, it is no longer among what is not knowable
        rises[causes.NOT_KNOWABLE] = rises.get(causes.NOT_KNOWABLE, 0.0) + rises.pop(causes.NEVER_SEEN)
    if rises.keys() & causes.EVICTIONS:
        rises[causes.EVICTED] = sum(rises.get(cause, 0.0) for cause in causes.EVICTIONS)
    if _is_sampled(change):
        was, now = (_evicted_and_new(side) for side in (before, after))
        rises[causes.EVICTED], rises[causes.NOT_KNOWABLE] = now[0] - was[0], now[1] - was[1]
    return rises


def _is_sampled(change: Change) -> bool:
    return None not in (side.sampled.share(causes.EVICTED) for side in (change.before, change.after))


def _evicted_and_new(side: Side) -> tuple[float, float]:
    """The shares of prompt tokens that were evicted and never seen, divided by the sample."""
    parts = (causes.EVICTED, causes.NOT_KNOWABLE, causes.NEVER_SEEN)
    both = sum(side.miss_share(cause) or 0.0 for cause in parts)
    evicted = both * (side.sampled.share(causes.EVICTED) or 0.0)
    return evicted, both - evicted


def preempted(change: Change) -> Cause | None:
    """More requests were preempted."""
    means = change.means("preemptions")
    if means is None or not _rose(*means, PREEMPTIONS):
        return None
    return Cause(
        "preempted",
        f"{means[1]:.2f} preemptions a request; {means[0]:.2f} before.",
        "Run fewer requests at once, or give the cache more blocks.",
        "why {path} --since {since}",
        _undone(change, PREEMPTED, lambda before, now: before),
    )


def aborted(change: Change) -> Cause | None:
    """More clients leave."""
    shares = change.both(lambda side: ratio(side.outcomes.get("aborted", 0), side.of("requests")))
    if shares is None or not change.enough or shares[1] - shares[0] < POINTS:
        return None
    return Cause(
        "aborted",
        f"{percent(shares[1])} of requests were aborted; {percent(shares[0])} before.",
        "See why clients leave: a timeout of theirs, or of a gateway.",
        "summary {path} --since {since} --by outcome",
    )


RULES: tuple[Rule, ...] = (
    died,
    settings,
    wrong_kv,
    stands_still,
    violated,
    events_lost,
    resets,
    loads_fail,
    store_lost,
    drafts_rejected,
    restarted,
    slower,
    loads_slow,
    flood,
    new_label,
    starved,
    traffic,
    longer_prompts,
    longer_outputs,
    scattered,
    evicted,
    never_seen,
    preempted,
    aborted,
)
