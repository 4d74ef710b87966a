"""Mutated journals: no crash, no hang, and no wrong figure that is called clean. `make fuzz` reads more."""

from __future__ import annotations

import pytest
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
