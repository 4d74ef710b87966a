"""Checks of the KV connector: what it promises, loads, saves and counts."""

from __future__ import annotations

from collections.abc import Iterator

from ..causes import FAILED, NEVER_LOADED, NOT_PLANNED
from ..events import Admitted, Matched, Reported, TiersReported, Tracked
from ..ledger.entries import (
    Entry,
    ExternalTokensLost,
    FailedBlocksKept,
    Handover,
    Overdue,
    SaveSkipped,
    Unpromised,
    Unsaved,
)
from ..ledger.lives import OVERDUE_SECONDS
from .registry import (
    LMCACHE_1361,
    LMCACHE_1969,
    LMCACHE_2007,
    LMCACHE_2158,
    LMCACHE_2821,
    LMCACHE_2929,
    LMCACHE_3269,
    LMCACHE_4508,
    NOTHING,
    RESET_CACHE,
    USUAL,
    VLLM_30522,
    VLLM_36638,
    VLLM_37460,
    VLLM_49250,
    Figure,
    Witness,
    invariant,
)

_BLOCKS_NAMED = 8
"""Most block ids named in a sentence."""

_BY_WORKER = {
    "": "",
    "never_started": ": a worker never began the load",
    "failure_unheard": ": a worker reported that the load failed",
}
"""What the workers' journals add to the sentence."""

_NOT_LOADED = (
    "The connector promised {tokens} external tokens to request {request} from position {start} on, but they "
    "were not loaded before the request ran"
)


@invariant(
    "connector/promise-not-loaded",
    stop_now=RESET_CACHE,
    tokens="tokens",
    on=(ExternalTokensLost,),
    message=_NOT_LOADED + ".",
    references=(LMCACHE_1969, LMCACHE_1361, LMCACHE_2007),
    near_misses=(
        "a load that was reported as failed: its tokens are rolled back and computed",
        "a preemption or an end while the load was pending: nothing read its blocks",
        "connector metadata that kvledger can't read: nothing is known about its loads",
        "a worker whose journal has nothing, or nothing yet, about the step that loads",
        "blocks that a worker reported as failed and that the engine treats as failed",
    ),
)
def promise_not_loaded(entry: Entry) -> Iterator[Witness]:
    """External tokens are loaded, or reported as failed, before the first step that reads them.

    Violated when the step's connector metadata omits promised tokens, or when a request runs before its
    asynchronous load has finished. The workers' journals show two more cases: a worker never begins a
    planned load, or the engine ignores that a load failed. Attention then reads whatever the blocks held.
    """
    subject = entry.subject
    assert isinstance(subject, ExternalTokensLost)
    if subject.cause in (NOT_PLANNED, NEVER_LOADED):
        yield Witness(
            f"{_NOT_LOADED}{_BY_WORKER[subject.by_worker]}{_named(subject.blocks)}.",
            tokens=subject.tokens,
            cause=subject.cause,
            start=subject.start,
            blocks=subject.blocks,
        )


def _named(blocks: list[int]) -> str:
    """The block ids, as the end of a sentence."""
    if not blocks:
        return ""
    return f" (blocks never filled: {_ids(blocks)})"


def _ids(blocks: list[int]) -> str:
    """The first few ids, and how many more there are."""
    more = len(blocks) - _BLOCKS_NAMED
    return ", ".join(map(str, blocks[:_BLOCKS_NAMED])) + (f" and {more} more" if more > 0 else "")


@invariant(
    "connector/load-unpromised",
    on=(Unpromised,),
    message="Worker {worker} loads into {count} blocks that no request's external tokens were promised for: "
    "{named}.",
    references=(LMCACHE_1361,),
    near_misses=(
        "an asynchronous load that is in the connector metadata of a later step",
        "a load that begins within the local hit, at the boundary of a chunk of the store",
        "a journal in which promises may be missing",
    ),
)
def load_unpromised(entry: Entry) -> Iterator[Witness]:
    """A worker loads only into blocks that the connector promised to fill for a request.

    Violated when a worker's connector metadata names other blocks: their KV, which may belong to any
    request, is overwritten.
    """
    subject = entry.subject
    assert isinstance(subject, Unpromised)
    named = _ids(subject.blocks)
    yield Witness(worker=subject.worker, count=len(subject.blocks), named=named, blocks=subject.blocks)


@invariant(
    "connector/failed-load-counted",
    on=(Reported,),
    unless=USUAL,
    severity="drift",
    tokens="failed_tokens",
    message="The engine reported {external_tokens} external tokens for request {request}, but "
    "{failed_tokens} of the {promised_tokens} promised failed to load.",
    references=(VLLM_37460, VLLM_30522, VLLM_36638, VLLM_49250),
    near_misses=(
        "a load that failed in a later life than the one reported",
        "a load that failed completely, after which the request was admitted again",
    ),
)
def failed_load_counted(entry: Entry) -> Iterator[Witness]:
    """External tokens that failed to load are not reported as external.

    This is a drift and not a violation: vLLM deliberately reports the external tokens promised at the
    admission, so its counters are too high by the tokens that failed to load.
    """
    subject, account = entry.subject, entry.account
    assert isinstance(subject, Reported)
    assert account is not None
    life = account.reporting
    if life is None:
        return
    failed = life.voided.get(FAILED, 0)
    if failed and subject.external_tokens > life.external - failed:
        yield Witness(
            external_tokens=subject.external_tokens,
            promised_tokens=life.external,
            failed_tokens=failed,
        )


@invariant(
    "connector/negative-match",
    stop_now=NOTHING,
    on=(Matched, Admitted),
    unless=USUAL,
    message="The connector answered that it has {external_tokens} tokens for request {request} beyond the "
    "{local_tokens} tokens of the local hit; this number can't be negative.",
    references=(LMCACHE_2158, LMCACHE_3269),
    near_misses=(
        "a connector that has no answer yet and is asked again later",
        "a connector that has nothing beyond the local hit",
    ),
)
def negative_match(entry: Entry) -> Iterator[Witness]:
    """The number of tokens that a connector has beyond the local hit is never negative.

    Violated when the connector subtracts the local hit from a match of its own that is shorter: the engine
    would count fewer computed tokens than its own cache had.
    """
    subject = entry.subject
    assert isinstance(subject, Matched | Admitted)
    if subject.external_tokens is not None and subject.external_tokens < 0:
        yield Witness(external_tokens=subject.external_tokens, local_tokens=subject.local_tokens)


@invariant(
    "connector/tiers-do-not-sum",
    stop_now=NOTHING,
    tokens="external_tokens",
    on=(TiersReported,),
    message="The engine asked the connector for the tiers of {external_tokens} external tokens of request "
    "{request}, and its tiers have {tier_tokens} tokens: {tiers}.",
    near_misses=(
        "tokens of a tier that the connector does not know (`external_unspecified`)",
        "tokens that several tiers have between them",
        "a release that does not ask for tiers, or a life that began after a preemption, for which none are "
        "asked",
    ),
)
def tiers_do_not_sum(entry: Entry) -> Iterator[Witness]:
    """The tiers that a connector reports sum to the external tokens that the engine asked about.

    Violated when tokens are in no tier or in two. The engine then counts all of them as
    `external_unspecified`, and no figure says which tier saved the computation.
    """
    subject = entry.subject
    assert isinstance(subject, TiersReported)
    tier_tokens = sum(subject.tokens)
    if tier_tokens != subject.external_tokens or min(subject.tokens, default=0) < 0:
        tiers = ", ".join(f"{tier} {n}" for tier, n in zip(subject.tiers, subject.tokens, strict=True))
        yield Witness(external_tokens=subject.external_tokens, tier_tokens=tier_tokens, tiers=tiers or "none")


@invariant(
    "connector/tracker-lag",
    stop_now=NOTHING,
    tokens="lag_tokens",
    on=(Tracked,),
    message="The connector knows {tracked_tokens} of the {computed_tokens} tokens that request {request} has "
    "computed. It is {lag_tokens} tokens behind, and at most {recent_tokens} are in flight.",
    references=(LMCACHE_2821, LMCACHE_2929),
    near_misses=(
        "tokens of steps in flight, which the connector could not know when it last built its metadata",
        "a connector ahead of the engine, after draft tokens were rejected or a life ended",
        "a connector that does not count tokens itself",
    ),
)
def tracker_lag(entry: Entry) -> Iterator[Witness]:
    """A connector's own count of a request's tokens keeps up with the engine's.

    Violated when the connector misses more tokens than are in flight: it never saves tokens that it does
    not know, and it may save later KV under the wrong tokens.
    """
    subject = entry.subject
    assert isinstance(subject, Tracked)
    lag = subject.computed_tokens - subject.tracked_tokens
    if lag > subject.recent_tokens:
        yield Witness(
            tracked_tokens=subject.tracked_tokens,
            computed_tokens=subject.computed_tokens,
            lag_tokens=lag,
            recent_tokens=subject.recent_tokens,
        )


@invariant(
    "connector/save-gap",
    stop_now=NOTHING,
    tokens="due_tokens - saved_tokens",
    on=(SaveSkipped, Tracked, Unsaved),
    message="The connector has saved {saved_tokens} tokens of request {request}, but by its own rules it "
    "should have saved {due_tokens}.",
    references=(LMCACHE_2821, LMCACHE_4508),
    near_misses=(
        "saving is switched off, for all requests or this one, or the connector only loads",
        "less than a whole chunk beyond the saved tokens",
        "tokens that were in the store already, or saved in an earlier life",
        "output tokens, if only prompts are saved",
        "a worker's step whose connector metadata orders no save",
    ),
)
def save_gap(entry: Entry) -> Iterator[Witness]:
    """The connector orders every save that its own rules require.

    Violated when a request has filled a chunk of the connector and no connector metadata ordered the save,
    when a save begins above the tokens that were saved before or that a lookup found in the store, or when a
    worker did not wait for a save that its metadata orders: a later request with the same tokens
    finds fewer tokens in the store than the configuration promises.
    """
    subject = entry.subject
    if isinstance(subject, Unsaved):
        yield Witness(
            "Worker {worker} got {saves} orders to save in step {at_step}, but did not wait for the saves.",
            worker=subject.worker,
            saves=subject.saves,
            at_step=subject.step,
        )
        return
    if isinstance(subject, SaveSkipped):
        yield Witness(
            "The connector saves tokens of request {request} from position {due_tokens} on, but has saved or "
            "found {saved_tokens} tokens below.",
            saved_tokens=subject.held_tokens,
            due_tokens=subject.start,
        )
        return
    assert isinstance(subject, Tracked)
    assert entry.account is not None
    saved_tokens = max(subject.saved_tokens, entry.account.saved_tokens)
    if saved_tokens < subject.due_tokens:
        yield Witness(saved_tokens=saved_tokens, due_tokens=subject.due_tokens)


@invariant(
    "connector/failed-block-kept",
    tokens="tokens",
    on=(FailedBlocksKept,),
    message="A load of request {request} failed, but the engine keeps {computed_tokens} computed tokens: "
    "{tokens} of them, from position {start} up, are at or above block {block}, which was not loaded.",
    near_misses=(
        "a load that failed in part: the tokens below the first failed block are kept",
        "blocks of another request that failed in the same step",
    ),
)
def failed_block_kept(entry: Entry) -> Iterator[Witness]:
    """After a failed load the engine keeps no token at or above the first block that failed.

    The blocks are those that the engine was told to have failed, in the order of the request's own promise.
    Violated when the engine's count is above the first of them, or is unchanged though the whole load failed:
    the request then reads KV that was not loaded. This is what level `tokens` can prove of a failed load. It
    records no block of a local hit, so a later request that hits a failed block is found from level `blocks`
    on, by blocks/hash-content and blocks/read-invalid.
    """
    subject = entry.subject
    assert isinstance(subject, FailedBlocksKept)
    yield Witness(
        computed_tokens=subject.end,
        start=subject.start,
        tokens=subject.end - subject.start,
        block=subject.blocks[0],
        blocks=subject.blocks,
    )


@invariant(
    "connector/handed-over",
    on=(Handover,),
    message="At the end of request {ended} the connector was handed {blocks} blocks for {room_tokens} "
    "tokens, but only {valid_tokens} were hits, loaded or scheduled.",
    near_misses=(
        "tokens of a step in flight, which the engine counts as computed and whose blocks it has allocated",
        "a request aborted while its load is pending, which connector/handed-unloaded counts",
        "blocks for draft tokens, on releases that hand over every block of the request",
        "tables without positions and several KV cache groups: their blocks are not compared",
    ),
)
def handed_over(entry: Entry) -> Iterator[Witness]:
    """At a request's end the connector is handed its computed tokens and the blocks that hold them.

    Violated when the count of computed tokens is above the account's, when the blocks have no room for the
    computed tokens, or when there are blocks beyond them on a release that cuts such blocks off: the
    connector may then store or transfer KV that was never computed.
    """
    subject = entry.subject
    assert isinstance(subject, Handover)
    computed, valid, room = subject.computed, subject.ledger_computed, subject.room
    figures: dict[str, Figure] = {"ended": subject.request_id, "blocks": subject.blocks}
    if computed > valid >= subject.reported:  # an earlier count above the account's is tokens/balance
        yield Witness(
            "At the end of request {ended} the connector was handed {computed_tokens} computed tokens, but "
            "only {valid_tokens} were hits, loaded or scheduled.",
            **figures,
            computed_tokens=computed,
            valid_tokens=valid,
        )
    elif 0 <= room < computed:
        yield Witness(
            "At the end of request {ended} the connector was handed {blocks} blocks, which have room for "
            "{room_tokens} of its {computed_tokens} computed tokens.",
            **figures,
            room_tokens=room,
            computed_tokens=computed,
        )
    elif subject.trimmed and subject.blocks and room - room // subject.blocks >= valid:
        yield Witness(**figures, room_tokens=room, valid_tokens=valid)


@invariant(
    "connector/handed-unloaded",
    on=(Handover,),
    severity="drift",
    tokens="tokens",
    message="Request {ended} ended before its load had finished: the connector was told {computed_tokens} "
    "computed tokens and handed {blocks} blocks, but {tokens} of these tokens were not loaded.",
    near_misses=(
        "a request that ends after its load has finished",
        "a release that counts nothing as computed while a request waits for its load",
        "a synchronous load, which the step brings before it computes",
    ),
)
def handed_unloaded(entry: Entry) -> Iterator[Witness]:
    """At a request's end the connector is told no more computed tokens than have KV.

    An engine that counts promised tokens as computed while their load lasts tells the connector of them when
    the request is aborted. A connector that stores or sends what it is told would pass on KV that nothing
    wrote, unless it knows by itself that its load has not finished.
    """
    subject = entry.subject
    assert isinstance(subject, Handover)
    valid = subject.ledger_computed - subject.unloaded
    if subject.unloaded and subject.computed > valid:
        yield Witness(
            ended=subject.request_id,
            computed_tokens=subject.computed,
            blocks=subject.blocks,
            tokens=min(subject.computed, subject.ledger_computed) - valid,
        )


_WAITED = (
    "Request {request} has waited {seconds} seconds for a load of {tokens} tokens, which was reported "
    "neither finished nor failed"
)


@invariant(
    "connector/never-finished",
    tokens="tokens",
    on=(Overdue,),
    message=_WAITED + ".",
    near_misses=(
        f"a load or free that completes within {OVERDUE_SECONDS} seconds",
        "blocks that a prefill engine keeps for a decode engine that never asks: its own deadline frees them",
        "a request that ends while its load is pending",
    ),
)
def never_finished(entry: Entry) -> Iterator[Witness]:
    """Every load completes or fails, and so does every free that a connector delays.

    Violated when one has not after ten minutes of the engine's own clock: a request waits forever, or the
    pool has lost its blocks.
    """
    subject = entry.subject
    assert isinstance(subject, Overdue)
    done = ". The workers have reported that it is finished" if subject.done else ""
    if subject.what == "load":
        yield Witness(f"{_WAITED}{done}.", tokens=subject.tokens, seconds=subject.seconds)
    else:
        yield Witness(
            "The connector has kept {blocks} blocks of request {ended}, which ended {seconds} seconds ago"
            f"{done}.",
            blocks=subject.blocks,
            seconds=subject.seconds,
            ended=subject.request_id,
        )
