"""``kvledger audit follow``: the present figures of journals that are followed, and what is printed of them.

The follower of ``kvledger serve`` reads the journals, without a checkpoint. Rates are per second of the
engine's own clock, so they do not depend on how fast a journal is read. On a terminal an answer is redrawn
twice a second; elsewhere a line is printed periodically, and one for each finding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...audit.checks.coverage import count_words, verdict_words
from ...audit.checks.registry import Violation
from ...audit.errors import LedgerError
from ...audit.figures.totals import Totals
from ...audit.journal.reader import Batch
from ...audit.ledger.account import Account
from ...audit.replay.find import journals_at
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.journals import Audit
from ...audit.replay.parallel import is_remote
from ..answer import Answer, Lines, Table, counted, made, percent, records, share
from ..sidecar.follower import FollowedJournal, Follower, Notify, ignore
from ..trace.groups import check, group_key
from ..trace.time_series import RequestCounts
from ..writers import csv_of
from .audit import finding

if TYPE_CHECKING:
    from rich.console import Console

POLL_SECONDS = 0.5
SHOWN_GROUPS = 20
"""The most groups that a screen or a line shows."""

LINE_SECONDS = 10.0
"""How often a line of totals is printed where the output is no terminal."""

RATE_SECONDS = 30.0
"""The span of engine time over which rates are computed."""

MOST_GROUPS = 1024
"""Requests of further groups are in the group :data:`OTHER`, so that memory is bounded."""

OTHER = "other"

NEWEST = 5
"""How many of the newest findings are kept."""

Tick = Callable[[], None]


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """All journals together at one time: a line of ``--format json`` or ``csv``.

    ``examined``: the verdict with what it covers; ``counts``: violations and drifts in words.
    """

    verdict: str
    examined: str
    counts: str
    requests: int
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    local: int
    external: int
    prompt_tokens_per_second: float
    scheduled_tokens_per_second: float


class GroupNow(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one group that have ended."""

    group: str
    requests: int
    prompt_tokens: int
    local: int
    external: int
    preemptions: int

    @property
    def hits(self) -> float | None:
        """The share of prompt tokens that a cache had."""
        return share(self.local + self.external, self.prompt_tokens)


class TailFinder:
    """Every journal that ``audit`` would read at a path, which may be a pattern."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Path] = {}
        """The journals that were found last, by name."""

    def names(self, followed: Iterable[str], notify: Notify) -> list[str]:
        """The journals' paths; the ``followed`` ones while the path has none, as between two engines."""
        try:
            self._found = {str(path): path for path in journals_at([self._path])}
            return list(self._found)
        except LedgerError:
            return list(followed)

    def path(self, name: str) -> Path:
        """A name is a path."""
        return self._found.get(name) or Path(name)

    def is_journal(self, name: str, notify: Notify) -> bool:
        """``find`` lists only journals."""
        return True


class LiveCounts:
    """Running and waiting requests of one journal, and its totals of the last seconds."""

    def __init__(self) -> None:
        self.requests = RequestCounts()
        """The running and waiting requests after the last batch."""
        self._totals: deque[tuple[int, Totals]] = deque()
        """Totals about a second apart, oldest first, each with the engine's time in microseconds."""

    def add(self, batch: Batch, engine_audit: FollowedAudit) -> None:
        """Count a batch that has just been audited."""
        for event in batch.events:
            self.requests.feed(event)
        now, totals = engine_audit.auditor.ledger.at, self._totals
        if not totals or now - totals[-1][0] >= 1e6:
            totals.append((now, engine_audit.totals()))
        while len(totals) > 2 and now - totals[1][0] >= RATE_SECONDS * 1e6:
            totals.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt tokens settled and tokens scheduled per second, over the last RATE_SECONDS."""
        if len(self._totals) < 2:
            return 0.0, 0.0
        (since, first), (until, last) = self._totals[0], self._totals[-1]
        seconds = (until - since) / 1e6
        if seconds <= 0:
            return 0.0, 0.0
        return (
            (last.prompt_tokens - first.prompt_tokens) / seconds,
            (last.scheduled - first.scheduled) / seconds,
        )


class LiveTail:
    """The present figures of all journals at a path, later ones included.

    Raises :class:`LedgerError` if the path holds no journal.
    """

    def __init__(self, path: Path, by: str = "") -> None:
        check(by)
        journals_at([path])  # raises with the reason
        self._follower = Follower(path, finder=TailFinder(path), fold=False)
        """Reads the journals; a journal whose engine is gone has no open requests any more."""
        self._follower.on_batch = self._add
        self.by = by
        """What ended requests are grouped by; "": there are no groups."""
        self._groups: dict[str, Totals] = {}
        if by:
            self._follower.on_opened.append(self._group)
        self._counts: dict[str, LiveCounts] = {}
        """The counts of each journal, by its name."""
        self._new: list[Violation] = []
        self._tick: Tick = ignore
        """Called after each batch of the present poll."""
        self.newest: deque[Violation] = deque(maxlen=NEWEST)
        """The newest findings, the newest last."""

    def poll(self, tick: Tick = ignore) -> list[Violation]:
        """Read what has been written; return the new findings. ``tick`` is called after each batch.

        Raises :class:`LedgerError` for a journal that can't be read.
        """
        self._new, self._tick = [], tick
        self._follower.poll()
        if self._follower.problems:
            raise LedgerError(self._follower.problems[0])
        self.newest.extend(self._new)
        return self._new

    def _group(self, engine_audit: FollowedAudit) -> None:
        """Add the requests of a journal to their groups as they end."""
        key = group_key(self.by, engine_audit)

        def add(account: Account, _: str) -> None:
            name = key(account)
            if name not in self._groups and len(self._groups) >= MOST_GROUPS:
                name = OTHER
            self._groups.setdefault(name, Totals()).add(account)

        engine_audit.on_closed.append(add)

    def groups(self) -> list[GroupNow]:
        """The groups, most prompt tokens first."""
        rows = [made(GroupNow, totals, group=name) for name, totals in self._groups.items()]
        return sorted(rows, key=lambda row: (-row.prompt_tokens, row.group))

    def close(self) -> None:
        """Close every file."""
        self._follower.close()

    def _add(self, journal: FollowedJournal, batch: Batch, violations: list[Violation]) -> None:
        self._counts.setdefault(journal.name, LiveCounts()).add(batch, journal.engine_audit)
        self._new += violations
        self._tick()

    @property
    def ended(self) -> bool:
        """Whether every engine has ended and everything it wrote has been read."""
        return all(journal.ended for journal in self._follower.journals.values())

    @property
    def audit(self) -> Audit:
        """The audit of all journals up to now."""
        journals = self._follower.journals.values()
        return Audit([*self._follower.past.values(), *(journal.engine_audit for journal in journals)])

    def _running(self) -> list[tuple[FollowedJournal, LiveCounts]]:
        """The journals whose engines have not ended, with their counts."""
        journals = self._follower.journals.values()
        return [(one, self._counts.get(one.name) or LiveCounts()) for one in journals if not one.ended]

    def engines(self) -> list[tuple[FollowedAudit, LiveCounts | None]]:
        """The audit of each journal with its counts, or None once the engine has ended."""
        running = {journal.name: counts for journal, counts in self._running()}
        journals = self._follower.journals.values()
        return [(journal.engine_audit, running.get(journal.name)) for journal in journals]

    def now(self) -> Now:
        """The present figures."""
        audit, counts = self.audit, [counts for _, counts in self._running()]
        totals = audit.totals
        rates = [one.rates() for one in counts]
        return made(
            Now,
            totals,
            verdict=audit.verdict,
            examined=verdict_words(audit.verdict, audit.coverage),
            counts=count_words(audit.found),
            running=sum(one.requests.running for one in counts),
            waiting=sum(one.requests.waiting for one in counts),
            prompt_tokens_per_second=sum(prompt for prompt, _ in rates),
            scheduled_tokens_per_second=sum(scheduled for _, scheduled in rates),
        )


# --- what is printed ------------------------------------------------------------------------------------


def line(now: Now) -> str:
    """The figures as one line."""
    hits = share(now.local + now.external, now.prompt_tokens)
    parts = [
        counted(now.requests, "request"),
        now.counts,
        f"{now.running:,} running",
        f"{now.waiting:,} waiting",
        counted(now.preemptions, "preemption"),
        f"{now.prompt_tokens:,} prompt tokens",
        "no prompt settled yet" if hits is None else f"{percent(hits)} hits",
        f"{now.scheduled_tokens_per_second:,.0f} tokens/s",
    ]
    return f"{now.examined}. {', '.join(parts)}"


def screen(tail: LiveTail) -> Answer:
    """The present figures, with the newest findings."""
    rows, now, groups = [], tail.now(), tail.groups()
    for engine_audit, running in tail.engines():
        totals, counts = engine_audit.totals(), running or LiveCounts()
        hits = share(totals.local + totals.external, totals.prompt_tokens)
        name = f"{engine_audit.name}{'' if running else ' (ended)'}"
        figures = (totals.requests, counts.requests.running, counts.requests.waiting, *counts.rates())
        rows.append((name, *figures, hits, totals.preemptions, engine_audit.verdict))
    columns = "requests | running | waiting | prompt/s:,.0f | tokens/s:,.0f | hits:% | preempted | verdict"
    more = [_shown(len(groups))] if len(groups) > SHOWN_GROUPS else []
    return Answer(
        now,
        [f"{now.examined}. {now.counts}."],
        [
            Table(rows, f"engine | {columns}"),
            Table(
                groups[:SHOWN_GROUPS],
                "group | requests | prompt=prompt_tokens | hits:% | preempted=preemptions",
                f"Ended requests by {tail.by}",
            ),
            Lines(more),
            Lines(list(map(_sentence, tail.newest)), "Newest findings"),
            Lines(["Press Ctrl-C to stop."]),
        ],
    )


def _sentence(violation: Violation) -> str:
    return f"{violation.severity} {violation.id}: {violation.message}"


def follow(
    path: Path,
    *,
    wait: bool = False,
    poll_seconds: float = POLL_SECONDS,
    out: Console | None = None,
    format: str = "text",
    by: str = "",
) -> None:
    """Follow ``path`` until all engines have ended or, with ``wait``, until interrupted.

    ``json`` prints one object a line, for totals, findings and groups; ``csv`` prints the totals alone.
    ``by`` names groups of ended requests, as for :func:`~kvledger.exporters.trace.groups.group_key`. Raises
    :class:`LedgerError` for a path that holds no journal.
    """
    from ..terminal import console, rendered

    out = out or console()
    if is_remote(path):
        raise LedgerError(f"{path} can't be followed: only folders of this machine can.")
    tail = LiveTail(path, by)
    try:
        if out.is_terminal and format == "text":
            from rich.live import Live

            with Live(console=out, auto_refresh=False, transient=False) as live:
                _until_ended(
                    tail, wait, poll_seconds, lambda _: live.update(rendered(screen(tail)), refresh=True)
                )
        else:
            _until_ended(tail, wait, poll_seconds, _Lines(tail, format).show)
    finally:
        tail.close()


class _Lines:
    """Prints findings as they come, and totals every LINE_SECONDS."""

    def __init__(self, tail: LiveTail, format: str) -> None:
        self._tail = tail
        self._format = format
        """``text``, ``json`` or ``csv``."""
        self._printed = False
        """Whether totals were printed before."""
        self._printed_at = time.monotonic()
        """Monotonic time, in seconds, at which totals were printed last; before that, of the start."""

    def show(self, violations: list[Violation] | None) -> None:
        """Print what is due; ``violations`` is None in the middle of a reading."""
        lines = _findings(violations or [], self._format)
        first = not self._printed and violations is not None
        if first or self._tail.ended or time.monotonic() - self._printed_at >= LINE_SECONDS:
            totals = _totals(self._tail, self._format, first=not self._printed)
            lines = [*totals, *lines] if self._format == "text" else [*lines, *totals]
            self._printed, self._printed_at = True, time.monotonic()
        for line in lines:
            print(line, flush=True)


def _findings(violations: list[Violation], format: str) -> list[str]:
    if format == "json":
        return [_json("finding", finding(violation, None)) for violation in violations]
    return [] if format == "csv" else [_sentence(violation) for violation in violations]


def _totals(tail: LiveTail, format: str, *, first: bool) -> list[str]:
    if format == "json":
        return [_json("totals", tail.now()), *(_json("group", row) for row in tail.groups())]
    if format == "csv":
        return csv_of(*records(Now, [tail.now()])).splitlines()[0 if first else 1 :]
    groups = tail.groups()
    more = [f"  {_shown(len(groups))}"] if len(groups) > SHOWN_GROUPS else []
    return [line(tail.now()), *map(_group_line, groups[:SHOWN_GROUPS]), *more]


def _shown(groups: int) -> str:
    return f"{SHOWN_GROUPS} of {groups:,} groups shown"


def _group_line(row: GroupNow) -> str:
    rate = "no prompt settled" if row.hits is None else f"{percent(row.hits)} hits"
    ended = counted(row.requests, "ended request")
    return f"  {row.group}: {ended}, {row.prompt_tokens:,} prompt tokens, {rate}"


def _json(kind: str, data: msgspec.Struct) -> str:
    return msgspec.json.encode({"kind": kind, **msgspec.to_builtins(data)}).decode()


def _until_ended(
    tail: LiveTail, wait: bool, poll_seconds: float, show: Callable[[list[Violation] | None], None]
) -> None:
    """Poll and show until every engine has ended."""
    ended, shown = False, time.monotonic()

    def tick() -> None:
        """Show progress: a journal with hours of events takes a while to read."""
        nonlocal shown
        if time.monotonic() - shown >= poll_seconds:
            shown = time.monotonic()
            show(None)

    while True:
        violations = tail.poll(tick)
        if violations or not (ended and tail.ended):
            show(violations)
        ended = tail.ended
        if ended and not wait:
            return
        time.sleep(poll_seconds)
