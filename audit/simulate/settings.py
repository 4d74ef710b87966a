"""Which settings a simulated scheduler has: those of the journal, and those that the user sets instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..engines.configuration import SCHEDULER
from ..errors import LedgerError
from ..events import Setting
from ..traffic.reader import Traffic

NAMES = {
    "num_gpu_blocks": "blocks",
    "block_size": "block_size",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batched_tokens",
    "max_model_len": "max_model_len",
    "scheduling_policy": "policy",
    "async_scheduling": "asynchronous",
    "enable_prefix_caching": "prefix_caching",
    "max_loras": "loras",
    "prefix_cache_retention_interval": "prefix_cache_retention_interval",
}
"""Settings by vLLM's name: what the journal calls them."""

NEUTRAL: dict[str, Setting] = {
    "watermark": 0.0,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_scheduled_tokens": None,
    "max_num_active_seqs": None,
    "disable_chunked_mm_input": False,
    "prefill_schedule_interval": 1,
}
"""Values with which a setting does nothing: a release without the setting acts as if it had them."""


class Variant(msgspec.Struct, frozen=True):
    """A configuration to simulate: a release ("" for the recorded one), and settings by vLLM's names."""

    release: str = ""
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def name(self) -> str:
        """``max_num_batched_tokens=4096`` or ``0.24.0``; "recorded" without a change."""
        words = [self.release, *(f"{name}={value}" for name, value in self.settings)]
        return " ".join(filter(None, words)) or "recorded"


def parsed(word: str) -> tuple[str, Setting]:
    """A setting from ``NAME=VALUE``. Raises LedgerError."""
    name, equals, text = word.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    if not equals or not text:
        raise LedgerError(f"{word!r} is no setting, such as num_gpu_blocks=20000")
    if name not in NAMES and name not in SCHEDULER:
        raise LedgerError(
            f"{name!r} is no setting that can be simulated; these can: {', '.join([*NAMES, *SCHEDULER])}"
        )
    return name, value(text)


def value(text: str) -> Setting:
    """A number, a truth value, None or a word."""
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered == "none":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def not_recorded(configuration: Mapping[str, Setting], given: Sequence[str]) -> list[str]:
    """Settings that the journal does not have although its release may read them."""
    if "disable_chunked_mm_input" in configuration:  # which every release has
        return []
    return [name for name in SCHEDULER if name not in given and name not in NEUTRAL]


def setup(traffic: Traffic, changes: Mapping[str, Setting]) -> dict[str, Any]:
    """The arguments of EngineSetup for some traffic, with what was set instead of what was recorded.

    Raises LedgerError.
    """
    groups, group_tokens = traffic.groups, traffic.group_tokens
    recorded = dict(traffic.configuration)
    recorded |= {NAMES[name]: given for name, given in changes.items() if name in NAMES}
    options = {name: recorded[name] for name in SCHEDULER if name in recorded}
    options |= {name: given for name, given in changes.items() if name in SCHEDULER}
    arguments: dict[str, Any] = {
        name: recorded[name]
        for name in (*NAMES.values(), "drafts", "load_failure_policy", "kv_role", "drafter")
        if recorded.get(name) is not None
    }
    if arguments.get("drafter") not in ("eagle", "ngram"):
        arguments.pop("drafter", None)
    if recorded.get("connector") is not None:
        arguments["connector"] = "recorded"
    if len(set(group_tokens)) > 1:
        if "block_size" in changes:
            sizes = ", ".join(map(str, group_tokens))
            raise LedgerError(f"block_size can't be set: the KV cache groups have blocks of {sizes} tokens")
        arguments |= {"group_tokens": list(group_tokens), "block_size": min(group_tokens)}
    if groups != ["full"]:
        arguments["groups"] = list(groups)
        arguments["sliding_window"] = recorded.get("sliding_window") or 64
    reserve = options.pop("scheduler_reserve_full_isl", True)
    chunked = options.pop("enable_chunked_prefill", True)
    if options.get("prefill_schedule_interval", 1) == 1:
        options.pop("prefill_schedule_interval", None)
    return arguments | {
        "reserve_full_isl": bool(reserve),
        "chunked_prefill": bool(chunked),
        "pooling": all(request.pooling for request in traffic.requests),
        "scheduler_options": tuple(sorted(options.items())),
        "log_stats": bool(recorded.get("log_stats", True)),
    }
