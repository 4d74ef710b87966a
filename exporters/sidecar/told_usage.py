"""Compares what clients were told with the ledger while engines run (``--usage-log``).

A usage log is read from its end on, and the accounts that close are kept for a while. Times count by what was
read of the engines, so a line is compared only when every journal has been read past it: until then a request
of its call may be missing. What differs without a cause is counted as unexplained (``analysis/usage.py``). A
line whose requests do not come in time is neither equal nor wrong.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from ...audit.analysis.calls import FoundRequests
from ...audit.analysis.usage import UNEXPLAINED, CallIndex, Told, differences, reconcile
from ...audit.client_ids import client_names
from ...audit.errors import LedgerError
from ...audit.figures.sums import add_tokens
from ...audit.journal.safe_open import reading
from ...audit.ledger.account import Account
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.text import tenant_of
from ..metrics.values import EngineAudits, Health, state
from ..usage_logs import told_in
from .follower import Follower
from .journal_finder import Notify

TURN_SECONDS = 1.0
"""How often logs are read."""

SETTLE_SECONDS = 5.0
"""How far behind a line every journal is read before it is compared; an engine writes once a second."""

KEEP_SECONDS = 60.0
"""How long a line waits for its requests, and a request for its line."""

LARGEST_LINE = 1 << 20
"""Bytes of a line; a longer one is passed over, which is said."""


class _Line(NamedTuple):
    """What a client was told, and the Unix time at which it was read."""

    told: Told
    read_at: float


class _Closed(NamedTuple):
    """A request that closed: its account, the ids by which clients know it, and when it was read."""

    request: FoundRequests
    names: tuple[str, ...]
    suffixed: bool
    closed_at: float


class _Log:
    """One log, read from its end on; from its beginning where another file has taken its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The log."""
        self.problem = ""
        """What was last said of it."""
        self._file: FileIO | None = None
        """The open log."""
        self._begun = False
        """Whether it was looked at once: what was written before is not read."""
        self._waiting = b""
        """The beginning of a line that is not complete: no more than shows that it is too long."""

    def lines(self) -> Iterator[bytes]:
        """The lines that were written since the last call."""
        if self._file is not None:
            yield from self._rest(self._file)
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            self._begun = True  # all of a log that comes later is new
            raise
        if self._file is None or os.fstat(self._file.fileno()).st_ino != found.st_ino:
            self.close()
            self._file = reading(self.path)
            if not self._begun:
                self._file.seek(0, os.SEEK_END)
        elif found.st_size < self._file.tell():
            self._file.seek(0)
        self._begun = True
        yield from self._rest(self._file)

    def _rest(self, file: FileIO) -> Iterator[bytes]:
        while part := file.read(LARGEST_LINE):
            *whole, self._waiting = (self._waiting + part).split(b"\n")
            yield from whole
            self._waiting = self._waiting[: LARGEST_LINE + 1]

    def close(self) -> None:
        """Close the log. A line that is not complete is dropped."""
        if self._file is not None:
            self._file.close()
        self._file, self._waiting = None, b""


class UsageComparison:
    """Compares the lines of ``logs`` with the accounts of every audit that it watches; counts in ``health``.

    ``audits`` returns the followed audits and is called with ``lock`` held.
    """

    def __init__(
        self,
        logs: Sequence[Path],
        audits: Callable[[], EngineAudits],
        lock: AbstractContextManager[object],
        notify: Notify,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._logs = [_Log(path) for path in logs]
        """The logs of what clients were told."""
        self._audits = audits
        """Returns the followed audits."""
        self._lock = lock
        """Held while the audits are looked at."""
        self._notify = notify
        """Called with one sentence for each problem."""
        self._clock = clock
        """Returns the Unix time, in seconds."""
        self._lines: deque[_Line] = deque()
        """Lines that were not compared yet, the oldest first."""
        self._closed: deque[_Closed] = deque()
        """Requests that closed a short time ago."""
        self._adding = threading.Lock()
        """Held where a request is added, since journals are posted under locks of their own."""
        self._by_name: dict[str, list[_Closed]] = {}
        """The same by each id that a client knows."""

    def watch(self, audit: FollowedAudit) -> None:
        """Keep the requests of this audit that end from now on."""
        audit.on_closed.append(partial(self._add, audit))

    def _add(self, audit: FollowedAudit, account: Account, verdict: str) -> None:
        suffixed = audit.random_suffixes
        found = FoundRequests(
            account.freeze(), audit.name, audit.kv_role, audit.began_seconds or 0.0, tenant_of(account.labels)
        )
        names = client_names(account.request_id, account.traceparent, suffixed=suffixed)
        closed = _Closed(found, tuple({name for _, name in names}), suffixed, self._clock())
        with self._adding:
            self._closed.append(closed)
            for name in closed.names:
                self._by_name.setdefault(name, []).append(closed)

    def turn(self) -> None:
        """Read what was written to the logs, and compare the lines that are old enough."""
        for log in self._logs:
            try:
                for line in log.lines():
                    self._lines += [_Line(told, self._clock()) for told in self._told(log, line)]
            except OSError as error:
                self._say(log, f"can't be read: {error.strerror}")
        with self._lock:
            audits = self._audits()
            live = [each.read_seconds for each in audits if state(each) == "live"]
        with self._adding:
            read_to = min(live, default=self._clock())
            self._compare(read_to, audits.health)
            while self._closed and read_to - self._closed[0].closed_at > KEEP_SECONDS:
                self._drop(self._closed.popleft())

    def _told(self, log: _Log, line: bytes) -> list[Told]:
        if len(line) > LARGEST_LINE:
            self._say(log, f"has a line of more than {LARGEST_LINE:,} bytes")
            return []
        try:
            return told_in(line, log.path, 0) if line.strip() else []
        except LedgerError:
            self._say(log, "has a line that is no JSON object with counts of tokens")
            return []

    def _say(self, log: _Log, problem: str) -> None:
        if problem != log.problem:
            log.problem = problem
            self._notify(f"The usage log {log.path} {problem}.")

    def run(self, stop: threading.Event) -> None:
        """Take a turn every second until ``stop`` is set."""
        while not stop.wait(TURN_SECONDS):
            self.turn()
        for log in self._logs:
            log.close()

    def _compare(self, read_to: float, health: Health) -> None:
        lines, self._lines = self._lines, deque()
        for line in lines:
            age = read_to - line.read_at
            found = self._named(line.told.names)
            if age < SETTLE_SECONDS or (not found and age < KEEP_SECONDS):
                self._lines.append(line)
                continue
            index = CallIndex([line.told], suffixed=any(each.suffixed for each in found))
            for each in found:
                index.add(*each.request)
            usage = reconcile([line.told], index)
            (row,) = usage.calls
            add_tokens(health.usage_calls, row.verdict, 1)
            for difference in differences(usage):
                if difference.cause.startswith(UNEXPLAINED):
                    tokens = difference.told - difference.settled
                    key = difference.figure, "more" if tokens > 0 else "less"
                    health.unexplained_tokens[key] = health.unexplained_tokens.get(key, 0) + abs(tokens)
            for each in found:
                if any(one.account is each.request.account for one in row.requests):
                    self._drop(each)

    def _named(self, names: Sequence[str]) -> list[_Closed]:
        """The requests that closed a short time ago and have one of these names."""
        return list({id(each): each for name in names for each in self._by_name.get(name, ())}.values())

    def _drop(self, closed: _Closed) -> None:
        """A request was compared, or no line came for it."""
        for name in closed.names:
            rest = [each for each in self._by_name.get(name, ()) if each is not closed]
            if rest:
                self._by_name[name] = rest
            else:
                self._by_name.pop(name, None)


def attach_usage(logs: Sequence[Path], follower: Follower, notify: Notify, stop: threading.Event) -> None:
    """Compare with what ``follower`` reads from now on, in a daemon thread until ``stop`` is set."""
    comparison = UsageComparison(logs, lambda: follower.audits, follower.lock, notify)
    with follower.lock:
        follower.on_opened.append(comparison.watch)
        for journal in follower.journals.values():
            comparison.watch(journal.engine_audit)
    threading.Thread(target=comparison.run, args=(stop,), name="kvledger-usage", daemon=True).start()
