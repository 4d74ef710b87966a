"""Tables that forget their oldest entries, and that no other way to forget them is taken."""

from __future__ import annotations

import re
from pathlib import Path

import kvledger
from kvledger.audit.bounded_tables import keep_newest, take_oldest

ROOT = Path(kvledger.__file__).parent
ONE_BY_ONE = re.compile(r"\[next\(iter\(|\.pop\(next\(iter\(")
"""An oldest entry that is found by a walk over a dict and then used as its key."""


def test_a_table_keeps_its_newest_entries() -> None:
    table: dict[int, str] = {}
    for number in range(100):
        table[number] = "left"
        keep_newest(table, 16)
        assert min(16, number + 1) <= len(table) <= 18
        assert list(table) == list(range(number + 1))[-len(table) :]


def test_the_values_that_leave_are_returned_oldest_first() -> None:
    table = {number: str(number) for number in range(19)}

    assert ["0", "1", "2"] == keep_newest(table, 16)
    assert [] == keep_newest(table, 16)


def test_the_oldest_eighth_leaves_and_at_least_one() -> None:
    table = {number: str(number) for number in range(17)}

    assert ["0", "1"] == take_oldest(table)
    assert ["0"] == take_oldest({0: "0"})
    assert [] == take_oldest({})


def test_no_table_forgets_its_oldest_entries_one_by_one() -> None:
    sources = [*ROOT.glob("audit/**/*.py"), *ROOT.glob("exporters/**/*.py")]

    found = {str(each.relative_to(ROOT)) for each in sources if ONE_BY_ONE.search(each.read_text())}

    assert set() == found
