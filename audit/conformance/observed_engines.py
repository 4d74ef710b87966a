"""The engines of one situation, each under observation."""

from __future__ import annotations

from typing import Any

from ..events import Event
from ..traffic.observation import Observation


class ObservedEngines:
    """Starts and stops the engines of one situation and keeps what was observed of each.

    ``salt`` makes the tokens of this situation differ from those of any other. ``disaggregated``: every
    engine reads from one more, which prefills for it.
    """

    def __init__(self, salt: str = "", disaggregated: bool = False) -> None:
        self.salt = salt
        self.drivers: list[Any] = []
        """One driver per engine, in the order of their start."""
        self.observed: list[Observation] = []
        """What was observed of each engine, in the same order."""
        self.events: list[list[Event]] = []
        """The events of each, once observation has stopped."""
        self.prefiller: Any = None
        """The driver of the engine that all others read from, where ``disaggregated``."""
        self._disaggregated = disaggregated
        """Whether every engine reads from one more."""

    def start(self, **setup: Any) -> Any:
        """Start an engine; returns its driver. A second engine finds what the first one saved."""
        from ..traffic.driver import EngineSetup
        from . import disaggregated
        from .worker import DriverWithWorker

        if not self._disaggregated:
            return self._observe(DriverWithWorker(EngineSetup(**setup), salt=self.salt))
        if self.prefiller is None:
            self.prefiller = self._observe(disaggregated.prefilling(setup, self.salt))
        return self._observe(disaggregated.decoding(setup, self.salt, self.prefiller))

    def stop(self) -> None:
        """Stop observing, and shut the connectors of disaggregated engines down."""
        from . import disaggregated

        self.events = [observation.stop() for observation in self.observed]
        for driver in self.drivers if self._disaggregated else ():
            disaggregated.shut_down(driver)

    def _observe(self, driver: Any) -> Any:
        from ..engines.v1_since_0_27 import V1Observer

        observation = Observation()
        observation(driver.scheduler)
        (observer,) = observation.observers
        assert isinstance(observer, V1Observer)
        observer.watch_worker(driver.worker.connector)
        self.drivers.append(driver)
        self.observed.append(observation)
        return driver
