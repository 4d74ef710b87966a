"""The KV connector: what it promises is loaded, or is said to have failed."""

from __future__ import annotations

from collections.abc import Iterator

from kvledger.audit.catalogue import (
    LMCACHE_1361,
    LMCACHE_1969,
    LMCACHE_2007,
    LMCACHE_2158,
    LMCACHE_3269,
    VLLM_30522,
    VLLM_36638,
    VLLM_37460,
    VLLM_49250,
    Witness,
    invariant,
)
from kvledger.audit.events import Admitted, Matched, Reported
from kvledger.audit.ledger import Entry, Voided

_BLOCKS_NAMED = 8
_NOT_LOADED = (
    "{tokens} external tokens promised to request {request} from position {start} up were never "
    "loaded, yet it ran over them"
)


@invariant(
    "connector/promise-not-loaded",
    on=(Voided,),
    says=_NOT_LOADED + ".",
    references=(LMCACHE_1969, LMCACHE_1361, LMCACHE_2007),
    near_misses=(
        "a load that was reported failed: its tokens are rolled back and executed",
        "a preemption or an end while the load was pending: nothing read it",
        "a plan that can't be read, of which nothing is known",
    ),
)
def promise_not_loaded(entry: Entry) -> Iterator[Witness]:
    """External tokens are loaded, or reported failed, before the first step that reads them.

    Violated when the plan of the step leaves promised tokens out, or a request that waits for an
    asynchronous load runs before it has finished: attention reads whatever the blocks held.
    """
    said = entry.subject
    assert isinstance(said, Voided)
    if said.cause in ("not_planned", "never_loaded"):
        yield Witness(
            f"{_NOT_LOADED}{_named(said.blocks)}.",
            tokens=said.tokens,
            cause=said.cause,
            start=said.start,
            blocks=said.blocks,
        )


def _named(blocks: list[int]) -> str:
    """The ids, in words that may end a sentence."""
    if not blocks:
        return ""
    more = len(blocks) - _BLOCKS_NAMED
    ids = ", ".join(map(str, blocks[:_BLOCKS_NAMED])) + (f" and {more} more" if more > 0 else "")
    return f" (blocks never filled: {ids})"


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
    failed = life.voided.get("failed", 0)
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
