"""Rebuilds workloads from a cut: its requests, and the operations on them, in the recorded order.

A workload of some of a cut's requests leaves out all others, and with them the blocks that they held and the
tokens that they took of a step. So each choice of requests is tried with several pools and step budgets:
those recorded, those that the chosen requests filled when one of them was preempted or cut short, and, for a
few requests, every pool size in between. :func:`candidates` yields them all, smallest first.

What a journal does not have is invented, and said: the tokens, and, at level ``tokens`` or where the request
that cached a prefix came before the cut, a request that caches it first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from .. import events as ev
from ..errors import LedgerError
from ..journal.reader import Position, Reader
from ..text import printable
from ..traffic.driver_v0 import V0Setup
from ..traffic.engine_setup import EngineSetup
from ..traffic.lmcache import CHUNK_TOKENS
from ..traffic.reader import RecordedRequest, TrafficReader
from ..traffic.script import OUT, Answer, Op, Request, Scheduled, Segment, Workload
from .choose_finding import Seen

# --- Cuts a journal down to what a finding may depend on: some thousand operations before it.
#
# :func:`cut` reads the journal from the segment in which the finding's request was added, up to the
# finding. It keeps the requests and operations of that stretch, the latest :data:`MOST_ITEMS` of them.
# Findings are found in ``choose_finding.py``; what is read of a journal is in ``traffic/reader.py``.

MOST_ITEMS = 300_000
"""Most operations that a cut keeps."""


class NotRebuilt(LedgerError):
    """The journal does not have what a reproduction needs; the text is one sentence."""


class Cut(msgspec.Struct):
    """The stretch of a journal before one finding.

    ``hashes``: by request, the hash id of each full block by the position at which the block ends. ``added``:
    the requests that came in the stretch; the others were there before. ``target``: the number of the
    finding's request; -1 if it concerns none. ``undelivered``: steps that were in flight where the cut
    begins. ``whole``: the cut begins with the journal. ``groups``: as in Traffic; empty if not recorded.
    ``scheduler_class``: ``MODULE:CLASS`` of the recorded scheduler, if it is not vLLM's own.
    ``chunk_tokens``: of how many tokens a multiple the connector saves; 0 if no save was recorded. ``came``
    and ``steps``: how many requests came and how many steps there were, up to the finding.
    """

    seen: Seen
    configuration: dict[str, ev.Setting]
    requests: dict[int, RecordedRequest]
    hashes: dict[int, dict[int, int]]
    script: list[Op]
    added: set[int]
    target: int
    undelivered: int
    whole: bool
    groups: list[str]
    chunk_tokens: int
    came: int
    steps: int
    scheduler_class: str = ""


def cut(seen: Seen) -> Cut:
    """Read the stretch before a finding."""
    reader = TrafficReader(steps=True, most=MOST_ITEMS)
    start = None if seen.segment <= 1 else Position(segment=seen.segment, event=-1)
    with Reader(seen.journal, start) as journal:
        for batch in journal.poll():
            if batch.first_event >= seen.number:
                break
            for event in batch.events:
                reader.feed(event)
    started = reader.started
    if started is None:
        raise NotRebuilt("The journal does not say how its engine was configured.")
    requests, size = reader.by_number(), reader.block_tokens
    named = [request.number for request in requests.values() if request.request_id == seen.request_id]
    if seen.request_id and not named:
        raise NotRebuilt(f"The part of the journal that has request {seen.request_id} is gone.")
    script = reader.script[-MOST_ITEMS:]
    return Cut(
        seen=seen,
        configuration=started.configuration,
        requests=requests,
        hashes={
            number: {place * size: hash_id for place, hash_id in enumerate(request.hash_ids(), 1) if hash_id}
            for number, request in requests.items()
        },
        script=script,
        added={int(op.request) for op in script if op.do == "add"},
        target=named[-1] if named and seen.request_id else -1,
        undelivered=reader.undelivered,
        whole=reader.whole,
        groups=reader.groups(),
        chunk_tokens=reader.chunk_tokens,
        came=sum(request.at >= 0 for request in reader.requests),
        steps=reader.steps,
    )


MOST_REPEATS = 400
"""Most repetitions of an unchanged step that a script has in a row; the rest can't matter to a cache."""

COMPANIONS = (1, 2, 4, 8, 16, 32, 64, 128)
"""How many of the requests that ran beside the finding's request are tried together."""

MOST_POOLS = 48
"""Most pool sizes that are tried for one choice of requests."""

LEAST_CHUNK = 16
"""Saves whose ends have a smaller common divisor do not tell LMCache's chunk."""

SETTINGS = (
    "blocks",
    "block_size",
    "max_running",
    "max_batched_tokens",
    "max_model_len",
    "asynchronous",
    "drafts",
    "policy",
    "prefix_caching",
    "chunked_prefill",
    "load_failure_policy",
    "preemption_mode",
)
_KINDS = {"chunked": "sliding", "mamba": "cross"}
"""Groups that a file of a reproduction has no words for, and those that come nearest."""

_DEFAULTS = EngineSetup()


HIT_OF_UNSEEN = "hit in the cache came from a request that the journal does not show"
"""Part of an assumption about a hit whose donor is not known."""


class Rebuilt(msgspec.Struct, frozen=True):
    """A workload, what was assumed to build it, and its place in the order of tries, in words."""

    workload: Workload
    assumed: tuple[str, ...]
    says: str


def candidates(cut: Cut) -> Iterator[Rebuilt]:
    """Workloads that may lead to the finding, smallest first."""
    beside = _beside(cut)
    target = [cut.target] if cut.target >= 0 else []
    tried: set[frozenset[int]] = set()
    for chosen in _choices(cut, target, beside):
        kept = _with_donors(cut, chosen)
        if kept and kept not in tried:
            tried.add(kept)
            for late in (True, False):
                for rebuilt in _variants(cut, kept, late=late):
                    yield from _adapters(cut, rebuilt)


def _choices(cut: Cut, target: list[int], beside: list[int]) -> Iterator[list[int]]:
    if target:
        yield target
        yield from ([*target, other] for other in beside[:8])
    for count in COMPANIONS:
        if count < len(beside):
            yield [*target, *beside[:count]]
    yield [*target, *beside]
    yield [*target, *cut.requests]


def _beside(cut: Cut) -> list[int]:
    """The requests that ran while the finding's request ran or waited, those of most such steps first."""
    common: dict[int, int] = {}
    running: set[int] = set()
    came = cut.target < 0 or cut.target not in cut.added
    for op in cut.script:
        if op.step is not None:
            running -= {*op.step.dropped, *op.step.preempted}
            running |= set(op.step.changed)
        elif op.do in ("preempt", "abort"):
            running.discard(int(op.request))
        came = came or (op.do == "add" and op.request == str(cut.target))
        if op.do in ("schedule", "repeat") and came:
            times = op.count if op.do == "repeat" else 1
            for number in running:
                common[number] = common.get(number, 0) + times
    common.pop(cut.target, None)
    return sorted(common, key=lambda number: (-common[number], -number))


def _with_donors(cut: Cut, chosen: list[int]) -> frozenset[int]:
    """The chosen requests, and for each hit on recorded blocks the last request before that cached them."""
    kept, todo = set(chosen), list(chosen)
    while todo:
        number = todo.pop()
        hit = _hit(cut.requests[number])
        wanted = cut.hashes[number].get(hit)
        if wanted is None or any(cut.hashes[other].get(hit) == wanted for other in kept if other < number):
            continue
        earlier = [other for other, each in cut.hashes.items() if other < number and each.get(hit) == wanted]
        if earlier:
            kept.add(max(earlier))
            todo.append(max(earlier))
    return frozenset(kept)


def _hit(row: RecordedRequest) -> int:
    """The local hit of its first admission; -1: it was not admitted."""
    return row.hits[0][0] if row.hits else -1


# --- the engine -----------------------------------------------------------------------------------------


def engine_of(cut: Cut) -> dict[str, Any]:
    """The engine's recorded settings, as far as they differ from the driver's defaults."""
    recorded = cut.configuration
    settings: dict[str, Any] = {name: recorded[name] for name in SETTINGS if recorded.get(name) is not None}
    if _is_v0(recorded):
        plain = {field.name: field.default for field in dataclasses.fields(V0Setup)}
        return {"scheduler": "v0"} | {n: v for n, v in settings.items() if plain.get(n, v) != v}
    if cut.scheduler_class:
        settings["scheduler_class"] = cut.scheduler_class
    connector = recorded.get("connector")
    if connector is not None:
        settings["connector"] = _connector(str(connector), cut.seen.id)
    groups = int(recorded.get("groups") or 1)
    if groups > 1:
        kinds = cut.groups if len(cut.groups) == groups else ["full", *["sliding"] * (groups - 1)]
        settings["groups"] = [_KINDS.get(kind, kind) for kind in kinds]
        settings["sliding_window"] = recorded.get("sliding_window") or _DEFAULTS.sliding_window
    if cut.requests and all(row.pooling for row in cut.requests.values()):
        settings["pooling"] = True
    if settings.get("max_batched_tokens", 1 << 20) < settings.get("max_model_len", 0):
        settings.setdefault("chunked_prefill", True)
    return {
        name: value
        for name, value in settings.items()
        if name == "connector" or getattr(_DEFAULTS, name, None) != value
    }


def _is_v0(recorded: dict[str, Any]) -> bool:
    return "figures" in recorded and "preemption_mode" in recorded


def require_types(settings: dict[str, Any], *, v0: bool) -> None:
    """Raise :class:`NotRebuilt` if a setting has another type than the driver's has."""
    kind: type[EngineSetup] | type[V0Setup] = V0Setup if v0 else EngineSetup
    known = {field.name for field in dataclasses.fields(kind)}
    try:
        msgspec.convert({name: value for name, value in settings.items() if name in known}, kind)
    except msgspec.ValidationError as error:
        raise NotRebuilt(f"A setting of the engine is of the wrong type: {error}.") from None


def _connector(name: str, finding: str) -> str:
    of_lmcache = name.startswith("LMCache") and finding.startswith("connector/")
    return "lmcache" if of_lmcache else "scripted"


def _variants(cut: Cut, kept: frozenset[int], *, late: bool) -> Iterator[Rebuilt]:
    """One choice of requests with every pool and step budget worth trying.

    ``late``: a request comes right before the step that admits it, because the requests left out may be why
    it waited.
    """
    build = _Build(cut, kept, late=late)
    workload, assumed = build.workload(), tuple(build.assumed)
    engine = workload.engine
    recorded = int(engine.get("blocks", _DEFAULTS.blocks))
    budgets = [
        None,
        *(budget for budget in build.budgets if budget < engine.get("max_batched_tokens", 1 << 30)),
    ]
    pools = _pools(build, recorded, workload, few=len(kept) <= 4)
    count = f"{len(workload.requests)} requests"
    for budget in budgets:
        for pool in pools:
            changed = dict(engine)
            if pool != recorded:
                changed["blocks"] = pool
            if budget is not None:
                changed["max_batched_tokens"] = budget
            if engine.get("scheduler") == "v0" and budget is not None and not engine.get("chunked_prefill"):
                continue
            more = _said(recorded, pool, engine, budget)
            yield Rebuilt(
                msgspec.structs.replace(workload, engine=changed),
                (*assumed, *more),
                f"{count}, {pool} blocks",
            )


def _adapters(cut: Cut, rebuilt: Rebuilt) -> Iterator[Rebuilt]:
    """With LMCache: each of its two adapters, with and without saves of decoded tokens."""
    engine = rebuilt.workload.engine
    if engine.get("connector") != "lmcache":
        yield rebuilt
        return
    known = cut.chunk_tokens >= LEAST_CHUNK
    chunk_tokens = cut.chunk_tokens if known else CHUNK_TOKENS
    why = "as its recorded saves do" if known else "its default"
    assumed = (*rebuilt.assumed, f"LMCache's chunk has {chunk_tokens} tokens, {why}.")
    for adapter in ("lmcache", "lmcache bundled"):
        for decoded in (False, True):
            changed = {**engine, "connector": adapter, "chunk_tokens": chunk_tokens}
            if decoded:
                changed["save_decoded"] = True
            workload = msgspec.structs.replace(rebuilt.workload, engine=changed)
            yield Rebuilt(workload, assumed, f"{rebuilt.says}, {adapter}")


def _said(recorded: int, pool: int, engine: dict[str, Any], budget: int | None) -> tuple[str, ...]:
    said: list[str] = []
    if pool != recorded:
        said.append(
            f"The pool has {pool} blocks instead of {recorded}: the requests left out held the others."
        )
    if budget is not None:
        was = engine.get("max_batched_tokens", _DEFAULTS.max_batched_tokens)
        said.append(f"A step has {budget} tokens instead of {was}: the requests left out took the others.")
    return tuple(said)


def _pools(build: _Build, recorded: int, workload: Workload, *, few: bool) -> list[int]:
    """Pool sizes in the order in which they are tried."""
    fitted = [full + more for full in build.full_pools for more in (0, -1, 1, 2, -2)]
    size = int(workload.engine.get("block_size", _DEFAULTS.block_size))
    needs = [math.ceil((each.prompt_tokens + 1) / size) for each in workload.requests.values()]
    least = max(needs, default=1) + 1
    pools = [recorded, *(pool for pool in fitted if least <= pool < recorded)]
    if few:
        filled = sum(math.ceil(_longest(each) / size) for each in workload.requests.values())
        most = min(recorded, filled * len(workload.engine.get("groups", ("full",))) + 2)
        stride = max(1, math.ceil((most - least) / MOST_POOLS))
        pools += range(least, most, stride)
    return list(dict.fromkeys(pools))


def _longest(request: Request) -> int:
    return request.prompt_tokens + min(request.max_tokens, 512)


# --- one workload ---------------------------------------------------------------------------------------


class _Slot:
    """A scheduled step while a script is built. ``needed``: the chosen requests run or happen in it."""

    __slots__ = ("answer", "needed")

    def __init__(self, *, needed: bool = False) -> None:
        self.needed = needed
        self.answer = Op("output")
        """Its output, with what it reports of the chosen requests, by their names in the script."""


class _Build:
    """Walks a cut's script once, for one choice of requests."""

    def __init__(self, cut: Cut, kept: frozenset[int], *, late: bool) -> None:
        self.cut = cut
        """What is rebuilt."""
        self._waiting: set[int] | None = set() if late else None
        """The requests that came and were not admitted yet, if they are to come late."""
        self.assumed: list[str] = []
        """What the journal does not say and this workload invents, one sentence each."""
        self.full_pools: list[int] = []
        """Pool sizes that the chosen requests filled when one of them was preempted."""
        self.budgets: list[int] = []
        """Tokens of the chosen requests in steps that cut one of their prompts short."""
        self._kept = kept
        self._rows = [row for number, row in sorted(cut.requests.items()) if number in kept]
        """The chosen requests, in the order in which they came."""
        self._names = {row.number: f"r{place}" for place, row in enumerate(self._rows, 1)}
        """The name of each chosen request in the script."""
        self._renamed = {str(number): name for number, name in self._names.items()}
        """The same by its name in the cut's script."""
        self._size = int(cut.configuration.get("block_size") or _DEFAULTS.block_size)
        """Tokens of a block."""
        self._ops: list[Op | tuple[str, _Slot]] = []
        """The script so far; a step stands in it twice, as ``schedule`` and as ``output``, with its slot."""
        self._running: dict[int, int] = {}
        """Scheduled tokens of each chosen request in the last step."""
        self._computed: dict[int, int] = {}
        """The engine's count of computed tokens after the last step, by request."""
        self._in_flight: deque[_Slot] = deque(_Slot() for _ in range(cut.undelivered))
        """Scheduled steps without an output, oldest first."""
        self._needed = False
        """Whether the next step must be in the script although no chosen request runs in it."""
        self._ended: set[int] = set()
        self._finds = str(engine_of(cut).get("connector")).startswith("lmcache")
        """Whether the answers are what the store has after each preemption."""

    def workload(self) -> Workload:
        self._begin()
        for op in self.cut.script:
            if op.do == "schedule":
                self._schedule(op.step, empty=op.count > 0)
            elif op.do == "output":
                self._output(op)
            elif op.do == "repeat":
                self._repeat(op)
            elif op.do == "reset":
                self._ops.append(Op("reset", running=op.running))
            elif op.request in self._renamed:
                self._happened(op, int(op.request))
        self._finish()
        requests = self._requests()
        warm = self._warmers(requests)
        return Workload(
            release=self.cut.seen.release,
            engine=engine_of(self.cut),
            requests={**{name: request for name, (request, _) in warm.items()}, **requests},
            script=(*(op for _, ops in warm.values() for op in ops), *self._script()),
        )

    # --- the script ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Add the chosen requests that were there before the cut, and let them compute what they had."""
        budget = int(self.cut.configuration.get("max_batched_tokens") or _DEFAULTS.max_batched_tokens)
        for row in self._rows:
            if row.number not in self.cut.added:
                self._ops.append(Op("add", self._names[row.number]))
                self._pairs(1 + row.prompt // budget)

    def _pairs(self, times: int) -> None:
        for _ in range(times):
            slot = _Slot(needed=True)
            self._ops += [("schedule", slot), ("output", slot)]

    def _schedule(self, step: Scheduled | None = None, *, empty: bool = False) -> None:
        step = step or Scheduled()
        for number in filter(self._kept.__contains__, step.preempted):
            self._preempted(number, by_blocks=True)
        for number, end in step.admitted:
            if number in self._kept:
                if self._waiting is not None and number in self._waiting:
                    self._come(number)
                self._needed, self._computed[number] = True, end
        for number in step.dropped:
            self._running.pop(number, None)
        for number, (tokens, _, computed) in step.changed.items():
            if number in self._kept:
                self._running[number], self._computed[number] = tokens, computed - tokens
        slot = _Slot(needed=(bool(self._running) and not empty) or self._needed)
        self._needed = False
        if not empty:
            self._count(step)
        self._in_flight.append(slot)
        self._ops.append(("schedule", slot))

    def _count(self, step: Scheduled) -> None:
        for number, tokens in self._running.items():
            self._computed[number] = self._computed.get(number, 0) + tokens
        total = sum(self._running.values())
        for number in step.changed:
            row = self.cut.requests.get(number)
            cut_short = number in self._running and row is not None and self._computed[number] < row.prompt
            if cut_short and self._running[number] > 1 and total not in self.budgets[:4]:
                self.budgets = [*self.budgets, total][:4]

    def _output(self, op: Op) -> None:
        slot = self._in_flight.popleft() if self._in_flight else _Slot()
        slot.answer = op.renamed(self._renamed)
        slot.answer.do = "output"  # also of a step that is repeated
        slot.needed |= any(field != "accepted" for field in slot.answer.details)
        self._ops.append(("output", slot))

    def _repeat(self, op: Op) -> None:
        idle = not self._running and not self._needed
        most = min(op.count, len(self._in_flight) + 1 if idle else MOST_REPEATS)
        for place in range(1, most + 1):
            self._schedule()
            self._output(op if place == most else Op("output"))

    def _happened(self, op: Op, number: int) -> None:
        match op.do:
            case "add" if self._waiting is not None:
                self._waiting.add(number)
            case "add" | "chunk":
                self._come(number)
            case "abort" | "close":
                if self._waiting is not None and number in self._waiting:
                    self._come(number)
                if number not in self._ended:
                    self._ops.append(Op(op.do, self._names[number]))
                self._ended.add(number)
            case "preempt" | "lost":
                self._preempted(number, by_blocks=op.do == "preempt")

    def _come(self, number: int) -> None:
        """The request, or its next chunk, comes now."""
        if self._waiting is not None:
            self._waiting.discard(number)
        self._ops.append(Op("add", self._names[number]))
        self._needed = True

    def _preempted(self, number: int, *, by_blocks: bool) -> None:
        self._needed = True
        held = sum(
            math.ceil(tokens / self._size)
            for each, tokens in self._computed.items()
            if each in self._running or each == number
        )
        if by_blocks and held + 1 not in self.full_pools and len(self.full_pools) < 6:
            self.full_pools.append(held + 1)
        self._running.pop(number, None)
        self._computed.pop(number, None)

    def _finish(self) -> None:
        """Answer what is in flight, and go on for a while, so that figures of the end can be read."""
        for number in sorted(self._waiting or ()):
            self._come(number)
        while self._in_flight:
            self._output(Op("output"))
        if any(row.number not in self._ended for row in self._rows):
            self._pairs(48)

    def _script(self) -> Iterator[Op]:
        for op in self._ops:
            if isinstance(op, Op):
                yield op
            elif op[1].needed:
                yield Op("schedule") if op[0] == "schedule" else op[1].answer

    # --- the requests -------------------------------------------------------------------------------------

    def _requests(self) -> dict[str, Request]:
        sequences: dict[int, tuple[Segment, ...]] = {}
        built: dict[str, Request] = {}
        classes: dict[tuple[int, ...], str] = {}
        for row in self._rows:
            name = self._names[row.number]
            prompt = self._prompt(row, name, sequences)
            sequences[row.number] = (*prompt, (name + OUT, 1 << 20))
            lengths = [row.prompt, *(chunk.end for chunk in row.chunks)]
            chunks = tuple(
                ((f"{name} chunk {place}", max(1, length - before)),)
                for place, (before, length) in enumerate(itertools.pairwise(lengths), 1)
            )
            salt, lora = _isolation(row, classes)
            stopped = row.outcome == "stopped" and row.outputs > 0
            most = row.outputs if row.outcome == "length" and row.outputs > 0 else row.max_tokens
            built[name] = Request(
                prompt=prompt,
                max_tokens=most if most is not None else 4096,
                stop_at=row.outputs if stopped else None,
                priority=row.priority,
                resumable=row.resumable,
                chunks=chunks if row.resumable else (),
                salt=salt,
                lora=lora,
                answers=tuple(self._answers(row)),
                hold=row.hold_us >= 0,
            )
        return built

    def _answers(self, row: RecordedRequest) -> Iterator[Answer]:
        """The connector's answers, or what its store had at each admission."""
        if self._finds:
            yield from (external and local + external for local, external in row.hits)
            return
        for answer in row.answers:
            if answer is None:
                yield None
            elif not answer[2]:  # the others were asked again until they were admitted
                held, asynchronous, _, local = answer
                external = held and held - local
                yield (external, True) if asynchronous else external

    def _prompt(
        self, row: RecordedRequest, name: str, sequences: dict[int, tuple[Segment, ...]]
    ) -> tuple[Segment, ...]:
        """The prompt: what it shares with an earlier request by recorded hashes, then its own tokens."""
        shared, donor = 0, -1
        mine = self.cut.hashes[row.number]
        for other in sequences:
            common = [end for end, hash_id in mine.items() if self.cut.hashes[other].get(end) == hash_id]
            if max(common, default=0) > shared:
                shared, donor = max(common), other
        shared = min(shared, row.prompt)
        begins = _first(sequences[donor], shared) if donor >= 0 else ()
        own = row.prompt - shared
        return (*begins, (name, own)) if own else begins

    def _warmers(self, requests: dict[str, Request]) -> dict[str, tuple[Request, list[Op]]]:
        """Requests that cache the prefixes which the chosen requests hit and none of them had cached."""
        warm: dict[str, tuple[Request, list[Op]]] = {}
        for place, row in enumerate(self._rows):
            hit = _hit(row)
            if hit <= 0:
                continue
            prompt = requests[self._names[row.number]].prompt
            earlier = [requests[self._names[each.number]].prompt for each in self._rows[:place]]
            earlier += [request.prompt for request, _ in warm.values()]
            if any(_common(prompt, other) >= hit for other in earlier):
                continue
            name = f"w{len(warm) + 1}"
            request = Request(prompt=(*_first(prompt, hit), (name, 1)), max_tokens=1)
            budget = int(self.cut.configuration.get("max_batched_tokens") or _DEFAULTS.max_batched_tokens)
            steps = [op for _ in range(2 + hit // budget) for op in (Op("schedule"), Op("output"))]
            warm[name] = (request, [Op("add", name), *steps])
            self.assumed.append(
                f"The {hit} tokens that a request {HIT_OF_UNSEEN}; another one caches them here."
            )
        return warm


def _isolation(row: RecordedRequest, classes: dict[tuple[int, ...], str]) -> tuple[str, int]:
    """Names for a request's classes: its salt's and its adapter's."""
    name = classes.setdefault((0, row.salt), f"s{len(classes) + 1}") if row.salt else ""
    number = int(classes.setdefault((1, row.lora), str(len(classes) + 1))) if row.lora else 0
    return name, number


def _first(segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The first tokens of a sequence of segments."""
    begin: list[Segment] = []
    for family, count in segments:
        if tokens <= 0:
            break
        begin.append((family, min(count, tokens)))
        tokens -= count
    return tuple(begin)


def _common(one: tuple[Segment, ...], other: tuple[Segment, ...]) -> int:
    """How many tokens two prompts share at their beginning."""
    tokens = 0
    for (family, count), (other_family, other_count) in zip(one, other, strict=False):
        if family != other_family:
            break
        tokens += min(count, other_count)
        if count != other_count:
            break
    return tokens


OWN_SCHEDULERS = (None, "Scheduler", "AsyncScheduler", "DiffusionScheduler", "DiffusionAsyncScheduler")
"""vLLM's own classes; None: a journal that does not say which class its engine had."""


def require_scheduler(cut: Cut) -> None:
    """Raise :class:`NotRebuilt` unless the class that would be driven is the recorded one."""
    recorded, named = cut.configuration.get("scheduler"), cut.scheduler_class
    if _is_v0(cut.configuration):
        recorded = None
    module, _, name = named.partition(":")
    if named and not (name.isidentifier() and all(map(str.isidentifier, module.split(".")))):
        raise NotRebuilt(
            f"{printable(named)!r} is not MODULE:CLASS, such as my_package.scheduler:MyScheduler."
        )
    if not named and recorded not in OWN_SCHEDULERS:
        raise NotRebuilt(
            f"The journal is of the scheduler class {printable(str(recorded))}, which is not vLLM's own: "
            "name it with --scheduler MODULE:CLASS."
        )
    if named and recorded != name:
        raise NotRebuilt(
            f"The journal is of the scheduler class {printable(str(recorded))}, and not of {name}."
        )


def require_rebuildable(cut: Cut) -> None:
    """Raise :class:`NotRebuilt` for a journal without steps before its finding, or with wrong settings."""
    require_scheduler(cut)
    recorded = cut.configuration
    if not isinstance(recorded.get("groups") or 1, int):
        raise NotRebuilt("The journal's number of KV cache groups is no number.")
    settings = {
        name: recorded[name] for name in (*SETTINGS, "sliding_window") if recorded.get(name) is not None
    }
    require_types(settings, v0=_is_v0(recorded))
    if not any(op.do in ("schedule", "repeat") for op in cut.script):
        raise NotRebuilt("The journal has no step before the finding: its earlier segments are gone.")
