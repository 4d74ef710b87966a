"""vLLM's classes and functions that kvledger uses without an engine.

An instance made here is of use only for comparing signatures: no ``__init__`` runs, no engine starts.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from inspect import signature
from typing import Any


def bare_scheduler() -> Any:
    """A scheduler with cache manager and connector, of use only for comparing signatures."""
    if os.environ.get("VLLM_USE_V1") == "0" and find_spec("vllm.core.scheduler") is not None:
        return _bare_v0()
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    return _bare(Scheduler, kv_cache_manager=_bare(KVCacheManager), connector=_bare(KVConnectorBase_V1))


def engine_processes() -> Any:
    """vLLM's module whose ``shutdown(procs, timeout)`` ends engine cores; None if it has no such function."""
    try:
        from vllm.v1.engine import utils
    except ImportError:
        return None
    shutdown = getattr(utils, "shutdown", None)
    if shutdown is None or list(signature(shutdown).parameters) != ["procs", "timeout"]:
        return None
    return utils


def worker_wrapper() -> Any:
    """vLLM's class that creates a worker and its KV caches."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return WorkerWrapperBase


def engine_core() -> Any:
    """vLLM's class of engine cores, if this process has imported it."""
    return getattr(sys.modules.get("vllm.v1.engine.core"), "EngineCore", None)


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
