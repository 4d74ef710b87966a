"""One process imports vLLM for all simulations of a test run; each simulation gets forks of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from kvledger.audit.traffic import processes
from kvledger.audit.traffic.processes import Line, VllmProcess


@pytest.fixture(scope="session")
def started() -> Iterator[dict[tuple[str, ...], VllmProcess]]:
    """The processes that have imported vLLM, by their commands."""
    found: dict[tuple[str, ...], VllmProcess] = {}
    yield found
    for process in found.values():
        process.stop()


@pytest.fixture(autouse=True)
def shared_process(started: dict[tuple[str, ...], VllmProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared:
        """Stands for a process of its own. Its end is that of its forks."""

        def __init__(self, *command: str, module: str) -> None:
            self._process = started.get(command) or VllmProcess(*command, module=module)
            started[command] = self._process
            self.line = self._process.line
            self._forks: list[int] = []

        def fork(self, seconds: float) -> tuple[Line, int] | None:
            forked = self._process.fork(seconds)
            self._forks += [] if forked is None else [forked[1]]
            return forked

        def stop(self) -> None:
            for fork in self._forks:
                with contextlib.suppress(OSError):
                    os.kill(fork, signal.SIGKILL)

    monkeypatch.setattr(processes, "VllmProcess", Shared)
