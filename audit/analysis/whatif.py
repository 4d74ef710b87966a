"""What another cache would have hit: block traces replayed at other sizes, policies, tiers and block sizes.

A hit is counted in tokens of the first admission of each request, as a share of the prompts; repeat hits of
preempted requests are left out. The replay at the recorded size is compared with the recorded hits: that is
the calibration of every other figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from .block_trace import RESET, BlockTrace, TraceLife, TraceRequest
from .cache_simulation import Replay, Replays, scaled
from .simulated_pool import MakePolicy, Replayed
from .trace_sample import TraceSample

TRUSTED_POINTS = 2.0
"""The largest residual of a calibration, in percentage points, at which the other figures are trusted."""

KNEE_POINTS = 0.1
"""A larger pool gains nothing if it is this close to a pool without a limit, in percentage points."""

FACTORS = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Sizes of the curve, as multiples of the recorded pool; it ends where a larger pool gains nothing."""

SHARES = tuple(1 / 2**power for power in range(10, -1, -1))
"""Sizes of the curve for a trace of no pool, as shares of all different blocks."""

LEAST_SAMPLED = 500
"""A sample with fewer blocks of the present pool is named as a reason for doubt."""

COARSER = (2, 4)
"""Block sizes that are tried, as multiples of the recorded one."""

Many = Callable[[Sequence[Replay]], Iterable[Replayed]]
"""The results of several replays of the same trace, in their order."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay. ``policies`` are makers by name; the first is used for everything but the curve."""

    policies: Mapping[str, MakePolicy]
    blocks: Sequence[int] = ()
    tiers: Sequence[int] = ()
    """Sizes of a second tier in bytes."""
    block_bytes: int = 0
    """Bytes of one block, if the trace does not know them."""
    skip: float = 0.0
    """The share of requests at the beginning whose hits are not counted, because the cache is cold."""


class SizePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hits with one size and policy. ``blocks`` None: a cache without a limit.

    ``gained_points``: more than at the recorded size, in percentage points. ``evicted_blocks``: how often a
    cached block was evicted. ``short_blocks``: blocks that running requests needed beyond the size, so
    requests would be preempted.
    """

    blocks: int | None
    policy: str
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


class BlockSizePoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hits with larger blocks and the same memory. ``gained_points``: as in SizePoint."""

    block_tokens: int
    blocks: int
    hit_tokens: int
    hit_share: float
    gained_points: float


class Preemptions(msgspec.Struct, frozen=True, kw_only=True):
    """What ``preemptions`` cost, and how many blocks the pool needs (``blocks_needed``) to avoid all of
    them."""

    preemptions: int
    computed_again_tokens: int
    blocks_needed: int


class Resets(msgspec.Struct, frozen=True, kw_only=True):
    """Hits lost to the recorded ``resets`` of the prefix cache, and to one more reset half way through."""

    resets: int
    lost_tokens: int
    one_more_lost_tokens: int


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
    sample_share: float | None = None
    """The share of the blocks that was replayed; None: all."""
    sample_points: float | None = None
    """How far the recorded hits of the sampled blocks, as an estimate, are from all recorded hits."""


class GroupPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Hits of one group of requests with the present blocks, with twice as many, and without a limit.

    All requests share each cache. A trace of no pool has no present size, so there these shares are None.
    """

    group: str
    requests: int
    prompt_tokens: int
    present_share: float | None
    twice_share: float | None
    ideal_share: float


GroupOf = Callable[[TraceRequest], str]
"""The name of a request's group."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Everything for one engine. Shares are of ``prompt_tokens``, 1 for all; points are of 100.

    ``engine``, ``version``: its name and the release of vLLM. ``blocks``: the recorded pool; 0: a trace of no
    pool. ``sentence``: the answer in one sentence. ``curve``: hits by size and policy; ``ideal``: without a
    limit. ``smaller_blocks_gain_at_most``: in percentage points.
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
    block_sizes: list[BlockSizePoint]
    smaller_blocks_gain_at_most: float
    preemptions: Preemptions
    resets: Resets
    groups: list[GroupPoint] = []
    """Most prompt tokens first; empty if none were asked for."""


def what_if(
    trace: BlockTrace,
    options: Options,
    group_of: GroupOf | None = None,
    sample: TraceSample | None = None,
    many: Many | None = None,
) -> WhatIf:
    """Replay ``trace`` in every way that ``options`` asks for. ``group_of``: break the hits down.

    ``sample``: replay it in place of the trace, in pools that are smaller by its share. ``many`` does the
    replays that are known to be needed, in several processes for instance.
    """
    study = _Study(trace, options, sample, many)
    return study.result(study.groups(group_of) if group_of else [])


class _Study:
    """The replays of one trace."""

    def __init__(
        self, trace: BlockTrace, options: Options, sample: TraceSample | None, many: Many | None
    ) -> None:
        self.trace = trace
        """What was recorded."""
        self.sample = sample
        """The part of the trace that is replayed in its place; None: all is."""
        self.replayed = trace if sample is None else sample.trace
        """What pools replay."""
        self.share = 1.0 if sample is None else sample.share
        """The share of the blocks that is replayed."""
        self.options = options
        """What to replay."""
        self.name = next(iter(options.policies))
        """The policy that is used for everything but the curve."""
        self._replays = Replays(self.replayed, options.policies, self.share)
        self._done: dict[Replay, Replayed] = {}
        """The results of replays, so that none runs twice."""
        first = [number for number, life in enumerate(trace.lives) if life.counted and not life.resumed]
        self.counted = first[int(len(first) * options.skip) :]
        """The lives whose hits are counted."""
        self.prompt_tokens = sum(self._request(number).prompt_tokens for number in self.counted)
        """Tokens of the counted prompts, of which every share is a part."""
        if many is not None:
            wanted = list(dict.fromkeys(self._wanted()))
            self._done = dict(zip(wanted, many(wanted), strict=True))
        unlimited = self._unlimited = self._replayed(Replay(None))
        """The replay in a cache without a limit."""
        present = self._present = self._replayed(self._of_size(trace.blocks)) if trace.blocks else None
        """The replay at the recorded size; None for a trace of no pool."""
        self.present = self._tokens(present.hits if present else unlimited.hits)
        """Hits of the replay at the recorded size, or without a limit if there is none."""
        self.ideal = self._point(None, "", unlimited)
        """The point of the curve without a limit."""
        self.calibration = self._calibrated(present)
        """The replay at the recorded size beside the recorded hits."""

    def result(self, groups: list[GroupPoint]) -> WhatIf:
        trace = self.trace
        curve = list(self._curve())
        return WhatIf(
            engine=trace.engine,
            version=trace.version,
            requests=len(self.counted),
            prompt_tokens=self.prompt_tokens,
            block_tokens=trace.block_tokens,
            blocks=trace.blocks,
            block_bytes=self._block_bytes(),
            sentence=self._sentence(curve),
            calibration=self.calibration,
            curve=curve,
            ideal=self.ideal,
            tiers=[self._tier(size) for size in self.options.tiers if self._block_bytes()],
            block_sizes=[self._coarser(factor) for factor in self._factors()],
            smaller_blocks_gain_at_most=self._finer(),
            preemptions=self._preemptions(),
            resets=self._resets(),
            groups=groups,
        )

    def groups(self, group_of: GroupOf) -> list[GroupPoint]:
        """The hits by group of requests."""
        members: dict[str, list[int]] = {}
        for number in self.counted:
            members.setdefault(group_of(self._request(number)), []).append(number)
        twice = self._replayed(self._of_size(2 * self.trace.blocks)) if self.trace.blocks else None
        points = [self._group(name, lives, twice) for name, lives in members.items()]
        return sorted(points, key=lambda point: (-point.prompt_tokens, point.group))

    def _group(self, name: str, lives: list[int], twice: Replayed | None) -> GroupPoint:
        prompt = sum(self._request(number).prompt_tokens for number in lives)
        shares = [
            None if replayed is None or not prompt else self._tokens(replayed.hits, lives=lives) / prompt
            for replayed in (self._present, twice, self._unlimited)
        ]
        return GroupPoint(
            group=name,
            requests=len(lives),
            prompt_tokens=prompt,
            present_share=shares[0],
            twice_share=shares[1],
            ideal_share=shares[2] or 0.0,
        )

    # --- counting -------------------------------------------------------------------------------------

    def _request(self, life: int) -> TraceRequest:
        return self.trace.requests[self.trace.lives[life].request]

    def _tokens(self, hits: Sequence[int], block_tokens: int = 0, lives: Sequence[int] | None = None) -> int:
        """The counted hits in tokens. The last block of a prompt may be partly filled."""
        size = block_tokens or self.trace.block_tokens
        counted = self.counted if lives is None else lives
        if self.sample is not None:
            return self.sample.tokens(hits, self.trace, counted)
        return sum(min(hits[number] * size, self._request(number).prompt_tokens) for number in counted)

    def _share(self, tokens: int) -> float:
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def _points(self, tokens: int) -> float:
        return 100 * self._share(tokens)

    # --- replays --------------------------------------------------------------------------------------

    def _replayed(self, one: Replay) -> Replayed:
        found = self._done.get(one)
        if found is None:
            found = self._done[one] = self._replays.run(one)
        return found

    def _wanted(self) -> Iterator[Replay]:
        """The replays that will be needed. The curve may need larger sizes, too."""
        blocks = self.trace.blocks
        yield from (Replay(None), Replay(None, keep_preempted=True))
        if blocks:
            yield self._one_more_reset()
        if any(operation[0] == RESET for operation in self.replayed.operations):
            yield replace(self._of_size(blocks), without_resets=True)
        for size in self._sizes():
            if self.options.blocks or size <= 2 * blocks or not blocks:
                yield from (Replay(size, name) for name in self.options.policies)
        if self._block_bytes():
            yield from map(self._with_tier, self.options.tiers)
        yield from map(self._of_blocks, self._factors())

    def _of_size(self, blocks: int) -> Replay:
        return Replay(blocks, self.name)

    def _with_tier(self, size: int) -> Replay:
        pool = self.trace.blocks or min(self.options.blocks)
        return Replay(pool, self.name, tier_blocks=size // self._block_bytes())

    def _of_blocks(self, factor: int) -> Replay:
        return Replay(self.trace.blocks // factor, self.name, factor=factor)

    def _factors(self) -> list[int]:
        """The block sizes that are tried. The hash ids of a sample are of single blocks."""
        return [one for one in COARSER if self.trace.blocks >= 2 * one and self.sample is None]

    def _one_more_reset(self) -> Replay:
        """One before the admission in the middle of the counted ones."""
        middle = self.counted[len(self.counted) // 2] if self.counted else 0
        return replace(self._of_size(self.trace.blocks), reset_before=middle)

    def _scaled(self, blocks: int) -> int:
        """The size of a pool for the sample that stands for a pool of so many blocks."""
        return scaled(blocks, self.share)

    def _of_all(self, blocks: int) -> int:
        """How many blocks so many sampled ones stand for."""
        return round(blocks / self.share)

    # --- the curve ------------------------------------------------------------------------------------

    def _point(self, blocks: int | None, policy: str, replayed: Replayed) -> SizePoint:
        tokens = self._tokens(replayed.hits)
        return SizePoint(
            blocks=blocks,
            policy=policy,
            hit_tokens=tokens,
            hit_share=self._share(tokens),
            gained_points=self._points(tokens - self.present),
            evicted_blocks=self._of_all(replayed.evicted),
            short_blocks=self._of_all(replayed.short),
        )

    def _sizes(self) -> Iterator[int]:
        if self.options.blocks:
            yield from sorted({*self.options.blocks, *([self.trace.blocks] if self.trace.blocks else [])})
            return
        found = {hash_id for request in self.replayed.requests for hash_id in request.hashes}
        different = self._of_all(len(found))
        whole, factors = (self.trace.blocks, FACTORS) if self.trace.blocks else (different, SHARES)
        yield from sorted({max(1, round(whole * factor)) for factor in factors})

    def _curve(self) -> Iterator[SizePoint]:
        """Points by size, then policy. Without given sizes it ends where a larger pool gains nothing."""
        for blocks in self._sizes():
            best = 0
            for name in self.options.policies:
                point = self._point(blocks, name, self._replayed(Replay(blocks, name)))
                best = max(best, point.hit_tokens)
                yield point
            enough = self._points(self.ideal.hit_tokens - best) < KNEE_POINTS / 10
            if enough and blocks >= 2 * self.trace.blocks and not self.options.blocks:
                return

    def _calibrated(self, present: Replayed | None) -> Calibration:
        recorded = [self.trace.lives[number] for number in self.counted]
        tokens = sum(max(0, life.hit_tokens) for life in recorded)
        size = self.trace.block_tokens
        equal = sum(
            present is not None and present.hits[number] * size == self.trace.lives[number].hit_tokens
            for number in self.counted
        )
        residual = self._points(self.present - tokens) if present else None
        doubts, sampled = self.trace.doubts, self._scaled(self.trace.blocks)
        if self.sample is not None and self.trace.blocks and sampled < LEAST_SAMPLED:
            doubts = [*doubts, f"the sample of the present pool has {sampled:,} blocks"]
        return Calibration(
            hit_tokens=self.present if present else 0,
            recorded_hit_tokens=tokens,
            residual_points=residual,
            equal_admissions=equal,
            admissions=len(recorded),
            trusted=residual is None or abs(residual) <= TRUSTED_POINTS,
            doubts=doubts,
            sample_share=None if self.sample is None else self.share,
            sample_points=None
            if self.sample is None
            else self._points(self._tokens(self.sample.recorded) - tokens),
        )

    def _sentence(self, curve: Sequence[SizePoint]) -> str:
        """The conclusion, with its figures."""
        own = [point for point in curve if point.policy == self.name]
        knee = next(
            (
                point.blocks
                for point in own
                if self._points(self.ideal.hit_tokens - point.hit_tokens) < KNEE_POINTS
            ),
            None,
        )
        most = f"a cache without a limit would hit {_percent(self.ideal.hit_share)}"
        end = f"more than {knee:,} blocks gain nothing" if knee else most
        if not self.trace.blocks:
            return f"{end[0].upper()}{end[1:]}; {most}." if knee else f"{end[0].upper()}{end[1:]}."
        missed = _percent(1 - self._share(self.present))
        if self._points(self.ideal.hit_tokens - self.present) < KNEE_POINTS:
            return f"More blocks gain nothing: {most}, the present {self.trace.blocks:,} blocks hit as much."
        twice = next((point for point in own if point.blocks == 2 * self.trace.blocks), None)
        if twice is None:
            return f"{missed} of the prompt tokens are misses; {end}."
        return (
            f"Twice the blocks ({2 * self.trace.blocks:,}) would turn {twice.gained_points:.1f} points of "
            f"{missed} misses into hits; {end}."
        )

    # --- other effects --------------------------------------------------------------------------------

    def _block_bytes(self) -> int:
        return self.options.block_bytes or self.trace.block_bytes

    def _tier(self, size: int) -> TierPoint:
        blocks = size // self._block_bytes()
        replayed = self._replayed(self._with_tier(size))
        both = [local + below for local, below in zip(replayed.hits, replayed.tier_hits, strict=True)]
        tokens = self._tokens(both) - self._tokens(replayed.hits)
        return TierPoint(bytes=size, blocks=blocks, tier_tokens=tokens, tier_share=self._share(tokens))

    def _coarser(self, factor: int) -> BlockSizePoint:
        one, size = self._of_blocks(factor), factor * self.trace.block_tokens
        tokens = self._tokens(self._replayed(one).hits, size)
        return BlockSizePoint(
            block_tokens=size,
            blocks=one.blocks or 0,
            hit_tokens=tokens,
            hit_share=self._share(tokens),
            gained_points=self._points(tokens - self.present),
        )

    def _finer(self) -> float:
        """The most points that smaller blocks could gain: the rest of one block for each request.

        The hash ids cover whole blocks, so it is not known how much of the next block was in the cache.
        """
        size, rest = self.trace.block_tokens, 0
        for number in self.counted:
            life = self.trace.lives[number]
            rest += max(0, min(size - 1, life.sequence_tokens - 1 - max(0, life.hit_tokens)))
        return self._points(rest)

    def _preemptions(self) -> Preemptions:
        lives, before = self.trace.lives, dict[int, TraceLife]()
        preempted = again = 0
        for life in lives:
            earlier = before.get(life.request)
            if earlier is not None and earlier.preempted:
                again += max(0, earlier.computed_tokens - max(0, life.hit_tokens) - life.external_tokens)
            preempted += life.preempted
            before[life.request] = life
        needed = self._of_all(self._replayed(Replay(None, keep_preempted=True)).most_held)
        return Preemptions(preemptions=preempted, computed_again_tokens=again, blocks_needed=needed)

    def _resets(self) -> Resets:
        resets = sum(operation[0] == RESET for operation in self.replayed.operations)
        if not self.trace.blocks:
            return Resets(resets=resets, lost_tokens=0, one_more_lost_tokens=0)
        without = replace(self._of_size(self.trace.blocks), without_resets=True)
        more = self._replayed(self._one_more_reset()).hits
        return Resets(
            resets=resets,
            lost_tokens=self._tokens(self._replayed(without).hits) - self.present if resets else 0,
            one_more_lost_tokens=self.present - self._tokens(more),
        )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
