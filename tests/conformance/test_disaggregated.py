"""Two engines: a connector that reads what it promised passes, and what others break is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvledger.audit.conformance.scorecard import DISAGGREGATED, Card, score
from kvledger.audit.conformance.situations import SITUATIONS
from kvledger.audit.conformance.stage import Stage
from kvledger.exporters.reports.conformance import markdown

MODULE = Path(__file__).with_name("paired.py")
NOT_REACHED = {"no answer yet, then a number", "a part of a prompt", "resumed with a grown store"}
"""Where all of a prompt comes from another engine, once, and at once."""


def paired(name: str) -> Card:
    return score(name, MODULE, {}, disaggregated=True)


@pytest.fixture(scope="module")
def honest() -> Card:
    return paired("PairedConnector")


def outcomes(card: Card, outcome: str) -> set[str]:
    return {row.situation for row in card.rows if row.outcome == outcome}


def test_a_connector_that_reads_what_it_promised_is_clean(honest: Card):
    assert "clean" == honest.verdict, [row for row in honest.rows if row.broke]


def test_a_situation_that_two_engines_do_not_come_into_is_not_passed(honest: Card):
    assert NOT_REACHED == outcomes(honest, "not reached")


def test_what_the_ledger_takes_for_loaded_is_what_the_other_engine_prefilled(honest: Card):
    (row, _) = (row for row in honest.rows if row.situation == "a new engine on the same store")

    assert 100 == row.external_tokens


def test_a_card_says_that_it_is_of_two_engines(honest: Card):
    assert ", between two engines; its plans are opaque" in markdown(honest)


@pytest.mark.parametrize("name", ["HastyConnector", "SwappedConnector"])
def test_kv_that_did_not_come_is_seen_in_the_cache(name: str):
    card = paired(name)

    assert "all of a prompt" in outcomes(card, "violated")
    assert "nothing in the store" in outcomes(card, "clean")


def test_blocks_that_the_other_engine_never_lets_go_are_found(monkeypatch: pytest.MonkeyPatch):
    """It would turn for ever."""
    monkeypatch.setattr("kvledger.audit.conformance.worker.IDLE_SECONDS", 0)
    monkeypatch.setattr("kvledger.audit.conformance.scorecard.SITUATIONS", SITUATIONS[:5])

    assert {"all of a prompt"} <= outcomes(paired("SilentConnector"), "broke")


def test_both_engines_are_observed():
    stage = Stage("observed", disaggregated=True)
    setup: dict[str, Any] = {"connector": "PairedConnector", "connector_module": MODULE.stem}
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(MODULE.parent)
        stage.begin(**setup)
        stage.begin(**setup)
    stage.end()

    assert 3 == len(stage.observed)
    assert stage.engines[0] is stage.prefiller


def test_nixl_is_known_to_read_from_an_engine():
    assert "NixlConnector" in DISAGGREGATED
