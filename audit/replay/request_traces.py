"""Request traces in the Mooncake format: one JSON object a line, one line a request.

A line has ``hash_ids`` (one id for each block of the prompt, the last of which may be partly filled),
``input_length`` in tokens, and optionally ``output_length`` in tokens, ``timestamp`` in milliseconds and
``block_size``.
Source: the traces that https://github.com/kvcache-ai/Mooncake publishes.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from ..errors import LedgerError

SUFFIXES = (".jsonl", ".jsonl.gz")
"""How the name of a request trace ends."""

BLOCK_TOKENS = 512
"""Tokens of a block in the published traces, whose lines do not say it."""

Positive = Annotated[int, msgspec.Meta(gt=0, le=1 << 40)]


class _Line(msgspec.Struct):
    """One request as it is written."""

    hash_ids: list[int | str]
    input_length: Positive
    output_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None = None
    block_size: Positive | None = None
    timestamp: float | None = None


class TracedRequest(NamedTuple):
    """One request. ``hashes``: an id from 1 up for each block of the prompt, equal for equal contents.

    ``outputs``: output tokens; None: the trace does not say it. ``at``: microseconds; None: the same.
    """

    hashes: list[int]
    prompt: int
    outputs: int | None
    block_tokens: int
    at: int | None


def is_request_trace(path: Path) -> bool:
    """Whether a file is a request trace, by its name."""
    return path.name.endswith(SUFFIXES)


def traced_requests(path: Path, block_tokens: int = 0) -> list[TracedRequest]:
    """The requests of a trace, at least one. ``block_tokens``: if its lines do not say it; 0: 512.

    Raises LedgerError.
    """
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as lines:
            found = list(_parsed(path, lines, block_tokens or BLOCK_TOKENS))
    except (OSError, EOFError) as error:
        raise LedgerError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}.") from error
    if not found:
        raise LedgerError(f"{path} holds no request.")
    return found


def _parsed(path: Path, lines: Iterable[bytes], block_tokens: int) -> Iterator[TracedRequest]:
    decode, ids, before = msgspec.json.Decoder(_Line).decode, dict[int | str, int](), 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LedgerError(f"{path} line {number} is no request of a trace: {error}.") from None
        size = line.block_size or block_tokens
        if before not in (0, size):
            raise LedgerError(f"{path} line {number} has blocks of another size than the lines before.")
        before = size
        hashes = [ids.setdefault(hash_id, len(ids) + 1) for hash_id in line.hash_ids]
        at = None if line.timestamp is None else round(1000 * line.timestamp)
        yield TracedRequest(hashes, line.input_length, line.output_length, size, at)
