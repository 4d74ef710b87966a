"""What a live connector shows beside its admissions, on the real scheduler: its two sides, and tiers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.conformance.connectors import FailingConnector
from tests.engines.observed import audited, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start
from tests.time_limits import RUN_HANGS

from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.conformance.worker import DriverWithWorker
from kvledger.audit.engines import choose, host_version, observer
from kvledger.audit.engines.connector_metadata import metadata_readers, reader_of
from kvledger.audit.engines.connector_metadata.offloading import OffloadingReader, SimpleCPUOffloadReader
from kvledger.audit.engines.connectors.worker_side import WorkerObserver, worker_in_this_process
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.events import (
    Admitted,
    BlocksAllocated,
    BlocksPromised,
    ChildMatched,
    EngineStarted,
    Event,
    Finished,
    FreeCompleted,
    FreeDelayed,
    HandedOver,
    PoolCalls,
    PoolSeen,
    TiersReported,
    WorkerStepped,
)
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.ledger.blocks.pool import calls
from kvledger.audit.traffic.driver import Driver, EngineSetup, Observation

# --- what a live connector shows beyond its admissions: kept blocks, children, metadata, its own counts ---


ROOT = Path(__file__).parents[3]


def test_blocks_kept_for_a_transfer_are_reported_when_kept_and_when_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer, "CENSUS_STEPS", 1)

    def scenario(attach: Any) -> Driver:
        driver = SCENARIOS["delayed_free_sync"](attach)
        driver.add("more", 20, 9)
        driver.run()
        return driver

    _, events = observe(scenario)
    kept = [event for event in events if isinstance(event, FreeDelayed)]

    assert {"a", "b"} == {event.request_id for event in kept}
    assert all(event.blocks > 0 for event in kept)
    assert {event.request for event in kept} == {
        event.request for event in events if isinstance(event, FreeCompleted)
    }


def test_a_promise_of_several_groups_names_the_blocks_of_full_attention() -> None:
    _, events = observe(SCENARIOS["hybrid_external"], "blocks")
    (pool,) = [event for event in events if isinstance(event, PoolSeen)]
    (whole,) = [row[0] for row in zip(*(iter(pool.groups),) * 3, strict=True) if row[2] == 2]
    allocated = {
        block
        for event in events
        if isinstance(event, PoolCalls)
        for call in calls(event)
        if isinstance(call, BlocksAllocated)
        for _, group, blocks in call.calls()
        if group == whole
        for block in blocks
    }

    promises = [event for event in events if isinstance(event, BlocksPromised)]

    assert [(0, 96, 6)] == [(each.start, each.tokens, len(each.blocks)) for each in promises]
    assert allocated.issuperset(promises[0].blocks)


@pytest.mark.parametrize(
    "name", ["external_sync_sync", "load_failure_async_partial_sync", "delayed_free_async"]
)
def test_what_a_connector_is_handed_at_a_requests_end_is_recorded(name: str) -> None:
    if SCENARIOS[name].lacking():
        pytest.skip("; ".join(SCENARIOS[name].lacking()))
    _, events = observe(SCENARIOS[name])
    places = {event.request: place for place, event in enumerate(events) if isinstance(event, Finished)}
    handed = [(place, event) for place, event in enumerate(events) if isinstance(event, HandedOver)]

    assert places.keys() == {event.request for _, event in handed}
    for place, event in handed:
        finished = events[places[event.request]]
        assert isinstance(finished, Finished)
        assert (places[event.request] + 1, finished.computed_tokens) == (place, event.computed_tokens)
        assert event.room_tokens == 16 * event.blocks >= event.computed_tokens


@pytest.mark.parametrize("cuts_off", [False, True])
def test_a_connector_that_is_handed_blocks_of_a_failed_load_is_found(cuts_off: bool) -> None:
    """Of ten blocks the first four are loaded; then the request is aborted."""

    def scenario(attach: Any) -> Driver:
        driver = start(attach, connector="scripted")
        manager = driver.scheduler.kv_cache_manager
        if not hasattr(manager, "get_block_ids_for_computed_tokens"):
            pytest.skip("this release hands over every block")
        driver.connector.answer_lookups("r", (160, True))
        driver.add("r", 200, 3)
        driver.schedule()
        driver.output(invalid_blocks=driver.blocks("r")[4:10], finished_recving=["r"])
        if not cuts_off:
            manager.get_block_ids_for_computed_tokens = lambda request_id, _=0, **__: manager.get_block_ids(
                request_id
            )
        driver.abort("r")
        driver.run()
        return driver

    _, events = observe(scenario)
    auditor = audited(events)

    assert (set() if cuts_off else {"connector/handed-over"}) == {
        v.id for v in auditor.violations if v.severity == "violation"
    }


def test_each_child_of_a_multi_connector_is_observed(tmp_path: Path) -> None:
    child = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    children = [
        {**child, "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / place)}}
        for place in ("first", "second")
    ]

    def scenario(attach: Any) -> Driver:
        driver = start(attach, connector="MultiConnector", connector_options=(("connectors", children),))
        driver.add("r", 100, 2)
        driver.run()
        return driver

    _, events = observe(scenario)

    assert ["0 ExampleConnector", "1 ExampleConnector"] == [
        event.child for event in events if isinstance(event, ChildMatched)
    ]


def test_a_multi_connector_has_a_reader_only_if_every_child_has_one() -> None:
    known = type("ExampleConnector", (), {})()
    opaque = type("Opaque", (), {})()
    multi = type("MultiConnector", (), {"_connectors": [known, opaque]})()

    assert reader_of(multi) is None
    assert reader_of(opaque) is None


def test_a_connector_with_other_attributes_has_no_reader() -> None:
    assert reader_of(type("LMCacheConnectorV1", (), {})()) is None


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("NixlConnector", {"reqs_to_recv": {"r": SimpleNamespace(local_block_ids=([3, 4],))}}),
        ("NixlConnector", {"reqs_to_recv": {"r": SimpleNamespace(local_block_ids=[3, 4])}}),
        (
            "LMCacheMPConnector",
            {
                "requests": [
                    SimpleNamespace(direction="RETRIEVE", op=SimpleNamespace(block_ids=[[3, 4]])),
                    SimpleNamespace(direction="STORE", op=SimpleNamespace(block_ids=[[9]])),
                ]
            },
        ),
        (
            "OffloadingConnector",
            {"load_jobs": {1: SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[3, 4]))}},
        ),
        ("OffloadingConnector", {"reqs_to_load": {"r": (None, SimpleNamespace(block_ids=[3, 4]))}}),
        ("SimpleCPUOffloadConnector", {"load_gpu_blocks": [3, 4]}),
    ],
)
def test_the_blocks_that_the_loads_in_metadata_will_fill(name: str, plan: dict[str, Any]) -> None:
    """Metadata in the shapes that releases give it; the other readers are tested on live connectors."""
    assert {3, 4} == metadata_readers()[name](SimpleNamespace()).filled(SimpleNamespace(**plan), 16)


@pytest.mark.releases
@pytest.mark.parametrize(
    ("release", "scenario", "found"),
    [
        ("lmcache-0.3.9", "lmcache_resumed_package_sync", {"connector/promise-not-loaded"}),
        ("lmcache-0.4.2", "lmcache_decoded_package_async", {"connector/tracker-lag", "connector/save-gap"}),
        ("lmcache-0.4.3", "lmcache_decoded_package_async", set()),
    ],
)
def test_real_lmcache_of_the_matrix(release: str, scenario: str, found: set[str]) -> None:
    """Its scheduler's side, which scripts/releases.py puts beside .venv."""
    releases = [sys.executable, str(ROOT / "scripts/releases.py")]
    run = ["python", "-m", "tests.scenarios.lmcache", scenario]
    subprocess.run([*releases, "build", release], check=True, timeout=RUN_HANGS)
    done = subprocess.run(
        [*releases, "run", release, "--", *run], capture_output=True, text=True, timeout=RUN_HANGS
    )

    ids = {finding[0] for finding in json.loads(done.stdout.splitlines()[-1])["findings"]}
    assert found == {id for id in ids if not id.startswith("metrics/")}


@pytest.mark.parametrize(
    "plan",
    [
        SimpleNamespace(reqs_to_load={"r": ("store", SimpleNamespace(block_ids=[4, 5]))}),
        SimpleNamespace(
            load_jobs={7: SimpleNamespace(transfer_spec=("store", SimpleNamespace(block_ids=[4, 5])))}
        ),
        SimpleNamespace(load_jobs={7: SimpleNamespace(dst_spec=SimpleNamespace(block_ids=[4, 5]))}),
    ],
    ids=["0.20", "0.23", "0.32"],
)
def test_the_three_shapes_of_offloading_metadata(plan: Any) -> None:
    assert {4, 5} == OffloadingReader(None).filled(plan, 16)


@pytest.mark.parametrize(("blocks", "loads"), [([4, 5], [("r", [4, 5], True, 0)]), ([], [])])
def test_the_loads_of_a_step_finish_together_in_simple_offloading(
    blocks: list[int], loads: list[Any]
) -> None:
    metadata = SimpleNamespace(
        store_gpu_blocks=[7], load_gpu_blocks=blocks, load_event=2, load_event_to_reqs={2: ["r", "s"]}
    )
    assert ({0: [7]}, loads) == SimpleCPUOffloadReader(None).moves(metadata, {0: 16})


def test_a_prompt_that_the_connector_shortens_during_its_match() -> None:
    """NIXL does so for a Mamba prefill; the shorter prompt is counted and settled."""

    def scenario(attach: Any) -> Driver:
        driver = start(attach, connector="scripted")
        asked = driver.connector.get_num_new_matched_tokens

        def cut(request: Any, num_computed_tokens: int) -> Any:
            if request.num_prompt_tokens == 64:
                request.prompt_token_ids.pop()
                request._all_token_ids.pop()
                request.num_prompt_tokens -= 1
            return asked(request, num_computed_tokens)

        driver.connector.get_num_new_matched_tokens = cut
        driver.add("r", 64, 3)
        driver.run()
        return driver

    _, events = observe(scenario)
    auditor = audited(events)
    (account,) = auditor.ledger.accounts()

    assert [] == auditor.violations
    assert 63 == account.settlements[0].prompt_tokens == account.settlements[0].computed


# --- the worker side of live connectors with the real scheduler: what a worker does in each step ----------


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


# --- an aborted load whose end nobody reports, on the real scheduler and a clock of its own ---------------


STEP_NANOSECONDS = 20_000_000_000


class Watch:
    """Observes one scheduler by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0
        self.observation = Observation("blocks", clock=lambda: self.now)

    def __call__(self, scheduler: Any) -> None:
        self.observation(scheduler)

    def run_on(self, driver: Driver, steps: int) -> None:
        """Another request decodes; a step takes 20 seconds."""
        driver.add("other", 40, steps)
        for _ in range(steps):
            self.now += STEP_NANOSECONDS
            driver.step()

    def audited(self) -> Auditor:
        auditor = Auditor(keep_closed=True)
        auditor.feed_all(self.observation.stop())
        return auditor


def aborted_in_its_load(watch: Watch) -> Driver:
    driver = start(watch, connector="scripted")
    driver.connector.store("r", 96, asynchronous=True)
    driver.add("r", 150, 3)
    for _ in range(3):
        driver.schedule()
        driver.output()
    driver.abort("r")
    return driver


def test_blocks_that_nothing_frees_are_a_leak_after_ten_minutes() -> None:
    """vLLM#46283: the prefill engine was aborted too."""
    watch = Watch()
    driver = aborted_in_its_load(watch)
    watch.run_on(driver, 60)

    (leak,) = [each for each in watch.audited().violations if each.id == "blocks/leak"]

    assert "Request r ended" in leak.message
    assert "still holds 6 blocks" in leak.message


def test_blocks_are_freed_when_the_load_is_reported_after_all() -> None:
    watch = Watch()
    driver = aborted_in_its_load(watch)
    driver.schedule()
    driver.output(finished_recving={"r"})
    watch.run_on(driver, 60)

    assert "clean" == watch.audited().verdict


# --- what the real scheduler hears of the tiers of external tokens, recorded as the connector says it -----


def asks() -> bool:
    """Whether this release asks connectors for tiers."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources")


needs_tiers = pytest.mark.skipif(not asks(), reason="this release does not ask for tiers")


def with_connector_that_says(**tiers: int) -> list[Event]:
    """The events of a request with 64 external tokens, whose connector reports these tiers."""

    def scenario(attach: Any) -> Driver:
        driver = start(connector="scripted")
        driver.connector.get_external_cache_hit_sources = lambda request, num_external_tokens: tiers
        attach(driver.scheduler)
        driver.connector.store("r", 64)
        driver.add("r", 100, 3)
        driver.run()
        return driver

    return observe(scenario)[1]


def reported(events: list[Event]) -> list[TiersReported]:
    return [event for event in events if isinstance(event, TiersReported)]


@needs_tiers
def test_tiers_are_recorded_after_the_admission_as_the_connector_reports_them():
    events = with_connector_that_says(host=48, disk=16)
    (event,) = reported(events)
    (admitted,) = [place for place, each in enumerate(events) if isinstance(each, Admitted)]

    assert events[admitted + 1] is event
    assert (64, ["host", "disk"], [48, 16]) == (event.external_tokens, event.tiers, event.tokens)
    assert "clean" == audited(events).verdict
    (account,) = audited(events).ledger.accounts()
    assert {"host": 48, "disk": 16} == account.loaded_by_tier


@needs_tiers
def test_tiers_that_do_not_sum_are_found():
    assert ["connector/tiers-do-not-sum"] == [
        each.id for each in audited(with_connector_that_says(host=48)).violations
    ]


@needs_tiers
def test_a_connector_without_tiers_of_its_own_reports_tokens_as_unspecified():
    _, events = observe(SCENARIOS["external_sync_sync"])

    assert reported(events)
    assert {"external_unspecified"} == {tier for event in reported(events) for tier in event.tiers}


@pytest.mark.skipif(asks(), reason="this release asks for tiers")
def test_a_release_that_does_not_ask_has_no_tiers():
    _, events = observe(SCENARIOS["external_sync_sync"])

    assert [] == reported(events)
