"""The event log of one engine: request numbers, steps as differences, unchanged steps as a count.

Knows no engine: the observers of all releases emit their events through a :class:`StepLog`. This is the hot
path. An unchanged step costs comparisons of lists, which run in C. No Python loop visits every running
request, except where their order changed or where sampled lengths other than one must be remembered.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from itertools import compress, repeat
from operator import ne
from typing import Any, Protocol

from .. import events as ev

FLUSH_SECONDS = 1.0
"""The longest time that unchanged steps are only counted before ``Repeated`` is emitted."""

COMPARED_EVERY = 8
"""Every eighth request is compared, to estimate how much of an output changed."""

WHOLE_SHARE = 0.125
"""``DeliveredWhole`` is emitted if more than this share changed: 1 byte per request, not 5 per change."""

FAILURES = ev.LoadFailed, ev.BlocksFailed
"""What the engine does with failed loads before it takes the output that reports them."""

NONE: list[int] = []
"""One empty list for all events: separate lists would each be visited by the garbage collector."""

NOT_EMITTED = -1
"""Stands for the length of a request's last output where none has been emitted."""


class Sink(Protocol):
    """Where events go: a :class:`~kvledger.audit.journal.recorder.Recorder` or a list in memory."""

    wants_snapshot: bool
    """A new segment begins or events were lost: readers need a snapshot to go on."""

    def keep(self, numbers: list[int]) -> ev.Numbers:
        """A copy of ``numbers`` for one event, in the form that suits this sink best."""

    def record(self, event: ev.Event) -> None:
        """Take one event; never raises, never blocks."""

    def record_all(self, events: Sequence[ev.Event]) -> None:
        """Take several events."""

    def restart(self, started: ev.EngineStarted, snapshot: ev.Snapshot) -> None:
        """Begin a segment with these two events."""


class Requests(Protocol):
    """The engine's requests by id. Each has ``num_computed_tokens``, with the step that is being emitted."""

    def __getitem__(self, request_id: str, /) -> Any: ...


class StepLog:
    """Emits one engine's events, in order, to a sink."""

    def __init__(self, sink: Sink, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.sink = sink
        """Receives the events."""
        self.ids: dict[str, int] = {}
        """The number that stands for each living request in the events, by request id."""
        self.held: list[ev.Event] | None = None
        """Events that must follow the output being processed; None outside ``update_from_output``."""
        self.pool_calls: list[int] = []
        """Buffered calls of block pools, which are emitted before any other event."""
        self.emit_pool_calls: Callable[[], None] = self.pool_calls.clear
        """Emits the buffered calls."""
        self.undelivered = 0
        """Scheduled steps whose output has not arrived."""
        self.flushed_at = 0
        """When unchanged steps were last emitted."""
        self._next_id = 0
        self._clock = clock
        """Nanoseconds since some instant."""
        self._began = clock()
        """The zero of the log's clock."""
        self.steady = False
        """Whether the last step and its output were one token for each request, with no event since.

        An equal step and an output of ``ones`` are then unchanged."""
        self.request_ids: list[str] = []
        """The requests of the last step, in order."""
        self.request_nos: list[int] | None = []
        """Their numbers; None: not collected yet."""
        self._counts: list[int] | None = None
        """Their scheduled tokens; None: one each, except those in ``_other_counts``."""
        self._other_counts: dict[str, int] = {}
        """Scheduled tokens other than one, by request id."""
        self._drafting: list[str] = []
        """The requests of the last step that had drafts."""
        self._drafts: list[int] = []
        """How many drafts each of them had."""
        self._dropped: list[int] = []
        """Numbers of the requests that left since the last emitted step."""
        self._newly_admitted: dict[str, None] = {}
        """Ids of the requests admitted since the last emitted step, in order."""
        self._order: list[str] | None = None
        """The requests of the last output, in order."""
        self._lengths: list[int] | None = None
        """The tokens that each of them sampled."""
        self._order_nos: list[int] | None = None
        """Their numbers; empty where one of them has no number."""
        self._emitted_order: list[int] | None = None
        """The order that the reader knows from the last ``DeliveredWhole``."""
        self._lengths_by_id: dict[str, int] = {}
        """Lengths of last outputs that are not one, by request id."""
        self._lengths_by_id_stale = False
        """Whether ``_lengths`` holds newer lengths than ``_lengths_by_id``."""
        self.ones: list[int] = []
        """The lengths of an output of one token each."""
        self.unchanged_step = 0
        """The number of an unchanged step whose output has not arrived; 0: none."""
        self.repeats = 0
        """Unchanged steps with their outputs that have not been emitted."""

    def now(self) -> int:
        """Microseconds since this log began."""
        return (self._clock() - self._began) // 1000

    def intern(self, request_id: str) -> int:
        """The number that stands for a request; a new request gets the next one."""
        number = self.ids.get(request_id)
        if number is None:
            number = self.ids[request_id] = self._next_id
            self._next_id += 1
        return number

    def emit(self, event: ev.Event) -> None:
        """Emit one event, after everything that happened before it."""
        held = self.held
        if held is not None and type(event) not in FAILURES:
            held.append(event)
            return
        if self.pool_calls:
            self.emit_pool_calls()
        if self.repeats or self.unchanged_step:
            self.emit_unchanged(event.at)
        self.sink.record(event)

    def emit_all(self, events: Sequence[ev.Event]) -> None:
        """Emit one or more events, held ones too, after everything that happened before them."""
        if self.pool_calls:
            self.emit_pool_calls()
        if self.repeats or self.unchanged_step:
            self.emit_unchanged(events[0].at)
        self.sink.record_all(events)

    def unreported_outputs(self) -> int:
        """How many outputs of one token a request have arrived and have not been emitted."""
        return self.repeats + (self.held is not None)

    def _keep(self, numbers: list[int]) -> ev.Numbers:
        return self.sink.keep(numbers) if numbers else NONE

    def emit_unchanged(self, now: int) -> None:
        """Emit the unchanged steps counted so far, and the one whose output has not arrived."""
        self.flushed_at = now
        if self.repeats:
            self.sink.record(ev.Repeated(now, self.repeats))
            self.repeats = 0
        if self.unchanged_step:
            self.sink.record(ev.Stepped(now, self.unchanged_step, NONE, NONE))
            self.unchanged_step = 0

    def flush(self, now: int) -> None:
        """Emit unchanged steps that have been counted for ``FLUSH_SECONDS``."""
        if self.repeats and now - self.flushed_at >= FLUSH_SECONDS * 1e6:
            self.emit_unchanged(now)

    def restart(self, started: ev.EngineStarted, snapshot: ev.Snapshot) -> None:
        """Begin a segment: the next step lists every request."""
        self.emit_pool_calls()
        self.emit_unchanged(snapshot.at)
        self.request_ids, self.request_nos, self._counts, self._other_counts = [], [], None, {}
        self._drafting, self._drafts = [], []
        self._dropped = []
        self._emitted_order = None
        self._lengths_by_id, self._lengths_by_id_stale = dict.fromkeys(self.ids, NOT_EMITTED), False
        self.steady = False
        self._order = self._lengths = None
        self.sink.restart(started, snapshot)

    def admitted(self, request_id: str, runs: bool) -> None:
        """A life begins: the request's next step and output are emitted whatever they are."""
        if runs:
            self._newly_admitted[request_id] = None
        if self._lengths_by_id_stale:
            self._update_lengths_by_id()
        self._lengths_by_id[request_id] = NOT_EMITTED
        self._lengths = None
        self.steady = False

    def preempted(self, request_id: str) -> None:
        """The life of a request has ended: it is not in the last step, even if it resumes in the next."""
        self.steady = False
        self._leave_step(request_id, self.ids[request_id])

    def scheduled_singly(self, step: int, tokens: dict[str, int], total: int, requests: Requests) -> bool:
        """Emit a step with one token for each of ``request_ids``, and any number for newly admitted requests.

        ``total`` is the sum of ``tokens``. Returns False, with nothing emitted, for any other step. No loop
        visits every request: all of ``request_ids`` are in ``tokens``, and none of them is newly admitted,
        because a preempted request leaves ``request_ids``. So equal numbers mean the same requests.
        """
        self.steady = False
        anew, names = self._newly_admitted, self.request_ids
        if self._drafts:
            return False
        counts = list(map(tokens.get, anew, repeat(0)))
        if 0 in counts or len(tokens) != len(names) + len(counts) or total != len(names) + sum(counts):
            return False
        if self._counts is not None:
            self._other_counts = {
                name: count for name, count in zip(names, self._counts, strict=True) if count != 1
            }
            self._counts = None
        if self.unchanged_step:
            self.emit_unchanged(self.now())
        if not (self._other_counts or anew or self._dropped):
            self.unchanged_step = step
            return True
        ids = self.ids
        changed: list[int] = []
        for name in self._other_counts:
            changed += (ids[name], 1, 0, requests[name].num_computed_tokens)
        self._other_counts = {}
        if self.request_nos is None:
            self.request_nos = list(map(ids.__getitem__, names))
        for name, count in zip(anew, counts, strict=True):
            number = ids[name]
            self.request_nos.append(number)
            changed += (number, count, 0, requests[name].num_computed_tokens)
            if count != 1:
                self._other_counts[name] = count
        self.emit(ev.Stepped(self.now(), step, self._keep(changed), self._keep(self._dropped)))
        names += anew
        self._newly_admitted, self._dropped = {}, []
        return True

    def scheduled(
        self,
        step: int,
        tokens: dict[str, int],
        drafts: dict[str, Any],
        requests: Requests,
        ran_before: Sequence[str] = (),
    ) -> None:
        """Emit any step, as its difference from the last one; count it if it is unchanged.

        ``tokens`` are scheduled by request, ``drafts`` of them are drafts (sequences). ``ran_before``: the
        requests of ``tokens`` that ran before, in the same order.
        """
        self.steady = False
        if self.unchanged_step:
            self.emit_unchanged(self.now())
        names = list(tokens) if len(ran_before) != len(tokens) else ran_before
        counts = list(tokens.values())
        if self._counts is None:
            self._counts = list(map(self._other_counts.get, self.request_ids, repeat(1)))
        drafting, drafted = list(drafts), list(map(len, drafts.values()))
        if (
            not (self._newly_admitted or self._dropped)
            and counts == self._counts
            and drafted == self._drafts
            and names == self.request_ids
            and drafting == self._drafting
        ):
            self.unchanged_step = step
            return
        before = dict(zip(self._drafting, self._drafts, strict=True))
        self._drafting, self._drafts = drafting, drafted
        self._step_differs(
            step, list(names), counts, dict(zip(drafting, drafted, strict=True)), before, requests
        )

    def _step_differs(
        self,
        step: int,
        names: list[str],
        counts: list[int],
        drafts: dict[str, int],
        drafts_before: dict[str, int],
        requests: Requests,
    ) -> None:
        ids, anew, dropped, last = self.ids, self._newly_admitted, self._dropped, self._counts or []
        if names == [
            *self.request_ids,
            *anew,
        ]:  # the usual case: requests that ran before, then the admitted ones
            expected = [*last, *repeat(0, len(anew))]
        else:
            before = dict(zip(self.request_ids, last, strict=True))
            expected = [0 if name in anew else before.pop(name, 0) for name in names]
            dropped += sorted(ids[name] for name in before if name not in anew or name not in names)
        differ = [(names[place], counts[place]) for place in _differing(counts, expected)]
        if drafts != drafts_before:
            listed = dict(differ)
            changed_drafts = {name for name, _ in drafts.items() ^ drafts_before.items()}
            rows = zip(names, counts, strict=True)
            differ += [row for row in rows if row[0] in changed_drafts and row[0] not in listed]
        changed: list[int] = []
        for name, count in differ:
            changed += (ids[name], count, drafts.get(name, 0), requests[name].num_computed_tokens)
        self.request_ids, self.request_nos, self._counts = names, None, counts
        self._newly_admitted, self._dropped = {}, []
        if changed or dropped:
            self.emit(ev.Stepped(self.now(), step, self._keep(changed), self._keep(dropped)))
        else:  # only the order changed
            self.unchanged_step = step

    def one_each(self, requests: int) -> list[int]:
        """The lengths of an output of one token each; the same list for the same number of requests."""
        if len(self.ones) != requests:
            self.ones = [1] * requests
        return self.ones

    def delivered(
        self,
        at: int,
        lengths: list[int],
        order: list[str],
        index: Container[str],
        skipped: list[str],
        then: Sequence[ev.Event] = (),
    ) -> None:
        """Emit the output of the oldest step, or count it if step and output are unchanged.

        ``lengths``: the tokens that each request of ``order`` sampled. ``index`` contains the same requests.
        ``skipped``: requests whose output the engine dropped. ``then``: the events that follow the output.
        """
        lengths = lengths or [0] * len(order)
        if lengths is self.ones and not skipped:
            if self._lengths_by_id_stale:
                self._update_lengths_by_id()
            self._order = self._lengths = None
            self._emit_delivered(at, self._changed_to_one(index) if self._lengths_by_id else [], then)
            pending = (
                self._other_counts
                or self._newly_admitted
                or self._dropped
                or self._drafts
                or self._lengths_by_id
            )
            self.steady = self._counts is None and not pending
            return
        self.steady = False
        last = self._lengths
        if last is not None and not skipped and order == self._order:
            if lengths == last:
                self._emit_delivered(at, [], then)
                return
            if self._order_nos is None:
                self._order_nos = list(map(self.ids.get, order, repeat(-1)))
                if -1 in self._order_nos:
                    self._order_nos = []
            if self._order_nos:
                self._emit_differing(at, lengths, last, self._order_nos, then)
                self._lengths, self._lengths_by_id_stale = lengths, True
                return
        self._update_lengths_by_id()
        ids = self.ids
        changed = self._changed_lengths(order, lengths, index)
        skipped_nos = [ids[request_id] for request_id in dict.fromkeys(skipped) if request_id in ids]
        self.emit_all([ev.Delivered(at, self._keep(changed), self._keep(skipped_nos)), *then])
        self._order, self._lengths, self._order_nos = order, None if skipped else lengths, None

    def _emit_differing(
        self, at: int, lengths: list[int], last: list[int], numbers: list[int], then: Sequence[ev.Event]
    ) -> None:
        """Emit an output in the order of the last one: its differences, or all of it where much changed."""
        here, there = lengths[::COMPARED_EVERY], last[::COMPARED_EVERY]
        if sum(map(ne, here, there)) > WHOLE_SHARE * len(here):
            try:
                encoded = bytes(lengths)
            except ValueError:  # more than a byte holds
                pass
            else:
                order = [] if numbers is self._emitted_order else numbers
                self.emit_all([ev.DeliveredWhole(at, order, encoded), *then])
                self._emitted_order = numbers
                return
        changed = [n for place in _differing(lengths, last) for n in (numbers[place], lengths[place])]
        self.emit_all([ev.Delivered(at, self._keep(changed), NONE), *then])

    def _emit_delivered(self, at: int, changed: list[int], then: Sequence[ev.Event]) -> None:
        """Emit an output with these differences; only count it if it and its step are unchanged."""
        if changed or not self.unchanged_step:
            self.emit_all([ev.Delivered(at, self._keep(changed), NONE), *then])
            return
        self.unchanged_step = 0
        self.repeats += 1
        if then:
            self.emit_all(then)

    def _changed_lengths(self, order: list[str], lengths: list[int], index: Container[str]) -> list[int]:
        """Numbers and lengths that differ from the last output, as ``Delivered`` has them."""
        if lengths.count(1) == len(lengths):
            return self._changed_to_one(index)
        ids, sampled = self.ids, self._lengths_by_id
        last = list(map(sampled.get, order, repeat(1)))
        changed: list[int] = []
        for place in _differing(lengths, last):
            name, length = order[place], lengths[place]
            number = ids.get(name)
            if number is None:  # the request ended before its output arrived
                continue
            changed += (number, length)
            if length == 1:
                del sampled[name]
            else:
                sampled[name] = length
        return changed

    def _changed_to_one(self, index: Container[str]) -> list[int]:
        """The same for an output of one token each: the requests whose last length was another."""
        ids, sampled = self.ids, self._lengths_by_id
        changed: list[int] = []
        for name in list(sampled):
            if name in index and name in ids:
                del sampled[name]
                changed += (ids[name], 1)
        return changed

    def _update_lengths_by_id(self) -> None:
        """Bring ``_lengths_by_id`` up to date, before ``_order`` is replaced."""
        if self._lengths_by_id_stale and self._order is not None and self._lengths is not None:
            for name, length in zip(self._order, self._lengths, strict=True):
                if length == 1:
                    self._lengths_by_id.pop(name, None)
                else:
                    self._lengths_by_id[name] = length
        self._lengths_by_id_stale = False

    def forget(self, request_id: str) -> None:
        """The engine has dropped the request."""
        number = self.ids.pop(request_id)
        self.steady = False
        if self._lengths_by_id_stale:
            self._update_lengths_by_id()
        self._order = None
        self._leave_step(request_id, number)
        if self._lengths_by_id:
            self._lengths_by_id.pop(request_id, None)
        if self._newly_admitted:
            self._newly_admitted.pop(request_id, None)

    def _leave_step(self, request_id: str, number: int) -> None:
        """Take a request out of the last step, if it ran there; the next emitted step lists it as dropped."""
        names, numbers = self.request_ids, self.request_nos
        # Numbers mostly ascend; a search through the ids would compare every string before it.
        place = 0 if numbers is None else bisect_left(numbers, number)
        if place == len(names) or names[place] != request_id:
            place = names.index(request_id) if request_id in names else -1
        if place >= 0:  # it ran in the last step
            del names[place]
            if numbers is not None:
                del numbers[place]
            if self._counts is not None:
                del self._counts[place]
            if self._other_counts:
                self._other_counts.pop(request_id, None)
            if self._drafting:
                self._remove_drafts(request_id)
            self._dropped.append(number)

    def _remove_drafts(self, request_id: str) -> None:
        with contextlib.suppress(ValueError):  # the request had no drafts
            place = self._drafting.index(request_id)
            del self._drafting[place], self._drafts[place]


def _differing(new: list[int], old: list[int]) -> list[int]:
    """The places at which two lists of equal length differ, which are mostly few and close together."""
    places: list[int] = []
    for start in range(0, len(new), 32):
        here, there = new[start : start + 32], old[start : start + 32]
        if here != there:
            places += compress(range(start, start + 32), map(ne, here, there))
    return places
