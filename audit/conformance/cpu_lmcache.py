"""``LMCacheConnectorV1`` on a machine without a GPU: this module does the copy between tensors.

``kvledger conformance lmcache`` uses it.

LMCache copies through a GPU connector. It has one for each kind of device and none for the CPU, where
``CreateGPUConnector`` of ``lmcache/v1/gpu_connector/__init__.py`` raises. Everything else is LMCache's own:
lookups, chunks, keys, memory, stores and servers. A cache layer has the shape [blocks, heads, tokens of a
block, elements]; the elements of a token are its key followed by its value.

``use_native`` selects the adapter that vLLM bundles. That adapter names its GPU connector and the device
itself. At the end of every step it passes a list of lookup ids to ``lookup_unpin``, which in LMCache 0.3.9
takes one id. With ``mended`` the ids are passed one by one, so that later faults show.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import functools
import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1 as _Connector


@functools.cache
def _copying() -> Any:
    """The GPU connector class that copies on the CPU."""
    import lmcache.v1.gpu_connector as devices
    import torch

    class CopyingConnector(devices.GPUConnectorInterface):
        """Copies a chunk's tokens between LMCache's memory and the engine's cache, slot by slot.

        A memory object has the shape [key or value, layers, tokens, heads x elements], in the sizes of the
        model. The score card's cache is narrower, so only its width is copied. ``slot_mapping`` has one slot
        for each token of the request: block id * block size + offset.
        """

        def __init__(self, layers: int, width: int) -> None:
            self._layers, self._width = layers, width

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for index, keys_and_values in enumerate(self._rows(start, end, **kwargs)):
                for side, part in enumerate(keys_and_values.chunk(2, dim=-1)):
                    copied = part.flatten(1)
                    memory_obj.tensor[side, index, :, : copied.shape[1]] = copied

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            blocks, offsets = self._slots(start, end, **kwargs)
            for index, layer in enumerate(kwargs["kvcaches"]):
                heads, elements = layer.shape[1], layer.shape[3] // 2
                sides = memory_obj.tensor[:, index, :, : heads * elements].unflatten(-1, (heads, elements))
                layer[blocks, :, offsets] = torch.cat(list(sides), dim=-1)

        def _rows(self, start: int, end: int, **kwargs: Any) -> Any:
            blocks, offsets = self._slots(start, end, **kwargs)
            return (layer[blocks, :, offsets] for layer in kwargs["kvcaches"])

        def _slots(self, start: int, end: int, *, kvcaches: Any, slot_mapping: Any, **_: Any) -> Any:
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
            return torch.Size([2, self._layers, num_tokens, self._width])

    return CopyingConnector


def install() -> None:
    """Make LMCache create the copying connector wherever it would create a device's GPU connector."""
    import lmcache.v1.gpu_connector as devices

    def create(config: Any, metadata: Any, *_: Any, **__: Any) -> Any:
        shape = metadata.kv_shape
        return _copying()(shape[0], shape[3] * shape[4])

    devices.CreateGPUConnector = create


def install_bundled(mended: bool) -> None:
    """Make the adapter that vLLM bundles create the copying connector."""
    import torch
    from lmcache.v1.cache_engine import LMCacheEngine
    from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration import vllm_v1_adapter as bundled

    def unpin_each(engine: Any, lookup_ids: list[str]) -> None:
        for lookup_id in lookup_ids:
            unpin_one(engine, lookup_id)

    bundled.VLLMPagedMemGPUConnectorV2 = lambda width, layers, **_: _copying()(layers, width)
    torch.accelerator.set_device_index = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    unpin_one = LMCacheEngine.lookup_unpin
    if mended and unpin_one.__module__ != __name__:
        LMCacheEngine.lookup_unpin = unpin_each


class LMCacheConnectorV1(_Connector):
    """vLLM's connector, with the copying connector installed."""

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
        threading.Thread(target=_stop_at_exit, args=(loop,), daemon=True).start()


def _stop_at_exit(loop: Any) -> None:
    """Stop LMCache's event loop: vLLM does not, and the thread of the loop keeps the process alive."""
    threading.main_thread().join()
    loop.call_soon_threadsafe(loop.stop)
