"""``kvledger check routing``: predictions of a router from a file, and what is said of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command_line import exit_code
from tests.exporters.sidecar.routed_engines import Fleet

from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.recorded_events import routing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sixty requests on two engines, which publish at the ports 5557 and 5558."""
    fleet = Fleet(tmp_path, 1, lose=False)
    fleet.serve(60)
    fleet.stop()
    return tmp_path


def test_a_routers_predictions_take_the_place_of_the_index(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = routing(journals_at([folder]))
    file = tmp_path / "predictions.jsonl"
    lines = [
        {"request": row.request.request_id, "predicted": {5557 + row.best: row.predicted, 5999: 64}}
        for row in own.rows
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[5:]))

    assert 0 == exit_code("check", "routing", folder, "--predictions", file, "--format", "json")
    found = json.loads(capsys.readouterr().out)
    assert (55, 5) == (found["requests"], found["left_out"])
    assert sum(row.predicted for row in own.rows[5:]) == found["predicted"]
    assert found["predicted"] - found["found"] == sum(
        row["tokens"] * (1 if row["side"] == "missed" else -1) for row in found["causes"]
    )


@pytest.mark.parametrize(
    "line", ['{"request": "a"}', "{", '{"request": 5, "predicted": {}}', '{"predicted": []}']
)
def test_a_line_that_is_no_prediction_is_bad_input(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    file = tmp_path / "predictions.jsonl"
    file.write_text(line + "\n")

    assert 2 == exit_code("check", "routing", folder, "--predictions", file)
    said = capsys.readouterr().err.strip()
    assert "no prediction" in said and "\n" not in said and "Traceback" not in said


def test_a_file_that_is_missing_is_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == exit_code("check", "routing", folder, "--predictions", folder / "none.jsonl")
    assert "can't be read" in capsys.readouterr().err


def test_recordings_without_the_tokens_of_blocks_have_no_index_of_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == exit_code("check", "routing", folder, "--index", "tokens")
    assert "--index tokens needs KV events" in capsys.readouterr().err


def test_it_is_said_since_when_an_index_is_exact(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == exit_code("check", "routing", folder)
    assert 2 == capsys.readouterr().out.count(": exact since its first KV event, ")


def test_an_index_is_not_exact_after_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(tmp_path, 1, lose=True)
    fleet.serve(60)
    fleet.stop()

    assert 0 == exit_code("check", "routing", tmp_path, "--format", "json")
    found = json.loads(capsys.readouterr().out)
    assert found["gaps"] and None in [each["exact_since"] for each in found["indexes"]]


def test_an_index_that_does_not_count_promises_no_more_than_one_that_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for index in ("own", "uncounted"):
        assert 0 == exit_code("check", "routing", folder, "--index", index, "--format", "json")
        found[index] = json.loads(capsys.readouterr().out)

    assert found["uncounted"]["found"] == found["own"]["found"]
    assert found["uncounted"]["predicted"] <= found["own"]["predicted"]


@pytest.mark.parametrize(("dynamos", "ours"), [("dynamo", "own"), ("dynamo-indexer", "uncounted")])
def test_an_index_of_dynamo_promises_what_ours_by_its_rule_does(
    folder: Path, capsys: pytest.CaptureFixture[str], dynamos: str, ours: str
) -> None:
    pytest.importorskip("dynamo._core")
    found = []
    for index in (dynamos, ours):
        assert 0 == exit_code("check", "routing", folder, "--index", index, "--format", "csv")
        found.append(capsys.readouterr().out)

    assert found[0] == found[1]
