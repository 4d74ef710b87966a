"""Merged fixes of vLLM, reverted in a release that has them.

Each replacement is ours; the link names the change that it undoes.
"""

from __future__ import annotations

from .mutant import Mutant

M = Mutant
KIND = "reverted fix"
PULL = "https://github.com/vllm-project/vllm/pull/"
SCHEDULE = "Scheduler.schedule"
OUTPUT = "Scheduler.update_from_output"
PREEMPT = "Scheduler._preempt_request"

MUTANTS = (
    M("fix-21357", KIND, "evicting one of several blocks with one hash drops the others from the cache map",
      "BlockHashToBlockMap.pop", "if len(blocks) > 0:", "if len(blocks) == 0:", link=f"{PULL}21357"),
    M("fix-26813", KIND, "failed blocks stay cached, also under the policy to fail",
      "Scheduler._handle_invalid_blocks", "self.kv_cache_manager.evict_blocks(sync_blocks_to_evict)", "pass",
      link=f"{PULL}26813"),
    M("fix-27756", KIND, "the workers get no tokens of a request that the step before left out",
      "Scheduler._make_cached_request_data", "if req_id not in self.prev_step_scheduled_req_ids:",
      "if idx >= num_running_reqs:",
      link=f"{PULL}27756", why="no event has the tokens that workers get"),
    M("fix-28558", KIND, "a request that a more urgent one preempts keeps its drafts in the step",
      SCHEDULE, "scheduled_spec_decode_tokens.pop(preempted_req_id, None)", "pass", link=f"{PULL}28558"),
    M("fix-29387", KIND, "a state that another request of the same step computes is hit",
      "MambaManager.get_num_blocks_to_allocate", "in self.cached_blocks_this_step", "in ()",
      link=f"{PULL}29387"),
    M("fix-32255", KIND, "blocks of an aborted asynchronous load are freed while the load writes",
      "Scheduler.finish_requests", "request.request_id not in self.finished_recving_kv_req_ids", "False",
      link=f"{PULL}32255"),
    M("fix-36752", KIND, "the figures of an admission after a preemption replace the first ones",
      SCHEDULE, "if request.prefill_stats and request.num_preemptions <= 0:", "if request.prefill_stats:",
      link=f"{PULL}36752"),
    M("fix-39450", KIND, "a hit of a window whose last block a drafter drops need not be aligned",
      "SlidingWindowManager.find_longest_cache_hit", "i if drop_eagle_block else i + 1", "i + 1",
      link=f"{PULL}39450"),
    M("fix-40946", KIND, "an admission needs as many blocks of a window as the whole prompt has",
      "SingleTypeKVCacheManager.get_num_blocks_to_allocate", "if apply_admission_cap and", "if False and",
      link=f"{PULL}40946"),
    M("fix-44409", KIND, "one group's external blocks are allocated before another group's hits are touched",
      "KVCacheCoordinator.allocate_new_computed_blocks",
      "        )\n    if num_external_computed_tokens > 0:\n"
      "        for i, manager in enumerate(self.single_type_managers):\n",
      "        )\n        if num_external_computed_tokens > 0:\n", link=f"{PULL}44409"),
    M("fix-44560", KIND, "asynchronous loads take blocks that other loads and prefills still need",
      SCHEDULE, "reserved_blocks=reserved_blocks", "reserved_blocks=0", link=f"{PULL}44560",
      why="an order of allocation; requests are preempted more often, and every figure is right"),
    M("fix-45357", KIND, "blocks that a step in flight writes are freed at once",
      "Scheduler._request_blocks_can_be_freed", "return not self.defer_block_free or (",
      "return True or (", link=f"{PULL}45357",
      why="a race on the device between a step in flight and a load; the events have no order of the two"),
    M("fix-46066", KIND, "output in flight at a reset counts against the placeholders of the next life",
      OUTPUT, "request, new_token_ids, is_stale=output_is_stale", "request, new_token_ids",
      link=f"{PULL}46066"),
    M("fix-47728", KIND, "blocks leave the window of a step that is in flight",
      "KVCacheManager.allocate_slots", "max(0, total_computed_tokens - request.num_in_flight_tokens)",
      "total_computed_tokens", link=f"{PULL}47728"),
    M("fix-48245", KIND, "output in flight at a preemption is no longer marked as stale",
      PREEMPT, "request.num_stale_output_tokens = request.num_in_flight_tokens", "pass", link=f"{PULL}48245"),
    M("fix-48245-rejections", KIND, "drafts of a step before a preemption are subtracted after it",
      OUTPUT, "if not output_is_stale:", "if True:", link=f"{PULL}48245"),
    M("fix-49675", KIND, "requests whose blocks can't be freed yet are preempted",
      SCHEDULE, "if not self._request_blocks_can_be_freed(preempted_req):", "if False:",
      link=f"{PULL}49675"),
    M("fix-50344", KIND, "a connector that can't fill them gets hits of groups that end at other positions",
      "Scheduler._get_local_prefix_cache_hit",
      "connector is not None and connector.supports_divergent_local_hybrid_hits", "connector is not None",
      link=f"{PULL}50344"),
    M("fix-50388", KIND, "failed blocks of a model with several groups end the engine",
      "Scheduler._handle_invalid_blocks", "len(self.kv_cache_config.kv_cache_groups) > 1", "False",
      link=f"{PULL}50388"),
    M("fix-57104", KIND, "an asynchronous load leaves no room for the drafts of its first step",
      SCHEDULE, "+ self._spec_decode_step_blocks", "+ 0", link=f"{PULL}57104"),
)  # fmt: skip
