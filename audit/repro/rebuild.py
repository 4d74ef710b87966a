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

from ..conformance.driver_v0 import V0Setup
from ..conformance.engine_setup import EngineSetup
from .cut_journal import Cut, Happened, NotRebuilt, Output, Repeat, Row, Step
from .lmcache_store import CHUNK_TOKENS
from .workload import OUT, Op, Request, Segment, Workload

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
_KINDS = {2: "full", 1: "sliding", 0: "cross"}
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
    yield [*target, *cut.rows]


def _beside(cut: Cut) -> list[int]:
    """The requests that ran while the finding's request ran or waited, those of most such steps first."""
    common: dict[int, int] = {}
    running: set[int] = set()
    came = cut.target < 0 or not cut.rows[cut.target].added
    for item in cut.items:
        if type(item) is Step:
            running -= set(item.dropped)
            running |= set(item.changed)
        elif type(item) is Happened and item.what in ("preempt", "abort"):
            running.discard(item.request)
        came = came or (type(item) is Happened and item.what == "add" and item.request == cut.target)
        if type(item) in (Step, Repeat) and came:
            times = item.times if type(item) is Repeat else 1
            for number in running:
                common[number] = common.get(number, 0) + times
    common.pop(cut.target, None)
    return sorted(common, key=lambda number: (-common[number], -number))


def _with_donors(cut: Cut, chosen: list[int]) -> frozenset[int]:
    """The chosen requests, and for each hit on recorded blocks the last request before that cached them."""
    kept, todo = set(chosen), list(chosen)
    while todo:
        row = cut.rows[todo.pop()]
        if row.hit <= 0 or row.hit not in row.hashes:
            continue
        wanted = row.hashes[row.hit]
        if any(cut.rows[other].hashes.get(row.hit) == wanted for other in kept if other < row.number):
            continue
        earlier = [n for n, each in cut.rows.items() if n < row.number and each.hashes.get(row.hit) == wanted]
        if earlier:
            kept.add(max(earlier))
            todo.append(max(earlier))
    return frozenset(kept)


# --- the engine -----------------------------------------------------------------------------------------


def engine_of(cut: Cut) -> dict[str, Any]:
    """The engine's recorded settings, as far as they differ from the driver's defaults."""
    recorded = cut.configuration
    settings: dict[str, Any] = {name: recorded[name] for name in SETTINGS if recorded.get(name) is not None}
    if _is_v0(recorded):
        plain = {field.name: field.default for field in dataclasses.fields(V0Setup)}
        return {"scheduler": "v0"} | {n: v for n, v in settings.items() if plain.get(n, v) != v}
    connector = recorded.get("connector")
    if connector is not None:
        settings["connector"] = _connector(str(connector), cut.seen.id)
    groups = int(recorded.get("groups") or 1)
    if groups > 1:
        kinds = cut.groups if len(cut.groups) == groups else (2,) + (1,) * (groups - 1)
        settings["groups"] = [_KINDS.get(kind, "full") for kind in kinds]
        settings["sliding_window"] = recorded.get("sliding_window") or _DEFAULTS.sliding_window
    if cut.rows and all(row.pooling for row in cut.rows.values()):
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

    __slots__ = ("accepted", "drafts", "failed", "loaded", "needed", "sent", "whole")

    def __init__(self) -> None:
        self.needed = False
        self.drafts: dict[int, int] = {}
        """Draft tokens of each chosen request, by its number."""
        self.accepted: dict[str, int] = {}
        """How many of them the recorded engine accepted, by the name of the request in the script."""
        self.failed: dict[str, tuple[int, int]] = {}
        """The first and the last block, as a range, that a load reported failed, by name."""
        self.whole: list[str] = []
        """Names of requests whose load failed as a whole."""
        self.loaded: list[str] = []
        """Names of requests whose asynchronous load finished with this step's output."""
        self.sent: list[str] = []
        """Names of ended requests whose blocks were sent with this step's output."""


class _Build:
    """Walks a cut's items once, for one choice of requests."""

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
        self._rows = [row for number, row in sorted(cut.rows.items()) if number in kept]
        """The rows of the chosen requests, in the order in which they came."""
        self._names = {row.number: f"r{place}" for place, row in enumerate(self._rows, 1)}
        """The name of each chosen request in the script."""
        self._size = int(cut.configuration.get("block_size") or _DEFAULTS.block_size)
        """Tokens of a block."""
        self._ops: list[Op | tuple[str, _Slot]] = []
        """The script so far; a step stands in it twice, as ``schedule`` and as ``output``, with its slot."""
        self._running: dict[int, tuple[int, int]] = {}
        """Scheduled tokens and draft tokens of each chosen request in the last step."""
        self._computed: dict[int, int] = {}
        """The engine's count of computed tokens after the last step, by request."""
        self._hits: dict[int, int] = {}
        """Where the hits of its last admission end, local and external together, by request."""
        self._sampled: dict[int, int] = {}
        """How many tokens each request sampled in its last output."""
        self._in_flight: deque[_Slot] = deque(_Slot() for _ in range(cut.undelivered))
        """Scheduled steps without an output, oldest first."""
        self._answered: _Slot | None = None
        """The step whose output came last, until the next step is scheduled."""
        self._failing: list[tuple[int, int]] = []
        """Requests whose load failed since the last output, each with the first position that was not loaded.
        """
        self._needed = False
        """Whether the next step must be in the script although no chosen request runs in it."""
        self._ended: set[int] = set()
        self._finds = str(engine_of(cut).get("connector")).startswith("lmcache")
        """Whether the answers are what the store has after each preemption."""

    def workload(self) -> Workload:
        self._begin()
        for item in self.cut.items:
            kind = type(item)
            if kind is Step:
                self._stepped(item)  # type: ignore[arg-type]
            elif kind is Output:
                self._output(item.sampled)  # type: ignore[union-attr]
            elif kind is Repeat:
                self._repeat(item.times)  # type: ignore[union-attr]
            elif item.request < 0 or item.request in self._kept:  # type: ignore[union-attr]
                self._happened(item)  # type: ignore[arg-type]
        self._finish()
        script = self._script()
        requests = self._requests()
        warm = self._warmers(requests)
        return Workload(
            release=self.cut.seen.release,
            engine=engine_of(self.cut),
            requests={**{name: request for name, (request, _) in warm.items()}, **requests},
            script=(*(op for _, ops in warm.values() for op in ops), *script),
        )

    # --- the script ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Add the chosen requests that were there before the cut, and let them compute what they had."""
        budget = int(self.cut.configuration.get("max_batched_tokens") or _DEFAULTS.max_batched_tokens)
        for row in self._rows:
            if not row.added:
                self._ops.append(Op("add", self._names[row.number]))
                for _ in range(1 + row.sequence // budget):
                    self._pair()

    def _pair(self) -> _Slot:
        slot = _Slot()
        slot.needed = True
        self._ops += [("schedule", slot), ("output", slot)]
        return slot

    def _stepped(self, item: Step) -> None:
        running, kept = self._running, self._kept
        for number in item.dropped:
            running.pop(number, None)
        for number, (tokens, drafts, computed) in item.changed.items():
            if number in kept:
                running[number] = (tokens, drafts)
                self._computed[number] = computed - tokens
        self._schedule(item.changed)

    def _schedule(self, changed: Any = ()) -> None:
        slot = _Slot()
        slot.needed = bool(self._running) or self._needed
        slot.drafts = {number: drafts for number, (_, drafts) in self._running.items() if drafts}
        self._needed = False
        self._answered = None
        total = 0
        for number, (tokens, _) in self._running.items():
            self._computed[number] = self._computed.get(number, 0) + tokens
            total += tokens
        for number in changed:
            if number in self._running:
                row = self.cut.rows[number]
                if self._computed[number] < row.prompt and self._running[number][0] > 1:
                    self._budget(total)
        self._in_flight.append(slot)
        self._ops.append(("schedule", slot))

    def _budget(self, total: int) -> None:
        if total not in self.budgets and len(self.budgets) < 4:
            self.budgets.append(total)

    def _output(self, sampled: dict[int, int]) -> None:
        for number, count in sampled.items():
            if number in self._kept:
                self._sampled[number] = count
        slot = self._in_flight.popleft() if self._in_flight else _Slot()
        for number, drafts in slot.drafts.items():
            accepted = min(drafts, max(0, self._sampled.get(number, 1) - 1))
            if accepted:
                slot.accepted[self._names[number]] = accepted
        for number, first in self._failing:
            self._fail(slot, number, first)
        self._failing = []
        self._answered = slot
        self._ops.append(("output", slot))

    def _fail(self, slot: _Slot, number: int, first: int) -> None:
        end = math.ceil(self._hits.get(number, first + self._size) / self._size)
        slot.needed = True
        slot.failed[self._names[number]] = (first // self._size, max(end, first // self._size + 1))

    def _repeat(self, times: int) -> None:
        idle = not self._running and not self._needed
        most = len(self._in_flight) + 1 if idle else MOST_REPEATS
        for _ in range(min(times, most)):
            self._schedule()
            self._output({})

    def _happened(self, item: Happened) -> None:
        name = self._names.get(item.request, "")
        match item.what:
            case "add" if self._waiting is not None:
                self._waiting.add(item.request)
            case "add" | "chunk":
                self._come(item.request)
            case "abort" | "close":
                if self._waiting is not None and item.request in self._waiting:
                    self._come(item.request)
                if item.request not in self._ended:
                    self._ops.append(Op(item.what, name))
                self._ended.add(item.request)
            case "reset":
                self._ops.append(Op("reset", running=bool(item.tokens)))
            case "admit":
                if self._waiting is not None and item.request in self._waiting:
                    self._come(item.request)
                self._needed = True
                self._hits[item.request] = item.tokens
                self._computed[item.request] = item.tokens
            case "preempt" | "lost":
                self._needed = True
                if item.what == "preempt":
                    self._pool_was_full(item)
                self._running.pop(item.request, None)
                self._computed.pop(item.request, None)
            case "failed":
                self._failing.append((item.request, item.tokens))
            case "loaded" | "sent":
                self._transferred(item.what, item.request, name)

    def _come(self, number: int) -> None:
        """The request, or its next chunk, comes now."""
        if self._waiting is not None:
            self._waiting.discard(number)
        self._ops.append(Op("add", self._names[number]))
        self._needed = True

    def _transferred(self, what: str, number: int, name: str) -> None:
        """A transfer finished with the last output, or with the output of an empty step, of which no event
        tells."""
        slot = self._answered or self._pair()
        slot.needed = True
        (slot.loaded if what == "loaded" else slot.sent).append(name)
        for failed, first in self._failing:
            self._fail(slot, failed, first)
        self._failing = []

    def _pool_was_full(self, item: Happened) -> None:
        held = sum(
            math.ceil(tokens / self._size)
            for number, tokens in self._computed.items()
            if number in self._running or number == item.request
        )
        if held + 1 not in self.full_pools and len(self.full_pools) < 6:
            self.full_pools.append(held + 1)

    def _finish(self) -> None:
        """Answer what is in flight, and go on for a while, so that figures of the end can be read."""
        for number in sorted(self._waiting or ()):
            self._come(number)
        while self._in_flight:
            self._output({})
        left = [row for row in self._rows if row.number not in self._ended]
        if left:
            for _ in range(48):
                self._pair()

    def _script(self) -> tuple[Op, ...]:
        script: list[Op] = []
        for op in self._ops:
            if isinstance(op, Op):
                script.append(op)
                continue
            do, slot = op
            if not slot.needed:
                continue
            if do == "schedule":
                script.append(Op("schedule"))
            else:
                script.append(
                    Op(
                        "output",
                        accepted=slot.accepted,
                        failed=slot.failed,
                        failed_whole=tuple(slot.whole),
                        loaded=tuple(slot.loaded),
                        sent=tuple(slot.sent),
                    )
                )
        return tuple(script)

    # --- the requests -------------------------------------------------------------------------------------

    def _requests(self) -> dict[str, Request]:
        sequences: dict[int, tuple[Segment, ...]] = {}
        built: dict[str, Request] = {}
        classes: dict[tuple[int, ...], str] = {}
        for row in self._rows:
            name = self._names[row.number]
            prompt = self._prompt(row, name, sequences)
            sequences[row.number] = (*prompt, (name + OUT, 1 << 20))
            lengths = [row.sequence, *row.chunks]
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
                answers=tuple(row.found if self._finds else row.answers),
                hold=row.hold,
            )
        return built

    def _prompt(self, row: Row, name: str, sequences: dict[int, tuple[Segment, ...]]) -> tuple[Segment, ...]:
        """The prompt: what it shares with an earlier request by recorded hashes, then its own tokens."""
        shared, donor = 0, -1
        for other, each in ((o, self.cut.rows[o]) for o in sequences):
            common = [end for end, hash_id in row.hashes.items() if each.hashes.get(end) == hash_id]
            if max(common, default=0) > shared:
                shared, donor = max(common), other
        shared = min(shared, row.sequence)
        begins = _first(sequences[donor], shared) if donor >= 0 else ()
        own = row.sequence - shared
        return (*begins, (name, own)) if own else begins

    def _warmers(self, requests: dict[str, Request]) -> dict[str, tuple[Request, list[Op]]]:
        """Requests that cache the prefixes which the chosen requests hit and none of them had cached."""
        warm: dict[str, tuple[Request, list[Op]]] = {}
        for place, row in enumerate(self._rows):
            if row.hit <= 0:
                continue
            prompt = requests[self._names[row.number]].prompt
            earlier = [requests[self._names[each.number]].prompt for each in self._rows[:place]]
            earlier += [request.prompt for request, _ in warm.values()]
            if any(_common(prompt, other) >= row.hit for other in earlier):
                continue
            name = f"w{len(warm) + 1}"
            request = Request(prompt=(*_first(prompt, row.hit), (name, 1)), max_tokens=1)
            budget = int(self.cut.configuration.get("max_batched_tokens") or _DEFAULTS.max_batched_tokens)
            steps = [op for _ in range(2 + row.hit // budget) for op in (Op("schedule"), Op("output"))]
            warm[name] = (request, [Op("add", name), *steps])
            self.assumed.append(
                f"The {row.hit} tokens that a request {HIT_OF_UNSEEN}; another one caches them here."
            )
        return warm


def _isolation(row: Row, classes: dict[tuple[int, ...], str]) -> tuple[str, int]:
    """Names for a request's classes: its salt's and its adapter's."""
    if not row.isolation or not any(row.isolation[:2]):
        return "", 0
    salt, lora = row.isolation[:2]
    name = classes.setdefault((0, salt), f"s{len(classes) + 1}") if salt else ""
    number = int(classes.setdefault((1, lora), str(len(classes) + 1))) if lora else 0
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


def require_rebuildable(cut: Cut) -> None:
    """Raise :class:`NotRebuilt` for a journal without steps before its finding, or with wrong settings."""
    recorded = cut.configuration
    if not isinstance(recorded.get("groups") or 1, int):
        raise NotRebuilt("The journal's number of KV cache groups is no number.")
    settings = {
        name: recorded[name] for name in (*SETTINGS, "sliding_window") if recorded.get(name) is not None
    }
    require_types(settings, v0=_is_v0(recorded))
    if not any(type(item) in (Step, Repeat) for item in cut.items):
        raise NotRebuilt("The journal has no step before the finding: its earlier segments are gone.")
