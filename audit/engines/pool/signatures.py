"""Which methods are wrapped at level ``blocks``, and what an engine must have for it.

Every pool of the engine, and the few methods of its scheduler and managers in which tables come or go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from ...hooks import EngineMismatch, Hook, check

_FULL = ("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id")
_PART = ("request", "block", "num_tokens", "kv_cache_group_id", "block_size")

POOL: tuple[Hook, ...] = (
    Hook("", "get_new_blocks", (("num_blocks",),)),
    Hook("", "touch", (("blocks",),)),
    Hook("", "free_blocks", (("ordered_blocks",), ("ordered_blocks", "prepend"))),
    Hook("", "unpin_blocks", (("blocks", "on_reuse"),), optional=True),  # since 0.30
    Hook("", "cache_full_blocks", (_FULL, (*_FULL, "block_mask"))),
    Hook("", "cache_partial_block", (_PART, (*_PART, "replace_existing_hashes")), optional=True),  # 0.24
    Hook("", "move_block_hashes", (("src_block", "dst_block"),), optional=True),  # since 0.27
    Hook("", "evict_blocks", (("block_ids",),), optional=True),  # since 0.13
    Hook("", "reset_prefix_cache", ((),)),
)
EVICTING: tuple[Hook, ...] = (Hook("", "_maybe_evict_cached_block", (("block",),)),)
MANAGER: tuple[Hook, ...] = (
    Hook("", "_apply_cow", (("request_id", "block_idx", "source_block", "cow_block"),), optional=True),
)
ALL_GROUPS: tuple[Hook, ...] = (
    Hook("", "pop_blocks_for_free", (("request",),), after="deferred", optional=True),  # since 0.24
)


def unreadable(managers: Iterable[Any]) -> list[str]:
    """Managers whose blocks wander between tables and pools by ways that no call of a pool shows."""
    names = {type(manager).__name__ for manager in managers}
    return [f"the blocks of a {name} can't be followed" for name in sorted(names) if "HiSparse" in name]


def differences(scheduler: Any) -> list[str]:
    """What a scheduler lacks, or has otherwise, of what level ``blocks`` relies on."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    managers = getattr(getattr(manager, "coordinator", None), "single_type_managers", None)
    if not managers:
        return ["it has no managers of single KV cache groups"]
    found = unreadable(managers)
    for table, owner in (
        (POOL, managers[0].block_pool),
        (MANAGER, managers[0]),
        (ALL_GROUPS, manager),
    ):
        try:
            check(table, owner)
        except EngineMismatch as mismatch:
            found.append(str(mismatch).partition(": ")[2])
    return found


def evicts(manager: Any) -> bool:
    """Whether a manager has its pool forget a block's hash by itself, as Mamba's does since 0.30."""
    return any("_maybe_evict_cached_block" in code.co_names for code in codes(type(manager)))


def codes(kind: type[Any], names: tuple[str, ...] = ()) -> Iterator[CodeType]:
    """Of a class's methods, inherited ones with them: all of them, or these."""
    for owner in kind.__mro__:
        for name, method in vars(owner).items():
            code = getattr(method, "__code__", None)
            if isinstance(code, CodeType) and (not names or name in names):
                yield code
