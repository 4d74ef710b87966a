"""Files that stand whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..audit.errors import LedgerError


def draft_of(path: Path) -> Path:
    """Where a file is written until it is whole: beside it, so that a rename is enough."""
    return path.with_name(f"{path.name}.new")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A draft to write, which becomes ``path`` unless that fails. Raises :class:`LedgerError`.

    A device or a pipe is written to as it is: it can't be replaced.
    """
    if not path.name or path.is_dir():
        raise LedgerError(f"{path} can't be written: it is a folder.")
    draft = draft_of(path)
    try:
        if path.exists() and not path.is_file():
            yield path
            return
        yield draft
        draft.replace(path)
    except OSError as error:
        raise LedgerError(f"{path} can't be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
