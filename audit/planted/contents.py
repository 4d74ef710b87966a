"""Planted faults that write wrong KV into the cache of vLLM 0.32, as faults of engines and connectors do.

One function for each: it wraps methods of vLLM's classes. The engine's counts stay right: only the bytes are
wrong. The worker runs in the scheduler's process. Each fault changes as little as shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .fault import Wrap


def _caches(config: Any) -> list[Any]:
    """The KV cache of each layer; the first axis counts the blocks."""
    context = config.compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values() if getattr(layer, "kv_cache", None) is not None]


def _loaded(metadata: Any, block_size: int) -> list[int]:
    """The blocks that the metadata of ExampleConnector orders to be loaded."""
    slots = [
        slot
        for request in metadata.requests
        if not request.is_store
        for slot in request.slot_mapping.flatten().tolist()
    ]
    return list(dict.fromkeys(slot // block_size for slot in slots))


def _hits(scheduler: Any, output: Any) -> Iterator[list[int]]:
    """The blocks that each new request of a step hits in the local cache and that no load fills."""
    size = scheduler.block_size
    loaded = _loaded(output.kv_connector_metadata, size)
    for request in output.scheduled_new_reqs:
        blocks = request.block_ids[0][: request.num_computed_tokens // size]
        yield [block for block in blocks if block not in loaded]


def _before_a_hit(wrap: Wrap, change: Callable[[list[Any], list[int], Any], bool]) -> None:
    """Call ``change`` with the caches and the hit blocks before each step, until it has changed something."""
    from vllm.v1.core.sched.scheduler import Scheduler

    done: list[bool] = []

    def make(original: Any) -> Any:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            for blocks in [] if done else _hits(self, output):
                if blocks and not done and change(_caches(self.vllm_config), blocks, self):
                    done.append(True)
            return output

        return schedule

    wrap(Scheduler, "schedule", make)


def bit_flip(wrap: Wrap) -> None:
    """One bit of one cached block flips before a request hits it."""
    import torch

    def change(caches: list[Any], blocks: list[int], _: Any) -> bool:
        block = caches[-1][blocks[0]].view(torch.int32)
        block.view(-1)[7] ^= 1 << 20
        return True

    _before_a_hit(wrap, change)


def late_write(wrap: Wrap) -> None:
    """A request that has ended writes KV once more into a block that it freed and that is cached."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    freed: set[int] = set()

    def make(original: Any) -> Any:
        def free(self: Any, request: Any) -> None:
            freed.update(self.get_block_ids(request.request_id)[0])
            original(self, request)

        return free

    def change(caches: list[Any], blocks: list[int], _: Any) -> bool:
        late = [block for block in blocks if block in freed]
        for cache in caches if late else ():
            cache[late[0]][..., -1, :] = cache[late[0]][..., 0, :]
        return bool(late)

    wrap(KVCacheManager, "free", make)
    _before_a_hit(wrap, change)


def swapped_blocks(wrap: Wrap) -> None:
    """Two cached blocks of one prefix exchange their contents."""

    def change(caches: list[Any], blocks: list[int], _: Any) -> bool:
        if len(blocks) < 2:
            return False
        for cache in caches:
            cache[blocks[:2]] = cache[blocks[1::-1]]
        return True

    _before_a_hit(wrap, change)


def _around_loads(wrap: Wrap, make_load: Callable[[list[Any], list[int], Callable[[], None]], None]) -> None:
    """Replace each load of ExampleConnector by ``make_load`` of caches, blocks and the load itself."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    def make(original: Any) -> Any:
        def start_load_kv(self: Any, forward_context: Any, **kwargs: Any) -> None:
            blocks = _loaded(self._get_connector_metadata(), self._block_size)
            caches = _caches(self._vllm_config)
            make_load(caches, blocks, lambda: original(self, forward_context, **kwargs))

        return start_load_kv

    wrap(ExampleConnector, "start_load_kv", make)


def wrong_half(wrap: Wrap) -> None:
    """A loader exchanges keys and values, which lie one behind the other in the last axis."""

    def load(caches: list[Any], blocks: list[int], original: Callable[[], None]) -> None:
        original()
        for cache in caches if blocks else ():
            half = cache.shape[-1] // 2
            cache[blocks] = cache[blocks].roll(half, dims=-1)

    _around_loads(wrap, load)


def truncated_load(wrap: Wrap) -> None:
    """A load ends before the last layer, whose blocks keep what they held."""

    def load(caches: list[Any], blocks: list[int], original: Callable[[], None]) -> None:
        before = caches[-1][blocks].clone()
        original()
        if blocks:
            caches[-1][blocks] = before

    _around_loads(wrap, load)


def stale_store(wrap: Wrap) -> None:
    """The store returns an older object for the last block of each load: that of the first load."""
    first: list[Any] = []

    def load(caches: list[Any], blocks: list[int], original: Callable[[], None]) -> None:
        original()
        if not blocks:
            return
        if not first:
            first.extend(cache[blocks[-1]].clone() for cache in caches)
        for cache, old in zip(caches, first, strict=True):
            cache[blocks[-1]] = old

    _around_loads(wrap, load)


def wrong_compute(wrap: Wrap) -> None:
    """The second computation of a prompt writes the tokens of one block's keys one position too far.

    The block is sealed after that, so each later comparison of the block with its seal is right.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    done: list[bool] = []

    def make(original: Any) -> Any:
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, scheduler_output, *args, **kwargs)
            size = self.cache_config.block_size
            for request_id, request in self.requests.items():
                computed = request.num_computed_tokens + scheduler_output.num_scheduled_tokens.get(
                    request_id, 0
                )
                if request_id.startswith("twice") and computed >= 2 * size and not done:
                    done.append(True)
                    for cache in _caches(self.vllm_config):
                        keys = cache[request.block_ids[0][1]][..., : cache.shape[-1] // 2]
                        keys.copy_(keys.roll(1, dims=-2))
            return result

        return execute_model

    wrap(GPUModelRunner, "execute_model", make)
