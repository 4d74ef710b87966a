"""`kvledger incident`: what changed since a time before, and the likeliest cause in one sentence.

A rule is a function from :class:`Change` to a :class:`Cause`, or to None where its figures changed less than
its threshold or are not known. ``RULES`` has all of them in the order in which causes are named, the roots
before what follows from them: a change that makes other figures change stands before the rules of these
figures. So a smaller pool stands before evictions, and a flood of requests before the time others waited.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..facts.sides import ADAPTER, PRIORITY, TENANT, UNLABELLED, Side, ratio, sides_at
from .diff import FigureChange, SettingChange, change_table, most_changed, setting_changes, settings_table

BEFORE, YESTERDAY = "before", "yesterday"
LENGTH = "30m"
"""How long an incident is if nobody says when it began."""

DAY = 86_400.0
NAMED = 2
"""How many causes a person sees without -v."""

NOTHING = "Nothing changed."


class NamedCause(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, as :class:`Cause` has it; ``next`` are commands."""

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
    span = seconds_of(against)
    if against not in (BEFORE, YESTERDAY) and span is None:
        (before,), (after,) = sides_at([Path(against)], [EVERYTHING], run), sides_at(paths, [then], run)
        return before, after
    until = then.since
    if against == YESTERDAY:
        until = min((now if then.until is None else then.until) - DAY, then.since)
    before, after = sides_at(paths, [Window(then.since - (span or DAY), until), then], run)
    return before, after


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

    @property
    def enough(self) -> bool:
        """Whether both sides have requests enough for rates and means."""
        return min(self.before.requests, self.after.requests) >= LEAST_REQUESTS

    def shares(self, figure: str, whole: str) -> tuple[float, float] | None:
        """A share on both sides; None where one is not known."""
        return _both(self.before.share(figure, whole), self.after.share(figure, whole))

    def means(self, figure: str, of: str = "requests") -> tuple[float, float] | None:
        """A mean on both sides; None where one is not known, or of too few requests."""
        if not self.enough:
            return None
        return _both(self.before.mean(figure, of), self.after.mean(figure, of))


class Cause(NamedTuple):
    """A cause in one sentence with its figures, what helps now, and the command to run next.

    ``now`` and ``next`` may be empty; ``next`` has ``{path}`` and ``{since}``.
    """

    name: str
    text: str
    now: str = ""
    next: str = ""


Rule = Callable[[Change], Cause | None]


def likeliest(change: Change) -> list[Cause]:
    """The causes of all rules that apply, the likeliest first."""
    return [cause for rule in RULES if (cause := rule(change)) is not None]


def felt(change: Change) -> list[str]:
    """What became worse for users, in sentences."""
    return list(_felt(change))


def _felt(change: Change) -> Iterator[str]:
    before, after = change.before, change.after
    if _hits_fell(change):
        yield f"hits fell from {percent(before.hits or 0.0)} to {percent(after.hits or 0.0)} of prompt tokens"
    first = change.means("first_token_microseconds", "first_tokens")
    late = _both(before.first_token_p95, after.first_token_p95) if change.enough else None
    if first is not None and _rose(*first, 1e3 * LEAST_MILLISECONDS):
        yield f"the time to first token rose from {shown(first[0] / 1e3)} to {shown(first[1] / 1e3)}"
    elif late is not None and _rose(*late, LEAST_MILLISECONDS / 1e3):
        yield (
            "the 95th percentile of the time to first token rose from "
            f"{shown(1e3 * late[0])} to {shown(1e3 * late[1])}"
        )
    preempted = change.means("preemptions")
    if preempted is not None and _rose(*preempted, PREEMPTIONS):
        yield f"preemptions rose from {preempted[0]:.2f} to {preempted[1]:.2f} a request"
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


def settings(change: Change) -> Cause | None:
    """Engines serve with other settings."""
    rows = [row for row in change.settings if row.setting not in WITHOUT_EFFECT]
    if not rows:
        return None
    rows.sort(key=lambda row: row.setting != "release")
    pairs = [f"{row.setting} from {row.before or 'none'} to {row.after or 'none'}" for row in rows[:4]]
    more = [f"{len(rows) - 4} more"] if len(rows) > 4 else []
    return Cause(
        "settings",
        f"Engines run with other settings: {listed([*pairs, *more])}.",
        "Go back to the settings before, if they were not meant to change.",
        "doctor faults --vllm " + rows[0].after
        if rows[0].setting == "release"
        else "why {path} --since {since}",
    )


def restarted(change: Change) -> Cause | None:
    """Engines started with an empty cache."""
    after = change.after
    if not after.started or not _hits_fell(change):
        return None
    return Cause(
        "restart",
        f"{after.started} of {counted(after.engines, 'engine')} started in this time, with an empty prefix "
        "cache.",
        "Wait until the cache has filled, or send the common prefixes once.",
        "journals {path}",
    )


# --- the caches -----------------------------------------------------------------------------------------


def _hits_fell(change: Change) -> bool:
    hits = _both(change.before.hits, change.after.hits)
    return hits is not None and change.enough and hits[0] - hits[1] >= POINTS


def resets(change: Change) -> Cause | None:
    """The prefix cache was reset more often."""
    before, after = (ratio(side.resets, side.of("requests")) or 0.0 for side in (change.before, change.after))
    if after <= TIMES * before or not _hits_fell(change):
        return None
    return Cause(
        "resets",
        f"The prefix cache was reset {_times(change.after.resets)}; before: {_times(change.before.resets)}.",
        "Find who calls reset_prefix_cache: an update of weights, a sleep, or a script.",
        "why {path} --since {since}",
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
    )


# --- what clients send ----------------------------------------------------------------------------------


def flood(change: Change) -> Cause | None:
    """One tenant sends far more than before."""
    if not change.enough:
        return None
    found = []
    for tenant, figures in change.after.labels.get(TENANT, {}).items():
        sent = figures["requests"]
        was = change.before.labels.get(TENANT, {}).get(tenant, {}).get("requests", 0)
        rates = _both(ratio(was, change.before.seconds), ratio(sent, change.after.seconds))
        share = sent / change.after.of("requests")
        if rates and tenant not in UNLABELLED and share >= FLOOD_SHARE and rates[1] > FLOOD_TIMES * rates[0]:
            found.append((share, tenant, rates))
    if not found:
        return None
    share, tenant, rates = max(found)
    return Cause(
        "flood",
        f"Tenant {tenant} sends {rates[1]:,.1f} requests a second; {rates[0]:,.1f} before. These are "
        f"{percent(share)} of all requests.",
        f"Limit tenant {tenant}, or give it engines of its own.",
        "summary {path} --since {since} --by group",
    )


def new_label(change: Change) -> Cause | None:
    """Many requests have an adapter that was not there before."""
    if not change.enough:
        return None
    before, after = (side.labels.get(ADAPTER, {}) for side in (change.before, change.after))
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
    )


def traffic(change: Change) -> Cause | None:
    """More requests come."""
    rates = _both(change.before.rate, change.after.rate)
    if rates is None or not change.enough or rates[1] < TIMES * rates[0]:
        return None
    return Cause(
        "traffic",
        f"{rates[1]:,.1f} requests a second come; {rates[0]:,.1f} before.",
        "Add engines, or limit clients.",
        "summary {path} --since {since} --by 5m",
    )


def _longer(name: str, figure: str, what: str) -> Rule:
    def rule(change: Change) -> Cause | None:
        means = change.means(figure)
        if means is None or means[1] < TIMES * means[0]:
            return None
        return Cause(
            name,
            f"{what} are longer: {means[1]:,.0f} tokens a request; {means[0]:,.0f} before.",
            "",
            "summary {path} --since {since} --percentiles prompt_tokens,output_tokens",
        )

    rule.__doc__ = f"{what} are longer."
    return rule


longer_prompts = _longer("longer-prompts", "prompt_tokens", "Prompts")
longer_outputs = _longer("longer-outputs", "first_output", "Outputs")


def scattered(change: Change) -> Cause | None:
    """Requests of one tenant go to more engines than before."""
    shares = _both(_to_one_engine(change.before.by_engine), _to_one_engine(change.after.by_engine))
    if shares is None or not change.enough or shares[0] - shares[1] < 2 * POINTS or not _hits_fell(change):
        return None
    return Cause(
        "routing",
        f"{percent(shares[1])} of requests go to the engine that has most of their tenant; "
        f"{percent(shares[0])} before. Other engines have not cached their prefixes.",
        "Look at the router: it lost its state, or chooses by load alone.",
        "check routing {path}",
    )


def _to_one_engine(requests: Mapping[tuple[str, str], int]) -> float | None:
    """The share of labelled requests that went to the engine with most of their tenant."""
    most: dict[str, int] = {}
    total = 0
    for (tenant, _), number in requests.items():
        if tenant not in UNLABELLED:
            most[tenant] = max(most.get(tenant, 0), number)
            total += number
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


def starved(change: Change) -> Cause | None:
    """Less urgent requests wait longer, and urgent ones don't."""
    found = []
    waits: dict[str, float] = {}
    for priority, figures in change.after.labels.get(PRIORITY, {}).items():
        was = change.before.labels.get(PRIORITY, {}).get(priority, {})
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
    if not _hits_fell(change) or rises.get(causes.NOT_KNOWABLE, 0.0) < POINTS:
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
    )


def _whose_hits_fell(change: Change) -> str:
    falls = []
    for label in (TENANT, ADAPTER):
        for value, figures in change.after.labels.get(label, {}).items():
            was = change.before.labels.get(label, {}).get(value)
            if value in UNLABELLED or was is None:
                continue
            hits = _both(
                *(ratio(one["local"] + one["external"], one["prompt_tokens"]) for one in (was, figures))
            )
            if hits is not None and hits[0] - hits[1] >= POINTS:
                falls.append((hits[0] - hits[1], label, value, hits))
    if not falls:
        return ""
    _, label, value, hits = max(falls)
    return f" Most of {label} {value}: {percent(hits[0])} hit before, {percent(hits[1])} now."


def evicted(change: Change) -> Cause | None:
    """More blocks were evicted before they were hit."""
    rise = _rises(change).get(causes.EVICTED, 0.0)
    if not _hits_fell(change) or rise < POINTS:
        return None
    return Cause(
        "evicted",
        f"Blocks were evicted before they were hit again: {100 * rise:+.1f} points of prompt tokens.",
        "Give the cache more blocks, or send requests that share a prefix to the same engine.",
        "whatif {path}",
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
    )


def aborted(change: Change) -> Cause | None:
    """More clients leave."""
    shares = _both(
        *(
            ratio(side.outcomes.get("aborted", 0), side.of("requests"))
            for side in (change.before, change.after)
        )
    )
    if shares is None or not change.enough or shares[1] - shares[0] < POINTS:
        return None
    return Cause(
        "aborted",
        f"{percent(shares[1])} of requests were aborted; {percent(shares[0])} before.",
        "See why clients leave: a timeout of theirs, or of a gateway.",
        "summary {path} --since {since} --by outcome",
    )


RULES: tuple[Rule, ...] = (
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
