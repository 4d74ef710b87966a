"""Each rule from both sides of its threshold, and the order of the sentences."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvledger.audit.analysis.costs import LostWork, MoreBlocks
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.replay.observers import Lost, Steps
from kvledger.exporters.reports import conclusions as rules
from kvledger.exporters.reports.audit import report
from kvledger.exporters.reports.conclusions import RULES, Facts, Rule, concluded, conclusions
from kvledger.exporters.reports.costs import costs_of
from kvledger.exporters.reports.page import gather
from kvledger.exporters.reports.summary import summarize
from kvledger.exporters.reports.why import why

RECORDED = Path(__file__).parents[2] / "audit" / "replay" / "journals"

CASES: list[tuple[Rule, dict[str, Any], dict[str, Any], str]] = [
    (
        rules.preempted,
        {"scheduled": 1000, "rework": {"blocks": 10}, "preemptions": 2},
        {"scheduled": 1001, "rework": {"blocks": 10}},
        "Preemption for lack of free blocks cost 1.0 % of scheduled tokens: 10 tokens computed again after "
        "2 preemptions.",
    ),
    (
        rules.preempted,
        {
            "rework": {"blocks": 9},
            "engine_seconds": 100.0,
            "seconds": {"rework/blocks": 3.5},
            "preemptions": 1,
        },
        {"rework": {"blocks": 9}, "engine_seconds": 100.0, "seconds": {"rework/blocks": 0.99}},
        "Preemption for lack of free blocks cost about 3.5 % of engine time (3.5 s): 9 tokens computed "
        "again after "
        "1 preemption.",
    ),
    (
        rules.preempted,
        {"scheduled": 200, "rework": {"blocks": 20}, "more_blocks": MoreBlocks(percent=12, tokens=18)},
        {"scheduled": 2001, "rework": {"blocks": 20}, "more_blocks": MoreBlocks(percent=12, tokens=18)},
        "Preemption for lack of free blocks cost 10.0 % of scheduled tokens: 20 tokens computed again. "
        "12 % more blocks would have avoided 90.0 % of them.",
    ),
    (
        rules.recomputed,
        {"scheduled": 100, "rework": {"blocks": 50, "load_failed": 1}},
        {"scheduled": 101, "rework": {"blocks": 50, "load_failed": 1}},
        "Computing 1 token again (load failed) cost 1.0 % of scheduled tokens.",
    ),
    (
        rules.rejected,
        {"scheduled": 100, "rejected": 5},
        {"scheduled": 101, "rejected": 5},
        "Rejected drafts cost 5.0 % of scheduled tokens: 5 draft tokens.",
    ),
    (
        rules.overrun,
        {"scheduled": 100, "overrun": 2},
        {"scheduled": 101, "overrun": 2},
        "Work past the stop of requests cost 2.0 % of scheduled tokens: 2 tokens in flight when their "
        "request "
        "ended.",
    ),
    (
        rules.below_block,
        {"missed": 1000, "misses": {"below_block": 498}, "block_size": 32},
        {"missed": 1000, "misses": {"below_block": 99}, "block_size": 32},
        "49.8 % of missed tokens (498) are below the block size of 32: the prefix cache holds whole "
        "blocks only, so "
        "at most these could be hits with smaller blocks.",
    ),
    (
        rules.evicted,
        {"missed": 10, "misses": {"evicted": 1}},
        {"missed": 11, "misses": {"evicted": 1}},
        "10.0 % of missed tokens (1) were in the prefix cache before and were evicted: at most these "
        "could be hits "
        "with more blocks.",
    ),
    (
        rules.other_groups,
        {"missed": 20, "misses": {"state": 1, "window_evicted": 1}},
        {"missed": 21, "misses": {"state": 1, "window_evicted": 1}},
        "10.0 % of missed tokens (2) were cached, but another KV cache group did not have its window or "
        "state there: at most these could be hits if it kept more.",
    ),
    (
        rules.not_loaded,
        {"promised": 100, "prompt_tokens": 500, "voided": {"failed": 1}},
        {"promised": 101, "prompt_tokens": 500, "voided": {"failed": 1, "finished": 50}},
        "1.0 % of the 100 tokens that the connector promised were not loaded (1; most frequent cause: "
        "load failed).",
    ),
    (
        rules.waited_longer_than_saved,
        {"waited_seconds": 12.1, "asynchronous_saved_seconds": 3.4},
        {"waited_seconds": 3.4, "asynchronous_saved_seconds": 3.4},
        "Requests waited 12.1 s for asynchronous loads that saved 3.4 s of computing.",
    ),
    (
        rules.unattained,
        {"prompt_tokens": 100, "unattained": 2},
        {"prompt_tokens": 101, "unattained": 2},
        "2.0 % of prompt tokens (2) had no KV when their request ended.",
    ),
    (
        rules.not_knowable,
        {"missed": 2, "misses": {"not_knowable": 1}, "levels": ["tokens"]},
        {"missed": 3, "misses": {"not_knowable": 1}, "levels": ["tokens"]},
        "50.0 % of missed tokens were never seen before, or were evicted: level tokens can't tell these "
        "apart, "
        "KVLEDGER_LEVEL=blocks can.",
    ),
]


@pytest.mark.parametrize(
    ("rule", "above", "below", "sentence"), CASES, ids=lambda case: getattr(case, "__name__", "")
)
def test_a_rule_speaks_at_its_threshold_and_not_below(
    rule: Rule, above: dict[str, Any], below: dict[str, Any], sentence: str
) -> None:
    concluded = rule(Facts(**above))

    assert concluded is not None and sentence == concluded.text
    assert rule(Facts(**below)) is None


def test_every_rule_has_a_case_and_says_nothing_without_figures() -> None:
    assert {case[0] for case in CASES} == set(RULES)
    assert [] == conclusions(Facts())


def test_misses_that_level_blocks_could_not_prove_are_no_advice() -> None:
    assert rules.not_knowable(Facts(missed=2, misses={"not_knowable": 2})) is None


def test_an_unknown_saving_concludes_nothing() -> None:
    assert rules.waited_longer_than_saved(Facts(waited_seconds=5.0, asynchronous_saved_seconds=None)) is None


def test_the_heaviest_three_sentences_are_printed() -> None:
    facts = Facts(
        scheduled=100,
        rework={"blocks": 10, "load_failed": 2},
        rejected=30,
        overrun=20,
        missed=10,
        misses={"not_knowable": 9},
        levels=["tokens"],
    )

    sentences = conclusions(facts)

    assert ["Rejected drafts", "Work past the s", "Preemption for "] == [each[:15] for each in sentences]


def test_misses_are_ranked_by_the_work_that_they_cost_and_not_by_the_prompts_length() -> None:
    """Nine of ten prompt tokens were hits: half of the work were misses, a tenth was work done again."""
    facts = Facts(
        prompt_tokens=1000, scheduled=100, missed=100, misses={"evicted": 50}, rework={"blocks": 10}
    )

    first, second = conclusions(facts)

    assert "were evicted" in first
    assert second.startswith("Preemption")


@pytest.mark.parametrize(
    ("avoidable", "more"),
    [
        ({5: 50, 12: 40, 80: 10}, MoreBlocks(percent=12, tokens=90)),
        ({5: 50, 12: 39, 80: 11}, MoreBlocks(percent=80, tokens=100)),
        ({5: 50, 12: 39}, None),
        ({}, None),
    ],
)
def test_more_blocks_are_named_for_nine_tenths_of_all_lost_tokens(
    avoidable: dict[int, int], more: MoreBlocks | None
) -> None:
    assert more == LostWork(tokens=100, avoidable=avoidable).more_blocks


def test_block_events_say_how_many_more_blocks_would_have_avoided_rework(tmp_path: Path) -> None:
    """The same in audit, summary, why and the report; at level tokens nobody knows."""
    with tarfile.open(RECORDED / "scheduler-0.32.0-blocks.tar.xz") as packed:
        packed.extractall(tmp_path)
    folder = tmp_path / "scheduler-0.32.0-blocks"

    audited = audit_paths([folder], (Lost, Steps))
    sentences = concluded(report(audited, costs_of(audited.engines))).conclusions

    assert sentences[0].endswith("21 % more blocks would have avoided 94.6 % of them.")
    assert sentences == summarize([folder], with_costs=True)[-1].conclusions
    assert sentences[0] in gather([folder]).report.conclusions
    causes = why([folder])
    (found,) = [one for one in rules.explained_with(causes).conclusions if "more blocks would" in one]
    assert found.endswith("21 % more blocks would have avoided 94.6 % of them.")
    unknown = msgspec.structs.replace(causes, more_blocks=None)
    assert "more blocks would" not in " ".join(rules.explained_with(unknown).conclusions)
    assert "more blocks" not in " ".join(rules.conclusions(Facts(scheduled=10, rework={"blocks": 10})))
