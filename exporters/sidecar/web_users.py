"""Basic authentication by bcrypt hashes, as in Prometheus's exporter-toolkit. Needs the web extra."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading

import bcrypt

from ...audit.errors import LedgerError

_HASH = re.compile(r"\$2[abxy]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_NOBODY = "$2b$10$jkq2JzSSG5tbGUCFEdyLq.9.BLMjasjQYT0bB302Vy6HoxMGh121O"
"""What an unknown user's password is compared with, so that names can't be told by the time it takes."""

_REMEMBERED = 64


class Users:
    """Lets in who knows a password. One check at a time: bcrypt is slow on purpose.

    What was right is remembered, by its SHA-256, so that a scrape costs no bcrypt. Raises
    :class:`LedgerError` for what is no bcrypt hash.
    """

    def __init__(self, hashes: dict[str, str]) -> None:
        for user, hashed in hashes.items():
            if not _HASH.fullmatch(hashed):
                raise LedgerError(f"The password of user {user!r} is no bcrypt hash.")
        self._hashes = hashes
        self._right: dict[bytes, None] = {}
        self._one_at_a_time = threading.Lock()

    def __call__(self, authorization: str) -> bool:
        """Whether this Authorization header is a user's."""
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        seen = hashlib.sha256(user + b":" + password).digest()
        if seen in self._right:
            return True
        hashed = self._hashes.get(user.decode(errors="replace"), _NOBODY)
        with self._one_at_a_time:
            right = bool(colon) and _matches(password, hashed) and hashed is not _NOBODY
            if right:
                while len(self._right) >= _REMEMBERED:
                    del self._right[next(iter(self._right))]
                self._right[seen] = None
        return right


def _matches(password: bytes, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password, hashed.encode())
    except ValueError:  # longer than bcrypt takes, or with a zero byte
        return False
