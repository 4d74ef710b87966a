"""Write a file completely or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..audit.errors import LedgerError


def draft_of(path: Path) -> Path:
    """Where a file is written until it is complete: beside its target, so that a rename finishes it."""
    return path.with_name(f"{path.name}.new")


def write_whole(path: Path, text: str) -> None:
    """Write a text file completely or not at all. Raises :class:`LedgerError`."""
    with whole(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a draft to write; it replaces ``path`` if no exception is raised. Raises :class:`LedgerError`.

    A device or a pipe can't be replaced, so it is written to directly.
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


# --- HTML from Jinja2 templates. Every value is escaped; a name that a template lacks is an error.


def environment(*folders: Path) -> Environment:
    """Load templates from folders inside the package; of two with one name that of the earlier folder."""
    return Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
