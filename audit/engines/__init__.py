"""Adapters: one module a family of engine releases, the only place that knows a host's names.

An adapter is chosen by what the host *has* (signatures) and reported by what it *is* (version).
``choose`` gives the observer class for a scheduler; constructing one wraps nothing yet.
"""

from __future__ import annotations

from typing import Any

from kvledger.audit.engines.v1 import V1Observer
from kvledger.audit.hooks import EngineMismatch, check

ADAPTERS: tuple[type[V1Observer], ...] = (V1Observer,)


def choose(scheduler: Any) -> type[V1Observer]:
    """The adapter whose whole table fits ``scheduler``.

    Raises :class:`EngineMismatch`, naming what differs from the nearest adapter.
    """
    refusals = []
    for adapter in ADAPTERS:
        try:
            check(adapter.HOOKS, scheduler)
        except EngineMismatch as mismatch:
            refusals.append(mismatch)
        else:
            return adapter
    raise min(refusals, key=lambda mismatch: len(str(mismatch)))


def host_version() -> str:
    """The version vLLM says it is; the import is the host's own and long done by now."""
    import vllm

    return str(vllm.__version__)


def scheduler_config() -> Any:
    """vLLM's class whose ``get_scheduler_cls`` an EngineCore calls before it makes its scheduler."""
    from vllm.config.scheduler import SchedulerConfig

    return SchedulerConfig
