"""One v0 sequence under observation, and what kvledger reads from a v0 scheduler without changing it.

Private names of vLLM 0.9.1 and 0.9.2 stand here and in ``observer``, nowhere else.
"""

from __future__ import annotations

import functools
from typing import Any

from ... import events as ev
from ...hooks import EngineMismatch
from ..observer import CENSUS_STEPS


class ObservedSequence:
    """A sequence group of one sequence, its last lookup and its current step."""

    __slots__ = (
        "cached",
        "chunk",
        "data",
        "group",
        "looked_up",
        "looked_up_step",
        "outputs",
        "preempted",
        "request_id",
        "running",
        "seq_id",
        "then",
    )

    def __init__(self, group: Any, running: bool) -> None:
        self.group = group
        """vLLM's sequence group."""
        self.request_id: str = group.request_id
        """The request's id."""
        self.seq_id: int = group.first_seq.seq_id
        """vLLM's number of the sequence."""
        self.data = group.first_seq.data
        """vLLM's token counts of the sequence."""
        self.running = running
        """Whether the sequence has been admitted."""
        self.preempted = False
        """Whether the sequence was preempted before."""
        self.looked_up = 0
        """The hit that the engine keeps for the waiting request."""
        self.looked_up_step = -1
        """The step of the lookup that returned it; -1: none."""
        self.cached = -1
        """The tokens that the cache held at the allocation; -1: unknown."""
        self.chunk = 0
        """The scheduled tokens whose output has not arrived."""
        self.then = 0
        """The computed count when the chunk was scheduled."""
        self.outputs = 0
        """The output tokens when the chunk was scheduled."""

    @property
    def moved(self) -> bool:
        """Whether the engine has processed the output of the scheduled chunk."""
        return bool(self.data.get_num_computed_tokens() != self.then)

    @property
    def num_computed_tokens(self) -> int:
        """The engine's computed count plus the scheduled chunk."""
        count = int(self.data.get_num_computed_tokens())
        return count + self.chunk if count == self.then else count


def tracker_of(scheduler: Any) -> Any:
    """``ComputedBlocksTracker``, which keeps the hits of lookups; None without prefix caching."""
    manager = scheduler.block_manager
    return manager._computed_blocks_tracker if getattr(manager, "enable_caching", False) else None


def remembered_hit(scheduler: Any, seq_id: int) -> int | None:
    """The hit that the tracker keeps for a sequence and would return without a lookup; None: none."""
    tracker = tracker_of(scheduler)
    return None if tracker is None else tracker._seq_id_to_num_tokens_computed.get(seq_id)


def cached_now(scheduler: Any, seq_id: int) -> int:
    """Tokens of a sequence that the cache holds now; -1 without a cache or before the first lookup."""
    tracker = tracker_of(scheduler)
    hashes = None if tracker is None else tracker._seq_id_to_blocks_hashes.get(seq_id)
    if tracker is None or hashes is None:
        return -1
    return len(tracker._allocator.find_cached_blocks_prefix(hashes)) * int(tracker._block_size)


def is_accounted(group: Any) -> bool:
    """Whether kvledger keeps an account of this group: one sequence, no encoder."""
    return len(group.seqs) == 1 and group.encoder_seq is None


_TRACKED = ("_seq_id_to_num_tokens_computed", "_seq_id_to_blocks_hashes", "_allocator", "_block_size")


def refuse_unsupported(scheduler: Any) -> None:
    """Raise EngineMismatch for a tracker without the expected attributes, and for several tokens a step."""
    config, tracker = scheduler.scheduler_config, tracker_of(scheduler)
    missing = [name for name in _TRACKED if tracker is not None and not hasattr(tracker, name)]
    if missing:
        raise EngineMismatch(f"ComputedBlocksTracker has no {', '.join(missing)}")
    if config.num_scheduler_steps > 1 or config.num_lookahead_slots:
        raise EngineMismatch("several tokens a step of a v0 scheduler are not accounted")


@functools.cache
def reason_of(status: Any) -> str:
    """``length`` for ``SequenceStatus.FINISHED_LENGTH_CAPPED``."""
    return str(status.name).removeprefix("FINISHED_").removesuffix("_CAPPED").lower()


def configuration_of(scheduler: Any) -> dict[str, ev.Setting]:
    """Plain settings that the figures depend on; no paths, no prompts, no addresses."""
    config, cache = scheduler.scheduler_config, scheduler.cache_config
    return {
        "scheduler": type(scheduler).__name__,
        "asynchronous": bool(scheduler.use_async_output_proc),
        "policy": str(config.policy),
        "block_size": int(cache.block_size),
        "blocks": int(cache.num_gpu_blocks or 0),
        "groups": 1,
        "max_running": int(config.max_num_seqs),
        "max_batched_tokens": int(config.max_num_batched_tokens),
        "max_model_len": int(config.max_model_len),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "chunked_prefill": bool(config.chunked_prefill_enabled),
        "preemption_mode": config.preemption_mode,
        "drafts": 0,
        "connector": None,
        "plan": "opaque",
        "load_failure_policy": None,
        "figures": "none",
        "census_steps": CENSUS_STEPS,
    }
