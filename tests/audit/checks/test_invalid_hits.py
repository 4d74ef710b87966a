"""Reads of cached blocks without valid KV: who is named, and how their prompts are settled."""

from __future__ import annotations

from typing import Any

import pytest
from tests.audit.checks.watched import Watched, manager, pool, table
from tests.scenarios.corpus import SCENARIOS
from tests.scenarios.driving import Driver
from tests.scenarios.registry import HYBRID
from tests.scenarios.scripted_connector import ScriptedConnector, ScriptedMetadata

from kvledger.audit.ledger.statements import Settlement

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


@violates("blocks/read-invalid")
def test_invalid_hits_are_settled_as_unattained(watched):
    driver = with_failed_load(watched)
    driver.abort("r")
    driver.add("b", 200, 3, shares=("r", 160))
    driver.run()
    watched.violation_ids()

    assert (64, 0, 40, 96, 96) == settled(watched, "b")


@violates("blocks/read-invalid")
def test_a_request_that_hits_its_own_failed_blocks_is_named(watched):
    driver = with_failed_load(watched)
    driver.preempt("r")
    driver.run()
    watched.violation_ids()

    assert 128 == settled(watched, "r")[-1]  # the tokens computed above the failed load are not valid either


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
    monkeypatch.setattr(ScriptedConnector, "build_connector_meta", lambda *_: ScriptedMetadata())
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
    monkeypatch.setattr(ScriptedConnector, "build_connector_meta", lambda *_: ScriptedMetadata())
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
def test_a_hit_counted_longer_than_its_blocks_reads_a_block_that_nothing_filled(watched, monkeypatch):
    driver = watched.start()
    driver.add("a", 64, 3)
    driver.run()
    coordinator = driver.scheduler.kv_cache_manager.coordinator
    find = coordinator.find_longest_cache_hit

    def longer(*args: object, **kwargs: object) -> object:
        blocks, tokens, *rest = find(*args, **kwargs)
        return (blocks, tokens + 16 if tokens else 0, *rest)

    monkeypatch.setattr(coordinator, "find_longest_cache_hit", longer)
    driver.add("b", 100, 2, shares=("a", 64))
    driver.run()
    watched.violation_ids()

    assert "request b reads 16 tokens without valid KV, from position 64 up" in messages(watched)["b"]


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
def test_a_hit_with_fewer_blocks_than_its_window_is_named(watched, monkeypatch):
    driver = with_a_hit_beside_an_evicted_block(watched, 2)
    needed = "_contiguous_blocks_for_hit"
    monkeypatch.setattr(type(manager(driver, 1)), needed, classmethod(lambda *_, **__: 1))
    driver.run()

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


@near_miss("blocks/read-invalid")
@pytest.mark.parametrize(
    "scenario",
    ["drafts_rejected_at_the_window_async", "window_leaves_blocks_two_groups", "chunks_leave_blocks"],
)
def test_blocks_that_the_window_has_left_are_freed(watched, scenario):
    SCENARIOS[scenario](watched.attach)

    assert [] == watched.violation_ids()


# --- states -----------------------------------------------------------------------------------------


@violates("blocks/read-invalid")
def test_a_turn_that_begins_below_the_state_of_a_step_past_the_stop_is_named(watched):
    """The step in flight at the stop writes its state over the one from which the next turn goes on."""
    SCENARIOS["session_of_states_async"](watched.attach)

    finding = watched.finding("blocks/read-invalid")

    assert ("s", 1, 42) == (finding.request, finding.figures["tokens"], finding.figures["start"])
    assert "already has tokens at these positions" in finding.message


@near_miss("blocks/read-invalid")
def test_a_turn_that_begins_where_the_last_state_ends_is_valid(watched):
    SCENARIOS["session_of_states_sync"](watched.attach)

    assert [] == watched.violation_ids()


@near_miss("blocks/read-invalid")
def test_a_state_at_the_end_of_a_block_outlives_the_steps_after_it(watched):
    """The step past the stop writes its state to the next block, and the turn begins at the boundary."""
    driver = watched.start(groups=("full", "mamba"), blocks=128, asynchronous=True)
    driver.add("s", 46, 8, stop_at=3, resumable=True)
    driver.run()
    driver.add("s", 20, 4, resumable=True)
    driver.run()
    driver.close("s")
    driver.run()

    assert [] == watched.violation_ids()


@near_miss("blocks/read-invalid")
def test_rejected_drafts_leave_the_state_of_the_last_accepted_one(watched):
    driver = watched.start(groups=("full", "mamba"), blocks=128, drafts=3)
    driver.add("r", 40, 30)
    while driver.in_flight or driver.scheduler.has_requests():
        driver.step(accepted=1)

    assert [] == watched.violation_ids()
