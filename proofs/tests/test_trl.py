"""How the proof with TRL counts the tokens of its steps."""

from __future__ import annotations

from proofs import trl


def test_a_token_of_which_kvledger_does_not_know_is_not_missed() -> None:
    counts = trl.judged([0.1, 0.1, 1e-6, -0.2], [True, False, True, False], [False, False, False, True])

    assert {"tokens": 4, "wrong": 3, "suspect": 2, "missed": 1, "false": 1, "unknown": 1} == counts


def test_a_row_has_the_sums_of_all_steps_and_the_range_of_their_ratios() -> None:
    steps = [{"tokens": 600, "wrong": 1, "ratio": 1.0}, {"tokens": 600, "wrong": 2, "ratio": 0.25}]

    assert "| run | 2 | 1,200 | 3 | 0.250 to 1.000 |" == trl.row("run", steps, 2)


def test_steps_without_suspect_tokens_have_no_line() -> None:
    clean = {"tokens": 8, "wrong": 0, "suspect": 0, "older": 0, "ratio": 1.0}
    stale = {"tokens": 8, "wrong": 8, "suspect": 8, "older": 128, "ratio": 0.25}

    assert [
        "step 1: 128 prompt tokens and 8 of 8 output tokens over older KV, 8 wrong, ratio 0.250"
    ] == trl.older_steps([clean, stale])


def test_no_word_begins_with_another() -> None:
    words = [trl.word(token) for token in range(512)]

    assert len({word[:4] for word in words}) == len(words) == 512
