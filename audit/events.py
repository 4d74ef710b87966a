"""The events that hooks emit: one small frozen struct for each thing that an engine does.

Rules of this file:

- Names are past tense. Units stand last: ``*_tokens`` are tokens of one request, ``at`` is
  microseconds since the engine's :class:`EngineStarted`, ``*_seconds`` are seconds.
- ``request`` is a small integer for a request. :class:`RequestAdded` (or a :class:`Snapshot` row) gives
  it once, together with the request's text id. Prompts, token ids and outputs are never recorded.
- A field that repeats one of the engine's own figures is an *engine-reported count* (``computed_tokens``
  is the engine's ``num_computed_tokens``). The ledger compares these counts with its own and does not
  rely on them. -1: the engine has no such count, or has none at that instant.
- A position is an index into a request's sequence: prompt first, then output tokens.
- Fields are only ever appended, with a default; a change of meaning raises :data:`SCHEMA`.

On the wire an event is a msgpack array whose first item is its tag (``docs/journal.md``). Events that no
engine emits any more are at the end of this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

SCHEMA = 2
"""Version of the events. A reader refuses a journal of a newer one."""

Setting = str | int | float | bool | None

Microseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""Time since the engine started. A decoder refuses what is out of the bounds, and so for the types below."""

UnixSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Unix time, up to the year 5138."""

Repeats = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""How often a step was repeated."""

StepsInFlight = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
"""How many steps await their output: one, or as many as a pipeline has stages."""

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


Isolation: TypeAlias = list[int]
"""The isolation classes of a request: what its KV depends on besides its tokens. Level ``blocks`` only.

A class is a keyed hash of 64 bits. The key is a secret of this engine process, so a class reveals nothing,
and classes of two journals can't be compared. The list is flat: the class of the cache salt and the class of
the LoRA adapter (0: the request has none), then the class and the first position of each multimodal input, in
the order of positions. Empty list: the request has none of these. None instead of a list: not recorded.
"""


class RequestLabels(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whom a request is for, as far as the engine knows. Defaults: the request has none.

    ``lora`` is the adapter's name. ``salt_class`` is the class of the cache salt: a keyed hash, as an
    isolation class is. ``group`` is what ``KVLEDGER_GROUP``, the operator's regular expression, found in the
    request id: at most 64 values of one engine, and ``other``. ``session`` is vLLM's ``session_id``, else
    what ``KVLEDGER_SESSION`` found in the request id.
    """

    lora: str = ""
    salt_class: int = 0
    group: str = ""
    priority: int = 0
    session: str = ""


class Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all events. ``at``: microseconds since the engine started."""

    at: Microseconds


# --- the engine ---------------------------------------------------------------------------------


class EngineStarted(Event, frozen=True, array_like=True, tag=0):
    """Observation of an engine began. First event of every segment.

    ``wall_seconds`` is Unix time at ``at``; ``configuration`` holds plain settings only
    (``block_size``, ``blocks``, ``connector``, ``load_failure_policy``, ``asynchronous``, ...).
    """

    wall_seconds: UnixSeconds
    engine: str
    version: str
    adapter: str
    level: str
    process_id: int
    configuration: dict[str, Setting]

    @property
    def name(self) -> str:
        """The engine's name in findings and labels, with the host or ``KVLEDGER_NAME`` if it is known."""
        instance = str(self.configuration.get("instance") or "")
        return f"{self.engine} {self.version} pid {self.process_id}" + (f" on {instance}" if instance else "")

    @property
    def began_seconds(self) -> float:
        """Unix time of the instant from which ``at`` counts."""
        return self.wall_seconds - self.at / 1e6


class EngineStopped(Event, frozen=True, array_like=True, tag=1):
    """Observation ended properly: ``shutdown``, ``detached`` or ``exit``."""

    reason: str


class Gap(Event, frozen=True, array_like=True, tag=2):
    """Events were lost between the previous one and this one. ``lost_events`` -1: not known."""

    lost_events: int
    reason: str


REMOVED = "segments removed"
"""Reason of a :class:`Gap` where segments were removed. Before a journal's first event that is no loss."""


class HookFailed(Event, frozen=True, array_like=True, tag=3):
    """A hook raised, so events that it should have emitted are missing. ``removed``: it was removed.

    ``error``: the exception's type and where it was raised, without its text, which may be a client's.
    """

    hook: str
    error: str
    removed: bool


class EngineRaised(Event, frozen=True, array_like=True, tag=41):
    """An exception of the engine left ``method``, a method that is hooked. ``error`` is the exception's type.

    ``lost``: the engine did not complete what the method's hook emits, so the events that follow do not tell
    the state of the requests. A snapshot comes when the engine runs on.
    """

    method: str
    error: str
    lost: bool


# --- a request is added, looked up and admitted ----------------------------------------------------


class RequestAdded(Event, frozen=True, array_like=True, tag=4):
    """A request was added to the scheduler. ``prompt_tokens`` is the length of its prompt.

    ``traceparent`` is the caller's trace context (W3C), if the engine received one.
    ``transferred``: a prefill engine hands over the KV, so external tokens are no cache hits.
    ``remote_decode``: this engine only prefills, and another one decodes. ``remote_request``: the id of the
    request in the prefill engine, if the connector received one. ``reads_cache``: the request may hit the
    prefix cache; one that asks for the log-probabilities of its prompt may not. ``isolation``: what keeps
    the request's KV apart from other requests, see :data:`Isolation`. ``labels`` None: the request has none,
    or they were not recorded.
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
    isolation: Isolation | None = None
    labels: RequestLabels | None = None
    remote_decode: bool = False
    remote_request: str = ""
    reads_cache: bool = True


class LookedUp(Event, frozen=True, array_like=True, tag=5):
    """The engine looked a request up in its own prefix cache, which holds ``local_tokens`` of it."""

    request: int
    step: int
    local_tokens: int


class Matched(Event, frozen=True, array_like=True, tag=6):
    """The engine asked the connector what it holds beyond ``local_tokens``.

    ``external_tokens`` None: the connector asked to be asked again later.
    """

    request: int
    step: int
    local_tokens: int
    external_tokens: int | None
    asynchronous: bool


class AdmissionFailed(Event, frozen=True, array_like=True, tag=7):
    """``attempts`` lookups in a row, all with these answers, led to no admission.

    ``reason`` is ``deferred`` (the connector had no answer) or ``not_allocated``.
    """

    request: int
    step: int
    reason: str
    local_tokens: int
    external_tokens: int
    attempts: int


class Admitted(Event, frozen=True, array_like=True, tag=8):
    """A life began: blocks were allocated for the hits, and the request runs now unless ``asynchronous``.

    ``local_tokens`` and ``external_tokens`` are what the engine used at allocation (external is a
    promise). ``computed_tokens`` is the engine's count before this step's own tokens.
    ``asynchronous``: the request waits for remote KV. ``resumed``: the request had been preempted.
    ``counted``: the engine may count this lookup in its statistics. ``cut_tokens``: the lookup's statistics
    counted so many tokens that the connector then cut off the prompt. ``sampled_misses``: of the blocks that
    a first hit could have covered and did not, one in sixteen contents: how many the engine had never seen,
    had evicted, had lost in a reset of the prefix cache, and was computing for another request. None: no such
    block.
    """

    request: int
    step: int
    resumed: bool
    local_tokens: int
    external_tokens: int
    asynchronous: bool
    computed_tokens: int
    counted: bool = True
    cut_tokens: int = 0
    sampled_misses: list[int] | None = None


class LookupsCounted(Event, frozen=True, array_like=True, tag=9):
    """How much the engine's own lookup statistics rose during step ``step``.

    Requests are lookups, queries and hits are tokens; -1: the engine does not count. ``failed_*`` are the
    local lookups of this step, as observed, that led to no admission.
    """

    step: int
    local_requests: int
    local_queries: int
    local_hits: int
    external_requests: int
    external_queries: int
    external_hits: int
    failed_requests: int = 0
    failed_queries: int = 0
    failed_hits: int = 0


class LeftWaiting(Event, frozen=True, array_like=True, tag=46):
    """A step left requests waiting. ``cause``: what ended its admissions, of ``causes.QUEUE``.

    Emitted if the cause is another than before or a request has come since the step before. So the cause
    holds for all steps until the next event of this kind, and for all requests that came before the event.
    Also emitted when the engine is paused, and when the pause ends.
    """

    cause: str


# --- external tokens ------------------------------------------------------------------------------


class LoadPlanned(Event, frozen=True, array_like=True, tag=10):
    """How much of one promise the connector metadata of a step loads, as far as it can be read.

    ``tokens`` of the promise are loaded; ``missing_blocks`` are the promised blocks that no load fills.
    """

    request: int
    step: int
    tokens: int
    missing_blocks: list[int]


class LoadFinished(Event, frozen=True, array_like=True, tag=11):
    """An asynchronous load was reported as finished, wholly or up to a failure."""

    request: int
    computed_tokens: int


class LoadFailed(Event, frozen=True, array_like=True, tag=12):
    """A load was reported as failed: positions from ``computed_tokens`` up are not valid.

    ``before_tokens`` and ``computed_tokens`` are the engine's counts before and after its own
    truncation; they are equal if it kept a load that was reported as failed whole. Under the policy ``fail``
    the request then ends. ``failed_blocks``: the blocks of all requests that were reported with this
    failure; the others of the load were filled. None: not known, or the whole load failed.
    """

    request: int
    before_tokens: int
    computed_tokens: int
    asynchronous: bool
    failed_blocks: list[int] | None = None


class BlocksFailed(Event, frozen=True, array_like=True, tag=38):
    """Blocks were reported as not loaded with the next output, whatever the engine does about it."""

    blocks: list[int]


class RolledBack(Event, frozen=True, array_like=True, tag=13):
    """The count of computed tokens fell, for a ``cause`` of :mod:`kvledger.audit.causes`.

    ``full_hit``: every token was a hit, so the last one is computed again to get logits. ``replay``: a
    window before the hit's end is computed again. ``session``: the session was edited. ``past_stop``: tokens
    accepted past the stop are dropped. ``released``: a load failed wholly, the blocks were freed and the
    request is looked up again.
    """

    request: int
    cause: str
    before_tokens: int
    computed_tokens: int


# --- steps and their output -----------------------------------------------------------------------


class Stepped(Event, frozen=True, array_like=True, tag=14):
    """One step was scheduled. Only the differences from the step before are written.

    ``changed`` is flat, four numbers a request: request, scheduled tokens, drafts among them, the
    engine's computed tokens after scheduling. ``dropped``: requests of the step before that are
    not in this one. All others are scheduled as before. After a snapshot every request is written.
    """

    step: int
    changed: Numbers
    dropped: Numbers


class Delivered(Event, frozen=True, array_like=True, tag=15):
    """The output of the oldest undelivered step came. Only the differences from the last output are written.

    ``changed`` is flat, two numbers a request: request, tokens sampled by the model for it
    (drafts accepted plus one; 0 for a prefill chunk). ``ignored``: requests whose output the
    engine threw away. All others sampled as many tokens as last time.
    """

    changed: Numbers
    ignored: Numbers


class DeliveredWhole(Event, frozen=True, array_like=True, tag=40):
    """The same as :class:`Delivered`, for an output with many differences and nothing thrown away.

    ``sampled`` has one byte for each of ``requests``, in order. Empty ``requests``: those of the last event
    of this kind, which is in the same segment. All other requests sampled as many tokens as last time.
    """

    requests: list[int]
    sampled: bytes


class DraftsCounted(Event, frozen=True, array_like=True, tag=45):
    """What the engine's statistics of speculative decoding counted for the last output.

    Emitted for a step with drafts that admitted a request, or whose output ended one. ``drafts`` are
    verifications of one request each.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int


class Repeated(Event, frozen=True, array_like=True, tag=16):
    """The last step and the last output were repeated unchanged, ``times`` times, in this order."""

    times: Repeats


class Reported(Event, frozen=True, array_like=True, tag=17):
    """The engine reported where a prompt came from (vLLM: ``prefill_stats``, since 0.20).

    ``written_tokens``: prompt tokens that the engine claims to have computed and written to its prefix
    cache; -1: it claims none.
    """

    request: int
    prompt_tokens: int
    local_tokens: int
    external_tokens: int
    computed_tokens: int
    cached_tokens: int
    written_tokens: int = -1


# --- preemption, sessions, the end ------------------------------------------------------------------


class Preempted(Event, frozen=True, array_like=True, tag=18):
    """A life ended before its request. ``cause``: ``blocks`` or ``reset``.

    ``before_tokens``, ``in_flight_tokens`` and ``placeholder_tokens`` are the engine's counts just before,
    ``computed_tokens`` and ``held_blocks`` just after (both should be 0). ``delivered``: output still in
    flight will be delivered, not dropped.
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
    """The engine was asked to reset its prefix cache. ``running``: requests were running."""

    succeeded: bool
    running: bool


class Extended(Event, frozen=True, array_like=True, tag=20):
    """A streaming-input session got its next chunk, or a connector cut a prompt before its admission.

    The prompt is now ``prompt_tokens`` long. ``computed_tokens`` is the engine's count, and the position at
    which the chunk's own tokens begin. ``isolation``: that of the whole prompt. ``turn_tokens``: how long the
    sequence was before the chunk came; -1: not recorded.
    """

    request: int
    prompt_tokens: int
    computed_tokens: int
    isolation: Isolation | None = None
    turn_tokens: int = -1


class Finished(Event, frozen=True, array_like=True, tag=21):
    """A request ended. ``reason``: ``stopped``, ``length``, ``aborted``, ``ignored``, ``error``, ...

    The counts are the engine's, just before it frees the blocks; -1: the engine has no such count.
    """

    request: int
    reason: str
    computed_tokens: int
    in_flight_tokens: int
    placeholder_tokens: int
    sequence_tokens: int
    output_tokens: int


# --- weights ------------------------------------------------------------------------------------------

DECLARED, POSSIBLE, DETECTED, LABELLED = "declared", "possible", "detected", "labelled"
"""Kinds of :class:`WeightsChanged`: the purpose of the call is to change weights; the call may have changed
them; a digest of the weights differs from the last one; only the caller's label changed."""


ADDS_ADAPTER = "add_lora"
"""The method by which all workers load a LoRA adapter."""

LOOK = "digest"
"""A look at samples of the weights between two steps. What it finds took place since the look before it."""


class WeightsChanged(Event, frozen=True, array_like=True, tag=47):
    """The weights of the model changed, or those of a LoRA adapter, or a call may have changed them.

    ``version`` is the number of the last change, from 1. Changes with no step between them have one number.
    ``by``: the engine's method, ``mark_weights`` or :data:`LOOK`. ``kind``: one of :data:`DECLARED` to
    :data:`LABELLED`. ``equal``: by a digest, all weights are those of before the call; None: not known.
    ``label`` is the caller's name of the new weights, ``adapter`` the adapter's name (empty: the model).
    ``call``: how many times all workers were asked for the method, this time included; 0: they were not.
    """

    step: int
    version: int
    by: str
    kind: str
    label: str = ""
    adapter: str = ""
    equal: bool | None = None
    call: int = 0

    @property
    def is_look(self) -> bool:
        """Whether no call is known to have changed the weights, and samples of them were compared."""
        return self.by == LOOK

    @property
    def changes(self) -> bool:
        """Whether the engine computes with other weights from here on, or may do so."""
        return self.equal is not True and self.kind != LABELLED

    @property
    def is_certain(self) -> bool:
        """Whether the weights are others for certain, if :attr:`changes`."""
        return self.kind != POSSIBLE


# --- census and snapshot ----------------------------------------------------------------------------


class Census(Event, frozen=True, array_like=True, tag=22):
    """The engine's counts of every request that it has admitted, between two steps.

    ``rows`` has the running requests. It is flat, five numbers a request: request, computed tokens, in-flight
    tokens, output placeholders, tokens in the sequence (-1: the engine has no such count). ``waiting_rows``
    has the same of the admitted requests that wait: preempted, for a load, or for a session's next chunk.
    ``hook_us``: microseconds that the hooks took in the ``hook_steps`` timed steps since the last census; -1:
    no step was timed. ``idle_calls``: calls of ``schedule`` since the last census that scheduled nothing,
    though no step was in flight and the engine was not paused. ``ready_requests``: open requests that wait
    for nothing but a step; -1: not counted. ``misqueued``: by request id, how many places the queues have of
    an open request that is not in exactly one of them, or of an ended one that is in any. Where calls were
    idle: ``first_ready`` is the ready request that came first (-1: none), and ``paused_sessions`` how many
    sessions wait for their client's next chunk.

    ``slots``, of an engine whose pool has a slot for each token: how many there are (-1: not counted). Of
    these ``free_slots`` are free, ``evictable_slots`` cached and used by nobody, ``protected_slots`` cached
    and used, ``held_slots`` held by sessions between their turns, and ``uncached_slots`` of requests and not
    in the cache. ``slots_before``: the step after which they were counted before.
    """

    step: int
    rows: list[int]
    waiting_requests: int
    free_blocks: int
    blocks: int
    hook_us: int = -1
    hook_steps: int = 0
    waiting_rows: list[int] = []
    idle_calls: int = 0
    ready_requests: int = -1
    misqueued: dict[str, int] = {}
    first_ready: int = -1
    paused_sessions: int = 0
    free_slots: int = -1
    evictable_slots: int = -1
    protected_slots: int = -1
    held_slots: int = -1
    uncached_slots: int = -1
    slots: int = -1
    slots_before: int = -1


class SnapshotRow(msgspec.Struct, frozen=True, array_like=True):
    """One open request. ``fresh``: the request has had no life yet."""

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
    isolation: Isolation | None = None
    labels: RequestLabels | None = None
    remote_decode: bool = False
    remote_request: str = ""


class Snapshot(Event, frozen=True, array_like=True, tag=23):
    """All open requests, so that a reader may begin here. Second event of every segment.

    The next :class:`Stepped` writes every request. ``undelivered_steps``: how many steps before this snapshot
    still await their output. ``weights``: the number of the last change of weights, by adapter and of the
    model ("").
    """

    step: int
    rows: list[SnapshotRow]
    undelivered_steps: StepsInFlight
    weights: dict[str, int] = {}


# --- lookups that outlive their step ------------------------------------------------------------------


class LookupKept(Event, frozen=True, array_like=True, tag=24):
    """The engine uses the answer of an earlier step's local lookup, or keeps it after the request ended.

    ``local_tokens`` is the remembered answer, of step ``looked_up_step`` (-1: not seen); ``cached_tokens``
    is what the cache holds for the request now (-1: not asked). ``ended``: the request ends and its answer
    stays behind. Else the admission that follows, in step ``step``, uses the answer.
    """

    request: int
    step: int
    looked_up_step: int
    local_tokens: int
    cached_tokens: int
    ended: bool


# --- blocks, at level ``blocks`` ------------------------------------------------------------------------


class PoolSeen(Event, frozen=True, array_like=True, tag=25):
    """The state of a block pool at the beginning of a segment.

    ``blocks`` is its size, including the null block, whose id is ``null_block`` (-1: it has none).
    ``free_blocks`` and ``cached_hashes`` are the lengths of its free queue and its cache map. ``groups`` is
    flat, three numbers for each KV cache group that allocates from the pool: group, tokens per block, and
    the kind of its tables. Kind 0: an index in a table is no position (Mamba, cross-attention, rings); 1: it
    is; 2: it is, and a hit needs every block below it (full attention). ``windows`` is flat, three numbers
    for each group whose tokens read a window: group, tokens of the window, and whether windows begin at each
    multiple of these tokens (chunked local attention, 1) or end at the token that reads (sliding window, 0).
    2: tokens read a state, one checkpoint of all tokens before (Mamba); the window is then one token.
    """

    step: int
    pool: int
    blocks: int
    null_block: int
    free_blocks: int
    cached_hashes: int
    groups: list[int]
    windows: list[int] = []


class HitsCompared(Event, frozen=True, array_like=True, tag=39):
    """Hit blocks were compared with the reader's prefix: all tokens up to the end of the block.

    ``request`` was admitted in this step with a hit on blocks into which another prefix was computed
    (-1: no such block). ``other`` is flat, three numbers for each of them: group, block, and the position
    up to which the block reaches. ``equal`` and ``unknown`` are the hit blocks since the last event of this
    kind that have the reader's prefix, and those whose own prefix is not known.
    """

    step: int
    request: int
    equal: int
    unknown: int
    other: list[int]


class BlockEvent(Event, frozen=True, array_like=True):
    """Base of the events for one call of a pool.

    ``blocks`` are block ids in the call's order, and may include the null block. ``request`` and ``group``
    name the table that the call was for; -1: no table, as for a connector's pin, a copy, or a deferred free.
    ``by`` is the engine's operation that made the call.
    """

    step: int
    pool: int
    request: int
    group: int
    by: str
    blocks: list[int]


class BlocksCached(Event, frozen=True, array_like=True, tag=29):
    """Full blocks were cached: they got their hashes and entered the cache map.

    The request's present step fills them. Calls of one step are one event, after its allocations. ``rows`` is
    flat. Each call has request, group, the engine's length of the request's sequence and the number of
    blocks, then three numbers for each block: block, hash id, end.

    A hash id is a number made from the hash with a secret of this engine process; two hashes share one by
    chance of 1 in 2**64. The hash covers the request's positions below the end. ``replaced``: the block's
    earlier hashes were evicted. Request -1: the request whose table holds the block; the length is then -1
    less the outputs of one token that came and were not emitted yet. No block: some blocks were cached, and
    it is not known which.
    """

    step: int
    pool: int
    rows: list[int]
    replaced: bool = False
    stack: list[str] | None = None

    def calls(self) -> Iterator[tuple[int, int, int, list[int], list[int], list[int]]]:
        """Request, group and reported length of each call, and the blocks, hash ids and ends."""
        rows, place = self.rows, 0
        while place < len(rows):
            request, group, tokens, count = rows[place : place + 4]
            first, place = place + 4, place + 4 + 3 * count
            yield (
                request,
                group,
                tokens,
                rows[first:place:3],
                rows[first + 1 : place : 3],
                rows[first + 2 : place : 3],
            )


class BlocksEvicted(BlockEvent, frozen=True, array_like=True, tag=30):
    """Blocks were evicted from the prefix cache: they lost their hashes."""

    stack: list[str] | None = None


class BlockCopied(BlockEvent, frozen=True, array_like=True, tag=31):
    """A block will be copied before it is written to (copy-on-write). ``blocks``: source and target.

    Both blocks hold one more reference until the copy is made. ``moved``: the target takes over the source's
    hashes and the source stays in the table; else the target replaces the source in the table.
    """

    moved: bool
    stack: list[str] | None = None


class BlocksDeferred(BlockEvent, frozen=True, array_like=True, tag=32):
    """A request gave up its tables; its blocks are freed when no step in flight can write to them."""

    stack: list[str] | None = None


class PoolReset(Event, frozen=True, array_like=True, tag=33):
    """A pool was asked to drop all hashes. ``succeeded`` only if the pool was idle."""

    step: int
    pool: int
    succeeded: bool


class BlockStatesReported(Event, frozen=True, array_like=True, tag=35):
    """The states of consecutive blocks of a pool, from id ``first`` up, between two steps.

    ``states`` has one number for each block: the reference count times 8, plus 1 if the block is in the free
    queue, 2 if it has a hash, 4 if the cache map maps that hash to it. ``free_blocks`` and
    ``cached_hashes`` are the lengths of free queue and cache map; -1: not known.
    """

    step: int
    pool: int
    first: int
    states: list[int]
    free_blocks: int
    cached_hashes: int


HEAD = 5
"""Length of the header of each call in ``PoolCalls.rows``."""

ALLOCATED, TOUCHED, FREED, CACHED, TABLES_REPORTED, TABLES_REMOVED, ALLOCATED_EACH, IN_STEP = range(8)
"""Codes of the calls in ``PoolCalls.rows``.

ALLOCATED, TOUCHED, FREED, TABLES_REPORTED and TABLES_REMOVED stand for one event of their name each,
CACHED for a :class:`BlocksCached`. ALLOCATED_EACH: one block was allocated to each of several requests.
IN_STEP: the calls that follow were made in another step than ``PoolCalls.step``.
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


# --- the connector's own counts -----------------------------------------------------------------------


class Tracked(Event, frozen=True, array_like=True, tag=60):
    """The connector's counts of a request, beside the engine's count at the same instant.

    The connector knows ``tracked_tokens`` of the sequence. It has ordered ``saved_tokens`` to be saved, or
    found them saved; by its own rules it should have saved ``due_tokens`` (-1: it saves nothing of this
    request). ``computed_tokens`` is the engine's count of existing tokens; at most ``recent_tokens`` of these
    came after the connector last built its metadata.
    """

    request: int
    step: int
    tracked_tokens: int
    saved_tokens: int
    due_tokens: int
    computed_tokens: int
    recent_tokens: int


class SavePlanned(Event, frozen=True, array_like=True, tag=61):
    """A step's connector metadata orders the KV of positions [start, end) to be saved."""

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
    """The blocks that a connector had kept are free now."""

    request: int
    step: int


class HandedOver(Event, frozen=True, array_like=True, tag=67):
    """The connector was informed that a request has ended (``request_finished``). Follows its ``Finished``.

    The connector was handed the request with ``computed_tokens``, and ``blocks`` of its blocks, which have
    room for ``room_tokens`` positions (-1: the request has several tables, or a table without positions).
    ``trimmed``: the engine hands over only the blocks of computed tokens.
    """

    request: int
    step: int
    request_id: str
    computed_tokens: int
    blocks: int
    room_tokens: int
    trimmed: bool


class ChildMatched(Event, frozen=True, array_like=True, tag=64):
    """A child of a connector of connectors answered. Equal answers in a row are one event.

    ``child`` is its index and class; ``external_tokens`` None: it asked to be asked again later.
    """

    request: int
    step: int
    child: str
    local_tokens: int
    external_tokens: int | None
    asynchronous: bool


class BlocksPromised(Event, frozen=True, array_like=True, tag=65):
    """The blocks that the external tokens of a life will fill, in the order of their positions.

    The tokens are ``tokens`` positions from ``start`` up; a block has ``block_tokens``. With several KV cache
    groups, the blocks are those of the first group of full attention; without one, the event is not emitted.
    """

    request: int
    step: int
    start: int
    tokens: int
    block_tokens: int
    blocks: list[int]


class WorkerStepped(Event, frozen=True, array_like=True, tag=66):
    """What the worker side of a connector did in one step, if it did anything.

    ``step`` counts the connector metadata that the worker received, from 1; ``worker`` is its rank.
    ``loaded_blocks`` are the blocks that the loads fill (None: the metadata can't be read), ``started``
    whether the loads were started, ``layers`` how many layers were waited for. ``saves`` is the number of
    ordered saves (-1: they can't be read), ``saved`` whether they were waited for. ``failed_blocks`` were
    reported as not loaded. ``received``, ``failed`` and ``sent`` are request ids: transfers in that finished,
    transfers in that failed, and transfers out that finished.
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


class StoreKeys(Event, frozen=True, array_like=True, tag=70):
    """The connector looked a request up in its store. Level ``blocks`` only, for stores whose keys are known.

    ``keys`` has one key for each chunk of ``chunk_tokens`` tokens from the first position on. A key is a
    keyed hash, as an isolation class is. Two requests have a key in common if the connector passes the same
    tokens and the same other arguments to its lookup, so that both get the same KV.
    """

    request: int
    step: int
    chunk_tokens: int
    keys: list[int]


class BlocksSaved(Event, frozen=True, array_like=True, tag=71):
    """A step's connector metadata orders whole blocks to be saved. Level ``blocks`` only."""

    step: int
    blocks: list[int]


class TiersReported(Event, frozen=True, array_like=True, tag=72):
    """The connector said which tiers the external tokens of the present life come from. Follows ``Admitted``.

    The engine asked about ``external_tokens``. ``tiers`` are the names of the tiers as the connector gave
    them, and ``tokens`` has the tokens of each. vLLM asks since 0.32, if it keeps statistics, and
    not after a preemption.
    """

    request: int
    step: int
    external_tokens: int
    tiers: list[str]
    tokens: list[int]


# --- the encoder cache of a multimodal model ---------------------------------------------------------------


class EncoderInputsSeen(Event, frozen=True, array_like=True, tag=73):
    """The encoder inputs of a request, before the first event that speaks of them; again if there are more.

    ``rows`` is flat, four numbers for each input: its identity as a keyed hash, as an isolation class is,
    then first position, positions, and embeddings.
    """

    request: int
    rows: list[int]


ENDED_HOLDERS = 16
"""The most requests in ``EncoderCacheSeen.ended``."""


class EncoderCacheSeen(Event, frozen=True, array_like=True, tag=74):
    """The engine's own count of its encoder cache, at the beginning of a segment and at each census.

    ``size`` and ``free`` are embeddings. ``entries`` is flat, identity and embeddings (-1: not known) of each
    cached encoder output; None at a census. ``shared``: outputs stay for later requests; else the model is an
    encoder-decoder, and an output occupies the cache until the step that reads it has run. ``loads``: an
    encoder cache connector may load outputs.

    At a census of shared outputs: ``freeable`` is the engine's count of embeddings that are free or can be
    evicted (-1: not counted), and ``held`` has the identities of the outputs that requests hold. ``ended``
    has, by request id, how many of them a request holds that is not open; at most :data:`ENDED_HOLDERS`.
    """

    step: int
    size: int
    free: int
    shared: bool
    loads: bool
    entries: list[int] | None = None
    freeable: int = -1
    held: list[int] = []
    ended: dict[str, int] = {}


ENCODER_HIT, ENCODER_RESERVED, ENCODER_EVICTED, ENCODER_COMPUTED, ENCODER_REMOVED, ENCODER_CLEARED = range(6)
"""Codes in ``EncoderCacheUsed.rows``. REMOVED: the workers are told to remove the output."""


class EncoderCacheUsed(Event, frozen=True, array_like=True, tag=75):
    """What a step did with the encoder cache, if anything. Follows what the step scheduled.

    ``rows`` is flat, three numbers for each operation, in order: its code, then request and index of the
    input (HIT, RESERVED, COMPUTED), or -1 and the identity (EVICTED, REMOVED; 0 for CLEARED). ``free``: the
    engine's count of free embeddings after the step was scheduled.
    """

    step: int
    free: int
    rows: list[int]


# --- block contents, at level ``content`` ------------------------------------------------------------------


MODEL_LOADS = "model.load_weights"
"""A call of the model's own method that loads weights, by code that runs in the worker."""


class WorkerWeights(Event, frozen=True, array_like=True, tag=68):
    """A method of one worker that changes weights has returned, or ``raised``.

    ``worker`` is its rank; ``call`` counts its calls of ``by`` from 1. ``by``: the worker's method, or
    :data:`MODEL_LOADS`. ``equal``: the tensors that all workers of its group hold whole are those of before,
    by a digest; None: none was taken. A call inside of another one is not recorded.
    """

    worker: int
    by: str
    call: int
    raised: bool
    equal: bool | None = None


class ContentWatched(Event, frozen=True, array_like=True, tag=80):
    """A worker's model runner seals and verifies its blocks. Emitted at the beginning of each segment.

    ``groups`` is flat, four numbers for each KV cache group that is checked: group, tokens per block,
    distinct tensors, and bytes of a block. ``key_name`` names the fingerprint function and its key:
    fingerprints of different names are never compared. ``share`` of the hit blocks are verified. ``excluded``
    has a sentence for each group that is not checked. ``step``: the worker's step so far. ``layouts`` says of
    each checked group, in the order of ``groups``, how its KV caches lie in memory. ``recomputed`` says how
    blocks that are computed again are compared, or why not; "": nobody asked for it.
    """

    step: int
    worker: int
    blocks: int
    groups: list[int]
    key_name: str
    share: float
    excluded: list[str]
    layouts: list[str] = []
    recomputed: str = ""


UNFILLED, UNSEEN, UNSAMPLED, SAME_STEP, MISMATCHED = 0, -1, -2, -3, -4
"""Codes in ``HitsVerified.rows`` in place of the step after which a block was sealed.

UNFILLED: no worker was seen to fill the block. UNSEEN: the block was filled before the worker was observed.
UNSAMPLED: the block has a seal and was left out of the sample. SAME_STEP: this step computes the block.
MISMATCHED: a scrub found other bytes than those that were sealed, and the block was not filled since.
"""


class HitsVerified(Event, frozen=True, array_like=True, tag=81):
    """The blocks that requests read in a step without having computed them, before its forward pass.

    ``rows`` is flat. Each run of blocks has an index in ``request_ids``, group, first index in the block
    table and number of blocks, then two numbers for each block: block, and the step after which it was
    sealed, or one of the codes UNFILLED to MISMATCHED. ``differed`` is flat, two numbers for each block whose
    bytes are not those that were sealed: block, and the last step at which the bytes were still the same.
    """

    step: int
    worker: int
    request_ids: list[str]
    rows: list[int]
    differed: list[int]


class ContentCounted(Event, frozen=True, array_like=True, tag=82):
    """What a worker sealed, verified and scrubbed since the last event of this kind.

    ``sealed``, ``verified`` (at hits) and ``scrubbed`` are blocks, ``bytes`` what was read of them.
    ``microseconds``: how long the model runner's steps waited for it.
    """

    step: int
    worker: int
    sealed: int
    verified: int
    scrubbed: int
    bytes: int
    microseconds: int


class ScrubDiffered(Event, frozen=True, array_like=True, tag=83):
    """Blocks at rest whose bytes are not those that were sealed, found after the forward pass of a step.

    ``rows`` is flat, four numbers for each block: group, block, the step after which it was sealed, and the
    last step at which the bytes were still the same.
    """

    step: int
    worker: int
    rows: list[int]


class BlocksMoved(Event, frozen=True, array_like=True, tag=85):
    """Fingerprints of whole blocks at the engine's end of a transfer with a connector's store.

    ``out``: the blocks are handed to the store; else a load of them has arrived. ``prints`` has, for each
    block, the fingerprints of keys and of values of each layer, eight bytes each. They are comparable under
    one ``key_name``. ``own_store``: nothing but this engine writes to the store. ``fleet_store``: nothing but
    engines whose fingerprints have this key name does. ``differed`` is flat, two
    numbers for each block handed to the store whose bytes are not those that were sealed: block, and the
    step after which it was sealed.
    """

    step: int
    worker: int
    out: bool
    group: int
    key_name: str
    own_store: bool
    blocks: list[int]
    prints: bytes
    differed: list[int] = []
    fleet_store: bool = False


class BlocksSketched(Event, frozen=True, array_like=True, tag=86):
    """Sketches of blocks that were full and final after a step, which computed them.

    ``sketches`` has, for each block, ``projections`` numbers (float32, little-endian) for the keys and as
    many for the values of each layer: products with random vectors, comparable under one ``key_name``.
    """

    step: int
    worker: int
    group: int
    key_name: str
    projections: int
    blocks: list[int]
    sketches: bytes


# --- an engine's stream of KV events, which a subscriber records -----------------------------------------

STORED, REMOVED_BLOCKS, CLEARED = range(3)
"""Codes of vLLM's BlockStored, BlockRemoved and AllBlocksCleared in ``KVEventsReceived.rows``."""

KV_HEAD = 6
"""Length of the header of each KV event in ``KVEventsReceived.rows``."""

KV_DETAILS = 3
"""Numbers of each store in ``KVEventsReceived.details``."""

KEYED, LOOKAHEAD = 1, 2
"""Flags of a store: hashes cover a salt, an adapter or an image; hashes cover tokens after the block."""


class KVEventsReceived(Event, frozen=True, array_like=True, tag=90):
    """A subscriber received one batch of an engine's stream of KV events.

    ``stream`` counts the lives of the publisher, from 0: its ``sequence`` numbers begin again when the engine
    is restarted. ``published_seconds`` is the engine's Unix time. ``rank`` is the data-parallel rank (-1: not
    given). ``replayed``: the publisher repeated the batch when asked. ``unreadable`` KV events are left out.

    ``rows`` is flat. Each KV event starts with a header of six numbers: its code, its KV cache group (-1: not
    given), the index of its tier in ``tiers`` (-1: not given), the tokens of a block, the hash id of the
    parent block (0: none), and the number of hash ids that follow. The ids are those of an engine with the
    same ``KVLEDGER_EVENTS_KEY``. Token ids, adapters and salts are not recorded. A tier is the medium, with
    the locality and the owner if the block is not in the engine's own memory.

    ``contents``: a keyed hash of the tokens of each stored block (0: not known). ``details``, if vLLM told
    any: of each store the index of the group's kind in ``kinds`` (-1: not given), flags, and a keyed hash of
    the session that caused it (0: none).
    """

    stream: int
    sequence: int
    published_seconds: UnixSeconds
    rank: int
    tiers: list[str]
    rows: list[int]
    replayed: bool = False
    unreadable: int = 0
    contents: list[int] = []
    details: list[int] = []
    kinds: list[str] = []


EmittedEvent = (
    EngineStarted
    | EngineStopped
    | Gap
    | HookFailed
    | EngineRaised
    | RequestAdded
    | LookedUp
    | Matched
    | AdmissionFailed
    | Admitted
    | LookupsCounted
    | LeftWaiting
    | LoadPlanned
    | LoadFinished
    | LoadFailed
    | BlocksFailed
    | RolledBack
    | Stepped
    | Delivered
    | DeliveredWhole
    | DraftsCounted
    | Repeated
    | Reported
    | Preempted
    | CacheReset
    | Extended
    | Finished
    | WeightsChanged
    | WorkerWeights
    | Census
    | Snapshot
    | LookupKept
    | PoolSeen
    | HitsCompared
    | BlocksCached
    | BlocksEvicted
    | BlockCopied
    | BlocksDeferred
    | PoolReset
    | BlockStatesReported
    | PoolCalls
    | Tracked
    | SavePlanned
    | FreeDelayed
    | FreeCompleted
    | HandedOver
    | ChildMatched
    | BlocksPromised
    | WorkerStepped
    | StoreKeys
    | BlocksSaved
    | TiersReported
    | EncoderInputsSeen
    | EncoderCacheSeen
    | EncoderCacheUsed
    | ContentWatched
    | HitsVerified
    | ContentCounted
    | ScrubDiffered
    | BlocksMoved
    | BlocksSketched
    | KVEventsReceived
)
"""Every event that an engine's hooks, or a subscriber to its KV events, emit."""


# --- One event for one call of a block pool. No engine emits them; readers make them.
#
# Engines emit all pool calls of a step as one :class:`~kvledger.audit.events.PoolCalls`, and
# ``ledger/blocks/pool.py`` splits it into these events, which the ledger of blocks posts. Journals of
# schema 1 hold them as they are, so tags and fields stay. Never emit one of these events.


class BlocksAllocated(Event, frozen=True, array_like=True, tag=26):
    """Free blocks were allocated, with one reference each; their earlier hashes are evicted.

    Calls of one step with no related call in between are one event. ``rows`` is flat. Each call has request,
    group and the number of blocks, then the block ids. -1 and ``by``: as in BlockEvent.
    """

    step: int
    pool: int
    by: str
    rows: list[int]
    stack: list[str] | None = None

    def calls(self) -> Iterator[tuple[int, int, list[int]]]:
        """Request, group and block ids of each call."""
        rows, place = self.rows, 0
        while place < len(rows):
            request, group, count = rows[place : place + 3]
            place += 3 + count
            yield request, group, rows[place - count : place]


class BlocksTouched(BlockEvent, frozen=True, array_like=True, tag=27):
    """Cached blocks got one more reference. ``references`` are the engine's counts just after."""

    references: list[int]
    stack: list[str] | None = None


class BlocksFreed(BlockEvent, frozen=True, array_like=True, tag=28):
    """Blocks lost one reference. ``references`` are the engine's counts just after."""

    references: list[int]
    stack: list[str] | None = None


class TablesReported(Event, frozen=True, array_like=True, tag=34):
    """The block tables of requests, between two steps.

    ``rows`` is flat. Each table has request, group, the engine's count of computed tokens (-1: not known) and
    the number of blocks, then the block ids, which may include the null block.
    """

    step: int
    rows: list[int]

    def tables(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Request, group, computed tokens and block ids of each table."""
        rows, place = self.rows, 0
        while place < len(rows):
            request, group, computed, count = rows[place : place + 4]
            place += 4 + count
            yield request, group, computed, rows[place - count : place]


class TablesRemoved(Event, frozen=True, array_like=True, tag=36):
    """The engine has forgotten these requests: their blocks are freed, or their free is deferred."""

    requests: list[int]


AnyEvent = EmittedEvent | BlocksAllocated | BlocksTouched | BlocksFreed | TablesReported | TablesRemoved
"""Every event that a journal may hold."""
