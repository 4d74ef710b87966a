"""Block traces of files: of journals of level ``blocks``, and of request traces of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from ..analysis.block_trace import (
    ADMIT,
    CACHED,
    GROW,
    RELEASE,
    BlockTrace,
    Change,
    RecordedRequest,
    TraceBuilder,
    TraceLife,
)
from ..analysis.prefixes import Prefix, PrefixTrie
from ..analysis.step_model import fit
from ..analysis.step_times import STEP_HANDLERS, StepTimes
from ..analysis.trace_reader import TraceReader
from ..analysis.turns import Turn, TurnReader
from ..events import Event
from ..journal.host_folders import engine_name
from ..journal.reader import Position, Reader
from ..ledger.blocks.contents import Contents
from ..text import printable
from .request_traces import traced_requests
from .windows import EVERYTHING, Window, last_start

# --- block traces --------------------------------------------------------------------------------------
#
# Block traces of files: of journals of level ``blocks``, and of request traces (:mod:`.request_traces`).
#
# A request trace says nothing of the time that a request runs, so each request is released before the next
# one is admitted.


class RecordedBlocks:
    """What an engine did with blocks: changes, the requests, and the reader behind them."""

    def __init__(
        self,
        path: Path,
        reader: TraceReader | None = None,
        contents: Contents | None = None,
        position: Position | None = None,
        requests: Sequence[RecordedRequest] = (),
        steps: StepTimes | None = None,
    ) -> None:
        self.path = path
        """The journal, for messages."""
        self.reader = reader or TraceReader()
        """The reader, which has read the journal up to ``position`` and goes on in :meth:`read`."""
        self._contents = contents or Contents()
        """What the blocks contain at ``position``."""
        self.requests = list(requests)
        """The requests; those that are open at the end come last."""
        self.steps = steps
        """How long steps took, up to ``position``; None: it is not wanted, or there are no steps."""
        self._position = position
        """Where the journal is read on; None: from its beginning."""
        self._new: list[Sequence[Change]] = []
        """The changes that were read from the journal."""

    def kept(self) -> Iterable[Sequence[Change]]:
        """The changes before ``position``."""
        return ()

    def read(self, *, groups: bool = True) -> None:
        """Read the journal to its end; ``groups``: also that of an engine with several KV cache groups."""
        with Reader(self.path, self._position) as journal:
            for batch in journal.poll():
                self.feed(batch.events)
                if self.reader.stopped or (self.reader.problem and not groups):
                    break

    def feed(self, events: Iterable[Event]) -> None:
        """Read events, in the journal's order."""
        steps = self.steps
        for event in events:
            self.reader.feed(event, self._contents.read(event))
            if steps is not None and (handle := STEP_HANDLERS.get(type(event))) is not None:
                handle(steps, event)
        changes, ended = self.reader.taken()
        self._new.append(changes)
        self.requests += ended

    @property
    def engine(self) -> str:
        """The engine's name."""
        started = self.reader.started
        return printable(self.path.name) if started is None else engine_name(started, self.path)

    def described(self, *, groups: bool = False) -> BlockTrace:
        """The engine without operations; ``groups`` as in :class:`TraceReader`. Raises NoBlockTrace."""
        return self.reader.described(str(self.path), self.engine, groups=groups)

    def whole(self) -> list[RecordedRequest]:
        """All requests, also those that are open."""
        return [*self.requests, *self.reader.requests.values()]

    def emptied(self) -> Iterator[Sequence[Change]]:
        """All changes, in order and for the last time: each part leaves the memory once it is read."""
        yield from self.kept()
        new, self._new = deque(self._new), []
        while new:
            yield new.popleft()


def block_trace(recorded: RecordedBlocks, window: Window = EVERYTHING) -> BlockTrace:
    """The block trace of an engine. Raises LedgerError if it has none.

    Everything is replayed; hits are counted only of requests that were admitted in the ``window``.
    """
    described, builder = recorded.described(), TraceBuilder()
    for some in recorded.emptied():
        builder.add(some)
    trace = builder.trace(described, recorded.whole())
    if window.bounded:
        newest = last_start(recorded.path)
        began = trace.began_seconds if newest is None else newest.began_seconds
        for life in trace.lives:
            life.counted = window.holds(began + life.at / 1e6)
    return trace


def block_prefixes(recorded: RecordedBlocks) -> tuple[list[Prefix], list[str]]:
    """The prefixes of the requests, and what they may lack. Raises LedgerError as :func:`block_turns`.

    In an engine with several groups, they are those of the first group of full attention.
    """
    described, builder, trie = recorded.described(groups=True), TraceBuilder(), PrefixTrie()
    for some in recorded.emptied():
        builder.add(some)
        trie.add(some)
    trace = builder.trace(described, recorded.whole())
    others = recorded.reader.others
    limited = [f"a hit also needs {len(others)} other KV cache groups at its end"] if others else []
    return list(trie.prefixes(trace, builder.first)), [*trace.doubts, *limited]


def block_turns(recorded: RecordedBlocks) -> tuple[list[Turn], list[str]]:
    """The turns of the requests that have ended, and what they may lack.

    Raises LedgerError if the engine has no block trace, and no groups that a :class:`TraceReader` can read.
    """
    if recorded.reader.stopped or not recorded.reader.block_tokens:
        recorded.described()
    reader = TurnReader()
    changes = chain.from_iterable(recorded.emptied())
    requests = recorded.requests
    found = list(
        reader.read(recorded.reader, changes, requests, (recorded.engine, printable(recorded.path.name)))
    )
    doubts = recorded.reader.doubts
    if reader.forgotten:
        doubts.append(f"{reader.forgotten:,} sessions were forgotten, so later turns count as their first")
    if recorded.steps is not None:
        model = fit(recorded.steps.sums.sample)
        found = priced(found, model.prefill_seconds)
        if model.prefill_seconds is None:
            why = model.refused or "the time of a prefill token can't be told from that of the rest of a step"
            doubts.append(f"the seconds of lost tokens are unknown: {why}")
    return found, doubts


def priced(turns: Iterable[Turn], prefill_seconds: float | None) -> list[Turn]:
    """The turns of an engine that takes so many seconds for a prefill token; None: not known."""
    return [msgspec.structs.replace(turn, prefill_seconds=prefill_seconds) for turn in turns]


def request_trace(path: Path, block_tokens: int = 0) -> RecordedBlocks:
    """What the requests of a request trace do. ``block_tokens``: if its lines do not say it; 0: 512."""
    recorded = RecordedBlocks(path)
    reader = recorded.reader
    for life, line in enumerate(traced_requests(path, block_tokens)):
        reader.block_tokens = size = line.block_tokens
        blocks = len(line.hashes)
        # The format counts a hit on the last block, too.
        lives = {life: TraceLife(sequence_tokens=blocks * size + 1, computed_tokens=line.prompt)}
        request = RecordedRequest(life, life, str(life + 1), line.prompt, lives=lives)
        request.added_at = request.closed_at = line.at or 0
        request.session = line.session
        recorded.requests.append(request)
        reader.changes += [(ADMIT, life, 0, (), 0), (GROW, life, blocks, (), 0)]
        reader.changes += [(CACHED, life, 0, line.hashes, 0), (RELEASE, life, 0, (), 0)]
    recorded.feed(())
    return recorded
