"""The sentences about loaded blocks in an audit."""

from __future__ import annotations

from kvledger.exporters.reports.contents import ContentsData, sentences


def data(**counts: int) -> ContentsData:
    plain = dict.fromkeys(("workers", "verified", "tokens", "differed", "unsealed", "sealed", "scrubbed"), 0)
    return ContentsData(
        **(plain | counts), not_compared={}, scrub_differed=0, bytes=0, seconds=0.0, excluded=[]
    )


def test_loaded_blocks_are_acquitted_with_their_number() -> None:
    assert list(sentences(data(stored=36, moved=27))) == [
        "27 of 27 loaded blocks held the bytes that were stored (36 blocks stored)."
    ]


def test_loaded_blocks_that_differ_and_those_not_compared_are_said() -> None:
    assert list(sentences(data(stored=1, moved=2, moved_differed=3, moved_unknown=1))) == [
        "2 of 5 loaded blocks held the bytes that were stored (1 block stored).",
        "Not compared: 1 loaded block, stored unseen or perhaps by another engine.",
    ]
