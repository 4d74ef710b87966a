"""A spatially hashed sample of a block trace: SHARDS (Waldspurger et al., FAST 2015, and ATC 2017).

A content is in the sample if the hash of its id is below a threshold, so all references to it are, or none.
A pool of ``share`` times the blocks then misses about ``share`` times as often. A block that never was cached
is in the sample by its request and its place. All lookups are known, and the misses among them are estimated.
So it matters little whether the sample has the few contents that most requests share: they are rarely missed.

The sample is taken part by part, so the whole trace is never in memory. The last part is first, because the
record of a request is in the part in which the request ended.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import msgspec
from msgspec.structs import replace

from .block_trace import ADMIT, CACHED, DROP, GROW, RELEASE, BlockTrace, Operation, TraceLife, TraceRequest
from .trace_parts import PartsJoined, TracePart

_ID, _UNSIGNED = struct.Struct("<q"), struct.Struct("<Q")
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


def take_sample(
    trace: BlockTrace, last_first: Iterable[TracePart], share: float, first_life: int = 0
) -> tuple[BlockTrace, Sample]:
    """The whole trace without operations and hash ids, and its sample.

    ``trace`` says what engine it is; ``first_life`` is that of :class:`~.trace_parts.PartsJoined`.
    """
    sampler = _Sampler(share, trace.block_tokens)
    light, small = PartsJoined(first_life), PartsJoined(first_life)
    for of_all, of_sample in reversed([sampler.reduced(part) for part in last_first]):
        light.add(of_all)
        small.add(of_sample)
    whole, sampled = light.into(trace), small.into(trace)
    lookups = [max(0, life.sequence_tokens - 1) // trace.block_tokens for life in sampled.lives]
    return whole, Sample(share, sampled, lookups, [life.hit_blocks for life in sampled.lives])


def whole_part(trace: BlockTrace) -> TracePart:
    """A trace as one part."""
    return TracePart(trace.operations, dict(enumerate(trace.lives)), dict(enumerate(trace.requests)))


class _Sampler:
    """Reduces parts, the last one first."""

    def __init__(self, share: float, block_tokens: int) -> None:
        self._below = round(share * (1 << 32))
        """Content and places whose CRC32 is below this are in the sample."""
        self._block_tokens = block_tokens
        """Tokens in a block."""
        self._places: dict[int, list[int]] = {}
        """The sampled places of each request's table."""
        self._known: dict[int, int] = {}
        """So many places of each request were looked at."""
        self._request_of: dict[int, int] = {}
        """The request of each life."""

    def reduced(self, part: TracePart) -> tuple[TracePart, TracePart]:
        """The part without operations and hash ids, and the sample of it."""
        requests = {number: self._request(number, one) for number, one in part.requests.items()}
        lives = {number: self._life(number, one) for number, one in part.lives.items()}
        light = {number: replace(one, hashes=[]) for number, one in part.requests.items()}
        return TracePart([], part.lives, light), TracePart(
            list(self._operations(part.operations)), lives, requests
        )

    def _request(self, number: int, request: TraceRequest) -> TraceRequest:
        hashes, tables = request.hashes, max(len(request.hashes), request.prompt_tokens // self._block_tokens)
        places = [
            place
            for place, hash_id in enumerate(hashes)
            if (self._has(hash_id) if hash_id else self._has_place(number, place))
        ]
        self._places[number], self._known[number] = places, len(hashes)
        self._count(number, tables + 1)  # the block behind them may be partly filled
        sampled = [hashes[place] for place in places if place < len(hashes)]
        return replace(request, request_id="", hashes=sampled)

    def _life(self, number: int, life: TraceLife) -> TraceLife:
        """The life, whose lookup, hits and table count sampled blocks only."""
        self._request_of[number] = life.request
        most = max(0, life.sequence_tokens - 1) // self._block_tokens
        return replace(
            life,
            sequence_tokens=self._count(life.request, most) * self._block_tokens + 1,
            hit_blocks=self._count(life.request, life.hit_blocks),
        )

    def _operations(self, operations: Iterable[Operation]) -> Iterator[Operation]:
        lengths: dict[int, int] = {}
        for kind, life, first, second in operations:
            if kind in (ADMIT, RELEASE):
                if self._places.get(self._request_of.get(life, -1)):
                    yield kind, life, first, second
            elif kind == GROW:
                length = self._count(self._request_of.get(life, -1), first)
                if length and lengths.get(life) != length:
                    lengths[life] = length
                    yield kind, life, length, 0
            elif kind == CACHED:
                places = self._places.get(self._request_of.get(life, -1), ())
                place = bisect_left(places, first)
                if place < len(places) and places[place] == first:
                    yield kind, life, place, second
            elif kind != DROP or self._has(life):
                yield kind, life, first, second

    def _count(self, request: int, length: int) -> int:
        """How many of the first ``length`` blocks of the request's table are in the sample."""
        places = self._places.get(request)
        if places is None:
            return 0
        for place in range(self._known[request], length):
            if self._has_place(request, place):
                places.append(place)
        self._known[request] = max(self._known[request], length)
        return bisect_left(places, length)

    def _has(self, hash_id: int) -> bool:
        data = _ID.pack(hash_id) if hash_id < 1 << 63 else _UNSIGNED.pack(hash_id)
        return crc32(data) < self._below

    def _has_place(self, request: int, place: int) -> bool:
        return crc32(_PLACE.pack(request, place)) < self._below
