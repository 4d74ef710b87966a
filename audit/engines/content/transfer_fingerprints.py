"""Fingerprints the blocks that a connector stores and loads, at the engine's end of each transfer.

A source is read after the forward pass, before the connector waits for its saves. A destination is read when
the load has arrived: ``start_load_kv`` returned (a synchronous load), or ``get_finished`` or
``get_transfer_results`` named the request. Where another engine reads the blocks of a request after its last
token, as with NIXL, they are read once they are full.
The ledger joins both by the block's hash and compares them (``audit/ledger/content_postings.py``).

Only connectors whose reader lists whole blocks are observed; in an engine with several KV cache groups, only
the groups of attention whose blocks it tells apart.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import events as ev
from ...hooks import Hook, Hooks
from ..connector_metadata import reader_of
from ..connector_metadata.metadata_reader import LoadedBlocks, MetadataReader, Moves
from .block_tables import NULL_BLOCK

if TYPE_CHECKING:
    from .device_buffers import Pending
    from .layout import GroupLayout
    from .seal_fingerprints import PartPrints, Rows

TABLE: tuple[Hook, ...] = (
    Hook("", "bind_connector_metadata", (), after="bound"),
    Hook("", "start_load_kv", (), after="load_started"),
    Hook("", "wait_for_save", (), before="saving"),
    Hook("", "get_finished", (), after="finished", optional=True),
    Hook("", "get_transfer_results", (), after="results", optional=True),
    Hook("", "get_block_ids_with_load_errors", (), after="load_errors", optional=True),
    Hook("", "clear_connector_metadata", (), before="step_ends"),
)

STORE = "KVLEDGER_CONTENT_STORE"
"""``own``: no other engine writes to the connector's store. ``fleet``: no engine with another key does."""

Failed = Callable[[str, Exception, bool], None]


class _Reading(NamedTuple):
    """Fingerprints on their way to the host, and which of the sealed blocks differ from their seals."""

    step: int
    out: bool
    group: int
    blocks: list[int]
    prints: Pending[Rows]
    sealed: list[tuple[int, int]]
    """Blocks with a seal from an earlier step, and this step."""
    differs: Pending[list[bool]] | None


class CustodyWatch:
    """Observes the transfers of one worker's connector. ``watch`` is the worker's :class:`RunnerWatch`."""

    def __init__(self, watch: Any, connector: Any, key: int, failed: Failed) -> None:
        self._watch = watch
        self.reader: MetadataReader | None = reader_of(connector)
        """Reads the connector's metadata; None: it can't be read, so nothing is observed."""
        self._groups = self._observed_groups()
        """The tokens of a block, of each KV cache group whose transfers are observed."""
        self._prints: dict[int, PartPrints] = {}
        self._moves = Moves({}, [])
        """What the metadata of the present step orders."""
        self._handed_over: dict[tuple[str, int], tuple[object, int]] = {}
        """Requests and groups whose blocks another engine will read: the present life, and how many were read
        here."""
        self._loading: dict[str, list[LoadedBlocks]] = {}
        """Asynchronous loads that have not arrived, by request id."""
        self._failed_blocks: set[int] = set()
        """Blocks reported as not loaded in this step."""
        self._readings: deque[_Reading] = deque()
        """Fingerprints that were not emitted yet, oldest first."""
        self._hooks: Hooks | None = None
        if self._groups:
            from .seal_fingerprints import PartPrints

            groups = watch.layout.groups
            self._prints = {group: PartPrints(groups[group].layers, key) for group in self._groups}
            self._hooks = Hooks(TABLE, connector, self, failed)

    def _observed_groups(self) -> dict[int, int]:
        reader, layout = self.reader, self._watch.layout
        if reader is None or "blocks" not in reader.READS or not reader.exact:
            return {}
        attention: dict[int, GroupLayout] = layout.of_attention()
        alone = len(layout.groups) == len(attention) == 1 and not layout.excluded
        groups = attention if alone else reader.groups(attention)
        return {group: attention[group].block_tokens for group in groups}

    def remove(self) -> None:
        """Restore the connector and emit what is known."""
        if self._hooks is not None:
            self._hooks.remove()
            self._emit(wait=True)

    # --- a step -------------------------------------------------------------------------------------

    def bound(self, _: None, __: None, connector_metadata: Any) -> None:
        """``bind_connector_metadata``: the worker received a step's metadata."""
        assert self.reader is not None
        self._moves = self.reader.moves(connector_metadata, self._groups)
        self._failed_blocks = set()
        for request_id in self.reader.handed_over(connector_metadata):
            for group in self._groups:
                self._handed_over.setdefault((request_id, group), (None, 0))
        for load in self._moves.loads:
            if load.asynchronous:
                self._loading.setdefault(load.request_id, []).append(load)

    def load_started(self, *_: Any, **__: Any) -> None:
        """``start_load_kv`` returned: synchronous loads have arrived."""
        self._read_loads([load for load in self._moves.loads if not load.asynchronous])

    def saving(self, *_: Any, **__: Any) -> None:
        """``wait_for_save`` is called: the forward pass has filled the blocks that are stored."""
        handed_over = self._handed_over_blocks()
        for group in self._groups:
            self._read(True, group, [*self._moves.stored.get(group, ()), *handed_over.get(group, ())])

    def _handed_over_blocks(self) -> dict[int, list[int]]:
        """By group: blocks that became final, of requests whose blocks another engine reads later."""
        found: dict[int, list[int]] = {}
        for (request_id, group), (life, known) in list(self._handed_over.items()):
            final = self._watch.final_blocks(request_id, group)
            if final is None:  # the request has ended
                del self._handed_over[request_id, group]
                continue
            present, blocks = final
            known = min(known, len(blocks)) if present is life else 0
            found.setdefault(group, []).extend(blocks[known:])
            self._handed_over[request_id, group] = present, len(blocks)
        return found

    def finished(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``get_finished`` returned the requests whose transfers are complete."""
        for request_id in sorted(result[1] or ()):
            self._read_loads(self._loading.pop(request_id, []))

    def results(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``get_transfer_results`` returned, since 0.30; a failed load is among the finished ones."""
        for request_id in getattr(result, "failed_recving", None) or ():
            self._loading.pop(request_id, None)
        for request_id in sorted(result.finished_recving or ()):
            self._read_loads(self._loading.pop(request_id, []))

    def load_errors(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``get_block_ids_with_load_errors`` returned."""
        self._failed_blocks.update(result or ())

    def step_ends(self) -> None:
        """``clear_connector_metadata`` is called: emit what has arrived on the host."""
        if self._failed_blocks:
            self._drop_failed()
        self._emit()
        self._moves = Moves({}, [])

    def _drop_failed(self) -> None:
        """Failed loads are no transfers: the connector itself reports that the KV did not arrive."""
        for index, reading in enumerate(self._readings):
            if not reading.out and reading.step == self._watch.step:
                blocks = [-1 if block in self._failed_blocks else block for block in reading.blocks]
                self._readings[index] = reading._replace(blocks=blocks)

    # --- fingerprints -------------------------------------------------------------------------------

    def _read_loads(self, loads: Iterable[LoadedBlocks]) -> None:
        """Take the fingerprints of blocks whose loads have arrived."""
        loaded: dict[int, list[int]] = {}
        for load in loads:
            loaded.setdefault(load.group, []).extend(load.blocks)
        for group, blocks in loaded.items():
            self._read(False, group, blocks)

    def _read(self, out: bool, group: int, blocks: Iterable[int]) -> None:
        """Take the fingerprints of a group's blocks; a GPU sends them when it comes to it."""
        blocks = [block for block in dict.fromkeys(blocks) if block != NULL_BLOCK]
        if not blocks:
            return
        watch, prints = self._watch, self._prints[group].read(blocks)
        sealed = []
        if out:
            steps = [watch.seals.sealed_step(block) for block in blocks]
            sealed = [(block, step) for block, step in zip(blocks, steps, strict=True) if step > 0]
        differs = watch.seals.differing(group, [block for block, _ in sealed]) if sealed else None
        self._readings.append(_Reading(watch.step, out, group, blocks, prints, sealed, differs))

    def _emit(self, *, wait: bool = False) -> None:
        """Emit the fingerprints that have arrived on the host."""
        while self._readings:
            reading = self._readings[0]
            if not reading.prints.arrived(wait=wait):
                return
            if reading.differs is not None and not reading.differs.arrived(wait=wait):
                return
            self._readings.popleft()
            kept = [index for index, block in enumerate(reading.blocks) if block >= 0]
            differed = []
            if reading.differs is not None:
                flags = reading.differs.result()
                for (block, step), differs in zip(reading.sealed, flags, strict=True):
                    differed += [block, step] if differs else []
            assert self.reader is not None
            store = os.environ.get(STORE)
            own = self.reader.own_store or store == "own"
            self._watch.log.emit(
                ev.BlocksMoved(
                    self._watch.log.now(),
                    reading.step,
                    self._watch.rank,
                    reading.out,
                    reading.group,
                    self._prints[reading.group].key_name,
                    own,
                    [reading.blocks[index] for index in kept],
                    reading.prints.result()[kept].tobytes(),
                    differed,
                    store == "fleet",
                )
            )
