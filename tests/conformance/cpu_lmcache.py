"""The copy between tensors that ``LMCacheConnectorV1`` leaves to a GPU connector, on a machine without a GPU.

``kvledger conformance LMCacheConnectorV1 --module tests/conformance/cpu_lmcache.py`` drives it with that.

LMCache has a GPU connector for each kind of device and none for the CPU: ``CreateGPUConnector`` of
``lmcache/v1/gpu_connector/__init__.py`` raises there. All else of it is its own: look-ups, chunks, keys,
memory, its stores and their servers. Cache layers are [blocks, heads, tokens of a block, elements], a
token's key and value side by side in its elements.

With ``use_native`` the same for the adapter that vLLM bundles, which names its GPU connector and the
device itself. That adapter ends every step with a call that LMCache 0.3.9 no longer takes (a list of
look-ups for one look-up); with ``mended`` each is handed over alone, so that one sees what comes after.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import functools
import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as _Connector


@functools.cache
def _copying() -> Any:
    """The class of the connector that stands in."""
    import lmcache.v1.gpu_connector as devices
    import torch

    class CopyingConnector(devices.GPUConnectorInterface):
        """Copies a chunk's tokens between LMCache's memory and the engine's cache, slot by slot.

        A memory object is [key or value, layers, tokens, heads x elements], as the model has them; a card's
        cache is narrower, and then so much is copied. Slot = block id * block size + offset, one for each
        token of the request.
        """

        def __init__(self, layers: int, width: int) -> None:
            self.layers, self.width = layers, width

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for number, keys_and_values in enumerate(self._rows(start, end, **kwargs)):
                for side, part in enumerate(keys_and_values.chunk(2, dim=-1)):
                    copied = part.flatten(1)
                    memory_obj.tensor[side, number, :, : copied.shape[1]] = copied

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            blocks, offsets = self._places(start, end, **kwargs)
            for number, layer in enumerate(kwargs["kvcaches"]):
                heads, elements = layer.shape[1], layer.shape[3] // 2
                sides = memory_obj.tensor[:, number, :, : heads * elements].unflatten(-1, (heads, elements))
                layer[blocks, :, offsets] = torch.cat(list(sides), dim=-1)

        def _rows(self, start: int, end: int, **kwargs: Any) -> Any:
            blocks, offsets = self._places(start, end, **kwargs)
            return (layer[blocks, :, offsets] for layer in kwargs["kvcaches"])

        def _places(self, start: int, end: int, *, kvcaches: Any, slot_mapping: Any, **_: Any) -> Any:
            slots = slot_mapping[start:end]
            size = kvcaches[0].shape[2]
            return slots // size, slots % size

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

        def get_shape(self, num_tokens: int) -> Any:
            return torch.Size([2, self.layers, num_tokens, self.width])

    return CopyingConnector


def install() -> None:
    """Have LMCache copy by that connector wherever it would look for a device's."""
    import lmcache.v1.gpu_connector as devices

    def create(config: Any, metadata: Any, *_: Any, **__: Any) -> Any:
        shape = metadata.kv_shape
        return _copying()(shape[0], shape[3] * shape[4])

    devices.CreateGPUConnector = create


def install_bundled(mended: bool) -> None:
    """The same for the adapter that vLLM bundles."""
    import torch
    from lmcache.v1.cache_engine import LMCacheEngine
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration import vllm_v1_adapter as bundled

    def unpin(engine: Any, lookup_ids: list[str]) -> None:
        for lookup_id in lookup_ids:
            unpin_one(engine, lookup_id)

    bundled.VLLMPagedMemGPUConnectorV2 = lambda width, layers, **_: _copying()(layers, width)
    torch.accelerator.set_device_index = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    unpin_one = LMCacheEngine.lookup_unpin
    if mended and unpin_one.__module__ != __name__:
        LMCacheEngine.lookup_unpin = unpin


class LMCacheConnectorV1(_Connector):
    """With that copy."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if options.get("use_native"):
            install_bundled(options.get("mended", False))
        else:
            install()
        super().__init__(vllm_config, *args, **kwargs)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        loop = self._lmcache_engine.lmcache_engine.storage_manager.loop
        threading.Thread(target=_stop_at_the_end, args=(loop,), daemon=True).start()


def _stop_at_the_end(loop: Any) -> None:
    """vLLM does not shut LMCache down, whose loop has a thread that lets no process end."""
    threading.main_thread().join()
    loop.call_soon_threadsafe(loop.stop)
