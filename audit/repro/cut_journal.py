"""Cuts a journal down to what a finding may depend on: some thousand operations before it.

:func:`cut` reads the journal from the segment in which the finding's request was added, up to the finding.
It keeps the requests and operations of that stretch, the latest :data:`MOST_ITEMS` of them. Findings are
found in ``choose_finding.py``.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import msgspec

from .. import events as ev
from ..errors import LedgerError
from ..journal.reader import Position, Reader
from ..ledger.blocks.contents import RequestContents
from ..ledger.blocks.postings import content_group
from .choose_finding import Seen

MOST_ITEMS = 300_000
"""Most operations that a cut keeps."""


class NotRebuilt(LedgerError):
    """The journal does not have what a reproduction needs; the text is one sentence."""


class Row(msgspec.Struct):
    """What the journal has of one request. ``added``: the cut begins before it came.

    ``hashes``: the hash id of each full block, by the position at which the block ends. ``sequence``: its
    tokens when the cut began, or its prompt; ``chunks``: the prompt's length with each later chunk of a
    session. ``isolation``: its isolation classes, as in RequestAdded. ``hit``: the local hit of its first
    admission; -1: it was not admitted. ``answers``: what the connector answered to each of its lookups.
    ``found``: by admission, the local and external tokens together, or 0 without external ones. ``hold``: the
    connector kept its blocks after its end. ``outcome`` and ``outputs``: why it ended, and after how many
    output tokens; -1: not known.
    """

    number: int
    request_id: str
    prompt: int
    max_tokens: int | None = None
    priority: int = 0
    resumable: bool = False
    pooling: bool = False
    isolation: list[int] | None = None
    added: bool = True
    sequence: int = 0
    chunks: list[int] = []
    hashes: dict[int, int] = {}
    hit: int = -1
    answers: list[int | tuple[int, bool] | None] = []
    found: list[int] = []
    hold: bool = False
    outcome: str = ""
    outputs: int = -1


class Step(NamedTuple):
    """A step was scheduled: the rows of ``Stepped``, by request: tokens, drafts, computed tokens after it."""

    changed: dict[int, tuple[int, int, int]]
    dropped: tuple[int, ...]


class Output(NamedTuple):
    """An output came: the tokens sampled by each request whose number of tokens changed."""

    sampled: dict[int, int]


class Repeat(NamedTuple):
    """The last step and output were repeated."""

    times: int


class Happened(NamedTuple):
    """Anything else: ``add``, ``chunk``, ``abort``, ``close``, ``reset``, ``admit``, ``preempt``, ``lost``,
    ``loaded``, ``failed``, ``sent``.

    ``tokens``: of a failed load the first position that was not loaded; of an admission the end of its hits;
    of a preemption the computed tokens before; of a reset 1 if it preempts running requests.
    """

    what: str
    request: int
    tokens: int = 0


Item = Step | Output | Repeat | Happened


class Cut(msgspec.Struct):
    """The stretch of a journal before one finding."""

    seen: Seen
    configuration: dict[str, ev.Setting]
    level: str
    rows: dict[int, Row]
    items: list[Item]
    target: int
    """The number of the finding's request; -1 if it concerns none."""
    undelivered: int
    """Steps that were in flight where the cut begins."""
    whole: bool
    """Whether the cut begins with the journal."""
    groups: tuple[int, ...]
    """The kind of each KV cache group, as PoolSeen has it; empty if not recorded."""
    chunk_tokens: int
    """Of how many tokens a multiple the connector saves; 0 if no save was recorded."""
    requests: int
    """How many requests came in the stretch, up to the finding."""
    steps: int
    """How many steps there were in it."""


def cut(seen: Seen) -> Cut:
    """Read the stretch before a finding."""
    reading = _Reading(seen)
    start = None if seen.segment <= 1 else Position(segment=seen.segment, event=-1)
    with Reader(seen.journal, start) as reader:
        for batch in reader.poll():
            if batch.first_event >= seen.number:
                break
            for event in batch.events:
                reading.take(event)
    return reading.result()


class _Reading:
    """Collects the rows and items of a cut."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        """The finding, and where it stands in the journal."""
        self.items: deque[Item] = deque(maxlen=MOST_ITEMS)
        """The latest operations, oldest first."""
        self.rows: dict[int, Row] = {}
        """Every request of the stretch, by number."""
        self.started: ev.EngineStarted | None = None
        """The first description of the engine."""
        self.undelivered = 0
        """Steps that were in flight where the stretch begins."""
        self.whole = False
        """Whether the stretch begins with the engine."""
        self.groups: dict[int, int] = {}
        """The kind of each KV cache group, by group."""
        self.requests = self.steps = 0
        """How many requests came, and how many steps there were."""
        self.chunk_tokens = 0
        """The largest number that divides the end of every save."""
        self._begun = False
        """Whether the snapshot at the head of the stretch was read."""
        self._contents = RequestContents()
        self._handlers: dict[type, Any] = {
            ev.EngineStarted: self._engine_started,
            ev.Snapshot: self._snapshot,
            ev.RequestAdded: self._added,
            ev.Extended: self._extended,
            ev.Finished: self._finished,
            ev.Stepped: self._stepped,
            ev.Delivered: self._delivered,
            ev.DeliveredWhole: self._delivered_whole,
            ev.Repeated: self._repeated,
            ev.Matched: self._matched,
            ev.AdmissionFailed: self._not_admitted,
            ev.Admitted: self._admitted,
            ev.Preempted: self._preempted,
            ev.LoadFinished: lambda e: self._happened("loaded", e.request, e.computed_tokens),
            ev.LoadFailed: self._load_failed,
            ev.SavePlanned: lambda e: self._saved(e.end),
            ev.Tracked: lambda e: self._saved(e.due_tokens),
            ev.FreeDelayed: self._free_delayed,
            ev.FreeCompleted: lambda e: self._happened("sent", e.request),
            ev.CacheReset: lambda e: self._happened("reset", -1, int(e.running)),
            ev.PoolSeen: self._pool_seen,
        }
        """What is noted of an event, by its type; the others do not matter to a workload."""
        self._order: list[int] = []
        """The requests of the last DeliveredWhole."""

    def take(self, event: ev.Event) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)
        for request, hash_id, end, _ in self._contents.read(event):
            if (row := self.rows.get(request)) is not None:
                row.hashes[end] = hash_id

    def result(self) -> Cut:
        seen, started = self.seen, self.started
        if started is None:
            raise NotRebuilt("The journal does not say how its engine was configured.")
        kinds = tuple(kind for _, kind in sorted(self.groups.items()))
        named = [row.number for row in self.rows.values() if row.request_id == seen.request_id]
        if seen.request_id and not named:
            raise NotRebuilt(f"The part of the journal that has request {seen.request_id} is gone.")
        added = {item.request for item in self.items if type(item) is Happened and item.what == "add"}
        for number, row in self.rows.items():
            row.added = number in added
        return Cut(
            seen,
            started.configuration,
            started.level,
            self.rows,
            list(self.items),
            named[-1] if named and seen.request_id else -1,
            self.undelivered,
            self.whole,
            kinds,
            self.chunk_tokens,
            self.requests,
            self.steps,
        )

    def _happened(self, what: str, request: int, tokens: int = 0) -> None:
        if request < 0 or request in self.rows:
            self.items.append(Happened(what, request, tokens))

    # --- the engine and its requests ------------------------------------------------------------------

    def _engine_started(self, event: ev.EngineStarted) -> None:
        self.started = self.started or event

    def _snapshot(self, event: ev.Snapshot) -> None:
        if self._begun:  # a later segment: what it repeats is known
            return
        self._begun = True
        self.whole = not event.rows and event.step <= 0
        self.undelivered = event.undelivered_steps
        for row in event.rows:
            self.rows[row.request] = Row(
                row.request,
                row.request_id,
                row.prompt_tokens,
                isolation=row.isolation,
                sequence=max(row.prompt_tokens, row.sequence_tokens),
                chunks=[],
                hashes={},
                answers=[],
                found=[],
            )

    def _added(self, event: ev.RequestAdded) -> None:
        self.requests += 1
        self.rows[event.request] = Row(
            event.request,
            event.request_id,
            event.prompt_tokens,
            event.max_tokens,
            event.priority,
            event.resumable,
            event.pooling,
            event.isolation,
            sequence=event.prompt_tokens,
            chunks=[],
            hashes={},
            answers=[],
            found=[],
        )
        self._happened("add", event.request)

    def _extended(self, event: ev.Extended) -> None:
        row = self.rows.get(event.request)
        if row is not None:
            row.chunks.append(event.prompt_tokens)
            self._happened("chunk", event.request, event.prompt_tokens)

    def _finished(self, event: ev.Finished) -> None:
        row = self.rows.get(event.request)
        if row is None:
            return
        row.outcome, row.outputs = event.reason, event.output_tokens
        if event.reason == "aborted":
            self._happened("abort", event.request)
        elif row.resumable:
            self._happened("close", event.request)

    # --- steps ----------------------------------------------------------------------------------------

    def _stepped(self, event: ev.Stepped) -> None:
        self.steps += 1
        rows = ev.numbers(event.changed)
        changed = {rows[i]: (rows[i + 1], rows[i + 2], rows[i + 3]) for i in range(0, len(rows), 4)}
        self.items.append(Step(changed, tuple(ev.numbers(event.dropped))))

    def _delivered(self, event: ev.Delivered) -> None:
        rows = ev.numbers(event.changed)
        self.items.append(Output(dict(zip(rows[::2], rows[1::2], strict=True))))

    def _delivered_whole(self, event: ev.DeliveredWhole) -> None:
        self._order = event.requests or self._order
        self.items.append(Output(dict(zip(self._order, event.sampled, strict=False))))

    def _repeated(self, event: ev.Repeated) -> None:
        self.steps += event.times
        self.items.append(Repeat(event.times))

    # --- lookups, admissions, loads -------------------------------------------------------------------

    def _matched(self, event: ev.Matched) -> None:
        row = self.rows.get(event.request)
        if row is not None and event.external_tokens is not None:
            answer = (event.external_tokens, True) if event.asynchronous else event.external_tokens
            row.answers.append(answer)

    def _not_admitted(self, event: ev.AdmissionFailed) -> None:
        row = self.rows.get(event.request)
        if row is not None and event.reason == "deferred":
            row.answers += [None] * min(event.attempts, 100)

    def _admitted(self, event: ev.Admitted) -> None:
        row = self.rows.get(event.request)
        if row is not None:
            if row.hit < 0:
                row.hit = event.local_tokens
            row.found.append(event.external_tokens and event.local_tokens + event.external_tokens)
            self._happened("admit", event.request, event.local_tokens + event.external_tokens)

    def _preempted(self, event: ev.Preempted) -> None:
        self._happened("preempt" if event.cause == "blocks" else "lost", event.request, event.before_tokens)

    def _load_failed(self, event: ev.LoadFailed) -> None:
        self._happened("failed", event.request, event.computed_tokens)

    def _free_delayed(self, event: ev.FreeDelayed) -> None:
        row = self.rows.get(event.request)
        if row is not None:
            row.hold = True

    def _saved(self, end: int) -> None:
        self.chunk_tokens = math.gcd(self.chunk_tokens, max(0, end))

    # --- blocks ---------------------------------------------------------------------------------------

    def _pool_seen(self, event: ev.PoolSeen) -> None:
        for place in range(0, len(event.groups), 3):
            self.groups[event.groups[place]] = event.groups[place + 2]
        self._contents.groups[event.pool], _ = content_group(event)
