"""Turns of sessions: how much each reused of the turn before, and why not more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...audit import causes
from ...audit.analysis.costs import total
from ...audit.analysis.turns import Turn, TurnCounts, across_engines
from ...audit.errors import LedgerError
from ...audit.replay.parallel import Run, here, readable
from ...audit.replay.request_traces import block_turns, is_request_trace, priced, request_trace
from ...audit.replay.windows import EVERYTHING, Window
from ...audit.text import utc
from ..answer import Answer, Lines, Records, Table, counted, decimal, made, notes, percent, share
from ..facts.kept_blocks import recorded_blocks, traces_at

if TYPE_CHECKING:
    from ..facts.tables import Facts

LEGEND = (
    "A turn could have reused what the turn before left in the cache, up to the last token of its own "
    "prompt. Each reusable token that its first admission did not hit has one cause."
)
SECONDS_LEGEND = "Seconds: what computing the lost tokens took, by the model of step time of their engine."
COLUMNS = (
    "engine", "journal", "session", "given", "number", "request_id", "before", "retried", "arrived_seconds",
    "ended_seconds", "idle_seconds", "prompt_tokens", "hit", "reusable", "shared", "lost_seconds",
    "parted_at",
)  # fmt: skip
NUMBERS = ((2, 2), (3, 3), (4, 4), (5, 5), (6, 10), (11, 20), (21, 0))
"""Rows by turn number, first and last; 0: no last."""

RETENTIONS = (10.0, 60.0, 300.0, 900.0, 3_600.0)
"""Seconds for which turns might be kept."""

_GONE = {*causes.EVICTIONS, causes.TIER}

WORTH = 0.02
"""A cause is worth a conclusion from this share of the reusable tokens up."""


class CauseOfTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Reusable tokens with one cause. ``share`` is of all reusable tokens; ``turns`` had such tokens."""

    cause: str
    text: str
    tokens: int
    share: float | None
    turns: int


class TurnNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """The turns whose number is from ``first`` to ``last`` (0: no last)."""

    first: int
    last: int
    turns: int
    prompt_tokens: int
    hit: int
    reusable: int
    reused: int

    @property
    def name(self) -> str:
        """``2``, ``6 to 10``, ``later``."""
        return (
            f"{self.first}{f' to {self.last}' if self.last != self.first else ''}" if self.last else "later"
        )


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One session. ``lost`` is by cause; ``engines``: on how many engines it ran.

    ``lost_seconds``: engine time that computing the lost tokens took; None: not known.
    """

    session: str
    given: bool
    turns: int
    engines: int
    prompt_tokens: int
    hit: int
    reusable: int
    lost_tokens: int
    lost_seconds: float | None
    lost: dict[str, int]

    @property
    def cause(self) -> str:
        """The most frequent cause of what was lost."""
        return next(iter(self.lost))


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """What keeping the tokens of each turn for ``seconds``, or until the next turn, would save.

    ``seconds`` None: each session is pinned, until its next turn or the end of the trace. ``tokens``: evicted
    tokens that the next turn would have hit. ``held_tokens``: the tokens kept on average, at most, and
    ``most_held_tokens`` at one time. Tokens that sessions share are counted for each session.
    """

    seconds: float | None
    tokens: int
    share: float | None
    held_tokens: int
    most_held_tokens: int

    @property
    def name(self) -> str:
        """How long."""
        return "pinned" if self.seconds is None else f"{self.seconds:,.0f} s"


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of all sessions. Figures are of turns that follow another one, unless they say otherwise.

    ``idle_*``: seconds from the end of a turn to the next one, of all turns that followed within the trace.
    """

    sessions: int
    inferred_sessions: int
    requests: int
    turns: int
    prompt_tokens: int
    hit: int
    reusable: int
    reused: int
    lost_seconds: float | None
    """Engine time that computing the lost tokens took; None: the step model of an engine does not say it."""
    causes: list[CauseOfTurns]
    by_number: list[TurnNumbers]
    retention: list[Retention]
    idle_median_seconds: float | None
    idle_p90_seconds: float | None
    evicted_idle_p90_seconds: float | None
    conclusions: list[str]
    worst: list[SessionRow]
    doubts: list[str]
    each: list[Turn]
    """The turns of the session that was asked for; else of all sessions, in CSV alone."""


def turns(
    paths: Sequence[Path],
    *,
    session: str = "",
    most: int = 20,
    block_tokens: int = 0,
    window: Window = EVERYTHING,
    run: Run = here,
) -> Turns:
    """The turns of all journals at ``paths``. Raises LedgerError."""
    found: list[Turn] = []
    doubts: list[str] = []
    traces = [path for path in paths if is_request_trace(path)]
    for path in traces:
        several, some_doubts = block_turns(request_trace(path, block_tokens))
        found += several
        doubts += [
            *some_doubts,
            f"the cache of a request trace ({path.name}) keeps everything, and answers are not in it",
        ]
    journals = [path for path in paths if path not in traces]
    if journals:
        for several, some_doubts in readable(run, _of_journal, traces_at(journals, window)):
            found += several
            doubts += some_doubts
    whole = [turn for turn in across_engines(found) if window.holds(turn.ended_seconds)]
    if session:
        whole = [turn for turn in whole if turn.session == session]
        if not whole:
            raise LedgerError(
                f"No turn of session {session} has ended in this time; kvledger why turns lists them."
            )
    return _summed(whole, most, doubts)


def _of_journal(path: Path) -> tuple[list[Turn], list[str]]:
    return block_turns(recorded_blocks(path, turns=True))


def turns_of_facts(facts: Facts) -> Turns | None:
    """The turns of the rows of ``turns``; None if no turn follows another one."""
    from ..facts.blocks import TURN_QUERY, turn_of

    by_journal: dict[str, list[Turn]] = {}
    for row in facts.rows(TURN_QUERY):
        turn = turn_of(row)
        by_journal.setdefault(turn.journal, []).append(turn)
    prices = {engine.journal: engine.model.prefill_seconds for engine in facts.engines}
    found = [turn for journal, some in by_journal.items() for turn in priced(some, prices.get(journal))]
    result = _summed(across_engines(found), 0, [])
    return result if result.turns else None


def _summed(whole: list[Turn], most: int, doubts: list[str]) -> Turns:
    later = [turn for turn in whole if turn.before]
    sums = TurnCounts.of(later)
    rows = list(_causes(later, sums))
    by_session: dict[tuple[str, str], list[Turn]] = {}
    for turn in whole:
        by_session.setdefault(("" if turn.given else turn.journal, turn.session), []).append(turn)
    sessions = sorted(map(_session, by_session.values()), key=lambda row: -row.lost_tokens)
    idle = sorted(turn.idle_seconds for turn in later if turn.idle_seconds is not None)
    gone = [turn for turn in later if _GONE & turn.lost.keys()]
    late = sorted(turn.idle_seconds for turn in gone if turn.idle_seconds is not None)
    return made(
        Turns,
        sums,
        sessions=len(sessions),
        inferred_sessions=sum(not row.given for row in sessions),
        requests=len(whole),
        lost_seconds=total(turn.lost_seconds for turn in later),
        causes=rows,
        by_number=[row for row in (_numbered(later, *bounds) for bounds in NUMBERS) if row.turns],
        retention=_retention(whole, gone),
        idle_median_seconds=_quantile(idle, 0.5),
        idle_p90_seconds=_quantile(idle, 0.9),
        evicted_idle_p90_seconds=_quantile(late, 0.9),
        conclusions=list(_conclusions(rows, later, sums.reusable, _quantile(late, 0.9))),
        worst=[row for row in sessions if row.lost_tokens][:most],
        doubts=doubts,
        each=whole,
    )


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def _causes(later: Sequence[Turn], sums: TurnCounts) -> Iterator[CauseOfTurns]:
    for cause, tokens in sorted(sums.lost.items(), key=lambda one: -one[1]):
        yield CauseOfTurns(
            cause=cause,
            text=causes.TURN_LOSSES[cause],
            tokens=tokens,
            share=share(tokens, sums.reusable),
            turns=sum(cause in turn.lost for turn in later),
        )


def _retention(whole: Sequence[Turn], gone: Sequence[Turn]) -> list[Retention]:
    """What keeping turns for some time would have saved. ``gone``: the turns that lost evicted tokens."""
    if not gone:
        return []
    evicted = [(turn.idle_seconds or 0.0, sum(turn.lost.get(cause, 0) for cause in _GONE)) for turn in gone]
    until = {(turn.journal, turn.before): turn.arrived_seconds for turn in whole if turn.before}
    end = max(turn.ended_seconds for turn in whole)
    span = end - min(turn.arrived_seconds for turn in whole)
    found = []
    for seconds in (*RETENTIONS, None):
        held, changes = 0.0, list[tuple[float, int]]()
        for turn in whole:
            since = turn.ended_seconds
            to = min(
                until.get((turn.journal, turn.request_id), math.inf),
                max(since, end) if seconds is None else since + seconds,
            )
            held += turn.kept * (to - since)
            changes += [(since, turn.kept), (to, -turn.kept)]
        saved = sum(tokens for idle, tokens in evicted if seconds is None or idle <= seconds)
        found.append(
            Retention(
                seconds=seconds,
                tokens=saved,
                share=share(saved, sum(tokens for _, tokens in evicted)),
                held_tokens=round(held / span) if span else 0,
                most_held_tokens=max(accumulate(tokens for _, tokens in sorted(changes))),
            )
        )
    return found


def _numbered(later: Sequence[Turn], first: int, last: int) -> TurnNumbers:
    sums = TurnCounts.of(turn for turn in later if first <= turn.number and (not last or turn.number <= last))
    return made(TurnNumbers, sums, first=first, last=last)


def _session(several: Sequence[Turn]) -> SessionRow:
    sums = TurnCounts.of(several)
    return made(
        SessionRow,
        sums,
        session=several[0].session,
        given=several[0].given,
        engines=len({turn.journal for turn in several}),
        lost_seconds=total(turn.lost_seconds for turn in several),
        lost=dict(sorted(sums.lost.items(), key=lambda one: -one[1])),
    )


# --- what would help --------------------------------------------------------------------------------


def _conclusions(
    rows: Sequence[CauseOfTurns], later: Sequence[Turn], reusable: int, evicted_idle: float | None
) -> Iterator[str]:
    for row in rows:
        if row.share is None or row.share < WORTH or row.cause not in _ADVICE:
            continue
        before = f"{row.tokens:,} of {reusable:,} reusable tokens ({percent(row.share)}) in " + counted(
            row.turns, "turn"
        )
        yield _ADVICE[row.cause].format(before=before, **_figures(row.cause, later, evicted_idle))


def _figures(cause: str, later: Sequence[Turn], evicted_idle: float | None) -> dict[str, str]:
    parted = sorted(turn.shared for turn in later if cause in turn.lost)
    return {
        "idle": "" if evicted_idle is None else f"{evicted_idle:,.1f}",
        "place": f"{parted[len(parted) // 2]:,}" if parted else "",
    }


_ADVICE = {
    causes.DIVERGED: "{before} were lost because the prompt differs from that of the turn before, in the "
    "median from token {place} on: put what changes (times, ids, retrieved text) behind what does not, and "
    "keep the order of tools.",
    causes.ANSWER: "{before} were lost because the answer of the turn before did not come back as it was "
    "computed: send it back unchanged, reasoning and tool calls included, or expect this loss.",
    causes.EVICTED: "{before} were evicted before the next turn: 90 % of these turns came within {idle} s of "
    "the turn before. More blocks or a tier behind the cache would keep them; kvledger whatif says how "
    "many blocks.",
    causes.TIER: "{before} were evicted, and the connector did not have them either: 90 % of these turns "
    "came within {idle} s. A larger tier would keep them.",
    causes.OTHER_ENGINE: "{before} were lost because the turn before ran on another engine: route the turns "
    "of a session to one engine.",
    causes.CACHE_RESET: "{before} were lost to resets of the prefix cache.",
    causes.ADAPTER: "{before} were lost because the turn before ran with another LoRA adapter, which shares "
    "no KV.",
    causes.SALT: "{before} were lost because the turn before had another cache salt: keep one salt for a "
    "session.",
    causes.BELOW_BLOCK: "{before} were in blocks that were not full: smaller blocks would reuse more.",
    **dict.fromkeys(
        (causes.GROUPS, causes.WINDOW, causes.STATE, causes.BOUNDARY),
        "{before} were cached for full attention, and not in another KV cache group: states and windows are "
        "kept at few places, such as the end of a turn. Prompts that go on from there reuse all; changing "
        "the end of the history loses more.",
    ),
    **dict.fromkeys(
        (causes.WINDOW_EVICTED, causes.STATE_EVICTED),
        "{before} were still cached for full attention, and their window or state was evicted before the "
        "next turn: 90 % of these turns came within {idle} s of the turn before. More blocks would keep it.",
    ),
    causes.NOT_HIT: "{before} were cached and not hit: look whether these requests skip the prefix cache "
    "(prompt log-probabilities, pooling).",
}
"""One sentence for a cause, with its figures and what would help."""


# --- the answer -------------------------------------------------------------------------------------


def answer(result: Turns) -> Answer:
    """What turns hit, what would help, and the tables."""
    return Answer(
        data=result,
        sentences=[sentence(result), *(f"- {each}" for each in result.conclusions)],
        parts=[*tables(result), _retention_table(result), _worst_table(result), notes(_doubts(result))],
        records=_records(result),
        plain=lambda: msgspec.structs.replace(result, each=[]),
    )


def answer_of_session(result: Turns) -> Answer:
    """The turns of one session, some lines each."""
    lines = [line for turn in result.each for line in (*_sentences(turn), "")][:-1]
    parts = [Lines(lines), notes(_doubts(result))]
    return Answer(data=result, sentences=[sentence(result)], parts=parts, records=_records(result))


def _doubts(result: Turns) -> Iterator[str]:
    return (f"{doubt[:1].upper()}{doubt[1:]}." for doubt in result.doubts)


def sentence(result: Turns) -> str:
    """What turns hit, in one or two sentences."""
    sessions = counted(result.sessions, "session")
    if result.inferred_sessions:
        sessions += f" ({result.inferred_sessions:,} inferred from block hashes)"
    if not result.turns:
        return f"{counted(result.requests, 'request')} in {sessions}, and no turn follows another one."
    reused = "" if not result.reusable else f": {percent(result.reused / result.reusable)}"
    took = ""
    if result.lost_seconds:
        took = f" Computing the others took about {_seconds(result.lost_seconds)} s of engine time."
    return (
        f"{sessions}, {counted(result.turns, 'turn')} that follow another one: they hit {result.hit:,} of "
        f"{result.prompt_tokens:,} prompt tokens ({percent(result.hit / result.prompt_tokens)}). Of "
        f"{result.reusable:,} tokens that the turns before left they reused {result.reused:,}{reused}.{took}"
    )


def _seconds(seconds: float) -> str:
    """Seconds of engine time, an estimate."""
    return f"{seconds:,.0f}" if seconds >= 1_000 else decimal(seconds, 3)


def tables(result: Turns) -> list[Table]:
    """By cause and by turn number."""
    reused = ("reused", result.reused, share(result.reused, result.reusable), result.turns)
    columns = "=text | tokens | of reusable=share:% | turns"
    several = result.by_number if len(result.by_number) > 1 else ()
    return [
        Table(
            [reused, *result.causes] if result.turns else (),
            columns,
            "Tokens that turns could have reused",
            LEGEND,
        ),
        Table(
            several,
            "turn=name | turns | prompt tokens | hit | of prompt=hit/prompt_tokens:% | "
            "reused of reusable=reused/reusable:%",
            "By turn number",
        ),
    ]


def _retention_table(result: Turns) -> Table:
    return Table(
        result.retention,
        "kept for=name | tokens saved=tokens | of evicted=share:% | kept on average=held_tokens | "
        "at one time=most_held_tokens",
        "Longer retention",
        "Evicted tokens that would have been hit, had each turn been kept for this time after its end, and "
        "the tokens that this keeps, at most. Pinned: until the session's next turn, or the trace's end.",
    )


def _worst_table(result: Turns) -> Table:
    known = any(row.lost_seconds is not None for row in result.worst)
    seconds = "seconds=lost_seconds:,.4g | " if known else ""
    return Table(
        result.worst,
        f"session | turns | engines | prompt tokens | hit | lost=lost_tokens | {seconds}"
        "most frequent cause=cause",
        "Sessions by lost tokens",
        SECONDS_LEGEND if known else "",
    )


def _sentences(turn: Turn) -> Iterator[str]:
    again = ", sent again" if turn.retried else ""
    yield f"Turn {turn.number}{again}  {turn.request_id}  {utc(turn.arrived_seconds, milliseconds=True)}"
    if not turn.before:
        yield f"  hit {turn.hit:,} of {turn.prompt_tokens:,} prompt tokens; no turn before"
        return
    took = f"; computing them took about {_seconds(turn.lost_seconds)} s" if turn.lost_seconds else ""
    idle = "" if turn.idle_seconds is None else f", {turn.idle_seconds:,.1f} s after it"
    yield (
        f"  hit {turn.hit:,} of {turn.prompt_tokens:,} prompt tokens; missed {turn.lost_tokens:,} of "
        f"{turn.reusable:,} reusable tokens of {turn.before}{idle}{took}"
    )
    for cause, tokens in sorted(turn.lost.items(), key=lambda one: -one[1]):
        yield f"    {tokens:,}: {causes.TURN_LOSSES[cause]}{_where(turn, cause)}"


def _where(turn: Turn, cause: str) -> str:
    if cause in causes.PARTED:
        return f", from the block at token {turn.shared:,} on"
    if cause in causes.EVICTIONS and turn.evicted is not None:
        by = f" for {turn.evicted.by}" if turn.evicted.by else ""
        since = turn.evicted.seconds - (turn.arrived_seconds - (turn.idle_seconds or 0.0))
        at = utc(turn.evicted.seconds, milliseconds=True)
        return f", first at {at}{by}, {since:,.1f} s after the turn before"
    return ""


def _records(result: Turns) -> Records:
    """One line per turn."""
    lost = tuple(causes.TURN_LOSSES)
    rows = (
        [*(getattr(turn, name) for name in COLUMNS), *(turn.lost.get(cause, 0) for cause in lost)]
        for turn in result.each
    )
    return Records((*COLUMNS, *(f"lost_{cause}" for cause in lost)), rows)
