"""How the proof of weights judges tokens and counts what the two judges say."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs.weights.engine import Served, State
from proofs.weights.judge import Row, compare, differs
from proofs.weights.scenarios import scenarios
from proofs.weights.subject import Result, text


@pytest.mark.parametrize(("other", "wrong"), [({5: -1.00001}, False), ({5: -1.1}, True)])
def test_a_token_is_wrong_if_a_score_that_both_engines_name_differs(
    other: dict[int, float], wrong: bool
) -> None:
    assert wrong == differs({5: -1.0, 6: -2.0}, other | {7: -3.0})


def test_a_token_of_which_kvledger_does_not_know_is_neither_missed_nor_false() -> None:
    row = Row()

    row.count([True, True, False, False, True], [True, False, True, False, False], [False] * 4 + [True])

    assert Row(tokens=5, wrong=3, suspect=2, missed=1, false=1, unknown=1) == row


def test_disagreements_name_the_request_and_the_outputs() -> None:
    served = {"r1": Served([3] * 40, [7, 7, 7], [], [State(Path("weights"))] * 3)}
    result = Result(served, {"r1": [False, True, False]}, {"r1": [False] * 3}, [])

    _, disagreements = compare(result, {"r1": [True, False, False]})

    assert ["missed: r1, prompt of 40, outputs [0]", "false: r1, prompt of 40, outputs [1]"] == disagreements


def test_scenarios_have_names_of_their_own() -> None:
    names = [name for name, _ in scenarios(Path())]

    assert len(names) == len(set(names))


def test_prompts_share_nothing_unless_they_have_one_seed() -> None:
    assert text(1, 40) == text(1, 60)[:40]
    assert text(1, 40) != text(2, 40)
