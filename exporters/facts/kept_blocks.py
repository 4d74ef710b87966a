"""What an engine did with blocks, from the rows that compact kept and the end of its journal.

A journal that was never compacted is read without the analysis extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ...audit.analysis.block_states import BlockStates, BlockUse
from ...audit.analysis.step_times import StepTimes
from ...audit.analysis.trace_reader import Change, RecordedRequest, TraceLife
from ...audit.errors import JournalError, LedgerError
from ...audit.journal.host_folders import read
from ...audit.ledger.blocks.contents import Contents
from ...audit.replay.observers import Steps
from ...audit.replay.request_traces import RecordedBlocks
from ...audit.replay.windows import EVERYTHING, Window
from .blocks import LIFE_COUNTS, OPERATIONS, USE_COLUMNS, BlockState, summed
from .kept import Session, find, folder_of, is_session, journal_of, journals_and_sessions, load, readable
from .schema import ADMISSIONS

Batches = Callable[[str, Sequence[str]], Iterator[list[list[Any]]]]
"""Columns of the kept rows of a table, some rows at a time and in order."""

ADMITTED = [column.name for column in ADMISSIONS[2:]]
_KINDS = {word: kind for kind, word in enumerate(OPERATIONS)}


def recorded_blocks(path: Path, *, groups: bool = False, turns: bool = False) -> RecordedBlocks:
    """What the engine of a journal did, or that of a session whose journal is gone. Raises LedgerError.

    ``groups``: read engines with several KV cache groups. ``turns``: those, and how long steps took.
    """
    session = find(path)
    if session is None:
        recorded = RecordedBlocks(path, steps=StepTimes() if turns else None)
        recorded.read(groups=groups or turns)
        return recorded
    state, goes_on = _state(path, session), not session.ended and not is_session(path)
    audit = session.audit(path, EVERYTHING) if turns or goes_on else None
    kept = KeptBlocks(path, session, state, None if audit is None else audit.contents)
    if turns and audit is not None:
        kept.steps = audit.of(Steps).times
    if goes_on:
        kept.read()
    return kept


class KeptBlocks(RecordedBlocks):
    """The kept rows of a journal, and what was recorded since."""

    def __init__(self, path: Path, session: Session, state: BlockState, contents: Contents | None) -> None:
        began_us = round(state.reader.began_seconds * 1e6)
        self._rows = kept_rows(path, session)
        """Reads the kept rows."""
        self._began_us = began_us
        """The engine's second 0, from which rows count no times."""
        requests = (
            [] if state.reader.stopped else list(_requests(self._rows("admissions", ADMITTED), began_us))
        )
        super().__init__(journal_of(path), state.reader, contents, session.position, requests)

    def kept(self) -> Iterator[Sequence[Change]]:
        """See the base."""
        names = ("operation", "life", "blocks", "hash_ids", "time")
        for words, lives, blocks, ids, times in self._rows("block_operations", names):
            kinds = map(_KINDS.__getitem__, words)
            yield list(zip(kinds, lives, blocks, ids, [us - self._began_us for us in times], strict=True))


def kept_rows(path: Path, session: Session) -> Batches:
    """Reads the kept rows of a journal."""
    from .parquet import read_columns

    folder = path.parent if is_session(path) else folder_of(path)

    def batches(table: str, names: Sequence[str]) -> Iterator[list[list[Any]]]:
        for file in (*session.files, *session.tail):
            if file.table == table:
                yield from read_columns(readable(folder, file), names)

    return batches


def _state(path: Path, session: Session) -> BlockState:
    if not session.continues:
        raise JournalError(
            f"{path} was compacted by another version of kvledger, and its journal is gone: it has rows for "
            "summary, why and query, and no blocks."
        )
    return session.blocks()


def _requests(batches: Iterator[list[list[Any]]], began_us: int) -> Iterator[RecordedRequest]:
    """The requests of rows of ``admissions``. The lives of a request stand in a row."""
    request: RecordedRequest | None = None
    for row in chain.from_iterable(zip(*columns, strict=True) for columns in batches):
        number, request_id, closed, life, arrival, added, admitted, local, *counts = row
        *counts, prompt, priority, lora, salt, group, session = counts
        if request is None or request.arrival != arrival:
            if request is not None:
                yield request
            labels = lora or "", salt or "", group or "", session or ""
            request = RecordedRequest(number, arrival, request_id, prompt, priority, *labels)
            request.added_at, request.closed_at = (-1 if us < 0 else us - began_us for us in (added, closed))
        fields = dict(zip(LIFE_COUNTS, counts, strict=True))
        request.lives[life] = TraceLife(hit_tokens=local, at=admitted - began_us, **fields)
    if request is not None:
        yield request


def traces_at(paths: Sequence[Path], window: Window = EVERYTHING) -> list[Path]:
    """Every journal at ``paths``, and the sessions of journals that are gone, if they have a block trace.

    Sessions that ended before the window are left out. Raises LedgerError if there is none.
    """
    found = journals_and_sessions(paths)
    traces = [path for path in found if not is_session(path) or _has_trace(path, window)]
    if found and not traces:
        raise LedgerError(f"{found[0]} has no block trace in this time.")
    return traces


def _has_trace(path: Path, window: Window) -> bool:
    session = load(path)
    if session is None or (window.since is not None and session.until_seconds < window.since):
        return False
    return any(file.table == "block_operations" for file in (*session.files, *session.tail))


def block_use(path: Path) -> BlockUse | None:
    """How the blocks of an engine were used, up to now; None if its journal has no block events."""
    session = find(path)
    states = BlockStates() if session is None else _state(path, session).states
    if session is None or not (session.ended or is_session(path)):
        contents = Contents() if session is None else session.audit(path, EVERYTHING).contents
        for _, event in read(path, None if session is None else session.position):
            states.feed(event, contents.read(event))
    if session is None or not states.seen:
        return states.use if states.seen else None
    read_rows = kept_rows(path, session)
    rows = [row for some in read_rows("block_use", USE_COLUMNS) for row in zip(*some, strict=True)]
    whole = BlockUse()
    for use in (*summed(rows)[0], states.use):
        whole.follow(use)
    return whole
