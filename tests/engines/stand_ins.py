"""Schedulers with the signatures of a release; their methods do nothing."""

from __future__ import annotations

from typing import Any

from kvledger.audit.engines import Adapter


def stand_in(adapter: Adapter) -> Any:
    """A scheduler of a new class as ``adapter`` expects it; of several possible signatures, the last."""
    scheduler = type("Scheduler", (), {})
    owners: dict[str, Any] = {"": scheduler}
    for hook in adapter.HOOKS:
        owner = owners.setdefault(hook.owner, type(hook.owner, (), {}))
        names = hook.parameters[-1] if hook.parameters else ()
        setattr(owner, hook.method, eval(f"lambda {', '.join(('self', *names))}: None"))
    for path in getattr(adapter, "HAS", ()):
        owner, _, name = path.rpartition(".")
        setattr(owners[owner], name, lambda self: None)
    instance = scheduler()
    for name, owner in owners.items():
        if name:
            setattr(instance, name, owner())
    return instance
