"""Every scenario on the real scheduler: what the ledger and each other reader must say of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")
pytest.importorskip("torch")

from collections.abc import Callable
from typing import Any

from tests.audit.replay.test_serialize import assert_continues
from tests.columns import columns, row_columns, statement_figures
from tests.engines.conftest import Recorded
from tests.engines.known_drifts import DRIFTS
from tests.engines.observed import audited, drifts, findings, observe
from tests.engines.test_kv_events import PUBLISHING, driven
from tests.histories import GOLDEN
from tests.scenarios import driving
from tests.scenarios.content_faults import FAULTS, outcome
from tests.scenarios.corpus import HISTORIES, SCENARIOS
from tests.scenarios.driving import Attach, start
from tests.scenarios.kv_runner import DriverWithCaches, attach_content
from tests.scenarios.prefix_runner import DriverWithPrefixes, attach_sketches
from tests.simulate.recordings import traffic_of

from kvledger.audit.analysis.routing import (
    EVICTED,
    EXTERNAL,
    STORED_SINCE,
    Routing,
    TokensIndex,
    UncountedIndex,
)
from kvledger.audit.causes import BEGAN_BEFORE, STATE, WINDOW
from kvledger.audit.checks.auditor import Auditor
from kvledger.audit.engines.content.options import SKETCH
from kvledger.audit.engines.observer import Observer
from kvledger.audit.engines.pool import requirements
from kvledger.audit.engines.step_log import StepLog
from kvledger.audit.entry.attach import LiveAudit
from kvledger.audit.events import EngineStarted, Event, KVEventsReceived, Snapshot
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.recorded_events import routing
from kvledger.audit.replay.request_traces import block_prefixes
from kvledger.audit.simulate.engine import by_step
from kvledger.audit.simulate.rows import Counting, differences
from kvledger.audit.simulate.study import setup
from kvledger.audit.traffic.driver import Driver, Observation
from kvledger.exporters.facts.kept_blocks import recorded_blocks

# --- every scenario on the real scheduler: accounts balance, and every finding is a known one -------------
#
# Hand-made model output drives the scenarios through vLLM's own Scheduler, KVCacheManager and BlockPool. A
# finding that is not in KNOWN_FINDINGS is a false alarm or a new defect.


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


# --- every scenario with KV caches that are written: every hit is verified, and there is no false alarm ---


FAST = (
    "crowd_async_speculative",
    "double_allocation_three_groups",
    "load_failure_async_partial_async",
    "load_failure_sync_sync",
    "replayed_window_async",
    "session_async_speculative",
)
"""Scenarios that the fast suite runs; the others take half a minute."""

NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.fuzz) for name in SCENARIOS]
OF_CONTENTS = [pytest.param(name, marks=() if name in FAST[1:] else pytest.mark.fuzz) for name in SCENARIOS]
"""Without the crowd, whose hits the test of blocks that are computed again verifies, too."""


def test_the_fast_scenarios_exist() -> None:
    assert set(FAST) <= set(SCENARIOS)


def test_a_worker_says_how_the_caches_of_each_group_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[LiveAudit] = []
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)
    SCENARIOS["double_allocation_three_groups"](lambda each: audits.append(attach_content(each)))

    watched = audits[0]._observer.content.watch.began()
    assert ["kernel blocks of 16 tokens, float32"] * 3 == [
        layout.removeprefix("layout LBHNC, ") for layout in watched.layouts
    ]


UNCHECKED = {
    "withdrawn_state_": "drafts write its states in several blocks",
    "encoder_decoder": "its blocks are of kind CrossAttentionSpec",
}
"""Why level ``content`` does not check a group, by how the names of the scenarios begin."""

NEVER_WRITTEN = {
    "withdrawn_step_sync": "low",
    "withdrawn_step_async": "low",
    "withdrawn_step_then_abort_sync": "retry",
    "withdrawn_step_then_abort_async": "retry",
}
"""Scenarios in which the engine itself lets a request hit a block that no step wrote.

In ``withdrawn_state_sync`` rejected drafts fill the block, which a worker can't tell from KV.
"""


@pytest.mark.parametrize("name", OF_CONTENTS)
def test_a_scenario_has_no_finding_about_contents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[LiveAudit] = []
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)

    SCENARIOS[name](lambda scheduler: audits.append(attach_content(scheduler)))

    for audit in audits:
        audit.detach()
        found: list[Any] = [(v.id, v.request) for v in audit.violations if v.id.startswith("content/")]
        victim = NEVER_WRITTEN.get(name)
        assert ([("content/unsealed-hit", victim)] if victim else []) == found
        why = next((why for beginning, why in UNCHECKED.items() if name.startswith(beginning)), "")
        excluded = [f"Group 1 is not checked: {why}."] if why else []
        assert excluded == audit.ledger.contents.excluded


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_that_this_release_has_is_found_and_its_near_miss_is_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``scripts/content_grid.py`` runs them on other releases."""
    monkeypatch.setattr(driving, "Driver", DriverWithCaches)
    found = {id for id, _ in outcome(FAULTS[name])["findings"]}
    assert ({"content/unsealed-hit"} if name == "failed-load-stays-cached" else set()) == found


# --- blocks that are computed more than once: equal but for rounding, or a drift --------------------------


@pytest.fixture(autouse=True)
def prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "Driver", DriverWithPrefixes)
    monkeypatch.setenv(SKETCH, "1")


def computed_again(scenario: Callable[..., Any]) -> tuple[list[Any], Any]:
    """The findings about contents, and what the first engine computed again."""
    audits: list[LiveAudit] = []
    scenario(lambda scheduler: audits.append(attach_sketches(scheduler)))
    found = []
    for audit in audits:
        audit.detach()
        found += [each for each in (*audit.violations, *audit.drifts) if each.id.startswith("content/")]
    return found, audits[0].ledger.sums.recomputed if audits else None


UNSEALED = {
    f"load_failure_after_a_preemption_{mode}": [("content/unsealed-hit", "r", 80)]
    for mode in ("sync", "async")
} | {name: [("content/unsealed-hit", victim, 16)] for name, victim in NEVER_WRITTEN.items()}
"""The scheduler ignores a failed load or withdraws a step, and a request hits blocks that nothing filled."""


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_has_no_blocks_that_were_computed_differently(name: str) -> None:
    found, recomputed = computed_again(SCENARIOS[name])
    assert UNSEALED.get(name, []) == [(each.id, each.request, each.tokens) for each in found]
    if name == "crowd_async_speculative":
        assert recomputed.compared > 50


# --- the short path for unchanged steps emits the same events as the long one -----------------------------


class NeverSteady(StepLog):
    """A step log that never expects the next step to be unchanged."""

    steady = property(lambda _: False, lambda _, __: None)  # type: ignore[assignment]


def emitted(name: str) -> list[str]:
    """All events but the engine start, which has the time of the start."""
    return [repr(event) for event in observe(SCENARIOS[name])[1][1:]]


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_unchanged_steps_give_the_same_events_either_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLog, "now", lambda _: 0)
    monkeypatch.setattr(Observer, "hook_time", lambda _: (-1, 0))
    monkeypatch.setattr(requirements, "os", SimpleNamespace(urandom=bytes))  # one key, so equal classes
    by_short_path = emitted(name)
    monkeypatch.setattr("kvledger.audit.engines.observer.StepLog", NeverSteady)

    assert by_short_path == emitted(name)


# --- checkpoints within a real scheduler's journal, for every scenario of the corpus ----------------------


def cuts(name: str, events: int) -> list[int]:
    """One place in each third of a scenario's events, always the same."""
    dice, third = random.Random(name), events // 3
    return [place * third + dice.randint(0, third) for place in range(3)]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "crowd" in name or "allocation" in name])
def test_a_journal_at_level_blocks_continues_from_a_checkpoint(name: str, recorded: Recorded) -> None:
    events = recorded(name, "blocks")
    assert_continues(events, cuts(name, len(events)))


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_real_schedulers_journal_continues_from_a_checkpoint(name: str, recorded: Recorded) -> None:
    events = recorded(name)
    assert_continues(events, cuts(name, len(events)))


# --- readers that begin in the middle of a real scheduler's trace, as on a journal that has rotated -------
#
# Every scenario of the corpus is recorded with a segment after every few events, and read from each segment
# on. A finding that the whole trace does not have is a false alarm.


SEGMENT_EVENTS = 25
MOST_READERS = 12
"""A scenario with more segments is read from some of them, its second and its last one included."""


class SegmentedRecorder(MemoryRecorder):
    """Wants a new segment after every few events."""

    segment_events = 0

    def record(self, event: Event) -> None:
        super().record(event)
        self.segment_events += 1
        self.wants_snapshot |= self.segment_events > SEGMENT_EVENTS

    def restart(self, started: EngineStarted, snapshot: Snapshot) -> None:
        super().restart(started, snapshot)
        self.segment_events = 0


def recorded(name: str, level: str) -> list[Event]:
    """The events of a scenario, with many segments."""
    observation = Observation(level, sink=SegmentedRecorder())
    SCENARIOS[name](observation)
    return observation.stop()


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *((name, "blocks") for name in SCENARIOS),
        *((name, "tokens") for name in SCENARIOS if "crowd" in name),
    ],
)
def test_a_reader_that_begins_at_any_segment_has_no_false_finding(name: str, level: str) -> None:
    events = recorded(name, level)
    whole = findings(audited(events))
    starts = [place for place, event in enumerate(events) if place and isinstance(event, EngineStarted)]
    for begin in {*starts[:: -(-len(starts) // MOST_READERS) or 1], *starts[-1:]}:
        auditor = Auditor(keep_closed=True, debug=True)
        for number, event in enumerate(events[begin:], begin):
            auditor.feed(event, number)

        assert findings(auditor) <= whole, f"from event {begin}"
        assert [] == auditor.doubts, f"from event {begin}"
        reasons = {account.unknown for account in auditor.ledger.accounts()}
        assert reasons <= {None, BEGAN_BEFORE}


# --- the prefixes of real schedulers with several KV cache groups -----------------------------------------


GROUPED = [name for name in SCENARIOS if "hybrid" in name or "crowd" in name or "states_cut" in name]


@pytest.mark.parametrize("name", GROUPED)
def test_what_prefixes_saved_are_the_local_hits(name: str, recorded: Recorded, tmp_path: Path) -> None:
    if SCENARIOS[name].lacking():
        pytest.skip("; ".join(SCENARIOS[name].lacking()))
    events = recorded(name, "blocks")
    auditor = Auditor(keep_closed=True)
    auditor.feed_all(events)
    hits = sum(max(0, life.local) for account in auditor.ledger.accounts() for life in account.lives)

    with closing(JournalWriter(tmp_path)) as journal:
        journal.write(events)
    found, _ = block_prefixes(recorded_blocks(tmp_path, groups=True))

    assert hits == sum(each.saved_tokens for each in found)


# --- what the KV events of real schedulers with several KV cache groups promise of each request -----------


OF_GROUPS = [
    name
    for name in PUBLISHING
    if any(word in name for word in ("hybrid", "crowd", "states", "window_leaves"))
]


def write(
    folder: Path, events: Sequence[Event], started: EngineStarted, stream: Sequence[KVEventsReceived]
) -> Sequence[Path]:
    """Journals of an engine and of its stream, each batch received when it was published."""
    with closing(JournalWriter(folder / "engine-0-0-0")) as journal:
        journal.write(events)
    with closing(JournalWriter(folder / "events-0-0-0")) as journal:
        journal.write([started, Snapshot(0, 0, [], 0)])
        for batch in stream:
            at = max(0, round((batch.published_seconds - started.began_seconds) * 1e6))
            journal.write([replace(batch, at=at)])
    return journals_at([folder])


def tokens(found: Routing) -> dict[str, int]:
    """The tokens of each cause."""
    return {cause: tokens for (_, cause), (_, tokens) in found.causes().items()}


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_promise_of_several_groups_differs_by_what_the_stream_had_not_said(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journals = write(tmp_path, *driven(name, monkeypatch))
    late = {EVICTED, STORED_SINCE, EXTERNAL}

    found = routing(journals)

    assert found.rows and tokens(found).keys() <= late
    assert sum(row.predicted for row in found.rows) or "states" in name
    for index in (TokensIndex, UncountedIndex):
        assert tokens(routing(journals, index)).keys() <= late | {STATE, WINDOW}


@pytest.mark.parametrize("how", ["sync", "async"])
def test_an_index_of_one_group_promises_what_has_no_state(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    journals = write(tmp_path, *driven(f"states_hit_between_checkpoints_{how}", monkeypatch))

    assert ({}, {STATE: 48}) == (tokens(routing(journals)), tokens(routing(journals, TokensIndex)))


# --- A recorded scenario, simulated by step on its own release, gives its recorded figures to the token ---


UNEQUAL = {
    "replayed_window_sync": "the journal does not say that a group replays a window",
    "replayed_window_async": "the journal does not say that a group replays a window",
    "load_failure_after_a_preemption_sync": "no request is named that a load failed for",
    "load_failure_after_a_preemption_async": "no request is named that a load failed for",
    "image_twice_in_a_prompt_sync": "a request waits for space in the encoder cache, which is not simulated",
    "image_twice_in_a_prompt_async": "a request waits for space in the encoder cache, which is not simulated",
    "load_failure_read_by_a_neighbour": "two requests read one failed block",
    "prompt_ends_within_a_block": "the cached part of a block is not simulated",
}
"""Scenarios that differ, and why."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_simulated_by_step_is_the_recording(name: str, recorded: Recorded) -> None:
    if SCENARIOS[name].lacking():
        pytest.skip("; ".join(SCENARIOS[name].lacking()))
    events = recorded(name, "blocks")
    traffic = traffic_of(events)
    counting = Counting()
    counting.feed(events)
    recording = counting.run()

    run = by_step(traffic, setup(traffic, {}), lambda share: None)

    assert "" == run.error
    found = differences(recording, run)
    if name in UNEQUAL:
        assert found or recording.steps != run.steps
    else:
        assert ([], recording.steps) == (found, run.steps)
