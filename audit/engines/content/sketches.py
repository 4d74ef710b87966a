"""Sketches of computed blocks: random projections, by which two computations of one block are compared.

Two computations of the same tokens differ by rounding, so they have different fingerprints. A sketch of a
part of a block (the keys or the values of one layer) is its product with random vectors of 1 and -1, in
fp32. The distance of two sketches is about the distance of the parts. The vectors come from the key of the
fingerprints. The ledger compares the blocks with equal hashes (``audit/ledger/content_postings.py``).

The journal gets :data:`PROJECTIONS` numbers of four bytes for each part of a computed block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import events as ev
from ..step_log import StepLog
from .device_buffers import Known, Pending, Sent, Slot, Slots
from .fingerprint import odd_numbers
from .layout import Layout, all_parts

PROJECTIONS = 8
"""Numbers of a sketch for each part of a block."""

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Types of KV caches that can be projected."""

ROOM = 256
"""Blocks that one slot of a device has room for."""

ROWS = 64
"""Blocks that are copied at once."""

STEPS_AHEAD = 8
"""More than the steps that a scheduler runs ahead of a failed load."""

_SEED = 0x5851F42D4C957F2D


def reason_for_none(layout: Layout) -> str:
    """Why computed blocks of these KV caches get no sketches; "" if they do."""
    for group in layout.of_attention().values():
        for layer in group.layers:
            dtype = str(layer.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                return f"the KV cache of group {group.group} has the dtype {dtype}"
    return ""


def _rows(parts: list[Slot]) -> Any:
    return np.concatenate([slot.sums_on_host.numpy() for slot in parts])


class Sketches:
    """Sketches of the blocks of ``layers``. ``new_event``: of a device, for tests."""

    def __init__(
        self, layers: Sequence[Any], key: int, *, new_event: Callable[[], Any] | None = None
    ) -> None:
        self._parts = all_parts(layers)
        """The keys and the values of each layer."""
        device = self._parts[0].device
        sizes = [part[0].numel() for part in self._parts]
        numbers = odd_numbers(key ^ _SEED, max(sizes) * PROJECTIONS)
        signs = ((numbers >> np.uint64(40)) & np.uint64(1)).astype(np.float32) * 2 - 1
        vectors = torch.from_numpy(signs.reshape(-1, PROJECTIONS)).to(device)
        self._vectors = [vectors[:size] for size in sizes]
        """By part: the random vectors, one in each column."""
        on_host = device.type == "cpu" and new_event is None
        columns = len(self._parts) * PROJECTIONS
        self._slots = (
            None
            if on_host
            else Slots(device, room=ROOM, columns=columns, new_event=new_event, dtype=torch.float32)
        )
        """Buffers on the device; None on the host."""

    def read(self, blocks: Sequence[int]) -> Pending[Any]:
        """Take the sketches of at least one block: a row of float32 for each."""
        if self._slots is None:
            return Known(self._project(torch.tensor(blocks, dtype=torch.int64)).numpy())
        sent = []
        for slot in self._slots.take(blocks):
            slot.sums.copy_(self._project(slot.index))
            slot.send_sums()
            slot.event.record()
            sent.append(slot)
        return Sent(self._slots, sent, _rows)

    def _project(self, index: Any) -> Any:
        """The sketches of the blocks of ``index``, which is on the layers' device."""
        pairs = list(zip(self._parts, self._vectors, strict=True))
        return torch.cat(
            [
                torch.cat([part.index_select(0, some).flatten(1).float() @ to for part, to in pairs], 1)
                for some in index.split(ROWS)
            ]
        )


class _Reading(NamedTuple):
    """Sketches on their way to the host."""

    step: int
    group: int
    blocks: list[int]
    sketches: Pending[Any]


class SketchWatch:
    """Takes the sketches of blocks when a step has computed them, and emits them."""

    def __init__(self, layout: Layout, key: int, key_name: str, log: StepLog, rank: int) -> None:
        reason = reason_for_none(layout)
        self.sentence = (
            f"Blocks that are computed again are not compared: {reason}."
            if reason
            else f"Blocks that are computed again are compared by {PROJECTIONS} projections of each part."
        )
        """Whether blocks that are computed again are compared, and how."""
        groups = {} if reason else layout.of_attention()
        self._sketches = {number: Sketches(group.layers, key) for number, group in groups.items()}
        """Takes the sketches of each group's blocks."""
        self._key_name = key_name
        """Tells the key of the projections from others."""
        self._log = log
        self._rank = rank
        self._skipped_to = 0
        """Blocks that were computed before this step have no sketch."""
        self._readings: deque[_Reading] = deque()
        """Sketches that were not emitted yet, oldest first."""

    def load_failed(self, step: int) -> None:
        """A load failed: some requests compute over blocks without KV until the scheduler moves them back."""
        self._skipped_to = step + STEPS_AHEAD

    def take(self, group: int, blocks: Iterable[int], step: int) -> None:
        """Blocks are full and final after ``step``, which computed them."""
        chosen = list(dict.fromkeys(blocks))
        if chosen and step >= self._skipped_to and group in self._sketches:
            self._readings.append(_Reading(step, group, chosen, self._sketches[group].read(chosen)))

    def emit(self, *, wait: bool = False) -> None:
        """Emit the sketches that have arrived on the host."""
        while self._readings and self._readings[0].sketches.arrived(wait=wait):
            reading = self._readings.popleft()
            rows = reading.sketches.result()
            self._log.emit(
                ev.BlocksSketched(
                    self._log.now(),
                    reading.step,
                    self._rank,
                    reading.group,
                    self._key_name,
                    PROJECTIONS,
                    reading.blocks,
                    rows.astype("<f4").tobytes(),
                )
            )
