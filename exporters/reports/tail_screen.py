"""The present figures of journals that are followed. ``tail_lines.py`` prints them.

The follower of ``kvledger serve`` reads the journals, without a checkpoint. Rates are per second of the
engine's own clock, so they do not depend on how fast a journal is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

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
from ..sidecar.follower import FollowedJournal, Follower, Notify, ignore
from ..trace.groups import check, group_key
from ..trace.request_counts import RequestCounts

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
        rows = [
            GroupNow(
                group=name,
                requests=totals.requests,
                prompt_tokens=totals.prompt_tokens,
                local=totals.local,
                external=totals.external,
                preemptions=totals.preemptions,
            )
            for name, totals in self._groups.items()
        ]
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
        return Now(
            verdict=audit.verdict,
            examined=verdict_words(audit.verdict, audit.coverage),
            counts=count_words(audit.found),
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
