"""How vLLM releases differ while their scheduler runs, and what some releases can't do.

How their objects are built is in `kvledger.audit.conformance.engine_setup`. Releases from 0.9.2 on are told
apart by a method, a parameter or a field that they have, never by their number. A test scenario names the
`CAPABILITIES` that it requires; it is left out, with the reason, where the installed vLLM lacks one.
"""

import dataclasses
import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from unittest import mock


def _class(path: str) -> Any:
    """A class of vLLM by "module:name", or an empty one where this release has none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(f"vllm.{module}"), name, object)
    except ModuleNotFoundError:
        return object


def _scheduler_has(method: str, parameter: str = "") -> bool:
    function = getattr(_class(_SCHEDULER), method, None)
    return function is not None and (not parameter or parameter in inspect.signature(function).parameters)


def _async_scheduler_knows(name: str) -> bool:
    scheduled = getattr(_class(_ASYNC), "_update_after_schedule", None)
    return scheduled is not None and name in scheduled.__code__.co_names


def _schedule_has(variable: str) -> bool:
    code = _class(_SCHEDULER).schedule.__code__
    return variable in (*code.co_varnames, *code.co_cellvars)


def _has_field(path: str, name: str) -> bool:
    kind = _class(path)
    return dataclasses.is_dataclass(kind) and name in {field.name for field in dataclasses.fields(kind)}


def _may_defer() -> bool:
    lookup: Any = getattr(_class(f"{_BASE}:KVConnectorBase_V1"), "get_num_new_matched_tokens", None)
    returned = str(inspect.signature(lookup).return_annotation) if lookup else ""
    return "None" in returned or "Optional" in returned


def _loads_several_tables() -> bool:
    end_of_load = getattr(_class(_SCHEDULER), "_update_waiting_for_remote_kv", None)
    return end_of_load is not None and "block_ids" not in end_of_load.__code__.co_varnames


def _splitting_groups() -> Any:
    coordinator: Any = _class("v1.core.kv_cache_coordinator:HybridKVCacheCoordinator")
    return coordinator.verify_and_split_kv_cache_groups.__code__


_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_ASYNC = "v1.core.sched.async_scheduler:AsyncScheduler"
_BASE = "distributed.kv_transfer.kv_connector.v1.base"
_ENCODER = "v1.core.encoder_cache_manager"

CAPABILITIES: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "aligned states": (
        "states can't be cached at the ends of blocks",
        lambda: _has_field("config:CacheConfig", "mamba_cache_mode"),
    ),
    "async": ("no AsyncScheduler", lambda: _class(_ASYNC) is not object),
    "async drafts": (
        "no drafts under async scheduling",
        lambda: _async_scheduler_knows("scheduled_spec_decode_tokens"),
    ),
    "chunked groups": (
        "no local attention in chunks",
        lambda: _class("v1.kv_cache_interface:ChunkedLocalAttentionSpec") is not object,
    ),
    "deferred lookup": ("a connector can't defer a lookup", _may_defer),
    "dropped output": (
        "output in flight is always delivered",
        lambda: _scheduler_has("_preempt_request", "drop_stale_output"),
    ),
    "encoder inputs": (
        "no features of multimodal inputs",
        lambda: _class("multimodal.inputs:MultiModalFeatureSpec") is not object,
    ),
    "encoder cache": (
        "no encoder cache that requests share",
        lambda: hasattr(_class(f"{_ENCODER}:EncoderCacheManager"), "check_and_update_cache"),
    ),
    "encoder-decoder cache": (
        "no cache manager for encoder-decoder models",
        lambda: _class(f"{_ENCODER}:EncoderDecoderCacheManager") is not object,
    ),
    "failed load": ("a load can't fail", lambda: _scheduler_has("_handle_invalid_blocks")),
    "failed load as a whole": (
        "a failed load must name its blocks",
        lambda: _has_field("v1.outputs:KVConnectorOutput", "failed_recving"),
    ),
    "failure policy": (
        "no choice of what a failed load does",
        lambda: _has_field("config:KVTransferConfig", "kv_load_failure_policy"),
    ),
    "hybrid connector": (
        "a connector can't have a hybrid pool",
        lambda: _class(f"{_BASE}:SupportsHMA") is not object,
    ),
    "hybrid load": (
        "an asynchronous load can't fill a hybrid pool",
        _loads_several_tables,
    ),
    "replayed window": (
        "no bounded replay of sliding windows",
        lambda: _has_field("v1.kv_cache_interface:SlidingWindowMLASpec", "bounded_replay"),
    ),
    "reset under running requests": (
        "the prefix cache can't be reset under running requests",
        lambda: _scheduler_has("reset_prefix_cache", "reset_running_requests"),
    ),
    "several kinds of windows": (
        "beside full attention all groups are of one kind",
        lambda: "attention_groups" in _splitting_groups().co_names,
    ),
    "session": ("no streaming sessions", lambda: _scheduler_has("_update_request_as_session")),
    "withdrawn step": (
        "a request that is preempted in its step is not taken out of the step",
        lambda: _schedule_has("preempted_encoder_inputs"),
    ),
    "states": (
        "no groups of states with several shapes",
        lambda: _has_field("v1.kv_cache_interface:MambaSpec", "dtypes"),
    ),
}
"""By name: the reason to leave a scenario out, and whether the installed vLLM has the capability."""


def lacking(names: Iterable[str]) -> list[str]:
    """Why the installed vLLM lacks any of `names`; empty if it has all."""
    return [CAPABILITIES[name][0] for name in names if not _has(name)]


@functools.cache
def _has(name: str) -> bool:
    return CAPABILITIES[name][1]()


def output_maker() -> Callable[..., Any]:
    """A function that makes ModelRunnerOutput, with empty values for required fields that it is not given."""
    from vllm.v1.outputs import ModelRunnerOutput

    nothing: dict[str, Any] = {
        "logprobs": None,
        "pooler_output": [],
        "prompt_logprobs_dict": {},
        "sampled_token_ids": [],
        "spec_token_ids": None,
    }
    parameters = inspect.signature(ModelRunnerOutput).parameters.values()
    required = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    left_out = {name: value for name, value in nothing.items() if name in required}
    return functools.partial(ModelRunnerOutput, **left_out)


def report_transfers(answer: Any, **reported: set[Any]) -> None:
    """Put what the connector's worker side reports into a step's output; 0.9 has two fields for it."""
    fields = {name: values for name, values in reported.items() if values}
    if hasattr(answer, "kv_connector_output"):
        from vllm.v1.outputs import KVConnectorOutput

        answer.kv_connector_output = KVConnectorOutput(**fields)
        return
    for name, values in fields.items():
        assert hasattr(answer, name), f"this release has no field {name}"
        setattr(answer, name, values)


class _Drafts(NamedTuple):
    req_ids: list[str]
    draft_token_ids: list[list[int]]


def drafts_class() -> Any:
    """DraftTokenIds; 0.9 has none."""
    kind = _class("v1.outputs:DraftTokenIds")
    return _Drafts if kind is object else kind


def take_output(scheduler: Any, step: Any, answer: Any, drafts: Any) -> Any:
    """Deliver a step's output, then its drafts, as the engine does; 0.9 takes both together."""
    if isinstance(drafts, _Drafts):
        answer.spec_token_ids = drafts.draft_token_ids
    outputs = scheduler.update_from_output(step, answer)
    if drafts is not None and not isinstance(drafts, _Drafts):
        scheduler.update_draft_token_ids(drafts)
    return outputs


def resumed(scheduled: Any) -> Iterable[str]:
    """The requests that a step resumes after a preemption."""
    cached = scheduled.scheduled_cached_reqs
    if hasattr(cached, "resumed_req_ids"):
        return list(cached.resumed_req_ids)
    pairs = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
    return [name for name, from_preemption in pairs if from_preemption]


def preempt(scheduler: Any, request: Any, drop: bool | None) -> Any:
    """Preempt a running request as `schedule()` does when blocks run out.

    Returns the step that this took, whose output must still be delivered; None if it took no step.
    """
    if drop is None:
        drop = getattr(scheduler, "requires_kv_delivery", False)
    assert not drop or _has("dropped output"), "this release delivers all output"
    scheduler.running.remove(request)
    if not hasattr(scheduler, "_preempt_request"):
        return _preempt_in_step(scheduler, request)
    how = {"drop_stale_output": True} if drop else {}
    scheduler._preempt_request(request, time.monotonic(), **how)
    # The next step may resume the request; the runner must then see it as resumed.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return None


def _preempt_in_step(scheduler: Any, request: Any) -> Any:
    """Up to 0.10 only a step preempts, and only the last running request: give no blocks until it is gone."""
    scheduler.running.append(request)
    manager = scheduler.kv_cache_manager
    allocate_slots = manager.allocate_slots

    def allocate(*args: Any, **kwargs: Any) -> Any:
        return None if request in scheduler.running else allocate_slots(*args, **kwargs)

    with mock.patch.object(manager, "allocate_slots", allocate):
        step = scheduler.schedule()
    assert request.status.name == "PREEMPTED", "another request was preempted"
    return step
