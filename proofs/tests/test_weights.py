"""How the proof of weights judges tokens and counts what the two judges say."""

from __future__ import annotations

from pathlib import Path

import pytest
from proofs.weights.engine import AFTER_KV, Served, State
from proofs.weights.judge import Row, compare, differs
from proofs.weights.scenarios import scenarios
from proofs.weights.subject import Result, text


@pytest.mark.parametrize(("other", "wrong"), [({5: -1.00001}, False), ({5: -1.1}, True)])
def test_a_token_is_wrong_if_a_score_that_both_engines_name_differs(
    other: dict[int, float], wrong: bool
) -> None:
    assert wrong == differs({5: -1.0, 6: -2.0}, other | {7: -3.0})


def compared(
    wrong: list[bool], suspect: list[bool], unknown: list[bool], oldest: str = "old"
) -> tuple[Row, list[str]]:
    count = len(wrong)
    served = {"r1": Served([3] * 40, [7] * count, [], [State(Path("new"))] * count)}
    older: list[Path | None] = [Path(oldest)] * count
    result = Result(served, {"r1": suspect}, {"r1": unknown}, {"r1": older}, [])
    return compare(result, {"r1": wrong}, lambda one, other: one == other)


def test_disagreements_name_the_request_and_the_outputs() -> None:
    row, lines = compared([True, False, False], [False, True, False], [False] * 3)

    assert Row(tokens=3, wrong=1, suspect=1, missed=1, false=1) == row
    assert ["missed: r1, prompt of 40, outputs [0]", "false: r1, prompt of 40, outputs [1]"] == lines
    assert not row


def test_a_token_of_which_kvledger_does_not_know_is_neither_missed_nor_false() -> None:
    row, lines = compared([True, False], [False, False], [True, True])

    assert (Row(tokens=2, wrong=1, unknown=2), []) == (row, lines)
    assert row


def test_a_right_token_over_the_kv_of_equal_weights_is_explained() -> None:
    row, lines = compared([False], [True], [False], oldest="new")

    assert (Row(tokens=1, suspect=1, false=1, equal=1), []) == (row, lines)
    assert row


@pytest.mark.parametrize(
    ("tensor", "makes_kv"),
    [
        ("lm_head.weight", False),
        ("model.norm.weight", False),
        ("model.layers.1.self_attn.o_proj.weight", False),
        ("model.layers.1.self_attn.q_norm.weight", False),
        ("model.layers.1.mlp.up_proj.weight", False),
        ("model.layers.1.self_attn.k_norm.weight", True),
        ("model.layers.1.input_layernorm.weight", True),
        ("model.layers.0.mlp.up_proj.weight", True),
        ("model.embed_tokens.weight", True),
    ],
)
def test_kv_depends_on_all_tensors_before_the_last_keys_and_values(tensor: str, makes_kv: bool) -> None:
    assert makes_kv == (AFTER_KV.search(tensor) is None)


def test_scenarios_have_names_of_their_own() -> None:
    names = [name for name, _ in scenarios(Path())]

    assert len(names) == len(set(names))


def test_prompts_share_nothing_unless_they_have_one_seed() -> None:
    assert text(1, 40) == text(1, 60)[:40]
    assert text(1, 40) != text(2, 40)
