"""The block tables of a worker's requests, and what a step does to their blocks.

Everything comes from the ``SchedulerOutput`` that the worker receives: which blocks a step reads as hits,
which it writes, and which are full and final after it. Drafts may be rejected and their positions written
again, so a position is final only once no draft can lie at or below it. With asynchronous scheduling a step
is planned before the drafts of the step before are verified; its count of computed tokens then includes them.

In a group of states a step leaves one state, in the block of its last position. It is final if the step ends
with the block: the next step begins another block with a copy of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

NULL_BLOCK = 0
"""The block that stands in tables for positions without a block."""


class Hit(NamedTuple):
    """Blocks of one group that a request reads and has not computed in this life.

    ``first``: the index of the first block in the request's table.
    """

    request_id: str
    group: int
    first: int
    blocks: list[int]


class StepPlan(NamedTuple):
    """What a step does. Blocks are listed by group."""

    settled: dict[int, list[int]]
    """Blocks that were filled before the step and are final now: drafts were accepted, or a request left."""
    written: set[int]
    """Blocks that the step writes or zeroes, or that were allocated for it."""
    copied: list[tuple[int, int]]
    """Source and target of the copies that the step makes before its forward pass."""
    unseen: set[int]
    """Blocks that were allocated for requests that began before the observation."""
    hits: list[Hit]
    """Blocks below the computed tokens of requests that begin a life."""
    final: dict[int, list[int]]
    """Blocks that are full and final after the step."""
    unaccepted: set[int]
    """Blocks of ``settled`` that may hold rejected drafts, of requests that left the batch."""


class _Request:
    """The tables of one request in its present life."""

    __slots__ = ("computed", "drafts", "executed", "sealed", "settled", "tables")

    def __init__(self, tables: dict[int, list[int]], computed: int) -> None:
        self.tables = tables
        """By group: block ids in the order of positions."""
        self.computed = computed
        """The engine's count of computed tokens at the last step."""
        self.drafts = 0
        """Draft tokens in the last step."""
        self.executed = computed
        """The positions below this one were executed, rejected drafts included."""
        self.settled = computed
        """The positions below this one are final."""
        self.sealed: dict[int, int] = {}
        """By group: blocks of the table below this index were reported as final."""


class Tables:
    """The block tables of all requests of one worker.

    ``groups``: tokens per block, by checked group. ``states``: the groups of states among them.
    """

    def __init__(
        self, groups: dict[int, int], states: Collection[int] = (), *, asynchronous: bool = False
    ) -> None:
        self._groups = groups
        """Tokens per block of the groups that are checked."""
        self._states = states
        self._asynchronous = asynchronous
        """Whether a step is planned before the output of the step before."""
        self._requests: dict[str, _Request] = {}
        self._last: set[str] = set()
        """The requests of the last step."""

    def step(self, output: Any) -> StepPlan:
        """Take over what a ``SchedulerOutput`` says, and tell what its step does."""
        plan = StepPlan({}, set(), copies_of(output), set(), [], {}, set())
        scheduled = output.num_scheduled_tokens
        for request_id in self._last:
            if request_id not in scheduled:
                self._settle(self._requests.get(request_id), plan)
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        self._begin_new(output, plan)
        self._go_on(output, plan)
        plan.written.update(getattr(output, "new_block_ids_to_zero", None) or ())
        drafts = output.scheduled_spec_decode_tokens
        for request_id, tokens in scheduled.items():
            request = self._requests.get(request_id)
            if request is not None:
                self._run(request, tokens, len(drafts.get(request_id, ())), plan)
        self._last = set(scheduled)
        return plan

    def final_blocks(self, request_id: str, group: int) -> tuple[object, list[int]] | None:
        """The full and final blocks of a request after this step, and what stands for its present life.

        None: the worker does not know the request.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        return request, request.tables[group][: request.settled // self._groups[group]]

    def _begin_new(self, output: Any, plan: StepPlan) -> None:
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids, new.num_computed_tokens, plan)

    def _go_on(self, output: Any, plan: StepPlan) -> None:
        """Take over the new blocks and counts of requests that the worker knows."""
        cached = output.scheduled_cached_reqs
        resumed = getattr(cached, "resumed_req_ids", None)
        if resumed is None:
            flags = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
            resumed = {request_id for request_id, flag in flags if flag}
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, blocks, computed in rows:
            request = self._requests.get(request_id)
            if request_id in resumed:
                self._begin(request_id, blocks, computed, plan)
            elif request is not None:
                request.computed = computed
                for group in self._groups if blocks is not None else ():
                    request.tables[group] += blocks[group]
                    plan.written.update(blocks[group])
            else:  # a request that began before the observation
                plan.unseen.update(*(blocks or ()))

    def _begin(self, request_id: str, blocks: Any, computed: int, plan: StepPlan) -> None:
        """A life begins, with tables that may begin with hits."""
        tables = {group: list(blocks[group]) for group in self._groups}
        request = self._requests[request_id] = _Request(tables, computed)
        for group, size in self._groups.items():
            full = request.sealed[group] = computed // size
            hit = tables[group][:full]
            first = next((index for index, block in enumerate(hit) if block != NULL_BLOCK), full)
            if first < full:
                plan.hits.append(Hit(request_id, group, first, hit[first:]))
            plan.written.update(tables[group][full:])

    def _run(self, request: _Request, tokens: int, drafts: int, plan: StepPlan) -> None:
        """Note what one request writes in this step, and which of its blocks are final after it."""
        certain = request.computed - (request.drafts if self._asynchronous else 0)
        if request.computed < request.settled:  # a load failed, or the session was edited
            request.settled = certain
        begin = max(certain, request.settled)
        filled = min(begin, request.executed)
        request.executed = request.computed + tokens
        request.settled = max(begin, certain + tokens - drafts)
        request.drafts = drafts
        for group, size in self._groups.items():
            table, done = request.tables[group], request.settled // size
            plan.written.update(table[begin // size : -(-request.executed // size)])
            sealed, before = min(request.sealed.get(group, 0), begin // size), begin // size
            if filled // size > sealed and group not in self._states:
                plan.settled.setdefault(group, []).extend(_real(table[sealed : filled // size]))
            first = done - (request.settled % size == 0) if group in self._states else before
            if done > max(first, before):
                plan.final.setdefault(group, []).extend(_real(table[max(first, before) : done]))
            request.sealed[group] = max(before, done)
        plan.written.discard(NULL_BLOCK)

    def _settle(self, request: _Request | None, plan: StepPlan) -> None:
        """A request has left the batch: nobody writes its executed positions any more, accepted or not."""
        if request is None or request.executed == request.settled:
            return
        for group, size in self._groups.items():
            if group in self._states:
                continue
            done = request.executed // size
            blocks = _real(request.tables[group][request.sealed.get(group, 0) : done])
            plan.settled.setdefault(group, []).extend(blocks)
            plan.unaccepted.update(blocks)
        request.drafts = 0


def _real(blocks: list[int]) -> list[int]:
    return [block for block in blocks if block != NULL_BLOCK]


def copies_of(output: Any) -> list[tuple[int, int]]:
    """Source and target of the copies that a step makes before its forward pass."""
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    return [(int(copy[0]), int(copy[1])) for copy in copies]
