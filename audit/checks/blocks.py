"""Checks of blocks: who holds a block, what its hash stands for, and whether it is free.

Their subjects come from :mod:`kvledger.audit.ledger.blocks`, which compares the engine's pool with the
ledger. A figure of -1 is not known and is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..causes import NEVER_LOADED, NOT_PLANNED
from ..ledger.blocks.ledger import ADAPTER, INPUT, SALT
from ..ledger.blocks.pool import DEFERRED, PIN
from ..ledger.blocks.reads import (
    ABSENT,
    FAILED,
    HASHED_OTHERWISE,
    IN_STEP,
    LEFT,
    OVERWRITTEN,
    PENDING,
    REWRITTEN,
    SEQUENCE,
    TAINTED,
    UNFILLED,
    WITHDRAWN,
)
from ..ledger.entries import (
    BlockComparison,
    CachedContent,
    Collision,
    Entry,
    ForeignHit,
    ForeignLoad,
    Leak,
    LoadInFlight,
    Misplaced,
    OtherPrefix,
    PoolComparison,
    ReadInvalid,
    SharedWrite,
    Stateless,
    StrayFree,
    UncommittedHit,
    Uncovered,
)
from .registry import (
    EVICT_BLOCKS,
    LMCACHE_2880,
    LMCACHE_2961,
    RESET_CACHE,
    VLLM_26813,
    VLLM_29387,
    VLLM_30931,
    VLLM_33775,
    VLLM_37076,
    VLLM_39146,
    VLLM_42571,
    VLLM_42903,
    VLLM_43569,
    VLLM_43884,
    VLLM_44250,
    VLLM_44409,
    VLLM_44701,
    VLLM_45357_FIX,
    VLLM_56525,
    VLLM_56643,
    VLLM_57580,
    Figure,
    Witness,
    invariant,
)

_HOW = {
    "taken": "was allocated to {second} as a free block while {first} held it",
    "unhashed": "was used by {second} as a cached block, but has no hash: {first} allocated it before",
    "twice": "is twice in the block tables of one request: {first}, and {second}",
    "unheld": "is in a block table of {second}, which holds no reference to it; {first} does",
}
"""For each kind of collision, the verb of its sentence."""

_NO_VALID_KV = {
    SEQUENCE: "the sequence of request {filler} had fewer tokens than its hash covers",
    PENDING: "the load of request {filler} had not finished",
    FAILED: "the load of request {filler} failed, and the tokens were not computed again",
    UNFILLED: "request {filler} did not compute all its tokens",
    TAINTED: "request {filler} computed it from KV that was not valid",
    NOT_PLANNED: "the connector metadata did not name the load of request {filler}",
    NEVER_LOADED: "the load of request {filler} was never made",
    LEFT: "it was freed while the request's attention window still had these positions",
    OVERWRITTEN: "the state in the block already has tokens at these positions, of an earlier step or a load",
    REWRITTEN: "a later turn of the session {filler} wrote other tokens over these positions",
    ABSENT: "its block table has no block for them, though the step reads these positions",
}
"""Why the KV of a block is not valid."""


@invariant(
    "blocks/double-allocation",
    on=(Collision,),
    message="",
    references=(VLLM_44409, VLLM_33775, VLLM_43884, VLLM_42903),
    near_misses=(
        "a shared prefix: many requests hold one cached block",
        "two blocks of the same hash: vLLM does not merge blocks that were computed twice",
        "the null block, which may be in every block table",
        "a connector's own reference to a block that a request holds",
    ),
)
def double_allocation(entry: Entry) -> Iterator[Witness]:
    """A block has one owner, unless it is a cached block that several requests share.

    A block is at most once in a request's block tables, across all KV cache groups. A newly allocated block
    has no holder. A shared block has a hash. Violated, for example, when the allocation for one group takes
    a block that another group of the same request has hit in the cache but not yet touched: both groups then
    write to the same memory, and attention reads what was written last.
    """
    subject = entry.subject
    assert isinstance(subject, Collision)
    first = subject.first if subject.first is not None else "an unknown holder"
    how = _HOW[subject.how].format(first=first, second=subject.second)
    figures: dict[str, Figure] = {
        "how": subject.how,
        "pool": subject.pool,
        "block": subject.block,
        "references": subject.references,
        "first": str(first),
        "second": str(subject.second),
    }
    sentence = f"Block {subject.block} {how}. Both write to it, and both read what was written last."
    yield Witness(_plain(sentence), subject.story, **figures)


@invariant(
    "blocks/double-free",
    on=(StrayFree,),
    message="",
    references=(VLLM_42571,),
    near_misses=(
        "a deferred free, which waits until no step in flight may write to the block (vLLM 0.24 and later)",
        "source and target of a copy, each freed once more when the copy was made",
        "a connector that releases its own references",
        "the null block, which is never freed",
    ),
)
def double_free(entry: Entry) -> Iterator[Witness]:
    """Only a holder of a block frees it.

    vLLM raises no error: the reference count falls to -1, or another holder's reference is gone, and the
    block can be allocated again while it is still read. If an assertion stops the engine, it fails at a
    later, unrelated allocation.
    """
    subject = entry.subject
    assert isinstance(subject, StrayFree)
    by, earlier = subject.by, subject.earlier
    who = f"request {by.request_id}, life {by.life}, group {by.group}" if by.request_id else "no request"
    before = ", and no earlier free of it was recorded"
    if earlier is not None:
        freer = f"request {earlier.request_id}, life {earlier.life}" if earlier.request_id else earlier.by
        before = f"; {freer} freed it before, at step {earlier.step}"
    sentence = (
        f"Block {subject.block} was freed at step {by.step} for {who}, which does not hold it{before}. It "
        f"now has {subject.references} references, and can be allocated again while it is still read."
    )
    yield Witness(
        _plain(sentence),
        subject.story,
        pool=subject.pool,
        block=subject.block,
        references=subject.references,
        freed_by=by.by,
        first_freed_step=earlier.step if earlier is not None else -1,
    )


@invariant(
    "blocks/references",
    on=(BlockComparison,),
    message="Block {block} has {references} references, but {ledger_references} known holders: {holders}. "
    "With too few references it is freed while it is held; with too many it is never freed.",
    references=(VLLM_42571, VLLM_37076),
    near_misses=(
        "the null block, whose references vLLM does not count",
        "a deferred free: the request has ended, but its reference remains",
        "source and target of a copy that is still to be made",
        "a block that was held when the journal began, whose holders are not known",
    ),
)
def references(entry: Entry) -> Iterator[Witness]:
    """A block's reference count is the number of its holders.

    Holders are the entries of requests' block tables, deferred frees, source and target of pending copies,
    and connectors' own references. The engine's count is recorded with each touch and free, and whenever
    kvledger sweeps the pool. Violated when the two differ.
    """
    subject = entry.subject
    assert isinstance(subject, BlockComparison)
    if subject.ledger_references >= 0 and subject.references != subject.ledger_references:
        yield Witness(
            None,
            subject.story,
            pool=subject.pool,
            block=subject.block,
            references=subject.references,
            ledger_references=subject.ledger_references,
            holders="; ".join(subject.holders) or "none",
        )


@invariant(
    "blocks/free-iff-unreferenced",
    on=(BlockComparison, PoolComparison),
    message="Block {block} has {references} references and {where} in the free queue. It {meaning}.",
    references=(VLLM_42571,),
    near_misses=(
        "the null block, which is never in the free queue and whose references are not counted",
        "a cached block that nobody holds: it is free and has a hash",
    ),
)
def free_iff_unreferenced(entry: Entry) -> Iterator[Witness]:
    """A block is in the free queue exactly when nobody holds a reference to it.

    Also, the engine's counter of free blocks agrees with the blocks allocated and freed call by call.
    Violated when a free block is not in the queue, a held block is, or the counter differs.
    """
    subject = entry.subject
    if isinstance(subject, PoolComparison):
        if subject.free_blocks != subject.ledger_free_blocks:
            yield Witness(
                "The engine's counter says that pool {pool} has {free_blocks} free blocks, but by the blocks "
                "allocated and freed it has {ledger_free_blocks}.",
                pool=subject.pool,
                free_blocks=subject.free_blocks,
                ledger_free_blocks=subject.ledger_free_blocks,
            )
        return
    assert isinstance(subject, BlockComparison)
    if subject.references < 0 or (subject.queued >= 0 and (subject.references == 0) != bool(subject.queued)):
        effect = "can be allocated while it is held" if subject.queued else "will never be allocated again"
        yield Witness(
            None,
            subject.story,
            pool=subject.pool,
            block=subject.block,
            references=subject.references,
            where={1: "is", 0: "is not"}.get(subject.queued, "may or may not be"),
            meaning="was freed more often than it was held" if subject.references < 0 else effect,
        )


@invariant(
    "blocks/hash-map",
    stop_now=RESET_CACHE,
    on=(BlockComparison, PoolComparison),
    message="Block {block} {has} hash, but {what}: the prefix cache and the block disagree.",
    near_misses=(
        "two blocks of the same hash: the cache map has both",
        "a block with a hash for its first tokens, and another once it is full",
        "a block that is evicted by the call that allocates it",
    ),
)
def hash_map(entry: Entry) -> Iterator[Witness]:
    """A block has a hash exactly when the cache map has the block under that hash.

    Violated when a block keeps a hash that the map no longer has (it is never hit and never evicted), when
    the map has a block without that hash, or when a block gains or loses a hash without a call of the pool.
    """
    subject = entry.subject
    if isinstance(subject, PoolComparison):
        if subject.ledger_hashes >= 0 and subject.hashes != subject.ledger_hashes:
            yield Witness(
                "The cache map of pool {pool} has {hashes} hashes, but {ledger_hashes} were added and not "
                "evicted.",
                pool=subject.pool,
                hashes=subject.hashes,
                ledger_hashes=subject.ledger_hashes,
            )
        return
    assert isinstance(subject, BlockComparison)
    if subject.has_hash < 0:
        return
    if subject.has_hash != subject.mapped:
        what = (
            "the cache map does not have it under that hash" if subject.has_hash else "the cache map has it"
        )
    elif subject.ledger_has_hash >= 0 and subject.has_hash != subject.ledger_has_hash:
        what = "no call of the pool gave it one" if subject.has_hash else "no call of the pool removed it"
    else:
        return
    has = "has a" if subject.has_hash else "has no"
    yield Witness(None, subject.story, pool=subject.pool, block=subject.block, has=has, what=what)


@invariant(
    "blocks/read-invalid",
    stop_now=EVICT_BLOCKS,
    tokens="tokens",
    on=(ReadInvalid,),
    message="In step {step}, request {request} reads {tokens} tokens without valid KV, from position {start} "
    "up, in block {block}{more}: {because}.",
    references=(VLLM_26813,),
    near_misses=(
        "a hit in the step in which another request computes the tokens: a step writes before it reads",
        "a block whose load failed and that is computed again before the next read",
        "blocks of a load that failed in part, which were loaded",
        "a hit on blocks that were filled before the journal began",
        "a request that hits a block and is preempted before it runs",
        "a block that was freed after the window of the request had left it",
        "null blocks below the window of the first step, which a hit or a load skipped",
        "rejected drafts in a request whose window has room for them",
        "rejected drafts in a model with states, which keeps the state of each draft",
        "a turn that begins at the end of a block: the V2 runner goes on from the state there",
    ),
)
def read_invalid(entry: Entry) -> Iterator[Witness]:
    """Every position that a step reads holds valid KV.

    A step reads what its requests have hit in cached blocks, at the first step after the hit and at every
    later one. Each position must have been computed or loaded by the life that fills its block, in an earlier
    step or in this one, from KV that was valid itself. Violated when it was not: the output of the request is
    wrong from this step on, and so is the KV that it computes, which later requests may hit. A hit that is
    not valid is settled as unattained, not as local. In a group with windows, the table must have the blocks
    of the window of each step. A state, as of Mamba layers, is one checkpoint that the steps of a request
    write over one another, so a step must begin where the state ends that the step before left, and a hit
    has the checkpoint at its end.
    """
    subject = entry.subject
    assert isinstance(subject, ReadInvalid)
    yield _reads(subject, entry, _NO_VALID_KV.get(subject.why, _NO_VALID_KV[FAILED]))


def _reads(subject: ReadInvalid, entry: Entry, because: str) -> Witness:
    """What a step reads that has no valid KV, and why not."""
    return Witness(
        None,
        subject.story,
        step=entry.step if subject.step < 0 else subject.step,
        pool=subject.pool,
        block=subject.blocks[0],
        blocks=subject.blocks,
        more=f" and {len(subject.blocks) - 1} more" if len(subject.blocks) > 1 else "",
        tokens=subject.tokens,
        start=subject.start,
        end=subject.end,
        filler=subject.filler,
        why=subject.why,
        because=because.format(filler=subject.filler),
    )


_BEFORE_ITS_STEP = {
    WITHDRAWN: "request {filler} was preempted in the step that was to compute them, so no worker did",
    IN_STEP: "the same step computes this state for request {filler}, and reads it before it writes it",
}
"""Why the step that writes a cached block had not run."""


@invariant(
    "blocks/uncommitted-hit",
    stop_now=EVICT_BLOCKS,
    tokens="tokens",
    on=(UncommittedHit,),
    message="In step {step}, request {request} reads {tokens} tokens before they are written, from position "
    "{start} up, in block {block}{more}: {because}.",
    references=(VLLM_56525, VLLM_57580, VLLM_43569, VLLM_29387),
    near_misses=(
        "a hit in a step that was scheduled before the output of the step that writes came: workers run "
        "steps in order",
        "a request that is aborted while its step is in flight: the step runs all the same",
        "a hit on KV in the step that computes it, in a group with attention",
        "a hit on the blocks below those of a step that was withdrawn",
        "a block of a withdrawn step that is allocated again before anybody hits it",
    ),
)
def uncommitted_hit(entry: Entry) -> Iterator[Witness]:
    """A cached block is read only after the step that writes it was given to the workers.

    The scheduler caches a block when it schedules the step that fills it. Violated when a request reads the
    block although this step was withdrawn, because the scheduler preempted its request in the same call, or
    when a step reads a state (as of Mamba layers) that it writes itself. The output of the request is wrong
    from this step on, as for ``blocks/read-invalid``, which names those who read what the request computes.
    The hit is settled as unattained, not as local.
    """
    subject = entry.subject
    assert isinstance(subject, UncommittedHit)
    yield _reads(subject, entry, _BEFORE_ITS_STEP.get(subject.why, _BEFORE_ITS_STEP[WITHDRAWN]))


@invariant(
    "blocks/same-prefix",
    stop_now=EVICT_BLOCKS,
    tokens="tokens",
    on=(OtherPrefix,),
    message="Request {read_by} hit block {block}, into which {written_by} computed the KV of another prefix: "
    "of the {end} tokens up to the end of the block, not all are those of {read_by}.",
    near_misses=(
        "prompts that share their first blocks and differ in the next one",
        "a block that is cached again for other tokens after its eviction",
        "a session whose last sampled token is replaced by the next chunk, before the block was full",
        "a block that was cached before the journal began, whose prefix is not known",
    ),
)
def same_prefix(entry: Entry) -> Iterator[Witness]:
    """A request hits only blocks that were computed for its own prefix.

    The engine finds hits by its block hashes. The observer hashes all tokens up to the end of each cached
    block itself, as the request that cached the block has them (with those after it that the engine's hash
    covers for a drafter), and compares this with the same hash of each request that hits the block. Violated
    when they differ: a block hash was chained to the wrong parent, kept although its tokens were replaced, or
    stands for two prefixes. The request reads the KV of other tokens. ``blocks/isolation`` compares cache
    salt, adapter and multimodal inputs, and the invariants of weights the weights.
    """
    subject = entry.subject
    assert isinstance(subject, OtherPrefix)
    several = (
        "Request {read_by} hit {count} blocks, the first of them block {block}, into which {written_by} "
        "computed the KV of another prefix: of the {end} tokens up to the end of the first, not all are "
        "those of {read_by}."
    )
    yield Witness(
        several if len(subject.blocks) > 1 else None,
        subject.story,
        read_by=subject.holder.request_id,
        written_by=f"request {subject.writer}" if subject.writer else "a request that has ended",
        writer=subject.writer,
        pool=subject.pool,
        group=subject.group,
        block=subject.blocks[0],
        blocks=subject.blocks,
        count=len(subject.blocks),
        tokens=subject.tokens,
        end=subject.end,
    )


@invariant(
    "blocks/in-flight",
    stop_now=RESET_CACHE,
    tokens="tokens",
    on=(LoadInFlight,),
    message="Request {request} loads KV into block {block}{more}, which a step in flight may still write: "
    "request {writer} runs in that step, and gave the block back in step {freed}.",
    references=(VLLM_45357_FIX,),
    near_misses=(
        "a free that is deferred until the output of the last step in flight was processed",
        "a block that is allocated for a computation: workers run steps in order",
        "a block that was cached before the step in flight, which does not write it",
        "a request that was preempted, and runs again in other blocks",
    ),
)
def in_flight(entry: Entry) -> Iterator[Witness]:
    """A step in flight and an asynchronous load never write the same block.

    A step that was given to the workers writes its blocks until its output is processed, although its request
    has been aborted, has stopped or was preempted meanwhile. Another step may get the blocks at once, because
    workers run steps in order. A connector's asynchronous load is in no order with them. Violated when blocks
    are allocated for such a load while their last owner, which gave them back with its life, runs in a step
    whose output is not processed.
    """
    subject = entry.subject
    assert isinstance(subject, LoadInFlight)
    yield Witness(
        None,
        subject.story,
        pool=subject.pool,
        block=subject.blocks[0],
        blocks=subject.blocks,
        more=f" and {len(subject.blocks) - 1} more" if len(subject.blocks) > 1 else "",
        tokens=subject.tokens,
        writer=subject.writer,
        freed=subject.freed,
    )


@invariant(
    "blocks/hash-content",
    stop_now=EVICT_BLOCKS,
    tokens="end - start",
    on=(CachedContent,),
    message="",
    references=(VLLM_26813,),
    near_misses=(
        "a hash given at scheduling, for tokens that the step is about to compute",
        "blocks that have several hashes, or a hash for a part of the block",
        "a load that failed above the cached positions",
        "a load that failed and whose tokens the request computes again before it ends",
        "draft tokens: only accepted tokens are cached",
    ),
)
def hash_content(entry: Entry) -> Iterator[Witness]:
    """A cached block holds the KV of every position that its hash stands for.

    Violated when a block is cached for positions beyond its request's sequence, before an asynchronous load
    has finished, when its request's life has ended without filling them, or under a hash that another block
    has for other positions: the next request with this prefix reads KV that does not exist, or the wrong KV.
    ``blocks/read-invalid`` or ``blocks/uncommitted-hit`` names each request that hits the block.
    """
    subject = entry.subject
    assert isinstance(subject, CachedContent)
    why = {
        SEQUENCE: f"which has only {subject.limit} tokens",
        PENDING: f"which has KV only up to position {subject.limit}, because its load has not finished",
        FAILED: f"which has no KV from position {subject.limit} on, because its load failed",
        HASHED_OTHERWISE: f"under a hash that a block has for positions up to {subject.limit}",
        UNFILLED: f"which has no KV from position {subject.limit} on, because it did not compute them",
        WITHDRAWN: f"which has no KV from position {subject.limit} on, because it was preempted in the step "
        "that was to compute them",
    }[subject.why]
    reads = "the wrong KV" if subject.why == HASHED_OTHERWISE else "KV that does not exist"
    sentence = (
        f"Block {subject.block} is cached for positions up to {subject.end} of request {subject.request_id}, "
        f"{why}. The next request with this prefix reads {reads}."
    )
    yield Witness(
        _plain(sentence),
        subject.story,
        pool=subject.pool,
        block=subject.block,
        start=subject.start,
        end=subject.end,
        limit=subject.limit,
        why=subject.why,
    )


@invariant(
    "blocks/write-shared",
    on=(SharedWrite,),
    message="",
    references=(VLLM_39146,),
    near_misses=(
        "a hit on a block in the same step that fills it: another request was scheduled first and fills it",
        "the last token of a full external hit, which is computed again in the request's own block",
        "a partial hit, which writes to a copy of the block",
        "the last positions of a hit, which are computed again with the same tokens",
    ),
)
def write_shared(entry: Entry) -> Iterator[Witness]:
    """A request writes only to blocks that nobody held before.

    The request itself fills the blocks above its local hit, by computing or loading. Violated when such a
    block already had a holder, whose KV is then overwritten.
    """
    subject = entry.subject
    assert isinstance(subject, SharedWrite)
    sentence = (
        f"Block {subject.block} is filled by {subject.second} at place {subject.place} of its block table, "
        f"but {subject.first} held it before and now reads the wrong KV."
    )
    yield Witness(
        _plain(sentence), subject.story, pool=subject.pool, block=subject.block, place=subject.place
    )


@invariant(
    "blocks/coverage",
    on=(Uncovered, Misplaced, Stateless),
    message="",
    near_misses=(
        "null blocks before a sliding window, which take the place of their positions",
        "Mamba states that no step reads any more, whose places are empty",
        "a Mamba state that stands at a later place because drafts were rejected",
        "cross-attention and ring buffers, whose block tables do not follow positions",
    ),
)
def coverage(entry: Entry) -> Iterator[Witness]:
    """A request's block tables have a slot for each of its computed tokens.

    Checked whenever block tables are recorded: at an admission, and in turn for all running requests.
    Violated when a table is too short, when a cached block stands where other positions belong, whose KV
    the request then reads, or when the place of the Mamba state that a step reads is empty.
    """
    subject = entry.subject
    if isinstance(subject, Stateless):
        yield Witness(
            "The block table of request {request} in group {group} has no block at place {place}, where the "
            "state after {end} tokens belongs that the request reads.",
            group=subject.group,
            place=subject.place,
            end=subject.end,
        )
        return
    if isinstance(subject, Misplaced):
        yield Witness(
            "Block {block} is at place {place} of the block table of request {request} in group {group}, for "
            "positions from {wanted} up. Its hash stands for positions from {begin} up.",
            subject.story,
            group=subject.group,
            block=subject.block,
            place=subject.place,
            wanted=subject.place * subject.block_tokens,
            begin=subject.begin,
        )
        return
    assert isinstance(subject, Uncovered)
    yield Witness(
        "Request {request} has {computed_tokens} computed tokens, but its block table in group {group} has "
        "{blocks} blocks of {block_tokens} tokens: the other tokens have no block of this request.",
        group=subject.group,
        blocks=subject.blocks,
        block_tokens=subject.block_tokens,
        computed_tokens=subject.computed_tokens,
    )


@invariant(
    "blocks/leak",
    on=(Leak,),
    message="",
    near_misses=(
        "a connector that sends the blocks of a request that has ended, and then frees them",
        "a deferred free, while a step that may write to the block is in flight",
        "a reference of a connector, which may last",
    ),
)
def leak(entry: Entry) -> Iterator[Witness]:
    """No block is held for a request that has ended, or has given it up, or for nobody.

    Violated at once when the engine removes a request without freeing its blocks, or has deferred their free
    and no step is in flight any more, and after 15 minutes when a connector keeps them: the pool lacks these
    blocks until a restart. Also violated when an engine without a connector keeps the blocks of a request
    that has ended, or a reference that it took for no request, when nothing runs any more, or after 15
    minutes.
    """
    subject = entry.subject
    assert isinstance(subject, Leak)
    when = f"ended {subject.seconds} seconds ago" if subject.seconds else "has ended"
    name, blocks = subject.holder.request_id, len(subject.blocks)
    sentence = f"Request {name} {when} and still holds {blocks} blocks, which the pool lacks until a restart."
    if subject.holder.kind == PIN:
        sentence = (
            f"{subject.by} took references to {blocks} blocks for no request, and nobody gives them back: "
            "the pool lacks these blocks until a restart."
        )
    elif subject.holder.kind == DEFERRED:
        sentence = (
            f"Request {name} gave up {blocks} blocks. No step is in flight that may write to them, but they "
            "are not free: the pool lacks them until a restart."
        )
    yield Witness(_plain(sentence), subject.story, blocks=subject.blocks, seconds=subject.seconds)


def _plain(sentence: str) -> str:
    """Escape the braces that a request's id may contain: figures are not filled in there."""
    return sentence.replace("{", "{{").replace("}", "}}")


# --- isolation -----------------------------------------------------------------------------------------
#
# The check that a request reads no KV of another cache salt, LoRA adapter or multimodal input.
#
# Its subjects come from :mod:`kvledger.audit.ledger.blocks`, which compares the isolation classes of
# requests with those of the KV that they hit or load.


_OTHER = {
    SALT: "another cache salt",
    ADAPTER: "another LoRA adapter",
    INPUT: "other multimodal inputs",
}
"""What the request that wrote KV and the request that reads it do not share."""


@invariant(
    "blocks/isolation",
    stop_now=RESET_CACHE,
    tokens="tokens",
    on=(ForeignHit, ForeignLoad),
    message="Request {read_by} hit cached block {block}, which request {written_by} wrote with {other}. The "
    "two requests must not share KV.",
    references=(VLLM_30931, VLLM_44701, VLLM_44250, VLLM_56643, LMCACHE_2880, LMCACHE_2961),
    near_misses=(
        "a hit on blocks before the first multimodal input that differs",
        "a request that was preempted and hits the blocks that it wrote itself",
        "blocks that were cached before the journal began, whose isolation classes are not known",
        "a key of the connector's store for which requests of several classes have saved KV",
    ),
)
def isolation(entry: Entry) -> Iterator[Witness]:
    """A request reads only KV that was written under its own isolation classes.

    These are the class of its cache salt, the class of its LoRA adapter (name and path), and the classes
    and positions of the multimodal inputs that begin before the end of the block. Violated when the request
    hits a cached block whose classes differ: it reads KV of other inputs or of another adapter, or of a
    client from whom a cache salt should keep it apart. Also violated when a connector promises external
    tokens under a key of its store for which only requests of other classes have saved KV.
    """
    subject = entry.subject
    assert isinstance(subject, ForeignHit | ForeignLoad)
    differs, other = ", ".join(subject.differs), " and ".join(_OTHER[kind] for kind in subject.differs)
    if isinstance(subject, ForeignHit):
        several = (
            "Request {read_by} hit {count} cached blocks, the first of them block {block}, which request "
        )
        several += "{written_by} wrote with {other}. The two requests must not share KV."
        yield Witness(
            several if len(subject.blocks) > 1 else None,
            subject.story,
            read_by=subject.holder.request_id,
            written_by=subject.writer,
            differs=differs,
            other=other,
            pool=subject.pool,
            block=subject.blocks[0],
            blocks=subject.blocks,
            count=len(subject.blocks),
            tokens=subject.tokens,
        )
        return
    yield Witness(
        "Request {request} was promised {tokens} external tokens from position {start} up, under keys for "
        "which request {written_by} saved KV with {other}. The two requests must not share KV.",
        written_by=subject.writer,
        differs=differs,
        other=other,
        tokens=subject.tokens,
        start=subject.start,
    )
