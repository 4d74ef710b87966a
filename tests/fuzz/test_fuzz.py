"""Mutated journals: no crash, no hang, and no wrong figure that is called clean. `make fuzz` reads more."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.fuzz import foreign, kills
from tests.fuzz.run import results, summary

JOURNALS = 2_000
SHARDS = 10


@pytest.mark.fuzz
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_mutated_journal_is_read_without_a_crash_a_hang_or_a_wrong_figure(shard: int) -> None:
    done = results(range(shard, JOURNALS, SHARDS))

    print(summary(done))
    assert not [one for _, one in done if one.wrong], summary(done)


def test_some_mutated_journals_are_read_rightly() -> None:
    done = results(range(JOURNALS, JOURNALS + 60))

    assert not [one for _, one in done if one.wrong], summary(done)


TEXTS = 12_000


@pytest.mark.fuzz
def test_mutated_text_of_others_is_read_or_refused() -> None:
    assert [] == foreign.failures(TEXTS)[1]


def test_some_mutated_text_of_others_is_read_or_refused() -> None:
    counts, wrong = foreign.failures(500, TEXTS)

    assert [] == wrong
    assert set(foreign.READERS) == {name.partition(":")[0] for name in counts}


@pytest.mark.crash
@pytest.mark.parametrize("kind", kills.KINDS)
def test_what_is_killed_loses_and_doubles_nothing(kind: str, tmp_path: Path) -> None:
    assert [] == kills.KINDS[kind](8, random.Random(8), tmp_path)
