"""What vLLM's plugin mechanism calls, in every process that loads plugins.

Inert unless ``KVLEDGER_DIR`` is set; ``KVLEDGER_LEVEL=blocks`` keeps the blocks as well. It wraps two
functions. ``SchedulerConfig.get_scheduler_cls`` only an EngineCore calls, just before it makes its
scheduler; so it is light everywhere else, and out-of-tree schedulers are observed too.
``KVConnectorFactory.create_connector`` makes the worker side of a KV connector in a worker's process,
which gets a journal of its own. vLLM calls plugin functions bare
(``vllm/plugins/__init__.py``): nothing may leave :func:`install`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..journal.recorder import Recorder

logger = logging.getLogger("kvledger")

_MARK = "__kvledger__"
_counter = itertools.count()


def install() -> None:
    """The ``vllm.general_plugins`` entry point. Idempotent; never raises."""
    try:
        if os.environ.get("KVLEDGER_DIR"):
            _install()
    except Exception as error:  # an escaping exception would kill the engine core
        logger.warning("kvledger is off: %s: %s", type(error).__name__, error)


def _install() -> None:
    from ..engines import scheduler_config

    config = scheduler_config()
    if hasattr(config.get_scheduler_cls, _MARK):
        return
    original = config.get_scheduler_cls

    @functools.wraps(original)
    def get_scheduler_cls(self: Any) -> Any:
        chosen = original(self)
        try:
            _observe_instances(chosen)
        except Exception as error:  # serving goes on unobserved
            logger.warning("kvledger is off: %s: %s", type(error).__name__, error)
        return chosen

    setattr(get_scheduler_cls, _MARK, True)
    config.get_scheduler_cls = get_scheduler_cls
    _observe_workers()


def _observe_workers() -> None:
    """The worker side of a connector, not of its children, is observed once vLLM has made it (since 0.10)."""
    from ..engines.connectors.worker_side import connector_factory

    found = connector_factory()
    if found is None:
        return
    factory, worker = found
    original = factory.create_connector
    making: list[object] = []

    @functools.wraps(original)
    def create_connector(config: Any, role: Any, *args: Any, **kwargs: Any) -> Any:
        making.append(config)
        try:
            connector = original(config, role, *args, **kwargs)
        finally:
            making.pop()
        if role == worker and not making:
            observe_worker(connector, config)
        return connector

    factory.create_connector = create_connector


def observe_worker(connector: Any, config: Any) -> object | None:
    """Put the worker side of one connector under observation into ``$KVLEDGER_DIR``; None if it can't be.

    Never raises: a worker that can't be observed works on, and the audit is of the scheduler's side alone.
    """
    try:
        from ..engines import host_version
        from ..engines.connectors.worker_side import WorkerObserver

        recorder = _recorder("worker")
        observer = WorkerObserver(connector, config, recorder, host_version())
        recorder.on_exit = functools.partial(observer.stop, "exit")
        logger.info("kvledger observes a worker's %s into %s", type(connector).__name__, recorder.folder.name)
        return observer
    except Exception as error:  # serving goes on unobserved
        logger.warning("kvledger does not see this worker: %s: %s", type(error).__name__, error)
        return None


def _recorder(what: str) -> Recorder:
    """A journal of its own in ``$KVLEDGER_DIR``, where there is room."""
    from ..journal.recorder import Recorder
    from ..journal.retention import limits, make_room

    name = f"{what}-{time.time_ns() // 1_000_000}-{os.getpid()}-{next(_counter)}"
    folder, bounds = Path(os.environ["KVLEDGER_DIR"]), limits()
    for removed in make_room(folder, bounds.folder_bytes):
        logger.info("kvledger removed the journal of an ended engine, %s", removed.name)
    return Recorder(folder / name, bounds)


def _observe_instances(scheduler_class: Any) -> None:
    """Every instance of exactly this class will be observed from the end of its ``__init__``."""
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
    """``$KVLEDGER_LEVEL``, or ``tokens`` where there is no such level or it is out of reach."""
    from ..engines import LEVELS, blocks_out_of_reach

    level = os.environ.get("KVLEDGER_LEVEL") or LEVELS[0]
    if level not in LEVELS:
        logger.warning("kvledger: KVLEDGER_LEVEL is %r, not one of %s", level, ", ".join(LEVELS))
        return LEVELS[0]
    reason = blocks_out_of_reach(scheduler) if level == "blocks" else ""
    if reason:
        logger.warning("kvledger: no level blocks here: %s", reason)
        return LEVELS[0]
    return level


def observe(scheduler: Any) -> object | None:
    """Put one live scheduler under observation into ``$KVLEDGER_DIR``; None if it can't be.

    Never raises: a host that does not fit is told in one log line and runs on unobserved.
    """
    try:
        from ..engines import choose, host_version

        observer_class = choose(scheduler)
        recorder = _recorder("engine")
        level = _level(scheduler)
        observer = observer_class(scheduler, recorder, version=host_version(), level=level)
        observer.start()
        recorder.on_exit = functools.partial(observer.stop, "exit")
        name = recorder.folder.name
        logger.info("kvledger observes %s at level %s into %s", type(scheduler).__name__, level, name)
        return observer
    except Exception as error:  # serving goes on unobserved
        logger.warning("kvledger is off: %s: %s", type(error).__name__, error)
        return None
