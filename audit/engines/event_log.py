"""The event stream's own bookkeeping: interned requests, steps as differences, equal steps as a count.

Knows no host: the observers of every adapter write through one :class:`StepLog`. Here is the hot
path. A step equal to the one before costs a comparison of lists that the interpreter makes by itself.
Nothing here runs once for every running request but where their order is another, or where lengths
other than one have to be remembered.
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
"""Longest that equal steps are only counted before the journal is told of them."""

LOOKED_AT = 8
"""Of so many requests one is looked at, to say how much of an output differs from the last."""

WHOLE = 0.125
"""An output is told whole where more than this share differs: a byte each, instead of some five."""

NONE: list[int] = []
"""The same for all events that have none: a list of its own is one more for the garbage collector to walk."""

UNTOLD = -1
"""For the number of tokens in an output: the reader has been told of none yet."""


class Sink(Protocol):
    """Where events go: a :class:`~kvledger.audit.journal.recorder.Recorder` or a list in memory."""

    wants_snapshot: bool
    """The reader can't follow until it is told everything again (rotation, or loss)."""

    def keep(self, numbers: list[int]) -> ev.Numbers:
        """A copy of them for an event, as this sink keeps it best. Nothing but an event may have it."""

    def record(self, event: ev.Event) -> None:
        """Take one event; never raises, never blocks."""

    def record_all(self, events: Sequence[ev.Event]) -> None:
        """Take several."""

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
        self.pool_calls: list[int] = []
        """Buffered calls of block pools, which are emitted before any other event."""
        self.emit_pool_calls: Callable[[], None] = self.pool_calls.clear
        """Emits the buffered calls."""
        self.undelivered = 0
        self.flushed_at = 0
        self._next_id = 0
        self._began = time.monotonic_ns()
        self.quiet = False
        """The last step was one token for each of ``names`` and so was its output, and nothing has come
        between: a step that names them again with as many tokens, and an output of ``ones``, equal these."""
        # The last step, as the reader knows it: who, how many tokens each, drafts where there are any.
        # Where there are no counts each had one but those in _odd.
        self.names: list[str] = []
        self.numbers: list[int] | None = []
        """Of ``names``; None: they have to be asked for."""
        self._counts: list[int] | None = None
        self._odd: dict[str, int] = {}
        self._drafting: list[str] = []
        self._drafts: list[int] = []
        self._dropped: list[int] = []
        self._anew: dict[str, None] = {}
        # The last output; by request only lengths that are not one, and not yet those of _order.
        self._order: list[str] | None = None
        self._lengths: list[int] | None = None
        self._numbers: list[int] | None = None
        self._told_whole: list[int] | None = None
        self._sampled: dict[str, int] = {}
        self._sampled_behind = False
        self.ones: list[int] = []
        self.same_step = 0
        self.repeats = 0

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
        held = self.held
        if held is not None and type(event) is not ev.LoadFailed:
            held.append(event)
            return
        if self.pool_calls:
            self.emit_pool_calls()
        if self.repeats or self.same_step:
            self.say_held_back(event.at)
        self.sink.record(event)

    def emit_all(self, events: Sequence[ev.Event]) -> None:
        """Tell several, at least one, after everything that came before them; also what has been held."""
        if self.pool_calls:
            self.emit_pool_calls()
        if self.repeats or self.same_step:
            self.say_held_back(events[0].at)
        self.sink.record_all(events)

    def unreported_outputs(self) -> int:
        """How many outputs of one token a request were taken and have not been emitted."""
        return self.repeats + (self.held is not None)

    def _kept(self, numbers: list[int]) -> ev.Numbers:
        return self.sink.keep(numbers) if numbers else NONE

    def say_held_back(self, now: int) -> None:
        """Equal steps so far are told, and a step still without output, before what differs."""
        self.flushed_at = now
        if self.repeats:
            self.sink.record(ev.Repeated(now, self.repeats))
            self.repeats = 0
        if self.same_step:
            self.sink.record(ev.Stepped(now, self.same_step, NONE, NONE))
            self.same_step = 0

    def flush(self, now: int) -> None:
        """Tell equal steps that have only been counted for longer than ``FLUSH_SECONDS``."""
        if self.repeats and now - self.flushed_at >= FLUSH_SECONDS * 1e6:
            self.say_held_back(now)

    def restart(self, started: ev.EngineStarted, snapshot: ev.Snapshot) -> None:
        """Begin anew: the next step names everyone."""
        self.emit_pool_calls()
        self.say_held_back(snapshot.at)
        self.names, self.numbers, self._counts, self._odd = [], [], None, {}
        self._drafting, self._drafts = [], []
        self._dropped = []
        self._told_whole = None
        self._sampled, self._sampled_behind = dict.fromkeys(self.ids, UNTOLD), False
        self.quiet = False
        self._order = self._lengths = None
        self.sink.restart(started, snapshot)

    def admitted(self, request_id: str, runs: bool) -> None:
        """A life begins: its next step and output are written whatever they are."""
        if runs:
            self._anew[request_id] = None
        if self._sampled_behind:
            self._remember_sampled()
        self._sampled[request_id] = UNTOLD
        self._lengths = None
        self.quiet = False

    def scheduled_singly(
        self, step: int, tokens: dict[str, int], total: int, requests: dict[str, Any]
    ) -> bool:
        """Tell a step of one token for each of ``self.names``, who all run again, and of newcomers.

        ``total`` is the sum of ``tokens``. False if it is another step, and nothing has been told then.
        Nothing here goes through the requests one by one, as long as their order is the same.
        """
        self.quiet = False
        anew, names = self._anew, self.names
        if self._drafts:
            return False
        counts = list(map(tokens.get, anew, repeat(0)))
        if 0 in counts or len(tokens) != len(names) + len(counts) or total != len(names) + sum(counts):
            return False
        if self._counts is not None:
            self._odd = {name: count for name, count in zip(names, self._counts, strict=True) if count != 1}
            self._counts = None
        if self.same_step:
            self.say_held_back(self.now())
        if not (self._odd or anew or self._dropped):
            self.same_step = step
            return True
        ids = self.ids
        changed: list[int] = []
        for name in self._odd:
            changed += (ids[name], 1, 0, requests[name].num_computed_tokens)
        self._odd = {}
        if self.numbers is None:
            self.numbers = list(map(ids.__getitem__, names))
        for name, count in zip(anew, counts, strict=True):
            number = ids[name]
            self.numbers.append(number)
            changed += (number, count, 0, requests[name].num_computed_tokens)
            if count != 1:
                self._odd[name] = count
        self.emit(ev.Stepped(self.now(), step, self._kept(changed), self._kept(self._dropped)))
        names += anew
        self._anew, self._dropped = {}, []
        return True

    def scheduled(
        self,
        step: int,
        tokens: dict[str, int],
        drafts: dict[str, Any],
        requests: dict[str, Any],
        ran_before: Sequence[str] = (),
    ) -> None:
        """A step scheduled ``tokens`` by request, of which ``drafts`` (sequences) are drafts.

        ``ran_before`` are requests among them in the same order, known to the caller.
        """
        self.quiet = False
        if self.same_step:
            self.say_held_back(self.now())
        names = list(tokens) if len(ran_before) != len(tokens) else ran_before
        counts = list(tokens.values())
        if self._counts is None:
            self._counts = list(map(self._odd.get, self.names, repeat(1)))
        drafting, drafted = list(drafts), list(map(len, drafts.values()))
        if (
            not (self._anew or self._dropped)
            and counts == self._counts
            and drafted == self._drafts
            and names == self.names
            and drafting == self._drafting
        ):
            self.same_step = step
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
        requests: dict[str, Any],
    ) -> None:
        ids, anew, dropped, last = self.ids, self._anew, self._dropped, self._counts or []
        if names == [*self.names, *anew]:  # as ever: who ran before, then who was admitted
            known = [*last, *repeat(0, len(anew))]
        else:
            before = dict(zip(self.names, last, strict=True))
            known = [0 if name in anew else before.pop(name, 0) for name in names]
            dropped += sorted(ids[name] for name in before if name not in anew or name not in names)
        differ = [(names[place], counts[place]) for place in _differing(counts, known)]
        if drafts != drafts_before:
            told = dict(differ)
            changed_drafts = {name for name, _ in drafts.items() ^ drafts_before.items()}
            rows = zip(names, counts, strict=True)
            differ += [row for row in rows if row[0] in changed_drafts and row[0] not in told]
        changed: list[int] = []
        for name, count in differ:
            changed += (ids[name], count, drafts.get(name, 0), requests[name].num_computed_tokens)
        self.names, self.numbers, self._counts = names, None, counts
        self._anew, self._dropped = {}, []
        if changed or dropped:
            self.emit(ev.Stepped(self.now(), step, self._kept(changed), self._kept(dropped)))
        else:  # only the order is another
            self.same_step = step

    def one_each(self, requests: int) -> list[int]:
        """An output's lengths where each is one; the same list as long as their number is the same."""
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
        """The oldest step's output: ``lengths`` sampled, in the order of the requests.

        ``index`` holds the same requests, for look-ups. ``skipped``: requests whose output the
        engine threw away. ``then``: what is to be told next.
        """
        lengths = lengths or [0] * len(order)
        if lengths is self.ones and not skipped:
            if self._sampled_behind:
                self._remember_sampled()
            self._order = self._lengths = None
            self._tell_delivered(at, self._changed_to_one(index) if self._sampled else [], then)
            pending = self._odd or self._anew or self._dropped or self._drafts or self._sampled
            self.quiet = self._counts is None and not pending
            return
        self.quiet = False
        known = self._lengths
        if known is not None and not skipped and order == self._order:
            if lengths == known:
                self._tell_delivered(at, [], then)
                return
            if self._numbers is None:
                self._numbers = list(map(self.ids.get, order, repeat(-1)))
                if -1 in self._numbers:
                    self._numbers = []
            if self._numbers:
                self._tell_differing(at, lengths, known, self._numbers, then)
                self._lengths, self._sampled_behind = lengths, True
                return
        self._remember_sampled()
        ids = self.ids
        changed = self._changed_lengths(order, lengths, index)
        unheard = [ids[request_id] for request_id in dict.fromkeys(skipped) if request_id in ids]
        self.emit_all([ev.Delivered(at, self._kept(changed), self._kept(unheard)), *then])
        self._order, self._lengths, self._numbers = order, None if skipped else lengths, None

    def _tell_differing(
        self, at: int, lengths: list[int], known: list[int], numbers: list[int], then: Sequence[ev.Event]
    ) -> None:
        """An output in the order of the last, by ``numbers``; whole where much of it differs."""
        here, there = lengths[::LOOKED_AT], known[::LOOKED_AT]
        if sum(map(ne, here, there)) > WHOLE * len(here):
            try:
                told = bytes(lengths)
            except ValueError:  # more than a byte holds
                pass
            else:
                order = [] if numbers is self._told_whole else numbers
                self.emit_all([ev.DeliveredWhole(at, order, told), *then])
                self._told_whole = numbers
                return
        changed = [n for place in _differing(lengths, known) for n in (numbers[place], lengths[place])]
        self.emit_all([ev.Delivered(at, self._kept(changed), NONE), *then])

    def _tell_delivered(self, at: int, changed: list[int], then: Sequence[ev.Event]) -> None:
        """An output; that it equals the last and so does its step is only counted."""
        if changed or not self.same_step:
            self.emit_all([ev.Delivered(at, self._kept(changed), NONE), *then])
            return
        self.same_step = 0
        self.repeats += 1
        if then:
            self.emit_all(then)

    def _changed_lengths(self, order: list[str], lengths: list[int], index: Container[str]) -> list[int]:
        """What :class:`~kvledger.audit.events.Delivered` says: numbers and lengths that differ."""
        if lengths.count(1) == len(lengths):
            return self._changed_to_one(index)
        ids, sampled = self.ids, self._sampled
        last = list(map(sampled.get, order, repeat(1)))
        changed: list[int] = []
        for place in _differing(lengths, last):
            name, length = order[place], lengths[place]
            number = ids.get(name)
            if number is None:  # its end came before its output
                continue
            changed += (number, length)
            if length == 1:
                del sampled[name]
            else:
                sampled[name] = length
        return changed

    def _changed_to_one(self, index: Container[str]) -> list[int]:
        """The same of an output with one for each: of those whose last was another number."""
        ids, sampled = self.ids, self._sampled
        changed: list[int] = []
        for name in list(sampled):
            if name in index and name in ids:
                del sampled[name]
                changed += (ids[name], 1)
        return changed

    def _remember_sampled(self) -> None:
        """The last lengths by request, before their order is given up."""
        if self._sampled_behind and self._order is not None and self._lengths is not None:
            for name, length in zip(self._order, self._lengths, strict=True):
                if length == 1:
                    self._sampled.pop(name, None)
                else:
                    self._sampled[name] = length
        self._sampled_behind = False

    def forget(self, request_id: str) -> None:
        """A request is gone from the engine."""
        number = self.ids.pop(request_id)
        self.quiet = False
        if self._sampled_behind:
            self._remember_sampled()
        self._order = None
        names, numbers = self.names, self.numbers
        # Who came first stands first, mostly; to look through the names would touch them all.
        place = 0 if numbers is None else bisect_left(numbers, number)
        if place == len(names) or names[place] != request_id:
            place = names.index(request_id) if request_id in names else -1
        if place >= 0:  # else it was not in the last step
            del names[place]
            if numbers is not None:
                del numbers[place]
            if self._counts is not None:
                del self._counts[place]
            if self._odd:
                self._odd.pop(request_id, None)
            if self._drafting:
                self._drafts_no_more(request_id)
            self._dropped.append(number)
        if self._sampled:
            self._sampled.pop(request_id, None)
        if self._anew:
            self._anew.pop(request_id, None)

    def _drafts_no_more(self, request_id: str) -> None:
        with contextlib.suppress(ValueError):  # it had no drafts
            place = self._drafting.index(request_id)
            del self._drafting[place], self._drafts[place]


def _differing(new: list[int], old: list[int]) -> list[int]:
    """Places at which two lists of one length differ; few as a rule, and near each other."""
    places: list[int] = []
    for start in range(0, len(new), 32):
        here, there = new[start : start + 32], old[start : start + 32]
        if here != there:
            places += compress(range(start, start + 32), map(ne, here, there))
    return places
