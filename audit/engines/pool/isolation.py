"""Isolation classes: what keeps a request's KV apart from other requests, as keyed hashes.

Two requests with the same tokens have different KV if they use different LoRA adapters or multimodal inputs,
and must not share KV if their clients chose different cache salts. Neither a salt nor a name is recorded: a
class is a hash of 64 bits with a key of this process, or that of ``KVLEDGER_EVENTS_KEY``. Classes are read
once for a request, when it arrives, and again when a session is extended.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from ... import events as ev
from ...errors import LedgerError
from ...hash_key import from_environment

NOTHING: ev.Isolation = []
"""One list for all requests without a cache salt, a LoRA adapter and a multimodal input."""


def _secret() -> bytes:
    try:
        key = from_environment()
    except LedgerError:  # too short: hash_ids.py says so
        key = None
    return os.urandom(16) if key is None else key.of_classes


class IsolationClasses:
    """Reads the isolation classes of vLLM's requests."""

    def __init__(self) -> None:
        self._key = _secret()
        """The secret of this process, or of all that have its key."""

    def of(self, request: Any) -> ev.Isolation | None:
        """The classes of a request; None if one of them can't be read. Never raises."""
        try:
            salt, adapter = request.cache_salt, request.lora_request
            inputs = sorted(_multimodal_inputs(request))
            if not (salt or adapter or inputs):
                return NOTHING
            classes = [
                self.of_salt(salt) if salt else 0,
                self._class("adapter", adapter.lora_name, adapter.lora_path) if adapter else 0,
            ]
            for start, identifier in inputs:
                classes += (self.of_input(identifier), start)
            return classes
        except Exception:  # an observer must never stop the engine; the request's classes are unknown
            return None

    def of_salt(self, salt: str) -> int:
        """The class of a cache salt."""
        return self._class("salt", salt)

    def of_input(self, identifier: str) -> int:
        """The class of a multimodal input."""
        return self._class("input", identifier)

    def keys(self, tokens: list[int], prefix: str, chunk_tokens: int) -> list[int]:
        """A keyed hash for each whole chunk of ``tokens``, over all tokens up to its end and ``prefix``."""
        keys: list[int] = []
        state = blake2b(prefix.encode(errors="surrogatepass"), digest_size=8, key=self._key)
        for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
            state.update(array("q", tokens[end - chunk_tokens : end]).tobytes())
            keys.append(int.from_bytes(state.digest(), "big", signed=True))
        return keys

    def _class(self, *parts: str) -> int:
        text = "\0".join(parts).encode(errors="surrogatepass")
        return int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest(), "big", signed=True)


def _multimodal_inputs(request: Any) -> Iterator[tuple[int, str]]:
    """First position and content hash of each multimodal input. Raises if an input has no hash."""
    features = getattr(request, "mm_features", None)
    if features is None:  # early releases
        positions, hashes = request.mm_positions, request.mm_hashes
        for position, content_hash in zip(positions, hashes, strict=True):
            yield position.offset, _text(content_hash)
        return
    for feature in features:
        yield feature.mm_position.offset, _text(feature.identifier)


def _text(identifier: Any) -> str:
    if not isinstance(identifier, str):
        raise TypeError("a multimodal input without a content hash")
    return identifier
