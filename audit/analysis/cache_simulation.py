"""Replays of a block trace for what-if, each described by plain data, so that any process can do it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from .block_trace import ADMIT, CACHED, DROP, GROW, RESET, BlockTrace, Operation
from .simulated_pool import MakePolicy, NeverEvicts, Replayed, SimulatedPool, Tier


class Replay(msgspec.Struct, frozen=True):
    """One replay on a pool of ``blocks``; None: without a limit.

    ``factor``: with blocks so many times as large. ``reset_before``: one more reset of the cache before this
    life is admitted; -1: none.
    """

    blocks: int | None
    policy: str = ""
    keep_preempted: bool = False
    tier_blocks: int = 0
    factor: int = 1
    without_resets: bool = False
    reset_before: int = -1


def scaled(blocks: int, share: float) -> int:
    """The size of a pool for a sample of this share that stands for a pool of so many blocks."""
    return max(1, round(blocks * share))


class Replays:
    """Replays a trace, or a sample of ``share`` of it in pools that are smaller by that."""

    def __init__(self, trace: BlockTrace, policies: Mapping[str, MakePolicy], share: float = 1.0) -> None:
        self._trace = trace
        self._policies = policies
        """By the name of a policy: what makes one for so many blocks."""
        self._share = share

    def run(self, one: Replay) -> Replayed:
        """Replay once."""
        trace = coarser(self._trace, one.factor) if one.factor > 1 else self._trace
        if one.without_resets or one.reset_before >= 0:
            trace = replace(trace, operations=_resets(trace.operations, one))
        if one.blocks is None:
            return SimulatedPool(trace, None, NeverEvicts(), keep_preempted=one.keep_preempted).run()
        make, size = self._policies[one.policy], scaled(one.blocks, self._share)
        tier = None
        if one.tier_blocks:
            below = scaled(one.tier_blocks, self._share)
            tier = Tier(below, make(below))
        return SimulatedPool(trace, size, make(size), tier=tier, keep_preempted=one.keep_preempted).run()


def _resets(operations: list[Operation], one: Replay) -> list[Operation]:
    """The operations with the resets that a replay asks for."""
    if one.without_resets:
        return [operation for operation in operations if operation[0] != RESET]
    life = one.reset_before
    places = (place for place, each in enumerate(operations) if each[0] == ADMIT and each[1] >= life)
    place = next(places, len(operations))
    return [*operations[:place], (RESET, 0, 0, 0), *operations[place:]]


def coarser(trace: BlockTrace, factor: int) -> BlockTrace:
    """The trace with blocks ``factor`` times as large and as much memory.

    The hash of a block covers everything before it, so the last small block names the large one.
    """
    operations: list[Operation] = []
    last = {hash_id for request in trace.requests for hash_id in request.hashes[factor - 1 :: factor]}
    for kind, life, first, second in trace.operations:
        if kind == GROW:
            operations.append((kind, life, -(-first // factor), 0))
        elif kind == CACHED:
            if not (first + 1) % factor:
                operations.append((kind, life, first // factor, second))
        elif kind != DROP or life in last:
            operations.append((kind, life, first, second))
    return replace(
        trace,
        block_tokens=trace.block_tokens * factor,
        blocks=trace.blocks // factor,
        operations=operations,
        lives=[replace(life, hit_blocks=life.hit_blocks // factor) for life in trace.lives],
        requests=[
            replace(request, hashes=request.hashes[factor - 1 :: factor]) for request in trace.requests
        ],
    )
