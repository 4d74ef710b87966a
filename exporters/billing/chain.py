"""A hash chain over the lines of a statement, and a signature of its end.

Each line carries its number, the number of lines, the hash of the line before and its own, so a line that
was changed, removed, added or moved is found. The first line carries the last hash of the statement before,
if one is given. The last hash can be signed with an Ed25519 key (RFC 8032); without a signature, anyone who
changes a line could make a new chain.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...audit.errors import LedgerError
from ..csv_cells import csv_of, read_csv
from .lines import COLUMNS

CHAIN = ("x_Line", "x_Lines", "x_PreviousHash", "x_Hash")
LATER = {"x_NotBilled"}
"""Columns that older statements do not have. A line's hash is of the columns that the line has."""
SIGNATURE = ".sig"
"""What is appended to the name of a statement's file for its signature."""

Row = dict[str, str]


class Checked(NamedTuple):
    """A statement whose chain is whole."""

    lines: int
    head: str
    previous: str
    signed: bool
    """Whether a signature of the head was found and holds."""


def chained(lines: Sequence[dict[str, Any]], previous: str = "") -> list[Row]:
    """The lines with the columns of the chain, all values as text. ``previous``: the last hash before."""
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        row = {name: str(line[name]) for name in COLUMNS}
        row |= {"x_Line": str(number), "x_Lines": str(len(lines)), "x_PreviousHash": previous}
        previous = row["x_Hash"] = _hash(row)
        rows.append(row)
    return rows


def _hash(row: Row) -> str:
    """The hash of a line's other columns."""
    text = json.dumps([row[name] for name in (*COLUMNS, *CHAIN[:-1]) if name in row], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def as_csv(rows: Sequence[Row]) -> str:
    """The statement in CSV."""
    columns = (*COLUMNS, *CHAIN)
    return csv_of(columns, ([row[name] for name in columns] for row in rows)) + "\n"


def as_json(rows: Sequence[Row]) -> str:
    """The statement as a list of lines in JSON."""
    return json.dumps(list(rows), indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> list[Row]:
    """The lines of a statement in CSV or JSON. Raises LedgerError."""
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            columns, rows = read_csv(text)
            if not _complete(columns):
                raise ValueError("the header has other columns")
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, csv.Error) as error:
        raise LedgerError(f"{path} is no statement.") from error
    for row in rows:
        if (
            not isinstance(row, dict)
            or not _complete(row)
            or not all(isinstance(v, str) for v in row.values())
        ):
            raise LedgerError(f"{path} is no statement: a line does not have its columns.")
    return list(rows)


def _complete(names: Iterable[str]) -> bool:
    """Whether a line has all its columns; older statements lack those of :data:`LATER`."""
    return {*COLUMNS, *CHAIN} - LATER <= set(names) <= {*COLUMNS, *CHAIN}


class Broken(LedgerError):
    """A statement was changed after it was made."""

    exit_code = 1


def verify(path: Path, public_key: Path | None = None) -> Checked:
    """Check the chain of a statement, and its signature if it has one. Raises LedgerError.

    With a ``public_key`` there must be a signature by its private key.
    """
    rows = read(path)
    if not rows:
        raise Broken(f"{path} has no lines.")
    previous = rows[0]["x_PreviousHash"]
    for number, row in enumerate(rows, 1):
        if row["x_Line"] != str(number):
            raise Broken(
                f"Line {number} of {path} was line {row['x_Line']}: lines were removed, added or moved."
            )
        if row["x_Hash"] != _hash(row):
            raise Broken(f"Line {number} of {path} was changed: its hash does not match.")
        if row["x_PreviousHash"] != previous:
            raise Broken(f"Line {number} of {path} does not follow the line before it.")
        previous = row["x_Hash"]
    if rows[-1]["x_Lines"] != str(len(rows)):
        raise Broken(f"{path} has {len(rows)} of {rows[-1]['x_Lines']} lines: it was cut off.")
    signed = _signature_holds(path, previous, public_key)
    return Checked(len(rows), previous, rows[0]["x_PreviousHash"], signed)


def head(path: Path) -> str:
    """The last hash of a statement whose chain is whole. Raises LedgerError."""
    return verify(path).head


def sign(path: Path, key: Path) -> None:
    """Sign the head of a statement; the signature is written beside it. Raises LedgerError."""
    serialization, _, _ = _cryptography()
    private: Any = _load(key, lambda data: serialization.load_pem_private_key(data, password=None), "private")
    signature = private.sign(head(path).encode())
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    text = {"signature": base64.b64encode(signature).decode(), "public_key": public.decode()}
    try:
        _beside(path).write_text(json.dumps(text, indent=1) + "\n")
    except OSError as error:
        raise LedgerError(f"{_beside(path)} can't be written: {error.strerror}.") from error


def _signature_holds(path: Path, end: str, public_key: Path | None) -> bool:
    """Whether the statement has a signature; raises if it does not hold, or if one is needed and missing."""
    if not _beside(path).exists():
        if public_key is not None:
            raise Broken(f"{path} has no signature: there is no {_beside(path).name}.")
        return False
    serialization, invalid, _ = _cryptography()
    try:
        written = json.loads(_beside(path).read_text())
        signature = base64.b64decode(written["signature"])
        own = written["public_key"].encode()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{_beside(path)} is no signature of a statement.") from error
    if public_key is not None:
        key: Any = _load(public_key, serialization.load_pem_public_key, "public")
    else:
        key = _loaded(own, serialization.load_pem_public_key, _beside(path), "public")
    try:
        key.verify(signature, end.encode())
    except invalid as error:
        raise Broken(
            f"The signature of {path} does not hold: the statement or the key is another."
        ) from error
    return True


def _beside(path: Path) -> Path:
    return path.with_name(path.name + SIGNATURE)


def _load(path: Path, load: Any, kind: str) -> object:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error.strerror}.") from error
    return _loaded(data, load, path, kind)


def _loaded(data: bytes, load: Any, path: Path, kind: str) -> object:
    _, _, kinds = _cryptography()
    try:
        key = load(data)
    except (ValueError, TypeError) as error:
        raise LedgerError(f"{path} has no {kind} key in PEM without a password.") from error
    if not isinstance(key, kinds):
        raise LedgerError(f"The key in {path} is no Ed25519 key.")
    return key


def _cryptography() -> tuple[Any, type[Exception], tuple[type, ...]]:
    """Key loading, the exception for a wrong signature, and the classes of Ed25519 keys."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return serialization, InvalidSignature, (ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey)
