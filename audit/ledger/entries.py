"""What the ledger reports beside an event: comparisons, losses and impossible states that checks judge.

An :class:`Entry` pairs one subject with its account. A subject about a block has a story: one line for each
holder and operation. A count of -1 is not known.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .. import events as ev
from .account import Account, EncoderInput, Settlement
from .blocks.pool import Holder, Operation
from .kv_events import StreamSubject

# --- blocks --------------------------------------------------------------------------------------------
#
# What the ledger of blocks passes to the checks: two counts of one thing, or an impossible state.
#
# Most subjects name their block, with a story: one line for each holder and operation. A count of -1 is not
# known.


class Collision(NamedTuple):
    """A block got a second holder that it must not have.

    ``how``: ``taken`` (allocated as free while held), ``unhashed`` (touched as a cached block, but it has no
    hash), ``twice`` (two places in the tables of one request), ``unheld`` (in a table without a reference).
    """

    how: str
    pool: int
    block: int
    first: Holder | None
    second: Holder
    references: int
    story: list[str]


class StrayFree(NamedTuple):
    """A block was freed for a request that does not hold it. ``earlier``: the free before."""

    pool: int
    block: int
    by: Operation
    earlier: Operation | None
    references: int
    story: list[str]


class BlockComparison(NamedTuple):
    """The engine-reported state of a block beside the ledger's."""

    pool: int
    block: int
    references: int
    ledger_references: int
    queued: int
    has_hash: int
    ledger_has_hash: int
    mapped: int
    holders: list[str]
    story: list[str]


class PoolComparison(NamedTuple):
    """The engine-reported lengths of a pool's free queue and cache map beside the ledger's."""

    pool: int
    free_blocks: int
    ledger_free_blocks: int
    hashes: int
    ledger_hashes: int


class CachedContent(NamedTuple):
    """A block is cached for the positions [start, end), and some of these have no KV.

    ``why``: ``sequence`` (the request has only ``limit`` tokens), ``pending`` (an asynchronous load has
    not finished: ``limit`` tokens have KV), ``failed`` (a load failed from position ``limit`` up),
    ``unfilled`` (the request's life ended when it had computed ``limit`` tokens), ``withdrawn`` (the same,
    and the step that was to compute the others never ran) or ``hashed_otherwise`` (the hash is that of a
    block for positions up to ``limit``).
    """

    why: str
    request_id: str
    pool: int
    block: int
    start: int
    end: int
    limit: int
    story: list[str]


class ReadInvalid(NamedTuple):
    """A step reads positions that have no valid KV.

    These are ``tokens`` positions from ``start`` up and below ``end``. ``why``: of the first of them, see
    :data:`~kvledger.audit.ledger.blocks.pool.Lack`. ``filler``: the request that fills the first block.
    ``step``: the step that reads them; -1: the one that was posted last.
    """

    pool: int
    blocks: list[int]
    tokens: int
    start: int
    end: int
    filler: str
    why: str
    story: list[str]
    step: int = -1


class UncommittedHit(ReadInvalid):
    """A step reads positions of a cached block before the step that writes them.

    ``why``: ``withdrawn`` (the scheduler took the request out of that step) or ``in_step`` (a state is read
    in the step that writes it).
    """

    __slots__ = ()


class ForeignHit(NamedTuple):
    """A request hit cached blocks that were written under other isolation classes.

    ``differs``: what the request and ``writer``, who wrote the first of these blocks, do not share.
    """

    pool: int
    blocks: list[int]
    tokens: int
    writer: str
    holder: Holder
    differs: list[str]
    story: list[str]


class OtherPrefix(NamedTuple):
    """A request hit cached blocks into which the KV of another prefix was computed.

    ``end``: where the first of them ends in the request. ``writer``: who cached it.
    """

    pool: int
    group: int
    blocks: list[int]
    tokens: int
    end: int
    writer: str
    holder: Holder
    story: list[str]


class LoadInFlight(NamedTuple):
    """Blocks were allocated for an asynchronous load while a step in flight may still write them.

    ``writer``: the request of that step that held the first of them, and gave it back in step ``freed``.
    """

    pool: int
    blocks: list[int]
    tokens: int
    writer: str
    freed: int
    story: list[str]


class ForeignLoad(NamedTuple):
    """A request was promised external tokens whose KV was saved under other isolation classes.

    ``tokens`` positions from ``start`` up are in chunks of the connector's store whose keys ``writer`` used.
    """

    tokens: int
    start: int
    writer: str
    differs: list[str]


class SharedWrite(NamedTuple):
    """A request writes to a block that another request held first."""

    pool: int
    block: int
    place: int
    first: Holder
    second: Holder
    story: list[str]


class Uncovered(NamedTuple):
    """A request's table has fewer slots than the request has computed tokens."""

    group: int
    blocks: int
    block_tokens: int
    computed_tokens: int


class Stateless(NamedTuple):
    """A request's table has no block at the place of a state that the request reads."""

    group: int
    place: int
    end: int
    """Where the prefix ends of which the state is the checkpoint."""


class Misplaced(NamedTuple):
    """A cached block stands in a request's table where other positions belong."""

    group: int
    block: int
    place: int
    """Which block of the table it is."""
    block_tokens: int
    begin: int
    """The first position that its hash stands for."""
    story: list[str]


class Leak(NamedTuple):
    """Blocks are held for a request that the engine has forgotten, or that ended long ago.

    ``by``: the operation that took a reference outside the block tables, of which no request knows.
    """

    holder: Holder
    blocks: list[int]
    seconds: int
    story: list[str]
    by: str = ""


Subject = (
    Collision
    | StrayFree
    | BlockComparison
    | PoolComparison
    | CachedContent
    | ReadInvalid
    | UncommittedHit
    | ForeignHit
    | OtherPrefix
    | LoadInFlight
    | ForeignLoad
    | SharedWrite
    | Misplaced
    | Uncovered
    | Stateless
    | Leak
)
BlockFinding = tuple[Subject, int]
"""A subject and its request; -1: no request."""


# --- requests, contents and the encoder cache ----------------------------------------------------------


class ReportedCounts(msgspec.Struct, frozen=True, gc=False):
    """Counts that the engine reported for one request, beside the ledger's, at one instant.

    Where the engine reports computed tokens alone, there is a subject only if they differ.

    ``instant``: ``admitted``, ``scheduled``, ``rolled back``, ``loaded``, ``preempted``,
    ``census``, ``finished``. A count that the engine does not have is -1. ``sampled_last``: how many tokens
    at the end of a sequence were sampled and never computed; a diffusion model samples none.
    """

    instant: str
    computed: int
    ledger_computed: int
    in_flight: int = -1
    ledger_in_flight: int = -1
    placeholders: int = -1
    sequence: int = -1
    ledger_sequence: int = -1
    sampled_last: int = 1


class ExternalTokensLost(NamedTuple):
    """External tokens that failed or were cancelled. ``blocks``: block ids known to stay unfilled.

    ``by_worker``: ``never_started`` (a worker did not start the load) or ``failure_unheard`` (the engine
    ignored the failure that a worker reported); "" where the scheduler's events alone prove the loss.
    """

    tokens: int
    cause: str
    start: int
    blocks: list[int]
    by_worker: str = ""


class Overdue(NamedTuple):
    """A transfer that a connector began and has not ended for ``OVERDUE_SECONDS``.

    ``what``: ``load`` (``tokens`` are still pending) or ``free`` (``blocks`` are still kept). ``done``: the
    workers did report the transfer as finished.
    """

    what: str
    request_id: str
    seconds: int
    tokens: int
    blocks: int
    done: bool = False


class FailedBlocksKept(NamedTuple):
    """After a failed load, the engine counts positions [start, end) as computed, of blocks that failed."""

    start: int
    end: int
    blocks: list[int]


class Handover(NamedTuple):
    """What a connector was handed when a request ended, beside the account.

    ``reported``: the computed tokens that the engine reported just before. -1: the engine has no such count.
    ``unloaded``: how many of the account's tokens an asynchronous load was still to bring.
    """

    request_id: str
    computed: int
    reported: int
    ledger_computed: int
    blocks: int
    room: int
    trimmed: bool
    unloaded: int = 0


class StaleKV(NamedTuple):
    """Tokens that a life hit, or is to load, whose chain is of older weights than the request runs under.

    ``source``: ``hit`` or ``load``. ``start`` is the first of the positions, ``oldest`` the oldest version,
    ``version`` that of the request. ``writer`` wrote the first of the blocks; empty: not known.
    """

    source: str
    tokens: int
    start: int
    oldest: int
    version: int
    writer: str


class OlderOutputs(NamedTuple):
    """Output tokens of a request that ended, sampled over its own KV of older weights.

    ``oldest`` is the oldest version in the chain, ``version`` that of the last of the steps.
    """

    tokens: int
    oldest: int
    version: int


class OutputsMislabelled(NamedTuple):
    """Output tokens of a request that ended, which the engine's output says are of the weights ``label``.

    ``start`` to ``end``: the engine's span. The steps of ``tokens`` of them read KV of ``oldest`` and later.
    """

    label: str
    start: int
    end: int
    tokens: int
    oldest: int
    version: int


class ResetRefused(NamedTuple):
    """The engine refused to reset the prefix cache after a change of weights, in ``step``, and a request hit.

    ``version`` is that of the change, ``tokens`` are those of the first hit since then.
    """

    step: int
    version: int
    tokens: int


class WorkersDiffer(NamedTuple):
    """A step runs though a call that changes weights had other outcomes on some workers than on others.

    ``call`` is the number of the call of ``by``, ``version`` that of the weights since. ``with_new`` are the
    ranks of the workers that have them, ``without`` those that do not: the call ``raised`` there, or left all
    weights as they were.
    """

    by: str
    call: int
    version: int
    with_new: list[int]
    without: list[int]
    raised: bool


class Stalled(NamedTuple):
    """A request that none of the last ``steps`` steps scheduled, in ``seconds``, while others ran.

    ``runs``: a step has scheduled it in its present life; else the request waits.
    """

    steps: int
    seconds: int
    runs: bool


class Misqueued(NamedTuple):
    """A request that is ``open`` and not in exactly one of the scheduler's queues, or ended and in some."""

    request_id: str
    places: int
    open: bool


class SlotsMissing(NamedTuple):
    """``missing`` slots of the token pool are counted nowhere; negative: so many are counted twice.

    ``slots`` are the uses of slots, in the order of the census, and all slots. The difference was not there
    yet after ``first_step`` and there after ``last_step``. ``done``: what happened in between.
    """

    missing: int
    slots: list[int]
    first_step: int
    last_step: int
    done: str


class SlotsKept(NamedTuple):
    """``protected`` cached tokens that no request and no session uses, for ``seconds``."""

    protected: int
    seconds: int


class StoodStill(NamedTuple):
    """``calls`` of ``schedule`` in a row, in ``seconds``, scheduled none of the ``ready`` requests.

    ``sessions`` waited for their client's next chunk.
    """

    calls: int
    seconds: int
    ready: int
    sessions: int


class Livelocked(NamedTuple):
    """``steps`` in a row, in ``seconds``, gave none of the open ``requests`` a token that it had not had.

    ``tokens`` were scheduled. ``preemptions`` are those of the request that was scheduled most.
    """

    steps: int
    seconds: int
    tokens: int
    requests: int
    preemptions: int


class Unpromised(NamedTuple):
    """A worker loaded into blocks of no promise, so their KV was overwritten."""

    worker: int
    step: int
    blocks: list[int]


class SaveSkipped(NamedTuple):
    """A save begins above the tokens that the connector has saved, or was found to hold."""

    held_tokens: int
    start: int


class Unsaved(NamedTuple):
    """A worker was ordered to save KV, but was not made to wait for the saves."""

    worker: int
    step: int
    saves: int


class ReportedLookups(NamedTuple):
    """The engine's prefix-cache lookup statistics for one step, which are not what its admissions give."""

    requests: int
    queries: int
    hits: int
    ledger_requests: int
    ledger_queries: int
    ledger_hits: int
    source: str


class MiscountedLookups(NamedTuple):
    """Lookups of one cache that the engine's statistics count by another rule than an admission that ran.

    ``why``: ``never_ran`` (the admitted request ended, or lost its blocks, before it ran), ``load_failed``
    (``hits`` failed to load), ``resumed`` (counted apart, and not exported), ``exempt`` (the request may not
    read a cache) or ``attempts`` (no admission followed). ``source``: ``local`` or ``external``.
    """

    why: str
    source: str
    requests: int
    queries: int
    hits: int


class PromptUnreported(NamedTuple):
    """Prompt tokens with KV that the engine never reported.

    ``session``: they are a later chunk of a session; else the request ended before its first output.
    """

    tokens: int
    session: bool


class CountedDrafts(NamedTuple):
    """Draft tokens of one output as the engine counted them, beside what became of them.

    ``padding`` are draft tokens of requests in their first step of a life, which nobody can have proposed.
    ``cut`` of the ``accepted`` ones lay beyond a stop and are no output.
    """

    step: int
    counted_tokens: int
    counted_accepted: int
    proposed: int
    padding: int
    accepted: int
    cut: int


class SiblingAdded(NamedTuple):
    """A further sample of a client's request (``n`` > 1) was added: a request of its own to the engine.

    ``client_request`` is the id that all samples share, ``sample`` counts them from 0.
    """

    client_request: str
    sample: int


class TokensMissing(NamedTuple):
    """A step computes positions up to ``end``, drafts left out, for which there are no tokens.

    The sequence has ``sequence`` tokens, and the steps in flight can bring at most ``to_come``.
    """

    end: int
    sequence: int
    to_come: int


class SampledTwice(NamedTuple):
    """An output brought a token for a position that had one.

    The step sampled the token after its ``end`` positions, and the sequence has ``sequence`` tokens.
    """

    end: int
    sequence: int


class TurnOvercounted(NamedTuple):
    """A session's turn left ``tokens`` tokens, and the engine counts ``computed`` of them as computed."""

    tokens: int
    computed: int


class StaleRejection(NamedTuple):
    """Draft tokens that the engine subtracted from a count which a failed load had rolled back before.

    ``computed``: the count before, which no longer had the tokens.
    """

    computed: int
    rejected: int


class ContentChanged(NamedTuple):
    """The bytes of a sealed block changed, and nobody was to write them.

    The block was sealed after ``sealed_step``, held the same bytes at ``intact_step``, and other bytes when
    it was compared in ``step``. ``reader``: the request that hit the block; "" where a scrub found the
    change. ``writer``: the request that filled the block.
    """

    worker: int
    group: int
    pool: int
    blocks: list[int]
    tokens: int
    sealed_step: int
    intact_step: int
    step: int
    reader: str
    writer: str
    story: list[str]


class UnsealedHit(NamedTuple):
    """A request hit cached blocks that no worker was seen to fill since they were allocated.

    ``allocated_step``, ``allocated_for``: the allocation of the first of the blocks.
    """

    worker: int
    group: int
    pool: int
    blocks: list[int]
    tokens: int
    allocated_step: int
    allocated_for: str
    step: int
    story: list[str]


class StoredElsewhere(NamedTuple):
    """A block that was handed to the store under another hash, or by another worker."""

    hash_id: int
    worker: int
    step: int
    block: int
    writer: str


class ContentTransfer(NamedTuple):
    """Loads filled blocks with other KV than was stored under their hashes.

    ``how``: ``exchanged`` (keys and values), ``zeros`` or ``other``. ``layers`` are the indices of the layers
    that differ from the nearest stored version, ``part`` is ``keys``, ``values`` or ``both``. ``reader``: the
    request for which the blocks were loaded. ``writer``: the request that had filled the block that was
    stored last, in ``stored_step``. The last two are of the first block. ``prints``: the fingerprints that
    arrived in the first block, as hexadecimal digits. ``arrived``: the stored block that they are of.
    """

    worker: int
    group: int
    pool: int
    blocks: list[int]
    step: int
    how: str
    layers: tuple[int, ...]
    part: str
    layer_count: int
    reader: str
    stored_step: int
    writer: str
    story: list[str]
    prints: str = ""
    arrived: StoredElsewhere | None = None
    tokens: int = 0


class ContentStored(NamedTuple):
    """A connector stored a block whose KV is not what was sealed, although the block was not reallocated."""

    worker: int
    group: int
    pool: int
    block: int
    sealed_step: int
    step: int
    writer: str
    story: list[str]


class ContentRecomputed(NamedTuple):
    """Two computations of the same blocks differ by more than rounding.

    The first of ``blocks`` differs most, by ``distance`` in the ``part`` of ``layer``, from block
    ``before_block``, which request ``before_writer`` had filled under the same hash in step ``before_step``.
    ``layers``: its layers of which some part is too far.
    """

    worker: int
    group: int
    pool: int
    blocks: list[int]
    step: int
    writer: str
    before_block: int
    before_step: int
    before_writer: str
    distance: float
    layer: int
    part: str
    layers: tuple[int, ...]
    layer_count: int
    story: list[str]


class EncoderBudget(NamedTuple):
    """The engine's count of free embeddings of its encoder cache differs from that of the entries.

    ``shared``: outputs stay for later requests; else ``expected`` is the most that can be free.
    ``evictable``: ``free`` and ``expected`` also count the entries that no request holds.
    """

    size: int
    free: int
    expected: int
    shared: bool
    step: int
    evictable: bool = False


class EncoderOutputsKept(NamedTuple):
    """A request has ended and still holds ``outputs`` of the encoder cache."""

    request_id: str
    outputs: int
    step: int


class EncoderOutputEvicted(NamedTuple):
    """An encoder output left the cache, and a running request has still to read it for ``tokens``."""

    item: EncoderInput
    tokens: int
    step: int


class EncoderOutputMissing(NamedTuple):
    """A step reads an encoder output for ``tokens`` that is cached for the engine, and no worker has it."""

    item: EncoderInput
    tokens: int
    step: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One subject, and its account as it stood right after posting.

    ``number`` is the event's number, ``at`` its time. The subject is the event itself or what the ledger
    derived from it.
    """

    number: int
    step: int
    at: int
    subject: (
        ev.Event
        | ReportedCounts
        | ExternalTokensLost
        | Overdue
        | Handover
        | FailedBlocksKept
        | StaleKV
        | OlderOutputs
        | OutputsMislabelled
        | ResetRefused
        | WorkersDiffer
        | Stalled
        | StoodStill
        | Misqueued
        | SlotsMissing
        | SlotsKept
        | Livelocked
        | Unpromised
        | SaveSkipped
        | Unsaved
        | ReportedLookups
        | MiscountedLookups
        | PromptUnreported
        | CountedDrafts
        | StaleRejection
        | TokensMissing
        | SampledTwice
        | TurnOvercounted
        | SiblingAdded
        | ContentChanged
        | UnsealedHit
        | ContentTransfer
        | ContentStored
        | ContentRecomputed
        | EncoderBudget
        | EncoderOutputEvicted
        | EncoderOutputsKept
        | EncoderOutputMissing
        | StreamSubject
        | Settlement
        | Subject
    )
    account: Account | None
