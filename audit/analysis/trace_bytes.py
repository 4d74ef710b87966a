"""Parts of a block trace as bytes: columns of small numbers, compressed.

Hash ids stand once in a part, in the order in which requests have them, and are referred to by place. So most
columns are differences of 0 and 1, and a request takes little more than the hash ids that nobody had before.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice

import msgspec

from ..errors import LedgerError
from ..events import RequestLabels
from .block_trace import (
    ADMIT,
    CACHED,
    DROP,
    GROW,
    RELEASE,
    RESET,
    UNNAMED,
    Operation,
    TraceLife,
    TraceRequest,
)
from .trace_parts import TracePart

_CODES = "bhiqQ"
"""Type codes of :mod:`array`, the smallest numbers first."""

_DAMAGE = (
    zlib.error,
    msgspec.MsgspecError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What decoding damaged bytes may raise."""

_RESUMED, _PREEMPTED = 1, 2

MOST_BYTES = 256 << 20
"""A larger part is damaged. This bounds the memory that a few bytes can make a reader allocate."""

_Column = tuple[str, bytes]
"""Numbers: the type code of their array, and its little-endian bytes."""


class _Part(msgspec.Struct, array_like=True):
    """The columns of a part. Columns of indices, times and places are differences of neighbours."""

    kinds: bytes
    operation_lives: _Column
    lengths: _Column
    places: _Column
    operation_hashes: _Column
    hash_ids: _Column
    unnamed: dict[int, int]
    """By place in ``hash_ids``: the numbers of contents without a hash id, see ``UNNAMED``."""
    lives: _Column
    life_requests: _Column
    flags: _Column
    sequence_tokens: _Column
    hit_blocks: _Column
    hit_tokens: _Column
    external_tokens: _Column
    admitted: _Column
    computed_tokens: _Column
    requests: _Column
    request_ids: list[str]
    prompt_tokens: _Column
    priorities: _Column
    labels: list[RequestLabels | None]
    request_labels: _Column
    has_arrived: _Column
    arrived: _Column
    hash_counts: _Column
    hashes: _Column


def encode(part: TracePart, began_seconds: float) -> bytes:
    """The part as bytes. ``began_seconds``: Unix time of the engine's start. Raises LedgerError."""
    try:
        return zlib.compress(msgspec.msgpack.encode(_columns(part, began_seconds)), 6)
    except OverflowError:
        raise LedgerError("The journal has numbers that no engine writes.") from None


def decode(data: bytes, began_seconds: float) -> TracePart:
    """The part that :func:`encode` made into ``data``. Raises LedgerError if the bytes are damaged."""
    try:
        inflated = zlib.decompressobj().decompress(data, MOST_BYTES)
        return _part(msgspec.msgpack.decode(inflated, type=_Part), began_seconds)
    except _DAMAGE:
        raise LedgerError("A kept block trace is damaged.") from None


# --- to columns -----------------------------------------------------------------------------------------


def _columns(part: TracePart, began: float) -> _Part:
    lives, requests = part.lives.values(), part.requests.values()
    place_of: dict[int, int] = {}
    labels: dict[RequestLabels | None, int] = {}
    hashes = [place_of.setdefault(h, len(place_of)) for one in requests for h in one.hashes]
    used = [
        place_of.setdefault(number, len(place_of))
        for kind, first, _, second in part.operations
        for number in ((second,) if kind == CACHED else (first,) if kind == DROP else ())
    ]
    arrived = [_since(began, one.arrived_seconds) for one in requests]
    return _Part(
        kinds=bytes(operation[0] for operation in part.operations),
        operation_lives=_steps(one[1] for one in part.operations if one[0] not in (DROP, RESET)),
        lengths=_packed(one[2] for one in part.operations if one[0] == GROW),
        places=_packed(one[2] for one in part.operations if one[0] == CACHED),
        operation_hashes=_steps(used),
        hash_ids=_packed(0 if number >= UNNAMED else number for number in place_of),
        unnamed={place: number for number, place in place_of.items() if number >= UNNAMED},
        lives=_steps(part.lives),
        life_requests=_steps(one.request for one in lives),
        flags=_packed(_RESUMED * one.resumed | _PREEMPTED * one.preempted for one in lives),
        sequence_tokens=_packed(one.sequence_tokens for one in lives),
        hit_blocks=_packed(one.hit_blocks for one in lives),
        hit_tokens=_packed(one.hit_tokens for one in lives),
        external_tokens=_packed(one.external_tokens for one in lives),
        admitted=_steps(one.at for one in lives),
        computed_tokens=_packed(one.computed_tokens for one in lives),
        requests=_steps(part.requests),
        request_ids=[one.request_id for one in requests],
        prompt_tokens=_packed(one.prompt_tokens for one in requests),
        priorities=_packed(one.priority for one in requests),
        request_labels=_packed(labels.setdefault(one.labels, len(labels)) for one in requests),
        labels=list(labels),
        has_arrived=_packed(at is not None for at in arrived),
        arrived=_steps(at or 0 for at in arrived),
        hash_counts=_packed(len(one.hashes) for one in requests),
        hashes=_steps(hashes),
    )


def _since(began: float, seconds: float | None) -> int | None:
    """Microseconds since the engine's start: what :class:`TraceReader` made the time from."""
    return None if seconds is None else round((seconds - began) * 1e6)


def _packed(values: Iterable[int]) -> _Column:
    """The numbers, in the smallest type that has them all. Raises OverflowError."""
    numbers = list(values)
    for code in _CODES:
        try:
            column = array(code, numbers)
        except OverflowError:
            continue
        if sys.byteorder == "big":
            column.byteswap()
        return code, column.tobytes()
    raise OverflowError


def _steps(values: Iterable[int]) -> _Column:
    """The difference of each number to the one before."""
    numbers = list(values)
    return _packed(after - before for before, after in zip(chain((0,), numbers), numbers, strict=False))


# --- from columns ---------------------------------------------------------------------------------------


def _part(columns: _Part, began: float) -> TracePart:
    ids: list[int] = list(_numbers(columns.hash_ids))
    for place, number in columns.unnamed.items():
        ids[place] = number
    return TracePart(
        list(_operations(columns, ids)), dict(_lives(columns)), dict(_requests(columns, ids, began))
    )


def _operations(columns: _Part, ids: Sequence[int]) -> Iterator[Operation]:
    life, hashes = _sums(columns.operation_lives), _sums(columns.operation_hashes)
    length, place = iter(_numbers(columns.lengths)), iter(_numbers(columns.places))
    for kind in columns.kinds:
        if kind == CACHED:
            yield kind, next(life), next(place), ids[next(hashes)]
        elif kind == GROW:
            yield kind, next(life), next(length), 0
        elif kind in (ADMIT, RELEASE):
            yield kind, next(life), 0, 0
        elif kind == DROP:
            yield kind, ids[next(hashes)], 0, 0
        else:
            yield kind, 0, 0, 0


def _lives(columns: _Part) -> Iterator[tuple[int, TraceLife]]:
    flags = _numbers(columns.flags)
    lives = map(
        TraceLife,
        _sums(columns.life_requests),
        _numbers(columns.sequence_tokens),
        (bool(flag & _RESUMED) for flag in flags),
        _numbers(columns.hit_blocks),
        _numbers(columns.hit_tokens),
        _numbers(columns.external_tokens),
        _sums(columns.admitted),
        (bool(flag & _PREEMPTED) for flag in flags),
        _numbers(columns.computed_tokens),
    )
    return zip(_sums(columns.lives), lives, strict=True)


def _requests(columns: _Part, ids: Sequence[int], began: float) -> Iterator[tuple[int, TraceRequest]]:
    hashes = map(ids.__getitem__, _sums(columns.hashes))
    requests = map(
        TraceRequest,
        columns.request_ids,
        _numbers(columns.prompt_tokens),
        (list(islice(hashes, count)) for count in _numbers(columns.hash_counts)),
        _numbers(columns.priorities),
        map(columns.labels.__getitem__, _numbers(columns.request_labels)),
        (
            began + at / 1e6 if known else None
            for known, at in zip(_numbers(columns.has_arrived), _sums(columns.arrived), strict=True)
        ),
    )
    return zip(_sums(columns.requests), requests, strict=True)


def _numbers(column: _Column) -> array[int]:
    numbers = array(column[0])
    numbers.frombytes(column[1])
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _sums(column: _Column) -> Iterator[int]:
    return accumulate(_numbers(column))
