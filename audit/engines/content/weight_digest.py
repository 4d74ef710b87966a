"""Digests of a model's weights: whether they are those of before. Level ``content`` only.

Two digests. One reads all weights, and is taken when a call may have changed them. The other reads
:data:`SAMPLES` numbers of each tensor, and is taken now and then: it finds a training step at a rate of 1e-6
in bfloat16, which changes 4 % of the numbers, but not a change of single numbers. PyTorch's own ``_version``
of a tensor can't be used: vLLM and trainers write through ``.data``, which does not raise it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

SAMPLES = 256
"""Numbers that are read of each tensor now and then."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether each worker of a tensor-parallel group has all of a parameter: no layer of vLLM splits it.

    False of one that can't be read.
    """
    return bool(tensor.numel()) and not (hasattr(tensor, "output_dim") or hasattr(tensor, "input_dim"))


class WeightDigest:
    """The digests of one model. ``model``: a ``torch.nn.Module``. ``of``: which parameters are read."""

    def __init__(self, model: Any, of: Callable[[torch.Tensor], bool] | None = None) -> None:
        self._model = model
        """The model, whose parameters may be replaced at any time."""
        self._of = of
        """Selects the parameters; None: all of them, and the buffers."""
        self._whole = self._read_all()
        """The last digest of all weights, by tensor."""
        self._sampled = self._read_samples()
        """The last samples, in one tensor on the model's device."""

    def is_equal(self) -> bool | None:
        """Whether all weights are those of the last call.

        None: those that can be read are, and some can't be read. A tensor without numbers can't be read:
        kernels of the CPU keep packed copies and empty the original.
        """
        before, self._whole = self._whole, self._read_all()
        self._sampled = self._read_samples()
        if before != self._whole:
            return False
        return None if any(not digest for digest in before.values()) else True

    def looks_equal(self) -> bool:
        """Whether the samples are those of the last look."""
        now = self._read_samples()
        same = now.shape == self._sampled.shape and bool(torch.equal(now, self._sampled))
        self._sampled = now
        if not same:
            self._whole = self._read_all()
        return same

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._of is None:
            yield from self._model.named_parameters()
            yield from self._model.named_buffers()
        else:
            yield from (each for each in self._model.named_parameters() if self._of(each[1]))

    def _read_all(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor its shape and two sums modulo 2**64, weighted by row and by column; () if empty."""
        read: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._tensors():
            numbers = _integers(tensor)
            if numbers is None:
                read[name] = ()
                continue
            rows = numbers.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1)
            sums = (
                int((rows.sum(dim, dtype=torch.int64) * _weights(rows.shape[1 - dim], rows.device)).sum())
                for dim in (0, 1)
            )
            read[name] = (*tensor.shape, *sums)
        return read

    def _read_samples(self) -> torch.Tensor:
        parts = []
        for _, tensor in self._tensors():
            numbers = _integers(tensor)
            if numbers is not None:
                parts.append(numbers[:: max(1, len(numbers) // SAMPLES)][:SAMPLES].to(torch.int64))
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bits of a tensor's numbers, in one dimension; None if it has none."""
    kind = _INTEGERS.get(tensor.element_size())
    if not tensor.numel() or kind is None or tensor.is_meta:
        return None
    return tensor.detach().reshape(-1).view(kind)


def _weights(length: int, device: torch.device) -> torch.Tensor:
    """Odd weights, so that an exchange of rows or columns changes the sum."""
    return torch.arange(length, device=device, dtype=torch.int64) * 0x9E3779B97F4A7C1 | 1
