"""What each block of the first KV cache group really contains, from a tape: a device that only copies tokens.

A slot contains the token prefix whose KV was written into it, or nothing of use. A position that a step
executes is written with its prefix if every slot below it, in the request's own block table, contains the
right prefix; otherwise its KV is garbage. Rejected drafts and failed loads leave garbage.

From this follows whether a history is one in which the engine itself went wrong: a block stays in the prefix
cache without the KV that its hash stands for (*bad cached block*), a request is given such a block (*bad
hit*), or a token is handed to the client that was sampled from garbage (*bad token*).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.differential import tape
from tests.differential.tape import Cached, Fact, State

GARBAGE = 0
"""What a slot contains that no request may read."""
WAITS_FOR_LOAD = "WAITING_FOR_REMOTE_KVS"


class Prefixes:
    """A number for each token prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def of(self, sequence: Iterable[int]) -> list[int]:
        """The number of every prefix of a sequence, the shortest first."""
        numbers: list[int] = []
        last = GARBAGE
        for token in sequence:
            last = self._numbers.setdefault((last, token), len(self._numbers) + 1)
            numbers.append(last)
        return numbers


@dataclass
class Admission:
    """A request's blocks and hits, as the device sees them."""

    request_id: str
    blocks: tuple[int, ...]
    local: int
    external: int
    asynchronous: bool
    sequence: tuple[int, ...]
    failures: int = 0
    """Failed loads after which the scheduler moved the request back."""
    loaded: bool = False
    checked: bool = False


@dataclass
class Work:
    """One request's part of a step."""

    admission: Admission
    start: int
    tokens: int
    drafts: int
    blocks: tuple[int, ...]
    sequence: tuple[int, ...]
    failures: int
    """The admission's failures when the step was scheduled."""


@dataclass
class Step:
    """What the device does for one `schedule()`: forget what new blocks contained, then the work."""

    new_blocks: list[int] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)


@dataclass
class Device:
    """All slots, and what went wrong."""

    block_size: int
    prefixes: Prefixes = field(default_factory=Prefixes)
    slots: dict[int, list[int]] = field(default_factory=dict)
    flight: list[Step] = field(default_factory=list)
    admissions: dict[str, Admission] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """The tokens that the device knows of a request."""
    failed_blocks: dict[str, set[int]] = field(default_factory=dict)
    """Blocks of an asynchronous load that were reported invalid before the load finished."""
    bad_cached: set[int] = field(default_factory=set)
    bad_hits: set[str] = field(default_factory=set)
    bad_tokens: set[str] = field(default_factory=set)
    bad_reads: set[str] = field(default_factory=set)
    """Requests of which a step read positions without their KV, other than positions of its own load that
    failed: the engine drops what such a step computes."""
    states: dict[str, State] = field(default_factory=dict)
    _next: Step = field(default_factory=Step)

    @property
    def went_wrong(self) -> bool:
        return bool(self.bad_cached or self.bad_hits or self.bad_tokens)

    def read(self, recorded: tape.Tape) -> Device:
        self._hashes = recorded.prefixes
        for fact in recorded.facts:
            self._read(fact)
        return self

    _hashes: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def _read(self, fact: Fact) -> None:
        match fact:
            case tape.Added():
                self.states[fact.request_id] = fact.after
            case tape.Allocated():
                self._admitted(fact)
            case tape.Scheduled():
                self._scheduled(fact)
            case tape.Output():
                self._output(fact)
            case tape.Preempted():
                state = self.states[fact.request_id]
                self.states[fact.request_id] = State("PREEMPTED", 0, state.tokens, state.prompt_tokens, ())
            case tape.Aborted():
                self.states.update(fact.after)
                self._judge(fact.cached)
            case _:
                pass

    # What the engine orders.

    def _admitted(self, fact: tape.Allocated) -> None:
        admission = Admission(
            fact.request_id,
            fact.blocks,
            fact.local,
            fact.external,
            fact.asynchronous,
            fact.sequence,
        )
        self.admissions[fact.request_id] = admission
        self.failed_blocks.pop(fact.request_id, None)
        self._next.new_blocks += fact.blocks[-(-fact.local // self.block_size) :]

    def _scheduled(self, fact: tape.Scheduled) -> None:
        step = self._next
        for name, (tokens, drafts) in fact.rows.items():
            admission = self.admissions[name]
            blocks = fact.blocks[name]
            step.new_blocks += blocks[len(admission.blocks) :]
            admission.blocks = blocks
            sequence = fact.sequences[name]
            step.works[name] = Work(
                admission, fact.computed[name], tokens, drafts, blocks, sequence, admission.failures
            )
            state = self.states[name]
            self.states[name] = State(
                "RUNNING", fact.computed[name] + tokens, state.tokens, state.prompt_tokens, blocks
            )
        self.flight.append(step)
        self._next = Step()
        self._judge(fact.cached)

    # What the device does.

    def _output(self, fact: tape.Output) -> None:
        step = self.flight.pop(0)
        for block in step.new_blocks:
            self.slots[block] = [GARBAGE] * self.block_size
        loading = {
            *fact.received,
            *(n for n, s in fact.before.items() if s.status.startswith("WAITING_FOR_R")),
        }
        for name in loading:
            self.failed_blocks.setdefault(name, set()).update(fact.invalid_blocks)
        for work in step.works.values():
            self._load(work, fact.invalid_blocks)
        for name, work in step.works.items():
            failed = work.failures < work.admission.failures or self._fails(fact, name)
            # A life that has ended: no request has its blocks now, and the scheduler drops its output.
            failed |= bool(fact.invalid_blocks.intersection(work.blocks)) and not fact.returned.get(name)
            sane = self._execute(work, fact.sampled.get(name, ()), failed)
            if not sane and fact.returned.get(name):
                self.bad_tokens.add(name)
        for name in fact.received - fact.failed:
            admission = self.admissions.get(name)
            if admission is not None and not admission.loaded:
                self._fill(admission, self.failed_blocks.pop(name, set()))
        for name, before in fact.before.items():
            if name in self.admissions and fact.invalid_blocks.intersection(before.blocks):
                self.admissions[name].failures += 1
        self.states.update(fact.after)
        self._judge(fact.cached)

    def _load(self, work: Work, invalid: frozenset[int]) -> None:
        admission = work.admission
        if admission.external and not admission.asynchronous and not admission.loaded:
            self._fill(admission, set(invalid))

    def _fill(self, admission: Admission, invalid: set[int]) -> None:
        """A load writes its blocks, except those that it reports invalid."""
        admission.loaded = True
        numbers = self.prefixes.of(admission.sequence)
        for position in range(admission.local, admission.local + admission.external):
            block = admission.blocks[position // self.block_size]
            if block not in invalid:
                self._write(block, position, numbers[position])

    def _write(self, block: int, position: int, number: int) -> None:
        slots = self.slots.setdefault(block, [GARBAGE] * self.block_size)
        slots[position % self.block_size] = number

    def _contains(self, blocks: tuple[int, ...], numbers: list[int], end: int) -> bool:
        """Whether the blocks contain the first ``end`` prefixes."""
        size = self.block_size
        for start in range(0, end, size):
            count = min(size, end - start)
            slots = self.slots.get(blocks[start // size], ())
            if list(slots[:count]) != numbers[start : start + count]:
                return False
        return True

    def _fails(self, fact: tape.Output, name: str) -> bool:
        before = fact.before.get(name)
        return before is not None and bool(fact.invalid_blocks.intersection(before.blocks))

    def _execute(self, work: Work, sampled: tuple[int, ...], failed: bool) -> bool:
        """Whether the positions were executed over valid KV."""
        name, end = work.admission.request_id, work.start + work.tokens - work.drafts
        known = [*work.sequence, *self.tokens.get(name, [])[len(work.sequence) :]][:end]
        complete = len(known) == end
        known = [*known, *[-1] * (end - len(known)), *sampled]
        self.tokens[name] = known
        rejected = work.drafts - (len(sampled) - 1) if work.drafts and sampled else 0
        last = work.start + work.tokens - rejected
        numbers = self.prefixes.of(known)
        sane = self._contains(work.blocks, numbers, min(work.start, len(numbers)))
        if not sane and not failed:
            self.bad_reads.add(name)
        sane = sane and complete
        if not work.admission.checked:
            work.admission.checked = True
            if not self._contains(work.blocks, numbers, work.admission.local):
                self.bad_hits.add(name)
        for position in range(work.start, work.start + work.tokens):
            block = work.blocks[position // self.block_size]
            right = sane and position < last and position < len(numbers)
            self._write(block, position, numbers[position] if right else GARBAGE)
        for later in (step.works.get(name) for step in self.flight) if rejected else ():
            # The device goes on behind the accepted drafts; the scheduler did not know them yet.
            if later is not None and later.admission is work.admission and later.failures == work.failures:
                later.start -= rejected
        return sane

    # What is left in the prefix cache.

    def _judge(self, cached: Cached) -> None:
        """Note the cached blocks without their KV that nothing will fill."""
        to_come = {block for step in (*self.flight, self._next) for block in self._filled(step)}
        for state in self.states.values():
            if not state.finished:
                to_come.update(state.blocks[state.computed // self.block_size :])
        for block, block_hash in cached.items():
            expected = self._hashes.get(block_hash)
            if expected is None or block in to_come:
                continue
            numbers = self.prefixes.of(expected)[-self.block_size :]
            if self.slots.get(block, []) != numbers:
                self.bad_cached.add(block)

    def _filled(self, step: Step) -> Iterable[int]:
        for work in step.works.values():
            first = work.start // self.block_size
            yield from work.blocks[first : (work.start + work.tokens - 1) // self.block_size + 1]
            admission = work.admission
            if admission.external and not admission.loaded:
                yield from work.blocks[admission.local // self.block_size :]
