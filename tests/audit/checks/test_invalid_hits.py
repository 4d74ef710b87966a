"""Reads of cached blocks without valid KV: who is named, and how their prompts are settled."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.watched import Watched, manager, pool, table
from tests.engines.observed import audited, each, observe
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import Driver, start
from tests.scenarios.registry import HYBRID, Attach
from tests.scenarios.scripted_connector import ScriptedConnector

from kvledger.audit.events import BlocksCached, Finished
from kvledger.audit.ledger.account import Settlement
from kvledger.audit.planted.fault import planted
from kvledger.audit.planted.table import BY_NAME
from kvledger.audit.traffic.connector import PlannedLoads

violates = pytest.mark.violates
near_miss = pytest.mark.near_miss


@pytest.fixture
def watched() -> Watched:
    return Watched()


def settled(watched: Watched, request_id: str) -> tuple[int, int, int, int, int]:
    """Local, external, computed and unattained tokens, and the invalid hits among the unattained."""
    account = watched.audits[0].ledger.account(request_id)
    assert account is not None
    figures = account.settled
    assert isinstance(figures, Settlement)
    sources = figures.local, figures.external, figures.computed, figures.unattained
    assert sum(sources) == figures.prompt_tokens
    return (*sources, figures.invalid_hits)


def messages(watched: Watched) -> dict[str | None, str]:
    """The sentence of each finding of ``blocks/read-invalid``, by request."""
    return {v.request: v.message for v in watched.audits[0].violations if v.id == "blocks/read-invalid"}


def with_failed_load(
    watched: Watched, failed: slice = slice(4, 10), prompt: int = 200, **setup: int
) -> Driver:
    """Request r loads 160 of its tokens; the load of some blocks, which are cached by then, fails."""
    driver = watched.start(connector="scripted", **setup)
    driver.connector.answer_lookups("r", 160, 0)
    driver.add("r", prompt, 3)
    driver.schedule()
    driver.output(invalid_blocks=driver.blocks("r")[failed])
    return driver


# --- loads that failed ------------------------------------------------------------------------------


@violates("blocks/read-invalid")
def test_requests_that_hit_blocks_of_a_failed_load_are_named(watched):
    """vLLM 0.32 leaves the blocks in the cache if their request ends before it computes them."""
    driver = with_failed_load(watched)
    driver.abort("r")
    for name in ("b", "c"):
        driver.add(name, 200, 3, shares=("r", 160))
        driver.run()
    watched.violation_ids()

    named = messages(watched)
    assert {"b", "c"} == set(named)
    assert (
        "request b reads 96 tokens without valid KV, from position 64 up, in block" in named["b"]
        and " and 5 more: the load of request r failed, and the tokens were not computed again." in named["b"]
    )
    assert (64, 0, 40, 96, 96) == settled(watched, "b")


@violates("blocks/read-invalid")
def test_a_request_that_hits_its_own_failed_blocks_is_named(watched):
    driver = with_failed_load(watched)
    driver.preempt("r")
    driver.run()
    watched.violation_ids()

    assert 128 == settled(watched, "r")[-1]  # the tokens computed above the failed load are not valid either


def with_a_life_that_ended(watched: Watched, ends: str, neighbour: bool = False) -> Driver:
    """A life of request r ends while the step that loads 112 of its tokens is in flight. The load fails.

    With a ``neighbour``, a running request shares the blocks, so that the engine makes it compute them.
    """
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 112, 0)
    driver.add("r", 160, 3)
    if neighbour:
        driver.add("b", 160, 3, shares=("r", 112))
    driver.schedule()
    failed = driver.blocks("r")[2:7]
    getattr(driver, ends)("r")
    driver.output(invalid_blocks=failed)
    return driver


@violates("blocks/read-invalid")
@violates("blocks/hash-content")
@pytest.mark.parametrize("ends", ["preempt", "abort"])
def test_blocks_that_fail_after_the_life_has_ended_stay_in_the_cache(watched, ends):
    """The scheduler looks for the failed blocks in the tables of running requests only."""
    driver = with_a_life_that_ended(watched, ends)
    driver.run()
    driver.add("next", 160, 3, shares=("r", 112))
    driver.run()

    assert {"blocks/hash-content", "blocks/read-invalid"} <= {*watched.violation_ids()}
    assert "reads 80 tokens without valid KV, from position 32 up" in messages(watched)["next"]
    assert (32, 0, 48, 80, 80) == settled(watched, "next")


@violates("blocks/read-invalid")
def test_what_a_life_computed_beside_a_load_that_fails_later_is_not_valid(watched):
    """Request r resumes with a hit of 112 loaded tokens, and 32 that it computed from them."""
    with_a_life_that_ended(watched, "preempt").run()
    watched.violation_ids()

    assert "reads 112 tokens without valid KV, from position 32 up" in messages(watched)["r"]
    assert (0, 32, 16, 112, 112) == settled(watched, "r")


@near_miss("blocks/read-invalid")
def test_blocks_that_fail_after_the_life_has_ended_and_leave_the_cache_are_not_read(watched):
    driver = with_a_life_that_ended(watched, "preempt")
    driver.reset_prefix_cache()
    driver.run()
    driver.add("next", 160, 3, shares=("r", 112))
    driver.run()

    assert {"blocks/hash-content"} == {*watched.violation_ids()}
    assert (112, 0, 48, 0, 0) == settled(watched, "next")


@near_miss("blocks/read-invalid")
def test_blocks_that_fail_after_the_life_has_ended_and_that_a_neighbour_computes_have_kv(watched):
    driver = with_a_life_that_ended(watched, "abort", neighbour=True)
    driver.run()
    driver.add("next", 160, 3, shares=("r", 112))
    driver.run()

    assert [] == [id for id in watched.violation_ids() if id.startswith("blocks/")]
    assert (112, 0, 48, 0, 0) == settled(watched, "next")


def with_a_hit_before_the_output(watched: Watched, had: bool = False) -> Driver:
    """A life of request r ends beside its load, and the next one hits its 160 tokens. Then the load fails.

    The engine makes the request compute them again. ``had``: an earlier life has computed them.
    """
    driver = watched.start(connector="scripted", asynchronous=True)
    driver.connector.answer_lookups("r", *([0] if had else []), 112, 0)
    driver.add("r", 168, 3)
    driver.schedule()
    if had:
        driver.preempt("r")
        driver.output()
        driver.reset_prefix_cache()
        driver.schedule()
    failed = driver.blocks("r")[2:7]
    driver.preempt("r")
    driver.schedule()
    driver.output(invalid_blocks=failed)
    return driver


def test_loaded_tokens_that_fail_after_they_were_hit_are_no_repeat_hit(watched):
    """The life that ended had 32 loaded tokens and the 48 that it computed, though these are not valid."""
    with_a_hit_before_the_output(watched).run()
    watched.violation_ids()
    account = watched.audits[0].ledger.account("r")

    assert (32 + 48, 0, 32) == (account.hit_again, account.loaded_again, account.loaded)


def test_tokens_that_an_earlier_life_computed_are_a_repeat_hit_also_if_their_load_fails(watched):
    with_a_hit_before_the_output(watched, had=True).run()
    watched.violation_ids()
    account = watched.audits[0].ledger.account("r")

    assert (160, 32, 32) == (account.hit_again, account.loaded_again, account.loaded)


def test_what_a_load_that_failed_made_invalid_is_unattained_until_it_is_computed_again(watched):
    driver = with_a_hit_before_the_output(watched)
    driver.abort("r")
    watched.violation_ids()

    assert (0, 32, 0, 136, 0) == settled(watched, "r")


@near_miss("blocks/read-invalid")
@pytest.mark.parametrize("batch", [8192, 32], ids=["one step", "three steps"])
def test_hits_after_the_tokens_were_computed_again_are_valid(watched, batch):
    driver = with_failed_load(watched, max_batched_tokens=batch)
    driver.run()
    driver.add("b", 200, 3, shares=("r", 160))
    driver.run()

    assert [] == [id for id in watched.violation_ids() if id == "blocks/read-invalid"]
    assert (160, 0, 40, 0, 0) == settled(watched, "b")


@near_miss("blocks/read-invalid")
def test_blocks_of_a_failed_load_that_did_not_fail_have_kv(watched):
    """Only block 2 of the load fails. The request is preempted after it computed blocks 2 to 5 again."""
    driver = with_failed_load(watched, prompt=170, failed=slice(2, 3), max_batched_tokens=64)
    driver.schedule()
    driver.preempt("r")
    driver.output()
    driver.run()

    assert [] == [id for id in watched.violation_ids() if id == "blocks/read-invalid"]
    assert (64, 32, 74, 0, 0) == settled(watched, "r")


@violates("blocks/read-invalid")
def test_a_block_that_failed_among_loaded_ones_is_the_only_one_without_kv(watched):
    driver = with_failed_load(watched, failed=slice(4, 5))
    driver.abort("r")
    driver.add("b", 200, 3, shares=("r", 160))
    driver.run()
    watched.violation_ids()

    assert "reads 16 tokens without valid KV, from position 64 up" in messages(watched)["b"]
    assert (144, 0, 40, 16, 16) == settled(watched, "b")


@near_miss("blocks/read-invalid")
def test_a_block_that_is_cached_anew_after_a_reset_has_kv(watched):
    """Life 2 gets a block of life 1 again and caches it; the load that failed in life 1 is no longer its."""
    driver = with_failed_load(watched, prompt=208, failed=slice(0, 10), blocks=26)
    last = driver.blocks("r")[-1]
    driver.reset_prefix_cache(running=True)
    driver.schedule()
    assert last == driver.blocks("r")[-1]
    driver.output()
    driver.run()

    assert [] == [id for id in watched.violation_ids() if id == "blocks/read-invalid"]


@near_miss("blocks/read-invalid")
def test_a_load_that_failed_as_a_whole_leaves_the_local_hits_valid(watched):
    driver = watched.start(connector="scripted", groups=("full", "sliding"), sliding_window=32)
    driver.connector.answer_lookups("r", 0, (8, True), 0)
    driver.add("r", 40, 3)
    driver.step()
    driver.preempt("r")
    driver.schedule()
    driver.output(failed_recving=["r"], finished_recving=["r"])
    driver.run()

    assert [] == [id for id in watched.violation_ids() if id == "blocks/read-invalid"]


@near_miss("blocks/read-invalid")
def test_hits_in_the_step_that_computes_the_tokens_again_are_valid(watched):
    driver = with_failed_load(watched)
    driver.add("b", 200, 3, shares=("r", 160))
    driver.run()

    assert "b" not in messages(watched)
    assert (160, 0, 40, 0, 0) == settled(watched, "b")


@near_miss("blocks/read-invalid")
def test_hits_after_the_blocks_left_the_cache_are_valid(watched):
    driver = with_failed_load(watched)
    driver.abort("r")
    driver.reset_prefix_cache()
    for name in ("b", "c"):
        driver.add(name, 200, 3, shares=("r", 160))
        driver.run()
    watched.violation_ids()

    assert {} == messages(watched)
    assert (160, 0, 40, 0, 0) == settled(watched, "c")


# --- loads that were never made ---------------------------------------------------------------------


def with_lost_load(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Request r is promised 96 of its 120 tokens, and the connector metadata orders no load."""
    monkeypatch.setattr(ScriptedConnector, "build_connector_meta", lambda *_: PlannedLoads())
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 96)
    driver.add("r", 120, 3)
    driver.run()
    return driver


@violates("blocks/read-invalid")
def test_requests_that_hit_blocks_of_a_load_that_was_never_ordered_are_named(watched, monkeypatch):
    driver = with_lost_load(watched, monkeypatch)
    driver.add("b", 120, 3, shares=("r", 112))
    driver.run()
    watched.violation_ids()

    assert {"b"} == set(messages(watched))
    assert " and 5 more: the connector metadata did not name the load of request r." in messages(watched)["b"]
    assert (16, 0, 8, 96, 96) == settled(watched, "b")


@violates("blocks/read-invalid")
def test_a_hit_in_the_step_of_the_promise_is_invalid_too(watched, monkeypatch):
    monkeypatch.setattr(ScriptedConnector, "build_connector_meta", lambda *_: PlannedLoads())
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 96)
    driver.add("r", 120, 3)
    driver.add("b", 120, 3, shares=("r", 96))
    driver.run()
    watched.violation_ids()

    assert {"b"} == set(messages(watched))
    assert (0, 0, 24, 96, 96) == settled(watched, "b")


@near_miss("blocks/read-invalid")
def test_hits_on_loaded_blocks_are_valid(watched):
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 96)
    driver.add("r", 120, 3)
    driver.run()
    driver.add("b", 120, 3, shares=("r", 112))
    driver.run()

    assert [] == watched.violation_ids()
    assert (112, 0, 8, 0, 0) == settled(watched, "b")


# --- hits on blocks that lose their KV later ---------------------------------------------------------


def with_shared_failure(watched: Watched, batch: int) -> Driver:
    """Requests r and b run and share 112 tokens that were loaded for r, when the load turns out failed.

    Then ``batch`` tokens fit into a step, so r computes the tokens again in one step or in several.
    """
    driver = watched.start(connector="scripted")
    driver.connector.answer_lookups("r", 112)
    driver.connector.answer_lookups("b", 0)
    driver.add("r", 120, 8)
    driver.add("b", 120, 8, shares=("r", 112))
    driver.schedule()
    for config in (driver.scheduler, driver.scheduler.scheduler_config):
        config.max_num_scheduled_tokens = config.max_num_batched_tokens = batch
    driver.scheduler.scheduler_config.long_prefill_token_threshold = batch // 2
    driver.output(invalid_blocks=driver.blocks("r")[2:7])
    driver.run()
    return driver


@violates("blocks/read-invalid")
def test_a_running_request_that_shares_a_failed_block_reads_it_before_it_is_computed_again(watched):
    """0.21 to 0.33: the other request goes on while the load's owner computes the tokens in chunks."""
    with_shared_failure(watched, 64)
    watched.violation_ids()

    assert {"b"} == set(messages(watched))
    assert "request b reads 48 tokens without valid KV, from position 64 up" in messages(watched)["b"]


@near_miss("blocks/read-invalid")
def test_a_running_request_that_shares_a_failed_block_may_read_what_the_step_computes(watched):
    with_shared_failure(watched, 8192)

    assert [] == watched.violation_ids()


@violates("blocks/read-invalid")
def test_a_request_that_hits_what_a_victim_computed_is_a_victim_too(watched):
    driver = with_failed_load(watched)
    driver.abort("r")
    for name in ("b", "c"):
        driver.add(name, 240, 3, shares=("r", 240))
        driver.run()
    watched.violation_ids()

    assert {"b", "c"} == set(messages(watched))
    assert "reads 128 tokens without valid KV, from position 64 up" in messages(watched)["b"]
    assert "reads 160 tokens without valid KV, from position 64 up" in messages(watched)["c"]


@violates("blocks/read-invalid")
def test_a_hit_counted_longer_than_its_blocks_reads_a_block_that_nothing_filled(watched):
    with planted(BY_NAME["hit-one-block-more"]):
        driver = watched.start()
        driver.add("a", 64, 3)
        driver.run()
        driver.add("b", 100, 2, shares=("a", 64))
        driver.run()
    watched.violation_ids()

    assert "request b reads 16 tokens without valid KV, from position 64 up" in messages(watched)["b"]


# --- blocks that are written over ------------------------------------------------------------------


def with_a_turn_that_gives_up(watched: Watched, monkeypatch: pytest.MonkeyPatch, **setup: Any) -> Driver:
    """A session of 48 tokens with KV, all cached, whose next turn begins at position 42."""
    driver = watched.start(asynchronous=False, **setup)
    driver.add("s", 40, 9, resumable=True)
    for _ in range(9):
        driver.step()
    session = driver.scheduler.requests["s"]
    driver.sequence = list(session.all_token_ids)
    begin = driver.scheduler._update_request_as_session

    def lower(session: Any, update: Any) -> None:
        session.num_computed_tokens -= 6
        begin(session, update)

    monkeypatch.setattr(driver.scheduler, "_update_request_as_session", lower)
    return driver


@violates("blocks/read-invalid")
def test_a_block_that_a_later_turn_writes_over_has_the_kv_of_other_tokens(watched, monkeypatch):
    driver = with_a_turn_that_gives_up(watched, monkeypatch)
    driver.add("s", 20, 3, resumable=True)
    driver.step()
    driver.add("next", [*driver.sequence[:48], 7], 2)
    driver.step()
    watched.violation_ids()

    assert {"next"} == set(messages(watched))
    assert "request next reads 6 tokens without valid KV, from position 42 up" in messages(watched)["next"]
    assert "a later turn of the session s wrote other tokens over" in messages(watched)["next"]


@violates("blocks/read-invalid")
@near_miss("blocks/read-invalid")
@pytest.mark.parametrize(
    ("outputs", "named"), [(5, {"next"}), (1, set())], ids=["it runs on", "it has ended"]
)
def test_who_hit_a_block_reads_other_tokens_once_a_later_turn_has_written_over_it(
    watched, monkeypatch, outputs, named
):
    driver = with_a_turn_that_gives_up(watched, monkeypatch)
    driver.add("next", [*driver.sequence[:48], 7], outputs)
    driver.step()
    driver.add("s", 20, 3, resumable=True)
    driver.step()
    watched.violation_ids()

    assert named == set(messages(watched))


@near_miss("blocks/read-invalid")
def test_a_later_turn_that_begins_behind_the_cached_blocks_writes_over_none(watched):
    driver = watched.start(asynchronous=False)
    driver.add("s", 40, 9, resumable=True)
    for _ in range(9):
        driver.step()
    sequence = list(driver.scheduler.requests["s"].all_token_ids)
    driver.add("s", 20, 3, resumable=True)
    driver.step()
    driver.add("next", [*sequence[:48], 7], 2)
    driver.step()

    assert [] == watched.violation_ids()


# --- blocks that are cached after their request has ended -------------------------------------------


def cached_after_the_end(tokens: int) -> dict[str | None, str]:
    """Request r ends with 40 computed tokens, and only then blocks for its first ``tokens`` are cached.

    Returns the sentence of each finding of ``blocks/read-invalid``, by request.
    """

    def drive(attach: Attach) -> Driver:
        driver = start(attach, max_batched_tokens=40, blocks=40)
        cache = manager(driver).cache_blocks
        manager(driver).cache_blocks = lambda request, _, **given: cache(request, tokens, **given)
        driver.add("r", 64, 3)
        driver.step()
        driver.abort("r")
        manager(driver).cache_blocks = cache
        driver.add("next", 80, 2, shares=("r", 64))
        driver.step()
        return driver

    events = each(observe(drive, "blocks")[1])
    end = next(place for place, event in enumerate(events) if isinstance(event, Finished))
    before = [event for event in events[:end] if not isinstance(event, BlocksCached)]
    cached = [event for event in events[:end] if isinstance(event, BlocksCached)]
    found = audited([*before, events[end], *cached, *events[end + 1 :]]).violations
    return {v.request: v.message for v in found if v.id == "blocks/read-invalid"}


@violates("blocks/read-invalid")
def test_a_block_that_is_cached_after_the_end_lacks_what_its_life_did_not_compute():
    found = cached_after_the_end(48)

    assert {"next"} == set(found)
    assert "request next reads 8 tokens without valid KV, from position 40 up" in found["next"]


@near_miss("blocks/read-invalid")
def test_a_block_that_is_cached_after_the_end_has_what_its_life_computed():
    assert {} == cached_after_the_end(32)


def cached_after_rejections(watched: Watched, outputs: int) -> None:
    """Request r has 40 + ``outputs`` tokens, all its drafts rejected. Its whole blocks are cached.

    The KV of the last token is not computed then, and never will be: the request ends.
    """
    driver = watched.start(drafts=3)
    driver.add("r", 40, 30)
    for _ in range(outputs):
        driver.step(accepted=0)
    request = driver.scheduler.requests["r"]
    driver.scheduler.kv_cache_manager.cache_blocks(request, request.num_tokens)
    driver.abort("r")
    driver.run()


@violates("blocks/hash-content")
def test_rejected_drafts_fill_no_block(watched):
    cached_after_rejections(watched, 8)

    finding = watched.finding("blocks/hash-content")

    assert "has no KV from position 47 on, because it did not compute them" in finding.message


@near_miss("blocks/hash-content")
def test_a_block_that_is_cached_at_its_last_token_has_all_though_drafts_were_rejected(watched):
    cached_after_rejections(watched, 9)

    assert [] == watched.violation_ids()


@near_miss("blocks/hash-content")
def test_a_block_of_a_request_that_is_preempted_in_its_own_step_leaves_the_cache_with_it(watched):
    """`low` is to fill its last block in the step in which `high` takes that block from it."""
    driver = watched.start(policy="priority", blocks=7)
    driver.add("low", 40, 20, priority=9)
    driver.step()
    driver.add("high", 42, 20, priority=0)
    while driver.scheduler.requests["low"].status.name == "RUNNING":
        driver.step()
    assert 48 == driver.scheduler.requests["low"].num_tokens
    driver.abort("high")
    driver.run()

    assert [] == watched.violation_ids()


@violates("blocks/hash-content")
def test_a_block_that_a_preempted_request_leaves_in_the_cache_is_found(watched):
    driver = watched.start()
    driver.add("r", 40, 30)
    driver.add("other", 20, 9)
    for _ in range(8):
        driver.step()
    request = driver.scheduler.requests["r"]
    driver.scheduler.kv_cache_manager.cache_blocks(request, request.num_tokens)
    driver.preempt("r")
    driver.run()

    finding = watched.finding("blocks/hash-content")

    assert "r" == finding.request
    assert "has no KV from position 47 on" in finding.message


# --- groups with windows ----------------------------------------------------------------------------


@violates("blocks/read-invalid")
@pytest.mark.parametrize("kind, early, tokens, start", [("sliding", 1, 1, 47), ("chunked", 16, 16, 64)])
def test_a_block_that_is_freed_before_the_window_has_left_it_is_named(
    watched, monkeypatch, kind, early, tokens, start
):
    driver = watched.start(groups=("full", kind), sliding_window=32, blocks=160)
    skipped = manager(driver, 1).get_num_skipped_tokens
    monkeypatch.setattr(
        manager(driver, 1), "get_num_skipped_tokens", lambda computed: skipped(computed + early)
    )
    driver.add("r", 70, 40)
    driver.run()

    finding = watched.finding("blocks/read-invalid")

    assert ("r", tokens, start) == (finding.request, finding.figures["tokens"], finding.figures["start"])
    assert "it was freed while the request's attention window still had these positions" in finding.message


@violates("blocks/read-invalid")
@pytest.mark.parametrize("kind, prompt, tokens, start", [("sliding", 63, 1, 31), ("chunked", 64, 32, 32)])
def test_the_last_token_after_a_load_of_the_whole_prompt_reads_below_its_table(
    watched, kind, prompt, tokens, start
):
    """0.18 to 0.33: the load skips what the token after the prompt does not read, and the last one does."""
    driver = watched.start(connector="scripted", groups=("full", kind), sliding_window=32, blocks=160)
    driver.connector.answer_lookups("r", (prompt, True))
    driver.add("r", prompt, 3)
    driver.run()

    finding = watched.finding("blocks/read-invalid")

    assert ("r", tokens, start) == (finding.request, finding.figures["tokens"], finding.figures["start"])
    assert "its block table has no block for them" in finding.message


@near_miss("blocks/read-invalid")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prompt", range(80, 97))
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_a_load_may_skip_what_no_token_reads(watched, kind, prompt, asynchronous):
    driver = watched.start(connector="scripted", groups=("full", kind), sliding_window=32, blocks=160)
    driver.connector.answer_lookups("r", (prompt - 1, asynchronous))
    driver.add("r", prompt, 3)
    driver.run()

    assert [] == watched.violation_ids()


@violates("blocks/read-invalid")
@pytest.mark.parametrize("scenario", ["sync", "loads_async"])
def test_a_step_after_a_failed_load_that_begins_below_the_table_is_named(watched, scenario):
    SCENARIOS[f"load_failure_in_a_window_{scenario}"](watched.attach)

    finding = watched.finding("blocks/read-invalid")

    assert ("r", 31, 97) == (finding.request, finding.figures["tokens"], finding.figures["start"])


def with_a_hit_beside_an_evicted_block(watched: Watched, evicted: int) -> Driver:
    """Of 64 cached tokens whose last 31 the next token reads, block ``evicted`` left the cache."""
    driver = watched.start(groups=("full", "sliding"), sliding_window=32, blocks=160)
    driver.add("a", 70, 2)
    driver.step()
    block = table(driver, "a", 1)[evicted].block_id
    driver.run()
    pool(driver).evict_blocks({block})
    driver.add("b", 90, 3, shares=("a", 64))
    return driver


@violates("blocks/read-invalid")
def test_a_hit_with_fewer_blocks_than_its_window_is_named(watched):
    with planted(BY_NAME["window-hit-too-short"]):
        with_a_hit_beside_an_evicted_block(watched, 2).run()

    finding = watched.finding("blocks/read-invalid")

    assert ("b", 15, 33) == (finding.request, finding.figures["tokens"], finding.figures["start"])


@near_miss("blocks/read-invalid")
@pytest.mark.parametrize("evicted", [1, 2])
def test_a_hit_needs_the_blocks_of_its_window_only(watched, evicted):
    driver = with_a_hit_beside_an_evicted_block(watched, evicted)
    driver.run()

    assert [] == watched.violation_ids()


@violates("blocks/read-invalid")
def test_a_window_that_moved_on_by_drafts_which_are_rejected_then_is_named(watched, monkeypatch):
    """vLLM frees blocks by the tokens that are delivered since 0.26, and counted drafts in flight before."""
    driver = watched.start(groups=HYBRID, drafts=3, sliding_window=32, blocks=160, asynchronous=True)
    coordinator = driver.scheduler.kv_cache_manager.coordinator
    remove = coordinator.remove_skipped_blocks

    def remove_by_all_tokens(request: str, processed: int, **more: Any) -> None:
        remove(request, driver.scheduler.requests[request].num_computed_tokens, **more)

    monkeypatch.setattr(coordinator, "remove_skipped_blocks", remove_by_all_tokens)
    driver.add("r", 70, 40)
    while driver.in_flight or driver.scheduler.has_requests():
        driver.step(accepted=0)

    finding = watched.finding("blocks/read-invalid")

    assert ("r", 3, 45) == (finding.request, finding.figures["tokens"], finding.figures["start"])


# --- states -----------------------------------------------------------------------------------------


def with_a_hit_of_states(watched: Watched) -> Driver:
    """Request b has the first 64 tokens of request a, which has ended."""
    driver = watched.start(groups=("full", "mamba"), blocks=128)
    driver.add("a", 64, 4)
    driver.run()
    driver.add("b", 90, 3, shares=("a", 64))
    return driver


@violates("blocks/read-invalid")
def test_a_hit_whose_state_is_not_cached_is_named(watched, monkeypatch):
    """0.24.0 takes the longest hit of any group if there is a connector, also where it brings no state."""
    driver = with_a_hit_of_states(watched)
    of_states = type(manager(driver, 1))
    found = of_states.find_longest_cache_hit.__func__

    def without_the_state(cls: Any, *arguments: Any, **named: Any) -> Any:
        hit = found(cls, *arguments, **named)
        for blocks in hit if isinstance(hit[0], list) else hit[0]:
            blocks[:] = [pool(driver).null_block] * len(blocks)
        return hit

    monkeypatch.setattr(of_states, "find_longest_cache_hit", classmethod(without_the_state))
    driver.run()

    finding = watched.finding("blocks/read-invalid")
    assert ("b", 64, 0) == (finding.request, finding.figures["tokens"], finding.figures["start"])
    assert "its block table has no block for them" in finding.message
    assert (0, 0, 26, 64, 64) == settled(watched, "b")


@near_miss("blocks/read-invalid")
@pytest.mark.parametrize("evicted", [False, True])
def test_a_hit_of_states_needs_one_checkpoint(watched, evicted):
    """If no state at the end of the prefix is cached, the engine computes the whole prompt."""
    driver = with_a_hit_of_states(watched)
    if evicted:
        every = {block.block_id for block in pool(driver).blocks if not block.is_null}
        pool(driver).evict_blocks(every)
    driver.run()

    assert [] == watched.violation_ids()
    assert (0 if evicted else 64) == settled(watched, "b")[0]


@violates("blocks/read-invalid")
def test_a_turn_that_begins_below_the_state_of_a_step_past_the_stop_is_named(watched):
    """The step in flight at the stop writes its state over the one from which the next turn goes on."""
    SCENARIOS["session_of_states_async"](watched.attach)

    finding = watched.finding("blocks/read-invalid")

    assert ("s", 1, 42) == (finding.request, finding.figures["tokens"], finding.figures["start"])
    assert "already has tokens at these positions" in finding.message


@near_miss("blocks/read-invalid")
def test_a_turn_that_begins_after_the_step_past_the_stop_is_valid(watched):
    """Before 0.31.0 the count of a session kept the token that was in flight when its turn stopped."""

    def attach(scheduler: Any) -> None:
        stop = scheduler._handle_stopped_request

        def stop_with_the_same_count(request: Any) -> bool:
            request.num_output_placeholders = 0
            return stop(request)

        scheduler._handle_stopped_request = stop_with_the_same_count
        watched.attach(scheduler)

    SCENARIOS["session_of_states_async"](attach)

    assert [] == watched.violation_ids()


def with_a_turn_from_a_boundary(attach: Attach) -> None:
    """The step past the stop writes its state to the next block, and the turn begins at the boundary."""
    driver = start(attach, groups=("full", "mamba"), blocks=128, asynchronous=True)
    driver.add("s", 46, 8, stop_at=3, resumable=True)
    driver.run()
    driver.add("s", 20, 4, resumable=True)
    driver.run()
    driver.close("s")
    driver.run()


@violates("blocks/read-invalid")
def test_the_v1_runner_goes_on_from_the_block_of_the_step_past_the_stop(watched):
    with_a_turn_from_a_boundary(watched.attach)

    finding = watched.finding("blocks/read-invalid")
    assert ("s", 1, 48) == (finding.request, finding.figures["tokens"], finding.figures["start"])


@near_miss("blocks/read-invalid")
def test_the_v2_runner_goes_on_from_the_state_at_the_end_of_the_block_before(watched):
    def attach(scheduler: Any) -> None:
        scheduler.use_v2_model_runner = True
        watched.attach(scheduler)

    with_a_turn_from_a_boundary(attach)

    assert [] == watched.violation_ids()


@violates("blocks/read-invalid")
def test_a_turn_that_begins_below_the_state_of_a_step_with_drafts_is_named(watched):
    driver = watched.start(groups=("full", "mamba"), blocks=128, drafts=3, asynchronous=True)
    driver.add("s", 40, 8, stop_at=2, resumable=True)
    for _ in range(12):
        if driver.scheduler.running or driver.scheduler.waiting:
            driver.step(accepted=1)
    driver.add("s", 20, 4, resumable=True)
    driver.run()

    finding = watched.finding("blocks/read-invalid")
    assert ("s", 41) == (finding.request, finding.figures["start"])


@near_miss("blocks/read-invalid")
def test_rejected_drafts_leave_the_state_of_the_last_accepted_one(watched):
    driver = watched.start(groups=("full", "mamba"), blocks=128, drafts=3)
    driver.add("r", 40, 30)
    while driver.in_flight or driver.scheduler.has_requests():
        driver.step(accepted=1)

    assert [] == watched.violation_ids()
