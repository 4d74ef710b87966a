"""Rules of the releases, each shown by a small scenario on releases with and without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm")

from tests.releases import built
from tests.simulate.timed import Arrival, conversations, recorded, write

from kvledger.audit.events import EngineStarted, Event, Setting
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.audit.simulate.processes import Environments
from kvledger.audit.simulate.study import Outcome, Study, Variant, recording
from kvledger.exporters.reports import diff_explained

pytestmark = pytest.mark.releases

ONE_BY_ONE = 1.0
"""Seconds between two requests, each of which ends long before the next one comes."""


def simulated(
    arrivals: Sequence[Arrival],
    releases: Sequence[str],
    settings: tuple[tuple[str, Setting], ...] = (),
    **setup: object,
) -> list[Outcome]:
    """What the requests lead to in each release."""
    for release in releases:
        built(release)
    with Study(recording(recorded(arrivals, **setup)), commands=Environments(()).command) as study:
        return [next(study.variants([Variant(release, settings)])) for release in releases]


def prompt(first: int, tokens: int) -> list[int]:
    """Tokens that no prompt with another ``first`` has."""
    return list(range(first, first + tokens))


def test_since_0_24_blocks_without_a_hash_do_not_push_out_cached_blocks() -> None:
    """A prompt of four whole blocks comes twice. Ten requests of one partly filled block come in between, and
    there are nine blocks. Before 0.24 each of them is put behind the cached blocks, and all of these are
    allocated again."""
    first = Arrival(0.0, prompt(1_000, 66), 2)
    between = [Arrival(each * ONE_BY_ONE, prompt(100 * each, 8), 2) for each in range(1, 11)]
    again = first._replace(at=11 * ONE_BY_ONE)

    old, new = simulated([first, *between, again], ["0.23.0", "0.24.0"], blocks=10, max_batched_tokens=256)

    assert (0, 64) == (old.totals.local, new.totals.local)


def test_since_0_19_1_a_prompt_that_does_not_fit_waits_and_is_not_preempted() -> None:
    """A request has seven of eleven blocks, and grows, when a prompt of five blocks comes. Its first chunk
    fits."""
    arrivals = [Arrival(0.0, prompt(1_000, 96), 60), Arrival(0.03, prompt(5_000, 80), 4)]
    setup = {"blocks": 12, "max_batched_tokens": 32, "reserve_full_isl": True}

    old, new = simulated(arrivals, ["0.18.1", "0.19.1"], **setup)
    [off] = simulated(arrivals, ["0.19.1"], (("scheduler_reserve_full_isl", False),), **setup)

    figures = [(one.preemptions, one.rework_tokens) for one in (old, new, off)]
    assert (0, 0) == figures[1]
    assert figures[0] == figures[2]
    assert figures[0][0] > 0


def test_since_0_30_a_prompt_that_leaves_a_cached_one_early_misses_its_windows() -> None:
    """With prefix_cache_retention_interval 0 only the window at the end of a prompt is kept."""
    long = prompt(1_000, 320)
    arrivals = [Arrival(0.0, long, 2), Arrival(ONE_BY_ONE, long[:160] + prompt(9_000, 40), 2)]
    setup = {"blocks": 200, "groups": ("full", "sliding"), "sliding_window": 32}
    name = "prefix_cache_retention_interval"

    [kept] = simulated(arrivals, ["0.31.0"], ((name, None),), **setup)
    [dropped] = simulated(arrivals, ["0.31.0"], ((name, 0),), **setup)

    assert 160 == kept.totals.local
    assert 160 > dropped.totals.local


SHORT_WINDOW_BLOCKS = {
    "groups": ("full", "sliding"),
    "group_tokens": (64, 16),
    "block_size": 16,
    "sliding_window": 32,
    "blocks": 80,
    "max_batched_tokens": 64,
    "max_model_len": 4096,
}
"""Full attention with blocks of 64 tokens beside a window with blocks of 16, as in DeepSeek-V4's models."""


def sent_again(number: int) -> list[Arrival]:
    """A prompt of four whole blocks, one of twenty, and the first one again."""
    first = Arrival(20 * number * ONE_BY_ONE, prompt(10_000 * number, 266), 2)
    between = Arrival(first.at + ONE_BY_ONE, prompt(10_000 * number + 5_000, 1_290), 2)
    return [first, between, first._replace(at=first.at + 10 * ONE_BY_ONE)]


def test_since_0_23_a_long_prompt_whose_window_moves_on_does_not_push_out_cached_prompts() -> None:
    """vLLM#42948: a prompt that is sent again hits nothing, although the pool has room for both."""
    old, new = simulated(sent_again(1), ["0.22.1", "0.23.0"], **SHORT_WINDOW_BLOCKS)
    assert (0, 256) == (old.totals.local, new.totals.local)


def test_an_upgrade_that_mends_windows_with_shorter_blocks_names_its_rule(tmp_path: Path) -> None:
    for release in ("0.22.1", "0.23.0"):
        built(release)
    arrivals = [each for number in range(1, 5) for each in sent_again(number)]
    events = recorded(arrivals, **SHORT_WINDOW_BLOCKS)
    before = write(tmp_path / "before", renamed(events, "0.22.1"))
    after = write(tmp_path / "after", renamed(events, "0.23.0"))

    found = diff_explained.explained([before, after], pythons=(), closed=False, window=EVERYTHING)

    rows = [(row.changed, row.rules) for row in found.explanation.rows if row.kind == "release"]
    assert [("release 0.22.1 -> 0.23.0", ["window-scratch-evicted-first"])] == rows


def test_the_release_at_which_figures_change_is_found_with_its_rule(tmp_path: Path) -> None:
    """Of the upgrade from 0.22.1 to 0.25.1, halving the releases in between leaves 0.23.0 -> 0.24.0."""
    for release in ("0.22.1", "0.23.0", "0.24.0", "0.25.1"):
        built(release)
    setup = {"max_batched_tokens": 256, "max_model_len": 1024, "blocks": 60}
    arrivals = conversations(80, 26.0, 1)
    before = write(tmp_path / "before", renamed(recorded(arrivals, **setup), "0.22.1"))
    after = write(tmp_path / "after", renamed(recorded(arrivals, **setup), "0.25.1"))

    found = diff_explained.explained([before, after], pythons=(), closed=False, window=EVERYTHING)

    rows = [(row.changed, row.rules) for row in found.explanation.rows if row.kind == "release"]
    assert [("release 0.23.0 -> 0.24.0", ["uncached-blocks-evicted-first"])] == rows


def renamed(events: Sequence[Event], version: str) -> list[Event]:
    """The events as if another release had written them, so that the recordings do not differ."""
    return [replace(each, version=version) if isinstance(each, EngineStarted) else each for each in events]
