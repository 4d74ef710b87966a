"""What SGLang's token pool holds, by SGLang's own methods."""

from __future__ import annotations

from typing import Any


def sizes(scheduler: Any) -> dict[str, int]:
    """Tokens of the pool, and where they are. ``missing`` is 0 at rest; below, tokens are counted twice."""
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    sizes = {"size": int(allocator.size), "available": int(allocator.available_size())}
    held_by = getattr(scheduler, "pool_stats_observer", cache)
    for name, owner in (("evictable", cache), ("protected", cache), ("session_held", held_by)):
        method = getattr(owner, f"{name}_size", None) or getattr(owner, f"{name}_tokens", None)
        if method is not None:
            value = method()
            sizes[name] = int(value[0] if isinstance(value, tuple) else value)
    return sizes | {"missing": sizes["size"] - sum(list(sizes.values())[1:])}
