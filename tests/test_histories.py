"""The words of the histories are parsed rightly, and the table of golden histories is whole."""

from __future__ import annotations

import pytest
from tests.columns import by_title
from tests.histories import (
    DOCUMENTED,
    GOLDEN,
    WOVEN,
    Golden,
    Word,
    compressed,
    events,
    parse,
    weave,
)

from kvledger.audit.events import Delivered, Event, Repeated, Stepped


@pytest.mark.parametrize("row", GOLDEN, ids=by_title)
def test_a_golden_row_adds_up(row: Golden) -> None:
    assert row.scheduled == (row.first_prompt + row.first_output + row.rework + row.rejected + row.overrun)


def test_the_documented_table_has_all_rows() -> None:
    """``histories.md`` has eighteen rows, and no title occurs twice."""
    assert 18 == len(DOCUMENTED)
    titles = [row.title for row in (*GOLDEN, *WOVEN)]
    assert len(titles) == len(set(titles))


def test_parse_reads_every_word() -> None:
    """Each kind of word is parsed with its numbers and marks."""
    assert [
        Word("A", 0, 32, 128),
        Word("L", 0, 64),
        Word("s", 0, 4, 3),
        Word("o", 0, 1, 3),
        Word("o", 0, mark="+"),
        Word("p", 0, mark="reset"),
        Word("F", 0, 2),
    ] == parse(200, "A32+128 L64 s4/3 o1/3 o+ p:reset F-2")


def test_parse_repeats_and_joins() -> None:
    """``(...)x2`` is written out; ``&`` joins words about several requests."""
    assert parse(9, "s1 o+ s1 o+") == parse(9, "(s1 o+)x2")
    assert [Word("s", 0, 4), Word("s", 1, 2, joined=True)] == parse(9, "a.s4&b.s2")


@pytest.mark.parametrize("words", ["Z", "A5", "s", "o+/3", "A64+0"])
def test_parse_refuses_wrong_words(words: str) -> None:
    """An unknown word and a first hit longer than the prompt are refused."""
    with pytest.raises(ValueError, match=r"not a word|longer"):
        parse(50, words)


def test_steady_decode_becomes_one_repeat() -> None:
    """Twenty equal steps become one step, one output and one :class:`Repeated`."""
    stream = compressed(events(8, "A0+0 s8 o+ (s1 o+)x20 F"))

    # The first s1 differs from s8; its output is that of s8.
    assert [19] == [event.times for event in stream if isinstance(event, Repeated)]


def test_steps_are_written_as_differences() -> None:
    """Only changed and dropped requests are written."""
    stream: list[Event] = weave(
        {0: 8, 1: 8}, "a.A0+0 b.A0+0 a.s8&b.s8 a.o+&b.o+ a.s1&b.s1 a.o+&b.o+ b.F a.s1 a.o+ a.F"
    )
    steps = [event for event in stream if isinstance(event, Stepped)]
    outputs = [event for event in stream if isinstance(event, Delivered)]

    assert [[0, 8, 0, 8, 1, 8, 0, 8], [0, 1, 0, 9, 1, 1, 0, 9], []] == [s.changed for s in steps]
    assert [[], [], [1]] == [step.dropped for step in steps]
    assert [[0, 1, 1, 1], [], []] == [output.changed for output in outputs]
