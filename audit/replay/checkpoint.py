"""The checkpoint file: a follower's position in each journal, and the audit up to there.

One file holds all journals, so that sums moved from one audit to another are never in both or in neither.
It is written whole under another name, synced to disk, and renamed: after a crash at any time either the
old or the new file is there. Nothing in it is ever executed (``serialize.py``). The engine's container may
write beside the folder: no link is followed, and a folder of another user is refused.

    kvledger checkpoint <layout> <CRC32 of the rest, eight hexadecimal digits>\\n
    msgpack of Checkpoint
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from pathlib import Path
from zlib import crc32

import msgspec

from ..errors import LedgerError
from ..journal.format import FRAME, HEADER, segment_name
from ..journal.reader import Position
from ..journal.safe_open import MOST_BYTES, open_file, own_folder, read_file, reading
from .atomic_files import DRAFT, replaced
from .serialize import OtherLayout, layout

NAME = "checkpoint"
MODE = 0o600
LOCK = "lock"
HIDDEN = ".kvledger"
"""The folder beside the journals that holds the checkpoint and its lock, unless ``--state`` names another."""

_BEGINS = b"kvledger checkpoint "
_LINE = re.compile(_BEGINS + rb"(\S{1,40}) ([0-9a-f]{8})\n")


class JournalState(msgspec.Struct):
    """One journal: its name in the followed folder, the position to continue at, and its audit.

    ``beginning`` has the first bytes of the segment at ``position``, which tell this journal from another
    with the same name. ``ended``: everything was read. ``damage``: how many damaged places were found.
    ``engine_audit``: the :class:`~kvledger.audit.replay.followed_audit.FollowedAudit`, serialized.
    ``settled_segment``: the journal's oldest segment when only the sums of an ended engine were kept; -1: the
    audit can go on.
    """

    name: str
    position: Position
    beginning: bytes
    ended: bool
    stopped: bool
    damage: int
    engine_audit: msgspec.Raw
    settled_segment: int = -1


class FoldedJournal(msgspec.Struct, frozen=True):
    """A journal that was read to its end and whose figures are in the sums of its engine's name, if anywhere.

    ``segment`` and ``beginning`` tell this journal from another with the same name, as in JournalState.
    """

    name: str
    segment: int
    beginning: bytes


class Checkpoint(msgspec.Struct):
    """The state of a follower.

    ``past``: the audits of ended engines, folded into one for each name. ``lost``: how often a checkpoint or
    a journal's position could not be used, by reason. ``version``: the kvledger that wrote it. ``at``: when,
    in Unix time. ``folded``: the journals that are not read again. ``ended``: when the last engine of each
    name ended, in Unix time, the longest ago first. ``gone``: journals of ended engines that were removed.
    """

    version: str
    at: float
    journals: list[JournalState] = []
    past: list[msgspec.Raw] = []
    lost: dict[str, int] = {}
    folded: list[FoldedJournal] = []
    ended: dict[str, float] = {}
    gone: list[FoldedJournal] = []


def save(folder: Path, checkpoint: Checkpoint) -> int:
    """Replace the checkpoint in ``folder``; returns its size in bytes. Raises OSError."""
    payload = msgspec.msgpack.encode(checkpoint)
    data = _BEGINS + b"%s %08x\n" % (layout().encode(), crc32(payload)) + payload
    if len(data) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"A checkpoint of {len(data):,} bytes would not be read again")
    with replaced(folder / NAME, MODE, "no checkpoint is kept") as file:
        file.write(data)
    return len(data)


def load(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``; None if there is none.

    Raises :class:`~kvledger.audit.replay.serialize.OtherLayout` if its layout is that of another version, and
    LedgerError if it is damaged or can't be read.
    """
    path = folder / NAME
    try:
        data = read_file(path, _BEGINS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    line = _LINE.match(data)
    payload = memoryview(data)[line.end() :] if line else b""
    if line is None or int(line.group(2), 16) != crc32(payload):
        raise LedgerError(f"{path} is damaged.")
    if line.group(1).decode() != layout():
        raise OtherLayout(f"{path} was written by another version of kvledger.")
    try:
        return msgspec.msgpack.decode(payload, type=Checkpoint)
    except msgspec.MsgspecError as error:
        raise LedgerError(f"{path} is damaged: {error}.") from None


def take(folder: Path) -> int:
    """Make ``folder`` and lock it for one follower while the returned descriptor is open.

    Raises LedgerError if another follower has it or if it is another user's, OSError if it can't be made or
    written.
    """
    own_folder(folder, "name another folder with --state")
    descriptor = open_file(folder / LOCK, os.O_RDWR | os.O_CREAT, MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            sentence = (
                f"Another kvledger serve keeps its state in {folder}; name another folder with --state."
            )
            raise LedgerError(sentence) from None
        raise
    for draft in folder.glob(f"{NAME}*{DRAFT}"):  # of a follower that was killed while it saved
        with contextlib.suppress(OSError):
            draft.unlink()
    return descriptor


def beginning(journal: Path, segment: int) -> bytes:
    """The header of a segment and the length and checksum of its first frame; b"" if it does not exist.

    The first frame holds the engine's start time, so it differs between any two journals.
    """
    try:
        path = journal / segment_name(segment) if journal.is_dir() else journal
        with reading(path) as file:
            return file.read(len(HEADER) + FRAME.size)
    except OSError:
        return b""
