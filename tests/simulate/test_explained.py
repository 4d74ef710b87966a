"""`kvledger diff A B --explain` on recorded journals, in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvledger.audit.events import Setting
from kvledger.audit.simulate.explanation import ORDER, SettingChange, effective, way
from kvledger.audit.traffic.reader import Traffic

pytest.importorskip("vllm")

from tests.command_line import Outcome, runner
from tests.exporters.reports.printed import lines as lines_of
from tests.exporters.reports.printed import text
from tests.histories import events as history
from tests.journals import write as write_history
from tests.simulate.timed import conversations, recorded, write

from kvledger.audit.errors import LedgerError
from kvledger.audit.events import EngineStarted
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.audit.simulate.explanation import Row
from kvledger.audit.simulate.study import Study
from kvledger.exporters.reports import diff_explained as report

# --- `kvledger diff A B --explain` on recorded journals, in processes of its own --------------------------


SETUP = {"max_batched_tokens": 256, "max_model_len": 1024, "reserve_full_isl": True}
Explain = Callable[..., Outcome]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    return runner(capsys, "diff", "--explain")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before") / "journal"
    return write(folder, recorded(conversations(60, 20.0, 1), blocks=100, **SETUP))


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other requests, fewer blocks and fewer running requests."""
    folder = tmp_path_factory.mktemp("after") / "journal"
    arrivals = conversations(60, 20.0, 2)
    return write(folder, recorded(arrivals, blocks=60, max_running=4, **SETUP))


@pytest.fixture(scope="module")
def found(before: Path, after: Path) -> report.Explained:
    return explained(before, after)


def explained(before: Path, after: Path) -> report.Explained:
    return report.explained([before, after], pythons=(), closed=False, window=EVERYTHING)


def test_each_row_has_one_change_more(found: report.Explained) -> None:
    assert [
        ("recorded", "before, recorded"),
        ("residual", "residual: before, simulated"),
        ("setting", "num_gpu_blocks 100 -> 60"),
        ("setting", "max_num_seqs 16 -> 4"),
        ("traffic", "traffic"),
        ("step times", "step times: after, simulated"),
        ("residual", "residual: after, recorded"),
    ] == [(row.kind, row.changed) for row in found.explanation.rows]


def test_the_changes_sum_to_the_whole_difference(found: report.Explained) -> None:
    first, *others = found.explanation.rows
    assert first.change is None

    def whole(figure: str) -> float:
        return float(sum(getattr(row.change, figure) for row in others))

    for figure in ("hit_share", "external_share", "rework_tokens", "preemptions"):
        ends = (getattr(row.outcome, figure) for row in (first, others[-1]))
        assert whole(figure) == pytest.approx(-next(ends) + next(ends))


def test_the_ends_are_what_was_recorded(found: report.Explained) -> None:
    hits = {row.label: row for row in found.comparison.figures}["local, of prompt tokens"]
    first, last = (found.explanation.rows[place].outcome for place in (0, -1))
    assert (hits.before, hits.after) == (first.hit_share, last.hit_share)
    assert hits.before is not None and hits.after is not None and hits.after < hits.before


def test_equal_step_times_have_no_part(found: report.Explained) -> None:
    """Steps of both recordings take what one formula says, so only arrivals between two steps are left."""
    [row] = [row for row in found.explanation.rows if row.kind == "step times"]
    assert row.change is not None
    assert abs(row.change.hit_share) < 0.01


def test_both_sides_are_calibrated(found: report.Explained) -> None:
    explanation = found.explanation
    assert explanation.before.exact and explanation.after.exact
    assert (0, []) == (explanation.code, explanation.doubts)


def test_the_answer_comes_first(found: report.Explained) -> None:
    printed = " ".join(text(report.answer(found), 200).split())
    assert printed.startswith("Hits fell from ")
    assert "num_gpu_blocks 100 -> 60 -" in printed.partition("Calibrated: by step")[0]
    assert "Another order gives other parts" in printed
    assert "With the traffic changed first: traffic " in printed
    assert " clean. Engine: vllm " in printed


def test_csv_has_a_line_for_each_row(found: report.Explained) -> None:
    lines = lines_of(report.answer(found)).strip().splitlines()
    assert 1 + len(found.explanation.rows) == len(lines)
    assert lines[0].startswith("kind,changed,release,hit_share,")


def test_json_has_the_explanation_beside_the_comparison(before: Path, explain: Explain) -> None:
    result = explain(before, before, "--format", "json")

    data = json.loads(result.out)
    assert 0 == result.code
    assert data["verdicts"] == ["clean", "clean"]
    rows = data["explanation"]["rows"]
    assert ["recorded", "residual", "traffic", "step times", "residual"] == [row["kind"] for row in rows]
    assert rows[0]["outcome"]["hit_share"] == rows[-1]["outcome"]["hit_share"]
    assert {0} == {row["change"]["preemptions"] for row in rows if row["kind"] == "traffic"}


def test_interrupted_rows_are_missing(before: Path, after: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Study.simulated

    def interrupted(self: Study, *arguments: object, **named: object) -> object:
        variants = simulated(self, *arguments, **named)  # type: ignore[arg-type]
        yield next(variants)
        raise KeyboardInterrupt

    monkeypatch.setattr(Study, "simulated", interrupted)
    made = explained(before, after)

    rows: list[Row] = made.explanation.rows
    assert (True, 3) == (made.explanation.interrupted, made.explanation.code)
    assert "recorded" == rows[0].kind
    assert all(row.kind in ("recorded", "residual", "setting") for row in rows)
    assert "the rows that had not ended are missing" in " ".join(text(report.answer(made)).split())


def test_a_recording_of_level_tokens_is_refused(before: Path, tmp_path: Path, explain: Explain) -> None:
    tokens = write_history(tmp_path / "tokens", history(10, "A0+0 s10 o+ F"))

    result = explain(before, tokens)

    assert 2 == result.code
    assert "AFTER can't be simulated" in result.sentence and "KVLEDGER_LEVEL=blocks" in result.sentence


def test_two_journals_on_one_side_are_refused(before: Path, tmp_path: Path, explain: Explain) -> None:
    for name in ("one", "two"):
        write_history(tmp_path / name, history(10, "A0+0 s10 o+ F"))

    result = explain(tmp_path, before)

    assert (2, True) == (result.code, "BEFORE has 2" in result.sentence)


def test_a_release_without_an_environment_is_named(before: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    arrivals = conversations(8, 20.0, 1)
    events = recorded(arrivals, **SETUP)
    old = [replace(each, version="0.1.2") if isinstance(each, EngineStarted) else each for each in events]
    write(other, old)

    with pytest.raises(LedgerError, match=r"there is no environment with vLLM 0\.1\.2"):
        explained(before, other)


# --- what is changed between two recordings, in which order, and which rules are candidates ---------------


OLD: dict[str, Setting] = {"blocks": 40, "max_running": 8, "groups": 1}
"""What 0.18.1 records."""
NEW: dict[str, Setting] = OLD | {"scheduler_reserve_full_isl": True, "watermark": 0.0}
"""What 0.32.0 records."""


def traffic(version: str, configuration: dict[str, Setting], *groups: str) -> Traffic:
    kinds = list(groups or ("full",))
    return Traffic(version, configuration, [], [], [], kinds, [16] * len(kinds), 16, [])


def changed(before: Traffic, after: Traffic) -> tuple[list[str], list[str], list[str]]:
    """What is changed on the first release, on the second one, and with the traffic."""
    found = way(before, after)
    return (
        [each.words for each in found.first],
        [each.words for each in found.then],
        [each.words for each in found.together],
    )


def test_equal_settings_are_not_changed() -> None:
    assert ([], [], []) == changed(traffic("0.32.0", NEW), traffic("0.32.0", NEW))


def test_settings_are_changed_in_a_fixed_order() -> None:
    after = traffic("0.32.0", NEW | {"watermark": 0.1, "max_running": 4, "blocks": 20})

    _, then, _ = changed(traffic("0.32.0", NEW), after)

    assert ["num_gpu_blocks 40 -> 20", "max_num_seqs 8 -> 4", "watermark 0.0 -> 0.1"] == then
    assert sorted(then, key=lambda words: ORDER.index(words.split()[0])) == then


def test_a_rule_with_a_switch_is_held_off_while_the_release_changes() -> None:
    found = way(traffic("0.18.1", OLD), traffic("0.32.0", NEW))

    switch = SettingChange("scheduler_reserve_full_isl", False, True)
    assert ([], [switch]) == (found.first, found.then)
    assert (("scheduler_reserve_full_isl", False),) == found.held


def test_a_rule_is_turned_on_before_other_settings_are_changed() -> None:
    after = traffic("0.32.0", NEW | {"blocks": 20})

    assert ["scheduler_reserve_full_isl False -> True", "num_gpu_blocks 40 -> 20"] == changed(
        traffic("0.18.1", OLD), after
    )[1]


def test_a_rule_that_the_later_release_lacks_is_turned_off_before_the_release_changes() -> None:
    found = way(traffic("0.32.0", NEW | {"watermark": 0.1}), traffic("0.18.1", OLD))

    assert ["scheduler_reserve_full_isl True -> False", "watermark 0.1 -> 0.0"] == [
        each.words for each in found.first
    ]
    assert [] == found.then
    assert dict(found.held) == {"scheduler_reserve_full_isl": False, "watermark": 0.0}


def test_a_journal_that_lacks_a_switch_has_the_default_of_a_release_with_the_rule() -> None:
    assert effective(traffic("0.24.0", OLD), "scheduler_reserve_full_isl") is True
    assert effective(traffic("0.18.1", OLD), "scheduler_reserve_full_isl") is False


def test_a_switch_of_hybrid_models_is_not_changed_for_a_model_with_one_group() -> None:
    name = "prefix_cache_retention_interval"
    before, after = traffic("0.29.0", NEW | {name: None}), traffic("0.32.0", NEW | {name: 0})
    assert ([], [], []) == changed(before, after)

    several = {"groups": 2}
    before = traffic("0.29.0", NEW | several | {name: None}, "full", "sliding")
    after = traffic("0.32.0", NEW | several | {name: 0}, "full", "sliding")
    found = way(before, after)
    assert [f"{name} None -> 0"] == [each.words for each in found.then]
    assert ((name, None),) == found.held


def test_what_drafts_and_connectors_answered_comes_with_the_traffic() -> None:
    after = traffic("0.32.0", NEW | {"drafts": 3, "connector": "NixlConnector"}, "full", "sliding")

    first, then, together = changed(traffic("0.32.0", NEW), after)

    assert ([], []) == (first, then)
    assert ["drafts None -> 3", "connector None -> NixlConnector", "groups full -> full+sliding"] == together


@pytest.mark.parametrize("name", ORDER)
def test_every_setting_that_is_changed_can_be_simulated(name: str) -> None:
    from kvledger.audit.simulate.study import parsed

    value: dict[str, Any] = {"scheduling_policy": "priority"}
    assert name == parsed(f"{name}={value.get(name, 1)}")[0]
