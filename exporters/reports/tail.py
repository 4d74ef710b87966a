"""Journals followed live in a terminal: running totals, rates, and the newest findings.

Each journal is followed into a book, as the sidecar does. A terminal is drawn anew twice a second;
elsewhere a line is printed at intervals and for each finding as it comes. Rates are of the time that
the events took, by their own clock, not of the time it took to read them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ...audit.checks.registry import Violation
from ...audit.errors import LedgerError
from ...audit.journal.folder import Reader
from ...audit.ledger.ledger import Totals
from ...audit.replay.engine_audit import Audit, EngineAudit, find
from ...audit.replay.parallel import is_remote
from ..trace.request_counts import RequestCounts
from .audit import finding, share, structs_csv
from .terminal import VERDICTS, console, counted, figures_table, percent

POLL_SECONDS = 0.5
LINE_SECONDS = 10.0
"""How often a line of totals is printed where nobody watches."""

RATE_SECONDS = 30.0
"""The time, as the engine tells it, that rates are taken over."""

NEWEST = 5


Tick = Callable[[], None]


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """All journals together at one time: a line of ``--format json`` or ``csv``. Shares are nowhere."""

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


class _Followed:
    """One journal: its book, who runs, and the sums of a while ago."""

    def __init__(self, path: Path) -> None:
        self.book = EngineAudit(path)
        self.reader = Reader(path)
        self.crowd = RequestCounts()
        self.before: deque[tuple[int, Totals]] = deque()

    def poll(self, tick: Tick) -> list[Violation]:
        """Take in what is there by now; the findings that are new."""
        found: list[Violation] = []
        for batch, new in self.book.batches(self.reader):
            found += new
            for event in batch.events:
                self.crowd.feed(event)
            self._remember()
            tick()
        return found

    def _remember(self) -> None:
        at = self.book.auditor.ledger.at
        if not self.before or at - self.before[-1][0] >= 1e6:
            self.before.append((at, self.book.totals()))
        while len(self.before) > 2 and at - self.before[1][0] >= RATE_SECONDS * 1e6:
            self.before.popleft()

    def rates(self) -> tuple[float, float]:
        """Prompt tokens settled, and tokens scheduled, a second, lately."""
        if len(self.before) < 2:
            return 0.0, 0.0
        (since, first), (until, last) = self.before[0], self.before[-1]
        seconds = (until - since) / 1e6
        if seconds <= 0:
            return 0.0, 0.0
        return (
            (last.prompt_tokens - first.prompt_tokens) / seconds,
            (last.scheduled - first.scheduled) / seconds,
        )


class Tail:
    """All journals below a folder, those that come later too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.followed: dict[Path, _Followed] = {}
        self.newest: deque[Violation] = deque(maxlen=NEWEST)
        self._find()

    def poll(self, tick: Tick = lambda: None) -> list[Violation]:
        """Take in what is there by now, with a ``tick`` for each batch; the findings that are new."""
        self._find()
        found = [violation for one in self.followed.values() for violation in one.poll(tick)]
        self.newest.extend(found)
        return found

    @property
    def ended(self) -> bool:
        """Whether every engine has ended and all of it was read."""
        return all(one.reader.ended for one in self.followed.values())

    @property
    def audit(self) -> Audit:
        """All of them, as they stand."""
        return Audit([one.book for one in self.followed.values()])

    def _find(self) -> None:
        try:
            for path in find([self.path]):
                if path not in self.followed:
                    self.followed[path] = _Followed(path)
        except LedgerError:
            # A folder that is followed may be empty for a while, between one engine and the next.
            if not self.followed:
                raise

    def now(self) -> Now:
        """Everything, as it stands."""
        audit = self.audit
        totals = audit.totals
        rates = [one.rates() for one in self.followed.values() if not one.reader.ended]
        return Now(
            verdict=audit.verdict,
            requests=totals.requests,
            running=sum(one.crowd.running for one in self.followed.values()),
            waiting=sum(one.crowd.waiting for one in self.followed.values()),
            preemptions=totals.preemptions,
            prompt_tokens=totals.prompt_tokens,
            local=totals.local,
            external=totals.external,
            prompt_tokens_per_second=sum(prompt for prompt, _ in rates),
            scheduled_tokens_per_second=sum(scheduled for _, scheduled in rates),
        )

    def line(self) -> str:
        """Everything in a line."""
        now = self.now()
        hits = share(now.local + now.external, now.prompt_tokens)
        parts = [
            f"{now.verdict}: {counted(now.requests, 'request')}",
            f"{now.running:,} running",
            f"{now.waiting:,} waiting",
            f"{counted(now.preemptions, 'preemption')}",
            f"{now.prompt_tokens:,} prompt tokens",
            "no hits yet" if hits is None else f"{percent(hits)} hits",
            f"{now.scheduled_tokens_per_second:,.0f} tokens/s",
        ]
        return ", ".join(parts)

    def drawn(self) -> Group:
        """For a terminal."""
        columns = ("requests", "running", "waiting", "prompt/s", "tokens/s", "hits", "preempted", "verdict")
        table = figures_table("engine", *columns)
        for one in self.followed.values():
            _row(table, one)
        parts: list[Table | Text] = [table]
        if self.newest:
            parts += [Text(), Text("Newest findings", style="bold")]
            parts += [Text(_told(violation), overflow="fold") for violation in self.newest]
        return Group(*parts, Text(), Text("Ctrl-C ends this.", style="dim"))


def _row(table: Table, one: _Followed) -> None:
    totals, verdict = one.book.totals(), one.book.verdict
    prompt, scheduled = (0.0, 0.0) if one.reader.ended else one.rates()
    hits = share(totals.local + totals.external, totals.prompt_tokens)
    name = f"{one.book.name}{' (ended)' if one.reader.ended else ''}"
    table.add_row(
        Text(name),
        f"{totals.requests:,}",
        f"{one.crowd.running:,}",
        f"{one.crowd.waiting:,}",
        f"{prompt:,.0f}",
        f"{scheduled:,.0f}",
        "" if hits is None else percent(hits),
        f"{totals.preemptions:,}",
        Text(verdict, style=VERDICTS[verdict]),
    )


def _told(violation: Violation) -> str:
    return f"{violation.severity} {violation.id}: {violation.message}"


def follow(
    path: Path,
    *,
    wait: bool = False,
    poll_seconds: float = POLL_SECONDS,
    out: Console | None = None,
    format: str = "text",
) -> None:
    """Follow ``path`` until all engines have ended, or, to ``wait``, until interrupted.

    As ``json`` an object a line, totals or a finding; as ``csv`` the totals alone. Raises
    :class:`LedgerError` for a path that holds no journal.
    """
    out = out or console()
    if is_remote(path):
        raise LedgerError(f"{path} can't be followed: only folders of this machine can.")
    tail = Tail(path)
    if out.is_terminal and format == "text":
        with Live(console=out, auto_refresh=False, transient=False) as live:
            _until_ended(tail, wait, poll_seconds, lambda _: live.update(tail.drawn(), refresh=True))
        return
    told = 0.0

    def say(found: list[Violation]) -> None:
        nonlocal told
        for line in _findings(found, format):
            print(line, flush=True)
        if time.monotonic() - told >= LINE_SECONDS or tail.ended:
            for line in _totals(tail, format, first=not told):
                print(line, flush=True)
            told = time.monotonic()

    _until_ended(tail, wait, poll_seconds, say)


def _findings(found: list[Violation], format: str) -> list[str]:
    if format == "json":
        return [_json("finding", finding(violation)) for violation in found]
    return [] if format == "csv" else [_told(violation) for violation in found]


def _totals(tail: Tail, format: str, *, first: bool) -> list[str]:
    if format == "json":
        return [_json("totals", tail.now())]
    if format == "csv":
        return structs_csv(Now, [tail.now()]).splitlines()[0 if first else 1 :]
    return [tail.line()]


def _json(kind: str, said: msgspec.Struct) -> str:
    return msgspec.json.encode({"kind": kind, **msgspec.to_builtins(said)}).decode()


def _until_ended(
    tail: Tail, wait: bool, poll_seconds: float, show: Callable[[list[Violation]], None]
) -> None:
    said, shown = False, time.monotonic()

    def tick() -> None:
        """A journal that was written for hours takes a while to read: show how far it is."""
        nonlocal shown
        if time.monotonic() - shown >= poll_seconds:
            shown = time.monotonic()
            show([])

    while True:
        found = tail.poll(tick)
        if found or not (said and tail.ended):
            show(found)
        said = tail.ended
        if said and not wait:
            return
        time.sleep(poll_seconds)
