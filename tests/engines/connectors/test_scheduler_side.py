"""What a live connector shows beyond its admissions: kept blocks, children, metadata, its own counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import start
from tests.time_limits import RUN_HANGS

from kvledger.audit.engines import observer
from kvledger.audit.engines.connector_metadata import metadata_readers, reader_of
from kvledger.audit.engines.connector_metadata.offloading import OffloadingReader
from kvledger.audit.engines.connector_metadata.simple_cpu_offload import SimpleCPUOffloadReader
from kvledger.audit.events import (
    BlocksPromised,
    ChildMatched,
    Finished,
    FreeCompleted,
    FreeDelayed,
    HandedOver,
    PoolCalls,
    PoolSeen,
)
from kvledger.audit.ledger.blocks.pool import calls
from kvledger.audit.pool_calls import BlocksAllocated
from kvledger.audit.traffic.driver import Driver

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
