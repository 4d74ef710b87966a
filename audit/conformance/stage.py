"""Where a row's engines are begun, observed, and ended."""

from __future__ import annotations

from typing import Any

from ..journal.recorder import MemoryRecorder


class Stage:
    """One row's engines, each under observation. ``salt``: what makes its tokens those of no other."""

    def __init__(self, salt: str = "", disaggregated: bool = False) -> None:
        self.salt = salt
        self.engines: list[Any] = []
        self.observed: list[tuple[MemoryRecorder, Any]] = []
        self.prefiller: Any = None
        """Where ``disaggregated``, the engine that all others read from."""
        self._disaggregated = disaggregated

    def begin(self, **setup: Any) -> Any:
        """A new engine's driver; a second engine finds what the first has saved."""
        from . import disaggregated
        from .driver import Setup
        from .worker import WorkedDriver

        if not self._disaggregated:
            return self._observe(WorkedDriver(Setup(**setup), salt=self.salt))
        if self.prefiller is None:
            self.prefiller = self._observe(disaggregated.prefilling(setup, self.salt))
        return self._observe(disaggregated.decoding(setup, self.salt, self.prefiller))

    def end(self) -> None:
        """Stop observing; have the connectors of a pair let go of what they hold."""
        from . import disaggregated

        for _, observer in self.observed:
            observer.stop("exit")
        for engine in self.engines if self._disaggregated else ():
            disaggregated.shut_down(engine)

    def _observe(self, driver: Any) -> Any:
        from ..engines import choose, host_version

        sink = MemoryRecorder()
        observer = choose(driver.scheduler)(driver.scheduler, sink, version=host_version())
        observer.start()
        observer.watch_worker(driver.worker.connector)
        self.engines.append(driver)
        self.observed.append((sink, observer))
        return driver
