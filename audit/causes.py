"""Every cause that kvledger names, and its plain words for output.

A cause says why KV was lost, why external tokens failed or were cancelled, why a prompt token missed the
prefix cache, or why two figures differ. The constants are wire names: journals, metrics, tables and JSON
use them, so they never change. The tables hold the words that a person reads. Code that finds a cause or
prints it belongs elsewhere.
"""

from __future__ import annotations

# --- why KV was lost ----------------------------------------------------------------------------

BLOCKS = "blocks"
RESET = "reset"
PRIORITY = "priority"
PAUSE = "pause"
LOAD_FAILED = "load_failed"
FULL_HIT = "full_hit"
REPLAY = "replay"
SESSION = "session"
PAST_STOP = "past_stop"
RELEASED = "released"
NEGATIVE_MATCH = "negative_match"
FINISHED = "finished"
LOST = "lost"
UNKNOWN = "unknown"

LOSSES = {
    BLOCKS: "preempted, no free blocks",
    RESET: "prefix cache reset while running",
    PRIORITY: "preempted for a request of higher priority",
    PAUSE: "preempted by a pause of the engine",
    LOAD_FAILED: "load failed",
    FULL_HIT: "full hit, last token recomputed",
    REPLAY: "replay window recomputed",
    SESSION: "session edited",
    PAST_STOP: "computed past the stop",
    RELEASED: "load failed, looked up again",
    NEGATIVE_MATCH: "negative connector match",
    FINISHED: "request ended",
    LOST: "end of the life not seen",
    UNKNOWN: "cause unknown",
}
"""Why a life ended, and why computed tokens were discarded, rolled back or computed again (rework)."""

PREEMPTIONS = (BLOCKS, RESET, PRIORITY, PAUSE)
"""Causes of a preemption. vLLM has no others than the first two; it names a lack of blocks for a priority."""

DISCARDS = (*PREEMPTIONS, LOAD_FAILED, FINISHED)
"""Causes for which the end of a life discards its tokens."""

REWORK = (
    *PREEMPTIONS,
    LOAD_FAILED,
    FULL_HIT,
    REPLAY,
    SESSION,
    PAST_STOP,
    NEGATIVE_MATCH,
    UNKNOWN,
)
"""Causes for which tokens are computed again."""

# --- why external tokens failed or were cancelled -----------------------------------------------

FAILED = "failed"
NOT_PLANNED = "not_planned"
NEVER_LOADED = "never_loaded"
PREEMPTED = "preempted"

EXTERNAL_LOSSES = {
    FAILED: "load failed",
    NOT_PLANNED: "not in the connector metadata",
    NEVER_LOADED: "never reported as loaded",
    PREEMPTED: "preempted before the load",
    FINISHED: "request ended before the load",
    LOST: "end of the life not seen",
}
"""Why external tokens that a connector promised were not loaded."""

TIER_DEVICE = "device"
TIER_HOST = "host"
TIER_P2P = "p2p"
TIER_DISK = "disk"
TIER_UNSPECIFIED = "external_unspecified"
TIER_UNKNOWN = "tier_not_known"

TIERS = {
    TIER_DEVICE: "memory of the accelerator",
    TIER_HOST: "host memory",
    TIER_P2P: "another engine",
    TIER_DISK: "disk",
    TIER_UNSPECIFIED: "the connector does not know the tier",
    TIER_UNKNOWN: "a part of a promise of several tiers, or tiers that do not sum to the promise",
}
"""The tier that external tokens come from: vLLM's names, as the connector reported it at the admission."""

EXTERNAL_LOSS_AT_END = {
    FINISHED: FINISHED,
    LOAD_FAILED: FAILED,
    LOST: LOST,
    **dict.fromkeys(PREEMPTIONS, PREEMPTED),
}
"""Why external tokens are cancelled when a life ends, by the cause of its end."""

# --- where the time to a first output went ---------------------------------------------------------

QUEUED = "queued"
REMOTE_LOAD = "remote_load"
READY = "ready"
PREFILL = "prefill"
PREFILL_AGAIN = "prefill_again"
UNATTRIBUTED = "unattributed"

FIRST_TOKEN = {
    QUEUED: "waited for the first admission",
    REMOTE_LOAD: "waited for asynchronous loads",
    READY: "waited for a step after an asynchronous load had ended",
    PREFILL: "in the first life that ran, until the first output or the life's end",
    PREEMPTED: "waited for the next admission after a preemption",
    LOAD_FAILED: "waited for the next admission after a failed load",
    PREFILL_AGAIN: "in later lives, until the first output or the life's end",
    UNATTRIBUTED: "admitted, but neither a step nor the end of a load was observed",
}
"""What a request did or waited for before its first output. Each microsecond has one cause."""

PREFILL_OWN = "prefill_own"
PREFILL_OTHERS = "prefill_others"

PREFILL_PARTS = {
    PREFILL_OWN: "the request's share of steps, by the tokens that it has in each",
    PREFILL_OTHERS: "the share of other requests, and steps without the request",
}
"""What the cause ``prefill`` consists of. A share by tokens is no measurement."""

QUEUED_NEXT_STEP = "queued_next_step"
QUEUED_BUDGET = "queued_budget"
QUEUED_RUNNING_LIMIT = "queued_running_limit"
QUEUED_BLOCKS = "queued_blocks"
QUEUED_PREEMPTION = "queued_preemption"
QUEUED_PAUSED = "queued_paused"
QUEUED_UNKNOWN = "queued_unknown"

QUEUE = {
    QUEUED_NEXT_STEP: "waited for the first step after the arrival or after a pause",
    QUEUED_BUDGET: "left waiting by steps that had spent their token budget",
    QUEUED_RUNNING_LIMIT: "left waiting while as many requests ran as may",
    QUEUED_BLOCKS: "left waiting by steps that were refused blocks for a waiting request",
    QUEUED_PREEMPTION: "left waiting by steps that preempted a request, which admit none",
    QUEUED_PAUSED: "left waiting while the engine was paused",
    QUEUED_UNKNOWN: "left waiting, the cause was not recorded",
}
"""What ended the admissions of the steps that left a request waiting before its first admission."""

DECODE = "decode"
DECODE_PREEMPTED = "decode_preempted"
DECODE_LOAD_FAILED = "decode_load_failed"
DECODE_LOADING = "decode_loading"
DECODE_AGAIN = "decode_again"

OUTPUT_TIME = {
    DECODE: "in a life that has had an output",
    DECODE_PREEMPTED: "waited for the next admission after a preemption, between two outputs",
    DECODE_LOAD_FAILED: "waited for the next admission after a failed load, between two outputs",
    DECODE_LOADING: "admitted again, waited for a load or a step",
    DECODE_AGAIN: "in a later life, from its first step until its first output",
}
"""What a request did or waited for between its first output and its last."""

DECODE_OWN = "decode_own"
DECODE_OTHERS = "decode_others"

DECODE_PARTS = dict(zip((DECODE_OWN, DECODE_OTHERS), PREFILL_PARTS.values(), strict=True))
"""What the cause ``decode`` consists of."""

# --- how much older the weights are that KV was made with -----------------------------------------------

ONE_OLDER = "one_version"
TWO_OLDER = "two_versions"
MORE_OLDER = "more_versions"
AGE_UNKNOWN = "age_not_known"

OLDER = {
    ONE_OLDER: "one version older",
    TWO_OLDER: "two versions older",
    MORE_OLDER: "three or more versions older",
    AGE_UNKNOWN: "how much older is not known",
}
"""How many versions older than the weights of a request the oldest weights are in the chain of its KV."""

# --- how requests end ---------------------------------------------------------------------------

ENGINE_ENDED = "engine_ended"

OUTCOMES = ("stopped", "length", "aborted", "ignored", "error", "repetition", ENGINE_ENDED, UNKNOWN)
"""Why requests end. ``engine_ended``: the engine stopped while the request was open."""

WITH_LAST_OUTPUT = frozenset(("stopped", "length", "length_capped", "repetition"))
"""Outcomes of requests that end with their last output; v1 says ``length_capped``, v0 ``length``."""

# --- why an account is unknown --------------------------------------------------------------------

BEGAN_BEFORE = "it began before the first kept segment"
"""An account that a rotated journal has only the end of. The account is left out of the verdict."""

END_UNSEEN = "its end was not observed"
"""An account that was open when the trace ended, or whose end no event reports."""

# --- why prompt tokens missed the prefix cache --------------------------------------------------

BELOW_BLOCK = "below_block"
NOT_LOADED = "promised_and_void"
CACHE_RESET = "cache_reset"
LAST_TOKEN = "last_token"
REPLAYED = "replayed"
ENDED_FIRST = "ended_first"
EVICTED = "evicted"
NOT_KNOWABLE = "not_knowable"
INVALID_HIT = "invalid_hit"
MAY_NOT_READ = "may_not_read"
BEING_COMPUTED = "being_computed"
GROUPS = "groups"
WINDOW = "window"
WINDOW_EVICTED = "window_evicted"
STATE = "state"
STATE_EVICTED = "state_evicted"
BOUNDARY = "boundary"
NOT_HIT = "not_hit"

EVICTIONS = (EVICTED, WINDOW_EVICTED, STATE_EVICTED)
"""Causes of what was evicted from any KV cache group."""

OF_GROUPS = {
    WINDOW_EVICTED: "evicted from a group of sliding windows, which needs it before the same boundary",
    STATE_EVICTED: "evicted from a group of states, which needs one at the same boundary",
    WINDOW: "not cached in a group of sliding windows, which needs it before the same boundary",
    STATE: "not cached in a group of states, which needs one at the same boundary",
    BOUNDARY: "the blocks of the KV cache groups do not end together behind them",
    GROUPS: "not cached in another KV cache group, which needs it at the same boundary",
}
"""Why what full attention had could not be hit: another group lacked its part."""

SHORT_PROMPT = "short_prompt"
NEVER_SEEN = "never_seen"
NEXT_TOKEN = "next_token"

MISSES = {
    SHORT_PROMPT: "the prompt is shorter than a block, and the cache holds whole blocks only",
    BELOW_BLOCK: "below block size: the cache holds whole blocks only",
    PREEMPTED: "lost to preemption",
    LOAD_FAILED: "the load failed",
    NOT_LOADED: "promised by the connector but never loaded",
    CACHE_RESET: "the cache was reset",
    LAST_TOKEN: "full hit, but the last token must be computed",
    REPLAYED: "in a replay window",
    INVALID_HIT: "hit in the cache, but without valid KV",
    ENDED_FIRST: "the request ended before",
    MAY_NOT_READ: "the request may not read the cache",
    EVICTED: "evicted",
    BEING_COMPUTED: "being computed for another request",
    **OF_GROUPS,
    NOT_HIT: "cached, but not hit",
    NEVER_SEEN: "never seen before",
    NEXT_TOKEN: "never seen before, or only with another next token, which the hash covers",
    NOT_KNOWABLE: "never seen before, or not knowable",
}
"""Why prompt tokens missed the prefix cache. Proving what became of a block takes the events of level
``blocks``."""

SAMPLED_MISSES = {
    NEVER_SEEN: "never seen before",
    EVICTED: "evicted",
    CACHE_RESET: "the cache was reset",
    BEING_COMPUTED: "being computed for another request",
}
"""What became before of the contents that a prompt missed, in the order in which events have them."""

DIVERGED = "diverged"
ANSWER = "answer"
ADAPTER = "adapter"
SALT = "salt"
DROPPED = "dropped"
TIER = "tier"
OTHER_ENGINE = "other_engine"
NEW_WEIGHTS = "new_weights"

PARTED = (DIVERGED, ANSWER, ADAPTER, SALT)
"""Causes of lost tokens of a turn that differ from those of the turn before, from one block on."""

TURN_LOSSES = {
    DIVERGED: "the prompt differs from that of the turn before",
    ANSWER: "differs in or after the answer of the turn before",
    ADAPTER: "another LoRA adapter than the turn before",
    SALT: "another cache salt than the turn before",
    EVICTED: "evicted since the turn before",
    TIER: "evicted, and the connector did not have them either",
    CACHE_RESET: "the cache was reset",
    NEW_WEIGHTS: "the cache was reset for new weights",
    DROPPED: "taken out of the cache by the engine",
    BEING_COMPUTED: "being computed for another request",
    **OF_GROUPS,
    NOT_HIT: "cached, but not hit",
    OTHER_ENGINE: "the turn before ran on another engine",
    BELOW_BLOCK: "below block size: the cache holds whole blocks only",
    UNKNOWN: "not known: the request ended before, or events are missing",
}
"""Why a turn of a session did not hit what the turn before left."""

# --- why figures differ -------------------------------------------------------------------------

UNEXPLAINED = "unexplained"

DIFFERENCES = {
    "resumed_with_hits": "preempted in prefill, resumed with hits",
    "earlier_admission": "from an earlier admission that never ran",
    LOAD_FAILED: "the load failed, the tokens were computed",
    INVALID_HIT: "local hits without valid KV",
    "load_failed_below": "hits invalidated by a failed load",
    NEVER_LOADED: "promised but never loaded",
    "preempted_before_load": "preempted before the load was done",
    "ended_early": "ended before any output",
    "never_ran": "ended before it ran",
    "unsettled": "still running, not settled",
    "session_chunk": "later chunk of a session, never planned",
    NEGATIVE_MATCH: "the engine used a negative match",
    "beyond_prompt": "promised beyond the prompt",
    "not_reported": "ended before any output, never reported",
    "not_reported_yet": "still running, not reported yet",
    "last_admission": "reported from a later admission",
    "mixed_instants": "reported from two admissions",
    "refused": "rejected by the engine's counter",
    "unknown_here": "requests whose account is unknown",
    "resumed": "resumed after a preemption, not counted",
    "failed_attempts": "lookups that led to no admission",
    "lookup_counted": "lookups that the engine counted differently",
    "tiers_do_not_sum": "the connector's tiers did not sum to its promise",
    "dropped": "dropped by the front end after the client left",
    "untold": "requests without output since",
    "window": "within the range of the figures around the scrape",
    UNEXPLAINED: "unexplained",
}
"""Why settled, planned, reported and counted figures differ."""


def loss(cause: str) -> str:
    """Words for a cause of lost KV; the cause itself where a newer engine names another."""
    return LOSSES.get(cause, cause.replace("_", " "))


def external_loss(cause: str) -> str:
    """Words for a cause of failed or cancelled external tokens."""
    return EXTERNAL_LOSSES.get(cause, cause.replace("_", " "))
