"""The score card of two engines: a connector that reads what it promised is clean, faulty ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvledger.audit.conformance.scorecard import DISAGGREGATED, ScoreCard, score
from kvledger.audit.conformance.situations import SITUATIONS
from kvledger.audit.conformance.worker import ObservedEngines
from kvledger.exporters.reports.conformance import answer
from kvledger.exporters.writers import markdown

MODULE = Path(__file__).with_name("paired.py")
NOT_REACHED = {"hit after a deferred lookup", "hit on part of the prompt", "resumed after saving more"}
"""The other engine always offers the whole prompt and never defers a lookup."""


def paired(name: str, drawn: int = 0) -> ScoreCard:
    return score(name, MODULE, {}, disaggregated=True, drawn=drawn)


@pytest.fixture(scope="module")
def honest() -> ScoreCard:
    return paired("PairedConnector", drawn=10)


def outcomes(card: ScoreCard, outcome: str) -> set[str]:
    return {row.situation for row in card.rows if row.outcome == outcome}


def test_a_connector_that_reads_what_it_promised_is_clean(honest: ScoreCard):
    assert "clean" == honest.verdict, [row for row in honest.rows if row.problems]


def test_three_situations_are_not_reached_with_two_engines(honest: ScoreCard):
    assert NOT_REACHED == outcomes(honest, "not reached")


def test_external_tokens_equal_the_tokens_that_the_other_engine_prefilled(honest: ScoreCard):
    (row, _) = (row for row in honest.rows if row.situation == "new engine on the same store")

    assert 100 == row.external_tokens


def test_the_score_card_states_that_it_is_between_two_engines(honest: ScoreCard):
    assert ", between two engines; its connector metadata is opaque" in markdown(answer(honest))


@pytest.fixture
def in_two_situations(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [one for one in SITUATIONS if one.title in ("nothing in the store", "hit on the whole prompt")]
    monkeypatch.setattr("kvledger.audit.conformance.scorecard.SITUATIONS", chosen)


@pytest.mark.usefixtures("in_two_situations")
@pytest.mark.parametrize("name", ["HastyConnector", "SwappedConnector"])
def test_kv_that_was_not_read_correctly_is_a_violation(name: str):
    card = paired(name)

    assert {"hit on the whole prompt"} == outcomes(card, "violated")
    assert {"nothing in the store"} == outcomes(card, "clean")


@pytest.mark.usefixtures("in_two_situations")
def test_a_situation_broke_when_the_other_engine_never_frees_its_blocks(monkeypatch: pytest.MonkeyPatch):
    """Without the limit on idle time the engines would step forever."""
    monkeypatch.setattr("kvledger.audit.conformance.worker.IDLE_SECONDS", 0)

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


def test_nixl_is_listed_as_disaggregated():
    assert "NixlConnector" in DISAGGREGATED
