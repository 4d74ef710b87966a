"""Let an engine's journal end in good order when vLLM ends the engine.

At SIGTERM, vLLM's front end sends SIGTERM to its engine cores. Since 0.23 it kills them right after that,
unless ``--shutdown-timeout`` allows them more time, so an engine core could neither report how its requests
ended nor write its last events. Two functions are wrapped:

- In the front end, the function that ends the engine cores: an engine core that writes a journal has at least
  :data:`GRACE_SECONDS` before it is killed. The function returns earlier if the engine core ends earlier.
- In the engine core, ``EngineCore.shutdown``: it runs after the last step, and the journal ends before the
  workers and the device are released, which may take longer. Journals of workers in the same process have
  all their events by then.

Nothing here raises into the engine. No signal handler is installed: Python runs one only between two
bytecodes of the main thread, so it could delay the end of an engine that hangs. While the journal ends, an
engine core ignores a second SIGTERM: systemd and Ctrl-C signal the front end and the engine core alike, and
the front end then signals the engine core once more.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

logger = logging.getLogger("kvledger")

GRACE_SECONDS = 2.0
"""The least time that an observed engine core has between SIGTERM and SIGKILL."""

_MARK = "__kvledger__"
_observers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The observer of each scheduler. The scheduler's hooks keep the observer alive."""


def give_time() -> None:
    """Wrap the function of vLLM's front end that ends engine cores. Idempotent."""
    from ..engines import engine_processes

    module = engine_processes()
    if module is None or hasattr(module.shutdown, _MARK):
        return
    original = module.shutdown

    @functools.wraps(original)
    def shutdown(procs: Any, timeout: float | None = None) -> Any:
        if timeout is not None and timeout < GRACE_SECONDS and _writes_journal(procs):
            timeout = GRACE_SECONDS
        return original(procs, timeout=timeout)

    setattr(shutdown, _MARK, True)
    module.shutdown = shutdown


def _writes_journal(processes: Iterable[Any]) -> bool:
    """Whether one of the processes is alive and writes a journal."""
    try:
        from ..journal.catalogue import ENGINE
        from ..journal.format import is_live

        folder = Path(os.environ["KVLEDGER_DIR"])
        ids = [process.pid for process in processes if process.is_alive()]
        return any(is_live(path) for id in ids for path in folder.glob(f"{ENGINE}*-{id}-*"))
    except Exception as error:
        logger.warning("kvledger can't tell whether an engine is observed: %r", error)
        return False


def end_before_shutdown(scheduler: Any, observer: Any) -> None:
    """End the journal of ``observer`` when ``EngineCore.shutdown`` is called. Never raises."""
    try:
        from ..engines import engine_core

        _observers[scheduler] = weakref.ref(observer)
        core = engine_core()
        if core is None or hasattr(core.shutdown, _MARK):
            return
        original = core.shutdown

        @functools.wraps(original)
        def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
            _end_journal(getattr(self, "scheduler", None))
            return original(self, *args, **kwargs)

        setattr(shutdown, _MARK, True)
        core.shutdown = shutdown
    except Exception as error:  # the journal then ends with the process
        logger.warning("kvledger can't observe the engine's shutdown: %r", error)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGTERM and SIGINT in an engine core's process, for which vLLM has reset its handlers by now."""
    signals = []
    if parent_process() is not None and threading.current_thread() is threading.main_thread():
        signals = [one for one in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(one) is signal.SIG_DFL]
    try:
        for one in signals:
            signal.signal(one, signal.SIG_IGN)
        yield
    finally:
        for one in signals:
            signal.signal(one, signal.SIG_DFL)


def _flush_workers() -> None:
    """Write what the workers of this process have emitted: the process may be killed a moment later."""
    from ..journal.recorder import flush_all

    flush_all(GRACE_SECONDS / 4)


def _end_journal(scheduler: Any) -> None:
    try:
        reference = _observers.get(scheduler)
        observer = reference() if reference is not None else None
        if observer is not None:
            with _undisturbed():
                observer.shutting_down()
                _flush_workers()
    except Exception as error:
        logger.warning("kvledger failed at the engine's shutdown: %r", error)


# --- Begins to observe a scheduler in its first step.
#
# Until then a test may replace the connector and add requests in any state. Nothing is lost: the snapshot
# at that point describes every request that waits.

SCHEDULE, UPDATE = "schedule", "update_from_output"


class FirstStep:
    """Calls ``observe`` once with a scheduler: before it runs its first ``schedule()``.

    The two methods of a step are replaced on the object itself. So a method that overrides one of them runs
    once, and may call the one below it in any way.
    """

    def __init__(self, scheduler: Any, observe: Callable[[Any], None]) -> None:
        self._scheduler = scheduler
        self._observe: Callable[[Any], None] | None = observe
        """Begins to observe it; None once it was called."""
        self._below = {name: getattr(scheduler, name) for name in (SCHEDULE, UPDATE)}
        """What the replaced methods call: the scheduler's own method, and later the observing wrapper."""
        self._replaced = {name: self._replace(name) for name in self._below}
        """What the scheduler has in place of its methods until its first step."""

    @property
    def missed(self) -> bool:
        """Whether the scheduler took steps, none of them by a call of its own ``schedule()``.

        A test may call the class's method with the scheduler. Releases that count no steps answer False.
        """
        return self._observe is not None and getattr(self._scheduler, "current_step", 0) > 0

    def _replace(self, name: str) -> Callable[..., Any]:
        @functools.wraps(self._below[name])
        def replaced(*args: Any, **kwargs: Any) -> Any:
            observe = self._observe
            if observe is not None and name == SCHEDULE:
                self._observe = None
                self._begin(observe)
            return self._below[name](*args, **kwargs)

        setattr(self._scheduler, name, replaced)
        return replaced

    def _begin(self, observe: Callable[[Any], None]) -> None:
        """Restore the scheduler's methods and observe them.

        A test may have bound ``update_from_output`` before, as ``s.update_from_output(s.schedule(), output)``
        does: what it bound calls the observing wrapper. If it has wrapped ``schedule``, its wrapper stays on
        top, because it is running. If it has wrapped ``update_from_output``, the wrapper is observed with it.
        """
        scheduler, present = self._scheduler, dict(vars(self._scheduler))
        ours = [name for name, method in self._replaced.items() if present.get(name) is method]
        for name in {SCHEDULE, *ours} & present.keys():
            delattr(scheduler, name)
        observe(scheduler)
        for name in {SCHEDULE, *ours}:
            self._below[name] = getattr(scheduler, name)
        if SCHEDULE not in ours and SCHEDULE in present:
            scheduler.schedule = present[SCHEDULE]
