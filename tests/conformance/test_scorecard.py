"""The score card: a connector that loads what it promised is clean, and the card shows what others break."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.audit import events as ev
from kvledger.audit.conformance.scorecard import ScoreCard, SituationResult, score
from kvledger.audit.conformance.situations import SITUATIONS
from kvledger.audit.errors import LedgerError
from kvledger.exporters.reports.conformance import answer
from kvledger.exporters.writers import markdown

MODULE = Path(__file__).with_name("connectors.py")
STORE = {"store": "{folder}"}
NOT_REACHED = {"LaterConnector": set(), "HonestConnector": {"aborted while it waits for its load"}}


@pytest.fixture(scope="module")
def cards() -> dict[str, ScoreCard]:
    """Random histories are drawn for the connectors that must be clean in them."""
    wrong = ("ForgetfulConnector", "MuddledConnector", "ExchangingConnector")
    return {name: score(name, MODULE, STORE, drawn=10) for name in NOT_REACHED} | {
        name: score(name, MODULE, STORE, drawn=0) for name in wrong
    }


def outcomes(card: ScoreCard, outcome: str) -> set[str]:
    return {row.situation for row in card.rows if row.outcome == outcome}


@pytest.mark.parametrize("name", NOT_REACHED)
def test_an_honest_connector_is_clean_in_every_situation_it_reaches(cards: dict[str, ScoreCard], name: str):
    card = cards[name]

    assert "clean" == card.verdict, [row for row in card.rows if row.problems]
    assert NOT_REACHED[name] >= outcomes(card, "not reached")


def test_external_tokens_equal_the_tokens_that_the_store_served(cards: dict[str, ScoreCard]):
    (row, _) = (r for r in cards["LaterConnector"].rows if r.situation == "new engine on the same store")

    assert (96, 96) == (row.external_tokens, row.served_tokens)


def test_a_load_that_is_missing_after_a_resumption_is_a_violation(cards: dict[str, ScoreCard]):
    """The check of the cache finds it: the connector's metadata is opaque to the ledger."""
    card = cards["ForgetfulConnector"]

    assert "violated" == card.verdict
    assert "resumed after saving more" in outcomes(card, "violated")
    assert "hit on part of the prompt" in outcomes(card, "clean")


def test_kv_of_other_tokens_in_the_cache_is_a_violation(cards: dict[str, ScoreCard]):
    assert "hit on part of the prompt" in outcomes(cards["MuddledConnector"], "violated")


def test_exchanged_keys_and_values_are_a_violation_that_says_so(cards: dict[str, ScoreCard]):
    card = cards["ExchangingConnector"]

    assert "hit on part of the prompt" in outcomes(card, "violated")
    problems = [problem for row in card.rows for problem in row.problems]
    assert any(problem.endswith("keys and values are exchanged.") for problem in problems)


def test_a_card_without_external_tokens_is_unknown():
    row = SituationResult(
        "hit on part of the prompt", "sync", "clean", external_tokens=0, served_tokens=96, problems=[]
    )

    assert "unknown" == ScoreCard("A", "vllm 0.32.0", "read", [row]).verdict


@pytest.mark.parametrize(("external_tokens", "reached"), [(64, True), (98, True), (99, False), (100, False)])
def test_a_hit_that_leaves_one_token_is_not_a_hit_on_part_of_the_prompt(external_tokens: int, reached: bool):
    """Every request computes its last prompt token, so a hit on all others counts as a hit on the whole."""
    (part,) = (s for s in SITUATIONS if s.title == "hit on part of the prompt")
    events = [
        ev.RequestAdded(0, 1, "r", 100),
        ev.Admitted(0, 1, 1, False, 0, external_tokens, True, external_tokens),
    ]

    assert reached == part.reached(events)


def test_the_page_has_one_row_for_a_situation_under_both_schedulers(cards: dict[str, ScoreCard]):
    page = markdown(answer(cards["HonestConnector"], verbose=True))

    assert "| hit on part of the prompt | clean | clean |" in page


def test_the_released_example_connector_breaks_in_two_situations(tmp_path: Path):
    """In 0.32.0 it matches by the prompt, and then loads by all tokens so far, which it never saved."""
    broke = {row.situation for row in score("ExampleConnector", drawn=0).rows if row.outcome == "broke"}

    assert {"resumed after saving more", "chunked save aborted midway"} == broke


def test_a_correct_subclass_of_the_example_connector_passes_and_what_it_inherits_is_known():
    card = score("CorrectSubclass", MODULE, drawn=0)

    assert "clean" == card.verdict, [row for row in card.rows if row.problems]
    assert {"resumed after saving more", "chunked save aborted midway"} == outcomes(card, "inherited")
    problems = [problem for row in card.rows for problem in row.problems]
    assert all(problem.startswith("known, inherited from ExampleConnector: ") for problem in problems)


@pytest.fixture
def in_few_situations(monkeypatch: pytest.MonkeyPatch) -> None:
    titles = ("hit on part of the prompt", "new engine on the same store")
    chosen = [one for one in SITUATIONS if one.title in titles]
    monkeypatch.setattr("kvledger.audit.conformance.scorecard.SITUATIONS", chosen)


@pytest.mark.usefixtures("in_few_situations")
def test_what_a_subclass_adds_is_held_against_it():
    card = score("BrokenSubclass", MODULE, drawn=0)

    assert "violated" == card.verdict
    assert "hit on part of the prompt" in outcomes(card, "violated")


@pytest.mark.usefixtures("in_few_situations")
def test_a_short_load_says_what_was_promised_and_what_was_loaded():
    """The store has 6 blocks of 16 tokens for the prompt of 100, and the connector loads 5 of them."""
    rows = [
        row for row in score("ShortConnector", MODULE, STORE, drawn=0).rows if "new engine" in row.situation
    ]

    assert all("promised 96, loaded 80; it ran over 16 tokens" in row.problems[0] for row in rows)


@pytest.mark.usefixtures("in_few_situations")
def test_tiers_that_do_not_sum_are_a_violation_that_says_so():
    rows = [
        row for row in score("MiscountingConnector", MODULE, STORE, drawn=0).rows if row.outcome == "violated"
    ]

    assert "hit on part of the prompt" in {row.situation for row in rows}
    assert all("connector/tiers-do-not-sum" in problem for row in rows for problem in row.problems), rows


@pytest.mark.parametrize("name", ["EagerConnector", "LaggingConnector"])
def test_what_no_fixed_situation_shows_is_drawn_and_shrunk(name: str):
    """Both are clean, or nearly so, where chunks end with a block and no block is used again."""
    rows = [row for row in score(name, MODULE, STORE).rows if row.situation.startswith("random: ")]

    assert "sync" in {row.scheduler for row in rows if row.outcome == "violated"}
    assert all("KV that is not its own" in row.problems[0] for row in rows)
    assert all(row.situation.count(";") < 5 for row in rows), [row.situation for row in rows]


def test_a_bare_assertion_is_printed_with_its_text_and_place():
    line = next(
        n for n, text in enumerate(MODULE.read_text().splitlines(), 1) if "not metadata.loads" in text
    )
    rows = [row for row in score("AssertingConnector", MODULE, STORE, drawn=0).rows if row.outcome == "broke"]

    expected = (
        f"AssertionError in start_load_kv at conformance/connectors.py:{line}: assert not metadata.loads"
    )
    assert {expected} == {row.problems[0] for row in rows}


@pytest.mark.usefixtures("in_few_situations")
def test_each_run_has_a_store_of_its_own():
    """The store of this connector is a table of the process: a second run finds what the first left."""
    first, second = (score("HonestConnector", MODULE, {}, drawn=0) for _ in range(2))

    assert first.rows == second.rows


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("Nonsense", None, "vLLM registers no connector 'Nonsense'"),
        ("HonestConnector", Path("nowhere.py"), "there is no file nowhere.py"),
        ("Nonsense", MODULE, "can't be started here"),
    ],
)
def test_a_connector_that_cannot_start_is_an_error_of_one_sentence(
    name: str, module: Path | None, words: str
):
    with pytest.raises(LedgerError, match=words):
        score(name, module)
