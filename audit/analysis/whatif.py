"""What another number of blocks, or a second tier, would have hit: a block trace replayed on other pools.

A hit is counted in tokens of the first admission of each request, as a share of the prompts; repeat hits of
preempted requests are left out. The replay at the recorded size is compared with the recorded hits: that is
the calibration of every other figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from .block_trace import BlockTrace, TraceRequest
from .simulated_pool import Replayed, SimulatedPool

TRUSTED_POINTS = 2.0
"""The largest residual of a calibration, in percentage points, at which the other figures are trusted."""

KNEE_POINTS = 0.1
"""A larger pool gains nothing if it is this close to a pool without a limit, in percentage points."""

FACTORS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of the curve, as multiples of the recorded pool; it ends where a larger pool gains nothing."""

SHARES = tuple(1 / 2**power for power in range(10, -1, -1))
"""Sizes of the curve for a trace of no pool, as shares of all different blocks."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay."""

    blocks: Sequence[int] = ()
    tiers: Sequence[int] = ()
    """Sizes of a second tier in bytes."""
    block_bytes: int = 0
    """Bytes of one block, if the trace does not know them."""
    skip: float = 0.0
    """The share of requests at the beginning whose hits are not counted, because the cache is cold."""


class SizePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hits with one size. ``blocks`` None: a cache without a limit.

    ``gained_points``: more than at the recorded size, in percentage points. ``evicted_blocks``: how often a
    cached block was evicted. ``short_blocks``: blocks that running requests needed beyond the size, so
    requests would be preempted.
    """

    blocks: int | None
    hit_tokens: int
    hit_share: float
    gained_points: float
    evicted_blocks: int
    short_blocks: int


class TierPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a second tier of one size gives beside the pool of the recorded size.

    A trace of no pool is replayed on the smallest size that was asked for. ``bytes`` and ``blocks``: its
    size. ``tier_tokens``: hits beyond the local ones.
    """

    bytes: int
    blocks: int
    tier_tokens: int
    tier_share: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The replay at the recorded size beside the recorded hits.

    ``equal_admissions`` of ``admissions`` hit exactly as many tokens. ``residual_points``: how far the
    replayed hit rate is from the recorded one; without a recorded pool there is nothing to compare, and it is
    None. ``trusted``: it is small enough to believe the other figures; ``doubts``: why not, one sentence
    each.
    """

    hit_tokens: int
    recorded_hit_tokens: int
    residual_points: float | None
    equal_admissions: int
    admissions: int
    trusted: bool
    doubts: list[str]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Everything for one engine. Shares are of ``prompt_tokens``, 1 for all; points are of 100.

    ``engine``, ``version``: its name and the release of vLLM. ``blocks``: the recorded pool; 0: a trace of no
    pool. ``sentence``: the answer in one sentence. ``curve``: hits by size; ``ideal``: without a limit.
    ``preemptions``: how many lives ended because no block was free.
    """

    engine: str
    version: str
    requests: int
    prompt_tokens: int
    block_tokens: int
    blocks: int
    block_bytes: int
    sentence: str
    calibration: Calibration
    curve: list[SizePoint]
    ideal: SizePoint
    tiers: list[TierPoint]
    preemptions: int


def what_if(trace: BlockTrace, options: Options) -> WhatIf:
    """Replay ``trace`` on every pool that ``options`` asks for."""
    return _Study(trace, options).result()


class _Study:
    """The replays of one trace."""

    def __init__(self, trace: BlockTrace, options: Options) -> None:
        self.trace = trace
        """What was recorded."""
        self.options = options
        """What to replay."""
        self.block_bytes = options.block_bytes or trace.block_bytes
        """Bytes of one block; 0: not known."""
        first = [number for number, life in enumerate(trace.lives) if life.counted and not life.resumed]
        self.counted = first[int(len(first) * options.skip) :]
        """The lives whose hits are counted."""
        self.prompt_tokens = sum(self._request(number).prompt_tokens for number in self.counted)
        """Tokens of the counted prompts, of which every share is a part."""
        unlimited = SimulatedPool(trace, None).run()
        present = self._present = SimulatedPool(trace, trace.blocks).run() if trace.blocks else None
        """The replay at the recorded size; None for a trace of no pool."""
        self.present = self._tokens((present or unlimited).hits)
        """Hits of the replay at the recorded size, or without a limit if there is none."""
        self.ideal = self._point(None, unlimited)
        """The point of the curve without a limit."""

    def result(self) -> WhatIf:
        trace = self.trace
        curve = list(self._curve())
        return WhatIf(
            engine=trace.engine,
            version=trace.version,
            requests=len(self.counted),
            prompt_tokens=self.prompt_tokens,
            block_tokens=trace.block_tokens,
            blocks=trace.blocks,
            block_bytes=self.block_bytes,
            sentence=self._sentence(curve),
            calibration=self._calibrated(),
            curve=curve,
            ideal=self.ideal,
            tiers=[self._tier(size) for size in self.options.tiers if self.block_bytes],
            preemptions=sum(life.preempted for life in trace.lives),
        )

    # --- counting -------------------------------------------------------------------------------------

    def _request(self, life: int) -> TraceRequest:
        return self.trace.requests[self.trace.lives[life].request]

    def _tokens(self, hits: Sequence[int]) -> int:
        """The counted hits in tokens. The last block of a prompt may be partly filled."""
        size = self.trace.block_tokens
        return sum(min(hits[number] * size, self._request(number).prompt_tokens) for number in self.counted)

    def _share(self, tokens: int) -> float:
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def _points(self, tokens: int) -> float:
        return 100 * self._share(tokens)

    # --- the curve ------------------------------------------------------------------------------------

    def _point(self, blocks: int | None, replayed: Replayed) -> SizePoint:
        tokens = self._tokens(replayed.hits)
        return SizePoint(
            blocks=blocks,
            hit_tokens=tokens,
            hit_share=self._share(tokens),
            gained_points=self._points(tokens - self.present),
            evicted_blocks=replayed.evicted,
            short_blocks=replayed.short,
        )

    def _sizes(self) -> list[int]:
        if self.options.blocks:
            return sorted({*self.options.blocks, *([self.trace.blocks] if self.trace.blocks else [])})
        different = len({hash_id for request in self.trace.requests for hash_id in request.hashes})
        whole, factors = (self.trace.blocks, FACTORS) if self.trace.blocks else (different, SHARES)
        return sorted({max(1, round(whole * factor)) for factor in factors})

    def _curve(self) -> Iterator[SizePoint]:
        """Points by size. Without given sizes the curve ends where a larger pool gains nothing."""
        for blocks in self._sizes():
            present = self._present if blocks == self.trace.blocks else None
            point = self._point(blocks, present or SimulatedPool(self.trace, blocks).run())
            yield point
            enough = self._points(self.ideal.hit_tokens - point.hit_tokens) < KNEE_POINTS / 10
            if enough and blocks >= 2 * self.trace.blocks and not self.options.blocks:
                return

    def _calibrated(self) -> Calibration:
        recorded = [self.trace.lives[number] for number in self.counted]
        tokens = sum(max(0, life.hit_tokens) for life in recorded)
        size, present = self.trace.block_tokens, self._present
        equal = sum(
            present is not None and present.hits[number] * size == self.trace.lives[number].hit_tokens
            for number in self.counted
        )
        residual = self._points(self.present - tokens) if present else None
        return Calibration(
            hit_tokens=self.present if present else 0,
            recorded_hit_tokens=tokens,
            residual_points=residual,
            equal_admissions=equal,
            admissions=len(recorded),
            trusted=residual is None or abs(residual) <= TRUSTED_POINTS,
            doubts=self.trace.doubts,
        )

    def _sentence(self, curve: Sequence[SizePoint]) -> str:
        """The conclusion, with its figures."""
        enough = (
            point.blocks
            for point in curve
            if self._points(self.ideal.hit_tokens - point.hit_tokens) < KNEE_POINTS
        )
        knee = next(enough, None)
        most = f"a cache without a limit would hit {_percent(self.ideal.hit_share)}"
        end = f"more than {knee:,} blocks gain nothing" if knee else most
        if not self.trace.blocks:
            return f"{end[0].upper()}{end[1:]}; {most}." if knee else f"{end[0].upper()}{end[1:]}."
        missed = _percent(1 - self._share(self.present))
        if self._points(self.ideal.hit_tokens - self.present) < KNEE_POINTS:
            return f"More blocks gain nothing: {most}, the present {self.trace.blocks:,} blocks hit as much."
        twice = next((point for point in curve if point.blocks == 2 * self.trace.blocks), None)
        if twice is None:
            return f"{missed} of the prompt tokens are misses; {end}."
        return (
            f"Twice the blocks ({2 * self.trace.blocks:,}) would turn {twice.gained_points:.1f} points of "
            f"{missed} misses into hits; {end}."
        )

    # --- the second tier ------------------------------------------------------------------------------

    def _tier(self, size: int) -> TierPoint:
        blocks = size // self.block_bytes
        replayed = SimulatedPool(self.trace, self.trace.blocks or min(self.options.blocks), blocks).run()
        both = [local + below for local, below in zip(replayed.hits, replayed.tier_hits, strict=True)]
        tokens = self._tokens(both) - self._tokens(replayed.hits)
        return TierPoint(bytes=size, blocks=blocks, tier_tokens=tokens, tier_share=self._share(tokens))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
