"""``kvledger statement``: write a statement, sign it, and verify one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...audit.errors import LedgerError
from ...audit.replay.find import journals_at
from ..files import write_whole
from ..trace.groups import check
from . import chain
from .lines import lines, month


def statement(paths: Sequence[Path], period: str, by: str, format: str, after: Path | None) -> str:
    """The statement of a month. Raises LedgerError if no request ended in it."""
    check(by)
    chosen = month(period)
    previous = chain.head(after) if after is not None else ""
    found = lines(journals_at(paths), chosen, by)
    if not found:
        raise LedgerError(f"No request ended in {period}.")
    rows = chain.chained(found, previous)
    return chain.as_json(rows) if format == "json" else chain.as_csv(rows)


def write(text: str, output: Path, key: Path | None) -> None:
    """Write a statement to a file, with its signature beside it, or print it. Raises LedgerError."""
    if str(output) == "-":
        sys.stdout.write(text)
        return
    write_whole(output, text)
    if key is not None:
        chain.sign(output, key)


def verified(path: Path, public_key: Path | None) -> str:
    """One sentence on a statement that holds. Raises LedgerError if it does not."""
    found = chain.verify(path, public_key)
    lines_of = "1 line" if found.lines == 1 else f"{found.lines} lines"
    after = f" It follows the statement that ends with {found.previous[:16]}." if found.previous else ""
    if public_key is not None:
        who = f"signed with the key of {public_key}"
    elif found.signed:
        who = "signed, with a key that --public-key did not name"
    else:
        who = "not signed, so it may have been made anew"
    return f"{path}: {lines_of} unchanged, {who}. It ends with {found.head[:16]}.{after}"
