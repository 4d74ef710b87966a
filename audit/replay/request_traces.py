"""Request traces of others: one request a line, with an id for each block of its prompt.

:data:`FORMATS` has a row for each kind of file. A trace that has lengths only can't tell which prompts share
KV, and a log of a server tells neither; both are refused in a sentence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from ..analysis.prefixes import Prefix, PrefixTrie
from ..analysis.step_model import fit
from ..analysis.step_times import STEP_HANDLERS, StepTimes
from ..analysis.trace_reader import (
    ADMIT,
    CACHED,
    GROW,
    RELEASE,
    BlockTrace,
    Change,
    RecordedRequest,
    TraceBuilder,
    TraceLife,
    TraceReader,
)
from ..analysis.turns import Turn, TurnReader
from ..errors import LedgerError
from ..events import Event
from ..foreign import Unreadable, lines_of, parsed
from ..journal.host_folders import engine_name
from ..journal.reader import Position, Reader
from ..ledger.blocks.contents import Contents
from ..text import printable
from .followed_audit import FollowedAudit
from .metrics_state import PRODUCER, WaitingPrompt
from .windows import EVERYTHING, Window, last_start

SUFFIXES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".log")
"""How the name of a file of others ends."""

BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's published traces, whose lines do not say it."""

_Positive = Annotated[int, msgspec.Meta(gt=0, le=1 << 40)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class TracedRequest(NamedTuple):
    """One request. ``hashes``: an id from 1 up for each block of the prompt, equal for equal contents.

    ``outputs``: output tokens; None: the trace does not say it. ``at``: microseconds; None: the same.
    ``session``: the conversation that it is a turn of; empty: not said.
    """

    hashes: list[int]
    prompt: int
    outputs: int | None
    block_tokens: int
    at: int | None
    session: str = ""


class _Read(NamedTuple):
    """One line: block ids, prompt and output tokens, block size, times in milliseconds, session."""

    ids: list[int | str]
    prompt: int
    outputs: int | None
    block_tokens: int | None
    at: float | None
    session: str = ""
    after: float | None = None
    """Since the last turn of its session, where ``at`` is not said."""


class _Mooncake(msgspec.Struct):
    hash_ids: list[int | str]
    input_length: _Positive
    output_length: _Count | None = None
    block_size: _Positive | None = None
    timestamp: _Milliseconds | None = None
    session_id: str | int | None = None
    delay_ms: _Milliseconds | None = None
    delay: _Milliseconds | None = None


class _Replay(msgspec.Struct):
    trace_block_size: _Positive
    input_length: _Positive
    input_sequence_hashes: list[int | str]


class _Request(msgspec.Struct):
    replay: _Replay
    output_tokens: _Count | None = None
    request_received_ms: _Milliseconds | None = None


class _Agent(msgspec.Struct):
    session_id: str | int | None = None


class _Dynamo(msgspec.Struct):
    event_type: str = "request_end"
    request: _Request | None = None
    agent_context: _Agent | None = None


def _of_mooncake(line: _Mooncake) -> _Read:
    after = line.delay if line.delay_ms is None else line.delay_ms
    session = "" if line.session_id is None else str(line.session_id)
    sizes = line.input_length, line.output_length, line.block_size
    return _Read(line.hash_ids, *sizes, line.timestamp, session, after)


def _of_dynamo(line: _Dynamo) -> _Read | None:
    request = line.request
    if request is None:
        if line.event_type == "request_end":
            raise Unreadable("is not as it should be: Object missing required field `request`")
        return None
    replay = request.replay
    session = line.agent_context.session_id if line.agent_context is not None else None
    return _Read(
        replay.input_sequence_hashes,
        replay.input_length,
        request.output_tokens,
        replay.trace_block_size,
        request.request_received_ms,
        "" if session is None else str(session),
    )


_Line = TypeVar("_Line")


class Format(NamedTuple):
    """A kind of file that is read: its name, a word that its first line has, and how a line is decoded.

    ``read`` gives None for a line that tells of no request, as those of Dynamo's tools.
    """

    name: str
    mark: bytes
    read: Callable[[bytes], _Read | None]


def _reader(kind: type[_Line], of: Callable[[_Line], _Read | None]) -> Callable[[bytes], _Read | None]:
    return lambda text: of(parsed(text, kind))


FORMATS = (
    Format("Dynamo's request trace (dynamo.request.trace.v1)", b'"replay"', _reader(_Dynamo, _of_dynamo)),
    Format("Mooncake's request trace", b'"hash_ids"', _reader(_Mooncake, _of_mooncake)),
)
"""The first whose mark is in the first line is the format of the file. Sources: the traces that
https://github.com/kvcache-ai/Mooncake publishes (sessions and delays as AIPerf and Dynamo write them), and
Dynamo's frontend with request tracing."""

READ = " and ".join(each.name for each in FORMATS)

LENGTHS = (b"ContextTokens", b"Request tokens", b"num_prefill_tokens", b"input_tokens")
"""Words in the first line of traces that have lengths only: those of Azure, BurstGPT and Vidur."""


def is_request_trace(path: Path) -> bool:
    """Whether a file is a request trace, by its name."""
    return path.name.endswith(SUFFIXES)


def traced_requests(path: Path, block_tokens: int = 0) -> list[TracedRequest]:
    """The requests of a trace, at least one, by their times if all have one; else as they are written.

    ``block_tokens``: if its lines do not say it; 0: 512. Raises LedgerError.
    """
    found = list(_parsed(path, block_tokens or BLOCK_TOKENS))
    if not found:
        raise LedgerError(f"{path} holds no request.")
    if all(each.at is not None for each in found):
        found.sort(key=lambda each: each.at or 0)
    return found


def _parsed(path: Path, block_tokens: int) -> Iterator[TracedRequest]:
    ids, before = dict[int | str, int](), 0
    ends: dict[str, float] = {}
    form: Format | None = None
    for number, text in lines_of(path):
        form = form or _format(path, text)
        try:
            line = form.read(text)
        except Unreadable as error:
            raise LedgerError(f"{path} line {number} is no request of a trace: it {error}.") from None
        if line is None:
            continue
        size = line.block_tokens or block_tokens
        if before not in (0, size):
            raise LedgerError(f"{path} line {number} has blocks of another size than the lines before.")
        before = size
        at = line.at
        if at is None and line.after is not None and line.session in ends:
            at = ends[line.session] + line.after  # at the earliest: how long that turn took is not said
        if at is not None and line.session:
            ends[line.session] = at
        hashes = [ids.setdefault(each, len(ids) + 1) for each in line.ids]
        when = None if at is None else round(1000 * at)
        yield TracedRequest(hashes, line.prompt, line.outputs, size, when, line.session)


def _format(path: Path, text: bytes) -> Format:
    """The format of a file whose first line this is. Raises LedgerError."""
    for each in FORMATS:
        if each.mark in text:
            return each
    if any(word in text for word in LENGTHS):
        raise LedgerError(
            f"{path} has lengths of prompts only, so nothing tells which of them share KV. {READ} tell it."
        )
    raise LedgerError(f"{path} is no request trace: {READ} are read.")


# --- block traces --------------------------------------------------------------------------------------
#
# Block traces of files: of journals of level ``blocks``, and of request traces of others.
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


# --- Pair the prompts of prefill and decode engines that share a store, while the engines run.
#
# :mod:`kvledger.audit.analysis.calls` pairs the requests of whole journals by the same rule.

BEFORE_SECONDS = 120.0
"""A prompt reaches its decode engine at most so long after its prefill engine."""

HORIZON_SECONDS = 15.0
"""How late a journal may be read, and how far the clocks of two hosts may differ."""


def pair(audits: Sequence[FollowedAudit], now: float) -> None:
    """Decide for the waiting requests of all engines, as far as it is certain at Unix time ``now``."""
    for audit in audits:
        shared = audit.metrics.shared
        if not shared.waiting and not shared.unknown:
            continue
        producers = [one for one in audits if one.metrics.kv_role == PRODUCER and one.model == audit.model]
        for prompt in shared.unknown:
            audit.metrics.share("unknown", prompt.tokens)
        kept = [prompt for prompt in shared.waiting if not _decided(audit, prompt, producers, now)]
        shared.changes += len(shared.waiting) - len(kept) + len(shared.unknown)
        shared.waiting, shared.unknown = kept, []


def _decided(
    audit: FollowedAudit, prompt: WaitingPrompt, producers: Sequence[FollowedAudit], now: float
) -> bool:
    """Count a prompt under its role, if it can be decided; one that no prefill engine had is not shared."""
    if any(one.metrics.shared.take(prompt.key) for one in producers):
        audit.metrics.share("consumer", prompt.tokens)
        return True
    there = [one for one in producers if not _gone_before(one, prompt.arrived - BEFORE_SECONDS)]
    early = now < prompt.closed + HORIZON_SECONDS
    if early and not (producers and all(_read_to(one) > prompt.arrived for one in there)):
        return False
    if not producers or not all(_knows(one, prompt.arrived) for one in there):
        audit.metrics.share("unknown", prompt.tokens)
    return True


def _gone(producer: FollowedAudit) -> bool:
    return producer.auditor.ledger.stopped is not None or producer.journal.lost_tails > 0


def _gone_before(producer: FollowedAudit, seconds: float) -> bool:
    return _gone(producer) and producer.auditor.ledger.read_to < seconds


def _read_to(producer: FollowedAudit) -> float:
    """The Unix time up to which the requests of a prefill engine are known, by the clock of any host."""
    return math.inf if _gone(producer) else producer.auditor.ledger.read_to - HORIZON_SECONDS


def _knows(producer: FollowedAudit, arrived: float) -> bool:
    """Whether all requests are known that a prefill engine got shortly before this Unix time."""
    since = producer.metrics.shared.since
    lost = producer.auditor.ledger.sums.hook_failures or producer.journal.lost_tails
    return not lost and (not since or since <= arrived - BEFORE_SECONDS)
