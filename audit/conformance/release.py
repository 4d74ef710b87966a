"""What releases do differently while a scheduler runs, and what some of them can't do at all.

How its objects are built is in `kvledger.audit.conformance.host`. Releases from 0.9.2 on are told
apart by what they have (a method, a parameter, a field), never by their number. A scenario names what
it needs of `CAPABILITIES` and is left out, with the reason, where the host lacks it.
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
    found = getattr(_class("v1.core.sched.scheduler:Scheduler"), method, None)
    return found is not None and (not parameter or parameter in inspect.signature(found).parameters)


def _async_scheduler_knows(name: str) -> bool:
    scheduled = getattr(_class(_ASYNC), "_update_after_schedule", None)
    return scheduled is not None and name in scheduled.__code__.co_names


def _has_field(path: str, name: str) -> bool:
    found = _class(path)
    return dataclasses.is_dataclass(found) and name in {field.name for field in dataclasses.fields(found)}


def _may_defer() -> bool:
    asked: Any = getattr(_class(f"{_BASE}:KVConnectorBase_V1"), "get_num_new_matched_tokens", None)
    said = str(inspect.signature(asked).return_annotation) if asked else ""
    return "None" in said or "Optional" in said


_ASYNC = "v1.core.sched.async_scheduler:AsyncScheduler"
_BASE = "distributed.kv_transfer.kv_connector.v1.base"

CAPABILITIES: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "async": ("no AsyncScheduler", lambda: _class(_ASYNC) is not object),
    "async drafts": (
        "no drafts under async scheduling",
        lambda: _async_scheduler_knows("scheduled_spec_decode_tokens"),
    ),
    "deferred look-up": ("a connector can't ask for time", _may_defer),
    "dropped output": (
        "output in flight is always delivered",
        lambda: _scheduler_has("_preempt_request", "drop_stale_output"),
    ),
    "failed load": ("a load can't fail", lambda: _scheduler_has("_handle_invalid_blocks")),
    "failed load as a whole": (
        "a load can't fail without naming its blocks",
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
    "reset under running requests": (
        "the prefix cache can't be reset under running requests",
        lambda: _scheduler_has("reset_prefix_cache", "reset_running_requests"),
    ),
    "session": ("no streaming sessions", lambda: _scheduler_has("_update_request_as_session")),
}
"""By name: the words for its absence, and whether this host has it."""


def lacking(names: Iterable[str]) -> list[str]:
    """Why this host can't do all of `names`; empty if it can."""
    return [CAPABILITIES[name][0] for name in names if not _has(name)]


@functools.cache
def _has(name: str) -> bool:
    return CAPABILITIES[name][1]()


def output_maker() -> Callable[..., Any]:
    """ModelRunnerOutput; what a release insists on and the runner leaves out says nothing."""
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


def report_transfers(answer: Any, **said: set[Any]) -> None:
    """Put into a step's output what the connector's worker side says; 0.9 has two fields for it."""
    spoken = {name: values for name, values in said.items() if values}
    if hasattr(answer, "kv_connector_output"):
        from vllm.v1.outputs import KVConnectorOutput

        answer.kv_connector_output = KVConnectorOutput(**spoken)
        return
    for name, values in spoken.items():
        assert hasattr(answer, name), f"this release can't be told of {name}"
        setattr(answer, name, values)


class _Drafts(NamedTuple):
    req_ids: list[str]
    draft_token_ids: list[list[int]]


def drafts_class() -> Any:
    """DraftTokenIds; 0.9 has none."""
    found = _class("v1.outputs:DraftTokenIds")
    return _Drafts if found is object else found


def take_output(scheduler: Any, step: Any, answer: Any, drafts: Any) -> Any:
    """End a step as the engine does: its output, then its drafts, which 0.9 takes with the output."""
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
    """Preempt a running request as `schedule()` would for want of blocks.

    Returns the step that this took, which is still to be answered, or None where it took none.
    """
    if drop is None:
        drop = getattr(scheduler, "requires_kv_delivery", False)
    assert not drop or _has("dropped output"), "this release delivers all output"
    scheduler.running.remove(request)
    if not hasattr(scheduler, "_preempt_request"):
        return _preempt_in_step(scheduler, request)
    how = {"drop_stale_output": True} if drop else {}
    scheduler._preempt_request(request, time.monotonic(), **how)
    # Between two steps it may run again in the next, where the runner must take it for new.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return None


def _preempt_in_step(scheduler: Any, request: Any) -> Any:
    """Up to 0.10 only a step preempts, and the last that runs: it finds no block till that is gone."""
    scheduler.running.append(request)
    manager = scheduler.kv_cache_manager
    allocate_slots = manager.allocate_slots

    def allocate(*args: Any, **kwargs: Any) -> Any:
        return None if request in scheduler.running else allocate_slots(*args, **kwargs)

    with mock.patch.object(manager, "allocate_slots", allocate):
        step = scheduler.schedule()
    assert request.status.name == "PREEMPTED", "another request was preempted"
    return step
