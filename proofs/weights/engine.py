"""A tiny real engine, the ways to change its weights, and which weights were current at each output token.

What is recorded here does not come from kvledger. `execute_model` of the executor and `update_from_output` of
the scheduler are wrapped: a token belongs to the weights that were current when its step ran.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.demo.forked import IMPORTED_ONCE

from kvledger.audit.demo.engine import settle_environment
from kvledger.audit.demo.model import LAYERS, write_model

BLOCK = 32
TOP = 5
"""The most likely tokens whose log-probabilities are recorded beside the sampled token's."""

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "seed": 0,
    "enforce_eager": True,
    "distributed_executor_backend": EXECUTOR,
    "async_scheduling": False,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 64,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "scheduler_reserve_full_isl": False,
}

AFTER_KV = re.compile(rf"lm_head|model\.norm|layers\.{LAYERS - 1}\.(mlp|post_|self_attn\.(q|o)_)")
"""Tensors behind the last layer's keys and values."""

Scores = dict[int, float]
"""Log-probabilities by token."""


class State(NamedTuple):
    """Everything that decides an output: the folder of the weights, and of the request's adapter if any."""

    weights: Path
    adapter: Path | None = None


@dataclass
class Served:
    """One request or sample, and for each of its output tokens the state in which it was sampled."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    states: list[State] = field(default_factory=list)


def prepare(*, in_process: bool = True) -> None:
    """Set up this process for engines with float32 weights that can be loaded again in place."""
    settle_environment(in_process=in_process)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # workers in other processes get our functions
    os.environ["KVLEDGER_CONTENT_WEIGHTS_SECONDS"] = "0.001"  # level content looks at weights in each step
    import torch
    from vllm import ModelRegistry
    from vllm.distributed.weight_transfer import factory
    from vllm.model_executor.layers import utils
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    from .transfer import FolderTransfer

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    # A packed weight leaves an empty parameter, which `load_weights` can't load into.
    utils.dispatch_cpu_unquantized_gemm = keep_weight
    if find_spec("lmcache") is not None:
        importlib.import_module("tests.connectors.whole").prepare_lmcache("lmcache-v1")
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    factory.WeightTransferEngineFactory.register_engine("folder", FolderTransfer)


def start(weights: Path, **options: Any) -> Any:
    """A real engine with these weights."""
    from vllm import LLM

    return LLM(model=str(weights), **(SETTINGS | options))


def weights_folder(folder: Path, seed: int, base: int = 0, only: Callable[[str], bool] | None = None) -> Path:
    """Write the weights of ``seed``; with ``only`` the weights of ``base``, save for these tensors."""
    from safetensors.torch import load_file, save_file

    path = folder / (
        f"weights-{seed}" if only is None else f"weights-{base}-{seed}-{len(os.listdir(folder))}"
    )
    if path.exists():
        return path
    write_model(path, seed)
    if only is not None:
        file = str(path / "model.safetensors")
        others = load_file(str(weights_folder(folder, base) / "model.safetensors"))
        mixed = {name: tensor if only(name) else others[name] for name, tensor in load_file(file).items()}
        save_file(mixed, file, metadata={"format": "pt"})
    return path


def same_kv(one: Path, other: Path) -> bool:
    """Whether two folders have the same weights in all tensors that KV depends on."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(str(path / "model.safetensors")) for path in (one, other))
    return all(ours[name].equal(theirs[name]) for name in ours if not AFTER_KV.search(name))


# --- ways to change the weights -----------------------------------------------------------------------


def load_into(model: Any, folder: str) -> None:
    """Load weights by the model's own method, as TRL does."""
    from safetensors.torch import load_file

    model.load_weights(load_file(f"{folder}/model.safetensors").items())


def _worker_loads(worker: Any, folder: str) -> None:
    load_into(worker.get_model(), folder)


def _write_into(model: Any, folder: str) -> None:
    """Write into parameters unseen: the class's method is called, not the model's own."""
    from safetensors.torch import load_file

    type(model).load_weights(model, load_file(f"{folder}/model.safetensors").items())


def _transfer(llm: Any, folder: str) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": {"folder": folder}})
    llm.finish_weight_update(Path(folder).name)


def model_of(llm: Any) -> Any:
    """The model of an engine whose worker is in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.get_model()


def _declared(llm: Any, folder: str) -> None:
    import kvledger

    _write_into(model_of(llm), folder)
    mark: Callable[[str], None] | None = getattr(kvledger, "mark_weights", None)
    if mark is not None:
        mark(Path(folder).name)


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "reload_weights": lambda llm, folder: llm.collective_rpc(
        "reload_weights", kwargs={"weights_path": folder}
    ),
    "collective_rpc of a callable": lambda llm, folder: llm.collective_rpc(_worker_loads, args=(folder,)),
    "apply_model": lambda llm, folder: llm.apply_model(lambda model: load_into(model, folder)),
    "update_weights": _transfer,
    "model.load_weights": lambda llm, folder: load_into(model_of(llm), folder),
    "one chunk": lambda llm, folder: llm.update_weights({"update_info": {"folder": folder}}),
    "own writes and mark_weights": _declared,
    "own writes in apply_model": lambda llm, folder: llm.apply_model(
        lambda model: _write_into(model, folder)
    ),
    "own writes, undeclared": lambda llm, folder: _write_into(model_of(llm), folder),
}
