"""``kvledger repro checks``: the file ``kv_invariants.py``, for tests that do not install kvledger."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import LedgerError

SOURCE = Path(__file__).with_name("kv_invariants.py")
"""The file, as it stands in this package."""


def export(output: Path) -> None:
    """Write the file, or print it for ``-``. Raises LedgerError if it can't be written."""
    text = SOURCE.read_text()
    if output == Path("-"):
        sys.stdout.write(text)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise LedgerError(f"{output} can't be written: {error.strerror}.") from error
