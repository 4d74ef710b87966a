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
    M("fix-32255", KIND, "blocks of an aborted asynchronous load are freed while the load writes",
      "Scheduler.finish_requests", "request.request_id not in self.finished_recving_kv_req_ids", "False",
      link=f"{PULL}32255"),
    M("fix-36752", KIND, "the figures of an admission after a preemption replace the first ones",
      SCHEDULE, "if request.prefill_stats and request.num_preemptions <= 0:", "if request.prefill_stats:",
      link=f"{PULL}36752"),
    M("fix-44409", KIND, "one group's external blocks are allocated before another group's hits are touched",
      "KVCacheCoordinator.allocate_new_computed_blocks",
      "        )\n    if num_external_computed_tokens > 0:\n"
      "        for i, manager in enumerate(self.single_type_managers):\n",
      "        )\n        if num_external_computed_tokens > 0:\n", link=f"{PULL}44409"),
    M("fix-44560", KIND, "asynchronous loads take blocks that other loads and prefills still need",
      SCHEDULE, "reserved_blocks=reserved_blocks", "reserved_blocks=0", link=f"{PULL}44560"),
    M("fix-45357", KIND, "blocks that a step in flight writes are freed at once",
      "Scheduler._request_blocks_can_be_freed", "return not self.defer_block_free or (",
      "return True or (", link=f"{PULL}45357"),
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
    M("fix-57104", KIND, "an asynchronous load leaves no room for the drafts of its first step",
      SCHEDULE, "+ self._spec_decode_step_blocks", "+ 0", link=f"{PULL}57104"),
)  # fmt: skip
