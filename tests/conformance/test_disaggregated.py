"""Two engines: a connector that reads what it promised passes, and what others break is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvledger.audit.conformance.observed_engines import ObservedEngines
from kvledger.audit.conformance.scorecard import DISAGGREGATED, ScoreCard, score
from kvledger.audit.conformance.situations import SITUATIONS
from kvledger.exporters.reports.conformance import markdown

MODULE = Path(__file__).with_name("paired.py")
NOT_REACHED = {"hit after a deferred lookup", "hit on part of the prompt", "resumed after saving more"}
"""The other engine gives the whole prompt, in one answer and without deferring."""


def paired(name: str) -> ScoreCard:
    return score(name, MODULE, {}, disaggregated=True)


@pytest.fixture(scope="module")
def honest() -> ScoreCard:
    return paired("PairedConnector")


def outcomes(card: ScoreCard, outcome: str) -> set[str]:
    return {row.situation for row in card.rows if row.outcome == outcome}


def test_a_connector_that_reads_what_it_promised_is_clean(honest: ScoreCard):
    assert "clean" == honest.verdict, [row for row in honest.rows if row.problems]


def test_a_situation_that_two_engines_do_not_come_into_is_not_passed(honest: ScoreCard):
    assert NOT_REACHED == outcomes(honest, "not reached")


def test_what_the_ledger_takes_for_loaded_is_what_the_other_engine_prefilled(honest: ScoreCard):
    (row, _) = (row for row in honest.rows if row.situation == "new engine on the same store")

    assert 100 == row.external_tokens


def test_a_card_says_that_it_is_of_two_engines(honest: ScoreCard):
    assert ", between two engines; its connector metadata is opaque" in markdown(honest)


@pytest.mark.parametrize("name", ["HastyConnector", "SwappedConnector"])
def test_kv_that_did_not_come_is_seen_in_the_cache(name: str):
    card = paired(name)

    assert "hit on the whole prompt" in outcomes(card, "violated")
    assert "nothing in the store" in outcomes(card, "clean")


def test_blocks_that_the_other_engine_never_lets_go_are_found(monkeypatch: pytest.MonkeyPatch):
    """It would turn for ever."""
    monkeypatch.setattr("kvledger.audit.conformance.worker.IDLE_SECONDS", 0)
    monkeypatch.setattr("kvledger.audit.conformance.scorecard.SITUATIONS", SITUATIONS[:5])

    assert {"hit on the whole prompt"} <= outcomes(paired("SilentConnector"), "broke")


def test_both_engines_are_observed():
    engines = ObservedEngines("observed", disaggregated=True)
    setup: dict[str, Any] = {"connector": "PairedConnector", "connector_module": MODULE.stem}
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(MODULE.parent)
        engines.start(**setup)
        engines.start(**setup)
    engines.stop()

    assert 3 == len(engines.observed)
    assert engines.drivers[0] is engines.prefiller


def test_nixl_is_known_to_read_from_an_engine():
    assert "NixlConnector" in DISAGGREGATED
