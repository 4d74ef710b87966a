"""Hash ids: numbers that stand for block hashes in the journal, and reveal nothing of the hashed tokens."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ...errors import LedgerError
from ...hash_key import CONTENT_VARIABLE, VARIABLE, HashKey, from_environment

logger = logging.getLogger("vllm.kvledger")

HashId = Callable[[Any], int]
"""From a block's hash to its id."""


def shared_key(pool: Any) -> HashKey | None:
    """The key of hash ids that others can make too; None: there is none.

    Others are those who receive the pool's KV events, if it publishes any, and engines that transfer KV.
    Without a key an engine's hash ids depend on a secret of its process, which costs less.
    """
    key = None
    if getattr(pool, "enable_kv_cache_events", False):
        key = _key(VARIABLE, "The engine's KV events can't be compared with its blocks.")
    return key or _key(CONTENT_VARIABLE, "The engine's blocks can't be compared with those of other engines.")


def _key(variable: str, consequence: str) -> HashKey | None:
    try:
        return from_environment(variable=variable)
    except LedgerError as error:
        logger.warning("kvledger: %s %s", error, consequence)
        return None


def hash_ids(key: HashKey | None = None) -> HashId:
    """A function from a block's hash to its id. Equal hashes have equal ids; no id is -1.

    The id depends on a secret of this process, so nobody can guess tokens and compare ids. Two hashes share
    an id by chance of 1 in 2**64. No hash is remembered, so memory does not grow.

    A block's hash is bytes. Python hashes bytes with a secret of the process (PEP 456) and keeps the result
    in the object, so Python's own hash is the id. If ``PYTHONHASHSEED`` is set, that secret is known, and
    the id is the hash of the block's hash with a secret made here. With a ``key`` the id depends on that
    instead.
    """
    if key is not None:
        return key.of_pool
    if os.environ.get("PYTHONHASHSEED", "") in ("", "random"):
        return hash
    secret = os.urandom(16)
    return lambda block_hash: hash(secret + block_hash)


def cache_map(pool: Any) -> Any:
    """The pool's map from a hash to a block, or to a dict of blocks by id."""
    blocks = pool.cached_block_hash_to_block
    return getattr(blocks, "_cache", blocks)
