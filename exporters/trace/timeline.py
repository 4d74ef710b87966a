"""A trace in Chrome's trace event format, which Perfetto and chrome://tracing display.

An engine is a process. Its first track has the steps with their durations. Requests share the other tracks,
its *lanes*: a request takes the first lane that is free when it arrives, so there are as many lanes as
requests were in the engine at once. A life is a slice named after its request; the time between lives is a
slice named *waits*. Arrows lead from a preemption to the life that resumes, and findings are marks. Counters
show running and waiting requests, the free blocks at each census, and at level blocks the blocks by state.
Times are microseconds from the start of the engine that started first.

The format: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from ...audit import events as ev
from ...audit.analysis.block_states import STATES, BlockStates
from ...audit.analysis.step_times import STEP_HANDLERS
from ...audit.checks.registry import Violation
from ...audit.journal.host_folders import read
from ...audit.ledger.account import Account, Life
from ...audit.ledger.blocks.contents import Contents
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.find import journals_at
from ...audit.replay.journals import each_batch
from ...audit.replay.observers import KeptAccounts
from ...audit.replay.windows import EVERYTHING, Window
from ..files import whole
from .step_rows import ObservedSteps
from .time_series import RequestCounts

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


STEPS = 0
"""The track of the steps; lanes are counted from 1."""

BLOCKS_US = 10_000
"""The counter of blocks has at most one value in so many microseconds."""


class Lanes:
    """Which lane each request takes while it is in the engine."""

    def __init__(self) -> None:
        self.count = 0
        """How many lanes there are."""
        self._free: list[int] = []
        """The lanes that no request is in; the first of them is the lowest."""
        self._taken: dict[int, int] = {}
        """The lane of each request, until the request is drawn."""

    def feed(self, event: ev.Event) -> None:
        """Give a request that arrives a lane, and free the lane of one that ends.

        The lane of a request whose end was lost stays taken: nobody knows until when.
        """
        if isinstance(event, ev.RequestAdded):
            self._take(event.request)
        elif isinstance(event, ev.Finished):
            lane = self._taken.get(event.request)
            if lane is not None:
                heappush(self._free, lane)
        elif isinstance(event, ev.Snapshot):
            for row in event.rows:
                self._take(row.request)

    def take_from(self, request: int) -> int:
        """The lane of a request, which is not asked for again."""
        lane = self._taken.pop(request, 0)
        return lane or self._new()

    def _take(self, request: int) -> None:
        if request not in self._taken:
            self._taken[request] = heappop(self._free) if self._free else self._new()

    def _new(self) -> int:
        self.count += 1
        return self.count


class _Track:
    """One engine's journal as trace events."""

    def __init__(self, number: int, path: Path, window: Window) -> None:
        self.number = number
        """The number of the process in the trace."""
        self.path = path
        """The engine's journal."""
        self.window = window
        """Which requests and steps are drawn."""
        self.began = _start(path)
        """Unix time of the engine's start."""
        self._counts = RequestCounts()
        self._lanes = Lanes()
        self._steps = ObservedSteps()
        """Steps that were observed and not drawn yet."""
        self._step = 0
        """The last step that has a slice."""
        self._blocks, self._contents = BlockStates(), Contents()
        self._blocks_at = -BLOCKS_US
        """When the counter of blocks had its last value, in microseconds."""
        self._flows = 0
        self._findings_by_request: dict[str | None, list[Violation]] = {}
        """Findings that are not drawn yet; None: those without a request."""

    def events(self, offset: int) -> Iterator[Slice]:
        """All trace events, with ``offset`` microseconds added to every time."""
        for event in self._events():
            if "ts" in event:
                event["ts"] += offset
            yield {"pid": self.number, **event}

    def _events(self) -> Iterator[Slice]:
        engine_audit = EngineAudit(self.path, [KeptAccounts], window=self.window)
        for batch in each_batch(engine_audit):
            for event in batch.events:
                self._lanes.feed(event)
                yield from self._counters(event)
                yield from self._step_slices(event)
            for violation in batch.findings:
                self._findings_by_request.setdefault(violation.request, []).append(violation)
            for account in batch.accounts:
                yield from self._request(account, engine_audit.last_at)
        engine = engine_audit.engine
        name = f"{engine_audit.name} ({engine.configuration.get('model', '')})" if engine else self.path.name
        yield _named("process_name", name)
        yield from _track(STEPS, "steps")
        for lane in range(1, self._lanes.count + 1):
            yield from _track(lane, f"lane {lane}")
        yield from self._findings(None, None)

    def _step_slices(self, event: ev.Event) -> Iterator[Slice]:
        """A slice for each observation of steps that ``event`` ends."""
        handler = STEP_HANDLERS.get(type(event))
        if isinstance(event, ev.Snapshot):
            self._step = event.step - event.undelivered_steps
        if handler is None:
            return
        handler(self._steps, event)
        for steps, begin, end, work in self._steps.take():
            first, self._step = self._step + 1, self._step + steps
            if end > begin and self.window.holds(self.began + end / 1e6):
                name = f"step {first}" if steps == 1 else f"steps {first} to {self._step}"
                args = {
                    "steps": steps,
                    "prefill tokens": work.prefill_tokens,
                    "decoding requests": work.decode_requests,
                    "draft tokens": work.draft_tokens,
                }
                yield _slice(name, "step", STEPS, begin, end, args)

    def _request(self, account: Account, last: int) -> Iterator[Slice]:
        """A request's slices in its lane. One that is still open ends at the journal's ``last`` event."""
        request, name = self._lanes.take_from(account.request), account.request_id
        end = account.closed_at if account.closed_at >= 0 else last
        for since, until in account.waits(last):
            yield _slice("waits", "wait", request, since, until, {"request": name})
        for life in account.lives:
            until = life.ended_at if life.ended_at >= 0 else end
            args = {"request": name, "life": life.number, **_figures(life)}
            label = name if len(account.lives) == 1 else f"{name}, life {life.number}"
            yield _slice(label, "life", request, life.began_at, until, args)
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
        now = self._blocks.feed(event, self._contents.read(event))
        if now is not None and now.at - self._blocks_at >= BLOCKS_US:
            self._blocks_at = now.at
            yield _counter(now.at, "blocks", {name: getattr(now, name) for name in STATES})
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


def _track(number: int, name: str) -> Iterator[Slice]:
    """The name of a track, and its place among the tracks."""
    yield {"tid": number, **_named("thread_name", name)}
    yield {"tid": number, "ph": "M", "name": "thread_sort_index", "args": {"sort_index": number}}


def _start(path: Path) -> float:
    """Unix time of the engine's start, from the journal's first event."""
    started = (event for _, event in read(path) if isinstance(event, ev.EngineStarted))
    first = next(started, None)
    return 0.0 if first is None else first.began_seconds
