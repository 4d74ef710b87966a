"""Fingerprints by Triton: one launch for all layers and all blocks, and a comparison on the device.

The function is that of :mod:`.fingerprint`, to the bit. A table holds one row per layer: the address of its
memory, its strides, its keys and its factor. One program sums one slice of a few blocks in one layer and adds
the sum to the fingerprints of these blocks. The host waits for nothing.

A layer is read in units of four bytes in memory order. If its memory order does not allow that, it is read
in units of one element. Then the key of an element is that of its word, shifted by its place in the word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .fingerprint import Fingerprints, LayerWords, Tensor, odd_numbers

FIELDS = 12
"""Numbers in a layer's row: address, block stride, units, keys, factor, three sizes, four strides."""

SLICE = 2048
"""Units that one program reads of each of its blocks."""

BLOCKS_PER_PROGRAM = 8
"""Blocks that share one read of the keys."""

COMPARED_AT_ONCE = 256
"""Blocks that one program compares."""


@triton.jit(do_not_specialize=["count", "out_block", "out_layer"])  # type: ignore[untyped-decorator]
def sum_slices(
    table: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    out: tl.tensor,
    out_block: tl.tensor,
    out_layer: tl.tensor,
    UNIT_BYTES: tl.constexpr,
    DENSE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Add the sum of one slice of ``BLOCKS`` blocks in one layer to their fingerprints."""
    layer = tl.program_id(2)
    row = table + layer * FIELDS
    unit = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    most = tl.load(row + 2)
    inside = unit < most
    if UNIT_BYTES == 4:
        memory = tl.load(row).to(tl.pointer_type(tl.uint32))
    elif UNIT_BYTES == 2:
        memory = tl.load(row).to(tl.pointer_type(tl.uint16))
    else:
        memory = tl.load(row).to(tl.pointer_type(tl.uint8))
    block_stride = tl.load(row + 1)
    keys = tl.load(tl.load(row + 3).to(tl.pointer_type(tl.int64)) + unit, mask=inside, other=0)
    keys *= tl.load(row + 4)
    offset = unit.to(tl.int64)
    if not DENSE:
        rest = offset
        third = tl.load(row + 7)
        offset = (rest % third) * tl.load(row + 11)
        rest //= third
        second = tl.load(row + 6)
        offset += (rest % second) * tl.load(row + 10)
        rest //= second
        first = tl.load(row + 5)
        offset += (rest % first) * tl.load(row + 9)
        offset += (rest // first) * tl.load(row + 8)
    for number in range(BLOCKS):
        place = tl.program_id(1) * BLOCKS + number
        block = tl.load(blocks + place, mask=place < count, other=0)
        inside = unit < tl.where(place < count, most, 0)
        units = tl.load(memory + block * block_stride + offset, mask=inside, other=0)
        total = tl.sum(units.to(tl.int64) * keys, 0)
        tl.atomic_add(out + place * out_block + layer * out_layer, total, mask=place < count, sem="relaxed")


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def compare(
    sums: tl.tensor,
    blocks: tl.tensor,
    seals: tl.tensor,
    count: tl.tensor,
    differs: tl.tensor,
    RENEW: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Mark the blocks whose fingerprints are not their seals. ``RENEW``: the fingerprints become seals."""
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = place < count
    block = tl.load(blocks + place, mask=inside, other=0)
    total = tl.load(sums + place, mask=inside, other=0)
    tl.store(differs + place, total != tl.load(seals + block, mask=inside, other=0), mask=inside)
    if RENEW:
        tl.store(seals + block, total, mask=inside)


class TritonFingerprints(Fingerprints):
    """:class:`Fingerprints` of layers on a GPU. Under ``TRITON_INTERPRET=1`` also on the CPU."""

    def __init__(self, layers: Sequence[Tensor], key: int, *, factors: Sequence[int] | None = None) -> None:
        super().__init__(layers, key, factors=factors)
        word_keys = odd_numbers(key, max(form.row_words for form in self._forms))
        self._kept: list[Tensor] = []
        """The keys whose addresses are in the tables."""
        self._tables = self._make_tables(word_keys)
        """For each kernel: addresses, strides and keys of the layers."""

    def of(self, blocks: Sequence[int] | Tensor) -> Tensor:
        index = self._index(blocks)
        sums = torch.zeros(len(index), dtype=torch.int64, device=self.device)
        self._launch(index, sums, 1, 0)
        return sums

    def by_layer(self, blocks: Sequence[int] | Tensor) -> Tensor:
        index = self._index(blocks)
        sums = torch.zeros((len(index), len(self.layers)), dtype=torch.int64, device=self.device)
        self._launch(index, sums, len(self.layers), 1)
        return sums

    def write(self, index: Tensor, out: Tensor) -> None:
        out.zero_()
        self._launch(index, out, out.shape[1], int(out.shape[1] > 1))

    def mark(self, index: Tensor, sums: Tensor, seals: Tensor, differs: Tensor, *, renew: bool) -> None:
        if len(index):
            grid = (triton.cdiv(len(index), COMPARED_AT_ONCE),)
            compare[grid](
                sums, index, seals, len(index), differs.view(torch.uint8), RENEW=renew, SIZE=COMPARED_AT_ONCE
            )

    def _launch(self, index: Tensor, sums: Tensor, out_block: int, out_layer: int) -> None:
        if not len(index):
            return
        for table, first_layer, unit_bytes, dense, units in self._tables:
            grid = (triton.cdiv(units, SLICE), triton.cdiv(len(index), BLOCKS_PER_PROGRAM), len(table))
            sum_slices[grid](
                table,
                index,
                len(index),
                sums[..., first_layer:] if out_layer else sums,
                out_block,
                out_layer,
                UNIT_BYTES=unit_bytes,
                DENSE=dense,
                SLICE=SLICE,
                BLOCKS=BLOCKS_PER_PROGRAM,
                FIELDS=FIELDS,
            )

    def _make_tables(self, word_keys: Any) -> list[tuple[Tensor, int, int, bool, int]]:
        """One table for each run of layers that are read in units of one size: normally a single one."""
        rows = [
            self._row(form, word_keys, int(factor))
            for form, factor in zip(self._forms, self.factors, strict=True)
        ]
        tables = []
        first = 0
        for at in range(1, len(rows) + 1):
            if at == len(rows) or rows[at][:2] != rows[first][:2]:
                unit_bytes, dense, _ = rows[first]
                table = torch.tensor([row for *_, row in rows[first:at]], dtype=torch.int64)
                most = max(row[2] for *_, row in rows[first:at])
                tables.append((table.to(self.device), first, unit_bytes, dense, most))
                first = at
        return tables

    def _row(self, form: LayerWords, word_keys: Any, factor: int) -> tuple[int, bool, list[int]]:
        """The unit's size, whether blocks are dense, and the layer's row of the table."""
        view, keys = (form.words, form.keys) if form.words is not None else elements(form.layer, word_keys)
        sizes, strides = merged(list(view.shape[1:]), list(view.stride()[1:]))
        address = self._key_address(keys)
        dense = len(sizes) == 1 and strides[0] == 1
        row = [view.data_ptr(), view.stride(0), keys.size, address, factor]
        padding = 4 - len(sizes)
        sizes, strides = [1] * padding + sizes, [0] * padding + strides
        return view.element_size(), dense, [*row, *sizes[1:], *strides]

    def _key_address(self, keys: Any) -> int:
        """The address of the keys on the device; equal keys are stored once."""
        host = np.ascontiguousarray(keys).reshape(-1).view(np.int64)
        for kept in self._kept:
            if len(kept) == len(host) and bool((kept.cpu().numpy() == host).all()):
                return int(kept.data_ptr())
        self._kept.append(torch.from_numpy(host.copy()).to(self.device))
        return int(self._kept[-1].data_ptr())


def elements(layer: Tensor, word_keys: Any) -> tuple[Tensor, Any]:
    """A layer in units of one element (at most four bytes), and the key of each unit, in logical order."""
    size = layer.element_size()
    if size > 4:
        raise ValueError(f"the Triton form does not read {layer.dtype} in this memory order")
    view = layer.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    byte = np.arange(layer[0].numel(), dtype=np.int64) * size
    return view, word_keys[byte // 4] << (8 * (byte % 4)).astype(np.uint64)


def merged(sizes: list[int], strides: list[int]) -> tuple[list[int], list[int]]:
    """The same memory with as few dimensions as possible; at most four."""
    dims: list[list[int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = [dims[-1][0] * size, stride]
        else:
            dims.append([size, stride])
    if len(dims) > 4:
        raise ValueError("a block of a layer is scattered in memory over more than four dimensions")
    return [size for size, _ in dims] or [1], [stride for _, stride in dims] or [1]
