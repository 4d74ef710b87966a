"""Writes a tiny model whose output depends on the KV cache.

Here: the model folder that `kvledger demo` gives the engine, with a configuration and random weights.
Not here: the engine (engine.py) and its requests (workload.py). Nothing is downloaded, and there is no
tokenizer: requests are token ids.

The weights are random numbers and not vLLM's dummy weights. With dummy weights the output stays the same
when the KV is wrong. Here every projection keeps the variance of its input, so attention contributes as
much as the embedding.
"""

import json
from pathlib import Path
from typing import Any

VOCABULARY_TOKENS = 512
LAYERS = 2
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
INTERMEDIATE = 256
MAX_POSITIONS = 512


def config() -> dict[str, Any]:
    """The Hugging Face configuration of a Qwen3-like model of some 0.4 million weights."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY_TOKENS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def shapes() -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, in a fixed order."""
    weights: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY_TOKENS, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        weights[f"{prefix}.self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}.self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}.self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        weights[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        weights[f"{prefix}.self_attn.q_norm.weight"] = (HEAD_DIM,)
        weights[f"{prefix}.self_attn.k_norm.weight"] = (HEAD_DIM,)
        weights[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
        weights[f"{prefix}.mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        weights[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    weights["model.norm.weight"] = (HIDDEN,)
    weights["lm_head.weight"] = (VOCABULARY_TOKENS, HIDDEN)
    return weights


def write_model(folder: Path, seed: int) -> Path:
    """Write config.json and model.safetensors into `folder`; the same seed gives the same files."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes().items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape)
            continue
        weight = torch.randn(shape, generator=generator)
        weights[name] = weight if "embed_tokens" in name else weight * shape[-1] ** -0.5
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
