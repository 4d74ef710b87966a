"""The one place that opens files beside journals.

A user who can write in a folder of journals can make other things there with a name that kvledger opens: a
FIFO, which blocks its reader, a link to somebody's file, a device without an end, a folder, a file of many
gigabytes. So a file is opened without waiting, no link is followed, what is not a regular file is refused,
and what is read whole has a bound. ``tests/packaging/test_one_opener.py`` shows that nothing else opens one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import LedgerError

FOLDER_MODE = 0o700
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NO_FILE = frozenset((errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV))

MOST_BYTES = 1 << 30
"""What is read whole is not larger: a checkpoint, and a session of kept rows."""


class NotAFile(OSError):
    """What has a file's name is a folder, a link, a FIFO, a device or a socket."""


def open_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """The descriptor of a regular file. Raises OSError; :class:`NotAFile` for what is none. Never waits."""
    try:
        descriptor = os.open(path, flags | _FLAGS, mode)
    except OSError as error:
        if error.errno in _NO_FILE:
            link = error.errno == errno.ELOOP
            raise NotAFile(error.errno, "Is a link" if link else error.strerror, str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise NotAFile(errno.EINVAL, "Not a regular file", str(path))


def reading(path: Path) -> FileIO:
    """A regular file, opened for reading. Raises as :func:`open_file`."""
    return FileIO(open_file(path))


def read_file(path: Path, begins: bytes, most: int = MOST_BYTES) -> bytes:
    """The bytes of a regular file, if it begins with ``begins``; else as many bytes as that.

    Raises as :func:`open_file`, and OSError for a file of more than ``most`` bytes.
    """
    with reading(path) as file:
        first = file.read(len(begins))
        if first != begins:
            return first
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"Larger than {most:,} bytes", str(path))
        return first + file.readall()


def create_file(path: Path, mode: int) -> int:
    """The descriptor of a new file that is written, in the place of what had its name. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _FLAGS, mode)


def own_folder(folder: Path, refused: str) -> None:
    """Make a folder for this user alone, in which nobody else chooses what is written.

    Raises LedgerError, which ends with ``refused``, for a link and for a folder of a user who is neither this
    process's nor root, and OSError.
    """
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise LedgerError(f"{folder} is a link, not a folder: {refused}.")
    if found.st_uid not in (0, os.geteuid()):
        raise LedgerError(
            f"{folder} belongs to user {found.st_uid}, who could change what kvledger keeps there: {refused}."
        )


def sync_folder(folder: Path) -> None:
    """Let names that were given in a folder last. Not every file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest(path: Path, by: Any = None) -> bytes:
    """A digest of a regular file's bytes, ``by`` a hash of :mod:`hashlib`. Raises as :func:`open_file`."""
    found = by or hashlib.blake2b(digest_size=16)
    with reading(path) as file:
        while some := file.read(_READ_BYTES):
            found.update(some)
    made: bytes = found.digest()
    return made


_READ_BYTES = 1 << 20
_verified: dict[Path, tuple[object, ...]] = {}
"""Files with the digest that this process found. The identity, size and times of each tell a changed one."""


def is_intact(path: Path, size: int, expected: bytes = b"") -> bool:
    """Whether this is a regular file of ``size`` bytes with the ``expected`` digest. Never raises.

    Without a digest the file only has to have the size, and to be readable.
    """
    try:
        with reading(path) as file:
            found = os.fstat(file.fileno())
        if found.st_size != size or not expected:
            return found.st_size == size
        known = (expected, found.st_dev, found.st_ino, size, found.st_mtime_ns, found.st_ctime_ns)
        if _verified.get(path) != known:
            if digest(path) != expected:
                return False
            _verified[path] = known
        return True
    except OSError:
        return False
