"""The invariants of blocks in engines with KV-cache groups other than full attention.

The tests use vLLM's scheduler, managers and pools. They give requests of the cross-attention engine an
encoder input by hand, because vLLM's own path needs the files of an audio model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.audit.checks.watched import Watched, manager, running, table
from tests.engines.observed import each, observe
from tests.scenarios.registry import HYBRID

from kvledger.audit.engines.steps import AT_REST_STEPS
from kvledger.audit.events import TablesReported
from kvledger.audit.traffic.driver import Driver
from kvledger.audit.traffic.engine_setup import EngineSetup

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

FULL, WINDOW, CROSS, STATES = 0, 1, 1, 1
"""Group numbers in engines with two groups."""

BLOCK_TOKENS = 16
ENCODER_TOKENS = 50


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- a sliding window -----------------------------------------------------------------------------


def beyond_its_window(watched: Watched, **setup: Any) -> Driver:
    """An engine with a request whose first blocks have left the window and are null blocks now."""
    driver = running(watched, "a", tokens=150, groups=HYBRID, sliding_window=64, **setup)
    for _ in range(2):
        driver.step()
    assert table(driver, "a", WINDOW)[0].is_null
    assert not table(driver, "a", FULL)[0].is_null
    return driver


@violates("blocks/coverage")
def test_a_block_table_without_its_null_blocks_is_found(watched: Watched) -> None:
    """Null blocks keep positions: without them every later block is read at a wrong position."""
    driver = beyond_its_window(watched)
    blocks = table(driver, "a", WINDOW)
    blocks[:] = [block for block in blocks if not block.is_null]

    finding = watched.finding("blocks/coverage")

    assert f"its block table in group 1 has {len(blocks)} blocks of 16 tokens" in finding.message


@violates("blocks/double-allocation")
def test_a_block_still_in_the_table_after_it_left_the_window_is_found(watched: Watched) -> None:
    driver = running(watched, "a", tokens=150, groups=HYBRID, sliding_window=64)
    before = list(table(driver, "a", WINDOW))
    for _ in range(25):
        driver.step()
    blocks = table(driver, "a", WINDOW)
    left = next(place for place, block in enumerate(before) if blocks[place].is_null and not block.is_null)
    blocks[left] = before[left]

    finding = watched.finding("blocks/double-allocation")

    assert (
        "is in a block table of request a, life 1, group 1, which holds no reference to it" in finding.message
    )


@near_miss("blocks/double-allocation")
def test_the_null_block_may_be_in_many_places_of_many_tables(watched: Watched) -> None:
    driver = beyond_its_window(watched)
    driver.add("b", 150, 20)
    for _ in range(3):
        driver.step()
    nulls = [sum(block.is_null for block in table(driver, name, WINDOW)) for name in ("a", "b")]

    assert min(nulls) > 1
    assert [] == watched.violation_ids()


@near_miss("blocks/coverage")
def test_null_blocks_keep_the_positions_of_freed_blocks() -> None:
    """The window table is as long as the full table, and most of its places hold the null block."""

    def scenario(attach: Callable[[Any], None]) -> Driver:
        driver = Driver(EngineSetup(groups=HYBRID, sliding_window=64))
        attach(driver.scheduler)
        driver.add("a", 150, 30)
        for _ in range(2 * AT_REST_STEPS):
            driver.step()
        return driver

    _, events = observe(scenario, level="blocks")
    rows = [event for event in each(events) if isinstance(event, TablesReported)][-1].rows
    length = rows[3]
    full, window = rows[4 : 4 + length], rows[8 + length :]

    assert (length, FULL, WINDOW) == (len(window), rows[1], rows[5 + length])
    assert 0 == full.count(0)
    assert length - 64 // BLOCK_TOKENS - 2 <= window.count(0)


@near_miss("blocks/references")
def test_shared_blocks_that_leave_the_window_are_clean(watched: Watched) -> None:
    driver = watched.start(groups=HYBRID, sliding_window=64, blocks=48)
    for name in range(4):
        driver.add(f"r{name}", 130 + name, 40, shares=("family", 128))
        driver.step()
    driver.run()

    assert [] == watched.violation_ids()


# --- states ---------------------------------------------------------------------------------------


@violates("blocks/coverage")
def test_an_empty_place_where_the_state_of_a_request_belongs_is_found(watched: Watched) -> None:
    driver = running(watched, "a", groups=("full", "mamba"), blocks=128)
    for _ in range(2 * AT_REST_STEPS):
        driver.step()
        table(driver, "a", STATES)[-1] = manager(driver, STATES)._null_block

    finding = watched.finding("blocks/coverage")

    assert "of request a in group 1 has no block at place" in finding.message


# --- cross-attention ------------------------------------------------------------------------------


CREDITED = ["encoder/free-space"]
"""Each output frees the space of the encoder input once more (vLLM#55733)."""


class WatchedEncoders(Watched):
    """Engines whose second group holds the output of an encoder."""

    def attach(self, scheduler: Any) -> None:
        from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager

        scheduler.is_encoder_decoder = True
        scheduler.max_num_encoder_input_tokens = 1024
        scheduler.encoder_cache_manager = EncoderDecoderCacheManager(1024)
        super().attach(scheduler)

    @staticmethod
    def add(driver: Driver, name: str, prompt_tokens: int, max_tokens: int) -> None:
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

        request = driver.add(name, prompt_tokens, max_tokens)
        placeholder = PlaceholderRange(offset=0, length=ENCODER_TOKENS)
        request.mm_features = [MultiModalFeatureSpec(None, "audio", f"of {name}", placeholder)]


@pytest.fixture
def encoders() -> WatchedEncoders:
    return WatchedEncoders()


def running_encoders(encoders: WatchedEncoders, *names: str, tokens: int = 100) -> Driver:
    """An engine in which these requests have had their first output."""
    driver = encoders.start(groups=("full", "cross"), prefix_caching=False)
    for name in names:
        encoders.add(driver, name, tokens, 30)
    driver.step()
    return driver


@near_miss("blocks/coverage")
def test_a_cross_attention_table_is_as_long_as_the_encoder_input(encoders: WatchedEncoders) -> None:
    """Its places are positions of the encoder input, not of the request."""
    driver = running_encoders(encoders, "a")
    for _ in range(5):
        driver.step()

    assert (7, 4) == (len(driver.blocks("a", FULL)), len(driver.blocks("a", CROSS)))
    assert CREDITED == encoders.violation_ids()


@near_miss("blocks/leak")
@pytest.mark.parametrize("how", ["to its end", "aborted", "preempted"])
def test_cross_attention_blocks_are_freed_with_their_request(encoders: WatchedEncoders, how: str) -> None:
    driver = running_encoders(encoders, "a", "b")
    if how == "aborted":
        driver.abort("a")
    if how == "preempted":
        driver.preempt("b")
    driver.run()

    assert CREDITED == encoders.violation_ids()


@violates("blocks/leak")
def test_a_cross_attention_block_missing_from_its_table_leaks(encoders: WatchedEncoders) -> None:
    driver = running_encoders(encoders, "a")
    lost = table(driver, "a", CROSS).pop()
    driver.abort("a")

    assert [lost.block_id] == encoders.finding("blocks/leak").figures["blocks"]


@violates("blocks/double-allocation")
def test_a_cross_attention_table_with_a_block_of_the_full_group_is_found(encoders: WatchedEncoders) -> None:
    driver = running_encoders(encoders, "a")
    table(driver, "a", CROSS)[0] = table(driver, "a", FULL)[0]

    finding = encoders.finding("blocks/double-allocation")

    assert "request a, life 1, group 0, and request a, life 1, group 1" in finding.message


@violates("blocks/double-free")
def test_a_cross_attention_table_freed_twice_is_a_double_free(encoders: WatchedEncoders) -> None:
    driver = running_encoders(encoders, "a", "b")
    blocks = list(table(driver, "a", CROSS))
    for _ in range(2):
        manager(driver, CROSS).req_to_blocks["a"] = list(blocks)
        manager(driver, CROSS).free("a")

    assert "request a, life 1, group 1, which does not hold it" in (
        encoders.finding("blocks/double-free").message
    )
