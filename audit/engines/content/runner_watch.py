"""Seals, verifies and scrubs the blocks of one model runner, in the steps that it executes.

A full block is sealed after the forward pass that executed its last position. Sealed blocks that a request
reads as hits are compared with their seals before the forward pass, and blocks at rest now and then, within a
budget of bytes a step. What a step writes loses its seal before the step. What the comparisons mean is up to
the ledger, which knows from the block pool who held each block.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import events as ev
from ...events import SAME_STEP, UNSAMPLED
from ...hooks import EngineMismatch, Hook, Hooks
from ...text import cut_id
from ..connector_metadata import reader_of
from ..step_log import StepLog
from .block_tables import NULL_BLOCK, Hit, Tables
from .layout import Layout, read_layout
from .options import ContentOptions
from .seals import Seals
from .transfer_fingerprints import CustodyWatch

if TYPE_CHECKING:
    from .sketches import SketchWatch

RUNNER: tuple[Hook, ...] = (
    Hook("", "execute_model", (), before="step_begins", after="executed"),
    Hook("", "sample_tokens", (), after="sampled", optional=True),
    Hook("", "initialize_kv_cache", (), after="reinitialized", optional=True),
)
WORKER: tuple[Hook, ...] = (Hook("", "sleep", (), before="contents_lost", optional=True),)
CONNECTOR: tuple[Hook, ...] = (
    Hook("", "get_block_ids_with_load_errors", (), after="load_errors", optional=True),
)

SCRUB_LOOKS = 64
"""The most block ids that one step looks at in search of blocks to scrub."""

COUNTED_STEPS = 256
"""Every so many steps the counts are emitted."""

Failed = Callable[[str, Exception, bool], None]


class _Check(NamedTuple):
    """What a comparison was for: hits of requests if there are ``request_ids``, else a scrub."""

    step: int
    request_ids: list[str]
    rows: list[int]


class RunnerWatch:
    """Observes one live model runner. ``worker`` is vLLM's worker, if it is at hand.

    ``step_of`` gives the step of a ``SchedulerOutput``; by default the steps are counted from 1.
    ``seen_from_start``: the runner has executed no step yet. Raises :class:`UnknownLayout`.
    """

    def __init__(
        self,
        runner: Any,
        log: StepLog,
        failed: Failed,
        *,
        rank: int = 0,
        worker: Any = None,
        connector: Any = None,
        step_of: Callable[[Any], int] | None = None,
        seen_from_start: bool = False,
        options: ContentOptions | None = None,
    ) -> None:
        self.runner, self.log, self.rank = runner, log, rank
        """vLLM's model runner; receives the events; the worker's number."""
        self.options = options or ContentOptions()
        """What is checked, and how often."""
        self.step = 0
        """The present step of the worker."""
        self.layout: Layout = read_layout(runner)
        """Where each block lies."""
        self._failed = failed
        self._step_of = step_of or (lambda _: self.step + 1)
        self._key = self.options.key or secrets.randbits(63)
        """The key of the fingerprints, for this run only."""
        self.seals: Seals[_Check] = Seals(self.layout, self._key, seen_from_start=seen_from_start)
        """The seals of the blocks."""
        self._tables = self._new_tables()
        self._random = random.Random(self._key)
        """Chooses the hit blocks that are verified, where a share is."""
        self._final: dict[int, list[int]] = {}
        """By group: blocks to seal after the present step."""
        self._first_read: dict[int, list[int]] = {}
        """By group: blocks without a seal that this step reads as hits; they are sealed after it."""
        self._written: set[int] = set()
        """Blocks that the present step writes."""
        self._copied: list[tuple[int, int]] = []
        self._failed_blocks: set[int] = set()
        """Blocks that the connector reported as not loaded in the present step."""
        self._in_step = False
        """A step has begun and its blocks are not sealed yet."""
        self._scrub_at, self._scrub_credit = 0, 0
        """The block to look at next, and the bytes that may be scrubbed."""
        self._counts = [0, 0, 0, 0, 0]
        """Sealed, verified and scrubbed blocks, bytes and nanoseconds since the last ContentCounted."""
        self._sketches = self._new_sketches()
        """Takes sketches of computed blocks; None: nobody asked for them."""
        self._reader = reader_of(connector) if connector is not None else None
        self._custody: CustodyWatch | None = None
        if connector is not None:
            with contextlib.suppress(EngineMismatch):
                self._custody = CustodyWatch(self, connector, self._key, failed)
        self._hooks = [Hooks(RUNNER, runner, self, failed)]
        for table, host in ((WORKER, worker), (CONNECTOR, connector)):
            if host is not None:
                with contextlib.suppress(EngineMismatch):
                    self._hooks.append(Hooks(table, host, self, failed))

    def drop(self) -> None:
        """Restore the runner and the connector."""
        if self._custody is not None:
            self._custody.remove()
        for hooks in self._hooks:
            hooks.remove()

    def remove(self) -> None:
        """Emit what is known and restore the runner."""
        self.drop()
        self._emit_results(wait=True)
        self.emit_counts()

    def began(self) -> ev.ContentWatched:
        """How a segment of the journal introduces this watch."""
        groups = [
            number
            for group in self.layout.groups.values()
            for number in (group.group, group.block_tokens, len(group.layers), group.block_bytes)
        ]
        return ev.ContentWatched(
            self.log.now(),
            self.step,
            self.rank,
            self.layout.blocks,
            groups,
            self.seals.key_name,
            self.options.share,
            self.layout.sentences(),
            [group.description for group in self.layout.groups.values()],
            "" if self._sketches is None else self._sketches.sentence,
        )

    def final_blocks(self, request_id: str, group: int) -> tuple[object, list[int]] | None:
        """See :meth:`Tables.final_blocks`."""
        return self._tables.final_blocks(request_id, group)

    def _new_tables(self) -> Tables:
        scheduler = self.runner.vllm_config.scheduler_config
        sizes = {number: group.block_tokens for number, group in self.layout.groups.items()}
        states = {number for number, group in self.layout.groups.items() if group.of_states}
        return Tables(sizes, states, asynchronous=bool(getattr(scheduler, "async_scheduling", False)))

    def _new_sketches(self) -> SketchWatch | None:
        if not self.options.sketch:
            return None
        from .sketches import SketchWatch

        return SketchWatch(self.layout, self._key, self.seals.key_name, self.log, self.rank)

    # --- a step -------------------------------------------------------------------------------------

    def step_begins(self, scheduler_output: Any, *_: Any, **__: Any) -> None:
        """``execute_model`` is called: verify the hits and take the seals from what will be written."""
        began = time.perf_counter_ns()
        if self._in_step:
            self._seal_step()
        self.step = self._step_of(scheduler_output)
        self._emit_results()
        plan = self._tables.step(scheduler_output)
        for group, blocks in plan.settled.items():
            self._seal(group, blocks, self.step - 1)
            if self._sketches is not None:
                self._sketches.take(group, set(blocks) - plan.unaccepted, self.step - 1)
        self.seals.void(plan.unseen, ev.UNSEEN)
        self.seals.void(plan.written)
        self.seals.void(target for _, target in plan.copied)
        self._written, self._final, self._copied = plan.written, plan.final, plan.copied
        self._failed_blocks = set()
        self._first_read = {}
        if plan.hits:
            self._verify(plan.hits)
        loading = self._loading(scheduler_output)
        if loading:
            self._expect(loading, plan.hits)
        self._in_step = True
        self._counts[4] += time.perf_counter_ns() - began

    def executed(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``execute_model`` returned. Without a result, ``sample_tokens`` completes the step."""
        if result is not None or not hasattr(self.runner, "sample_tokens"):
            self._seal_timed()

    def sampled(self, *_: Any, **__: Any) -> None:
        """``sample_tokens`` returned."""
        if self._in_step:
            self._seal_timed()

    def load_errors(self, _: None, result: Any, *__: Any, **___: Any) -> None:
        """``get_block_ids_with_load_errors`` returned."""
        self._failed_blocks.update(result or ())

    def contents_lost(self, *_: Any, **__: Any) -> None:
        """``sleep`` is called: the KV caches lose their contents."""
        self.seals.void_all()

    def reinitialized(self, *_: Any, **__: Any) -> None:
        """``initialize_kv_cache`` returned: there are new KV caches."""
        self.layout = read_layout(self.runner)
        self.seals = Seals(self.layout, self._key, seen_from_start=True)
        self._tables = self._new_tables()
        self._sketches = self._new_sketches()
        self._in_step = False
        self.log.emit(self.began())

    def _loading(self, output: Any) -> set[int]:
        """The blocks that the connector's metadata orders to be loaded, as far as it can be read."""
        metadata = getattr(output, "kv_connector_metadata", None)
        if metadata is None or self._reader is None:
            return set()
        sizes = [group.block_tokens for group in self.layout.groups.values()]
        return set(self._reader.filled(metadata, min(sizes)))

    def _expect(self, loading: set[int], hits: list[Hit]) -> None:
        """Loads are ordered into blocks, which lose their seals. Those that the step reads get new ones.

        A connector may also load into blocks that were hits.
        """
        self.seals.void(loading)
        for hit in hits:
            read = self._first_read.setdefault(hit.group, [])
            read += [block for block in hit.blocks if block in loading and block not in self._written]

    # --- hits ---------------------------------------------------------------------------------------

    def _verify(self, hits: list[Hit]) -> None:
        """Compare the sealed blocks among the hits, and remember the others to be sealed after the step."""
        by_group: dict[int, tuple[_Check, list[int]]] = {}
        for hit in hits:
            check, sealed = by_group.setdefault(hit.group, (_Check(self.step, [], []), []))
            check.rows.extend((len(check.request_ids), hit.group, hit.first, len(hit.blocks)))
            check.request_ids.append(cut_id(hit.request_id))
            for block in hit.blocks:
                code = self._code(hit.group, block)
                check.rows.extend((block, code))
                if code > 0:
                    sealed.append(block)
                elif code not in (SAME_STEP, UNSAMPLED) and block != NULL_BLOCK:
                    self._first_read.setdefault(hit.group, []).append(block)
        for group, (check, sealed) in by_group.items():
            self._count(1, group, len(sealed))
            self.seals.compare(group, sealed, check, renew=True)
        self._emit_results()

    def _code(self, group: int, block: int) -> int:
        """The step after which a hit block was sealed, or why it is not verified."""
        if block == NULL_BLOCK:
            return ev.UNSEEN
        if block in self._written:
            return SAME_STEP
        step = self.seals.steps[block]
        if step > 0 and self.seals.group_of[block] != group:  # another group has given up the block
            return ev.UNFILLED
        if step > 0 and self.options.share < 1 and self._random.random() >= self.options.share:
            return UNSAMPLED
        return step

    def _emit_results(self, *, wait: bool = False) -> None:
        """Emit the comparisons and sketches whose results have arrived."""
        if self._sketches is not None:
            self._sketches.emit(wait=wait)
        for check, differing in self.seals.results(wait=wait):
            if check.request_ids:
                self._emit_hits(check, set(differing))
            else:
                self._emit_scrub(check, set(differing))

    def _emit_hits(self, check: _Check, differing: set[int]) -> None:
        """Emit verified hits. What differs may have been loaded before, or be loaded by this step only."""
        steps, intact = self.seals.steps, self.seals.intact
        differed: list[int] = []
        for block, sealed in hit_blocks(check.rows):
            if block in differing:
                differing.remove(block)
                differed += (block, intact[block])
                if steps[block] == sealed:
                    steps[block] = check.step - 1  # the present bytes were sealed before this step
                if check.step == self.step and not self._in_step:
                    self._first_read.setdefault(check.rows[1], []).append(block)
            elif steps[block] == sealed:
                intact[block] = check.step
        now = self.log.now()
        self.log.emit(ev.HitsVerified(now, check.step, self.rank, check.request_ids, check.rows, differed))

    def _emit_scrub(self, check: _Check, differing: set[int]) -> None:
        rows, seals = check.rows, self.seals
        found: list[int] = []
        for index in range(0, len(rows), 3):
            group, block, sealed = rows[index : index + 3]
            if block in differing:
                found += (group, block, sealed, seals.intact[block])
                seals.mismatched(block, sealed)
            elif seals.steps[block] == sealed:
                seals.intact[block] = check.step
        if found:
            self.log.emit(ev.ScrubDiffered(self.log.now(), check.step, self.rank, found))

    # --- the end of a step --------------------------------------------------------------------------

    def _seal_timed(self) -> None:
        began = time.perf_counter_ns()
        self._seal_step()
        self._counts[4] += time.perf_counter_ns() - began
        if self.step % COUNTED_STEPS == 0:
            self.emit_counts()

    def _seal_step(self) -> None:
        """Seal what the step filled and what it was the first to read, and scrub."""
        self._in_step = False
        for group, blocks in self._final.items():
            self._seal(group, blocks, self.step)
        if self._sketches is not None:
            self._take_sketches(self._sketches)
        for group, blocks in self._first_read.items():
            filled = [block for block in dict.fromkeys(blocks) if block not in self._failed_blocks]
            self._seal(group, filled, self.step)
        for source, target in self._copied:
            if target not in self._written:
                group = self.seals.group_of[source]
                self._seal(group if group >= 0 else min(self.layout.groups), [target], self.step)
        self._final, self._first_read, self._copied = {}, {}, []
        if self._failed_blocks:
            self.seals.void(self._failed_blocks)
        self._scrub()

    def _take_sketches(self, sketches: SketchWatch) -> None:
        """Take the sketches of the blocks that the step computed, unless a load failed."""
        if self._failed_blocks:
            sketches.load_failed(self.step)
        for group, blocks in self._final.items():
            sketches.take(group, blocks, self.step)
        sketches.emit()

    def _seal(self, group: int, blocks: list[int], step: int) -> None:
        self.seals.seal(group, blocks, step)
        self._count(0, group, len(blocks))

    def _count(self, what: int, group: int, blocks: int) -> None:
        self._counts[what] += blocks
        self._counts[3] += blocks * self.layout.groups[group].block_bytes

    def _scrub(self) -> None:
        """Compare some blocks at rest with their seals."""
        seals, groups = self.seals, self.layout.groups
        largest = max(group.block_bytes for group in groups.values())
        self._scrub_credit = min(
            self._scrub_credit + self.options.scrub_bytes, largest + self.options.scrub_bytes
        )
        chosen: dict[int, list[int]] = {}
        for _ in range(min(SCRUB_LOOKS, self.layout.blocks)):
            block = self._scrub_at
            group = seals.group_of[block]
            if seals.steps[block] > 0 and block not in self._written:
                if groups[group].block_bytes > self._scrub_credit:
                    break
                self._scrub_credit -= groups[group].block_bytes
                chosen.setdefault(group, []).append(block)
            self._scrub_at = (block + 1) % self.layout.blocks
        for group, blocks in chosen.items():
            rows = [number for block in blocks for number in (group, block, seals.steps[block])]
            seals.compare(group, blocks, _Check(self.step, [], rows), renew=False)
            self._count(2, group, len(blocks))

    def emit_counts(self) -> None:
        """Emit what was sealed, verified and scrubbed since the last time."""
        sealed, verified, scrubbed, size, nanoseconds = self._counts
        if sealed or verified or scrubbed:
            self._counts = [0, 0, 0, 0, 0]
            now = self.log.now()
            self.log.emit(
                ev.ContentCounted(
                    now, self.step, self.rank, sealed, verified, scrubbed, size, nanoseconds // 1000
                )
            )


def hit_blocks(rows: list[int]) -> Iterator[tuple[int, int]]:
    """The blocks of ``HitsVerified.rows``, each with the step of its seal or its code."""
    index = 0
    while index < len(rows):
        count = rows[index + 3]
        index += 4
        for _ in range(count):
            yield rows[index], rows[index + 1]
            index += 2
