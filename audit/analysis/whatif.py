"""What another number of blocks, or a second tier, would have hit: a block trace replayed on other pools.

A hit is counted in tokens of the first admission of each request, as a share of the prompts; repeat hits of
preempted requests are left out. The replay at the recorded size is compared with the recorded hits: that is
the calibration of every other figure.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from .trace_reader import ADMIT, CACHED, DROP, GROW, RELEASE, BlockTrace, TraceLife, TraceRequest

# --- Replay a block trace on a pool of another size, or with a second tier below it.
#
# The pool works as vLLM's does. A block is held by tables, or free. A free block that was cached keeps its
# content and can be hit until it is evicted, least recently used first; blocks without content are
# allocated first. A table is released last block first, so the beginning of a prefix is evicted last. Two
# requests that compute the same content at the same time have a block each.
#
# What is taken from the recording: when requests are admitted and released, how long their tables are, and
# when a block is full. So a replay does not know that a larger cache ends prefills sooner.

EMPTY = -1
"""An entry of a table: a block that is not cached."""


class Tier:
    """A second cache below the pool: every block that is cached in the pool is written to it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        """How many blocks it holds."""
        self._hash_ids: OrderedDict[int, None] = OrderedDict()
        """The hash ids of its blocks, least recently used first."""

    def __contains__(self, hash_id: int) -> bool:
        return hash_id in self._hash_ids

    def use(self, hash_id: int) -> None:
        """A block is written to the tier, or read from it."""
        self._hash_ids[hash_id] = None
        self._hash_ids.move_to_end(hash_id)
        if len(self._hash_ids) > self.blocks:
            self._hash_ids.popitem(last=False)


class Replayed(msgspec.Struct):
    """What a replay of a trace gave. Hits are blocks, by life."""

    hits: list[int]
    tier_hits: list[int]
    evicted: int = 0
    """Cached blocks that were evicted."""
    short: int = 0
    """Blocks that requests needed when every block was held: the engine would have had to preempt."""


class SimulatedPool:
    """A pool of ``blocks`` blocks, with a tier of ``tier_blocks`` below it. None: no limit; 0: no tier."""

    def __init__(self, trace: BlockTrace, blocks: int | None, tier_blocks: int = 0) -> None:
        self._trace = trace
        self._limited = blocks is not None
        """Whether the pool has a size; without one, no block is evicted."""
        self._empty = blocks or 0
        """Free blocks without content."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The numbers of free blocks with content, least recently used first."""
        self._tier = Tier(tier_blocks) if tier_blocks else None
        """The cache below the pool; None: there is none."""
        self._last = 0
        """The number of the block that was cached last; 0: none was."""
        self._borrowed = 0
        """Blocks in use beyond the size of the pool."""
        self._tables: dict[int, list[int]] = {}
        """By life: for each block its number, or ``EMPTY``."""
        self._references: dict[int, int] = {}
        """By number: how many tables hold a cached block."""
        self._hash_of: dict[int, int] = {}
        """By number: the hash id of each cached block."""
        self._numbers_of: dict[int, list[int]] = {}
        """By hash id: the blocks that have this content, oldest first."""
        lives = len(trace.lives)
        self.result = Replayed([0] * lives, [0] * lives)
        """What the replay counted so far."""

    def run(self) -> Replayed:
        """Replay the whole trace."""
        for kind, life, first, second in self._trace.operations:
            if kind == CACHED:
                self._cached(life, first, second)
            elif kind == GROW:
                self._grow(life, first)
            elif kind == ADMIT:
                self._admit(life)
            elif kind == RELEASE:
                self._release(life)
            elif kind == DROP:
                self._drop(life)
            else:
                self._reset()
        return self.result

    # --- operations -----------------------------------------------------------------------------------

    def _admit(self, number: int) -> None:
        life = self._trace.lives[number]
        table = self._tables[number] = []
        hashes = self._trace.requests[life.request].hashes[: self._trace.limit(life)]
        numbers_of, references = self._numbers_of, self._references
        for hash_id in hashes:
            numbers = numbers_of.get(hash_id)
            if numbers is None:
                break
            block = numbers[0]
            references[block] = references.get(block, 0) + 1
            self._idle.pop(block, None)
            table.append(block)
        self.result.hits[number] = len(table)
        if self._tier is not None:
            self._read_tier(number, hashes[len(table) :])
        if life.hit_blocks > len(table):
            self._compute_missed(number, life, table)

    def _read_tier(self, number: int, hashes: list[int]) -> None:
        assert self._tier is not None
        for hash_id in hashes:
            if hash_id not in self._tier:
                break
            self._tier.use(hash_id)
            self.result.tier_hits[number] += 1

    def _compute_missed(self, number: int, life: TraceLife, table: list[int]) -> None:
        """The recorded engine hit more blocks than this pool has: the request computes and caches them."""
        first = len(table)
        self._grow(number, life.hit_blocks)
        for index in range(first, life.hit_blocks):
            self._cached(number, index, self._trace.requests[life.request].hashes[index])

    def _grow(self, number: int, length: int) -> None:
        table = self._tables.get(number)
        if table is None:
            return
        if length > len(table):
            self._allocate(length - len(table))
            table += [EMPTY] * (length - len(table))

    def _cached(self, number: int, index: int, hash_id: int) -> None:
        table = self._tables.get(number)
        if table is None or index >= len(table) or table[index] != EMPTY or not hash_id:
            return
        self._last += 1
        block = table[index] = self._last
        self._hash_of[block] = hash_id
        self._numbers_of.setdefault(hash_id, []).append(block)
        self._references[block] = 1
        if self._tier is not None:
            self._tier.use(hash_id)

    def _release(self, number: int) -> None:
        references = self._references
        for block in reversed(self._tables.pop(number, ())):
            if block == EMPTY:
                self._free()
            elif references[block] > 1:
                references[block] -= 1
            else:
                del references[block]
                if block not in self._hash_of:
                    self._free()
                else:
                    self._idle[block] = None
                    if self._borrowed:
                        self._repay()

    def _drop(self, hash_id: int) -> None:
        for block in self._numbers_of.pop(hash_id, ()):
            del self._hash_of[block]
            self._idle.pop(block, None)
            if block not in self._references:
                self._free()

    def _reset(self) -> None:
        for hash_id in list(self._numbers_of):
            self._drop(hash_id)

    # --- blocks ---------------------------------------------------------------------------------------

    def _allocate(self, count: int) -> None:
        if not self._limited:
            return
        empty = min(count, self._empty)
        self._empty -= empty
        for _ in range(count - empty):
            if not self._evict():
                self._borrowed += 1
                self.result.short += 1

    def _evict(self) -> bool:
        """Evict the content of a free block; False if every block is held."""
        if not self._idle:
            return False
        block, _ = self._idle.popitem(last=False)
        hash_id = self._hash_of.pop(block)
        numbers = self._numbers_of[hash_id]
        numbers.remove(block)
        if not numbers:
            del self._numbers_of[hash_id]
        self.result.evicted += 1
        return True

    def _free(self) -> None:
        """A block without content is free."""
        if self._borrowed:
            self._borrowed -= 1
        else:
            self._empty += 1

    def _repay(self) -> None:
        """A block with content is free while more blocks are in use than there are: evict one."""
        if self._evict():
            self._borrowed -= 1


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
