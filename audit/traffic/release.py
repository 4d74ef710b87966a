"""How vLLM releases differ while their scheduler runs, and what some releases can't do.

How their objects are built is in `kvledger.audit.traffic.engine_setup`. Releases from 0.17 on are told
apart by a method, a parameter or a field that they have, never by their number. A test scenario names the
`CAPABILITIES` that it requires; it is left out, with the reason, where the installed vLLM lacks one.
"""

import dataclasses
import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any


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


def _has_field(path: str, name: str) -> bool:
    kind = _class(path)
    return dataclasses.is_dataclass(kind) and name in {field.name for field in dataclasses.fields(kind)}


def _loads_several_tables() -> bool:
    end_of_load = getattr(_class(_SCHEDULER), "_update_waiting_for_remote_kv", None)
    return end_of_load is not None and "block_ids" not in end_of_load.__code__.co_varnames


def _drops_session_hashes() -> bool:
    extends = getattr(_class(_SCHEDULER), "_update_request_as_session", None)
    return extends is not None and "block_hashes" in extends.__code__.co_names


_SCHEDULER = "v1.core.sched.scheduler:Scheduler"
_POOL = "v1.core.block_pool:BlockPool"

CAPABILITIES: Mapping[str, tuple[str, Callable[[], bool]]] = {
    "dropped output": (
        "output in flight is always delivered",
        lambda: _scheduler_has("_preempt_request", "drop_stale_output"),
    ),
    "failed load as a whole": (
        "a failed load must name its blocks",
        lambda: _has_field("v1.outputs:KVConnectorOutput", "failed_recving"),
    ),
    "hybrid load": (
        "an asynchronous load can't fill a hybrid pool",
        _loads_several_tables,
    ),
    "deferred free": (
        "blocks are freed while a step in flight writes them",
        lambda: _scheduler_has("_drain_deferred_frees"),
    ),
    "session hashes": (
        "a session keeps the hash of a block whose token its next chunk replaces",
        _drops_session_hashes,
    ),
    "partial entries": (
        "a prompt that ends within a block leaves no entry for its part",
        lambda: hasattr(_class(_POOL), "cache_partial_block"),
    ),
    "full report": (
        "hits are not announced",
        lambda: hasattr(_class(_POOL), "emit_cached_block_events"),
    ),
    "replayed window": (
        "no bounded replay of sliding windows",
        lambda: _has_field("v1.kv_cache_interface:SlidingWindowMLASpec", "bounded_replay"),
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
    """Put what the connector's worker side reports into a step's output."""
    from vllm.v1.outputs import KVConnectorOutput

    answer.kv_connector_output = KVConnectorOutput(**{n: values for n, values in reported.items() if values})


def take_output(scheduler: Any, step: Any, answer: Any, drafts: Any) -> Any:
    """Deliver a step's output, then its drafts, as the engine does."""
    outputs = scheduler.update_from_output(step, answer)
    if drafts is not None:
        scheduler.update_draft_token_ids(drafts)
    return outputs


def preempt(scheduler: Any, request: Any, drop: bool | None) -> None:
    """Preempt a running request as `schedule()` does when blocks run out."""
    if drop is None:
        drop = getattr(scheduler, "requires_kv_delivery", False)
    assert not drop or _has("dropped output"), "this release delivers all output"
    scheduler.running.remove(request)
    how = {"drop_stale_output": True} if drop else {}
    scheduler._preempt_request(request, time.monotonic(), **how)
    # The next step may resume the request; the runner must then see it as resumed.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
