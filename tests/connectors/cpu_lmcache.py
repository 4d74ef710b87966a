"""The copy between tensors that ``LMCacheConnectorV1`` leaves to a GPU connector, on a machine without a GPU.

LMCache has a GPU connector for each kind of device and none for the CPU: ``CreateGPUConnector`` of
``lmcache/v1/gpu_connector/__init__.py`` raises there. All else of it is its own: look-ups, chunks, keys,
memory, its stores and their servers. Cache layers are [blocks, heads, tokens of a block, elements], a
token's key and value side by side in its elements.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import Any


def install() -> None:
    """Have LMCache copy by this connector wherever it would look for a device's."""
    import lmcache.v1.gpu_connector as devices
    import torch

    class CopyingConnector(devices.GPUConnectorInterface):
        """Copies a chunk's tokens between LMCache's memory and the engine's cache, slot by slot.

        A memory object is [key or value, layers, tokens, heads x elements]; slot = block id * block size +
        offset, one for each token of the request.
        """

        def __init__(self, shape: Any) -> None:
            self.layers, _, _, self.heads, self.elements = shape

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for number, keys_and_values in enumerate(self._rows(start, end, **kwargs)):
                for side, part in enumerate(keys_and_values.split(self.elements, dim=-1)):
                    memory_obj.tensor[side, number] = part.flatten(1)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            blocks, offsets = self._places(start, end, **kwargs)
            for number, layer in enumerate(kwargs["kvcaches"]):
                sides = memory_obj.tensor[:, number].unflatten(-1, (self.heads, self.elements))
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
            return torch.Size([2, self.layers, num_tokens, self.heads * self.elements])

    devices.CreateGPUConnector = lambda config, metadata, *_, **__: CopyingConnector(metadata.kv_shape)
