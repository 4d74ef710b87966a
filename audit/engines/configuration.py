"""The settings of a v1 engine that its figures depend on, as ``EngineStarted`` carries them."""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import Any

from .. import events as ev
from ..text import cut_id, cut_priority
from .connectors.worker_side import transfer_of
from .pool.requirements import IsolationClasses

SCHEDULER = (
    "scheduler_reserve_full_isl",
    "watermark",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "max_num_scheduled_tokens",
    "max_num_active_seqs",
    "enable_chunked_prefill",
    "disable_chunked_mm_input",
    "prefill_schedule_interval",
)
"""Further settings of vLLM's SchedulerConfig that a scheduler reads, under their names there. A release
records those that it has."""


def configuration_of(
    scheduler: Any, *, figures: str, metadata_read: bool, census_steps: int
) -> dict[str, ev.Setting]:
    """Plain settings; no paths, no prompts, no addresses."""
    config = scheduler.vllm_config
    connector = scheduler.connector
    settings: dict[str, ev.Setting] = {
        "model": _model_name(config.model_config),
        "scheduler": type(scheduler).__name__,
        "asynchronous": bool(getattr(config.scheduler_config, "async_scheduling", False)),
        "policy": str(config.scheduler_config.policy),
        "block_size": int(config.cache_config.block_size),
        "blocks": int(config.cache_config.num_gpu_blocks or 0),
        "groups": len(scheduler.kv_cache_config.kv_cache_groups),
        "sliding_window": _sliding_window(scheduler.kv_cache_config),
        "max_running": int(scheduler.max_num_running_reqs),
        "max_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
        "max_model_len": int(scheduler.max_model_len),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "loras": int(getattr(getattr(scheduler, "lora_config", None), "max_loras", 0)),
        "drafts": int(scheduler.num_spec_tokens),
        "sampled_beside_drafts": int(getattr(scheduler, "num_sampled_tokens_per_step", 1)),
        "connector": type(connector).__name__ if connector is not None else None,
        "plan": "read" if metadata_read else "opaque",
        "load_failure_policy": _failure_policy(config.kv_transfer_config),
        "deferred_loads": bool(getattr(scheduler, "defer_async_loads", False)),
        "transfer": transfer_of(config),
        "log_stats": bool(scheduler.log_stats),
        "figures": figures,
        "model_runner": "v2" if getattr(scheduler, "use_v2_model_runner", False) else "v1",
        "data_parallel_rank": int(getattr(config.parallel_config, "data_parallel_rank", 0)),
        "engine_index": engine_index(config.parallel_config),
        "census_steps": census_steps,
        "queue_causes": True,
        "block_bytes": _block_bytes(scheduler.kv_cache_config),
        "workers": workers(scheduler),
        "engine_key": engine_key(config),
        "output_labels": _labels_outputs(),
        "kv_role": _kv_role(config.kv_transfer_config),
    }
    replay = int(getattr(scheduler, "prefix_replay_tokens", 0))
    settings |= {"replay_tokens": replay} if replay else {}
    ahead = int(getattr(config, "num_hash_lookahead_tokens", 0) or 0)  # since 0.33, of some drafters
    settings |= {"hash_lookahead_tokens": ahead} if ahead else {}
    return settings | _scheduler_settings(config) | kv_events(scheduler)


def workers(scheduler: Any) -> int:
    """How many workers the scheduler's engine has."""
    config = getattr(scheduler, "vllm_config", None)
    return int(getattr(getattr(config, "parallel_config", None), "world_size", 1))


def _scheduler_settings(config: Any) -> dict[str, ev.Setting]:
    """The settings of :data:`SCHEDULER`, how drafts are made, and the stages of the pipeline."""
    scheduler, absent = config.scheduler_config, object()
    read = {name: getattr(scheduler, name, absent) for name in SCHEDULER}
    settings: dict[str, ev.Setting] = {
        name: value
        for name, value in read.items()
        if value is None or isinstance(value, bool | int | float | str)
    }
    settings["pipeline_stages"] = int(getattr(config.parallel_config, "pipeline_parallel_size", 1))
    settings["prefix_cache_retention_interval"] = getattr(
        config.cache_config, "prefix_cache_retention_interval", None
    )
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    return settings | ({} if method is None else {"drafter": str(method)})


def kv_events(scheduler: Any) -> dict[str, ev.Setting]:
    """The port of the engine's stream of KV events, by which a recording of the stream is found.

    Nothing if the engine publishes none; port 0 if the address has no port.
    """
    endpoint = getattr(getattr(scheduler, "kv_event_publisher", None), "_endpoint", None)
    if not isinstance(endpoint, str):
        return {}
    port = endpoint.rpartition(":")[2]
    return {"kv_events_port": int(port) if port.isdecimal() else 0}


def _labels_outputs() -> bool:
    """Whether the engine says of each output token what its weights are called."""
    outputs = getattr(sys.modules.get("vllm.v1.engine"), "EngineCoreOutputs", None)
    return "weight_version" in getattr(outputs, "__struct_fields__", ())


def _sliding_window(kv_cache_config: Any) -> int:
    """The tokens that the first KV cache group with a sliding window attends to; 0 without one."""
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    windows = (getattr(spec, "sliding_window", None) for spec in specs)
    return next((window for window in windows if isinstance(window, int)), 0)


def _block_bytes(kv_cache_config: Any) -> int:
    """Bytes that one block takes on one worker; 0 if not known, or if blocks of several groups differ."""
    groups = kv_cache_config.kv_cache_groups
    size = getattr(groups[0].kv_cache_spec, "page_size_bytes", 0) if len(groups) == 1 else 0
    return int(size) * len(groups[0].layer_names) if isinstance(size, int) else 0


def _model_name(config: Any) -> str:
    """The served name; only the last part of a local path."""
    name = getattr(config, "served_model_name", "") or ""
    name = str(name[0] if isinstance(name, list) else name)
    return name.rstrip("/").rsplit("/", 1)[-1] if name.startswith(("/", ".")) else name


def engine_index(parallel_config: Any) -> int:
    """The number by which the engine's own metrics name it; all ranks of a dense model have rank 0."""
    rank = getattr(parallel_config, "data_parallel_rank", 0)
    return int(getattr(parallel_config, "data_parallel_index", rank))


def engine_key(config: Any) -> str | None:
    """What an engine's scheduler and workers share with no other engine of the folder; None if unknown."""
    instance = getattr(config, "instance_id", None)
    return f"{instance}-{engine_index(config.parallel_config)}" if instance else None


def _kv_role(transfer_config: Any) -> str | None:
    """``kv_producer`` of a prefill engine, ``kv_consumer`` of a decode engine, or ``kv_both``."""
    role = getattr(transfer_config, "kv_role", None)
    return None if role is None else str(role)


def _failure_policy(transfer_config: Any) -> str | None:
    """What vLLM does with a request whose load failed."""
    if transfer_config is None:
        return None
    return str(transfer_config.kv_load_failure_policy)


# --- The labels of a request: LoRA adapter, priority, class of the cache salt, group and session.
#
# The operator chooses groups by ``KVLEDGER_GROUP``, a regular expression over request ids. The session is
# vLLM's ``session_id`` (since 0.32), else what ``KVLEDGER_SESSION`` finds in the request id. Labels are
# read once for a request, when it arrives, and for each living request at the beginning of a segment.

logger = logging.getLogger("kvledger")

GROUP, SESSION = "KVLEDGER_GROUP", "KVLEDGER_SESSION"

MOST_GROUPS = 64
"""Requests of further groups get the label ``other``."""

OTHER = "other"

CHARACTERS = 64
"""A label is cut to this length."""

SEARCHED = 256
"""The pattern sees so many characters of a request id: a client may choose the id and its length."""


def pattern(variable: str) -> re.Pattern[str] | None:
    """The pattern in an environment variable; None if it is not set, or no regular expression."""
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        logger.warning("kvledger ignores %s, which is no regular expression: %s", variable, error)
        return None


class LabelReader:
    """Reads the labels of vLLM's requests. ``classes`` makes the class of a cache salt."""

    def __init__(
        self,
        classes: IsolationClasses,
        groups: re.Pattern[str] | None = None,
        sessions: re.Pattern[str] | None = None,
    ) -> None:
        self._classes = classes
        self._group_in = groups
        """Finds the group in a request id; None: requests have no group."""
        self._session_in = sessions
        """Finds the session in a request id; None: only vLLM names sessions."""
        self._groups: set[str] = set()

    def of(self, request: Any) -> ev.RequestLabels | None:
        """The labels of a request; None if it has none, or they can't be read. Never raises."""
        try:
            adapter = getattr(request, "lora_request", None)
            salt = getattr(request, "cache_salt", None)
            lora = _cut(str(adapter.lora_name)) if adapter else ""
            group = self._group(request.request_id) if self._group_in is not None else ""
            priority = cut_priority(getattr(request, "priority", 0))
            session = getattr(request, "session_id", None)
            if not session and self._session_in is not None:
                session = _found(self._session_in, request.request_id)
            if not (lora or salt or group or priority or session):
                return None
            salt_class = self._classes.of_salt(salt) if salt else 0
            return ev.RequestLabels(lora, salt_class, group, priority, _encodable(cut_id(session or "")))
        except Exception:  # an observer must never stop the engine; the request's labels are unknown
            return None

    def _group(self, request_id: str) -> str:
        assert self._group_in is not None
        group = _cut(_found(self._group_in, request_id))
        if group and group not in self._groups:
            if len(self._groups) >= MOST_GROUPS:
                return OTHER
            self._groups.add(group)
        return group


def _found(pattern: re.Pattern[str], request_id: str) -> str:
    """What a pattern's first group matches in a request id, else the whole match; "": nothing."""
    match = pattern.search(request_id[:SEARCHED])
    if match is None:
        return ""
    return (match[1] or "") if pattern.groups else match[0]


def _cut(text: str) -> str:
    """The beginning of a text, without what can't be encoded."""
    return _encodable(text[:CHARACTERS])


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()
