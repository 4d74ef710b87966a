"""What a verdict says it covered: by level, release and settings, in the same words everywhere."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.journals import STARTED

from kvledger.audit.checks.auditor import Found
from kvledger.audit.checks.coverage import (
    LEVELS,
    Coverage,
    count_words,
    coverage,
    of_all,
    verdict_words,
)
from kvledger.audit.checks.registry import KINDS, catalogue
from kvledger.audit.events import EngineStarted
from kvledger.audit.release_semantics import CONTRACTS

WITH_ALL = {"connector": "C", "plan": "read", "kv_events_port": 5557, "encoder_cache": 2048}


def engine(level: str = "tokens", version: str = "0.33.0", **settings: Any) -> EngineStarted:
    return replace(STARTED, level=level, version=version, configuration=settings)


def test_a_clean_verdict_at_level_tokens_says_what_nobody_looked_at():
    words = verdict_words("clean", coverage(engine()))

    assert "clean at level tokens: counts, progress; not examined: block contents, ownership" == words


@pytest.mark.parametrize("version", CONTRACTS["vllm"].examined)
@pytest.mark.parametrize("level", LEVELS)
def test_every_kind_is_examined_or_not_and_every_invariant_checked_or_named(level: str, version: str):
    """Over all levels and releases: no invariant is left out silently."""
    found = coverage(engine(level, version, **WITH_ALL), weights_changed=True)
    examined = {name.removesuffix(" in part") for name in found.examined}

    assert {kind.examines for kind in KINDS} == examined | set(found.not_examined)
    assert set() == examined & set(found.not_examined)
    for row in catalogue().values():
        whole = row.kind.examines in found.examined
        if whole and row.severity == "violation":
            assert row.id not in found.unchecked and row.id not in found.in_part


def test_each_level_examines_what_the_one_before_does_and_more():
    seen = [set(coverage(engine(level, **WITH_ALL)).examined) for level in LEVELS]

    assert seen[0] < seen[1] < seen[2]


def test_a_release_that_reports_no_sources_has_its_counts_examined_in_part():
    found = coverage(engine(version="0.12.0"))

    assert "counts in part" in found.examined
    assert "tokens/set-once" in found.unchecked
    assert "can't be checked" in found.limits


def test_loads_are_named_only_where_there_is_a_connector():
    assert "loads" not in coverage(engine()).words
    assert "loads" in coverage(engine(connector="C", plan="read")).examined
    assert "loads in part" in coverage(engine(connector="C", plan="opaque")).examined


def test_blocks_whose_contents_are_not_checked_leave_the_contents_in_part():
    assert "block contents in part" in coverage(engine("content"), ["Group 1 is not checked."]).examined


def test_nothing_is_known_of_an_engine_that_nobody_saw_start():
    assert ("unknown", Coverage()) == (verdict_words("unknown", coverage(None)), coverage(None))


def test_several_engines_cover_what_each_of_them_does():
    both = of_all([coverage(engine()), coverage(engine("blocks"))])

    assert (
        "at levels tokens and blocks: counts, progress; "
        "not examined: block contents, ownership (1 of 2 engines)"
    ) == both.words


def total(severity: Any, findings: int, tokens: int | None = None, **more: Any) -> Found:
    return Found(id="x/y", severity=severity, findings=findings, listed=findings, tokens=tokens, **more)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], "0 violations"),
        ([total("violation", 3_690)], "3,690 violations"),
        ([total("violation", 1_000, at_least=True)], "at least 1,000 violations"),
        (
            [total("drift", 3, 1_200), total("drift", 1, 40)],
            "0 violations, 4 drifts of 2 kinds: 1,240 tokens",
        ),
        ([total("drift", 241, 640)], "0 violations, 241 drifts of 1 kind: 640 tokens"),
        ([total("drift", 1, 9), total("drift", 1)], "0 violations, 2 drifts: 9 tokens in 1 of 2 kinds"),
        ([total("drift", 1)], "0 violations, 1 drift"),
    ],
)
def test_totals_in_words(found: list[Found], words: str):
    assert words == count_words(found)


def test_every_drift_of_a_figure_says_how_many_tokens_it_is_about():
    """A drift of the contents of blocks, or of KV events, is about no figure."""
    without = {row.id for row in catalogue().values() if row.severity == "drift" and not row.tokens}

    assert {"content/recomputed", "events/removed-but-cached", "events/stored-but-cached"} == without


def test_every_violation_about_blocks_contents_or_reads_says_what_stops_the_harm():
    silent = {row.id for row in catalogue().values() if row.severity == "violation" and not row.stop_now}

    assert {"tokens", "connector"} == {id.partition("/")[0] for id in silent}
    assert {
        "connector/negative-match",
        "connector/save-gap",
        "connector/tiers-do-not-sum",
        "connector/tracker-lag",
    } == {id for id in silent if id.startswith("connector/")}
