"""What workers did of what was promised: two processes' events, joined by step, request and block.

The scheduler's side says which blocks a promise is to fill (``BlocksPromised``); each worker's side says
which blocks the plan that it was handed names, whether it began to load them, and which failed
(``WorkerStepped``). A worker counts the plans that it is handed, the scheduler its steps. That both count
alike is not taken for granted: nothing is claimed of a worker before a promise and a load have met in one
step, nor ever after they met in different ones.

``WorkerTransfers`` judges nothing and posts nothing: it says from which position on a promise was not kept.
Where a worker's events come late, that is said late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from .. import events as ev
from .account import Account, Life

REMEMBERED = 512
"""Of so many promises the blocks are remembered, in whatever step they are loaded."""


class UnkeptPromise(NamedTuple):
    """A promise was not kept from position ``start`` up. ``blocks`` stay unfilled.

    ``by_worker``: ``never_started`` (its plan, or no plan, and no load) or ``failure_unheard`` (it told the
    engine that these failed, which took them for loaded).
    """

    account: Account
    life: Life
    start: int
    by_worker: str
    blocks: list[int]


class Promise:
    """The blocks that one life's external tokens are to fill, in order."""

    __slots__ = ("account", "block_tokens", "blocks", "end", "failed", "life", "loaded_by", "start", "step")

    def __init__(self, account: Account, life: Life, event: ev.BlocksPromised) -> None:
        self.account = account
        self.life = life
        self.step = event.step
        self.start = event.start
        self.end = event.start + event.tokens
        self.block_tokens = event.block_tokens
        self.blocks = event.blocks
        self.failed: list[int] = []
        self.loaded_by: list[int] = []

    def position(self, block: int) -> int:
        """The first promised position in a block."""
        place = self.start // self.block_tokens + self.blocks.index(block)
        return max(self.start, place * self.block_tokens)

    def unkept(self, blocks: list[int], by_worker: str) -> UnkeptPromise:
        """From the first of these blocks on, which are some of the promise's, in its order."""
        return UnkeptPromise(self.account, self.life, self.position(blocks[0]), by_worker, blocks)

    @property
    def planned(self) -> list[int]:
        """Its blocks, less those that no plan names, or that were said to have failed."""
        lost = min((start for start, _, _ in self.life.voids), default=self.end)
        return [block for block in self.blocks if self.position(block) < lost]


class WorkerTransfers:
    """Open promises, and how far each worker was heard."""

    def __init__(self) -> None:
        self.promises: dict[int, Promise] = {}
        self.steps: dict[int, int] = {}
        self.aligned: dict[int, bool] = {}
        self.recent: deque[list[int]] = deque(maxlen=REMEMBERED)
        self.lost = False

    def promised(self, event: ev.BlocksPromised, account: Account) -> None:
        """A life's promise, by block."""
        self.recent.append(event.blocks)
        if account.life is not None:
            self.promises[event.request] = Promise(account, account.life, event)

    def closed(self, request: int) -> None:
        """A request has ended."""
        self.promises.pop(request, None)

    def forget(self) -> None:
        """Events were lost."""
        self.promises.clear()
        self.lost = True

    def worked(self, event: ev.WorkerStepped) -> Iterator[UnkeptPromise]:
        """What a worker's step means for the promises; nothing where it was heard already."""
        worker = event.worker
        if event.step <= self.steps.get(worker, -1):
            return
        self.steps[worker] = event.step
        for promise in list(self.promises.values()):
            if promise.life.ended_by:
                del self.promises[promise.account.request]
                continue
            yield from self._loaded(promise, event)
            failed = [block for block in promise.blocks if block in event.failed_blocks]
            if failed:
                promise.failed += failed
                yield from self.resolved(promise.account.request)

    def _loaded(self, promise: Promise, event: ev.WorkerStepped) -> Iterator[UnkeptPromise]:
        """Of a load that the next step reads: what the worker began in that step, or did not."""
        worker, named = event.worker, event.loaded_blocks
        if named is None or worker in promise.loaded_by:
            return
        planned = promise.planned
        met = bool(planned) and set(planned) <= set(named)
        if promise.life.asynchronous:  # which any later step may load, too
            if met and event.step == promise.step:
                self.aligned.setdefault(worker, True)
            return
        if met and self.aligned.get(worker, True):
            self.aligned[worker] = event.step == promise.step
        if event.step < promise.step or not planned or not self.aligned.get(worker):
            return
        promise.loaded_by.append(worker)
        if event.step == promise.step and event.started:
            planned = [block for block in planned if block not in named]
        if planned:
            yield promise.unkept(planned, "never_started")

    def resolved(self, request: int) -> Iterator[UnkeptPromise]:
        """The engine has taken a promise for loaded, or a worker has named blocks of it that failed."""
        promise = self.promises.get(request)
        if promise is None or promise.life.pending or promise.life.ended_by:
            return
        unheard = [b for b in promise.planned if b in promise.failed]
        promise.failed = []
        if unheard:
            yield promise.unkept(unheard, "failure_unheard")

    def unpromised(self, event: ev.WorkerStepped) -> list[int]:
        """The blocks that a worker loads in a step, where none of them was promised to be filled."""
        if self.lost or not event.loaded_blocks or not self.aligned.get(event.worker):
            return []
        named = set(event.loaded_blocks)
        return [] if any(named.intersection(blocks) for blocks in self.recent) else event.loaded_blocks
