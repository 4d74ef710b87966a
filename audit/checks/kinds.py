"""The kinds of invariants: what each examines, what a violation of it means, and what stops the harm now.

A family of invariants is of one kind. What an invariant itself declares comes first, so this module has only
what the invariants of a family share. Verdicts, reports and alerts take their words from here.
"""

from __future__ import annotations

from typing import NamedTuple

RESET_CACHE = (
    "Reset the prefix cache (POST /reset_prefix_cache, or LLM.reset_prefix_cache()): no request hits these "
    "blocks any more."
)
EVICT_BLOCKS = (
    "Evict these blocks (BlockPool.evict_blocks), or reset the prefix cache (POST /reset_prefix_cache): no "
    "request hits them any more."
)
REMOVE_ENGINE = "Remove this engine from the router, let its requests end, and restart it."
UPDATE_AGAIN = (
    "Load all weights again on all workers, and then reset the prefix cache: the KV since is of no model."
)
CLEAR_STORE = (
    "Stop loading from the connector's store and clear it; then reset the prefix cache, which holds what was "
    "loaded."
)
RESET_INDEX = (
    "Reset the prefix cache (POST /reset_prefix_cache): the engine publishes that all blocks are cleared, "
    "and routers begin their index again."
)
RESET_AFTER_CHANGE = (
    "Reset the prefix cache after each change of weights (POST /reset_prefix_cache, or "
    "LLM.reset_prefix_cache()) and look at what it returns; clear the store of a connector too."
)
NOTHING = ""
"""No KV is wrong: only a figure is."""


class Kind(NamedTuple):
    """One kind of invariants.

    ``examines``: what it is called in a verdict. ``level``: the lowest level of observation at which it is
    examined. ``alert``: the name of its Prometheus alert; ``wrong`` and ``means`` are its words.
    ``stop_now``: what stops the harm, for invariants that do not declare it.
    """

    examines: str
    level: str
    alert: str
    wrong: str
    means: str
    stop_now: str


COUNTS = Kind(
    "counts",
    "tokens",
    "KvledgerCountsWrong",
    "counts tokens wrongly",
    "The engine's accounting is wrong: metrics, usage and bills that are made of this figure are wrong too.",
    NOTHING,
)
PROGRESS = Kind(
    "progress",
    "tokens",
    "KvledgerNoProgress",
    "leaves requests without progress",
    "Requests that could run do not get on: their clients wait for nothing.",
    REMOVE_ENGINE,
)
LOADS = Kind(
    "loads",
    "tokens",
    "KvledgerLoadsWrong",
    "and its KV connector disagree on KV",
    "The engine and its connector disagree on which tokens were loaded or saved: requests may read KV that "
    "was never loaded, or wait for it.",
    REMOVE_ENGINE,
)
OWNERSHIP = Kind(
    "ownership",
    "blocks",
    "KvledgerBlocksWrong",
    "breaks the ownership of KV-cache blocks",
    "A block of the KV cache is not what its holders take it for: requests may read the KV of others, so "
    "answers may be wrong.",
    REMOVE_ENGINE,
)
CONTENTS = Kind(
    "block contents",
    "content",
    "KvledgerContentsWrong",
    "holds KV that is not what was computed",
    "The bytes of a block are not those that were computed or stored for its tokens: answers of requests "
    "that read it may be wrong.",
    EVICT_BLOCKS,
)
WEIGHTS = Kind(
    "weights of KV",
    "blocks",
    "KvledgerWeightsStale",
    "reads KV of older weights",
    "Requests read KV that was computed before the weights changed: answers and log-probabilities are those "
    "of no model, and a trainer that learns from them drifts.",
    RESET_AFTER_CHANGE,
)
EVENTS = Kind(
    "KV events",
    "blocks",
    "KvledgerEventsWrong",
    "publishes KV events that its cache contradicts",
    "A router that keeps an index from this stream promises blocks that are gone, or does not know blocks "
    "that are cached. Answers are right; requests may go to the wrong engine.",
    RESET_INDEX,
)
ENCODER = Kind(
    "encoder cache",
    "tokens",
    "KvledgerEncoderCacheWrong",
    "loses track of its encoder cache",
    "Outputs of the encoder are computed again, or not found by a step that reads them, which stops the "
    "engine; or more requests are admitted than the cache can hold.",
    "Reset the encoder cache (LLM.reset_encoder_cache(), or POST /reset_encoder_cache) while no request "
    "runs.",
)

FAMILIES: dict[str, Kind] = {
    "tokens": COUNTS,
    "requests": PROGRESS,
    "blocks": OWNERSHIP,
    "connector": LOADS,
    "metrics": COUNTS,
    "content": CONTENTS,
    "weights": WEIGHTS,
    "events": EVENTS,
    "encoder": ENCODER,
}
"""The families of invariants, in the order of the page, and the kind of each."""

KINDS = tuple(dict.fromkeys(FAMILIES.values()))
"""Every kind, in the order in which verdicts name them."""
