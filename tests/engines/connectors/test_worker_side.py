"""The worker side of live connectors with the real scheduler: what a worker does in each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.conformance.connectors import FailingConnector

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.conformance.worker import DriverWithWorker
from kvledger.audit.engines import choose, host_version
from kvledger.audit.engines.connectors.worker_side import WorkerObserver, worker_in_this_process
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.events import BlocksPromised, EngineStarted, Event, WorkerStepped
from kvledger.audit.journal.memory_recorder import MemoryRecorder
from kvledger.audit.traffic.driver import EngineSetup

Watched = tuple[DriverWithWorker, MemoryRecorder, Any]


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    """An engine with ExampleConnector, observed on both sides; 96 tokens are in the store."""
    options = (("shared_storage_path", str(tmp_path)),)
    setup = EngineSetup(connector="ExampleConnector", connector_options=options, asynchronous=request.param)
    driver, sink, observer = observed(setup)
    driver.add("first", 99, 1)
    driver.run()
    driver.reset_prefix_cache()
    yield driver, sink, observer
    observer.stop("detached")


def observed(setup: EngineSetup) -> Watched:
    """An engine that is observed on both sides."""
    driver, sink = DriverWithWorker(setup), MemoryRecorder()
    observer = choose(driver.scheduler)(driver.scheduler, sink, version=host_version())
    assert isinstance(observer, V1Observer)
    observer.start()
    observer.watch_worker(driver.worker.connector)
    return driver, sink, observer


def load_again(driver: DriverWithWorker) -> None:
    driver.add("again", 99, 2, shares=("first", 99))
    driver.run()


def steps(events: list[Event]) -> list[WorkerStepped]:
    return [event for event in events if isinstance(event, WorkerStepped)]


def test_a_load_is_reported_for_the_step_that_promised_it(watched: Watched):
    driver, sink, _ = watched
    load_again(driver)
    events = sink.take()

    (promise,) = [event for event in events if isinstance(event, BlocksPromised)]
    (worked,) = steps(events)
    assert (promise.step, promise.blocks, True) == (worked.step, worked.loaded_blocks, worked.started)
    assert (96, len(driver.worker.layers)) == (promise.tokens, worked.layers)


def test_both_sides_of_a_clean_run_are_clean(watched: Watched):
    driver, sink, _ = watched
    load_again(driver)
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(sink.take())

    assert ("clean", {0: True}) == (auditor.verdict, auditor.ledger.transfers.aligned)
    assert 96 == auditor.ledger.totals().loaded


def test_blocks_that_failed_to_load_are_reported(monkeypatch: pytest.MonkeyPatch):
    """This connector has no metadata reader, and its worker's reports are observed all the same."""
    module = "tests.conformance.connectors"
    setup = EngineSetup(
        connector="FailingConnector", connector_module=module, connector_options=(("store", "w"),)
    )
    driver, sink, observer = observed(setup)
    driver.add("first", 99, 1)
    driver.run()
    driver.reset_prefix_cache()
    monkeypatch.setattr(FailingConnector, "down", True)
    load_again(driver)
    observer.stop("detached")

    (worked,) = steps(sink.take())
    assert (None, True) == (worked.loaded_blocks, worked.started)
    assert 6 == len(worked.failed_blocks)


def test_the_connector_is_restored(watched: Watched):
    driver, _, observer = watched
    observer.stop("detached")

    for side in (driver.worker.connector, driver.scheduler.connector):
        assert not [name for name in vars(side) if hasattr(type(side), name)]


def test_a_worker_in_another_process_is_out_of_reach(watched: Watched):
    assert worker_in_this_process(watched[0].scheduler.vllm_config) is None


def test_a_workers_own_journal_begins_with_its_engine_and_rank(tmp_path: Path):
    options = (("shared_storage_path", str(tmp_path)),)
    driver, sink = (
        DriverWithWorker(EngineSetup(connector="ExampleConnector", connector_options=options)),
        MemoryRecorder(),
    )
    config = driver.scheduler.vllm_config
    observer = WorkerObserver(driver.worker.connector, config, sink, host_version())
    driver.add("first", 99, 1)
    driver.run()
    driver.reset_prefix_cache()
    load_again(driver)
    observer.stop("exit")
    started, _, worked, stopped = sink.take()

    assert isinstance(started, EngineStarted)
    assert {"transfer": config.kv_transfer_config.engine_id, "rank": 0} == started.configuration
    assert isinstance(worked, WorkerStepped) and worked.started
    assert "EngineStopped" == type(stopped).__name__
