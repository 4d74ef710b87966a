"""Level ``content`` on the real engine: every hit is verified, nothing is changed, a flipped bit is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.content_run import SITUATIONS
from tests.engines.own_process import python

from kvledger.audit.replay.journals import audit_paths

pytestmark = pytest.mark.whole_engine


LOADING = "a window's loads"
"""The situation with a store, whose blocks are compared on another way."""


def test_the_page_has_every_situation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "content.md").read_text()
    assert [] == [name for name in SITUATIONS if f"- **{name}**: " not in page]


@pytest.fixture(scope="module", params=[name for name in SITUATIONS if name != LOADING])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("content") / "found.json"
    python("-m", "tests.engines.content_run", request.param, output)
    return {"situation": SITUATIONS[request.param], **json.loads(output.read_text())}


def test_every_hit_is_verified_and_outputs_are_those_of_a_bare_engine(found: dict[str, Any]) -> None:
    counts, situation = found["counts"], found["situation"]
    about_blocks = [row for row in found["findings"] if not row[0].startswith("metrics/")]
    assert ("clean", []) == (found["verdict"], about_blocks)
    assert (situation.groups_left_out, situation.workers) == (len(found["excluded"]), found["workers"])
    assert counts["verified"] == counts["compared"] > 50
    assert not set(counts) & {"differed", "scrub_differed", "unsealed", "loaded", "unseen", "unmatched"}
    assert found["equal"]
    if "flipped" in found:  # after the plain situation, which has too few blocks
        assert found["preemptions"]
        _check_flipped_bit(found["flipped"])


def _check_flipped_bit(flipped: dict[str, Any]) -> None:
    """One flipped bit in a cached block is found at the next hit, with both requests."""
    ((id, reader, figures, story),) = flipped["findings"]
    assert ("content/changed", [flipped["block"]]) == (id, figures["blocks"])
    assert figures["writer"] and figures["writer"] != reader
    assert any("read by request" in line for line in story)


def test_what_a_store_gives_back_is_compared_in_every_group(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    python("-m", "tests.engines.content_run", LOADING, output)
    found = json.loads(output.read_text())
    assert ("clean", True) == (found["verdict"], found["equal"])
    assert found["transfers"]["moved"] > 200
    assert not set(found["transfers"]) & {"unknown", "foreign", "transfer_differed", "store_differed"}

    lost = found["lost"]
    ((id, reader, figures, _),) = lost["findings"]
    assert ("content/transfer", lost["blocks"], "zeros") == (id, figures["blocks"], figures["how"])
    assert figures["reader"] == reader != figures["writer"]
    assert "only zeros arrived in the only layer of KV cache group 2" == figures["what"]
    assert lost["transfers"] == {"stored": 8, "moved": 7, "transfer_differed": 1}


def test_a_worker_writes_what_it_verified_into_a_journal_of_its_own(tmp_path: Path) -> None:
    python(
        *("-m", "kvledger.audit.demo.engine", "--output", tmp_path / "result.json"),
        KVLEDGER_DIR=str(tmp_path / "journal"),
        KVLEDGER_LEVEL="content",
    )

    audit = audit_paths([tmp_path / "journal"])
    (engine,) = audit.engines
    assert "clean" == audit.verdict
    assert engine.auditor.ledger.sums.contents["verified"] > 20
    assert not set(engine.auditor.ledger.sums.contents) & {"differed", "scrub_differed", "unsealed"}


def test_a_wrong_second_computation_is_a_drift_that_no_fingerprint_shows(tmp_path: Path) -> None:
    python(
        *("-m", "kvledger.audit.demo.engine", "--in-process", "--inject", "wrong-compute"),
        *("--output", tmp_path / "result.json"),
        KVLEDGER_DIR=str(tmp_path / "journal"),
        KVLEDGER_LEVEL="content",
        KVLEDGER_CONTENT_SKETCH="1",
    )

    audit = audit_paths([tmp_path / "journal"])
    assert "clean" == audit.verdict
    (drift,) = [each for each in audit.violations if each.id.startswith("content/")]
    assert ("content/recomputed", "keys") == (drift.id, drift.figures["part"])
    assert drift.request is not None and drift.request.startswith("twice-lead")
    assert str(drift.figures["before"]).startswith("once-lead")
