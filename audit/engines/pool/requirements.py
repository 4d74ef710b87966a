"""What level ``blocks`` needs of an engine: methods that are wrapped, and attributes that are read.

An engine that lacks one of these is refused before anything is wrapped, with a phrase that names it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from types import CodeType
from typing import Any

from ... import events as ev
from ...errors import LedgerError
from ...hash_key import from_environment
from ...hooks import EngineMismatch, Hook, check

_FULL = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id")
_PART = ("request", "block", "num_tokens", "kv_cache_group_id", "block_size")
_FREE = (("ordered_blocks",), ("ordered_blocks", "prepend"))

TOUCH = Hook("", "touch", (("blocks",),), after="touched")
FREE = Hook("", "free_blocks", _FREE, after="freed", listed="ordered_blocks")
OCCASIONAL: tuple[Hook, ...] = (
    Hook("", "unpin_blocks", (("blocks", "on_reuse"),), after="unpinned", optional=True, listed="blocks"),
    Hook(  # since 0.24
        "",
        "cache_partial_block",
        (_PART, (*_PART, "replace_existing_hashes")),
        "part_caching_begins",
        "part_cached",
        optional=True,
    ),
    Hook(  # since 0.27
        "", "move_block_hashes", (("src_block", "dst_block"),), "hashes_may_go", "hashes_moved", optional=True
    ),
    Hook("", "evict_blocks", (("block_ids",),), "eviction_begins", "evicted", listed="block_ids"),
    Hook("", "reset_prefix_cache", ((),), "hashes_may_go", "reset"),
)
"""Methods of a pool that are called rarely; these are always wrapped."""

TRACKED: tuple[Hook, ...] = (TOUCH, FREE)
"""Methods that are also wrapped if a ``HashTracker`` reads the pool's state."""

POOL: tuple[Hook, ...] = (
    Hook("", "get_new_blocks", (("num_blocks",),), after="allocated"),
    TOUCH,
    FREE,
    Hook("", "cache_full_blocks", (_FULL, (*_FULL, "block_mask")), "caching_begins", "cached"),
)
"""Methods that are also wrapped if no ``HashTracker`` does."""

EVICTING: tuple[Hook, ...] = (
    Hook("", "_maybe_evict_cached_block", (("block",),), "single_eviction_begins", "single_evicted"),
)
"""The method that is also wrapped in the pool of a manager that evicts by itself: see :func:`evicts`."""

MANAGER: tuple[Hook, ...] = (
    Hook(
        "",
        "_apply_cow",
        (("request_id", "block_idx", "source_block", "cow_block"),),
        after="block_copied",
        optional=True,
    ),
)
"""Methods of the manager of a single KV cache group."""

ALL_GROUPS: tuple[Hook, ...] = (
    Hook("", "pop_blocks_for_free", (("request",),), after="frees_deferred", optional=True),  # since 0.24
)
"""Methods of the KV cache manager of all groups."""

BLOCK_ATTRIBUTES = ("block_id", "ref_cnt", "_block_hash", "next_free_block")
"""Attributes that are read from each block."""

POOL_ATTRIBUTES = ("blocks", "num_gpu_blocks", "get_num_free_blocks", "cached_block_hash_to_block")
"""Attributes that are read from each pool."""

HASH_WRITERS = frozenset(
    (
        *("_insert_block_hash", "_maybe_evict_cached_block", "_remove_cached_block_hashes"),
        *("reset_hash", "set_block_hash"),
    )
)
"""Methods of a pool or a block that give a block its hash or remove it."""

CHANGING_HASHES = frozenset(
    (
        *("cache_full_blocks", "cache_partial_block", "evict_blocks", "get_new_blocks", "move_block_hashes"),
        *("reset_prefix_cache", "_insert_block_hash", "_maybe_evict_cached_block"),
        "_remove_cached_block_hashes",
    )
)
"""Methods of a pool that call :data:`HASH_WRITERS`: all in vLLM 0.17 to 0.33. Their effects are recorded."""

MANAGER_ATTRIBUTES = ("req_to_blocks", "kv_cache_group_id", "block_size")
"""Attributes that are read from the manager of each group."""


def refusal(managers: Iterable[Any]) -> list[str]:
    """Why the blocks of these managers can't be observed, in phrases; [] if they can.

    The blocks of a HiSparse manager move between tables and pools in ways that no call of a pool shows.
    """
    managers = list(managers)
    sparse = sorted({type(manager).__name__ for manager in managers if "HiSparse" in type(manager).__name__})
    phrases = [f"the blocks of a {name} can't be followed" for name in sparse]
    for manager in managers:
        pool = manager.block_pool
        phrases += _lacks(manager, MANAGER_ATTRIBUTES) + _lacks(pool, POOL_ATTRIBUTES)
        phrases += _unknown_hash_changes(type(pool))
        for block in getattr(pool, "blocks", [])[:1]:
            phrases += _lacks(block, BLOCK_ATTRIBUTES)
    return list(dict.fromkeys(phrases))


def _unknown_hash_changes(pool_class: type[Any]) -> list[str]:
    """The pool's methods that change block hashes in a way that nobody records: a newer vLLM may add some."""
    return [
        f"{pool_class.__name__}.{code.co_name} changes block hashes and is not known"
        for code in method_codes(pool_class)
        if code.co_name not in CHANGING_HASHES and HASH_WRITERS.intersection(code.co_names)
    ]


def _lacks(owner: Any, names: Iterable[str]) -> list[str]:
    return [f"a {type(owner).__name__} has no {name}" for name in names if not hasattr(owner, name)]


def differences(scheduler: Any) -> list[str]:
    """What level ``blocks`` needs and this scheduler lacks, in phrases."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", None)
    if not managers:
        return ["it has no managers of single KV cache groups"]
    phrases = refusal(managers)
    for table, owner in (
        ((*POOL, *OCCASIONAL), managers[0].block_pool),
        (MANAGER, managers[0]),
        (ALL_GROUPS, manager),
    ):
        try:
            check(table, owner)
        except EngineMismatch as mismatch:
            phrases.append(str(mismatch).partition(": ")[2])
    return phrases


def evicts(manager: Any) -> bool:
    """Whether a manager itself tells its pool to evict a block's hash, as Mamba's does since 0.30."""
    return any("_maybe_evict_cached_block" in code.co_names for code in method_codes(type(manager)))


def method_codes(class_: type[Any], names: tuple[str, ...] = ()) -> Iterator[CodeType]:
    """The code of a class's methods, inherited ones included; with ``names``, of these methods only."""
    for owner in class_.__mro__:
        for name, method in vars(owner).items():
            code = getattr(method, "__code__", None)
            if isinstance(code, CodeType) and (not names or name in names):
                yield code


# --- Isolation classes: what keeps a request's KV apart from other requests, as keyed hashes.
#
# Two requests with the same tokens have different KV if they use different LoRA adapters or multimodal
# inputs, and must not share KV if their clients chose different cache salts. Neither a salt nor a name is
# recorded: a class is a hash of 64 bits with a key of this process, or that of ``KVLEDGER_EVENTS_KEY``.
# Classes are read once for a request, when it arrives, and again when a session is extended.

NOTHING: ev.Isolation = []
"""One list for all requests without a cache salt, a LoRA adapter and a multimodal input."""


def _secret() -> bytes:
    try:
        key = from_environment()
    except LedgerError:  # too short: hash_tracker.py says so
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
