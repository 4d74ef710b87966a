"""What a group of an engine's KV cache lacks at the boundaries behind a hit."""

from __future__ import annotations

import pytest

from kvledger.audit.analysis.group_boundaries import CHUNKED, SLIDING, STATE, WHOLE, Group, lacking

TOKENS = 16
WINDOW = Group(1, TOKENS, SLIDING, 33)
STATES = Group(2, TOKENS, STATE)


def found(*groups: Group, lacks: dict[tuple[int, int], str], first: int = 0, end: int = 4) -> list[str]:
    """The causes, where each group has all blocks but those that it ``lacks``, by group and end."""

    def in_group(group: Group, block_end: int) -> str:
        how = lacks.get((group.number, block_end))
        return "" if how is None else group.lacks(how)

    return lacking(groups, TOKENS, first, end, in_group)


def test_a_boundary_that_every_group_has_lacks_nothing() -> None:
    assert ["", "", "", ""] == found(WINDOW, STATES, lacks={})


@pytest.mark.parametrize(
    ("how", "window", "state"),
    [("", "window", "state"), ("evicted", "window_evicted", "state_evicted"), ("cache_reset",) * 3],
)
def test_the_cause_names_the_kind_of_the_group_and_how_it_lost_its_part(
    how: str, window: str, state: str
) -> None:
    ends = (16, 32, 48, 64)

    assert [window] * 4 == found(WINDOW, lacks={(1, end): how for end in ends})
    assert [state] * 4 == found(STATES, lacks={(2, end): how for end in ends})


def test_a_window_needs_only_its_last_blocks() -> None:
    """A token reads the 32 before it, so a hit up to 64 needs the blocks that end at 48 and 64."""
    assert ["", "", "", ""] == found(WINDOW, lacks={(1, 16): "", (1, 32): ""})
    assert ["", "", "window", "window"] == found(WINDOW, lacks={(1, 48): ""})


def test_the_boundary_that_lacks_least_counts() -> None:
    """The state at 64 was evicted, those before it were never kept: more room would have helped."""
    never = {(2, end): "" for end in (16, 32, 48)}

    assert ["state_evicted"] * 4 == found(STATES, lacks={**never, (2, 64): "evicted"})
    assert ["state_evicted", "state_evicted", "state", "state"] == found(
        STATES, lacks={(2, 16): "", (2, 32): "evicted", (2, 48): "", (2, 64): ""}
    )


def test_blocks_of_another_length_end_together_at_few_boundaries() -> None:
    long = Group(3, 48, SLIDING, 48)

    assert ["window", "window", "window", "boundary"] == found(long, lacks={(3, 48): ""})
    assert ["", "", "", "boundary"] == found(long, lacks={})


def test_another_group_of_full_attention_needs_every_block_below() -> None:
    whole = Group(4, TOKENS, WHOLE)

    assert ["", "groups", "groups", "groups"] == found(whole, lacks={(4, 32): ""})
    assert ["evicted", "evicted"] == found(whole, lacks={(4, 48): "evicted"}, first=2)


def test_a_chunk_needs_what_it_has_before_the_boundary() -> None:
    chunks = Group(5, TOKENS, CHUNKED, 32)

    assert ["", "", "", ""] == found(chunks, lacks={(5, 16): ""})
    assert ["window"] == found(chunks, lacks={(5, 16): ""}, end=1)
