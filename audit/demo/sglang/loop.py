"""Runs SGLang's event loop on messages that a plan gives it, iteration by iteration.

Scheduler, event loop, model runner (attention by torch), allocator and caches are SGLang's own. Not SGLang's
are the method by which the scheduler receives messages, and those by which it sends outputs: here they lead
to a :class:`Plan`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import stubs  # noqa: F401  before SGLang

# isort: split
import sglang
from sglang.srt.managers import io_struct
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs

# isort: split
import sglang.srt.models.qwen3  # after the scheduler, else the import of 0.5.3 is circular

MOST_ITERATIONS = 3_000
IDLE_ITERATIONS = 20
"""The loop ends when every request has ended and this many iterations had nothing to do."""

DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_total_tokens": 2048,
    "mem_fraction_static": 0.5,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "disable_cuda_graph": True,
    "log_level": "warning",
    "random_seed": 1,
    "disable_overlap_schedule": True,
}
"""Server arguments of a small engine on a CPU."""


class Done(BaseException):
    """Leaves the event loop, which has no end of its own."""


class Told(NamedTuple):
    """What the engine told the client of a request. None: the message has no such figure."""

    finish: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    output_ids: tuple[int, ...] = ()


def make(cls: Any, **values: Any) -> Any:
    """An object of one of SGLang's classes; arguments that this release does not have are left out."""
    is_data = dataclasses.is_dataclass(cls)
    fields = {field.name for field in dataclasses.fields(cls)} if is_data else set(cls.__struct_fields__)
    given = {"http_worker_ipc": None, "rid": None, **values}
    return cls(**{name: value for name, value in given.items() if name in fields})


def request(request_id: str, tokens: Iterable[int], outputs: int, **more: Any) -> Any:
    """A request of these token ids, which computes so many outputs.

    It may stop at an end token that the model never samples: 0.5.23 admits requests that ignore the end token
    only as far as they surely fit, and then nothing is ever retracted.
    """
    cls = io_struct.TokenizedGenerateReqInput
    parameters = SamplingParams(max_new_tokens=outputs, temperature=0.0)
    parameters.normalize(None)
    ids: Any = list(tokens)
    if "array" in str(cls.__annotations__["input_ids"]):
        ids = array("q", ids)
    absent = dict.fromkeys(
        ("input_embeds", "mm_inputs", "image_inputs", "token_type_ids", "token_ids_logprob")
    )
    return make(
        cls,
        **absent,
        rid=request_id,
        input_text="",
        input_ids=ids,
        sampling_params=parameters,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        stream=False,
        **more,
    )


def abort(request_id: str) -> Any:
    """Aborts every request whose id begins with this one."""
    return make(io_struct.AbortReq, rid=request_id, abort_all=False)


def message(name: str, **values: Any) -> Any:
    """Another message of SGLang, by the name of its class."""
    return make(getattr(io_struct, name), **values)


def build(model: str, **arguments: Any) -> Any:
    """A scheduler of this process for the model in a folder."""
    server: Any = make(ServerArgs, **{"model_path": model, **DEFAULTS, **arguments})
    if hasattr(server, "resolve_once"):
        server.resolve_once()
    ports = PortArgs.init_new(server)
    module: Any = scheduler_module
    names = list(inspect.signature(module.Scheduler.__init__).parameters)[1:]
    if "gpu_id" not in names:  # since 0.5.23 a context is published first
        ranks = module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        module.publish(server, role="scheduler", ranks=ranks)
        return module.Scheduler(server, ports)
    publish = getattr(sys.modules["sglang.srt.server_args"], "set_global_server_args_for_scheduler", None)
    if publish is not None:
        publish(server)
    ranks = dict.fromkeys(("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0)
    given = {**ranks, "dp_rank": None}
    return module.Scheduler(server, ports, **{name: given[name] for name in names if name in given})


class Plan:
    """Messages by iteration of the event loop, and what the client was told of each request."""

    def __init__(self, scheduler: Any) -> None:
        self.messages: defaultdict[int, list[Any]] = defaultdict(list)
        """What the scheduler receives, by iteration."""
        self.told: dict[str, Told] = {}
        """What the client was told of each request that ended."""
        self.before_each: list[Callable[[Plan], None]] = []
        """Called before each iteration."""
        self.iteration = 0
        """The iteration that comes next."""
        self.model: str = scheduler.server_args.model_path
        """The folder of the model."""
        self._scheduler = scheduler
        self._expected: set[str] = set()
        self._idle = 0
        receiver = getattr(scheduler, "request_receiver", None)
        if receiver is not None:  # a frozen object with slots
            type(receiver).recv_requests = lambda *_, **__: self._receive()
        else:
            scheduler.recv_requests = lambda *_, **__: self._receive()
        channels = getattr(scheduler, "ipc_channels", scheduler)
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            method = "send_output" if hasattr(sender, "send_output") else "send_pyobj"
            try:
                setattr(sender, method, lambda output, *_: self._take(output))
            except (AttributeError, TypeError):
                setattr(type(sender), method, lambda _, output, *__: self._take(output))

    def run(self) -> None:
        """Run the event loop until every request of the plan has ended."""
        scheduler = self._scheduler
        overlap = "event_loop_overlap" if getattr(scheduler, "enable_overlap", False) else "event_loop_normal"
        with contextlib.suppress(Done):
            (getattr(scheduler, "run_event_loop", None) or getattr(scheduler, overlap))()

    def _receive(self) -> list[Any]:
        for look in list(self.before_each):
            look(self)
        messages = self.messages.pop(self.iteration, [])
        self.iteration += 1
        kind = "TokenizedGenerate"
        self._expected.update(each.rid for each in messages if type(each).__name__.startswith(kind))
        rests = not messages and not self.messages and self._expected <= set(self.told)
        self._idle += rests
        if self._idle > IDLE_ITERATIONS or self.iteration > MOST_ITERATIONS:
            raise Done
        return messages

    def _take(self, output: Any) -> None:
        if type(output).__name__ == "AbortReq":
            self.told.setdefault(output.rid, Told("abort"))
        for place, request_id in enumerate(getattr(output, "rids", None) or ()):
            reason = output.finished_reasons[place]
            if reason is None:
                continue
            ids = (getattr(output, "output_ids", None) or output.decode_ids)[place]
            finish = reason["type"] if isinstance(reason, dict) else str(reason)
            counts = {
                name: int(each[place])
                for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
                if (each := getattr(output, name, None)) is not None
            }
            self.told[request_id] = Told(finish, output_ids=tuple(ids or ()), **counts)


def keep_host_copies_on_cpu(copied: Callable[[Any, Any], object] = lambda *_: None) -> None:
    """Let the host cache work without CUDA: copies between the two pools are made by torch, at once.

    ``copied`` gets the layer that was written, and its indices.
    """

    def copy(
        src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int = 1
    ) -> None:  # some releases name the arguments
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices]
            copied(target, dst_indices)

    anything: Any = torch
    anything.cpu.Stream.synchronize = lambda self: None
    registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    anything.cuda.cudart = lambda: registered
    for name in ("sglang.srt.mem_cache.memory_pool_host", "sglang.srt.mem_cache.pool_host.mha"):
        try:
            module: Any = __import__(name, fromlist=["transfer_kv_direct"])
        except ImportError:
            continue
        module.transfer_kv_direct = copy


def version() -> str:
    """The release that runs."""
    return str(sglang.__version__)
