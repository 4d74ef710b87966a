"""The settings of a simulation, and what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.simulate.recordings import read_traffic

from kvledger.audit import events as ev
from kvledger.audit.errors import LedgerError
from kvledger.audit.simulate.rows import STEP_HANDLERS, StepChanges
from kvledger.audit.simulate.study import Goal, Variant, goal, not_recorded, parsed, setup
from kvledger.audit.traffic.reader import NoTraffic, Traffic

pytest.importorskip("vllm")

from tests.exporters.reports.printed import lines, text
from tests.simulate.recordings import recording

from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.exporters.reports import simulate as report

# --- settings, goals and features of a simulation; no vLLM is needed --------------------------------------


STARTED = ev.EngineStarted(0, 1.7e9, "vllm", "0.32.0", "v1", "blocks", 1, {"blocks": 64})


def traffic(configuration: dict[str, ev.Setting]) -> Traffic:
    return Traffic("0.32.0", configuration, [], [], [], ["full"], [16], 16, [])


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("num_gpu_blocks=20000", ("num_gpu_blocks", 20000)),
        ("--max-num-batched-tokens=8192", ("max_num_batched_tokens", 8192)),
        ("watermark=0.01", ("watermark", 0.01)),
        ("scheduling_policy=priority", ("scheduling_policy", "priority")),
        ("async_scheduling=true", ("async_scheduling", True)),
        ("max_num_active_seqs=None", ("max_num_active_seqs", None)),
    ],
)
def test_a_setting_has_the_type_of_its_value(word: str, setting: tuple[str, ev.Setting]) -> None:
    assert setting == parsed(word)


@pytest.mark.parametrize("word", ["num_gpu_blocks", "num_gpu_blocks=", "temperature=1", "=1"])
def test_what_is_no_setting_is_refused(word: str) -> None:
    with pytest.raises(LedgerError):
        parsed(word)


def test_a_setting_replaces_the_recorded_one() -> None:
    recorded = {"blocks": 64, "max_running": 8, "watermark": 0.5, "scheduler_reserve_full_isl": False}

    made = setup(traffic(recorded), {"num_gpu_blocks": 32, "watermark": 0.0})

    assert (32, 8, False) == (made["blocks"], made["max_running"], made["reserve_full_isl"])
    assert (("watermark", 0.0),) == made["scheduler_options"]


def test_a_journal_without_a_setting_gets_the_default_of_vllm_and_is_said_to_lack_it() -> None:
    assert setup(traffic({"blocks": 64}), {})["reserve_full_isl"] is True
    assert "scheduler_reserve_full_isl" in not_recorded({"blocks": 64}, ())
    assert [] == not_recorded({"disable_chunked_mm_input": False}, ())


def test_a_variant_is_named_by_what_differs() -> None:
    assert "recorded" == Variant().name
    assert "0.24.0 num_gpu_blocks=8" == Variant("0.24.0", (("num_gpu_blocks", 8),)).name


def test_a_goal_may_be_in_percent() -> None:
    assert Goal("hit_share", ">=", 0.45) == goal("hit_share >= 45 %") == goal("hit_share>=0.45")


@pytest.mark.parametrize("text", ["hit_share", "hits >= 1", "hit_share >= many", "hit_share = 1"])
def test_what_is_no_goal_is_refused(text: str) -> None:
    with pytest.raises(LedgerError):
        goal(text)


def test_a_journal_of_level_tokens_has_no_traffic() -> None:
    with pytest.raises(NoTraffic, match="KVLEDGER_LEVEL=blocks"):
        read_traffic([ev.EngineStarted(0, 1.7e9, "vllm", "0.32.0", "v1", "tokens", 1, {})])


def test_a_journal_without_a_request_has_no_traffic() -> None:
    with pytest.raises(NoTraffic, match="no request"):
        read_traffic([STARTED])


def test_groups_keep_the_lengths_of_their_blocks() -> None:
    request = ev.RequestAdded(0, 0, "a", 20, 4)
    pool = ev.PoolSeen(0, 1, 0, 64, 0, 63, 0, [0, 64, 2, 1, 16, 1], [1, 64, 0])
    both = read_traffic([STARTED, request, pool])

    made = setup(both, {})
    assert (64, [], 16, [64, 16]) == (
        both.block_tokens,
        both.doubts,
        made["block_size"],
        made["group_tokens"],
    )
    with pytest.raises(LedgerError, match=r"block_size can't be set: .* blocks of 64, 16 tokens"):
        setup(both, {"block_size": 32})


def test_a_journal_of_the_v0_scheduler_has_no_traffic() -> None:
    with pytest.raises(NoTraffic, match="v0 scheduler"):
        read_traffic([replace(STARTED, adapter="v0 scheduler")])


def changes(*events: ev.Event) -> list[int]:
    """The changed requests of each observed step."""
    times = StepChanges()
    for event in (STARTED, ev.Snapshot(0, 0, [], 0), *events):
        STEP_HANDLERS[type(event)](times, event)
    return [row[-2] for row in times.changes.rows]


def test_requests_that_join_or_leave_a_step_are_its_changes() -> None:
    assert [0, 1, 2, 0] == changes(
        ev.Stepped(10, 1, [0, 8, 0, 8], []),  # the first step after a snapshot lists every request
        ev.Delivered(20, [0, 1], []),
        ev.Stepped(20, 2, [0, 1, 0, 9, 1, 8, 0, 8], []),
        ev.Delivered(40, [1, 1], []),
        ev.Finished(40, 0, "length", 9, 0, 0, 10, 2),
        ev.Stepped(40, 3, [1, 1, 0, 9, 2, 4, 0, 4], [0]),
        ev.Delivered(60, [2, 1], []),
        ev.Stepped(60, 4, [2, 1, 0, 5], []),
        ev.Delivered(70, [], []),
    )


def test_repeated_steps_have_no_changes_of_their_own() -> None:
    assert [0, 0, 1] == changes(
        ev.Stepped(10, 1, [0, 8, 0, 8], []),
        ev.Delivered(20, [0, 1], []),
        ev.Stepped(20, 2, [0, 1, 0, 9], []),
        ev.Delivered(30, [], []),
        ev.Repeated(50, 2),
        ev.Stepped(50, 5, [1, 8, 0, 8], []),
        ev.Delivered(60, [1, 1], []),
    )


# --- `kvledger simulate` on a recorded journal, in processes of its own -----------------------------------


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crowd") / "journal"
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write(recording(requests=30))
    writer.close()
    return folder


def simulated(
    journal: Path, *settings: str, find: str = "", wanted: str = "", releases: tuple[str, ...] = ()
) -> report.Simulated:
    return report.run(
        [journal],
        releases=releases,
        settings=settings,
        pythons=(),
        rate=1.0,
        closed=False,
        find=find,
        wanted=wanted,
        window=EVERYTHING,
    )


def test_the_table_has_the_recording_and_each_configuration(journal: Path) -> None:
    found = simulated(journal, "num_gpu_blocks=30", "num_gpu_blocks=400")

    names = ["recorded", "simulated as recorded", "num_gpu_blocks=30", "num_gpu_blocks=400"]
    assert names == [outcome.name for outcome in found.outcomes]
    assert found.calibration.exact and 0 == found.calibration.differing
    shown = text(report.answer(found))
    assert shown.startswith("Calibrated. By step the recording comes out to the token: 30 requests")
    assert 5 == len(lines(report.answer(found)).strip().splitlines())
    page = report.html(found)
    assert "By step the recording comes out to the token: 30 requests" in page
    shown_names = [report.named(outcome) for outcome in found.outcomes]
    assert all(f"<span>{name}</span>" in page and f">{name}</td>" in page for name in shown_names)


def test_the_smallest_value_that_meets_a_goal_is_found(journal: Path) -> None:
    found = simulated(journal, find="num_gpu_blocks", wanted="preemptions < 1")

    assert found.found is not None
    tried = {outcome.name: outcome for outcome in found.outcomes}
    assert 0 == tried[f"num_gpu_blocks={found.found}"].preemptions
    assert tried["recorded"].preemptions > 0


def test_bad_input_is_one_sentence(journal: Path) -> None:
    with pytest.raises(LedgerError, match="go together"):
        simulated(journal, find="num_gpu_blocks")
    with pytest.raises(LedgerError, match="no setting"):
        simulated(journal, "temperature=1")
    with pytest.raises(LedgerError, match=r"no environment with vLLM 0\.1\.2"):
        simulated(journal, releases=("0.1.2",))
    with pytest.raises(LedgerError, match="no release"):
        simulated(journal, releases=("newest",))
