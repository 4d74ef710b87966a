"""Fingerprints of KV cache blocks: integers of 64 bits that differ if the bytes of a block differ.

The function is multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
The bytes of a block in one layer, in logical order, are words of 32 bits. Each word is multiplied by an odd
key of 64 bits, which belongs to the word's position, and the products are added modulo 2**64. The sum is
multiplied by an odd factor of the layer, and the fingerprint of the block is the sum over the layers. One
changed word is always found. Any other change within a layer is missed with a probability of at most 2**-32.

Addition modulo 2**64 has no order, so every form (torch, NumPy, Triton) gives equal fingerprints. Positions
are logical, so a copy in another memory order with the same shape has the same fingerprint.
``docs/decisions/0015-multilinear-fingerprints.md`` says why this function was chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

Tensor: TypeAlias = Any
"""A ``torch.Tensor``."""

FUNCTION = "multilinear-32"
"""Name of the function, part of :attr:`Fingerprints.key_name`."""

_CHUNK_WORDS = 1 << 16
"""How many words are gathered at once: 256 KiB, which stay in the processor's cache."""

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS_SEED = 0xD6E8FEB86659FD93


def odd_numbers(seed: int, count: int) -> Any:
    """``count`` odd numbers of 64 bits (NumPy), by SplitMix64 from ``seed``."""
    with np.errstate(over="ignore"):
        number = np.uint64(seed % (1 << 64)) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (number ^ (number >> np.uint64(31))) | np.uint64(1)


def key_name(key: int) -> str:
    """Public name of the function and the key: fingerprints are comparable only if their names are equal."""
    digest = hashlib.blake2b(str(key).encode(), digest_size=6, person=b"kvledger").hexdigest()
    return f"{FUNCTION}:{digest}"


def words_of(layer: Tensor) -> Tensor | None:
    """The layer as words of 32 bits (a view of int32), or None if its memory order does not allow that."""
    try:
        return layer.view(torch.int32)
    except RuntimeError:  # a dimension, a stride or the offset does not fit words of four bytes
        return None


def padded_words(blocks: Tensor) -> Tensor:
    """Copies of blocks as rows of words of 32 bits; zeros fill the last word."""
    rows = blocks.contiguous().flatten(1).view(torch.uint8)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4)).view(torch.int32)


class LayerWords:
    """One layer, ready to be summed: words in memory order where possible, keys in the same order."""

    def __init__(self, layer: Tensor, word_keys: Any) -> None:
        if layer.dim() == 1:
            layer = layer.unsqueeze(1)
        self.layer = layer
        """The layer, with an axis for its blocks and at least one more."""
        block_bytes = layer[0].numel() * layer.element_size()
        words = words_of(layer)
        keys = word_keys[: (block_bytes + 3) // 4]
        if words is not None:
            strides = words.stride()
            order = sorted(range(1, words.dim()), key=lambda axis: -strides[axis])
            keys = keys.reshape(words.shape[1:]).transpose([axis - 1 for axis in order])
            words = words.permute(0, *order)
            try:
                words = words.view(words.shape[0], -1)
                keys = np.ascontiguousarray(keys).reshape(-1)
            except RuntimeError:  # a block is not contiguous
                keys = np.ascontiguousarray(keys)
        self.words = words
        """Its 32-bit words, blocks first; None: it has no view of words."""
        self.keys = keys
        """The key of each word of a block, in the order of the words."""
        self.row_words = keys.size
        """Words of a block."""
        axes = "jklmnop"[: keys.ndim]
        self._sums = f"i{axes},{axes}->i"
        """The sums over a block's words, in einsum's notation."""
        on_cpu = layer.device.type == "cpu"
        self.array = words.numpy().view(np.uint32) if on_cpu and words is not None else None
        """The words as a NumPy array; None on a device."""
        self._device_keys: Tensor = None
        """The keys on the device; None until they are needed."""

    def device_keys(self) -> Tensor:
        """The keys as int64 on the layer's device."""
        if self._device_keys is None:
            self._device_keys = torch.from_numpy(self.keys.view(np.int64)).to(self.layer.device)
        return self._device_keys

    def sum_by_numpy(self, blocks: Sequence[int]) -> Any:
        """The sums of these blocks (NumPy int64), without a copy of large blocks."""
        sums: Any = np.empty(len(blocks), dtype=np.uint64)
        if self.array is None:
            rows = (
                padded_words(self.layer[torch.as_tensor(blocks, dtype=torch.int64)]).numpy().view(np.uint32)
            )
            return np.einsum("ij,j->i", rows, self.keys.reshape(-1), out=sums).view(np.int64)
        at = 0
        while at < len(blocks):
            end = _run_end(blocks, at)
            if end - at > 1 or self.row_words >= _CHUNK_WORDS:
                rows = self.array[blocks[at] : blocks[at] + end - at]
            else:
                end = min(len(blocks), at + max(1, _CHUNK_WORDS // self.row_words))
                rows = self.array[blocks[at:end]]
            np.einsum(self._sums, rows, self.keys, out=sums[at:end])
            at = end
        return sums.view(np.int64)

    def sum_by_torch(self, index: Tensor) -> Tensor:
        """The sums of the blocks of ``index`` (int64), by torch operations on the layer's device."""
        keys = self.device_keys()
        sums = []
        for some in index.split(max(1, _CHUNK_WORDS // max(1, self.row_words))):
            if self.words is None:
                rows = padded_words(self.layer.index_select(0, some))
            else:
                rows = self.words.index_select(0, some)
            products = rows.to(torch.int64).bitwise_and_(0xFFFFFFFF).mul_(keys)
            sums.append(products.flatten(1).sum(1))
        return torch.cat(sums) if sums else index.new_zeros(0)


def _run_end(blocks: Sequence[int], at: int) -> int:
    """The end of the run of consecutive block ids that begins at index ``at``."""
    end = at + 1
    while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
        end += 1
    return end


class Fingerprints:
    """Fingerprints of the blocks of ``layers``, under ``key``.

    A layer is a tensor (a view, any strides, any dtype) whose first axis counts the blocks. Layers that share
    memory are passed once. ``layers`` may be on any device; on the CPU NumPy computes the sums. ``factors``
    has the number of each layer's factor; by default each layer has a factor of its own.
    """

    def __init__(self, layers: Sequence[Tensor], key: int, *, factors: Sequence[int] | None = None) -> None:
        self.layers = list(layers)
        self.key_name = key_name(key)
        """Tells the key from others without giving it away."""
        most = max((layer[0].numel() * layer.element_size() + 3) // 4 for layer in self.layers)
        word_keys = odd_numbers(key, most)
        self._forms = _layer_forms(self.layers, word_keys)
        """The layers, ready to be summed."""
        numbers = list(range(len(self.layers))) if factors is None else list(factors)
        self.factors = odd_numbers(key ^ _FACTORS_SEED, max(numbers) + 1).view(np.int64)[numbers]
        self.device = self.layers[0].device
        """Where the layers are."""
        self._device_factors = torch.from_numpy(self.factors).to(self.device)

    def of(self, blocks: Sequence[int] | Tensor) -> Tensor:
        """One fingerprint for each block: int64 on the layers' device."""
        return self.by_layer(blocks).sum(1)

    def by_layer(self, blocks: Sequence[int] | Tensor) -> Tensor:
        """One fingerprint for each block and layer: int64, ``[len(blocks), len(layers)]``.

        The sum over the layers is what :meth:`of` returns.
        """
        if self.device.type != "cpu":
            return self.by_layer_torch(blocks)
        listed = blocks.tolist() if isinstance(blocks, torch.Tensor) else list(blocks)
        sums: Any = np.empty((len(listed), len(self._forms)), dtype=np.int64)
        for number, form in enumerate(self._forms):
            sums[:, number] = form.sum_by_numpy(listed)
        sums *= self.factors
        return torch.from_numpy(sums)

    def by_layer_torch(self, blocks: Sequence[int] | Tensor) -> Tensor:
        """The same as :meth:`by_layer` by torch operations alone, on any device."""
        index = self._index(blocks)
        return torch.stack([form.sum_by_torch(index) for form in self._forms], 1) * self._device_factors

    def write(self, index: Tensor, out: Tensor) -> None:
        """Write fingerprints of the blocks of ``index`` to ``out``, all on the layers' device.

        ``out`` has a row for each block: one column, or one column for each layer.
        """
        rows = self.by_layer_torch(index)
        out.copy_(rows if out.shape[1] > 1 else rows.sum(1, keepdim=True))

    def mark(self, index: Tensor, sums: Tensor, seals: Tensor, differs: Tensor, *, renew: bool) -> None:
        """Mark in ``differs`` which ``sums`` of the blocks of ``index`` are not ``seals[block]``.

        ``renew``: the sums become the seals. A block is in ``index`` once.
        """
        differs.copy_(seals[index] != sums.flatten())
        if renew:
            seals[index] = sums.flatten()

    def _index(self, blocks: Sequence[int] | Tensor) -> Tensor:
        if isinstance(blocks, torch.Tensor):
            return blocks.to(self.device, torch.int64, non_blocking=True)
        index = torch.tensor(list(blocks), dtype=torch.int64)
        if self.device.type == "cuda":
            index = index.pin_memory()  # a copy from other memory would wait for the device
        return index.to(self.device, non_blocking=True)


def _layer_forms(layers: Sequence[Tensor], word_keys: Any) -> list[LayerWords]:
    """The forms of all layers; layers of one shape and memory order share their keys."""
    shared: dict[Any, LayerWords] = {}
    forms = []
    for layer in layers:
        form = LayerWords(layer, word_keys)
        first = shared.setdefault((layer.shape, layer.stride(), layer.dtype, form.words is None), form)
        form.keys = first.keys
        if form is not first and layer.device.type != "cpu":
            form._device_keys = first.device_keys()
        forms.append(form)
    return forms
