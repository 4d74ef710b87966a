"""Numbers in place of block hashes: they tell of nothing that was hashed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def namer(*, of_bytes: bool = False) -> Callable[[Any], int]:
    """From a block's hash to the number that stands for it, the same whenever it comes again; never -1.

    By a secret of this process, so that nobody can try out which tokens a number stands for. Two hashes
    share one by chance of 1 in 2**64. Nothing is remembered, however many hashes come.

    ``of_bytes``: each hash is bytes. Those Python hashes by such a secret itself, once for good (PEP 456),
    but where ``PYTHONHASHSEED`` makes it known.
    """
    if of_bytes and os.environ.get("PYTHONHASHSEED", "") in ("", "random"):
        return hash
    secret = os.urandom(16)

    def name(hash_: Any) -> int:
        if type(hash_) is not bytes:  # of early releases, with the block's tokens in it
            hash_ = b"%d" % hash(hash_)
        return hash(secret + hash_)

    return name


def cache_map(pool: Any) -> Any:
    """From a hash to a block, or to a dict of blocks by id."""
    found = pool.cached_block_hash_to_block
    return getattr(found, "_cache", found)
