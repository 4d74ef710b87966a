"""The tokens that the comparison of hits keeps: each once, however often it is in a prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.audit.engines.pool.prefixes import Prefixes, Written

SIZE = 4


class Engine:
    """A pool without eviction, whose requests cache all whole blocks that they have not hit."""

    def __init__(self, blocks: int = 400) -> None:
        self.pool = SimpleNamespace(blocks=[SimpleNamespace(block_id=number) for number in range(blocks)])
        self.requests: dict[int, Any] = {}
        manager = SimpleNamespace(block_pool=self.pool, block_size=SIZE)
        self.prefixes = Prefixes([manager], self.requests.get, tracked=False)
        self.used = 0

    def run(self, tokens: list[int], hit: list[int], *, ends: bool = True) -> list[int]:
        """Serve a request; returns its blocks."""
        number = len(self.requests)
        request = SimpleNamespace(request_id=str(number), _all_token_ids=tokens)
        self.requests[number] = request
        groups = [[self.pool.blocks[block] for block in hit]]
        self.found = self.prefixes.hit(request, groups, len(hit) * SIZE)
        own = range(self.used, self.used + len(tokens) // SIZE - len(hit))
        self.used = own.stop
        self.prefixes.cached(self.pool, number, own)
        if ends:
            self.prefixes.ends(request, number)
        return [*hit, *own]

    def kept(self) -> int:
        """The tokens of all that have written blocks."""
        writers: set[Written] = set()
        for writer in self.prefixes._writers[id(self.pool)]:
            while writer is not None and writer not in writers:
                writers.add(writer)
                writer = writer.base
        return sum(len(each.tokens) for each in writers)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_turns_of_a_conversation_keep_each_token_once(engine: Engine) -> None:
    blocks: list[int] = []
    for turn in range(1, 21):
        blocks = engine.run(list(range(turn * 3 * SIZE)), blocks)
        assert not engine.found

    assert engine.kept() == 20 * 3 * SIZE
    assert engine.prefixes.counts == (sum(3 * turn for turn in range(20)), 0)


@pytest.mark.parametrize("wrong", [0, 5, 11, 12, 23, 35])
def test_the_first_other_token_is_found_in_whoever_wrote_it(engine: Engine, wrong: int) -> None:
    blocks: list[int] = []
    for turn in range(1, 4):
        blocks = engine.run(list(range(turn * 3 * SIZE)), blocks)
    reader = list(range(9 * SIZE))
    reader[wrong] = -1
    engine.run(reader, blocks)

    assert engine.found[1::3] == blocks[wrong // SIZE :]


def test_a_reader_that_is_shorter_than_the_prefix_has_other_tokens(engine: Engine) -> None:
    blocks = engine.run(list(range(6 * SIZE)), engine.run(list(range(3 * SIZE)), []))
    engine.run(list(range(2 * SIZE)), blocks)

    assert engine.found[1::3] == blocks[2:]


def test_a_session_keeps_what_its_next_chunk_replaces_and_the_rest_once(engine: Engine) -> None:
    tokens = list(range(4 * SIZE))
    engine.run(tokens, [], ends=False)
    request = engine.requests[0]
    engine.prefixes.tokens_change(request, 0)
    tokens[-1:] = [-1, *range(100, 100 + 2 * SIZE)]
    engine.prefixes.cached(engine.pool, 0, [4, 5])
    engine.prefixes.ends(request, 0)
    engine.run(list(tokens), [0, 1, 2, 3, 4, 5])

    assert engine.found[1::3] == [3]  # its last token was replaced after it was cached
    assert engine.kept() == 4 * SIZE + 1 + 2 * SIZE
