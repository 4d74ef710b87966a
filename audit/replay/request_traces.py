"""Request traces of others: one request a line, with an id for each block of its prompt.

:data:`FORMATS` has a row for each kind of file. A trace that has lengths only can't tell which prompts share
KV, and a log of a server tells neither; both are refused in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from ..errors import LedgerError
from ..foreign import Unreadable, lines_of, parsed

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
