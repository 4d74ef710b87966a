"""Shrinks a workload to what its finding needs: delta debugging over requests, operations and numbers.

Every pass yields smaller candidates, largest cuts first. The first candidate that still leads to the finding
replaces the workload, and the pass goes on from there. The passes are repeated until none of them helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from ..traffic.engine_setup import EngineSetup
from ..traffic.script import OUT, Op, Request, Segment, Workload
from .drive import Outcome
from .workers import OutOfTime, Pool

_DEFAULTS = EngineSetup()
_KEPT_SETTINGS = ("scheduler", "scheduler_class", "connector", "asynchronous", "chunk_tokens")
Item = TypeVar("Item")
replace = msgspec.structs.replace


class Shrinker:
    """The smallest workload so far, and the search for a smaller one.

    ``wording``: of the finding's message, see ``checks.wording``. ``on_smaller`` is called with every smaller
    workload. ``interrupted``: the search was ended early.
    """

    def __init__(
        self,
        workload: Workload,
        outcome: Outcome,
        wording: str,
        pool: Pool,
        on_smaller: Callable[[Workload], None] | None = None,
    ) -> None:
        assert outcome.check is not None
        self.best = workload
        """The smallest workload so far."""
        self.outcome = outcome
        """What it led to."""
        self.interrupted = False
        self._finding = outcome.check.finding
        """The id of the finding to which each smaller workload must lead."""
        self._probe = outcome.check.probe
        """The figure of the engine by which a test shows the finding."""
        self._wording = wording
        self._pool = pool
        self._on_smaller = on_smaller

    def run(self) -> None:
        """Shrink until nothing helps, the time is up, or the user interrupts."""
        try:
            while sum(step() for step in self._passes()):
                pass
        except (OutOfTime, KeyboardInterrupt) as end:
            self.interrupted = isinstance(end, KeyboardInterrupt)

    def _passes(self) -> Iterator[Callable[[], bool]]:
        yield lambda: self._repeat(_after_the_check, self.outcome)
        yield lambda: self._drop(_request_names, _without_requests)
        yield lambda: self._drop(_units, _with_units)
        for each in (_fewer_details, _simpler_requests, _shorter_outputs, _shorter_prompts, _simpler_engine):
            yield lambda each=each: self._repeat(each)  # type: ignore[misc]

    def _repeat(self, candidates: Callable[..., Iterator[Workload]], *more: Any) -> bool:
        """Take the first candidate that holds, until none does."""
        helped = False
        while self._take(candidates(self.best, *more)):
            helped = True
        return helped

    def _drop(
        self,
        parts: Callable[[Workload], Sequence[Item]],
        keeping: Callable[[Workload, Sequence[Item]], Iterator[Workload]],
    ) -> bool:
        """Delta debugging: leave out ever smaller runs of parts."""
        helped, size = False, max(1, len(parts(self.best)) // 2)
        while True:
            now = list(parts(self.best))
            size = min(size, max(1, len(now)))
            smaller = (
                candidate
                for start in range(0, len(now), size)
                for candidate in keeping(self.best, now[:start] + now[start + size :])
            )
            if self._take(smaller):
                helped = True
            elif size == 1:
                return helped
            else:
                size = max(1, size // 2)

    def _take(self, candidates: Iterator[Workload]) -> bool:
        found = self._pool.first(candidates, self._finding, self._holds)
        if found is None:
            return False
        self.best, self.outcome = found
        if self._on_smaller is not None:
            self._on_smaller(self.best)
        return True

    def _holds(self, _: Workload, outcome: Outcome) -> bool:
        check = outcome.check
        return (
            check is not None
            and check.probe == self._probe
            and self._wording in outcome.wordings(self._finding)
        )


# --- passes -----------------------------------------------------------------------------------------------


def _after_the_check(workload: Workload, outcome: Outcome) -> Iterator[Workload]:
    after = outcome.check.after if outcome.check is not None else -1
    if 0 <= after < len(workload.script):
        yield replace(workload, script=workload.script[:after])


def _request_names(workload: Workload) -> Sequence[str]:
    return tuple(workload.requests)


def _without_requests(workload: Workload, names: Sequence[str]) -> Iterator[Workload]:
    """The workload with fewer requests, with the same pool and with smaller ones."""
    smaller = workload.keeping(set(names))
    if not names:
        return
    yield smaller
    blocks = int(workload.engine.get("blocks", _DEFAULTS.blocks))
    if len(names) > 8:
        share = len(names) / len(workload.requests)
        yield _with(smaller, "blocks", max(2, round(blocks * share)))
        return
    size = int(workload.engine.get("block_size", _DEFAULTS.block_size))
    least = max(math.ceil((each.prompt_tokens + 1) / size) for each in smaller.requests.values()) + 1
    stride = max(1, (blocks - least) // 24)
    for pool in range(least, blocks, stride):
        yield _with(smaller, "blocks", pool)


Unit = tuple[Op, ...]


def _units(workload: Workload) -> list[Unit]:
    """The script in parts that may be left out: a step with its output, or one operation."""
    units: list[Unit] = []
    for op in workload.script:
        if op.do == "output" and units and units[-1][0].do == "schedule" and len(units[-1]) == 1:
            units[-1] = (*units[-1], op)
        else:
            units.append((op,))
    return units


def _with_units(workload: Workload, units: Sequence[Unit]) -> Iterator[Workload]:
    yield replace(workload, script=tuple(op for unit in units for op in unit))


def _fewer_details(workload: Workload) -> Iterator[Workload]:
    """Outputs that report less; resets of idle engines."""
    for place, op in enumerate(workload.script):
        for field in ("accepted", "failed", "failed_whole", "loaded", "sent"):
            value = getattr(op, field)
            for name in value:
                fewer: Any = tuple(n for n in value if n != name)
                if isinstance(value, dict):
                    fewer = {n: value[n] for n in fewer}
                yield _at(workload, place, replace(op, **{field: fewer}))
        for name, count in op.accepted.items():
            if count > 1:
                yield _at(workload, place, replace(op, accepted={**op.accepted, name: 1}))
        for name, (first, end) in op.failed.items():
            for less in dict.fromkeys(((first, first + 1), (end - 1, end))):
                if less != (first, end):
                    yield _at(workload, place, replace(op, failed={**op.failed, name: less}))
        if op.running:
            yield _at(workload, place, replace(op, running=False))


def _simpler_requests(workload: Workload) -> Iterator[Workload]:
    """Requests without what they may not need, and simpler answers of the connector."""
    for name, request in workload.requests.items():
        for plain in (
            {"salt": ""},
            {"lora": 0},
            {"priority": 0},
            {"hold": False},
            {"chunks": ()},
            {"resumable": False, "chunks": ()},
            {"stop_at": None},
        ):
            if any(getattr(request, field) != value for field, value in plain.items()):
                yield _request(workload, name, replace(request, **plain))
        for place in range(len(request.answers)):
            fewer = (*request.answers[:place], *request.answers[place + 1 :])
            yield _request(workload, name, replace(request, answers=fewer))
        yield from _simpler_answers(workload, name, request)


def _simpler_answers(workload: Workload, name: str, request: Request) -> Iterator[Workload]:
    size = int(workload.engine.get("block_size", _DEFAULTS.block_size))
    for place, answer in enumerate(request.answers):
        if answer is None:
            continue
        tokens, asynchronous = answer if isinstance(answer, tuple) else (answer, False)
        if asynchronous:
            yield _answered(workload, name, place, tokens)
        chunk = int(workload.engine.get("chunk_tokens", 1))  # LMCache's store has whole chunks
        for fewer in _smaller_numbers(tokens, max(size, chunk), least=1):
            if fewer % chunk == 0:
                yield _answered(workload, name, place, (fewer, True) if asynchronous else fewer)


def _shorter_outputs(workload: Workload) -> Iterator[Workload]:
    for name, request in workload.requests.items():
        for field in ("max_tokens", "stop_at"):
            now = getattr(request, field)
            if now is not None:
                for fewer in dict.fromkeys((1, 2, 3, 4, 8, now // 2, now - 1)):
                    if 0 < fewer < now:
                        yield _request(workload, name, replace(request, **{field: fewer}))
        yield from _prompts_for_outputs(workload, name, request)


def _prompts_for_outputs(workload: Workload, name: str, request: Request) -> Iterator[Workload]:
    """Output tokens that are prompt tokens instead: they take up as much of the pool, in fewer steps."""
    family, count = request.prompt[-1]
    most = request.max_tokens
    for more in dict.fromkeys((most - 1, most - 2, most // 2, 16, 8, 4, 2, 1)):
        if 0 < more < request.max_tokens and request.stop_at is None:
            prompt = (*request.prompt[:-1], (family, count + more))
            fewer = replace(request, prompt=prompt, max_tokens=request.max_tokens - more)
            yield _request(workload, name, fewer)


def _shorter_prompts(workload: Workload) -> Iterator[Workload]:
    """Prompts with fewer segments, and shorter ones."""
    size = int(workload.engine.get("block_size", _DEFAULTS.block_size))
    for name, request in workload.requests.items():
        prompt = request.prompt
        if len(prompt) > 1 or prompt[0][0] not in (name, *_families(workload, name)):
            yield _request(workload, name, replace(request, prompt=((name, request.prompt_tokens),)))
        for place in range(len(prompt)):
            if len(prompt) > 1:
                yield _request(workload, name, replace(request, prompt=prompt[:place] + prompt[place + 1 :]))
            family, now = prompt[place]
            for fewer in _smaller_numbers(now, size, least=1):
                shorter = (*prompt[:place], (family, fewer), *prompt[place + 1 :])
                yield _request(workload, name, replace(request, prompt=shorter))
                if len(workload.requests) > 1:
                    yield _everywhere(workload, (family, now), (family, fewer))
        for place, chunk in enumerate(request.chunks):
            for fewer in _smaller_numbers(chunk[0][1], size, least=1):
                chunks = (*request.chunks[:place], ((chunk[0][0], fewer),), *request.chunks[place + 1 :])
                yield _request(workload, name, replace(request, chunks=chunks))


def _families(workload: Workload, name: str) -> set[str]:
    """The families in the prompts of the other requests."""
    others = (request for other, request in workload.requests.items() if other != name)
    return {family for request in others for family, _ in request.prompt}


def _simpler_engine(workload: Workload) -> Iterator[Workload]:
    """Default settings, synchronous scheduling, and the smallest pool and step budget."""
    engine = workload.engine
    for name in engine:
        if name not in _KEPT_SETTINGS:
            yield replace(workload, engine={n: v for n, v in engine.items() if n != name})
    if "max_batched_tokens" in engine:
        larger = replace(workload, engine={n: v for n, v in engine.items() if n != "max_batched_tokens"})
        yield from (_shorter_runs(larger, most) for most in (0, 1, 2))
    if engine.get("asynchronous"):
        yield replace(workload, engine={n: v for n, v in engine.items() if n != "asynchronous"})
    if engine.get("connector") == "scripted" and not any(r.answers for r in workload.requests.values()):
        yield replace(workload, engine={n: v for n, v in engine.items() if n != "connector"})
    if "blocks" in engine:
        now = engine["blocks"]
        for fewer in dict.fromkeys((16, 32, 64, now // 2, now - now // 4, now - 1)):
            if 2 <= fewer < now:
                yield _with(workload, "blocks", fewer)
    for name, values in (
        ("max_batched_tokens", (64, 128, 256)),
        ("max_running", (1, 2, 4)),
        ("drafts", (1, 2)),
    ):
        for value in values:
            if value < engine.get(name, 0):
                yield _with(workload, name, value)


def _shorter_runs(workload: Workload, most: int) -> Workload:
    """At most so many steps without details in a row: larger steps need fewer of them."""
    units: list[Unit] = []
    run = 0
    for unit in _units(workload):
        plain = unit[0].do in ("schedule", "output") and not any(op.details for op in unit)
        run = run + 1 if plain else 0
        if run <= most:
            units.append(unit)
    return replace(workload, script=tuple(op for unit in units for op in unit))


# --- small changes ------------------------------------------------------------------------------------------


def _smaller_numbers(now: int, size: int, least: int) -> Iterator[int]:
    """Smaller numbers that read well first: few blocks, then half, then one block or one token less."""
    blocks = now // size
    tried = [size, size + 1, 2 * size, 2 * size + 1, 3 * size, 4 * size, blocks // 2 * size, blocks * size]
    tried += [now // 2, now - size, now - 1]
    for fewer in dict.fromkeys(tried):
        if least <= fewer < now:
            yield fewer


def _with(workload: Workload, setting: str, value: Any) -> Workload:
    return replace(workload, engine={**workload.engine, setting: value})


def _at(workload: Workload, place: int, op: Op) -> Workload:
    return replace(workload, script=(*workload.script[:place], op, *workload.script[place + 1 :]))


def _request(workload: Workload, name: str, request: Request) -> Workload:
    return replace(workload, requests={**workload.requests, name: request})


def _answered(workload: Workload, name: str, place: int, answer: Any) -> Workload:
    request = workload.requests[name]
    answers = (*request.answers[:place], answer, *request.answers[place + 1 :])
    return _request(workload, name, replace(request, answers=answers))


def _everywhere(workload: Workload, segment: Segment, shorter: Segment) -> Workload:
    """The same shorter segment in every prompt that has it."""
    requests = {
        name: replace(request, prompt=tuple(shorter if each == segment else each for each in request.prompt))
        for name, request in workload.requests.items()
    }
    return replace(workload, requests=requests)


def renamed(workload: Workload) -> Workload:
    """The workload with its requests called r1, r2, ... in the order in which they are added."""
    order = dict.fromkeys(op.request for op in workload.script if op.do == "add")
    names = {name: f"r{place}" for place, name in enumerate(order, 1)}
    families: dict[str, str] = {}
    for name in order:
        for of, _ in workload.requests[name].prompt:
            if OUT not in of and of not in families:
                taken = names[name] in families.values()
                families[of] = f"{names[name]} part {len(families)}" if taken else names[name]

    def family(name: str) -> str:
        if OUT in name:
            of = name.removesuffix(OUT)
            return names.get(of, f"{of} gone") + OUT
        return families.get(name, name)

    def segments(prompt: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return tuple((family(name), count) for name, count in prompt)

    requests = {
        names[name]: replace(
            workload.requests[name],
            prompt=segments(workload.requests[name].prompt),
            chunks=tuple(
                tuple((f"{names[name]} chunk {place}", count) for _, count in chunk)
                for place, chunk in enumerate(workload.requests[name].chunks, 1)
            ),
        )
        for name in order
    }
    return replace(workload, requests=requests, script=tuple(op.renamed(names) for op in workload.script))
