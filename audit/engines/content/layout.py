"""Where each block lies in the KV caches of a model runner, from what the runner declares.

Up to vLLM 0.27 an attention backend declares the shape of a layer's cache for a number of blocks; the axis
that follows this number is the block axis. Later releases declare strides (``KVCacheTensor``), and a layer's
cache is a view of blocks, heads, tokens and content. A group of states declares the shape and dtype of each
state of a layer (of a Mamba layer those of its convolution and of its recurrence), and a layer has one tensor
for each. Every declaration is compared with the tensor that the layer has. What fits no declaration is
refused: nothing is concluded from sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

CHECKED_SPECS = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    "TQFullAttentionSpec",
)
"""vLLM's classes of KV cache groups whose blocks are written once, at the positions of their tables."""


STATES = "MambaSpec"
"""vLLM's class of groups of states, which are checked where a block gets one state, at its end."""


class UnknownLayout(Exception):
    """kvledger can't tell where a block lies; the message is one sentence."""


class GroupLayout(NamedTuple):
    """The KV cache of one group. ``layers`` has one view for each distinct tensor, with one row a block."""

    group: int
    block_tokens: int
    layers: list[Any]
    layer_names: list[list[str]]
    """The layers that read each tensor: layers that share KV have one tensor."""
    block_bytes: int
    description: str = ""
    """Attention backends, memory order, tokens of a kernel block, and dtypes, as far as they are declared."""
    of_states: bool = False
    """Whether a block has a state, of all positions before its end."""


class Layout(NamedTuple):
    """The KV caches of a model runner: the groups that are checked, and why the others are not."""

    blocks: int
    groups: dict[int, GroupLayout]
    excluded: dict[int, str]

    def of_attention(self) -> dict[int, GroupLayout]:
        """The groups that have keys and values of each position."""
        return {number: group for number, group in self.groups.items() if not group.of_states}

    def sentences(self) -> list[str]:
        """One sentence for each group that is not checked."""
        return [f"Group {group} is not checked: {why}." for group, why in self.excluded.items()]


def read_layout(runner: Any) -> Layout:
    """The layout of a live model runner. Raises :class:`UnknownLayout`."""
    config = getattr(runner, "kv_cache_config", None)
    blocks, groups = getattr(config, "num_blocks", 0), getattr(config, "kv_cache_groups", ())
    if not blocks or not groups:
        raise UnknownLayout(f"{type(runner).__name__} declares no KV cache")
    _refuse_split_sequences(runner)
    layout = Layout(int(blocks), {}, {})
    for number, group in enumerate(groups):
        kind = _kind(group.kv_cache_spec)
        why = _why_no_states(group.kv_cache_spec) if kind == STATES else f"its blocks are of kind {kind}"
        if kind not in CHECKED_SPECS and why:
            layout.excluded[number] = why
            continue
        layout.groups[number] = _group(runner, config, number, group, layout.blocks)
    if not layout.groups:
        raise UnknownLayout("no group of KV caches can be checked: " + "; ".join(layout.excluded.values()))
    return layout


def _refuse_split_sequences(runner: Any) -> None:
    """Context parallelism spreads the positions of a block over several workers."""
    parallel = runner.vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnknownLayout(f"{name} is {getattr(parallel, name)}, which splits the blocks over workers")


def _kind(spec: Any) -> str:
    """The class of a group's spec; for a group of several specs, the class that all of them have."""
    inner = getattr(spec, "kv_cache_specs", None)
    if inner is None:
        return type(spec).__name__
    kinds = sorted({type(each).__name__ for each in inner.values()})
    return kinds[0] if len(kinds) == 1 else " and ".join(kinds)


def _spec_of(spec: Any, name: str) -> Any:
    """The spec of one layer of a group."""
    inner = getattr(spec, "kv_cache_specs", None)
    return spec if inner is None else inner.get(name, spec)


def _why_no_states(spec: Any) -> str:
    """Why the states of a group are not checked; "" if they are.

    It must be known where a step leaves a state that is not written any more: in the block that ends with the
    step's last position.
    """
    inner = getattr(spec, "kv_cache_specs", None)
    each = next(iter(inner.values())) if inner else spec
    mode = getattr(each, "mamba_cache_mode", "")
    if mode != "align":
        return f"its states are not kept one a block (mamba_cache_mode {mode or 'is not known'})"
    if getattr(each, "num_speculative_blocks", 0):
        return "drafts write its states in several blocks"
    if getattr(each, "num_prefill_checkpoint_blocks", 0):
        return "a step writes its states in several blocks (prefill checkpoints)"
    return ""


def _group(runner: Any, config: Any, number: int, group: Any, blocks: int) -> GroupLayout:
    layers: list[Any] = []
    names: list[list[str]] = []
    places: dict[tuple[object, ...], int] = {}
    of_states = _kind(group.kv_cache_spec) == STATES
    for name in group.layer_names:
        spec = _spec_of(group.kv_cache_spec, name)
        for cache in (
            _states_of(runner, config, name, spec, blocks) if of_states else [_cache_of(runner, name)]
        ):
            place = (cache.data_ptr(), tuple(cache.shape), tuple(cache.stride()))
            if place in places:
                names[places[place]].append(name)
                continue
            places[place] = len(layers)
            layers.append(
                cache if of_states else _by_block(runner, config, number, name, spec, cache, blocks)
            )
            names.append([name])
    if not layers:
        raise UnknownLayout(f"group {number} has no layer with a KV cache")
    size = sum(layer[0].numel() * layer.element_size() for layer in layers)
    tokens = int(group.kv_cache_spec.block_size)
    description = _description(runner, number, group, tokens, layers)
    return GroupLayout(number, tokens, layers, names, size, description, of_states)


def _description(runner: Any, number: int, group: Any, tokens: int, layers: list[Any]) -> str:
    """What is declared about the memory of a group's KV caches."""
    backends = sorted(
        {getattr(_backend_of(runner, number, name), "__name__", "") for name in group.layer_names}
    )
    order = getattr(getattr(runner.vllm_config, "cache_config", None), "kv_cache_layout", None)
    parts = [name for name in backends if name]
    if order:
        parts.append(f"layout {getattr(order, 'name', order)}")
    each = layers[0].shape[1] if layers[0].dim() > 1 else 1
    if _kind(group.kv_cache_spec) == STATES:
        parts.append("states")
    elif tokens % each == 0:
        parts.append(f"kernel blocks of {tokens // each} tokens")
    return ", ".join([*parts, *sorted({str(layer.dtype).removeprefix("torch.") for layer in layers})])


def _cache_of(runner: Any, name: str) -> Any:
    """The KV cache that a layer is bound to."""
    context = runner.vllm_config.compilation_config.static_forward_context
    cache = getattr(context.get(name), "kv_cache", None)
    if isinstance(cache, list | tuple) and len(cache) == 1:  # one for each pipeline stage, up to 0.19
        cache = cache[0]
    if not hasattr(cache, "data_ptr"):
        raise UnknownLayout(f"layer {name} has no KV cache that is one tensor")
    return cache


def _states_of(runner: Any, config: Any, name: str, spec: Any, blocks: int) -> list[Any]:
    """The tensors of a layer's states, with one row a block. A row may be followed by other states."""
    context = runner.vllm_config.compilation_config.static_forward_context
    states = getattr(context.get(name), "kv_cache", None)
    if isinstance(states, list | tuple) and len(states) == 1 and isinstance(states[0], list | tuple):
        states = states[0]  # one for each pipeline stage, up to 0.19
    if not isinstance(states, list | tuple) or not all(hasattr(state, "data_ptr") for state in states):
        raise UnknownLayout(f"layer {name} has no tensors of states")
    declared = [((blocks, *shape), dtype) for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    found = [(tuple(state.shape), state.dtype) for state in states]
    if found != declared:
        raise UnknownLayout(f"layer {name} has states of {found}, and {declared} are declared")
    stride = next((t.block_stride for t in config.kv_cache_tensors if name in getattr(t, "layers", ())), None)
    for state in states:
        distance = state.stride(0) * state.element_size()
        if stride is not None and distance != stride:
            raise UnknownLayout(
                f"a state of layer {name} has {distance} bytes from block to block, and {stride} are declared"
            )
    return list(states)


def _by_block(runner: Any, config: Any, number: int, name: str, spec: Any, cache: Any, blocks: int) -> Any:
    """A view of a layer's cache whose first axis counts the scheduler's blocks."""
    declared = next((t for t in config.kv_cache_tensors if name in getattr(t, "layers", ())), None)
    if declared is not None:
        return _strided(name, declared, cache, blocks)
    axis, length = _shaped(runner, number, name, spec, cache, blocks)
    if length % blocks:
        raise UnknownLayout(f"layer {name} has {length} kernel blocks for {blocks} blocks")
    return cache.movedim(axis, 0).unflatten(0, (blocks, length // blocks))


def _strided(name: str, declared: Any, cache: Any, blocks: int) -> Any:
    """The view of a cache whose ``KVCacheTensor`` declares the distance of two blocks."""
    each, rest = divmod(int(cache.shape[0]), blocks)
    distance = cache.stride(0) * cache.element_size() * each
    if rest or not each or distance != declared.block_stride:
        raise UnknownLayout(
            f"the cache of layer {name} has {distance} bytes from block to block, "
            f"and {declared.block_stride} are declared"
        )
    return cache.unflatten(0, (blocks, each))


def _shaped(runner: Any, number: int, name: str, spec: Any, cache: Any, blocks: int) -> tuple[int, int]:
    """The block axis of a cache and its length, as the layer's attention backend declares its shape."""
    backend = _backend_of(runner, number, name)
    heads, width = getattr(spec, "num_kv_heads", None), getattr(spec, "head_size", None)
    if backend is None or heads is None or width is None:
        raise UnknownLayout(f"the attention backend of layer {name} is not known")
    kernel = _kernel_block_tokens(runner, number, spec)
    count = blocks * (spec.block_size // kernel)
    tokens = getattr(spec, "storage_block_size", spec.block_size)
    tokens = kernel if tokens == spec.block_size else tokens
    options = {}
    if "cache_dtype_str" in inspect.signature(backend.get_kv_cache_shape).parameters:
        quantized = getattr(getattr(spec, "kv_quant_mode", None), "name", "")
        plain = quantized == "NONE" and "auto"
        options["cache_dtype_str"] = (
            plain or getattr(spec, "cache_dtype_str", None) or runner.vllm_config.cache_config.cache_dtype
        )
    shapes = [
        tuple(backend.get_kv_cache_shape(each, tokens, heads, width, **options))
        for each in (count, count + 1)
    ]
    axes = [axis for axis, pair in enumerate(zip(*shapes, strict=True)) if pair[0] != pair[1]]
    if shapes[0] != tuple(cache.shape) or len(axes) != 1:
        raise UnknownLayout(
            f"the cache of layer {name} has the shape {tuple(cache.shape)}, "
            f"and {backend.__name__} declares {shapes[0]}"
        )
    return axes[0], count


def _backend_of(runner: Any, number: int, name: str) -> Any:
    """The attention backend of a layer."""
    groups = getattr(runner, "attn_groups", ())
    for attention in groups[number] if number < len(groups) else ():
        if name in attention.layer_names:
            return attention.backend
    return None


def _kernel_block_tokens(runner: Any, number: int, spec: Any) -> int:
    """Tokens of a kernel block: a kernel may divide a block of the scheduler into several."""
    sizes = getattr(runner, "_kernel_block_sizes", None) or getattr(runner, "kernel_block_sizes", None)
    if sizes and number < len(sizes):
        return int(sizes[number])
    return int(spec.block_size)


# --- The parts of a block that a transfer is checked by: the keys and the values of each layer.
#
# The KV cache of a layer has keys and values on an axis of their own, or one behind the other in its last
# axis. Without either, the two halves of the last axis are the parts.


def parts_of(layer: Any) -> tuple[Any, Any]:
    """Keys and values of a layer: views with the block axis first, then the kernel blocks of a block."""
    if layer.dim() == 6 and layer.shape[2] == 2:
        return layer[:, :, 0], layer[:, :, 1]
    half = (layer.shape[-1] + 1) // 2
    return layer[..., :half], layer[..., half:]


def all_parts(layers: Sequence[Any]) -> list[Any]:
    """The parts of all layers, two for each. A part without content is the layer itself."""
    found = []
    for layer in layers:
        first, second = parts_of(layer)
        found += [first, second if second.shape[-1] else layer]
    return found
