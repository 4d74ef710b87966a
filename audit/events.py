"""The vocabulary: what was seen in a live engine, one small frozen struct an event.

Rules of this file:

- Names are past tense. Units stand last: ``*_tokens`` are tokens of one request, ``at`` is
  microseconds since the engine's :class:`EngineStarted`, ``*_seconds`` are seconds.
- A request is known by a small integer, ``request``, given once by :class:`RequestAdded` (or by a
  :class:`Snapshot` row); its text id stands there and nowhere else. Prompts, token ids and outputs
  are never recorded.
- A field that repeats one of the engine's own figures is a *statement* (``computed_tokens`` is the
  engine's ``num_computed_tokens``). The ledger reconciles statements; it never takes them as truth.
  -1 states nothing: the engine has no such count, or none at that instant.
- A position is an index into a request's sequence: prompt first, then output tokens.
- Fields are only ever appended, with a default; a change of meaning raises :data:`SCHEMA`.

On the wire an event is a msgpack array whose first item is its tag (``docs/journal.md``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

SCHEMA = 2
"""Version of this vocabulary. A reader refuses a journal of a newer one."""

Setting = str | int | float | bool | None

if TYPE_CHECKING:
    Numbers: TypeAlias = list[int] | msgspec.Raw
    """Numbers of an event: a list, or already encoded where the event waits to be written.

    :func:`numbers` returns the list either way. An event that was read always has a list.
    """
else:
    Numbers = list[int]  # what a decoder accepts


def numbers(field: Numbers) -> list[int]:
    """The numbers of an event's field, decoded if they are not yet."""
    return field if isinstance(field, list) else msgspec.msgpack.decode(field, type=list[int])


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Anything that was seen. ``at``: microseconds since the engine started."""

    at: int


# --- the engine ---------------------------------------------------------------------------------


class EngineStarted(Event, frozen=True, array_like=True, tag=0):
    """An engine came under observation. First in every segment.

    ``wall_seconds`` is Unix time at ``at``; ``configuration`` holds plain settings only
    (``block_size``, ``blocks``, ``connector``, ``load_failure_policy``, ``asynchronous``, ...).
    """

    wall_seconds: float
    engine: str
    version: str
    adapter: str
    level: str
    process_id: int
    configuration: dict[str, Setting]

    @property
    def began_seconds(self) -> float:
        """Unix time of the instant from which ``at`` counts."""
        return self.wall_seconds - self.at / 1e6


class EngineStopped(Event, frozen=True, array_like=True, tag=1):
    """Observation ended in good order: ``shutdown``, ``detached`` or ``exit``."""

    reason: str


class Gap(Event, frozen=True, array_like=True, tag=2):
    """Events were lost between the previous one and this one. ``lost_events`` -1: not known."""

    lost_events: int
    reason: str


class HookFailed(Event, frozen=True, array_like=True, tag=3):
    """An observer raised; what it should have seen is missing. ``removed``: it gave up."""

    hook: str
    error: str
    removed: bool


# --- a request comes, is looked up, and is admitted ------------------------------------------------


class RequestAdded(Event, frozen=True, array_like=True, tag=4):
    """A request came to the scheduler. ``prompt_tokens`` is the length of its prompt.

    ``traceparent`` is the caller's trace context (W3C), where the engine was handed one.
    ``transferred``: a prefill engine hands its KV over, so what comes from outside is no cache's hit.
    """

    request: int
    request_id: str
    prompt_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    pooling: bool = False
    resumable: bool = False
    traceparent: str | None = None
    transferred: bool = False


class LookedUp(Event, frozen=True, array_like=True, tag=5):
    """The engine asked its own prefix cache; ``local_tokens`` is the answer."""

    request: int
    step: int
    local_tokens: int


class Matched(Event, frozen=True, array_like=True, tag=6):
    """The connector was asked what it holds beyond ``local_tokens``; None: ask again later."""

    request: int
    step: int
    local_tokens: int
    external_tokens: int | None
    asynchronous: bool


class AdmissionFailed(Event, frozen=True, array_like=True, tag=7):
    """``attempts`` look-ups in a row, each with these answers, led to no admission.

    ``reason`` is ``deferred`` (the connector had no answer) or ``not_allocated``.
    """

    request: int
    step: int
    reason: str
    local_tokens: int
    external_tokens: int
    attempts: int


class Admitted(Event, frozen=True, array_like=True, tag=8):
    """A life began: blocks were allocated for the hits and, unless ``asynchronous``, it runs now.

    ``local_tokens`` and ``external_tokens`` are what the engine used at allocation (external is a
    promise). ``computed_tokens`` states the count before this step's own tokens.
    ``asynchronous``: the request waits for remote KV. ``resumed``: it had been preempted.
    ``counted``: the engine may count this look-up in its statistics.
    """

    request: int
    step: int
    resumed: bool
    local_tokens: int
    external_tokens: int
    asynchronous: bool
    computed_tokens: int
    counted: bool = True


class LookupsCounted(Event, frozen=True, array_like=True, tag=9):
    """What the engine's own look-up statistics rose by during step ``step``.

    Requests are look-ups counted, queries and hits are tokens; -1: the engine does not count.
    """

    step: int
    local_requests: int
    local_queries: int
    local_hits: int
    external_requests: int
    external_queries: int
    external_hits: int


# --- external tokens ------------------------------------------------------------------------------


class LoadPlanned(Event, frozen=True, array_like=True, tag=10):
    """A step's load plan, as far as its connector's plan can be read, for one promise.

    ``tokens`` of the promise are covered; ``missing_blocks`` are block ids promised to be filled
    that no load names.
    """

    request: int
    step: int
    tokens: int
    missing_blocks: list[int]


class LoadFinished(Event, frozen=True, array_like=True, tag=11):
    """An asynchronous load was reported finished, whole or as far as it did not fail."""

    request: int
    computed_tokens: int


class LoadFailed(Event, frozen=True, array_like=True, tag=12):
    """A load was reported failed: positions from ``computed_tokens`` up are not valid.

    ``before_tokens`` and ``computed_tokens`` state the count before and after the engine's own
    truncation. Under the policy ``fail`` the request then ends.
    """

    request: int
    before_tokens: int
    computed_tokens: int
    asynchronous: bool


class RolledBack(Event, frozen=True, array_like=True, tag=13):
    """The count fell for a known ``cause``: ``full_hit``, ``replay``, ``session`` or ``released``.

    ``full_hit``: every token was a hit, and the last is executed again to have logits.
    ``released``: a load failed wholly; the blocks were freed and the request is looked up anew.
    """

    request: int
    cause: str
    before_tokens: int
    computed_tokens: int


# --- steps and their output -----------------------------------------------------------------------


class Stepped(Event, frozen=True, array_like=True, tag=14):
    """One step was scheduled, written as what differs from the step before.

    ``changed`` is flat, four numbers a request: request, scheduled tokens, drafts among them, the
    engine's computed tokens after scheduling. ``dropped``: requests of the step before that are
    not in this one. Others are scheduled as before. Counts differ from nothing after a snapshot.
    """

    step: int
    changed: Numbers
    dropped: Numbers


class Delivered(Event, frozen=True, array_like=True, tag=15):
    """The oldest undelivered step's output came, written as what differs from the output before.

    ``changed`` is flat, two numbers a request: request, tokens sampled by the model for it
    (drafts accepted plus one; 0 for a prefill chunk). ``ignored``: requests whose output the
    engine threw away. Requests in neither sampled what they sampled last time.
    """

    changed: Numbers
    ignored: Numbers


class DeliveredWhole(Event, frozen=True, array_like=True, tag=40):
    """As :class:`Delivered` where nothing was thrown away and many sampled another number than last time.

    ``sampled`` has a byte for each of ``requests``, in their order. Where these are none, they are those
    of the last event of this kind, which stands in the same segment. Requests that are not among them
    sampled what they sampled last time.
    """

    requests: list[int]
    sampled: bytes


class Repeated(Event, frozen=True, array_like=True, tag=16):
    """The last step and the last output, in this order, happened ``times`` times again, unchanged."""

    times: int


class Reported(Event, frozen=True, array_like=True, tag=17):
    """The engine told its front end where a prompt came from (``prefill_stats`` since 0.20)."""

    request: int
    prompt_tokens: int
    local_tokens: int
    external_tokens: int
    computed_tokens: int
    cached_tokens: int


# --- preemption, sessions, the end ------------------------------------------------------------------


class Preempted(Event, frozen=True, array_like=True, tag=18):
    """A life ended before its request did. ``cause``: ``blocks`` or ``reset``.

    ``before_tokens``, ``in_flight_tokens`` and ``placeholder_tokens`` state the engine's counts
    just before; ``computed_tokens`` and ``held_blocks`` just after (both should be 0).
    ``delivered``: output still in flight will be delivered (else it is dropped).
    """

    request: int
    step: int
    cause: str
    before_tokens: int
    in_flight_tokens: int
    placeholder_tokens: int
    computed_tokens: int
    held_blocks: int
    delivered: bool


class CacheReset(Event, frozen=True, array_like=True, tag=19):
    """Somebody asked for the local prefix cache to be emptied."""

    succeeded: bool
    running: bool


class Extended(Event, frozen=True, array_like=True, tag=20):
    """A streaming-input session got its next chunk: the prompt is now ``prompt_tokens`` long.

    Or a connector has cut it before it was admitted. ``computed_tokens`` states the count, and is where
    the chunk's own tokens begin.
    """

    request: int
    prompt_tokens: int
    computed_tokens: int


class Finished(Event, frozen=True, array_like=True, tag=21):
    """A request ended. ``reason``: ``stopped``, ``length``, ``aborted``, ``ignored``, ``error``, ...

    The rest are statements just before its blocks are given up; -1: the engine has no such count.
    """

    request: int
    reason: str
    computed_tokens: int
    in_flight_tokens: int
    placeholder_tokens: int
    sequence_tokens: int
    output_tokens: int


# --- statements at rest -----------------------------------------------------------------------------


class Census(Event, frozen=True, array_like=True, tag=22):
    """Every running request's counters, stated between two steps.

    ``rows`` is flat, five numbers a request: request, computed tokens, in-flight tokens, output
    placeholders, tokens in the sequence (-1: the engine has no such count).
    ``hook_us``: microseconds that the hooks took in ``hook_steps`` steps since the last census, which
    were timed as a sample; -1: none was.
    """

    step: int
    rows: list[int]
    waiting_requests: int
    free_blocks: int
    blocks: int
    hook_us: int = -1
    hook_steps: int = 0


class SnapshotRow(msgspec.Struct, frozen=True, array_like=True):
    """One living request, so that a reader may begin here. ``fresh``: no life had begun yet."""

    request: int
    request_id: str
    prompt_tokens: int
    fresh: bool
    computed_tokens: int
    in_flight_tokens: int
    placeholder_tokens: int
    sequence_tokens: int
    preemptions: int
    transferred: bool = False


class Snapshot(Event, frozen=True, array_like=True, tag=23):
    """All living requests. Second in every segment; the next :class:`Stepped` names everyone.

    ``undelivered_steps``: outputs that will answer steps from before this snapshot.
    """

    step: int
    rows: list[SnapshotRow]
    undelivered_steps: int


# --- look-ups that outlive their step -----------------------------------------------------------------


class LookupKept(Event, frozen=True, array_like=True, tag=24):
    """The engine still goes by a local look-up that an earlier step made, or keeps one for nobody.

    ``local_tokens`` is the answer that it remembers, of step ``looked_up_step`` (-1: not seen);
    ``cached_tokens`` is what the cache held for the request when this was seen (-1: not asked).
    ``ended``: the request ends and its answer stays behind. Otherwise the admission that follows,
    in step ``step``, uses it.
    """

    request: int
    step: int
    looked_up_step: int
    local_tokens: int
    cached_tokens: int
    ended: bool


# --- blocks, at level ``blocks`` ------------------------------------------------------------------------


class PoolSeen(Event, frozen=True, array_like=True, tag=25):
    """A pool of blocks, as it stands where a segment begins.

    ``blocks`` is its size, the null block included, whose id is ``null_block`` (-1: it has none).
    ``free_blocks`` and ``cached_hashes`` state the lengths of its free queue and its cache map.
    ``groups`` is flat, three numbers a KV cache group that takes from it: group, tokens a block, and
    whether a place in its tables stands for a position (1; 2 where a hit also needs every block below
    it, as for full attention) or not (0: Mamba, cross-attention, rings).
    """

    step: int
    pool: int
    blocks: int
    null_block: int
    free_blocks: int
    cached_hashes: int
    groups: list[int]


class BlockEvent(Event, frozen=True, array_like=True):
    """One call of a pool. ``blocks`` are ids, in the call's order; the null block may be among them.

    ``request`` and ``group`` are those whose table it was for; -1: none, as for a connector's pin, a
    copy, or what is given back late. ``by`` is the engine's operation that called.
    """

    step: int
    pool: int
    request: int
    group: int
    by: str
    blocks: list[int]


class BlocksAllocated(Event, frozen=True, array_like=True, tag=26):
    """Free blocks were handed out, one reference each; what they were hashed for is evicted.

    Calls of one step with nothing between them that they could concern are one event. ``rows`` is
    flat, for each call: request, group, how many ids follow, and these. -1, ``by``: see BlockEvent.
    """

    step: int
    pool: int
    by: str
    rows: list[int]
    stack: list[str] | None = None


class BlocksTouched(BlockEvent, frozen=True, array_like=True, tag=27):
    """Cached blocks got one reference more. ``references`` states the counts just after."""

    references: list[int]
    stack: list[str] | None = None


class BlocksFreed(BlockEvent, frozen=True, array_like=True, tag=28):
    """Blocks lost one reference. ``references`` states the counts just after."""

    references: list[int]
    stack: list[str] | None = None


class BlocksCached(Event, frozen=True, array_like=True, tag=29):
    """Blocks were put into the cache map, for what a request's step fills them with.

    Calls of one step are one event, as for BlocksAllocated, and come after what was taken. ``rows`` is flat,
    for each call: request, group, the stated length of the request's sequence, how many blocks follow,
    and three numbers each: block, name, end. Names stand for hashes: numbers by a secret of this engine
    process, one hash one number, of either sign; two hashes share one by chance of 1 in 2**64. Positions of
    the request below the end are what the hash promises. ``replaced``: what the block was hashed for
    before is evicted. Request -1: it is whose table the block stands in, and for the length there is -1
    less the outputs of one token that have come for it and not been told. No block: some were hashed, and
    which is not known.
    """

    step: int
    pool: int
    rows: list[int]
    replaced: bool = False
    stack: list[str] | None = None


class BlocksEvicted(BlockEvent, frozen=True, array_like=True, tag=30):
    """Blocks lost their hashes and stay where they are."""

    stack: list[str] | None = None


class BlockCopied(BlockEvent, frozen=True, array_like=True, tag=31):
    """``blocks`` is a source and a target: the target gets a copy before the source is written to.

    Both have a reference more until the copy is made. ``moved``: the source's hashes are the target's
    now, and the source stays in the table; else the target stands there in its place.
    """

    moved: bool
    stack: list[str] | None = None


class BlocksDeferred(BlockEvent, frozen=True, array_like=True, tag=32):
    """A request gave up its tables, and its blocks come back when no step may write to them."""

    stack: list[str] | None = None


class PoolReset(Event, frozen=True, array_like=True, tag=33):
    """All hashes of a pool were to be forgotten. Only an idle pool is: else not ``succeeded``."""

    step: int
    pool: int
    succeeded: bool


class TablesReported(Event, frozen=True, array_like=True, tag=34):
    """Requests' block tables between two steps.

    ``rows`` is flat: request, group, the engine's count of computed tokens (-1: not known), how many ids
    follow, and these, the null block's among them.
    """

    step: int
    rows: list[int]


class BlockStatesReported(Event, frozen=True, array_like=True, tag=35):
    """Some blocks of a pool in a row, from id ``first`` up, as they stand between two steps.

    ``states`` has a number each: the reference count times 8, and 1 if it stands in the free queue,
    2 if it has a hash, 4 if the cache map leads from that hash to it.
    ``free_blocks`` and ``cached_hashes`` state the lengths of free queue and cache map; -1: not known.
    """

    step: int
    pool: int
    first: int
    states: list[int]
    free_blocks: int
    cached_hashes: int


class TablesRemoved(Event, frozen=True, array_like=True, tag=36):
    """The engine knows these requests no more: their blocks are given up, or deferred."""

    requests: list[int]


HEAD = 5
"""Length of the header of each call in ``PoolCalls.rows``."""

ALLOCATED, TOUCHED, FREED, CACHED, TABLES_REPORTED, TABLES_REMOVED, ALLOCATED_EACH, IN_STEP = range(8)
"""Codes of the calls in ``PoolCalls.rows``.

The first six stand for one event each: BlocksAllocated, BlocksTouched, BlocksFreed, BlocksCached,
TablesReported, TablesRemoved. ALLOCATED_EACH: one block was allocated to each of several requests. IN_STEP:
the calls that follow were made in another step than ``PoolCalls.step``.
"""


class PoolCalls(Event, frozen=True, array_like=True, tag=37):
    """All calls of the pools since the last event of this kind, in order.

    ``rows`` is flat. Each call starts with a header of five numbers: its code plus eight times the pool's
    number, request, group, ``more``, and how many numbers follow. These are, by code:

    - ALLOCATED: block ids.
    - TOUCHED, FREED: block ids, then as many reference counts.
    - CACHED: block, hash id and end, for each block.
    - TABLES_REPORTED: the rows of a TablesReported.
    - ALLOCATED_EACH: block ids, then as many requests.
    - TABLES_REMOVED, IN_STEP: none.

    ``more`` is the index of the calling operation in ``by``. For CACHED it is twice the reported length of
    the sequence, plus 1 if hashes were replaced; for IN_STEP the step in which the following calls were
    made. Else it is 0.
    """

    step: int
    by: Sequence[str]
    rows: Numbers
    stack: list[str] | None = None


# --- the connector's own books ------------------------------------------------------------------------


class Tracked(Event, frozen=True, array_like=True, tag=60):
    """What the connector itself counts of a request, beside the engine's count at the same instant.

    ``tracked_tokens`` of its sequence are known to the connector. ``saved_tokens`` of them it has
    ordered to be saved or found saved, ``due_tokens`` it should have by its own rules (-1: it saves
    nothing of this request). ``computed_tokens`` is the engine's count, of tokens that exist;
    ``recent_tokens`` of it at most came after the connector's last plan.
    """

    request: int
    step: int
    tracked_tokens: int
    saved_tokens: int
    due_tokens: int
    computed_tokens: int
    recent_tokens: int


class SavePlanned(Event, frozen=True, array_like=True, tag=61):
    """A step's plan orders KV to be saved: positions from ``start`` up to, not with, ``end``."""

    request: int
    step: int
    start: int
    end: int


class FreeDelayed(Event, frozen=True, array_like=True, tag=62):
    """A request has ended and the connector keeps ``blocks`` of its blocks for a transfer."""

    request: int
    step: int
    request_id: str
    blocks: int


class FreeCompleted(Event, frozen=True, array_like=True, tag=63):
    """The blocks that a connector had kept were seen to be free."""

    request: int
    step: int


class ChildMatched(Event, frozen=True, array_like=True, tag=64):
    """A child of a connector of connectors answered; equal answers in a row are told once.

    ``child`` is its place and class; ``external_tokens`` None: ask again later.
    """

    request: int
    step: int
    child: str
    local_tokens: int
    external_tokens: int | None
    asynchronous: bool


class BlocksPromised(Event, frozen=True, array_like=True, tag=65):
    """The blocks that a life's external tokens are to fill, in the order of their positions.

    ``tokens`` positions from ``start`` up; a block has ``block_tokens``. Told where the engine has one
    KV cache group.
    """

    request: int
    step: int
    start: int
    tokens: int
    block_tokens: int
    blocks: list[int]


class WorkerStepped(Event, frozen=True, array_like=True, tag=66):
    """What a worker's side of the connector did in one step; told where it did anything.

    ``step`` counts the plans that the worker was handed, from 1, ``worker`` is its rank.
    ``loaded_blocks`` are ids that the plan's loads fill (None: it can't be read), ``started`` says that
    the worker was told to begin them, ``layers`` how many layers were waited for. ``saves`` are orders
    to save in the plan (-1: they can't be read), ``saved`` says that they were waited for.
    ``failed_blocks`` it reported as not loaded. Requests stand by their ids: the transfers of
    ``received`` were reported finished, of ``failed`` failed, and what was kept for ``sent`` may go.
    """

    step: int
    worker: int
    started: bool
    loaded_blocks: list[int] | None
    layers: int
    saves: int
    saved: bool
    failed_blocks: list[int]
    received: list[str]
    failed: list[str]
    sent: list[str]


AnyEvent = (
    EngineStarted
    | EngineStopped
    | Gap
    | HookFailed
    | RequestAdded
    | LookedUp
    | Matched
    | AdmissionFailed
    | Admitted
    | LookupsCounted
    | LoadPlanned
    | LoadFinished
    | LoadFailed
    | RolledBack
    | Stepped
    | Delivered
    | DeliveredWhole
    | Repeated
    | Reported
    | Preempted
    | CacheReset
    | Extended
    | Finished
    | Census
    | Snapshot
    | LookupKept
    | PoolSeen
    | BlocksAllocated
    | BlocksTouched
    | BlocksFreed
    | BlocksCached
    | BlocksEvicted
    | BlockCopied
    | BlocksDeferred
    | PoolReset
    | TablesReported
    | BlockStatesReported
    | TablesRemoved
    | PoolCalls
    | Tracked
    | SavePlanned
    | FreeDelayed
    | FreeCompleted
    | ChildMatched
    | BlocksPromised
    | WorkerStepped
)
