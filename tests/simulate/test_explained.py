"""`kvledger diff A B --explain` on recorded journals, in processes of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

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
