"""The events of the scenarios, recorded once for all test files that read them."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest
from tests.engines.observed import observe

from kvledger.audit.events import AnyEvent, Event
from kvledger.audit.traffic.driver import Driver

Recorded = Callable[..., list[Event]]


def is_idle(driver: Driver) -> bool:
    """Whether the engine has no request and every block is free but the null block."""
    pool = driver.scheduler.kv_cache_manager.block_pool
    pending = [*driver.scheduler.requests, *driver.in_flight, *driver.runner.loading]
    return not pending and driver.setup.blocks - 1 == pool.get_num_free_blocks()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The events of a scenario at a level. The xdist worker that needs a scenario first runs it for all.

    Every scenario leaves its engine idle.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the xdist workers of a run share this folder
    decode = msgspec.msgpack.Decoder(list[AnyEvent]).decode

    def record(name: str, level: str = "tokens") -> list[Event]:
        from tests.scenarios.corpus import SCENARIOS

        path = folder / f"{level}-{name}.events"
        if not path.exists():
            driver, events = observe(SCENARIOS[name], level)
            assert is_idle(driver)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(msgspec.msgpack.encode(events))
            draft.replace(path)
        return list(decode(path.read_bytes()))

    return record
