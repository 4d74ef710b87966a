"""The event stream's own bookkeeping: interned requests, steps as differences, equal steps as a count.

Knows no host: the observers of every adapter write through one :class:`StepLog`. Here is the hot
path. A step equal to the one before costs one dict comparison; nothing walks the running requests
but a step that differs.
"""

from __future__ import annotations

import time
from itertools import repeat
from typing import Any, Protocol

from kvledger.audit import events as ev

FLUSH_SECONDS = 1.0
"""Longest that equal steps are only counted before the journal is told of them."""


class Sink(Protocol):
    """Where events go: a :class:`~kvledger.audit.recorder.Recorder` or a list in memory."""

    wants_snapshot: bool
    """The reader can't follow until it is told everything again (rotation, or loss)."""

    def record(self, event: ev.Event) -> None:
        """Take one event; never raises, never blocks."""

    def restart(self, started: ev.EngineStarted, snapshot: ev.Snapshot) -> None:
        """Begin anew with these two."""


class StepLog:
    """Writes one engine's events, in order, to a sink.

    ``ids`` interns the living requests. While ``held`` is a list, events wait in it: what ends
    inside the taking of an output is told after that output.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.ids: dict[str, int] = {}
        self.held: list[ev.Event] | None = None
        self.undelivered = 0
        self.flushed_at = 0
        self._next_id = 0
        self._began = time.monotonic_ns()
        # The last step and output, as the reader knows them.
        self._tokens: dict[str, int] = {}
        self._tokens_owned = False
        self._drafts: dict[str, int] = {}
        self._dropped: list[int] = []
        self._anew: set[str] = set()
        self._order: list[str] | None = None
        self._lengths: list[int] | None = None
        self._numbers: list[int] = []
        self._sampled: dict[str, int] = {}
        self._same_step = 0
        self._repeats = 0

    def now(self) -> int:
        """Microseconds since this log began."""
        return (time.monotonic_ns() - self._began) // 1000

    def intern(self, request_id: str) -> int:
        """The number that stands for a request, given at first sight."""
        number = self.ids.get(request_id)
        if number is None:
            number = self.ids[request_id] = self._next_id
            self._next_id += 1
        return number

    def emit(self, event: ev.Event) -> None:
        """Tell one event, after everything that came before it."""
        if self.held is not None and not isinstance(event, ev.LoadFailed):
            self.held.append(event)
            return
        if self._repeats or self._same_step:
            self.say_held_back(event.at)
        self.sink.record(event)

    def say_held_back(self, now: int) -> None:
        """Equal steps so far are told, and a step still without output, before what differs."""
        self.flushed_at = now
        if self._repeats:
            self.sink.record(ev.Repeated(now, self._repeats))
            self._repeats = 0
        if self._same_step:
            self.sink.record(ev.Stepped(now, self._same_step, [], []))
            self._same_step = 0

    def flush(self, now: int) -> None:
        """Tell equal steps that have only been counted for longer than ``FLUSH_SECONDS``."""
        if self._repeats and now - self.flushed_at >= FLUSH_SECONDS * 1e6:
            self.say_held_back(now)

    def restart(self, started: ev.EngineStarted, snapshot: ev.Snapshot) -> None:
        """Begin anew: the next step names everyone."""
        self.say_held_back(snapshot.at)
        self._tokens, self._tokens_owned = {}, False
        self._drafts = {}
        self._dropped = []
        self._sampled = {}
        self._order = self._lengths = None
        self.sink.restart(started, snapshot)

    def admitted(self, request_id: str, runs: bool) -> None:
        """A life begins: its next step and output are written whatever they are."""
        if runs:
            self._anew.add(request_id)
        self._sampled.pop(request_id, None)
        self._lengths = None

    def scheduled(
        self, step: int, tokens: dict[str, int], drafts: dict[str, Any], requests: dict[str, Any]
    ) -> None:
        """A step scheduled ``tokens`` by request, of which ``drafts`` (sequences) are drafts."""
        if self._same_step:
            self.say_held_back(self.now())
        drafted = dict(zip(drafts, map(len, drafts.values()), strict=True)) if drafts else drafts
        if not (self._anew or self._dropped) and tokens == self._tokens and drafted == self._drafts:
            self._same_step = step
        else:
            self._step_differs(step, tokens, drafted, requests)

    def _step_differs(
        self, step: int, tokens: dict[str, int], drafts: dict[str, int], requests: dict[str, Any]
    ) -> None:
        ids, anew = self.ids, self._anew
        known = list(map(self._tokens.get, tokens))
        pairs = zip(tokens.items(), known, strict=True)
        differ = [request_id for (request_id, count), last in pairs if count != last]
        others = anew & tokens.keys()
        if drafts != self._drafts:
            others |= {r for r, _ in drafts.items() ^ self._drafts.items() if r in tokens}
        differ += sorted(others.difference(differ))
        self._anew = set()
        changed: list[int] = []
        for request_id in differ:
            computed = requests[request_id].num_computed_tokens
            changed += (ids[request_id], tokens[request_id], drafts.get(request_id, 0), computed)
        dropped = self._dropped
        if len(known) - known.count(None) < len(self._tokens):
            dropped += sorted(ids[request_id] for request_id in self._tokens.keys() - tokens.keys())
        self._tokens, self._tokens_owned, self._drafts = tokens, False, drafts
        self._dropped = []
        self.emit(ev.Stepped(self.now(), step, changed, dropped))

    def delivered(self, at: int, lengths: list[int], output: Any, skipped: list[str]) -> None:
        """The oldest step's output: ``lengths`` sampled, in the order of ``output.req_ids``.

        ``skipped``: requests whose output the engine threw away.
        """
        order = output.req_ids
        same = order is self._order or order == self._order
        if same and lengths == self._lengths and not skipped:
            if self._same_step:
                self._same_step = 0
                self._repeats += 1
            else:
                self.emit(ev.Delivered(at, [], []))
            return
        lengths, ids = lengths or [0] * len(order), self.ids
        changed = self._changed_lengths(order, lengths, same)
        unheard = [ids[request_id] for request_id in dict.fromkeys(skipped) if request_id in ids]
        self.emit(ev.Delivered(at, changed, unheard))
        self._order, self._lengths = order, None if skipped else lengths

    def _changed_lengths(self, order: list[str], lengths: list[int], same: bool) -> list[int]:
        """What :class:`~kvledger.audit.events.Delivered` says: numbers and lengths that differ."""
        ids, sampled, known = self.ids, self._sampled, self._lengths
        if same and known is not None:
            numbers = self._numbers = self._numbers or list(map(ids.get, order, repeat(-1)))
            if -1 not in numbers:
                sampled.update(zip(order, lengths, strict=True))
                rows = zip(numbers, lengths, known, strict=True)
                return [n for row in rows if row[1] != row[2] for n in row[:2]]
        self._numbers = []
        changed: list[int] = []
        answers = zip(order, lengths, map(sampled.get, order), strict=True)
        for request_id, length in [(r, length) for r, length, last in answers if length != last]:
            number = ids.get(request_id)
            if number is not None:  # else its end came before its output
                sampled[request_id] = length
                changed += (number, length)
        return changed

    def forget(self, request_id: str) -> None:
        """A request is gone from the engine."""
        number = self.ids.pop(request_id)
        self._order = None
        if request_id in self._tokens:
            if not self._tokens_owned:
                self._tokens, self._tokens_owned = dict(self._tokens), True
            del self._tokens[request_id]
            self._drafts.pop(request_id, None)
            self._dropped.append(number)
        self._sampled.pop(request_id, None)
        self._anew.discard(request_id)
