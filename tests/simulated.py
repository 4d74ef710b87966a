"""A simulated engine: it decides at random what happens, and emits the events that an observer would.

It serves traces of a million requests, for which a real scheduler on a CPU would need hours. It keeps the
counters of vLLM 0.32's scheduler and emits them as the hooks do, so an audit of its journal is clean.
Everything follows from the seed. The cost is per event: a request that only decodes is not touched.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from math import exp
from random import Random
from typing import NamedTuple

from kvledger.audit import events as ev

BLOCK = 16
CENSUS_STEPS = 512
DRAFTS = 3
TENANTS = ("chat", "chat", "chat", "rag", "agent", "batch")


class Mix(NamedTuple):
    """Shares are shares of requests; ``preempted`` and ``reset`` are probabilities per step."""

    running: int = 128
    waiting: int = 16
    step_tokens: int = 2048
    median_prompt: int = 500
    median_output: int = 90
    prefix: float = 0.55
    external: float = 0.3
    asynchronous: float = 0.5
    load_fails: float = 0.01
    deferred: float = 0.02
    aborted: float = 0.01
    session: float = 0.005
    speculative: float = 0.03
    preempted: float = 0.04
    reset: float = 1e-5


class Request:
    """One request's counters, named as in vLLM. While it decodes, ``computed`` is as of step ``since``."""

    __slots__ = (
        "bound",
        "computed",
        "drafts",
        "emitted",
        "fails",
        "fresh",
        "id",
        "left",
        "number",
        "output",
        "plan",
        "preemptions",
        "prefix",
        "promise",
        "prompt",
        "reported",
        "resumable",
        "resumed",
        "sampled",
        "sequence",
        "since",
    )

    def __init__(self, number: int, name: str, prompt: int, output: int) -> None:
        self.number, self.id, self.prompt, self.left = number, name, prompt, output
        self.sequence, self.output, self.computed = prompt, 0, 0
        self.resumed = self.reported = self.resumable = self.drafts = False
        self.fresh = True
        self.prefix = self.preemptions = self.bound = 0
        self.promise = (0, 0)
        self.plan: tuple[int, int] | None = None
        self.fails = self.since = self.sampled = -1
        self.emitted: tuple[int, int] | None = None


class Simulated:
    """``requests`` served by one engine under ``mix``; :meth:`events` is its stream."""

    def __init__(self, requests: int, seed: int, mix: Mix | None = None) -> None:
        self.mix = mix or Mix()
        self.at = 0
        self.step = 0
        self._dice = Random(seed)
        self._to_come = requests
        self._numbers = 0
        self._waiting: deque[Request] = deque()
        self._loading: list[tuple[int, int, Request]] = []
        self._prefilling: dict[int, Request] = {}
        self._decoding: dict[int, Request] = {}
        self._speculating: dict[int, Request] = {}
        self._ends: list[tuple[int, int, int, Request]] = []
        self._dropped: list[int] = []
        self._entered: list[Request] = []
        self._out: list[ev.Event] = []
        self._repeats = 0
        self._clean = False
        self._looked_up = [0] * 6
        self._seed = seed

    @property
    def living(self) -> Iterator[Request]:
        """All requests that have arrived and not ended."""
        yield from self._waiting
        yield from (request for _, _, request in self._loading)
        for running in (self._prefilling, self._decoding, self._speculating):
            yield from running.values()

    def events(self) -> Iterator[list[ev.Event]]:
        """The events of a step, or of several steps if most are unchanged; never empty."""
        while self._to_come or self._waiting or self._loading or self._running():
            self._one_step()
            if len(self._out) >= 256:
                yield self._take()
        self._flush_repeats()
        if self._out:
            yield self._take()

    def snapshot(self) -> ev.Snapshot:
        """A snapshot of all living requests between two steps; the next step names all of them."""
        rows = []
        for one in self.living:
            self._catch_up(one)
            one.emitted, one.sampled = None, -1
            rows.append(
                ev.SnapshotRow(
                    one.number,
                    one.id,
                    one.prompt,
                    one.fresh,
                    one.computed,
                    0,
                    0,
                    one.sequence,
                    one.preemptions,
                )
            )
        self._entered = [*self._decoding.values()]
        self._dropped = []
        self._clean = False
        return ev.Snapshot(self.at, self.step, rows, 0)

    def flush(self) -> list[ev.Event]:
        """The events still held back, to be written before a snapshot."""
        self._flush_repeats()
        return self._take()

    def _take(self) -> list[ev.Event]:
        out, self._out = self._out, []
        return out

    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._speculating)

    # --- one step -----------------------------------------------------------------------------------

    def _one_step(self) -> None:
        mix, dice = self.mix, self._dice
        while len(self._waiting) < self.mix.waiting and self._to_come:
            self._arrive()
        if self._loading and self._loading[0][0] <= self.step:
            self._loaded(heapq.heappop(self._loading)[2])
        if dice.random() < mix.preempted and self._decoding:
            # The request admitted last is preempted, as in vLLM.
            pool = self._prefilling if self._prefilling and dice.random() < 0.3 else self._decoding
            self._preempt(next(reversed(pool.values())), "blocks")
        elif dice.random() < mix.reset:
            self._emit(ev.CacheReset(self.at, True, True))
            for running in (self._prefilling, self._decoding, self._speculating):
                for request in list(running.values()):
                    self._preempt(request, "reset")
        budget = mix.step_tokens - self._running()
        rows: list[tuple[Request, int, int]] = []
        for request in self._prefilling.values():
            budget = self._chunk(request, budget, rows)
        while self._waiting and budget > 0 and self._running() + len(self._loading) < mix.running:
            request = self._waiting.popleft()
            if not self._admit(request):
                continue
            self._prefilling[request.number] = request
            budget = self._chunk(request, budget, rows)
        self._count_look_ups()
        self._advance(rows, mix.step_tokens - budget)

    def _chunk(self, request: Request, budget: int, rows: list[tuple[Request, int, int]]) -> int:
        tokens = min(request.sequence - request.computed, max(1, budget))
        if request.plan is None:
            request.plan = request.promise
        rows.append((request, tokens, 0))
        return budget - tokens

    def _advance(self, rows: list[tuple[Request, int, int]], tokens: int) -> None:
        """Schedule and run one step, and deliver its output."""
        self.at += 8_000 + 40 * tokens
        for request in self._entered:
            rows.append((request, 1, 0))
        self._entered = []
        rows += ((request, 1 + DRAFTS, DRAFTS) for request in self._speculating.values())
        if not rows and not self._decoding and not self._speculating and not self._dropped:
            self.step += 1  # all requests wait for remote KV
            return
        self.step += 1
        changed: list[int] = []
        for request, count, drafts in rows:
            if request.since < 0:
                request.computed += count
            if request.emitted != (count, drafts):
                computed = request.computed if request.since < 0 else self._computed(request)
                changed += (request.number, count, drafts, computed)
                request.emitted = (count, drafts)
        ending = []
        while self._ends and self._ends[0][0] <= self.step:
            _, _, bound, request = heapq.heappop(self._ends)
            if bound == request.bound and request.since >= 0:
                ending.append(request)
        self._deliver(changed, rows, ending)

    def _deliver(
        self, changed: list[int], rows: list[tuple[Request, int, int]], ending: list[Request]
    ) -> None:
        sampled: list[int] = []
        ignored: list[int] = []
        failures = []
        first: list[Request] = []
        for request, _, drafts in rows:
            if request.fails >= 0:
                failures.append(request)
                ignored.append(request.number)
                sampled += (request.number, 0)
                request.sampled = -1
                continue
            tokens = 1
            if drafts:
                tokens = 1 + min(self._dice.choice((0, 0, 1, 2, 3)), request.left - 1, DRAFTS)
                request.computed -= DRAFTS - (tokens - 1)
                request.sequence += tokens
                request.output += tokens
                request.left -= tokens
                if request.left <= 0:
                    ending.append(request)
            elif request.since < 0:
                if request.computed < request.sequence:
                    tokens = 0
                else:
                    first.append(request)
            if request.sampled != tokens:
                sampled += (request.number, tokens)
                request.sampled = tokens
        if not changed and not self._dropped and not sampled and not first and not ending and self._clean:
            self._repeats += 1
        else:
            self._emit(ev.Stepped(self.at, self.step, changed, self._dropped))
            for request in failures:
                self._fail(request)
            self._emit(ev.Delivered(self.at, sampled, ignored))
            self._clean = not ignored
        self._dropped = []
        for request in first:
            self._first_output(request)
        for request in ending:
            self._end(request)
        if self.step % CENSUS_STEPS == 0:
            self._census()

    # --- the life of a request ------------------------------------------------------------------------

    def _arrive(self) -> None:
        mix, dice = self.mix, self._dice
        number, self._numbers = self._numbers, self._numbers + 1
        self._to_come -= 1
        prompt = max(8, min(8_000, int(mix.median_prompt * exp(dice.gauss(0, 0.9)))))
        output = max(1, min(1_024, int(mix.median_output * exp(dice.gauss(0, 0.8)))))
        if dice.random() < 0.05:
            prompt += -prompt % BLOCK
        name = f"{TENANTS[number % len(TENANTS)]}-{self._seed:x}{number:07x}-{dice.getrandbits(32):08x}"
        request = Request(number, name, prompt, output)
        request.prefix = int(prompt * dice.random()) if dice.random() < mix.prefix else 0
        request.resumable = dice.random() < mix.session
        request.drafts = dice.random() < mix.speculative
        self._emit(ev.RequestAdded(self.at, number, name, prompt, output, resumable=request.resumable))
        if dice.random() < mix.aborted / 4:
            self._finished(request, "aborted")
        else:
            self._waiting.append(request)

    def _admit(self, request: Request) -> bool:
        """Look up the prefix cache and begin a life; False if the request still waits."""
        mix, dice, step = self.mix, self._dice, self.step + 1
        most = (request.sequence - 1) // BLOCK * BLOCK
        cached = request.sequence if request.resumed and dice.random() < 0.7 else request.prefix
        local = min(most, cached // BLOCK * BLOCK)
        external, asynchronous = 0, False
        self._emit(ev.LookedUp(self.at, request.number, step, local))
        if dice.random() < mix.external:
            if request.fresh and dice.random() < mix.deferred:
                self._emit(ev.Matched(self.at, request.number, step, local, None, False))
                failed = ev.AdmissionFailed(self.at, request.number, step, "deferred", local, 0, 1)
                self._emit(failed)
                self._waiting.append(request)
                return False
            asynchronous = dice.random() < mix.asynchronous
            whole = asynchronous and request.sequence % BLOCK == 0
            room = (request.sequence if whole else most) - local
            external = room if dice.random() < 0.3 else int(room * dice.random()) // BLOCK * BLOCK
            asynchronous = asynchronous and external > 0
            self._emit(ev.Matched(self.at, request.number, step, local, external, asynchronous))
        request.computed = local + external
        request.promise = (local, external)
        self._emit(
            ev.Admitted(
                self.at,
                request.number,
                step,
                request.resumed,
                local,
                external,
                asynchronous,
                request.computed,
            )
        )
        self._look_up_counts(request.sequence, local, external)
        request.fresh = False
        request.resumed = False
        request.fails = -1
        if external and dice.random() < mix.load_fails:
            request.fails = local + int(external * dice.random()) // BLOCK * BLOCK
        if asynchronous:
            due = self.step + 1 + int(dice.random() * 8)
            heapq.heappush(self._loading, (due, request.number, request))
            return False
        if external:
            self._emit(ev.LoadPlanned(self.at, request.number, step, external, []))
        return True

    def _loaded(self, request: Request) -> None:
        """An asynchronous load has ended."""
        if request.fails >= 0:
            before, request.computed = request.computed, request.fails
            self._emit(ev.LoadFailed(self.at, request.number, before, request.computed, True))
            request.fails = -1
        self._emit(ev.LoadFinished(self.at, request.number, request.computed))
        if request.computed == 0:
            self._emit(ev.RolledBack(self.at, request.number, "released", 0, 0))
            self._waiting.appendleft(request)
            return
        if request.computed == request.sequence:
            request.computed -= 1
            event = ev.RolledBack(self.at, request.number, "full_hit", request.sequence, request.computed)
            self._emit(event)
        self._prefilling[request.number] = request

    def _first_output(self, request: Request) -> None:
        """The prompt is computed; from now on the request decodes."""
        request.sequence += 1
        request.output += 1
        request.left -= 1
        del self._prefilling[request.number]
        if not request.reported and request.plan is not None:
            local, external = request.plan
            cached = local + external
            report = ev.Reported(
                self.at, request.number, request.prompt, local, external, request.prompt - cached, cached
            )
            self._emit(report)
            request.reported = True
        if request.left <= 0:
            self._end(request)
        elif request.drafts:
            self._speculating[request.number] = request
        else:
            self._decode(request)

    def _decode(self, request: Request) -> None:
        request.since = self.step
        request.bound += 1
        steps = request.left
        if self._dice.random() < self.mix.aborted:
            steps = 1 + int(steps * self._dice.random())
        self._decoding[request.number] = request
        self._entered.append(request)
        heapq.heappush(self._ends, (self.step + steps, request.number, request.bound, request))

    def _computed(self, request: Request) -> int:
        return request.computed + self.step - request.since

    def _catch_up(self, request: Request) -> None:
        """Update the counters of a decoding request: one token a step."""
        if request.since >= 0:
            tokens = self.step - request.since
            request.computed += tokens
            request.sequence += tokens
            request.output += tokens
            request.left -= tokens
            request.since = self.step

    def _leave(self, request: Request) -> None:
        """Remove the request from the running ones and from the next step."""
        self._catch_up(request)
        for running in (self._prefilling, self._decoding, self._speculating):
            running.pop(request.number, None)
        self._entered = [one for one in self._entered if one is not request]
        if request.emitted is not None:
            self._dropped.append(request.number)
        request.since, request.emitted, request.sampled = -1, None, -1

    def _end(self, request: Request) -> None:
        self._leave(request)
        if request.resumable and request.left <= 0 and request.computed == request.sequence - 1:
            request.resumable = False
            request.prompt = request.sequence = request.computed + 1 + int(100 * self._dice.random())
            request.output, request.left = 0, 1 + int(60 * self._dice.random())
            self._emit(ev.Extended(self.at, request.number, request.prompt, request.computed))
            self._prefilling[request.number] = request
            return
        self._finished(request, "stopped" if request.left <= 0 else "aborted")

    def _finished(self, request: Request, reason: str) -> None:
        end = ev.Finished(
            self.at, request.number, reason, request.computed, 0, 0, request.sequence, request.output
        )
        self._emit(end)

    def _preempt(self, request: Request, cause: str) -> None:
        self._leave(request)
        gone = ev.Preempted(
            self.at, request.number, self.step + 1, cause, request.computed, 0, 0, 0, 0, False
        )
        self._emit(gone)
        request.computed = 0
        request.preemptions += 1
        request.resumed = True
        self._waiting.appendleft(request)

    def _fail(self, request: Request) -> None:
        """A synchronous load failed: its external tokens and this step's tokens are lost."""
        before, request.computed = request.computed, request.fails
        self._emit(ev.LoadFailed(self.at, request.number, before, request.computed, False))
        request.fails = -1

    # --- what an engine reports ------------------------------------------------------------------------

    def _look_up_counts(self, tokens: int, local: int, external: int) -> None:
        counts = self._looked_up
        counts[0] += 1
        counts[1] += tokens
        counts[2] += local
        if tokens > local:
            counts[3] += 1
            counts[4] += tokens - local
            counts[5] += external

    def _count_look_ups(self) -> None:
        if self._looked_up[0]:
            self._emit(ev.LookupsCounted(self.at, self.step + 1, *self._looked_up))
            self._looked_up = [0] * 6

    def _census(self) -> None:
        rows: list[int] = []
        tokens = 0
        for running in (self._prefilling, self._decoding, self._speculating):
            for one in running.values():
                self._catch_up(one)
                tokens += one.computed
                rows += (one.number, one.computed, 0, 0, one.sequence)
        blocks = self.mix.running * 128
        free = blocks - tokens // BLOCK
        self._emit(ev.Census(self.at, self.step, rows, len(self._waiting), free, blocks))

    def _flush_repeats(self) -> None:
        if self._repeats:
            times, self._repeats = self._repeats, 0
            self._out.append(ev.Repeated(self.at, times))

    def _emit(self, event: ev.Event) -> None:
        if self._repeats:
            self._flush_repeats()
        self._out.append(event)
