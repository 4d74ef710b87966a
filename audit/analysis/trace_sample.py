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
    RESET,
    BlockTrace,
    Change,
    Lives,
    Operation,
    RecordedRequest,
    TraceLife,
    TraceRequest,
    operations,
)

_ID = struct.Struct("<q")
_PLACE = struct.Struct("<QQ")


class TraceSample(msgspec.Struct):
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


def take_sample(
    described: BlockTrace,
    recorded: Sequence[RecordedRequest],
    changes: Callable[[], Iterable[Sequence[Change]]],
    share: float,
) -> tuple[BlockTrace, TraceSample]:
    """The whole trace without operations and hash ids, and its sample.

    ``changes`` are read twice. Raises LedgerError if lives are missing.
    """
    sampler = _Sampler(share, described.block_tokens)
    arrivals = {life: one.arrival for one in recorded for life in one.lives}
    first: int | None = None
    for some in changes():
        for kind, life, index, ids, _ in some:
            if kind in (CACHED, HIT):
                sampler.put(arrivals.get(life, -1), index, ids)
            elif kind == ADMIT and first is None:
                first = life
    known = Lives(recorded, first or 0, described.began_seconds)
    whole = known.into(described, [])
    requests = [
        sampler.request(one.arrival, each) for one, each in zip(known.recorded, known.requests, strict=True)
    ]
    request_of = [known.recorded[life.request].arrival for life in known.lives]
    lives = [sampler.life(request, life) for request, life in zip(request_of, known.lives, strict=True)]
    every = (operation for some in changes() for change in some for operation in operations(change))
    found = list(sampler.operations(every, known.first, request_of))
    lookups = [max(0, life.sequence_tokens - 1) // whole.block_tokens for life in lives]
    small = replace(whole, operations=found, lives=lives, requests=requests)
    return whole, TraceSample(share, small, lookups, [life.hit_blocks for life in lives])


class _Sampler:
    """Knows which blocks of each request are in the sample."""

    def __init__(self, share: float, block_tokens: int) -> None:
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

    def request(self, number: int, request: TraceRequest) -> TraceRequest:
        """The request with the hash ids of its sampled blocks; all its blocks were put."""
        found = self._hashes.pop(number, {})
        self._places[number] = sorted(found)
        blocks = max(self._known.setdefault(number, 0), request.prompt_tokens // self._block_tokens)
        self.count(number, blocks + 1)  # the block behind them may be partly filled
        return replace(request, request_id="", hashes=[found[place] for place in sorted(found)])

    def count(self, request: int, length: int) -> int:
        """How many of the first ``length`` blocks of the request's table are in the sample."""
        places = self._places[request]
        for place in range(self._known[request], length):
            if self._has_place(request, place):
                places.append(place)
        self._known[request] = max(self._known[request], length)
        return bisect_left(places, length)

    def life(self, request: int, life: TraceLife) -> TraceLife:
        """The life, whose lookup, hits and table count sampled blocks only."""
        most = max(0, life.sequence_tokens - 1) // self._block_tokens
        return replace(
            life,
            sequence_tokens=self.count(request, most) * self._block_tokens + 1,
            hit_blocks=self.count(request, life.hit_blocks),
        )

    def operations(
        self, every: Iterable[Operation], first_life: int, request_of: Sequence[int]
    ) -> Iterator[Operation]:
        """The operations that concern sampled blocks, with lives that are counted from the first.

        ``request_of``: the request of each life.
        """
        lengths: dict[int, int] = {}
        for kind, number, index, hash_id in every:
            life = number - first_life
            if kind == DROP:
                if self._has(number):
                    yield kind, number, index, hash_id
            elif kind == RESET:
                yield kind, 0, 0, 0
            elif life < 0:
                continue  # its first operations are not kept any more
            elif kind == GROW:
                length = self.count(request_of[life], index)
                if length and lengths.get(life) != length:
                    lengths[life] = length
                    yield kind, life, length, 0
            elif kind == CACHED:
                places = self._places[request_of[life]]
                place = bisect_left(places, index)
                if place < len(places) and places[place] == index:
                    yield kind, life, place, hash_id
            elif self._places[request_of[life]]:
                yield kind, life, 0, 0

    def _has(self, hash_id: int) -> bool:
        return crc32(_ID.pack(hash_id)) < self._below

    def _has_place(self, request: int, place: int) -> bool:
        return crc32(_PLACE.pack(request, place)) < self._below
