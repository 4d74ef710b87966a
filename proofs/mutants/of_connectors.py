"""Mutants of what the scheduler does with a KV connector: promises, loads, failures and what it is told."""

from __future__ import annotations

from .mutant import Mutant

M = Mutant
SCHEDULE = "Scheduler.schedule"
REMOTE = "Scheduler._update_waiting_for_remote_kv"
INVALID = "Scheduler._update_requests_with_invalid_blocks"
BLOCKS = "Scheduler._handle_invalid_blocks"
TRANSFERS = "Scheduler._update_from_kv_xfer_finished"

MUTANTS = (
    M("external-one-block-more", "double count", "one block more than the connector has counts as external",
      SCHEDULE, "num_external_computed_tokens = ext_tokens",
      "num_external_computed_tokens = ext_tokens + 16 * (0 < ext_tokens < request.num_tokens - 17"
      " - num_new_local_computed_tokens)", place=2),
    M("external-one-block-less", "off by one", "one block less than the connector has counts as external",
      SCHEDULE, "num_external_computed_tokens = ext_tokens",
      "num_external_computed_tokens = max(ext_tokens - 16, min(16, ext_tokens))", place=2),
    M("external-counts-as-local", "double count", "external tokens are reported as local too",
      SCHEDULE, "num_local_cached_tokens=num_new_local_computed_tokens",
      "num_local_cached_tokens=num_computed_tokens"),
    M("external-hits-doubled", "double count", "external lookups count the local hit as queried",
      SCHEDULE, "request.num_tokens - num_new_local_computed_tokens", "request.num_tokens"),
    M("connector-not-asked-again", "connector", "the connector is offered no local hit",
      SCHEDULE, "request, block_aligned_local", "request, 0"),
    M("connector-told-nothing", "connector", "the connector is told that it loads nothing",
      SCHEDULE, "num_external_computed_tokens,\n", "0,\n", place=4),
    M("load-cached-at-once", "failed loads", "blocks that are still being loaded are cached",
      SCHEDULE, "delay_cache_blocks=load_kv_async", "delay_cache_blocks=False"),
    M("load-never-awaited", "failed loads", "a request runs before its load has finished",
      "Scheduler._handle_blocked_waiting_request", "if request_id not in self.finished_recving_kv_req_ids:",
      "if self.finished_recving_kv_req_ids.add(request_id):"),
    M("load-never-cached", "failed loads", "loaded blocks are not cached",
      REMOTE, "self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)", "pass", place=2,
      why="the blocks are cached with the next step, in which nobody has asked for them"),
    M("load-of-a-whole-prompt", "off by one", "a prompt that was loaded whole computes no last token",
      REMOTE, "request.num_computed_tokens = request.num_tokens - 1", "pass"),
    M("load-failure-ignored", "failed loads", "a failed asynchronous load counts as loaded",
      REMOTE, "if load_failed:",
      "if load_failed and self.failed_recving_kv_req_ids.discard(request.request_id):"),
    M("load-failure-leaks", "leak", "blocks of a load that failed whole are forgotten",
      REMOTE, "self.kv_cache_manager.free(request)", "self.kv_cache_manager.pop_blocks_for_free(request)"),
    M("load-failure-keeps-blocks", "failed loads", "blocks of a load that failed whole are kept",
      REMOTE, "self.kv_cache_manager.free(request)", "pass"),
    M("failed-block-kept", "off by one", "the first block that failed to load counts as loaded",
      INVALID, "request.num_computed_tokens = idx * self.block_size",
      "request.num_computed_tokens = (idx + 1) * self.block_size"),
    M("failed-block-before-dropped", "off by one", "the block before the first that failed is computed again",
      INVALID, "request.num_computed_tokens = idx * self.block_size",
      "request.num_computed_tokens = max(0, idx - 1) * self.block_size",
      why="one valid block more is computed again, which no figure forbids"),
    M("last-failed-block-counts", "failed loads", "the last failed block decides, not the first",
      INVALID, "if marked_invalid_block:", "if False:"),
    M("failed-owner-unmarked", "shared blocks", "each request that shares a failed block computes it again",
      INVALID, "marked_invalid_block_ids.add(block_id)", "pass",
      why="shared blocks are computed twice, which no figure forbids"),
    M("failed-output-kept", "failed loads", "the output above a failed load is delivered",
      BLOCKS, "return sync_failed_req_ids", "return set()"),
    M("failed-async-forgotten", "failed loads", "a failed asynchronous load is not marked",
      BLOCKS, "self.failed_recving_kv_req_ids |= async_failed_req_ids", "pass"),
    M("failed-whole-not-reset", "failed loads", "a load that failed whole keeps its computed count",
      "Scheduler._handle_failed_recving", "request.num_computed_tokens = 0", "pass"),
    M("failed-request-goes-on", "failed loads", "the policy to fail ends no request",
      "Scheduler.update_from_output", "if failed_kv_load_req_ids and not self.recompute_kv_load_failures:",
      "if False:"),
    M("sent-leaks", "leak", "blocks are forgotten when the connector has sent them",
      TRANSFERS, "self._free_blocks(self.requests[req_id])", "del self.requests[req_id]", place=2),
    M("sent-never-freed", "leak", "blocks that the connector has sent are never freed",
      TRANSFERS, "self._free_blocks(self.requests[req_id])", "pass", place=2),
    M("received-after-abort-leaks", "leak", "blocks of a load that ends after the abort are never freed",
      TRANSFERS, "self._free_blocks(self.requests[req_id])", "pass", place=1),
    M("handed-over-too-much", "connector", "the connector is handed blocks beyond the computed tokens",
      "Scheduler._connector_finished", "num_computed_tokens=request.num_computed_tokens,",
      "num_computed_tokens=request.num_tokens + 32,"),
    M("handed-over-too-little", "connector", "the connector is handed one block less than is computed",
      "Scheduler._connector_finished", "num_computed_tokens=request.num_computed_tokens,",
      "num_computed_tokens=max(0, request.num_computed_tokens - 16),"),
)  # fmt: skip
