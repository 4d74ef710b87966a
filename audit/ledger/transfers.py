"""What workers did with promised blocks: events of two processes, joined by step, request and block.

The scheduler side reports which blocks a promise will fill (``BlocksPromised``). The worker side reports
which blocks its connector metadata loads, whether it started the loads, and which blocks failed
(``WorkerStepped``). A worker counts the metadata that it receives, the scheduler counts its steps. These
counts may disagree. So a worker is checked only after a promise and its load had the same step number, and
no longer once their step numbers differed.

``WorkerTransfers`` judges and posts nothing: it reports from which position on a promise was not kept, late
if the worker's events come late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from .. import events as ev
from .account import Account, Life

PROMISES_REMEMBERED = 512
"""How many promises are remembered by their blocks, in whatever step these are loaded."""


class UnkeptPromise(NamedTuple):
    """A promise was not kept from position ``start`` up. ``blocks`` stay unfilled.

    ``by_worker``: ``never_started`` (the worker did not load the blocks) or ``failure_unheard`` (the worker
    reported that they failed, and the engine took them as loaded).
    """

    account: Account
    life: Life
    start: int
    by_worker: str
    blocks: list[int]


class Promise(msgspec.Struct, eq=False):
    """The blocks that the external tokens of one life will fill, in order."""

    account: Account
    """The account of the request."""
    life: Life
    """The life that was promised the tokens."""
    step: int
    """The scheduler's step that made the promise."""
    start: int
    """First promised position."""
    end: int
    """End of the promised positions."""
    block_tokens: int
    """Tokens per block."""
    blocks: list[int]
    """The promised blocks, in the order of their positions."""
    failed: list[int] = []
    """Blocks that a worker reported as failed and the engine has not answered for."""
    loaded_by: list[int] = []
    """Workers whose load of this promise was compared."""

    def position(self, block: int) -> int:
        """The first promised position in a block."""
        place = self.start // self.block_tokens + self.blocks.index(block)
        return max(self.start, place * self.block_tokens)

    def unkept(self, blocks: list[int], by_worker: str) -> UnkeptPromise:
        """The promise, not kept from the first of ``blocks`` on; ``blocks`` are in the promise's order."""
        return UnkeptPromise(self.account, self.life, self.position(blocks[0]), by_worker, blocks)

    @property
    def expected(self) -> list[int]:
        """The promised blocks below the first position already known as failed or cancelled."""
        lost = min((start for start, _, _ in self.life.voids), default=self.end)
        positions: dict[int, int] = {}
        for place, block in enumerate(self.blocks, self.start // self.block_tokens):
            positions.setdefault(block, max(self.start, place * self.block_tokens))
        return [block for block in self.blocks if positions[block] < lost]


class WorkerTransfers(msgspec.Struct, eq=False):
    """Open promises, and the last step of each worker."""

    promises: dict[int, Promise] = {}
    """Open promises, by request number."""
    earlier: dict[int, Promise] = {}
    """By request number: the promise of a life that ended while a step in flight loads for it."""
    steps: dict[int, int] = {}
    """The last step of each worker, by rank."""
    aligned: dict[int, bool] = {}
    """Whether a worker's steps agree with the scheduler's, by rank, once a load has shown it."""
    recent: list[list[int]] = []
    """Blocks of the last promises, ended ones included."""
    events_lost: bool = False
    """Whether events were lost, so that promises may be missing."""

    def promised(self, event: ev.BlocksPromised, account: Account) -> None:
        """Note the blocks promised to a life."""
        self.recent = [*self.recent[1 - PROMISES_REMEMBERED :], event.blocks]
        if account.life is not None:
            earlier = self.promises.get(event.request)
            if earlier is not None and not earlier.life.delivered:
                self.earlier[event.request] = earlier
            end = event.start + event.tokens
            self.promises[event.request] = Promise(
                account, account.life, event.step, event.start, end, event.block_tokens, event.blocks
            )

    def of_life(self, request: int, life: Life) -> Promise | None:
        """The promise of a life whose first output has not come."""
        promises = self.promises.get(request), self.earlier.get(request)
        return next((each for each in promises if each is not None and each.life is life), None)

    def closed(self, request: int) -> None:
        """Drop the promise of an ended request."""
        self.promises.pop(request, None)
        self.earlier.pop(request, None)

    def forget(self) -> None:
        """Drop all promises, because events were lost."""
        self.promises.clear()
        self.earlier.clear()
        self.events_lost = True

    def worked(self, event: ev.WorkerStepped) -> Iterator[UnkeptPromise]:
        """The promises that a worker's step shows as not kept; none for a step seen before."""
        worker = event.worker
        if event.step <= self.steps.get(worker, -1):
            return
        self.steps[worker] = event.step
        for promise in list(self.promises.values()):
            if promise.life.ended_by:
                del self.promises[promise.account.request]
                continue
            yield from self._loaded(promise, event)
            failed = _both(promise.blocks, event.failed_blocks)
            if failed:
                promise.failed += failed
                yield from self.resolved(promise.account.request)

    def _loaded(self, promise: Promise, event: ev.WorkerStepped) -> Iterator[UnkeptPromise]:
        """Compare a promise with the loads that the worker started in the promise's step."""
        worker, named = event.worker, event.loaded_blocks
        if named is None or worker in promise.loaded_by:
            return
        expected = promise.expected
        met = bool(expected) and set(expected) <= set(named)
        if promise.life.asynchronous:  # any later step may load the blocks
            if met and event.step == promise.step:
                self.aligned.setdefault(worker, True)
            return
        if met and self.aligned.get(worker, True):
            self.aligned[worker] = event.step == promise.step
        if event.step < promise.step or not expected or not self.aligned.get(worker):
            return
        promise.loaded_by.append(worker)
        if event.step == promise.step and event.started:
            loaded = set(named)
            expected = [block for block in expected if block not in loaded]
        if expected:
            yield promise.unkept(expected, "never_started")

    def resolved(self, request: int) -> Iterator[UnkeptPromise]:
        """The blocks of a promise that failed although the engine took them as loaded."""
        promise = self.promises.get(request)
        if promise is None or promise.life.pending or promise.life.ended_by:
            return
        ignored = _both(promise.expected, promise.failed)
        promise.failed = []
        if ignored:
            yield promise.unkept(ignored, "failure_unheard")

    def unpromised(self, event: ev.WorkerStepped) -> list[int]:
        """The blocks that a worker loads in a step, if none of them was promised."""
        if self.events_lost or not event.loaded_blocks or not self.aligned.get(event.worker):
            return []
        named = set(event.loaded_blocks)
        return [] if any(named.intersection(blocks) for blocks in self.recent) else event.loaded_blocks


def _both(blocks: list[int], others: list[int]) -> list[int]:
    """The blocks that are in both lists, in the order of the first."""
    named = set(others)
    return [block for block in blocks if block in named] if named else []
