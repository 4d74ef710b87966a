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
"""The hash that an unknown user's password is compared with, so that timing reveals no user names."""

_REMEMBERED = 64


class Users:
    """Checks users and passwords, one at a time because bcrypt is slow on purpose.

    The SHA-256 of a correct password is remembered, so that later scrapes need no bcrypt. Raises
    :class:`LedgerError` for a malformed hash.
    """

    def __init__(self, hashes: dict[str, str]) -> None:
        for user, hashed in hashes.items():
            if not _HASH.fullmatch(hashed):
                raise LedgerError(f"The password of user {user!r} is no bcrypt hash.")
        self._hashes = hashes
        self._correct: dict[bytes, None] = {}
        self._one_at_a_time = threading.Lock()

    def __call__(self, authorization: str) -> bool:
        """Whether this Authorization header has a user's correct password."""
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        digest = hashlib.sha256(user + b":" + password).digest()
        if digest in self._correct:
            return True
        password_hash = self._hashes.get(user.decode(errors="replace"), _NOBODY)
        with self._one_at_a_time:
            correct = bool(colon) and _matches(password, password_hash) and password_hash is not _NOBODY
            if correct:
                while len(self._correct) >= _REMEMBERED:
                    del self._correct[next(iter(self._correct))]
                self._correct[digest] = None
        return correct


def _matches(password: bytes, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password, hashed.encode())
    except ValueError:  # longer than bcrypt takes, or with a zero byte
        return False
