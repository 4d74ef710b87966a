"""Every scenario on the real scheduler: accounts balance, and every finding is a known one.

Hand-made model output drives the scenarios through vLLM's own Scheduler, KVCacheManager and BlockPool. A
finding that is not in KNOWN_FINDINGS is a false alarm or a new defect.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from tests.columns import columns, row_columns, statement_figures
from tests.engines.conftest import Recorded
from tests.engines.known_drifts import DRIFTS
from tests.engines.observed import audited, drifts, findings, observe
from tests.histories import GOLDEN
from tests.scenarios.corpus import HISTORIES, SCENARIOS
from tests.scenarios.driving import Attach, start
from tests.scenarios.workloads import crowd

from kvledger.audit.traffic.driver import Driver

FAILED_LOAD_COUNTED = ("connector/failed-load-counted", "r")
"""Upstream leaves failed loads in the external figure, on purpose (vLLM #37460): drift."""
PLACEHOLDER_LEAK = ("tokens/in-flight", "r")
"""A synchronous load failure under async scheduling leaks an output placeholder (0.32, 0.33)."""
WITHOUT_TOKEN = ("tokens/without-token", "r")
"""The step after such a failure computes a position for each leaked placeholder."""
HANDED_UNLOADED = ("connector/handed-unloaded", None)
"""A request that ends before its load has is handed over with the promised tokens: drift."""
STANDSTILL = ("requests/standstill", "oversized")
"""A prompt that the pool can't hold blocks those behind it (vLLM #39734)."""

KNOWN_FINDINGS: dict[str, set[tuple[str, str]]] = {
    "asynchronous_load_fails_in_part": {FAILED_LOAD_COUNTED},
    "load_failure_sync_sync": {FAILED_LOAD_COUNTED},
    "load_failure_sync_async": {FAILED_LOAD_COUNTED, PLACEHOLDER_LEAK, WITHOUT_TOKEN},
    "load_failure_sync_before_next_output_async": {FAILED_LOAD_COUNTED, PLACEHOLDER_LEAK, WITHOUT_TOKEN},
    "load_failure_of_a_shared_block_async": {PLACEHOLDER_LEAK, WITHOUT_TOKEN},
    "load_failure_in_a_window_loads_async": {FAILED_LOAD_COUNTED},
    "load_failure_in_a_window_sync": {FAILED_LOAD_COUNTED},
    "load_failure_recomputed_in_chunks_sync": {FAILED_LOAD_COUNTED},
    "load_failure_recomputed_in_chunks_async": {FAILED_LOAD_COUNTED},
    "load_failure_read_by_a_neighbour": {FAILED_LOAD_COUNTED},  # at level blocks: see ``OF_BLOCKS``
    "load_failure_then_reset": {FAILED_LOAD_COUNTED},
    "load_failure_after_a_preemption_sync": {FAILED_LOAD_COUNTED},
    "load_failure_after_a_preemption_async": {FAILED_LOAD_COUNTED},
    "load_failure_async_partial_sync": {FAILED_LOAD_COUNTED},
    "load_failure_async_partial_async": {FAILED_LOAD_COUNTED},
    "local_hit_fails_sync": {FAILED_LOAD_COUNTED},
    "local_hit_fails_async": {FAILED_LOAD_COUNTED, PLACEHOLDER_LEAK, WITHOUT_TOKEN},
    "aborted_in_remote_wait": {HANDED_UNLOADED},
    "abort_everywhere_sync": {HANDED_UNLOADED},
    "abort_everywhere_async": {HANDED_UNLOADED},
    "abort_before_output_sync": {HANDED_UNLOADED},
    "abort_before_output_async": {HANDED_UNLOADED},
    "load_failure_async_policy_fail_sync": {HANDED_UNLOADED},
    "load_failure_async_policy_fail_async": {HANDED_UNLOADED},
    "encoder_decoder": {("encoder/free-space", None)},
    "image_of_a_request_preempted_in_its_step": {("encoder/not-at-worker", "r")},
    "oversized_prompt_sync": {STANDSTILL},
    "oversized_prompt_async": {STANDSTILL},
}


OF_BLOCKS = {
    "load_failure_in_a_window_loads_async": {("blocks/read-invalid", "r")},
    "load_failure_in_a_window_sync": {("blocks/read-invalid", "r")},
    "load_failure_read_by_a_neighbour": {("blocks/read-invalid", "b")},
    **{
        f"load_failure_after_a_preemption_{each}": {
            *(("blocks/read-invalid", "r"), ("blocks/read-invalid", "next"), ("blocks/hash-content", "r")),
        }
        for each in ("sync", "async")
    },
    "session_of_states_async": {("blocks/read-invalid", "s")},
    **{
        name: {("blocks/uncommitted-hit", victim), ("blocks/hash-content", "low")}
        for name, victim in {
            "withdrawn_step_sync": "low",
            "withdrawn_step_async": "low",
            "withdrawn_step_then_abort_sync": "retry",
            "withdrawn_step_then_abort_async": "retry",
            "withdrawn_state_sync": "turn",
        }.items()
    },
    "whole_prompt_is_loaded_chunks": {("blocks/read-invalid", "s")},
    "whole_prompt_is_loaded_sliding": {("blocks/read-invalid", "r")},
}
"""What only level ``blocks`` finds in a scenario."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_balances_and_has_only_known_findings(name: str, recorded: Recorded) -> None:
    auditor = audited(recorded(name))

    assert KNOWN_FINDINGS.get(name, set()) == findings(auditor)
    assert {drift for drift, scenarios in DRIFTS.items() if name in scenarios} == drifts(auditor)
    assert [] == auditor.doubts
    assert {} == auditor.ledger.open
    for account in auditor.ledger.accounts():
        frozen = account.freeze()
        work = frozen.first_prompt + frozen.first_output + sum(frozen.rework.values())
        assert frozen.scheduled == work + frozen.rejected + frozen.overrun
        assert frozen.promised == frozen.loaded + sum(frozen.voided.values())
        assert frozen.suspense == 0
        for settled in frozen.settlements:
            sources = settled.local + settled.external + settled.computed + settled.unattained
            assert sources == settled.prompt_tokens - settled.carried


ROWS = {row.title: row for row in GOLDEN}


@pytest.mark.parametrize("title", HISTORIES)
def test_the_real_scheduler_gives_the_figures_of_a_golden_history(title: str) -> None:
    """The events of the hooks give the figures computed by hand, to the token."""
    _, events = observe(HISTORIES[title])
    account = audited(events).ledger.account("r")
    assert account is not None

    assert row_columns(ROWS[title]) == columns(statement_figures(account))


@pytest.mark.parametrize(
    ("name", "settled"),
    [
        ("load_failure_sync_before_next_output_async", (0, 64, 136, 0)),
        ("load_failure_of_a_shared_block_async", (0, 0, 70, 0)),
    ],
)
def test_tokens_computed_after_the_first_output_are_not_unattained(
    name: str, settled: tuple[int, ...], recorded: Recorded
) -> None:
    """An output in flight comes between the failed load and the step that computes the tokens."""
    account = audited(recorded(name)).ledger.account("r")

    assert account is not None and account.settled is not None
    split = account.settled
    assert settled == (split.local, split.external, split.computed, split.unattained)


@pytest.mark.parametrize(("name", "overrun"), [("sync", 1), ("async", 5)])
def test_overrun_counts_executed_work_in_the_same_way_in_every_release(
    name: str, overrun: int, recorded: Recorded
) -> None:
    """0.33 subtracts the tokens cut at the stop from its computed count, and 0.32 does not.

    Position 53 lies past the end of the sequence; the asynchronous engine also has a step of four in flight.
    """
    account = audited(recorded(f"stopped_within_drafts_{name}")).ledger.account("r")

    assert account is not None
    assert (50, 3, overrun) == (account.first_prompt, account.first_output, account.overrun)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "setup",
    [
        {},
        {"drafts": 3},
        {"connector": "scripted"},
        {"connector": "scripted", "drafts": 2},
        {"connector": "scripted", "kv_role": "kv_consumer"},
        {"policy": "priority"},
    ],
    ids=lambda setup: "-".join(map(str, setup.values())) or "plain",
)
def test_a_random_crowd_has_no_findings(seed: int, asynchronous: bool, setup: dict[str, object]) -> None:
    """Requests with shared prefixes arrive, are preempted, resumed and aborted at random."""
    _, events = observe(crowd, seed=seed, requests=40, asynchronous=asynchronous, **setup)
    auditor = audited(events)

    assert set() == findings(auditor)
    assert "clean" == auditor.verdict


def test_no_token_id_of_a_prompt_is_recorded() -> None:
    """No event may contain a token id of a prompt; these ids are too large for counts."""
    prompt = list(range(900_000_000, 900_000_100))

    def scenario(attach: Attach) -> Driver:
        driver = start(attach, blocks=8)
        for request_id in ("r", "s"):
            driver.add(request_id, prompt[: 60 if request_id == "s" else 100], 8)
        driver.run()
        return driver

    _, events = observe(scenario)

    assert len(events) > 10
    assert not any(str(token) in repr(event) for event in events for token in prompt)
