"""Writes tiny models with random weights and a tokenizer of bytes into a cache of the model hub.

`upstream_models.py FOLDER`, for vLLM's tests that build whole engines. The models have the names that the
tests ask for, and their architectures; nothing is downloaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
}
OPT_SIZES = {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64, "vocab_size": 512}
OPT_SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "hmellor/tiny-random-LlamaForCausalLM": ("Llama", SIZES),
    "meta-llama/Llama-3.2-1B-Instruct": ("Llama", SIZES),
    "Qwen/Qwen3-0.6B": ("Qwen3", SIZES),
    "facebook/opt-125m": ("OPT", OPT_SIZES),
}
"""By name: what the names of the classes of transformers begin with, and the sizes."""


def tokenizer() -> Any:
    """A tokenizer with one token for each byte."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    of_bytes = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=of_bytes, **names)


def write(folder: Path) -> None:
    """Write all models as snapshots of a cache in ``folder``."""
    import torch
    import transformers

    for name, (kind, sizes) in MODELS.items():
        torch.manual_seed(0)
        tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config = getattr(transformers, f"{kind}Config")(**sizes, **tokens)
        cache = folder / f"models--{name.replace('/', '--')}"
        snapshot = cache / "snapshots" / "local"
        getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(snapshot)
        tokenizer().save_pretrained(snapshot)
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "refs" / "main").write_text("local")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
