"""What the requests of one engine did with the blocks of its prefix cache, in order.

A :class:`BlockTrace` names content by hash id and no block of the recorded pool, so ``simulated_pool.py`` can
replay it on a pool of another size. It is made of *changes*, which ``trace_reader.py`` reads from a journal
of level ``blocks``. Changes are kept as rows of ``block_operations`` and lives as rows of ``admissions``: so
a trace is the same from a journal and from kept rows.

Only an engine with one pool and one KV cache group of full attention has such a trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from ..errors import JournalError, LedgerError
from ..events import Admitted

ADMIT, GROW, CACHED, RELEASE, DROP, RESET, HIT, EVICT = range(8)
"""Kinds of operations and changes."""

IN_GROUP = 8
"""A kind of change: a life cached a block of another group. Number: the block's end in tokens. Hash ids: the
group, and the hash id."""

Operation = tuple[int, int, int, int]
"""What a pool replays: its kind and three numbers.

- ADMIT: life, 0, 0. The life looks its sequence up and holds the blocks that it hits.
- GROW: life, length, 0. The life's table has at least this many blocks from now on.
- CACHED: life, index, hash id. The block at this index of the life's table is full and can be hit.
- RELEASE: life, 0, 0. The life gives up its table, last block first.
- DROP: hash id, 0, 0. The engine took the content out of the cache, for example after a failed load.
- RESET: 0, 0, 0. The engine dropped everything in its prefix cache.
"""

Change = tuple[int, int, int, Sequence[int], int]
"""What the recorded engine did: kind, life (-1: of no life), a number, hash ids, and when.

The number is the length of the table of a GROW, the index of the first block of a CACHED or HIT, and of a
RESET after the weights changed :data:`AFTER_WEIGHTS`. The time is in microseconds since the engine started.

- HIT: an admission hit this content, and its table is longer by it.
- EVICT: content was evicted because a block was allocated, to this life if it is known.
"""

AFTER_WEIGHTS = 1
"""The number of a RESET after the weights changed."""


class NoBlockTrace(JournalError):
    """A journal from which no block trace can be made."""


class TraceLife(msgspec.Struct):
    """One life of a request: from an admission to the release of its table."""

    request: int = -1
    """Index of the request in :attr:`BlockTrace.requests`; -1: the life is in no trace yet."""
    sequence_tokens: int = 0
    """Length of the sequence that the admission looked up."""
    resumed: bool = False
    """Whether the request had an earlier life."""
    hit_blocks: int = 0
    """Blocks that the recorded engine hit."""
    hit_tokens: int = -1
    """Local tokens of the recorded admission; -1: the admission was not recorded."""
    external_tokens: int = 0
    """Tokens that the connector promised at the admission."""
    at: int = 0
    """When the request was admitted, in microseconds since the engine started."""
    preempted: bool = False
    """Whether the life ended by a preemption because no blocks were free."""
    computed_tokens: int = 0
    """Tokens that had KV when the life was preempted, or its request ended."""
    counted: bool = True
    """Whether hits of this life are counted: it began in the time window."""


class TraceRequest(msgspec.Struct):
    """One request. ``hashes`` has the hash id of each full block of its sequence; 0: not known."""

    request_id: str
    prompt_tokens: int
    hashes: list[int] = []


class BlockTrace(msgspec.Struct):
    """The operations of one engine, and what they refer to."""

    engine: str = ""
    version: str = ""
    block_tokens: int = 0
    blocks: int = 0
    """Blocks of the recorded pool that requests can use; 0: the trace is of no pool."""
    block_bytes: int = 0
    """Bytes of KV in one block, over all workers; 0: not known."""
    operations: list[Operation] = []
    lives: list[TraceLife] = []
    requests: list[TraceRequest] = []
    doubts: list[str] = []
    """Reasons why a replay of this trace may differ from the recorded engine."""
    began_seconds: float = 0.0
    """Unix time from which the times of lives count."""

    def limit(self, life: TraceLife) -> int:
        """The most blocks that a lookup of this life can hit: the last token is always computed."""
        return max(0, life.sequence_tokens - 1) // self.block_tokens


class RecordedRequest(msgspec.Struct):
    """One request and its lives, as a journal or kept rows have them.

    ``arrival`` counts the requests of a journal; ``number`` is the journal's own. ``added_at``,
    ``closed_at``: microseconds since the engine started; -1: not known, or open. ``lives`` by their number,
    which counts all lives of the journal.
    """

    number: int
    arrival: int
    request_id: str
    prompt_tokens: int
    priority: int = 0
    lora: str = ""
    salt: str = ""
    group: str = ""
    session: str = ""
    added_at: int = -1
    closed_at: int = -1
    lives: dict[int, TraceLife] = {}
    sequence_tokens: int = -1
    """Length of the sequence when the request was preempted last; -1: it was not."""
    life: int = -1
    """The number of its present life; -1: it has no table."""
    table: list[int] = []
    """The blocks of its present life."""
    unadmitted: list[int] = []
    """Lives whose admission has not been read yet."""
    admissions: list[Admitted] = []
    """Admissions whose life has not begun yet."""
    removed: bool = False
    """Whether the engine has forgotten its tables. Its end comes then, too, if no event is lost."""


class TraceBuilder:
    """Makes a :class:`BlockTrace` of changes and requests."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        """The operations so far, with the numbers of lives in the journal."""
        self._hashes: dict[int, list[int]] = {}
        """By life: the hash ids of its blocks as far as it hit or cached them; 0: not known."""

    def add(self, changes: Iterable[Change]) -> None:
        """Add changes in their order."""
        for change in changes:
            kind, life, index, ids, _ = change
            if kind in (CACHED, HIT):
                put(self._hashes.setdefault(life, []), index, ids)
            self._operations += _operations(change)

    @property
    def first(self) -> int:
        """The first life that is admitted, in the count of the journal."""
        return next((life for kind, life, _, _ in self._operations if kind == ADMIT), 0)

    def trace(self, described: BlockTrace, requests: Iterable[RecordedRequest]) -> BlockTrace:
        """The whole trace of the ``described`` engine, with its requests in the order of arrival.

        Where the oldest lives are not kept any more, the trace counts the others from 0. Raises LedgerError
        if others are missing.
        """
        first = self.first
        known = (one for one in requests if one.lives and max(one.lives) >= first)
        recorded = sorted(known, key=lambda one: one.arrival)
        numbered = {
            number: replace(life, request=place)
            for place, one in enumerate(recorded)
            for number, life in one.lives.items()
            if number >= first
        }
        if numbered and max(numbered) - first + 1 != len(numbered):
            raise LedgerError("Rows of admissions are missing.")
        operations, doubts = self._operations, described.doubts
        if first:
            doubts = [*doubts, f"the {first:,} oldest admissions are not kept any more"]
            operations = [
                (kind, one if kind in (DROP, RESET) else one - first, index, hash_id)
                for kind, one, index, hash_id in operations
                if kind in (DROP, RESET) or one >= first
            ]
        return replace(
            described,
            operations=operations,
            lives=[numbered[number] for number in sorted(numbered)],
            requests=[
                TraceRequest(one.request_id, one.prompt_tokens, self._hashes_of(one)) for one in recorded
            ],
            doubts=doubts,
        )

    def _hashes_of(self, request: RecordedRequest) -> list[int]:
        """The hash ids of the blocks of its lives; those of a later life count."""
        hashes: list[int] = []
        for life in sorted(request.lives):
            _overlay(hashes, self._hashes.pop(life, ()))
        return hashes


def _operations(change: Change) -> Iterator[Operation]:
    """What a pool replays of a change."""
    kind, life, number, ids, _ = change
    if kind == CACHED:
        for index, hash_id in enumerate(ids, number):
            yield kind, life, index, hash_id
    elif kind == HIT:
        yield GROW, life, number + len(ids), 0
    elif kind == DROP:
        for hash_id in ids:
            yield kind, hash_id, 0, 0
    elif kind not in (EVICT, IN_GROUP):
        yield kind, max(0, life), 0 if kind == RESET else number, 0  # a RESET is of no life


def put(hashes: list[int], first: int, ids: Sequence[int]) -> None:
    """Set items of a list that may be too short."""
    if first > len(hashes):
        hashes += [0] * (first - len(hashes))
    hashes[first : first + len(ids)] = ids


def _overlay(hashes: list[int], later: Sequence[int]) -> None:
    """Replace the hash ids by those of a later life, where it has them."""
    if not hashes:
        hashes += later
        return
    for index, hash_id in enumerate(later):
        if hash_id or index >= len(hashes):
            put(hashes, index, (hash_id,))
