"""The text of a connector's score card: the verdict first, then what failed, then situations not clean."""

from __future__ import annotations

import re

from tests.exporters.reports.printed import text

from kvledger.audit.conformance.scorecard import Outcome, ScoreCard, SituationResult
from kvledger.exporters.reports.conformance import answer


def result(situation: str, scheduler: str, outcome: Outcome, *problems: str) -> SituationResult:
    return SituationResult(situation, scheduler, outcome, 96, 96, list(problems))


CARD = ScoreCard(
    "ExampleConnector",
    "vllm 0.32.0",
    "read",
    [
        result("a part of a prompt", "sync", "clean"),
        result("a part of a prompt", "async", "clean"),
        result("preempted after its load", "sync", "broke", "KeyError in load."),
        result("preempted after its load", "async", "clean"),
    ],
)


def test_a_score_card_starts_with_its_verdict_and_failures() -> None:
    assert [
        "violated: 3 clean, 1 broke.",
        "ExampleConnector on vllm 0.32.0; its connector metadata is read.",
        "",
        "- preempted after its load (sync): KeyError in load.",
    ] == text(answer(CARD)).splitlines()[:4]


def test_histories_that_fail_under_one_scheduler_have_a_row_of_their_own() -> None:
    rows = [
        result("40 random histories", "sync", "clean"),
        result("random: add r1", "async", "broke", "KeyError in load."),
    ]
    printed = text(answer(ScoreCard("ExampleConnector", "vllm 0.32.0", "read", rows)))

    assert "- random: add r1 (async): KeyError in load." in printed
    assert ["40 random histories", "clean", "-", "96"] in cells(printed)
    assert ["random: add r1", "-", "broke", "96"] in cells(printed)
    assert "Clean under both schedulers" not in printed


def cells(printed: str) -> list[list[str]]:
    """The cells of each line of a printed table."""
    return [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]


def test_clean_situations_are_listed_with_verbose_only() -> None:
    assert "a part of a prompt" not in text(answer(CARD))
    assert "Clean under both schedulers: 1 situation; -v lists them." in text(answer(CARD))
    assert "a part of a prompt        clean  clean" in text(answer(CARD, verbose=True))
