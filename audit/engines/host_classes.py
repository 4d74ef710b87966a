"""Instances of vLLM's classes for comparing signatures: no ``__init__`` runs, no engine starts."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any


def bare_scheduler() -> Any:
    """A scheduler with cache manager and connector, of use only for comparing signatures."""
    if os.environ.get("VLLM_USE_V1") == "0" and find_spec("vllm.core.scheduler") is not None:
        return _bare_v0()
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    return _bare(Scheduler, kv_cache_manager=_bare(KVCacheManager), connector=_bare(KVConnectorBase_V1))


def _bare_v0() -> Any:
    from vllm.core.block_manager import SelfAttnBlockSpaceManager
    from vllm.core.scheduler import Scheduler

    return _bare(Scheduler, block_manager=_bare(SelfAttnBlockSpaceManager))


def _bare(owner: type[Any], **attributes: Any) -> Any:
    """An instance without a call of ``__init__``; abstract classes allowed."""
    concrete = type(owner.__name__, (owner,), {"__del__": lambda self: None})
    concrete.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    instance: Any = object.__new__(concrete)
    vars(instance).update(attributes)
    return instance
