"""The plugin that vLLM calls in every process that loads plugins.

It is inert unless ``KVLEDGER_DIR`` is set; ``KVLEDGER_LEVEL=blocks`` observes the block pool as well. It
wraps three functions. Only an EngineCore calls ``SchedulerConfig.get_scheduler_cls``, just before it creates
its scheduler, so out-of-tree schedulers are observed too and other processes do no work.
``KVConnectorFactory.create_connector`` creates the worker side of a KV connector in a worker process, which
gets its own journal. ``WorkerWrapperBase.initialize_from_config`` gives a worker its KV caches: from then on
its weights are observed, and at level ``content`` its blocks (``content_plugin.py``). The end of an engine is
in ``engine_end.py``. vLLM does not catch what a plugin function raises (``vllm/plugins/__init__.py``), so
:func:`install` must not raise.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import parent_process
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..release_semantics import contract
from . import engine_end
from .attach import recorder_in_folder
from .variables import PREFIX, unknown

if TYPE_CHECKING:
    from ..events import Setting

logger = logging.getLogger("kvledger")
vllm_logger = logging.getLogger("vllm.kvledger")
"""Below vLLM's own logger, so that operators see its lines among the engine's."""

_MARK = "__kvledger__"
_has_named = False
"""Whether unknown variables have been logged in this process."""

_ENDS = {"shutdown": "the engine shuts down", "exit": "the process ends", "detached": "it was detached"}
"""Reasons of an orderly end."""

INSTANCE_CHARACTERS = 64
"""The most characters of a host's name, or of ``KVLEDGER_NAME``, in a journal."""


def install() -> None:
    """The ``vllm.general_plugins`` entry point. Idempotent; never raises."""
    try:
        _name_unknown_variables()
        if os.environ.get("KVLEDGER_DIR"):
            _install()
    except Exception as error:  # an escaping exception would kill the engine core
        logger.warning("kvledger is off: %s: %s", type(error).__name__, error)


def _name_unknown_variables() -> None:
    """Log each variable that may be a misspelt one of kvledger's, in the first process of the engine only."""
    global _has_named
    if _has_named or parent_process() is not None:
        return
    _has_named = True
    if any(name.startswith(PREFIX) for name in os.environ):
        for sentence in unknown(os.environ):
            vllm_logger.warning("%s", sentence)


def _log_end(log: logging.Logger, reason: str) -> None:
    """Log once that the observation ended. A hook that kept failing has been logged already."""
    phrase = _ENDS.get(reason)
    if phrase is not None:
        log.info("kvledger ends its observation: %s", phrase)


def install_in_sglang() -> None:
    """The ``sglang.srt.plugins`` entry point, since SGLang 0.5.11. Never raises.

    SGLang calls it in each of its processes. A scheduler is observed from the end of its ``__init__``.
    """
    try:
        if os.environ.get("KVLEDGER_DIR"):
            from ..engines.sglang.observer import call_when_made

            call_when_made(observe)
    except Exception as error:  # serving goes on unobserved
        logger.warning("kvledger is off: %s: %s", type(error).__name__, error)


def _install() -> None:
    from ..engines import scheduler_config

    config = scheduler_config()
    if hasattr(config.get_scheduler_cls, _MARK):
        return
    original = config.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> Any:
        scheduler_class = original(self)
        try:
            _observe_instances(scheduler_class)
        except Exception as error:  # serving goes on unobserved
            logger.warning("kvledger is off: %s: %s", type(error).__name__, error)
        return scheduler_class

    setattr(get_scheduler_cls, _MARK, True)
    config.get_scheduler_cls = get_scheduler_cls
    _observe_workers()
    _see_workers()
    engine_end.give_time()


def _observe_workers() -> None:
    """Observe the worker side of each connector that vLLM creates, not of its children (since 0.10)."""
    from ..engines.connectors.worker_side import connector_factory

    factory_and_role = connector_factory()
    if factory_and_role is None:
        return
    factory, worker = factory_and_role
    original = factory.create_connector
    creating: list[object] = []

    @functools.wraps(original)
    def create_connector(config: Any, role: Any, *args: Any, **kwargs: Any) -> Any:
        creating.append(config)
        try:
            connector = original(config, role, *args, **kwargs)
        finally:
            creating.pop()
        if role == worker and not creating:
            observe_worker(connector, config)
        return connector

    factory.create_connector = create_connector


def _see_workers() -> None:
    """See each worker that this process makes, once it has its KV caches."""
    from ..engines.source_files import worker_wrapper

    wrapper = worker_wrapper()
    original = wrapper.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            _see_worker(self.worker)
        except Exception as error:  # serving goes on unobserved
            logger.warning("kvledger does not observe this worker: %s: %s", type(error).__name__, error)
        return result

    wrapper.initialize_from_config = initialize_from_config


def _see_worker(worker: Any) -> None:
    """Observe the weights of a worker, and at level ``content`` its blocks."""
    from ..engines import host_version
    from ..engines.weights_watch import WorkerCalls, worker_made

    is_content = os.environ.get("KVLEDGER_LEVEL") == "content"
    worker_made(worker)
    if worker.vllm_config.parallel_config.world_size > 1:
        WorkerCalls(worker, lambda: recorder_in_folder("worker"), host_version(), digests=is_content)
    if is_content:
        from .content_plugin import observe_once_warm

        observe_once_warm(worker)


def observe_worker(connector: Any, config: Any) -> object | None:
    """Observe the worker side of one connector, into a journal in ``$KVLEDGER_DIR``; None if it can't be.

    Never raises: a worker that can't be observed runs on, and only the scheduler side is audited.
    """
    try:
        from ..engines import host_version
        from ..engines.connectors.worker_side import WorkerObserver

        recorder = recorder_in_folder("worker")
        observer = WorkerObserver(connector, config, recorder, host_version())
        recorder.on_exit = functools.partial(observer.stop, "exit")
        logger.info("kvledger observes a worker's %s into %s", type(connector).__name__, recorder.folder.name)
        return observer
    except Exception as error:  # serving goes on unobserved
        logger.warning("kvledger does not observe this worker: %s: %s", type(error).__name__, error)
        return None


def instance() -> dict[str, Setting]:
    """``$KVLEDGER_NAME``, or the host's name: engines of two containers may have one process id."""
    given = os.environ.get("KVLEDGER_NAME")
    name = "".join(filter(str.isprintable, given or socket.gethostname()))[:INSTANCE_CHARACTERS]
    return {"instance": name, "instance_given": bool(given)}


def _observe_instances(scheduler_class: Any) -> None:
    """Observe each instance of exactly this class from the end of its ``__init__``."""
    if getattr(scheduler_class.__init__, _MARK, None) is scheduler_class:
        return
    original: Callable[..., None] = scheduler_class.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is scheduler_class:
            observe(self)

    setattr(init, _MARK, scheduler_class)
    scheduler_class.__init__ = init


def _level(scheduler: Any) -> str:
    """``$KVLEDGER_LEVEL``, or ``tokens`` if that names no level or this release does not allow it."""
    from ..engines import LEVELS, blocks_out_of_reach

    level = os.environ.get("KVLEDGER_LEVEL") or LEVELS[0]
    if level not in LEVELS:
        logger.warning("kvledger: KVLEDGER_LEVEL is %r, not one of %s", level, ", ".join(LEVELS))
        return LEVELS[0]
    reason = blocks_out_of_reach(scheduler) if level != LEVELS[0] else ""
    if reason:
        logger.warning("kvledger observes level tokens; level %s is not possible here: %s", level, reason)
        return LEVELS[0]
    return level


def observe(scheduler: Any) -> object | None:
    """Observe one live scheduler, into a journal in ``$KVLEDGER_DIR``; None if it can't be.

    Never raises: an engine that can't be observed runs on, and one log line says why.
    """
    try:
        from ..engines import choose, host_version

        observer_class = choose(scheduler)
        recorder = recorder_in_folder("engine")
        level = _level(scheduler)
        observer = observer_class(scheduler, recorder, version=host_version(scheduler), level=level)
        observer.instance = instance()
        observer.on_stopped = functools.partial(_log_end, observer.LOGGER)
        observer.start()
        recorder.on_exit = functools.partial(observer.stop, "exit")
        engine_end.end_before_shutdown(scheduler, observer)
        observer.LOGGER.info(
            "kvledger observes %s %s: adapter %s, level %s, journal %s",
            contract(observer.ENGINE).name,
            observer.version,
            observer.NAME,
            level,
            recorder.folder,
        )
        return observer
    except Exception as error:  # serving goes on unobserved
        logger.warning("kvledger is off: %s: %s", type(error).__name__, error)
        return None


# --- Calls a function once certain modules are imported, however late.


class ImportWatch(MetaPathFinder):
    """Calls ``imported`` after each import of one of these modules, until :meth:`end`."""

    def __init__(self, names: Iterable[str], imported: Callable[[], None]) -> None:
        self._names = frozenset(names)
        self._imported = imported
        sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's usual spec, whose loader calls ``imported`` at last; None for other modules."""
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._imported()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def end(self) -> None:
        """Watch no further imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
