"""The models of ``content_run``: the demo's, and tiny ones with several groups of KV caches."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from kvledger.audit.demo.model import HEAD_DIM, HEADS, HIDDEN, LAYERS, config, write_model

ARCHITECTURES = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "sliding": ("gemma3", "Gemma3ForCausalLM"),
    "convolution": ("lfm2", "Lfm2ForCausalLM"),
}
"""By name: vLLM's module and class."""

WINDOW = 64
"""Tokens that a layer with a sliding window reads."""

SETTINGS: dict[str, dict[str, Any]] = {
    "sliding": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": HEAD_DIM,
        "rope_local_base_freq": 10000.0,
    },
    "convolution": {
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "block_dim": HIDDEN,
        "conv_dim": HIDDEN,
        "norm_eps": 1e-6,
    },
}
"""What the configuration of a model has beside the demo's."""


def model_folder(kind: str, folder: Path) -> Path:
    """Write a model, and register its class: vLLM would look at the class in another process."""
    from vllm import ModelRegistry

    module, name = ARCHITECTURES[kind]
    found = importlib.import_module(f"vllm.model_executor.models.{module}")
    ModelRegistry.register_model(name, getattr(found, name))
    path = write_model(folder / "model", 0)
    if kind in SETTINGS:  # vLLM makes up the weights
        settings = config() | SETTINGS[kind] | {"architectures": [name]}
        (path / "config.json").write_text(json.dumps(settings))
    return path


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the demo's model, with random weights."""
    import torch
    from safetensors.torch import save_file

    generator, rank = torch.Generator().manual_seed(seed), 8
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"bias": "none"}))
    wide = HEADS * HEAD_DIM
    sizes = {"q_proj": (HIDDEN, wide), "o_proj": (wide, HIDDEN)}
    weights = {}
    for layer in range(LAYERS):
        for module, (inner, outer) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn((rank, inner), generator=generator) / 4
            weights[f"{name}.lora_B.weight"] = torch.randn((outer, rank), generator=generator) / 4
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return folder
