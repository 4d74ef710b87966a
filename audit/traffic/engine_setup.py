"""Builds vLLM's objects offline: configuration, KV cache layout, scheduler, request.

Here: how each release has its objects built. Not here: how a release is driven
(`kvledger.audit.traffic.engine_setup`). The configuration is a real `VllmConfig` for a model that exists
only as a `config.json` in the temporary directory; no weights, tokenizer or address are looked up.

The platform decides on async scheduling, hybrid pools and diffusion while the configuration is built:
the CPU platform switches async scheduling off, an unknown platform hybrid pools, and diffusion requires
Triton. So these are set afterwards, and the scheduler takes them from the configuration.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .. import temporary

STOP_TOKEN = 2
CONNECTORS = f"{__package__}.connector"
"""The module of the connectors that answer as a script says."""
BlockHasher = Callable[[Any], list[Any]]
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_DRAFTER = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
}


@dataclass(frozen=True)
class EngineSetup:
    """One engine's configuration, as far as its scheduler depends on it."""

    model: str = "model"
    """The folder of its model, which has no weights."""
    revision: str | None = None
    """Of the model."""
    cache_dtype: str = "auto"
    """Of the KV cache."""
    blocks: int = 64
    block_size: int = 16
    max_running: int = 16
    max_batched_tokens: int = 8192
    max_model_len: int = 2048
    asynchronous: bool = False
    drafts: int = 0
    """Speculative tokens per decode step."""
    drafter: Literal["ngram", "eagle"] = "ngram"
    """Eagle also reserves slots ahead and drops the last block of every local hit."""
    connector: str | None = None
    """The name of a connector that vLLM registers, or of a class in ``connector_module``; None for none."""
    connector_module: str | None = None
    """The module of a connector that vLLM does not register."""
    connector_options: tuple[tuple[str, Any], ...] = ()
    kv_role: str = "kv_both"
    """Preempted requests of a consumer keep their output in flight; those of a producer lose it."""
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    prefix_caching: bool = True
    prefix_cache_retention_interval: int | None = None
    """Tokens between the checkpoints of windows and states that stay cached; None: all of them. Real engines
    have 0 since 0.30, with which only those at the end of a prompt stay."""
    chunked_prefill: bool = True
    reserve_full_isl: bool = False
    """Off, unlike in vLLM, because it prevents preemption during prefill."""
    scheduler_options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of vLLM's SchedulerConfig; those that a release does not have are left out."""
    loras: int = 0
    """How many LoRA adapters a step may have; 0: the engine has none."""
    log_stats: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    pooling: bool = False
    groups: tuple[Literal["full", "sliding", "chunked", "cross", "replay", "mamba"], ...] = ("full",)
    """The kinds of KV cache groups. Chunked: local attention in chunks. Replay: the last window of every hit
    is computed again. Mamba: states."""
    group_tokens: tuple[int, ...] = ()
    """Tokens of a block of each group, if they differ; ``block_size`` is the smallest, and divides each."""
    sliding_window: int = 64
    """Also the length of a chunk and of a replayed window."""
    encoder_tokens: int = 0
    """Encoder embeddings that a step may compute and that the encoder's cache holds; 0: a model of text."""
    encoder_decoder: bool = False
    """The model is an encoder-decoder: an output serves one request, and the decoder attends to it."""
    scheduler_class: str = ""
    """``MODULE:CLASS`` of a scheduler that is not vLLM's own."""
    canvas: int = 0
    """Tokens of a diffusion model's canvas. A step schedules them as drafts and accepts all or none."""


def setup_of(settings: Mapping[str, Any], kind: str = "", module: str = CONNECTORS) -> EngineSetup:
    """The setup with these settings, which may come from JSON.

    ``kind``: its connector is ``<kind>Connector`` of ``module``, or ``<kind>HybridConnector``, which takes
    more than one KV cache group.
    """
    made = dict(settings)
    if kind:
        several = len(made.get("groups", ("full",))) > 1
        made |= {"connector": f"{kind}{'Hybrid' * several}Connector", "connector_module": module}
    for name in ("groups", "group_tokens"):
        made[name] = tuple(made.get(name, getattr(EngineSetup, name)))
    made["scheduler_options"] = tuple(map(tuple, made.get("scheduler_options", ())))
    return EngineSetup(**made)


def build_scheduler(setup: EngineSetup) -> Any:
    """A real Scheduler, or AsyncScheduler, with an empty pool."""
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = _vllm_config(setup)
    init_none_hash(_hash_function(config))
    arguments = _accepted(
        Scheduler,  # subclasses take the same arguments as **kwargs
        vllm_config=config,
        kv_cache_config=_kv_cache_config(setup),
        structured_output_manager=StructuredOutputManager(config),
        block_size=math.lcm(*setup.group_tokens) if setup.group_tokens else setup.block_size,
        hash_block_size=setup.block_size,
        include_finished_set=False,
        log_stats=setup.log_stats,
    )
    scheduler = _scheduler_class(setup)(**arguments)
    if setup.encoder_tokens:
        from vllm.v1.core import encoder_cache_manager as managers

        name = "EncoderDecoderCacheManager" if setup.encoder_decoder else "EncoderCacheManager"
        scheduler.max_num_encoder_input_tokens = setup.encoder_tokens
        scheduler.encoder_cache_manager = getattr(managers, name)(cache_size=setup.encoder_tokens)
        scheduler.is_encoder_decoder = setup.encoder_decoder
    return scheduler


def _scheduler_class(setup: EngineSetup) -> Any:
    if setup.scheduler_class:
        module, _, name = setup.scheduler_class.partition(":")
        return getattr(importlib.import_module(module), name)
    if setup.canvas:
        from vllm.v1.core.sched import diffusion_scheduler as diffusion  # since 0.32

        return diffusion.DiffusionAsyncScheduler if setup.asynchronous else diffusion.DiffusionScheduler
    if setup.asynchronous:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def block_hasher(scheduler: Any) -> BlockHasher:
    """The function by which every request hashes its blocks, made as ``EngineCore`` makes it."""
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    config = scheduler.vllm_config
    ahead = getattr(config, "num_hash_lookahead_tokens", 0)  # since 0.33, of some drafters
    arguments = [config.cache_config.block_size, _hash_function(config), *([ahead] if ahead else [])]
    hasher: BlockHasher = get_request_block_hasher(*arguments)
    return hasher


def build_request(
    request_id: str,
    prompt: list[int],
    *,
    hasher: BlockHasher,
    max_tokens: int,
    pooling: bool = False,
    resumable: bool = False,
    priority: int = 0,
    arrival_seconds: float | None = None,
    transfer: Mapping[str, Any] | None = None,
    of_request: Mapping[str, Any] | None = None,
    prompt_logprobs: bool = False,
) -> Any:
    """A real Request. Only the stop token ends it before `max_tokens`.

    `transfer`: its `kv_transfer_params`, passed as a client passes them. `of_request`: further arguments of
    vLLM's Request. With `prompt_logprobs` it may not read a cache.
    """
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        stop_token_ids=[STOP_TOKEN],
        temperature=0.0,
        prompt_logprobs=1 if prompt_logprobs else None,
    )
    if transfer is not None:
        sampling.extra_args = {"kv_transfer_params": dict(transfer)}
    return _call(
        Request,
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=None if pooling else sampling,
        pooling_params=_call(PoolingParams, task="embed") if pooling else None,
        eos_token_id=None,
        arrival_time=arrival_seconds,
        priority=priority,
        block_hasher=hasher,
        resumable=resumable,
        **(of_request or {}),
    )


def _hash_function(config: Any) -> Callable[[Any], Any]:
    from vllm.utils.hashing import get_hash_fn_by_name

    function: Callable[[Any], Any] = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    return function


def _vllm_config(setup: EngineSetup) -> Any:
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    model = _model_config(setup)
    parallel = ParallelConfig()
    scheduler = _call(
        SchedulerConfig,
        max_num_seqs=setup.max_running,
        max_num_batched_tokens=setup.max_batched_tokens,
        max_model_len=setup.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=setup.chunked_prefill,
        policy=setup.policy,
        scheduler_reserve_full_isl=setup.reserve_full_isl,
        async_scheduling=False,
        **dict(setup.scheduler_options),
    )
    cache = _call(
        CacheConfig,
        block_size=setup.block_size,
        cache_dtype=setup.cache_dtype,
        enable_prefix_caching=setup.prefix_caching,
        prefix_cache_retention_interval=setup.prefix_cache_retention_interval,
    )
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        scheduler_config=scheduler,
        cache_config=cache,
        speculative_config=_speculative_config(setup, model, parallel),
        kv_transfer_config=_kv_transfer_config(setup),
        lora_config=_lora_config(setup),
        device_config=DeviceConfig(device="cpu"),
    )
    config.cache_config.num_gpu_blocks = setup.blocks
    if "mamba" in setup.groups:
        config.cache_config.mamba_cache_mode = _state_mode(setup)
    if getattr(config.cache_config, "kv_cache_layout", "") is None:
        # Since 0.30 an engine core asks its workers: one tensor per layer, of [blocks, heads, tokens, ...].
        config.cache_config.kv_cache_layout = "LBHNC"
    if setup.canvas:
        from vllm.config.diffusion import DiffusionConfig

        config.diffusion_config = DiffusionConfig(canvas_length=setup.canvas)
        vars(config.model_config)["is_diffusion"] = True
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.disable_hybrid_kv_cache_manager = len(setup.groups) == 1
    return config


def _model_config(setup: EngineSetup) -> Any:
    from vllm.config import ModelConfig

    directory = _model_directory(setup.model)
    return _call(
        ModelConfig,
        model=directory,
        revision=setup.revision,
        tokenizer=directory,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=setup.max_model_len,
        runner="pooling" if setup.pooling else "generate",
    )


@functools.cache
def _model_directory(name: str) -> str:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    directory = temporary.of_process(f"kvledger-{name}-{os.getuid()}")
    directory.joinpath("config.json").write_text(
        json.dumps(_MODEL | _DRAFTER if name == "drafter" else _MODEL)
    )
    return str(directory)


def _speculative_config(setup: EngineSetup, model: Any, parallel: Any) -> Any:
    if not setup.drafts:
        return None
    from vllm.config import SpeculativeConfig

    how: dict[str, Any] = {"prompt_lookup_max": 3}
    if setup.drafter == "eagle":
        how = {"model": _model_directory("drafter")}
    return SpeculativeConfig(
        method=setup.drafter,
        num_speculative_tokens=setup.drafts,
        target_model_config=model,
        target_parallel_config=parallel,
        **how,
    )


def _lora_config(setup: EngineSetup) -> Any:
    if not setup.loras:
        return None
    from vllm.config.lora import LoRAConfig

    return LoRAConfig(max_loras=setup.loras)


def _kv_transfer_config(setup: EngineSetup) -> Any:
    if setup.connector is None:
        return None
    from vllm.config import KVTransferConfig

    return _call(
        KVTransferConfig,
        kv_connector=setup.connector,
        kv_connector_module_path=setup.connector_module,
        kv_connector_extra_config=dict(setup.connector_options),
        kv_role=setup.kv_role,
        kv_load_failure_policy=setup.load_failure_policy,
    )


_ATTENTION = {
    "full": ("FullAttentionSpec", ""),
    "sliding": ("SlidingWindowSpec", "sliding_window"),
    "chunked": ("ChunkedLocalAttentionSpec", "attention_chunk_size"),
    "cross": ("CrossAttentionSpec", ""),
    "replay": ("SlidingWindowMLASpec", "sliding_window"),
}
"""vLLM's class of each kind of group, and what it calls the length of a window."""


def _kv_cache_config(setup: EngineSetup) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as of

    shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32, "use_mla": False}

    def spec(kind: str, tokens: int) -> Any:
        if kind == "mamba":
            return _call(
                of.MambaSpec,
                block_size=tokens if setup.prefix_caching else setup.max_model_len,
                shapes=((1,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=_state_mode(setup),
                num_speculative_blocks=setup.drafts,
            )
        name, window = _ATTENTION[kind]
        more = {window: setup.sliding_window} if window else {}
        more |= {"bounded_replay": True} if kind == "replay" else {}
        return _call(getattr(of, name), block_size=tokens, **shape, **more)

    sizes = setup.group_tokens or (setup.block_size,) * len(setup.groups)
    groups = [
        of.KVCacheGroupSpec([f"layer.{number}"], spec(kind, tokens))
        for number, (kind, tokens) in enumerate(zip(setup.groups, sizes, strict=True))
    ]
    return _call(
        of.KVCacheConfig,
        num_blocks=setup.blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        prefix_cache_retention_interval=setup.prefix_cache_retention_interval,
    )


def _state_mode(setup: EngineSetup) -> str:
    """How states are cached: since 0.33 a prefix cache allows no other mode."""
    return "align" if setup.prefix_caching else "none"


def _call(function: Callable[..., Any], **arguments: Any) -> Any:
    return function(**_accepted(function, **arguments))


def _accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """The arguments that this release's function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


# --- How vLLM releases differ while their scheduler runs, and what some releases can't do.
#
# How their objects are built is above. Releases from 0.17 on are told apart by a method, a parameter or a
# field that they have, never by their number. A test scenario names the `CAPABILITIES` that it requires; it
# is left out, with the reason, where the installed vLLM lacks one.


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
