"""KV caches that the installed vLLM's own code makes, for ``test_content_layouts``; no kernels are needed.

``python -m tests.engines.release_layouts`` prints one JSON line for each attention backend: the block axis is
right if a change of one block's bytes changes the fingerprint of this block alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

BLOCKS, BLOCK_TOKENS, HEADS, WIDTH = 6, 32, 2, 16
NAMES = ("model.layers.0.attn", "model.layers.1.attn")

BACKENDS = (
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
    "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend",
    "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend",
    "vllm.v1.attention.backends.flex_attention.FlexAttentionBackend",
)


def runner(backend: Any, kernel_tokens: int) -> Any:
    """A model runner with KV caches and nothing else."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32
    )
    page = spec.page_size_bytes
    groups = [KVCacheGroupSpec(list(NAMES), spec)]
    if "layers" in KVCacheTensor.__dataclass_fields__:
        tensors = [
            KVCacheTensor(
                size=2 * page * BLOCKS, layers=list(NAMES), layer_stride=page * BLOCKS, block_stride=page
            )
        ]
    else:
        tensors = [KVCacheTensor(size=page * BLOCKS, shared_by=[name]) for name in NAMES]
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)
    attention = SimpleNamespace(
        backend=backend, layer_names=list(NAMES), kv_cache_spec=spec, kv_cache_group_id=0
    )
    made = object.__new__(GPUModelRunner)
    made.__dict__.update(
        kv_cache_config=config,
        attn_groups=[[attention]],
        runner_only_attn_layers=set(),
        device=torch.device("cpu"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        _kernel_block_sizes=[kernel_tokens],
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
        ),
    )
    context = made.vllm_config.compilation_config.static_forward_context
    for name, cache in _caches(made, config, kernel_tokens).items():
        context[name] = SimpleNamespace(kv_cache=cache)
    return made


def _caches(made: Any, config: Any, kernel_tokens: int) -> dict[str, Any]:
    """The caches that vLLM's own code allocates and shapes."""
    try:
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache
    except ImportError:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            raw = made._allocate_kv_cache_tensors(config)
            return dict(made._reshape_kv_cache_tensors(raw, [kernel_tokens]))
    return dict(allocate_kv_cache(config, made.device, KVCacheLayout.LBNHC, [kernel_tokens]))


def check(made: Any) -> dict[str, Any]:
    """Whether each block's fingerprint follows the bytes of this block alone."""
    import torch

    from kvledger.audit.engines.content.fingerprint import Fingerprints
    from kvledger.audit.engines.content.layout import read_layout

    group = read_layout(made).groups[0]
    prints = Fingerprints(group.layers, 7)
    every = list(range(BLOCKS))
    alone = []
    for block in every:
        before = prints.of(every)
        group.layers[1][block].fill_(block + 1.0)
        changed = (prints.of(every) != before).nonzero().flatten().tolist()
        alone.append(changed == [block])
    storage = torch.empty(0, dtype=torch.float32).set_(group.layers[1].untyped_storage())
    context = made.vllm_config.compilation_config.static_forward_context
    whole = context[NAMES[1]].kv_cache
    return {
        "shape": list(whole.shape),
        "alone": all(alone),
        "written": bool((whole != 0).all()),
        "bytes": group.block_bytes,
        "storage": storage.numel(),
    }


def found() -> Iterator[dict[str, Any]]:
    """What was found for each backend that this vLLM has and that can be imported here."""
    import importlib

    import vllm

    for path in BACKENDS:
        module, _, name = path.rpartition(".")
        try:
            backend = getattr(importlib.import_module(module), name)
        except Exception as error:  # needs a device or a package that is not here
            yield {"backend": name, "missing": repr(error)[:80]}
            continue
        for kernel_tokens in (BLOCK_TOKENS, BLOCK_TOKENS // 2):
            try:
                row = check(runner(backend, kernel_tokens))
            except Exception as error:
                row = {"error": repr(error)[:300]}
            yield {"version": vllm.__version__, "backend": name, "kernel": kernel_tokens, **row}


def main() -> None:
    """Print one line for each backend and kernel block size."""
    for row in found():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
