"""A spatially hashed sample of a block trace: SHARDS (Waldspurger et al., FAST 2015, and ATC 2017).

A content is in the sample if the hash of its id is below a threshold, so all references to it are, or none.
A pool of ``share`` times the blocks then misses about ``share`` times as often. A block that never was cached
is in the sample by its request and its place. All lookups are known, and the misses among them are estimated.
So it matters little whether the sample has the few contents that most requests share: they are rarely missed.

Changes are read twice, so that the whole trace is never in memory: which blocks of a request are in the
sample is known when all its hash ids are.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from zlib import crc32

import msgspec
from msgspec.structs import replace

from .block_trace import (
    ADMIT,
    CACHED,
    DROP,
    GROW,
    HIT,
    RELEASE,
    BlockTrace,
    Change,
    Lives,
    Operation,
    RecordedRequest,
    TraceLife,
    operations,
)

_ID = struct.Struct("<q")
_PLACE = struct.Struct("<QQ")


class Sample(msgspec.Struct):
    """A sample of a trace. ``trace`` has the sampled blocks only, with the lives of the whole trace.

    ``lookups``: by life, the sampled blocks that its lookup could hit; ``recorded``: those that the engine
    hit.
    """

    share: float
    trace: BlockTrace
    lookups: list[int]
    recorded: list[int]

    def tokens(self, hits: Sequence[int], whole: BlockTrace, lives: Iterable[int]) -> int:
        """An estimate of the hit tokens of these lives of the ``whole`` trace, from their sampled hits."""
        missed = lookups = 0
        for number in lives:
            life = whole.lives[number]
            missed += self.lookups[number] - hits[number]
            prompt = whole.requests[life.request].prompt_tokens
            lookups += min(whole.limit(life) * whole.block_tokens, prompt)
        return lookups - round(missed * whole.block_tokens / self.share)


def sample_trace(trace: BlockTrace, share: float) -> tuple[BlockTrace, Sample]:
    """A trace without operations and hash ids, and its sample."""
    sampler = _Sampler(share, trace.block_tokens)
    for number, request in enumerate(trace.requests):
        sampler.put(number, 0, request.hashes)
    return _sampled(sampler, trace, list(range(len(trace.requests))), trace.operations)


def sample_changes(
    described: BlockTrace,
    requests: Sequence[RecordedRequest],
    changes: Callable[[], Iterable[Sequence[Change]]],
    share: float,
) -> tuple[BlockTrace, Sample]:
    """The same of ``changes``, which can be read twice. Raises LedgerError if lives are missing."""
    sampler = _Sampler(share, described.block_tokens)
    arrivals = {life: one.arrival for one in requests for life in one.lives}
    first: int | None = None
    for some in changes():
        for kind, life, index, ids, _ in some:
            if kind in (CACHED, HIT):
                sampler.put(arrivals.get(life, -1), index, ids)
            elif kind == ADMIT and first is None:
                first = life
    lives = Lives(requests, first or 0, described.began_seconds)
    whole = lives.into(described, [])
    kept = (
        (kind, life if kind == DROP else life - lives.first, index, hash_id)
        for some in changes()
        for change in some
        for kind, life, index, hash_id in operations(change)
    )
    return _sampled(sampler, whole, [one.arrival for one in lives.recorded], kept)


def _sampled(
    sampler: _Sampler, trace: BlockTrace, identities: Sequence[int], every: Iterable[Operation]
) -> tuple[BlockTrace, Sample]:
    """The trace without operations and hash ids, and its sample. ``identities``: how requests are hashed."""
    requests = []
    for identity, request in zip(identities, trace.requests, strict=True):
        blocks = max(sampler.known(identity), request.prompt_tokens // trace.block_tokens)
        hashes = sampler.hashes(identity)
        sampler.count(identity, blocks + 1)  # the block behind them may be partly filled
        requests.append(replace(request, request_id="", hashes=hashes))
    by_life = [identities[life.request] for life in trace.lives]
    lives = [sampler.life(identity, life) for identity, life in zip(by_life, trace.lives, strict=True)]
    found = list(sampler.operations(every, by_life))
    lookups = [max(0, life.sequence_tokens - 1) // trace.block_tokens for life in lives]
    light = replace(
        trace, operations=[], requests=[replace(request, hashes=[]) for request in trace.requests]
    )
    small = replace(trace, operations=found, lives=lives, requests=requests)
    return light, Sample(sampler.share, small, lookups, [life.hit_blocks for life in lives])


class _Sampler:
    """Knows which blocks of each request are in the sample."""

    def __init__(self, share: float, block_tokens: int) -> None:
        self.share = share
        """The share of all blocks that is in the sample."""
        self._below = round(share * (1 << 32))
        """Content and places whose CRC32 is below this are in the sample."""
        self._block_tokens = block_tokens
        """Tokens in a block."""
        self._hashes: dict[int, dict[int, int]] = {}
        """By request: the sampled places of its table, and their hash ids; 0: not known."""
        self._known: dict[int, int] = {}
        """So many places of each request were looked at."""
        self._places: dict[int, list[int]] = {}
        """The sampled places of each request in order, once they are counted."""

    def put(self, request: int, first: int, ids: Sequence[int]) -> None:
        """The blocks from a place on have these hash ids; 0: not known."""
        found = self._hashes.setdefault(request, {})
        known = self._known.get(request, 0)
        unknown = [(place, 0) for place in range(known, first)]
        for place, hash_id in (*unknown, *enumerate(ids, first)):
            if self._has(hash_id) if hash_id else self._has_place(request, place):
                found[place] = hash_id
            else:
                found.pop(place, None)
        self._known[request] = max(known, first + len(ids))

    def known(self, request: int) -> int:
        """How many blocks of the request have been looked at."""
        return self._known.get(request, 0)

    def hashes(self, request: int) -> list[int]:
        """The hash ids of its sampled blocks."""
        found = self._hashes.get(request, {})
        return [found[place] for place in sorted(found)]

    def count(self, request: int, length: int) -> int:
        """How many of the first ``length`` blocks of the request's table are in the sample."""
        places = self._places.get(request)
        if places is None:
            places = self._places[request] = sorted(self._hashes.pop(request, ()))
        for place in range(self.known(request), length):
            if self._has_place(request, place):
                places.append(place)
        self._known[request] = max(self.known(request), length)
        return bisect_left(places, length)

    def life(self, request: int, life: TraceLife) -> TraceLife:
        """The life, whose lookup, hits and table count sampled blocks only."""
        most = max(0, life.sequence_tokens - 1) // self._block_tokens
        return replace(
            life,
            sequence_tokens=self.count(request, most) * self._block_tokens + 1,
            hit_blocks=self.count(request, life.hit_blocks),
        )

    def operations(self, every: Iterable[Operation], request_of: Sequence[int]) -> Iterator[Operation]:
        """The operations that concern sampled blocks. ``request_of``: the request of each life."""
        lengths: dict[int, int] = {}
        for kind, life, first, second in every:
            if kind == DROP:
                if self._has(life):
                    yield kind, life, first, second
            elif kind not in (ADMIT, RELEASE, GROW, CACHED):
                yield kind, 0, first, second
            elif life < 0:
                continue  # its first operations are not kept any more
            elif kind == GROW:
                length = self.count(request_of[life], first)
                if length and lengths.get(life) != length:
                    lengths[life] = length
                    yield kind, life, length, 0
            elif kind == CACHED:
                places = self._places.get(request_of[life], ())
                place = bisect_left(places, first)
                if place < len(places) and places[place] == first:
                    yield kind, life, place, second
            elif self._places.get(request_of[life]):
                yield kind, life, first, second

    def _has(self, hash_id: int) -> bool:
        return crc32(_ID.pack(hash_id)) < self._below

    def _has_place(self, request: int, place: int) -> bool:
        return crc32(_PLACE.pack(request, place)) < self._below
