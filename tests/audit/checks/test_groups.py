"""The invariants of blocks where an engine has groups that are not of full attention.

All on the real scheduler, managers and pools of vLLM. A request of the cross-attention engine is given an
encoder's input by hand: vLLM's own way there wants the files of a model that listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.audit.checks.watched import Watched, manager, running, table
from tests.engines.observed import each, observe
from tests.scenarios.registry import HYBRID

from kvledger.audit.conformance.driver import Driver
from kvledger.audit.conformance.host import EngineSetup
from kvledger.audit.engines.steps import AT_REST_STEPS
from kvledger.audit.old_events import TablesReported

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss

FULL, WINDOW, CROSS = 0, 1, 1
"""Groups, in engines of two."""

BLOCK_TOKENS = 16
ENCODER_TOKENS = 50


@pytest.fixture
def watched() -> Watched:
    return Watched()


# --- a sliding window -----------------------------------------------------------------------------


def beyond_its_window(watched: Watched, **setup: Any) -> Driver:
    """A request whose first blocks have left the window: null blocks stand in their places."""
    driver = running(watched, "a", tokens=150, groups=HYBRID, sliding_window=64, **setup)
    for _ in range(2):
        driver.step()
    assert table(driver, "a", WINDOW)[0].is_null
    assert not table(driver, "a", FULL)[0].is_null
    return driver


@violates("blocks/coverage")
def test_a_table_that_has_lost_its_null_blocks(watched: Watched) -> None:
    """They stand for positions: without them every later block is read for others."""
    driver = beyond_its_window(watched)
    blocks = table(driver, "a", WINDOW)
    blocks[:] = [block for block in blocks if not block.is_null]

    finding = watched.finding("blocks/coverage")

    assert f"its block table in group 1 has {len(blocks)} blocks of 16 tokens" in finding.message


@violates("blocks/double-allocation")
def test_a_block_that_left_the_window_and_still_stands_in_the_table(watched: Watched) -> None:
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
def test_the_null_block_in_many_places_of_many_tables(watched: Watched) -> None:
    driver = beyond_its_window(watched)
    driver.add("b", 150, 20)
    for _ in range(3):
        driver.step()
    nulls = [sum(block.is_null for block in table(driver, name, WINDOW)) for name in ("a", "b")]

    assert min(nulls) > 1
    assert [] == watched.found()


@near_miss("blocks/coverage")
def test_null_blocks_stand_for_positions() -> None:
    """As many places as the full group has, most of them the null block's."""

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
def test_blocks_that_leave_the_window_while_others_share_them(watched: Watched) -> None:
    driver = watched.start(groups=HYBRID, sliding_window=64, blocks=48)
    for name in range(4):
        driver.add(f"r{name}", 130 + name, 40, shares=("family", 128))
        driver.step()
    driver.run()

    assert [] == watched.found()


# --- cross-attention ------------------------------------------------------------------------------


class WatchedEncoders(Watched):
    """Engines whose second group holds what an encoder has put out."""

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
        where = PlaceholderRange(offset=0, length=ENCODER_TOKENS)
        request.mm_features = [MultiModalFeatureSpec(None, "audio", f"of {name}", where)]


@pytest.fixture
def encoders() -> WatchedEncoders:
    return WatchedEncoders()


def listening(encoders: WatchedEncoders, *names: str, tokens: int = 100) -> Driver:
    """An engine in which these requests have had their first output."""
    driver = encoders.start(groups=("full", "cross"), prefix_caching=False)
    for name in names:
        encoders.add(driver, name, tokens, 30)
    driver.step()
    return driver


@near_miss("blocks/coverage")
def test_a_cross_attention_table_is_as_long_as_the_encoder_s_input(encoders: WatchedEncoders) -> None:
    """Its places are none of the request's positions."""
    driver = listening(encoders, "a")
    for _ in range(5):
        driver.step()

    assert (7, 4) == (len(driver.blocks("a", FULL)), len(driver.blocks("a", CROSS)))
    assert [] == encoders.found()


@near_miss("blocks/leak")
@pytest.mark.parametrize("how", ["to its end", "aborted", "preempted"])
def test_cross_attention_blocks_go_with_their_request(encoders: WatchedEncoders, how: str) -> None:
    driver = listening(encoders, "a", "b")
    if how == "aborted":
        driver.abort("a")
    if how == "preempted":
        driver.preempt("b")
    driver.run()

    assert [] == encoders.found()


@violates("blocks/leak")
def test_a_cross_attention_block_that_no_table_has_when_its_request_goes(encoders: WatchedEncoders) -> None:
    driver = listening(encoders, "a")
    lost = table(driver, "a", CROSS).pop()
    driver.abort("a")

    assert [lost.block_id] == encoders.finding("blocks/leak").figures["blocks"]


@violates("blocks/double-allocation")
def test_a_cross_attention_group_that_takes_a_block_of_the_full_one(encoders: WatchedEncoders) -> None:
    driver = listening(encoders, "a")
    table(driver, "a", CROSS)[0] = table(driver, "a", FULL)[0]

    finding = encoders.finding("blocks/double-allocation")

    assert "request a, life 1, group 0, and request a, life 1, group 1" in finding.message


@violates("blocks/double-free")
def test_a_cross_attention_table_is_freed_twice(encoders: WatchedEncoders) -> None:
    driver = listening(encoders, "a", "b")
    blocks = list(table(driver, "a", CROSS))
    for _ in range(2):
        manager(driver, CROSS).req_to_blocks["a"] = list(blocks)
        manager(driver, CROSS).free("a")

    assert "request a, life 1, group 1, which does not hold it" in (
        encoders.finding("blocks/double-free").message
    )
