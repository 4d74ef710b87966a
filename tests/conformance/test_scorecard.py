"""The score card: a connector that keeps its word passes every row, and others are told what broke."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.audit import events as ev
from kvledger.audit.conformance.scorecard import ScoreCard, SituationResult, score
from kvledger.audit.conformance.situations import SITUATIONS
from kvledger.audit.errors import LedgerError
from kvledger.exporters.reports.conformance import markdown

MODULE = Path(__file__).with_name("connectors.py")
STORE = {"store": "{folder}"}
NEVER = {"LaterConnector": set(), "HonestConnector": {"aborted while it waits for its load"}}


@pytest.fixture(scope="module")
def cards() -> dict[str, ScoreCard]:
    names = ("HonestConnector", "LaterConnector", "ForgetfulConnector", "MuddledConnector")
    return {name: score(name, MODULE, STORE) for name in names}


def outcomes(card: ScoreCard, outcome: str) -> set[str]:
    return {row.situation for row in card.rows if row.outcome == outcome}


@pytest.mark.parametrize("name", NEVER)
def test_an_honest_connector_is_clean_wherever_it_can_be_driven(cards: dict[str, ScoreCard], name: str):
    card = cards[name]

    assert "clean" == card.verdict, [row for row in card.rows if row.problems]
    assert NEVER[name] >= outcomes(card, "not reached")


def test_what_the_ledger_takes_for_loaded_is_what_the_store_gave(cards: dict[str, ScoreCard]):
    (row, _) = (r for r in cards["LaterConnector"].rows if r.situation == "new engine on the same store")

    assert (96, 96) == (row.external_tokens, row.served_tokens)


def test_a_promise_forgotten_at_a_resumption_is_seen_in_the_cache(cards: dict[str, ScoreCard]):
    """Its plans are opaque: the ledger alone can't know."""
    card = cards["ForgetfulConnector"]

    assert "violated" == card.verdict
    assert "resumed after saving more" in outcomes(card, "violated")
    assert "hit on part of the prompt" in outcomes(card, "clean")


def test_kv_of_other_tokens_is_seen_in_the_cache(cards: dict[str, ScoreCard]):
    assert "hit on part of the prompt" in outcomes(cards["MuddledConnector"], "violated")


def test_what_the_local_cache_gave_is_not_the_stores():
    row = SituationResult(
        "hit on part of the prompt", "sync", "clean", external_tokens=0, served_tokens=96, problems=[]
    )

    assert "unknown" == ScoreCard("A", "vllm 0.32.0", "read", [row]).verdict


@pytest.mark.parametrize(("external_tokens", "reached"), [(64, True), (98, True), (99, False), (100, False)])
def test_all_of_a_prompt_is_no_part_of_it(external_tokens: int, reached: bool):
    """Nobody is spared its last token; it counts as part of a load that covers it."""
    (part,) = (s for s in SITUATIONS if s.title == "hit on part of the prompt")
    events = [
        ev.RequestAdded(0, 1, "r", 100),
        ev.Admitted(0, 1, 1, False, 0, external_tokens, True, external_tokens),
    ]

    assert reached == part.reached(events)


def test_what_broke_in_many_rows_is_said_once(cards: dict[str, ScoreCard]):
    page = markdown(cards["HonestConnector"])

    assert "| hit on part of the prompt | clean | clean |" in page


def test_the_released_example_connector_loses_a_resumed_requests_output(tmp_path: Path):
    """0.32.0: it matches the prompt, and then loads by all tokens so far, which nobody saved."""
    broke = {row.situation for row in score("ExampleConnector").rows if row.outcome == "broke"}

    assert {"resumed after saving more", "chunked save aborted midway"} == broke


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("Nonsense", None, "vLLM registers no connector 'Nonsense'"),
        ("HonestConnector", Path("nowhere.py"), "there is no file nowhere.py"),
        ("Nonsense", MODULE, "can't be started here"),
    ],
)
def test_a_connector_that_can_not_be_had_is_one_sentence(name: str, module: Path | None, words: str):
    with pytest.raises(LedgerError, match=words):
        score(name, module)
