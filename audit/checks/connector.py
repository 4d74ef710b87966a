"""The KV connector: what it promises is loaded, or is said to have failed."""

from __future__ import annotations

from collections.abc import Iterator

from ..causes import FAILED, NEVER_LOADED, NOT_PLANNED
from ..events import Admitted, Matched, Reported, Tracked
from ..ledger.loads import OVERDUE_SECONDS
from ..ledger.subjects import Entry, ExternalTokensLost, Overdue, Unpromised, Unsaved
from .registry import (
    LMCACHE_1361,
    LMCACHE_1969,
    LMCACHE_2007,
    LMCACHE_2158,
    LMCACHE_2821,
    LMCACHE_2929,
    LMCACHE_3269,
    VLLM_30522,
    VLLM_36638,
    VLLM_37460,
    VLLM_49250,
    Witness,
    invariant,
)

_BLOCKS_NAMED = 8
_BY_WORKER = {
    "": "",
    "never_started": ": a worker never began the load",
    "failure_unheard": ": a worker reported that they failed",
}
_NOT_LOADED = (
    "{tokens} external tokens promised to request {request} from position {start} up were never "
    "loaded, yet it ran over them"
)


@invariant(
    "connector/promise-not-loaded",
    on=(ExternalTokensLost,),
    says=_NOT_LOADED + ".",
    references=(LMCACHE_1969, LMCACHE_1361, LMCACHE_2007),
    near_misses=(
        "a load that was reported failed: its tokens are rolled back and executed",
        "a preemption or an end while the load was pending: nothing read it",
        "a plan that can't be read, of which nothing is known",
        "a worker that was not heard, or not yet, in the step that loads",
        "blocks that a worker reported as failed, and the engine took for failed too",
    ),
)
def promise_not_loaded(entry: Entry) -> Iterator[Witness]:
    """External tokens are loaded, or reported failed, before the first step that reads them.

    Violated when the plan of the step leaves promised tokens out, when a request that waits for an
    asynchronous load runs before it has finished, and, by the workers' own journals, when a worker never
    begins a load that was planned or the engine does not heed that one failed: attention reads whatever
    the blocks held.
    """
    said = entry.subject
    assert isinstance(said, ExternalTokensLost)
    if said.cause in (NOT_PLANNED, NEVER_LOADED):
        yield Witness(
            f"{_NOT_LOADED}{_BY_WORKER[said.by_worker]}{_named(said.blocks)}.",
            tokens=said.tokens,
            cause=said.cause,
            start=said.start,
            blocks=said.blocks,
        )


def _named(blocks: list[int]) -> str:
    """The ids, in words that may end a sentence."""
    if not blocks:
        return ""
    return f" (blocks never filled: {_ids(blocks)})"


def _ids(blocks: list[int]) -> str:
    """The first few, and how many more there are."""
    more = len(blocks) - _BLOCKS_NAMED
    return ", ".join(map(str, blocks[:_BLOCKS_NAMED])) + (f" and {more} more" if more > 0 else "")


@invariant(
    "connector/load-unpromised",
    on=(Unpromised,),
    says="Worker {worker} loads {count} blocks that no request was promised to have filled: {named}.",
    references=(LMCACHE_1361,),
    near_misses=(
        "an asynchronous load that a later step's plan names",
        "a load that begins within the local hit, at the boundary of a store's chunk",
        "a journal in which promises may be missing",
    ),
)
def load_unpromised(entry: Entry) -> Iterator[Witness]:
    """A load writes into blocks that a request was promised to have filled.

    Violated when the plan that a worker was handed names none of them: whatever the blocks held, of
    whichever request, is overwritten.
    """
    said = entry.subject
    assert isinstance(said, Unpromised)
    named = _ids(said.blocks)
    yield Witness(worker=said.worker, count=len(said.blocks), named=named, blocks=said.blocks)


@invariant(
    "connector/failed-load-counted",
    on=(Reported,),
    severity="drift",
    says="The engine reported {external_tokens} external tokens for request {request}, but "
    "{failed_tokens} of the {promised_tokens} promised failed to load.",
    references=(VLLM_37460, VLLM_30522, VLLM_36638, VLLM_49250),
    near_misses=(
        "a load that failed in a later life than the one reported",
        "a load that failed wholly, after which the request was looked up anew",
    ),
)
def failed_load_counted(entry: Entry) -> Iterator[Witness]:
    """Tokens that failed to load are not reported as external.

    A drift, not a violation: vLLM reports the promise of the admission, on purpose, and its
    counters stay too high by what failed.
    """
    said, account = entry.subject, entry.account
    assert isinstance(said, Reported)
    assert account is not None
    life = account.reporting
    if life is None:
        return
    failed = life.voided.get(FAILED, 0)
    if failed and said.external_tokens > life.external - failed:
        yield Witness(
            external_tokens=said.external_tokens,
            promised_tokens=life.external,
            failed_tokens=failed,
        )


@invariant(
    "connector/negative-match",
    on=(Matched, Admitted),
    says="The connector answered {external_tokens} tokens for request {request}, beyond the "
    "{local_tokens} of the local hit: a match can't be negative.",
    references=(LMCACHE_2158, LMCACHE_3269),
    near_misses=(
        "no answer yet: the connector is asked again later",
        "nothing beyond the local hit",
    ),
)
def negative_match(entry: Entry) -> Iterator[Witness]:
    """What a connector holds beyond the local hit is never negative.

    Violated when it takes the local hit from a match that is shorter: the engine would count
    fewer computed tokens than its own cache gave.
    """
    said = entry.subject
    assert isinstance(said, Matched | Admitted)
    if said.external_tokens is not None and said.external_tokens < 0:
        yield Witness(external_tokens=said.external_tokens, local_tokens=said.local_tokens)


@invariant(
    "connector/tracker-lag",
    on=(Tracked,),
    says="The connector knows {tracked_tokens} of the {computed_tokens} tokens that request {request} has "
    "computed: {lag_tokens} behind, where {recent_tokens} may be in flight.",
    references=(LMCACHE_2821, LMCACHE_2929),
    near_misses=(
        "tokens of steps in flight, which the connector could not know at its last plan",
        "a connector ahead of the engine, after drafts were rejected or a life ended",
        "a connector that keeps no count of its own",
    ),
)
def tracker_lag(entry: Entry) -> Iterator[Witness]:
    """A connector's own count of a request keeps up with the engine's.

    Violated when it misses more tokens than are in flight: what it does not know, it never saves, and
    what it saves later may stand under the wrong tokens.
    """
    said = entry.subject
    assert isinstance(said, Tracked)
    lag = said.computed_tokens - said.tracked_tokens
    if lag > said.recent_tokens:
        yield Witness(
            tracked_tokens=said.tracked_tokens,
            computed_tokens=said.computed_tokens,
            lag_tokens=lag,
            recent_tokens=said.recent_tokens,
        )


@invariant(
    "connector/save-gap",
    on=(Tracked, Unsaved),
    says="The connector has saved {saved_tokens} tokens of request {request}; by its own rules "
    "{due_tokens} were due.",
    references=(LMCACHE_2821,),
    near_misses=(
        "saving is switched off, for all or for this request, or the connector only consumes",
        "less than a whole chunk beyond what is saved",
        "tokens that were found in the store already, or saved in an earlier life",
        "output tokens, where only prompts are saved",
        "a worker's step whose plan orders nothing to be saved",
    ),
)
def save_gap(entry: Entry) -> Iterator[Witness]:
    """What should have been saved at the boundaries passed so far has been ordered to be saved.

    Violated when a request passed a boundary of the connector's chunks and no plan saved it, or a worker
    was not made to wait for what its plan orders: a later request with the same tokens finds less than was
    promised to it by configuration.
    """
    said = entry.subject
    if isinstance(said, Unsaved):
        yield Witness(
            "Worker {worker} was handed {saves} orders to save in step {at_step}; nobody waited for them.",
            worker=said.worker,
            saves=said.saves,
            at_step=said.step,
        )
        return
    assert isinstance(said, Tracked)
    assert entry.account is not None
    saved_tokens = max(said.saved_tokens, entry.account.saved_tokens)
    if saved_tokens < said.due_tokens:
        yield Witness(saved_tokens=saved_tokens, due_tokens=said.due_tokens)


_WAITED = (
    "A load of {tokens} tokens for request {request} has been waited for since {seconds} seconds, and was "
    "reported neither finished nor failed"
)


@invariant(
    "connector/never-finished",
    on=(Overdue,),
    says=_WAITED + ".",
    near_misses=(
        f"anything that ends within {OVERDUE_SECONDS} seconds",
        "blocks that a prefill side keeps for a decode side which never comes: its own deadline frees them",
        "a request that ends while its load is pending",
    ),
)
def never_finished(entry: Entry) -> Iterator[Witness]:
    """Every load, and every free that a connector delays, completes or fails.

    Violated when one has not after ten minutes of the engine's own clock: a request waits for ever, or
    its blocks are lost to the pool.
    """
    said = entry.subject
    assert isinstance(said, Overdue)
    done = ". The workers have reported it finished" if said.done else ""
    if said.what == "load":
        yield Witness(f"{_WAITED}{done}.", tokens=said.tokens, seconds=said.seconds)
    else:
        yield Witness(
            "The connector has kept {blocks} blocks of request {ended} since {seconds} seconds, "
            f"which has ended{done}.",
            blocks=said.blocks,
            seconds=said.seconds,
            ended=said.request_id,
        )
