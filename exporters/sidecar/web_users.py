"""Basic authentication by bcrypt hashes, as in Prometheus's exporter-toolkit. Needs the web extra.

bcrypt is slow on purpose, so wrong passwords must not hold up honest scrapes:

- One password is checked at a time. :data:`WAITERS` may wait, and :data:`WAITERS_OF_A_CLIENT` of one address;
  a further one is refused at once. A waiter whose connection was closed gives up.
- An address whose last password was wrong waits behind all others, and in places of its own. So a
  scraper's first password is checked next, however many wrong ones wait.
- A password that was checked is remembered, and answered later without bcrypt and without waiting.
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
from operator import attrgetter
from typing import Generic, TypeVar

import bcrypt

from ...audit.bounded_tables import keep_newest
from ...audit.errors import LedgerError
from .http_server import Busy

_HASH = re.compile(r"\$2[abxy]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}")
_NOBODY = "$2b$%02d$jkq2JzSSG5tbGUCFEdyLq.9.BLMjasjQYT0bB302Vy6HoxMGh121O"
"""A hash of any cost that no password is known for."""

_REMEMBERED = 64
"""How many correct passwords are remembered, and how many wrong ones."""

_FAILED = 4096
"""How many addresses are remembered whose last password was wrong."""

WAITERS = 8
"""How many passwords may be in the queue, the one that is being checked included; and as many again of
addresses whose last password was wrong."""

WAITERS_OF_A_CLIENT = 2
"""How many of them may come from one address."""

_WAKE_SECONDS = 0.2
"""How often a waiter looks whether its connection is still open."""

Kept = TypeVar("Kept")


class Users:
    """Checks users and passwords, one at a time because bcrypt is slow on purpose.

    The SHA-256 of a password is remembered in memory, so that later scrapes need no bcrypt. Raises
    :class:`LedgerError` for a malformed hash.
    """

    def __init__(self, hashes: dict[str, str]) -> None:
        for user, hashed in hashes.items():
            if not _HASH.fullmatch(hashed):
                raise LedgerError(f"The password of user {user!r} is no bcrypt hash.")
        self._hashes = hashes
        """By user: the bcrypt hash of the password."""
        self._most = max(map(_cost, hashes.values()), default=0)
        self._correct = _Recent[bytes](_REMEMBERED)
        self._wrong = _Recent[bytes](_REMEMBERED)
        self._failed = _Recent[str](_FAILED)
        """Addresses whose last password was wrong."""
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
        password_hash = self._hashes.get(user.decode(errors="replace"))
        correct = self._remembered(digest)
        if correct is None:
            with self._queue.turn(client, gone, failed=client in self._failed):
                correct = self._remembered(digest)
                if correct is None:
                    correct = self._check(password, password_hash)
                    (self._correct if correct else self._wrong).add(digest)
        (self._failed.discard if correct else self._failed.add)(client)
        return correct

    def _remembered(self, digest: bytes) -> bool | None:
        """What is known of a password: whether it is correct; None: nothing."""
        return True if digest in self._correct else False if digest in self._wrong else None

    def _check(self, password: bytes, password_hash: str | None) -> bool:
        """Compare with a user's hash at the cost of the most expensive one. None: there is no such user."""
        if password_hash is None:
            _matches(password, _NOBODY % self._most)
            return False
        correct = _matches(password, password_hash)
        for cost in range(_cost(password_hash), self._most):  # 2^a + 2^(a+1) + ... + 2^(b-1) = 2^b - 2^a
            _matches(password, _NOBODY % cost)
        return correct


class _Recent(Generic[Kept]):
    """A set of the values that were added last: ``most``, and up to an eighth more."""

    def __init__(self, most: int) -> None:
        self._most = most
        """How many values are kept at least."""
        self._values: dict[Kept, None] = {}
        """The values, the oldest first."""
        self._guard = threading.Lock()
        """Held while values change."""

    def __contains__(self, value: Kept) -> bool:
        return value in self._values

    def add(self, value: Kept) -> None:
        """Add a value, or make it the newest; the oldest leaves if there are too many."""
        with self._guard:
            self._values.pop(value, None)
            self._values[value] = None
            keep_newest(self._values, self._most)

    def discard(self, value: Kept) -> None:
        """Remove a value if it is there."""
        with self._guard:
            self._values.pop(value, None)


class _Waiter:
    """A password in the queue: the address that it came from, and whether that address failed before."""

    def __init__(self, client: str, failed: bool) -> None:
        self.client = client
        """The address."""
        self.failed = failed
        """Whether its last password was wrong."""


class _Queue:
    """Gives one turn at a time to a bounded number of waiters."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        """Held while the waiters change; it wakes them when one leaves."""
        self._waiters: list[_Waiter] = []
        """The waiters, and the one whose turn it is, in the order in which they came."""
        self._taken = False
        """Whether it is somebody's turn."""

    @contextmanager
    def turn(self, client: str, gone: Callable[[], bool], *, failed: bool) -> Iterator[None]:
        """Wait for a turn. Raises :class:`Busy` if there are too many waiters, or once ``gone`` is true."""
        waiter = _Waiter(client, failed)
        with self._changed:
            alike = sum(each.failed == failed for each in self._waiters)
            of_client = sum(each.client == client for each in self._waiters)
            if alike >= WAITERS or of_client >= WAITERS_OF_A_CLIENT:
                raise Busy
            self._waiters.append(waiter)
        taken = False
        try:
            with self._changed:
                while self._taken or waiter is not min(self._waiters, key=attrgetter("failed")):
                    self._changed.wait(_WAKE_SECONDS)
                    if gone():
                        raise Busy
                taken = self._taken = True
            yield
        finally:
            with self._changed:
                self._waiters.remove(waiter)
                self._taken = self._taken and not taken
                self._changed.notify_all()


def _cost(hashed: str) -> int:
    return int(hashed[4:6])


def _matches(password: bytes, hashed: str) -> bool:
    try:
        return bcrypt.checkpw(password, hashed.encode())
    except ValueError:  # longer than bcrypt takes, or with a zero byte
        return False
