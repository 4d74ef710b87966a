"""The key under which block hashes become hash ids that several processes can compare.

``KVLEDGER_EVENTS_KEY`` sets it for engines and ``kvledger journals record-events``, ``KVLEDGER_CONTENT_KEY``
for engines that transfer KV to each other. Without a key the hash ids of an engine process depend on a secret
of its own, and nothing outside the process can make the same ids. ``KVLEDGER_EVENTS_KEY`` also makes the
classes of a cache salt equal in all processes.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence

from .errors import LedgerError

VARIABLE = "KVLEDGER_EVENTS_KEY"

CONTENT_VARIABLE = "KVLEDGER_CONTENT_KEY"

LEAST_CHARACTERS = 16
"""A shorter key could be guessed, and with it the tokens."""

HASH_BYTES = 8
"""vLLM publishes block hashes whole, or as the integer of their last eight bytes."""


class HashKey:
    """Makes hash ids from block hashes and their KV cache groups. Equal keys make equal ids."""

    def __init__(self, text: str, variable: str = VARIABLE) -> None:
        if len(text) < LEAST_CHARACTERS:
            raise LedgerError(f"{variable} has {len(text)} characters; it needs {LEAST_CHARACTERS}.")
        key = hashlib.blake2b(text.encode(), digest_size=32, person=b"kvledger events").digest()
        self._keyed = hashlib.blake2b(digest_size=8, key=key)
        """A hash that has taken in the key; its copies make the ids."""
        self.print = hashlib.blake2b(key, digest_size=8, person=b"kvledger print").hexdigest()
        """What tells this key from others, and reveals nothing of it."""
        self.of_classes = hashlib.blake2b(key, digest_size=16, person=b"kvledger classes").digest()
        """The secret for hashes of cache salts and adapters."""

    def of_pool(self, block_hash: bytes) -> int:
        """The id of a key of vLLM's cache map: the block's hash, then four bytes of the group."""
        keyed = self._keyed.copy()
        keyed.update(block_hash[-HASH_BYTES - 4 :])
        number = int.from_bytes(keyed.digest(), "little", signed=True)
        return number if number not in (0, -1) else 1  # both mean that no id is known

    def of_published(self, block_hash: int | bytes, group: int) -> int:
        """The id of a hash in vLLM's stream of KV events, for the block of a KV cache group."""
        if isinstance(block_hash, int):
            block_hash = (block_hash & (1 << 8 * HASH_BYTES) - 1).to_bytes(HASH_BYTES, "big")
        return self.of_pool(block_hash[-HASH_BYTES:] + max(0, group).to_bytes(4, "big"))

    def of_tokens(self, above: int, tokens: Sequence[int]) -> int:
        """The id of a block's tokens and of all tokens before it, whatever their salt or adapter.

        ``above``: this id of the block before; 0: there is none.
        """
        keyed = self._keyed.copy()
        keyed.update(b"tokens" + above.to_bytes(8, "little", signed=True))
        keyed.update(array("q", tokens).tobytes())
        number = int.from_bytes(keyed.digest(), "little", signed=True)
        return number if number not in (0, -1) else 1


def from_environment(environ: Mapping[str, str] = os.environ, variable: str = VARIABLE) -> HashKey | None:
    """The key that the environment sets; None without one. Raises LedgerError if it is too short."""
    text = environ.get(variable, "")
    return HashKey(text, variable) if text else None
