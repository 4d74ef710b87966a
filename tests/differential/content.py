"""What each block of each KV cache group really contains, from a tape: a device that only copies tokens.

A slot contains the token prefix whose KV was written into it, or nothing of use. A position that a step
executes is written with its prefix if every slot that it reads, in the request's own block tables, contains
the right prefix; otherwise its KV is garbage. A group of full attention reads all slots below, a window the
last ones, and a group of states the one checkpoint that the last step left. Rejected drafts and failed loads
leave garbage.

From this follows whether a history is one in which the engine itself went wrong: a block stays in the prefix
cache without the KV that its hash stands for (*bad cached block*), a request is given such a block (*bad
hit*), or a token is handed to the client that was sampled from garbage (*bad token*).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.differential import tape
from tests.differential.tape import Cached, Fact, Group, State, Tables

GARBAGE = 0
"""What a slot contains that no request may read."""
NO_TOKEN = -1
"""In the place of a token that the device does not know."""
WAITS_FOR_LOAD = "WAITING_FOR_REMOTE_KVS"
NOT_KNOWN = -1
"""The version of weights of KV that a load brought, of an admission after the first change."""


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
    tables: Tables
    local: int
    external: int
    asynchronous: bool
    sequence: tuple[int, ...]
    failures: int = 0
    """Failed loads after which the scheduler moved the request back."""
    loaded: bool = False
    checked: bool = False
    ordered: Tables = ()
    """The tables at the admission, into which its load goes."""
    version: int = 0
    """How often the weights had changed."""
    state_column: int | None = None
    """The place in a table of states where the last step left the state; None: nothing was executed."""


@dataclass
class Work:
    """One request's part of a step."""

    admission: Admission
    start: int
    tokens: int
    drafts: int
    tables: Tables
    sequence: tuple[int, ...]
    failures: int
    """The admission's failures when the step was scheduled."""
    end: int
    """Where the scheduler expects the step to end."""
    version: int = 0
    """How often the weights had changed when the step was scheduled."""


@dataclass
class Step:
    """What the device does for one `schedule()`: forget what new blocks contained, then the work."""

    new_blocks: list[int] = field(default_factory=list)
    works: dict[str, Work] = field(default_factory=dict)


@dataclass
class Device:
    """All slots, and what went wrong."""

    layout: tuple[Group, ...] = ()
    null_block: int = -1
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
    version: int = 0
    """How often the weights have changed."""
    oldest: dict[int, list[int]] = field(default_factory=dict)
    """By block, the oldest version of weights in the chain of each slot."""
    sampled: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """The version under which each token was sampled that a client got, and the oldest in what was read."""
    stale_hits: set[str] = field(default_factory=set)
    """Requests that hit KV of older weights."""
    states: dict[str, State] = field(default_factory=dict)
    _next: Step = field(default_factory=Step)

    @property
    def went_wrong(self) -> bool:
        return bool(self.bad_cached or self.bad_hits or self.bad_tokens)

    def read(self, recorded: tape.Tape) -> Device:
        self._hashes = recorded.prefixes
        self.layout, self.null_block = recorded.layout, recorded.null_block
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
            case tape.WeightsChanged():
                self.version += 1
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
            fact.tables,
            fact.local,
            fact.external,
            fact.asynchronous,
            fact.sequence,
            ordered=fact.tables,
            version=self.version,
        )
        self.admissions[fact.request_id] = admission
        self.failed_blocks.pop(fact.request_id, None)
        for group, table in zip(self.layout, fact.tables, strict=True):
            self._next.new_blocks += table[-(-fact.local // group.block_size) :]

    def _scheduled(self, fact: tape.Scheduled) -> None:
        step = self._next
        for name, (tokens, drafts) in fact.rows.items():
            admission = self.admissions[name]
            tables = fact.tables[name]
            for table, old in zip(tables, admission.tables, strict=True):
                step.new_blocks += {*table}.difference(old)
            admission.tables = tables
            start, sequence = fact.computed[name], fact.sequences[name]
            step.works[name] = Work(
                admission,
                start,
                tokens,
                drafts,
                tables,
                sequence,
                admission.failures,
                start + tokens,
                self.version,
            )
            state = self.states[name]
            self.states[name] = State("RUNNING", start + tokens, state.tokens, state.prompt_tokens, tables)
        self.flight.append(step)
        self._next = Step()
        self._judge(fact.cached)

    # What the device does.

    def _output(self, fact: tape.Output) -> None:
        step = self.flight.pop(0)
        for block in step.new_blocks:
            self.slots[block] = []
            self.oldest.pop(block, None)
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
            if fact.invalid_blocks.intersection(*work.tables[:1]) and not fact.returned.get(name):
                failed = True
                work.admission.failures += 1  # its later steps' output is dropped, too
            oldest = self._oldest(work, work.start)
            self.sampled.setdefault(name, []).extend([(work.version, oldest)] * fact.returned.get(name, 0))
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
        start, end = admission.local, admission.local + admission.external
        for group, table in zip(self.layout, admission.ordered, strict=True):
            for position in range(end - 1 if group.kind == "state" else start, end):
                block = table[position // group.block_size]
                if block not in invalid:
                    of_load = NOT_KNOWN if admission.version else 0
                    self._write(group, block, position, numbers[position], of_load)

    def _write(self, group: Group, block: int, position: int, number: int, oldest: int) -> None:
        """Write the KV of a position into its slot, or its state into the block."""
        size = 1 if group.kind == "state" else group.block_size
        if block != self.null_block:
            slots = self.slots.get(block) or [GARBAGE] * size
            slots[position % size] = number
            self.slots[block] = slots
            self.oldest.setdefault(block, [0] * size)[position % size] = oldest

    def _oldest(self, work: Work, end: int) -> int:
        """The oldest version in the chain of what a token at position ``end`` reads, or the step's own."""
        found = [work.version]
        for group, table in zip(self.layout, work.tables, strict=True):
            size, column = group.block_size, work.admission.state_column
            if group.kind == "other" or not end:
                continue
            if group.kind == "state":
                found += self.oldest.get(table[(end - 1) // size if column is None else column], ())
                continue
            for position in range(group.first_read(end), end):
                found.append(self.oldest.get(table[position // size], [0] * size)[position % size])
        return min(found)

    def _is_stale(self, work: Work) -> bool:
        """Whether the local hit has a position of older weights, for certain: none before it was loaded."""
        end, version = work.admission.local, work.admission.version
        found: list[tuple[int, int]] = []
        for group, table in zip(self.layout, work.tables, strict=True):
            size = group.block_size
            if group.kind == "state" and end:
                found += [
                    ((end - 1) // size * size, each) for each in self.oldest.get(table[(end - 1) // size], ())
                ]
            for position in range(group.first_read(end), end) if group.kind not in ("state", "other") else ():
                slots = self.oldest.get(table[position // size], [0] * size)
                found.append((position, slots[position % size]))
        chain = version
        for _, oldest in sorted(found):
            chain = min(chain, oldest)
            if 0 <= chain < version:
                return True
        return False

    def _reads(self, work: Work, numbers: list[int], start: int) -> bool:
        """Whether each group contains what a token at position ``start`` reads."""
        return all(
            self._contains(group, table, work.admission.state_column, numbers, start)
            for group, table in zip(self.layout, work.tables, strict=True)
        )

    def _contains(
        self, group: Group, table: tuple[int, ...], column: int | None, numbers: list[int], end: int
    ) -> bool:
        size = group.block_size
        if group.kind == "other":
            return True
        if group.kind == "state":
            block = table[(end - 1) // size if column is None else column]
            return not end or self.slots.get(block) == [numbers[end - 1]]
        first = group.first_read(end) // size * size
        for start in range(first, end, size):
            slots = self.slots.get(table[start // size], ())
            low, high = max(start, group.first_read(end)), min(start + size, end)
            if list(slots[low - start : high - start]) != numbers[low:high]:
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
        known = [*known, *[NO_TOKEN] * (end - len(known)), *sampled]
        self.tokens[name] = known
        rejected = work.drafts - (len(sampled) - 1) if work.drafts and sampled else 0
        last = work.start + work.tokens - rejected
        numbers = self.prefixes.of(known)
        sane = self._reads(work, numbers, min(work.start, len(numbers)))
        # Up to 0.31 a pooled request goes on behind its prompt until its output comes, which nobody reads.
        if not sane and not failed and NO_TOKEN not in known[: work.start]:
            self.bad_reads.add(name)
        sane = sane and complete
        if not work.admission.checked:
            work.admission.checked = True
            if not self._reads(work, numbers, work.admission.local):
                self.bad_hits.add(name)
            if self._is_stale(work):
                self.stale_hits.add(name)
        oldest = self._oldest(work, work.start)
        for group, table in zip(self.layout, work.tables, strict=True):
            self._write_step(work, group, table, numbers if sane else [], min(last, len(numbers)), oldest)
        work.admission.state_column = (work.end - 1) // max(each.block_size for each in self.layout)
        for later in (step.works.get(name) for step in self.flight) if rejected else ():
            # The device goes on behind the accepted drafts; the scheduler did not know them yet.
            if later is not None and later.admission is work.admission and later.failures == work.failures:
                later.start -= rejected
        return sane

    def _write_step(
        self,
        work: Work,
        group: Group,
        table: tuple[int, ...],
        numbers: list[int],
        last: int,
        oldest: int,
    ) -> None:
        """Write what a step computed; nothing at ``last`` or above it is of use."""
        if group.kind != "state":
            for position in range(work.start, work.start + work.tokens):
                number = numbers[position] if position < min(last, len(numbers)) else GARBAGE
                self._write(group, table[position // group.block_size], position, number, oldest)
            return
        of_state = numbers[last - 1] if numbers else GARBAGE
        self._write(group, table[(work.end - 1) // group.block_size], 0, of_state, oldest)
        if work.drafts:  # the state at the end of a block is copied there when drafts are accepted
            for end in range(group.block_size, last + 1, group.block_size):
                if end > work.start and end < work.end:
                    number = numbers[end - 1] if numbers else GARBAGE
                    self._write(group, table[end // group.block_size - 1], 0, number, oldest)

    # What is left in the prefix cache.

    def _judge(self, cached: Cached) -> None:
        """Note the cached blocks without their KV that nothing will fill."""
        to_come = {block for step in (*self.flight, self._next) for block in self._filled(step)}
        for state in self.states.values():
            if not state.finished:
                for group, table in zip(self.layout, state.tables, strict=False):
                    to_come.update(table[state.computed // group.block_size :])
        for block, (place, block_hash) in cached.items():
            expected, group = self._hashes.get(block_hash), self.layout[place]
            if expected is None or block in to_come or group.kind == "other":
                continue
            numbers = self.prefixes.of(expected)[-group.block_size :]
            if self.slots.get(block, []) != (numbers[-1:] if group.kind == "state" else numbers):
                self.bad_cached.add(block)

    def _filled(self, step: Step) -> Iterable[int]:
        for work in step.works.values():
            admission = work.admission
            for group, table in zip(self.layout, work.tables, strict=True):
                first = work.start // group.block_size
                yield from table[first : (work.start + work.tokens - 1) // group.block_size + 1]
                if admission.external and not admission.loaded:
                    yield from table[admission.local // group.block_size :]
