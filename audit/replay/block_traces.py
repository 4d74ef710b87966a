"""Block traces of files: of journals of level ``blocks``, and of request traces in the Mooncake format.

The Mooncake format is one JSON object a line, one line a request, with ``hash_ids`` (one id for each block of
the prompt, the last of which may be partly filled), ``input_length`` in tokens, and optionally
``block_size``. A line says nothing of the time that a request runs, so each request is released before the
next one is admitted.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from ..analysis.block_trace import (
    ADMIT,
    CACHED,
    GROW,
    RELEASE,
    BlockTrace,
    TraceLife,
    TraceReader,
    TraceRequest,
)
from ..analysis.prefixes import Prefix, PrefixTrie
from ..analysis.trace_sample import Sample, take_sample, whole_part
from ..errors import LedgerError
from ..journal.hosts import engine_name
from ..journal.reader import Reader
from ..text import printable
from .find import journals_at
from .kept_files import left_behind
from .kept_traces import SUFFIX, LoadedTrace, kept_trace, until
from .windows import EVERYTHING, Window

SUFFIXES = (".jsonl", ".jsonl.gz")
"""How the name of a request trace ends."""

BLOCK_TOKENS = 512
"""Tokens of a block in the published traces, whose lines do not say it."""

Positive = Annotated[int, msgspec.Meta(gt=0, le=1 << 40)]


class _Line(msgspec.Struct):
    """One request."""

    hash_ids: list[int | str]
    input_length: Positive
    block_size: Positive | None = None


def is_request_trace(path: Path) -> bool:
    """Whether a file is a request trace, by its name."""
    return path.name.endswith(SUFFIXES)


def traces_at(paths: Sequence[Path], window: Window = EVERYTHING) -> list[Path]:
    """Every journal at ``paths``, and the kept traces of journals that are gone, if they reach the window.

    Raises LedgerError if there is none.
    """
    kept = [
        kept
        for path in paths
        if path.is_dir()
        for kept in left_behind(path, SUFFIX)
        if window.since is None or until(kept) >= window.since
    ]
    try:
        return [*journals_at(paths), *kept]
    except LedgerError:
        if not kept or len(paths) > 1:
            raise
        return kept


def journal_trace(path: Path, window: Window = EVERYTHING) -> BlockTrace:
    """The block trace of a journal, or a kept one. Raises LedgerError if the journal has none.

    Everything is replayed; hits are counted only of requests that were admitted in the ``window``.
    """
    return sampled_trace(path, window, None)[0]


def sampled_trace(path: Path, window: Window, share: float | None) -> tuple[BlockTrace, Sample | None]:
    """The same, or a sample of this ``share`` of the blocks, with the trace but its operations."""
    trace, sample, began_seconds = kept_trace(path, share) or _journal_trace(path, share)
    if window.bounded:
        for life in trace.lives:
            life.counted = window.holds(began_seconds + life.at / 1e6)
    return trace, sample


def _journal_trace(path: Path, share: float | None) -> LoadedTrace:
    reader = TraceReader(str(path), partial(engine_name, path=path))
    _read(path, reader)
    trace = reader.finish()
    if share is None:
        return LoadedTrace(trace, None, reader.began_seconds)
    return LoadedTrace(*take_sample(trace, [whole_part(trace)], share), reader.began_seconds)


def journal_prefixes(path: Path) -> list[Prefix]:
    """The prefixes of a journal's requests. Raises LedgerError if the journal has no block events."""
    reader = TraceReader(str(path), partial(engine_name, path=path))
    trie = reader.listener = PrefixTrie(reader.trace)
    _read(path, reader)
    reader.finish()
    return list(trie.prefixes())


def _read(path: Path, reader: TraceReader) -> None:
    with Reader(path) as journal:
        for batch in journal.poll():
            for event in batch.events:
                reader.feed(event)


def request_trace(path: Path, block_tokens: int = 0) -> BlockTrace:
    """The block trace of a request trace. ``block_tokens``: if its lines do not say it; 0: 512."""
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as lines:
            return _requests(path, lines, block_tokens or BLOCK_TOKENS)
    except (OSError, EOFError) as error:
        raise LedgerError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}.") from error


def _requests(path: Path, lines: Iterable[bytes], block_tokens: int) -> BlockTrace:
    decode = msgspec.json.Decoder(_Line).decode
    trace = BlockTrace(engine=printable(path.name))
    ids: dict[int | str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LedgerError(f"{path} line {number} is no request of a trace: {error}.") from None
        size = line.block_size or block_tokens
        if trace.block_tokens not in (0, size):
            raise LedgerError(f"{path} line {number} has blocks of another size than the lines before.")
        trace.block_tokens = size
        hashes = [ids.setdefault(hash_id, len(ids) + 1) for hash_id in line.hash_ids]
        _add_request(trace, TraceRequest(str(number), line.input_length, hashes))
    if not trace.requests:
        raise LedgerError(f"{path} holds no request.")
    return trace


def _add_request(trace: BlockTrace, request: TraceRequest) -> None:
    life, blocks = len(trace.lives), len(request.hashes)
    # The format counts a hit on the last block, too.
    trace.lives.append(TraceLife(len(trace.requests), blocks * trace.block_tokens + 1))
    trace.requests.append(request)
    trace.operations += [(ADMIT, life, 0, 0), (GROW, life, blocks, 0)]
    trace.operations += [(CACHED, life, index, hash_id) for index, hash_id in enumerate(request.hashes)]
    trace.operations.append((RELEASE, life, 0, 0))
