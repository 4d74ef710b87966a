"""A trace in Chrome's trace event format, which Perfetto and chrome://tracing display.

An engine is a process, a request is a track, and a life is a slice on it; the time between lives is a slice
named *waits*. Arrows lead from a preemption to the life that resumes, and findings are marks. Counters show
running and waiting requests, and the free blocks at each census. Times are microseconds from the start of
the engine that started first.

The format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from ...audit import events as ev
from ...audit.checks.registry import Violation
from ...audit.journal.folder import read
from ...audit.ledger.account import Account
from ...audit.ledger.life import Life
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_batch
from ...audit.replay.windows import EVERYTHING, Window
from ..files import whole
from .request_counts import RequestCounts

Slice = dict[str, Any]


def write_timeline(paths: Sequence[Path], out: IO[str], window: Window = EVERYTHING) -> int:
    """Write the trace events of all journals at ``paths`` as one JSON object; return their number.

    The ``window`` selects requests; counters cover the whole trace. Memory is bounded by open requests.
    Raises LedgerError for a path that holds no journal.
    """
    journals = [_Track(number, path, window) for number, path in enumerate(journals_at(paths), 1)]
    began = min((track.began for track in journals), default=0.0)
    out.write('{"displayTimeUnit":"ms","traceEvents":[')
    count = 0
    for track in journals:
        for event in track.events(round((track.began - began) * 1e6)):
            out.write(("," if count else "") + "\n" + json.dumps(event, separators=(",", ":")))
            count += 1
    out.write("\n]}\n")
    return count


def save(paths: Sequence[Path], output: Path, window: Window = EVERYTHING) -> int:
    """Write the timeline to a file, whole or not at all. Raises LedgerError."""
    with whole(output) as draft, draft.open("w") as out:
        return write_timeline(paths, out, window)


class _Track:
    """One engine's journal as trace events."""

    def __init__(self, number: int, path: Path, window: Window) -> None:
        self.number = number
        self.path = path
        self.window = window
        self.began = _start(path)
        self._counts = RequestCounts()
        self._flows = 0
        self._findings_by_request: dict[str | None, list[Violation]] = {}

    def events(self, offset: int) -> Iterator[Slice]:
        """All trace events, with ``offset`` microseconds added to every time."""
        for event in self._events():
            if "ts" in event:
                event["ts"] += offset
            yield {"pid": self.number, **event}

    def _events(self) -> Iterator[Slice]:
        engine_audit = EngineAudit(self.path, keep=True, window=self.window, with_metrics=False)
        for batch in each_batch(engine_audit):
            for event in batch.events:
                yield from self._counters(event)
            for violation in batch.findings:
                self._findings_by_request.setdefault(violation.request, []).append(violation)
            for account in batch.accounts:
                yield from self._request(account, engine_audit.last_at)
        engine = engine_audit.engine
        name = f"{engine_audit.name} ({engine.configuration.get('model', '')})" if engine else self.path.name
        yield _named("process_name", name)
        yield from self._findings(None, None)

    def _request(self, account: Account, last: int) -> Iterator[Slice]:
        """A request's track. One that is still open ends at the journal's ``last`` event."""
        request = account.request
        yield {"tid": request, **_named("thread_name", account.request_id)}
        yield {"tid": request, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": request}}
        end = account.closed_at if account.closed_at >= 0 else last
        for since, until in account.waits(last):
            yield _slice("waits", "wait", request, since, until, {})
        for life in account.lives:
            until = life.ended_at if life.ended_at >= 0 else end
            yield _slice(f"life {life.number}", "life", request, life.began_at, until, _figures(life))
        for before, life in pairwise(account.lives):
            self._flows += 1
            arrow = {"cat": "resumed", "name": "resumed", "id": self._flows, "tid": request}
            yield {**arrow, "ph": "s", "ts": before.ended_at}
            yield {**arrow, "ph": "f", "bp": "e", "ts": life.began_at}
        yield from self._findings(account.request_id, request)
        for settlement in account.settlements:
            yield _mark(
                settlement.at,
                "prompt settled",
                request,
                {
                    "local": settlement.local,
                    "external": settlement.external,
                    "computed": settlement.computed,
                    "unattained": settlement.unattained,
                },
            )

    def _findings(self, request_id: str | None, track: int | None) -> Iterator[Slice]:
        """Marks for the findings of a request, or with None for findings without a request."""
        for violation in self._findings_by_request.pop(request_id, ()):
            yield _mark(violation.at, violation.id, track, {"says": violation.message})

    def _counters(self, event: ev.Event) -> Iterator[Slice]:
        """Running and waiting requests when they change; free blocks when an event reports them."""
        if isinstance(event, ev.Census):
            yield _counter(event.at, "free blocks", {"free": event.free_blocks})
        elif isinstance(event, ev.PoolSeen | ev.BlockStatesReported) and event.free_blocks >= 0:
            name = f"free blocks, pool {event.pool}" if event.pool else "free blocks"
            yield _counter(event.at, name, {"free": event.free_blocks})
        if self._counts.feed(event):
            counts = {"running": self._counts.running, "waiting": self._counts.waiting}
            yield _counter(event.at, "requests", counts)


def _figures(life: Life) -> dict[str, Any]:
    """The details of a life's slice, in tokens."""
    figures = {
        "ended by": life.ended_by or "still open",
        "local": life.local,
        "external": life.external,
        "loaded": life.loaded,
        "scheduled": life.scheduled,
        "rejected": life.rejected,
        "discarded": life.discarded,
    }
    return {**figures, **{f"voided: {cause}": tokens for cause, tokens in life.voided.items()}}


def _slice(name: str, category: str, request: int, start: int, end: int, args: dict[str, Any]) -> Slice:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "tid": request,
        "ts": start,
        "dur": max(0, end - start),
        "args": args,
    }


def _mark(at: int, name: str, request: int | None, args: dict[str, Any]) -> Slice:
    """A mark on a request's track, or on the whole engine."""
    scope = {"s": "p"} if request is None else {"s": "t", "tid": request}
    return {"ph": "i", "name": name, "cat": "mark", "ts": at, "args": args, **scope}


def _counter(at: int, name: str, args: dict[str, int]) -> Slice:
    return {"ph": "C", "name": name, "ts": at, "args": args}


def _named(kind: str, name: str) -> Slice:
    return {"ph": "M", "name": kind, "args": {"name": name}}


def _start(path: Path) -> float:
    """Unix time of the engine's start, from the journal's first event."""
    started = (event for _, event in read(path) if isinstance(event, ev.EngineStarted))
    first = next(started, None)
    return 0.0 if first is None else first.began_seconds
