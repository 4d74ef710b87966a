"""Journals followed live in a terminal: running totals, rates, and the newest findings.

The follower of ``kvledger serve`` reads the journals, without a checkpoint. On a terminal a table is
redrawn twice a second; elsewhere a line is printed periodically and for each finding. Rates are per second
of the engine's own clock, so they do not depend on how fast a journal is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...audit.checks.registry import Violation
from ...audit.errors import LedgerError
from ...audit.journal.reader import Batch
from ...audit.ledger.totals import Totals
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import Audit
from ...audit.replay.parallel import is_remote
from ..sidecar.followed_journal import FollowedJournal
from ..sidecar.follower import Follower, ignore
from ..sidecar.journal_finder import Notify
from ..trace.request_counts import RequestCounts
from .audit import finding, share, structs_csv
from .terminal import VERDICTS, console, counted, figures_table, percent

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0
"""How often a line of totals is printed where the output is no terminal."""

RATE_SECONDS = 30.0
"""The span of engine time over which rates are computed."""

NEWEST = 5


Tick = Callable[[], None]


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """All journals together at one time: a line of ``--format json`` or ``csv``."""

    verdict: str
    requests: int
    running: int
    waiting: int
    preemptions: int
    prompt_tokens: int
    local: int
    external: int
    prompt_tokens_per_second: float
    scheduled_tokens_per_second: float


class TailFinder:
    """Every journal that ``audit`` would read at a path, which may be a pattern."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self, followed: Iterable[str], notify: Notify) -> list[str]:
        """The journals' paths; the ``followed`` ones while there is none, as between two engines."""
        try:
            return [str(path) for path in journals_at([self._path])]
        except LedgerError:
            return list(followed)

    def path(self, name: str) -> Path:
        """A name is a path."""
        return Path(name)

    def is_journal(self, name: str, notify: Notify) -> bool:
        """``find`` lists only journals."""
        return True


class LiveCounts:
    """Running and waiting requests of one journal, and its totals of the last seconds."""

    def __init__(self) -> None:
        self.requests = RequestCounts()
        self._totals: deque[tuple[int, Totals]] = deque()

    def add(self, batch: Batch, engine_audit: EngineAudit) -> None:
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

    def __init__(self, path: Path) -> None:
        journals_at([path])  # raises with the reason
        self._follower = Follower(path, finder=TailFinder(path))
        self._follower.on_batch = self._add
        self._counts: dict[str, LiveCounts] = {}
        self._new: list[Violation] = []
        self._tick: Tick = ignore
        self._newest: deque[Violation] = deque(maxlen=NEWEST)

    def poll(self, tick: Tick = ignore) -> list[Violation]:
        """Read what has been written; return the new findings. ``tick`` is called after each batch.

        Raises :class:`LedgerError` for a journal that can't be read.
        """
        self._new, self._tick = [], tick
        self._follower.poll()
        if self._follower.problems:
            raise LedgerError(self._follower.problems[0])
        self._newest.extend(self._new)
        return self._new

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

    def now(self) -> Now:
        """The present figures."""
        audit, counts = self.audit, [counts for _, counts in self._running()]
        totals = audit.totals
        rates = [one.rates() for one in counts]
        return Now(
            verdict=audit.verdict,
            requests=totals.requests,
            running=sum(one.requests.running for one in counts),
            waiting=sum(one.requests.waiting for one in counts),
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            local=totals.local,
            external=totals.external,
            prompt_tokens_per_second=sum(prompt for prompt, _ in rates),
            scheduled_tokens_per_second=sum(scheduled for _, scheduled in rates),
        )

    def line(self) -> str:
        """The present figures as one line."""
        now = self.now()
        hits = share(now.local + now.external, now.prompt_tokens)
        parts = [
            f"{now.verdict}: {counted(now.requests, 'request')}",
            f"{now.running:,} running",
            f"{now.waiting:,} waiting",
            f"{counted(now.preemptions, 'preemption')}",
            f"{now.prompt_tokens:,} prompt tokens",
            "no prompt settled yet" if hits is None else f"{percent(hits)} hits",
            f"{now.scheduled_tokens_per_second:,.0f} tokens/s",
        ]
        return ", ".join(parts)

    def screen(self) -> Group:
        """The present figures as a table for a terminal, with the newest findings."""
        columns = ("requests", "running", "waiting", "prompt/s", "tokens/s", "hits", "preempted", "verdict")
        table = figures_table("engine", *columns)
        running = {journal.name: counts for journal, counts in self._running()}
        for name, journal in self._follower.journals.items():
            _add_row(table, journal.engine_audit, running.get(name))
        parts: list[Table | Text] = [table]
        if self._newest:
            parts += [Text(), Text("Newest findings", style="bold")]
            parts += [Text(_sentence(violation), overflow="fold") for violation in self._newest]
        return Group(*parts, Text(), Text("Press Ctrl-C to stop.", style="dim"))


def _add_row(table: Table, engine_audit: EngineAudit, running: LiveCounts | None) -> None:
    """Add one engine; ``running`` is None once the engine has ended."""
    totals, verdict = engine_audit.totals(), engine_audit.verdict
    counts = running or LiveCounts()
    prompt, scheduled = counts.rates()
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    table.add_row(
        Text(f"{engine_audit.name}{'' if running else ' (ended)'}"),
        f"{totals.requests:,}",
        f"{counts.requests.running:,}",
        f"{counts.requests.waiting:,}",
        f"{prompt:,.0f}",
        f"{scheduled:,.0f}",
        "" if hits is None else percent(hits),
        f"{totals.preemptions:,}",
        Text(verdict, style=VERDICTS[verdict]),
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
) -> None:
    """Follow ``path`` until all engines have ended or, with ``wait``, until interrupted.

    ``json`` prints one object a line, for totals and findings; ``csv`` prints the totals alone. Raises
    :class:`LedgerError` for a path that holds no journal.
    """
    out = out or console()
    if is_remote(path):
        raise LedgerError(f"{path} can't be followed: only folders of this machine can.")
    tail = LiveTail(path)
    try:
        if out.is_terminal and format == "text":
            with Live(console=out, auto_refresh=False, transient=False) as live:
                _until_ended(tail, wait, poll_seconds, lambda _: live.update(tail.screen(), refresh=True))
        else:
            _until_ended(tail, wait, poll_seconds, _Lines(tail, format).show)
    finally:
        tail.close()


class _Lines:
    """Prints findings as they come, and totals every LINE_SECONDS."""

    def __init__(self, tail: LiveTail, format: str) -> None:
        self._tail = tail
        self._format = format
        self._printed = False
        self._printed_at = time.monotonic()

    def show(self, violations: list[Violation] | None) -> None:
        """Print what is due; ``violations`` is None in the middle of a reading."""
        lines = _findings(violations or [], self._format)
        first = not self._printed and violations is not None
        if first or self._tail.ended or time.monotonic() - self._printed_at >= LINE_SECONDS:
            lines += _totals(self._tail, self._format, first=not self._printed)
            self._printed, self._printed_at = True, time.monotonic()
        for line in lines:
            print(line, flush=True)


def _findings(violations: list[Violation], format: str) -> list[str]:
    if format == "json":
        return [_json("finding", finding(violation)) for violation in violations]
    return [] if format == "csv" else [_sentence(violation) for violation in violations]


def _totals(tail: LiveTail, format: str, *, first: bool) -> list[str]:
    if format == "json":
        return [_json("totals", tail.now())]
    if format == "csv":
        return structs_csv(Now, [tail.now()]).splitlines()[0 if first else 1 :]
    return [tail.line()]


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
