"""Basic authentication by bcrypt hashes, as in Prometheus's exporter-toolkit. Needs the web extra.

bcrypt is slow on purpose, so wrong passwords must not hold up honest scrapes:

- One password is checked at a time. :data:`WAITERS` may wait, and :data:`WAITERS_OF_A_CLIENT` of one address;
  a further one is refused at once. A waiter whose connection was closed gives up.
- A correct password is remembered, and checked later without bcrypt and without waiting.
- Every check costs as much as the most expensive configured hash, whether the user exists or not.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import bcrypt

from ...audit.errors import LedgerError
from .http_server import Busy

_HASH = re.compile(r"\$2[abxy]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_NOBODY = "$2b$%02d$jkq2JzSSG5tbGUCFEdyLq.9.BLMjasjQYT0bB302Vy6HoxMGh121O"
"""A hash of any cost that no password is known for."""

_REMEMBERED = 64

WAITERS = 8
"""How many passwords may be in the queue, the one that is being checked included."""

WAITERS_OF_A_CLIENT = 2
"""How many of them may come from one address."""

_WAKE_SECONDS = 0.2
"""How often a waiter looks whether its connection is still open."""


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
        """By user: the bcrypt hash of the password."""
        self._most = max(map(_cost, hashes.values()), default=0)
        """The cost of every check."""
        self._correct: dict[bytes, None] = {}
        """The SHA-256 of correct users and passwords, the oldest first."""
        self._queue = _Queue()
        """Gives the turns, so that one check runs at a time."""

    def __call__(self, authorization: str, client: str = "", gone: Callable[[], bool] = bool) -> bool:
        """Whether this Authorization header has a user's correct password.

        Raises :class:`Busy` if too many passwords wait, or if the connection is ``gone`` before its turn.
        """
        scheme, _, encoded = authorization.partition(" ")
        if scheme.lower() != "basic":
            return False
        try:
            user, colon, password = base64.b64decode(encoded, validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        if not colon:
            return False
        digest = hashlib.sha256(user + b":" + password).digest()
        if digest in self._correct:
            return True
        password_hash = self._hashes.get(user.decode(errors="replace"))
        with self._queue.turn(client, gone):
            correct = digest in self._correct or self._check(password, password_hash)
            if correct:
                self._correct[digest] = None
                while len(self._correct) > _REMEMBERED:
                    del self._correct[next(iter(self._correct))]
        return correct

    def _check(self, password: bytes, password_hash: str | None) -> bool:
        """Compare with a user's hash at the cost of the most expensive one. None: there is no such user."""
        if password_hash is None:
            _matches(password, _NOBODY % self._most)
            return False
        correct = _matches(password, password_hash)
        for cost in range(_cost(password_hash), self._most):  # 2^a + 2^(a+1) + ... + 2^(b-1) = 2^b - 2^a
            _matches(password, _NOBODY % cost)
        return correct


class _Queue:
    """Gives one turn at a time to a bounded number of waiters."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Held while the waiters change; it wakes them when a turn ends."""
        self._clients: list[str] = []
        """The addresses of the waiters, and of the one whose turn it is."""
        self._taken = False
        """Whether it is somebody's turn."""

    @contextmanager
    def turn(self, client: str, gone: Callable[[], bool]) -> Iterator[None]:
        """Wait for a turn. Raises :class:`Busy` if there are too many waiters, or once ``gone`` is true."""
        with self._changed:
            if len(self._clients) >= WAITERS or self._clients.count(client) >= WAITERS_OF_A_CLIENT:
                raise Busy
            self._clients.append(client)
        taken = False
        try:
            with self._changed:
                while self._taken:
                    self._changed.wait(_WAKE_SECONDS)
                    if gone():
                        raise Busy
                taken = self._taken = True
            yield
        finally:
            with self._changed:
                self._clients.remove(client)
                if taken:
                    self._taken = False
                    self._changed.notify()


def _cost(hashed: str) -> int:
    return int(hashed[4:6])


def _matches(password: bytes, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password, hashed.encode())
    except ValueError:  # longer than bcrypt takes, or with a zero byte
        return False
