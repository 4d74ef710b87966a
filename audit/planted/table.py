"""The table of planted faults.

Faults of released engines that the demo puts back, wrong bytes in the KV cache, small mistakes in the
scheduler, the block pool and the KV cache managers, and merged fixes that are reverted. The replaced code is
the engine's; each replacement is ours. ``finds`` has the invariants that find a fault at the lowest level at
which it is found: `make proof NAME=mutants` fails where none of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .fault import Change, PlantedFault, Wrap

# --- Planted faults that write wrong KV into the cache of vLLM 0.32, as faults of engines and connectors
# do.
#
# One function for each: it wraps methods of vLLM's classes. The engine's counts stay right: only the bytes
# are wrong. The worker runs in the scheduler's process. Each fault changes as little as shows it.


def _caches(config: Any) -> list[Any]:
    """The KV cache of each layer; the first axis counts the blocks."""
    context = config.compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values() if getattr(layer, "kv_cache", None) is not None]


def _loaded(metadata: Any, block_size: int) -> list[int]:
    """The blocks that the metadata of ExampleConnector orders to be loaded."""
    slots = [
        slot
        for request in metadata.requests
        if not request.is_store
        for slot in request.slot_mapping.flatten().tolist()
    ]
    return list(dict.fromkeys(slot // block_size for slot in slots))


def _hits(scheduler: Any, output: Any) -> Iterator[list[int]]:
    """The blocks that each new request of a step hits in the local cache and that no load fills."""
    size = scheduler.block_size
    loaded = _loaded(output.kv_connector_metadata, size)
    for request in output.scheduled_new_reqs:
        blocks = request.block_ids[0][: request.num_computed_tokens // size]
        yield [block for block in blocks if block not in loaded]


def _before_a_hit(wrap: Wrap, change: Callable[[list[Any], list[int], Any], bool]) -> None:
    """Call ``change`` with the caches and the hit blocks before each step, until it has changed something."""
    from vllm.v1.core.sched.scheduler import Scheduler

    done: list[bool] = []

    def make(original: Any) -> Any:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            for blocks in [] if done else _hits(self, output):
                if blocks and not done and change(_caches(self.vllm_config), blocks, self):
                    done.append(True)
            return output

        return schedule

    wrap(Scheduler, "schedule", make)


def bit_flip(wrap: Wrap) -> None:
    """One bit of one cached block flips before a request hits it."""
    import torch

    def change(caches: list[Any], blocks: list[int], _: Any) -> bool:
        block = caches[-1][blocks[0]].view(torch.int32)
        block.view(-1)[7] ^= 1 << 20
        return True

    _before_a_hit(wrap, change)


def late_write(wrap: Wrap) -> None:
    """A request that has ended writes KV once more into a block that it freed and that is cached."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    freed: set[int] = set()

    def make(original: Any) -> Any:
        def free(self: Any, request: Any) -> None:
            freed.update(self.get_block_ids(request.request_id)[0])
            original(self, request)

        return free

    def change(caches: list[Any], blocks: list[int], _: Any) -> bool:
        late = [block for block in blocks if block in freed]
        for cache in caches if late else ():
            cache[late[0]][..., -1, :] = cache[late[0]][..., 0, :]
        return bool(late)

    wrap(KVCacheManager, "free", make)
    _before_a_hit(wrap, change)


def swapped_blocks(wrap: Wrap) -> None:
    """Two cached blocks of one prefix exchange their contents."""

    def change(caches: list[Any], blocks: list[int], _: Any) -> bool:
        if len(blocks) < 2:
            return False
        for cache in caches:
            cache[blocks[:2]] = cache[blocks[1::-1]]
        return True

    _before_a_hit(wrap, change)


def _around_loads(wrap: Wrap, make_load: Callable[[list[Any], list[int], Callable[[], None]], None]) -> None:
    """Replace each load of ExampleConnector by ``make_load`` of caches, blocks and the load itself."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    def make(original: Any) -> Any:
        def start_load_kv(self: Any, forward_context: Any, **kwargs: Any) -> None:
            blocks = _loaded(self._get_connector_metadata(), self._block_size)
            caches = _caches(self._vllm_config)
            make_load(caches, blocks, lambda: original(self, forward_context, **kwargs))

        return start_load_kv

    wrap(ExampleConnector, "start_load_kv", make)


def wrong_half(wrap: Wrap) -> None:
    """A loader exchanges keys and values, which lie one behind the other in the last axis."""

    def load(caches: list[Any], blocks: list[int], original: Callable[[], None]) -> None:
        original()
        for cache in caches if blocks else ():
            half = cache.shape[-1] // 2
            cache[blocks] = cache[blocks].roll(half, dims=-1)

    _around_loads(wrap, load)


def truncated_load(wrap: Wrap) -> None:
    """A load ends before the last layer, whose blocks keep what they held."""

    def load(caches: list[Any], blocks: list[int], original: Callable[[], None]) -> None:
        before = caches[-1][blocks].clone()
        original()
        if blocks:
            caches[-1][blocks] = before

    _around_loads(wrap, load)


def stale_store(wrap: Wrap) -> None:
    """The store returns an older object for the last block of each load: that of the first load."""
    first: list[Any] = []

    def load(caches: list[Any], blocks: list[int], original: Callable[[], None]) -> None:
        original()
        if not blocks:
            return
        if not first:
            first.extend(cache[blocks[-1]].clone() for cache in caches)
        for cache, old in zip(caches, first, strict=True):
            cache[blocks[-1]] = old

    _around_loads(wrap, load)


def wrong_compute(wrap: Wrap) -> None:
    """The second computation of a prompt writes the tokens of one block's keys one position too far.

    The block is sealed after that, so each later comparison of the block with its seal is right.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    done: list[bool] = []

    def make(original: Any) -> Any:
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, scheduler_output, *args, **kwargs)
            size = self.cache_config.block_size
            for request_id, request in self.requests.items():
                computed = request.num_computed_tokens + scheduler_output.num_scheduled_tokens.get(
                    request_id, 0
                )
                if request_id.startswith("twice") and computed >= 2 * size and not done:
                    done.append(True)
                    for cache in _caches(self.vllm_config):
                        keys = cache[request.block_ids[0][1]][..., : cache.shape[-1] // 2]
                        keys.copy_(keys.roll(1, dims=-2))
            return result

        return execute_model

    wrap(GPUModelRunner, "execute_model", make)


PULL = "https://github.com/vllm-project/vllm/pull/"
ISSUE = "https://github.com/vllm-project/vllm/issues/"
LMCACHE = "https://github.com/LMCache/LMCache/issues/"

PREEMPT = "Scheduler._preempt_request"
OUTPUT = "Scheduler.update_from_output"
SCHEDULE = "Scheduler.schedule"
FINISH = "Scheduler.finish_requests"
END = "Scheduler._free_request"
STOPPED = "Scheduler._handle_stopped_request"
REMOTE = "Scheduler._update_waiting_for_remote_kv"
INVALID = "Scheduler._update_requests_with_invalid_blocks"
FAILED = "Scheduler._handle_invalid_blocks"
TRANSFERS = "Scheduler._update_from_kv_xfer_finished"
TOUCH = "BlockPool.touch"
FREE = "BlockPool.free_blocks"
NEW = "BlockPool.get_new_blocks"
SLOTS = "KVCacheManager.allocate_slots"
LOCAL = "SingleTypeKVCacheManager.add_local_computed_blocks"
NEEDED = "SingleTypeKVCacheManager.get_num_blocks_to_allocate"
COMPUTED = "KVCacheCoordinator.allocate_new_computed_blocks"

RELEASED = "released fault"
CONTENT = "wrong bytes"
FIX = "reverted fix"


def _fault(name: str, kind: str, says: str, *code: Change, finds: str = "", **more: Any) -> PlantedFault:
    return PlantedFault(name=name, kind=kind, says=says, code=code, finds=tuple(finds.split()), **more)


def _mistake(
    name: str, kind: str, says: str, where: str, old: str, new: str, place: int = 0, **more: Any
) -> PlantedFault:
    """A fault that changes one place."""
    return _fault(name, kind, says, Change(where, old, new, place), **more)


def _fix(number: str, says: str, where: str, old: str, new: str, **more: Any) -> PlantedFault:
    """A merged fix that is reverted; the number is that of its pull request."""
    link = PULL + number.partition("-")[0]
    return _mistake(f"fix-{number}", FIX, says, where, old, new, link=link, **more)


F, M = _fault, _mistake

_FIRST_FIGURES = "if request.prefill_stats and request.num_preemptions <= 0:"


def _external_alone(local: str) -> Change:
    """A readmission during prefill updates the external figure and keeps the old total.

    Up to 0.19.1 `num_cached_tokens` was set once and `num_external_computed_tokens` at every lookup; the
    front end reported the difference as the local hit. ``local`` is what it made of the difference.
    """
    return Change(
        SCHEDULE,
        _FIRST_FIGURES,
        "if request.prefill_stats and request.num_preemptions > 0:\n"
        "    figures, external = request.prefill_stats, num_external_computed_tokens\n"
        "    figures.num_external_cached_tokens = external\n"
        f"    figures.num_local_cached_tokens = {local}\n"
        "elif request.prefill_stats:",
    )


PLANTED: tuple[PlantedFault, ...] = (
    # --- faults of released engines
    F("negative-local-hit", RELEASED, "a request preempted during prefill reports a negative local hit",
      _external_alone("figures.num_cached_tokens - external"),
      finds="tokens/negative", link=f"{PULL}36752", known="negative-local-hit"),
    F("clamped-local-hit", RELEASED,
      "the same, clamped to zero as in 0.19.1: the sources no longer add up to the prompt",
      _external_alone("max(0, figures.num_cached_tokens - external)"),
      finds="tokens/source-sum", link=f"{PULL}36752", known="negative-local-hit"),
    M("promise-not-loaded", RELEASED,
      "external tokens of a resumed request are promised and counted, but never loaded",
      "ExampleConnector.build_connector_meta",
      "resumed_from_preemption = req_id in cached_reqs.resumed_req_ids",
      "resumed_from_preemption = req_id in cached_reqs.resumed_req_ids\n"
      "if resumed_from_preemption:\n"
      "    self._requests_need_load.pop(req_id, None)",
      finds="connector/promise-not-loaded", link=f"{LMCACHE}1969", known="promise-not-loaded"),
    F("lookup-counted", RELEASED,
      "the prefix cache counts a lookup at every failed admission, as up to 0.26",
      Change(SCHEDULE, ") = self._get_local_prefix_cache_hit(request)",
             ") = self._get_local_prefix_cache_hit(request)\n"
             "self.kv_cache_manager.record_prefix_cache_stats(request, num_new_local_computed_tokens)"),
      Change(SCHEDULE, "if did_prefix_cache_lookup:", "if False:", place=2),
      finds="tokens/lookup-counted-once", link=f"{ISSUE}43736", known="lookup-attempt-counted"),
    F("stale-lookup", RELEASED,
      "an admission uses the stale cache hit of an earlier, failed attempt, as in v0",
      Change(SCHEDULE, "self._get_local_prefix_cache_hit(request)",
             "vars(request).setdefault('earlier_hit', None) or vars(request).update("
             "earlier_hit=self._get_local_prefix_cache_hit(request)) or request.earlier_hit"),
      Change(SCHEDULE, "if did_prefix_cache_lookup:",
             "request.earlier_hit = None\nif did_prefix_cache_lookup:", place=2),
      finds="tokens/stale-lookup", link=f"{PULL}18957", known="stale-lookup"),
    F("double-allocation", RELEASED,
      "blocks for external tokens are allocated before the local hits are held, and may be the same",
      # Upstream (up to 0.23) this needed two cache groups: one allocated the blocks that the other had hit.
      # Here one group does both in the wrong order, and a block can stand twice in a request's table.
      Change(LOCAL, "self.block_pool.touch(new_computed_blocks)",
             "self.untouched_hits = new_computed_blocks"),
      Change(SLOTS, "new_blocks = self.coordinator.allocate_new_blocks(",
             "for manager in self.coordinator.single_type_managers:\n"
             "    self.block_pool.touch(vars(manager).pop('untouched_hits', ()))\n"
             "new_blocks = self.coordinator.allocate_new_blocks("),
      finds="blocks/double-allocation", link=f"{PULL}44409", known="double-allocation"),
    M("double-free", RELEASED,
      "a preempted request frees its first block twice; vLLM 0.32 asserts at the next allocation",
      PREEMPT, "self._free_request_blocks(request)",
      "for manager in self.kv_cache_manager.coordinator.single_type_managers:\n"
      "    manager.block_pool.free_blocks(manager.req_to_blocks[request.request_id][:1])\n"
      "self._free_request_blocks(request)", finds="blocks/double-free", link=f"{ISSUE}42571"),
    F("negative-match", RELEASED,
      "no patch: ExampleConnector in 0.32 answers with a negative match for a local hit past the prompt",
      finds="connector/negative-match", link=f"{LMCACHE}2158"),
    M("cached-tokens-counted-again", RELEASED,
      "a retracted request's next cache hit is counted again, as before SGLang 0.5.6",
      "Req.reset_for_retract", "self.retracted_stain = True", "self.retracted_stain = False",
      finds="tokens/negative tokens/set-once", release="sglang 0.5.23",
      link="https://github.com/sgl-project/sglang/issues/11900",
      known="cached-tokens-counted-at-each-resumption"),
    # --- wrong bytes in the KV cache; every count stays right
    F("bit-flip", CONTENT, "one bit of a cached block flips before a request hits the block",
      write=bit_flip, finds="content/changed", link=f"{ISSUE}56104"),
    F("late-write", CONTENT, "a request that has ended writes into a cached block that it had freed",
      write=late_write, finds="content/changed", link=f"{ISSUE}56104"),
    F("swapped-blocks", CONTENT, "two cached blocks of one prefix exchange their contents",
      write=swapped_blocks, finds="content/changed", link=f"{ISSUE}45357"),
    F("wrong-half", CONTENT, "a connector exchanges keys and values when it loads",
      write=wrong_half, finds="content/transfer", link=f"{LMCACHE}4463"),
    F("truncated-load", CONTENT, "a connector's loads end before the last layer",
      write=truncated_load, finds="content/transfer", link=f"{ISSUE}57661"),
    F("stale-store", CONTENT, "a connector's store returns an older object for the last block of each load",
      write=stale_store, finds="content/transfer", link=f"{ISSUE}46951"),
    F("wrong-compute", CONTENT,
      "a prompt is computed twice, and the second time one block's keys are written at another position",
      write=wrong_compute, finds="content/recomputed", link=f"{ISSUE}39146"),
    # --- preemption
    M("preempt-leaks", "leak", "a preempted request's blocks are forgotten, not freed",
      PREEMPT, "self._free_request_blocks(request)", "self.kv_cache_manager.pop_blocks_for_free(request)",
      finds="requests/standstill"),
    M("preempt-keeps-blocks", "preemption", "a preempted request keeps its blocks",
      PREEMPT, "self._free_request_blocks(request)", "pass", finds="tokens/reset-on-preemption"),
    M("preempt-keeps-computed", "preemption", "a preempted request keeps its computed count",
      PREEMPT, "request.num_computed_tokens = 0", "pass", finds="tokens/reset-on-preemption"),
    M("preempt-keeps-one-block", "off by one", "a preempted request keeps the count of one block",
      PREEMPT, "request.num_computed_tokens = 0",
      "request.num_computed_tokens = min(16, request.num_computed_tokens)",
      finds="tokens/reset-on-preemption"),
    M("preempt-keeps-placeholders", "preemption", "a preempted request keeps its output placeholders",
      PREEMPT, "request.num_output_placeholders = 0", "pass", finds="tokens/in-flight"),
    M("preempt-keeps-drafts", "drafts", "a preempted request keeps its drafts",
      PREEMPT, "request.spec_token_ids = []", "pass"),
    M("preempt-forgets-in-flight", "preemption", "output in flight at a preemption counts as current",
      PREEMPT, "request.num_stale_output_tokens = request.num_in_flight_tokens",
      "request.num_stale_output_tokens = 0", finds="tokens/sampled-twice"),
    M("preempt-stale-doubled", "double count", "output in flight at a preemption is added to what was stale",
      PREEMPT, "request.num_stale_output_tokens = request", "request.num_stale_output_tokens += request"),
    M("preempt-lost", "starvation", "a preempted request is in no queue",
      PREEMPT, "self.waiting.prepend_request(request)", "pass", finds="requests/queued-once"),
    M("preempt-queued-twice", "double count", "a preempted request is in the queue twice",
      PREEMPT, "self.waiting.prepend_request(request)",
      "self.waiting.prepend_request(request); self.waiting.prepend_request(request)",
      finds="requests/queued-once"),
    M("preempt-to-the-tail", "starvation", "a preempted request goes behind all others",
      PREEMPT, "self.waiting.prepend_request(request)", "self.waiting.add_request(request)",
      why="an order of the queue; no request is lost, and each is scheduled in time"),
    M("preempt-not-counted", "double count", "a preemption is not counted",
      PREEMPT, "request.num_preemptions += 1", "pass", finds="tokens/set-once"),
    M("preempt-not-told", "preemption", "the workers are not told of a preemption",
      PREEMPT, "self.reset_preempted_req_ids.add(request.request_id)", "pass"),
    M("preempt-the-first", "starvation", "the oldest running request is preempted, not the youngest",
      SCHEDULE, "preempted_req = self.running.pop()", "preempted_req = self.running.pop(0)"),
    M("resume-beside-stale", "preemption", "a request resumes while its old output is in flight",
      SCHEDULE, "if request.num_stale_output_tokens and not", "if False and not",
      finds="tokens/sampled-twice"),
    # --- abort and end
    M("abort-leaks", "leak", "an aborted request's blocks are not freed",
      END, "if not delay_free_blocks:",
      "if not delay_free_blocks and request.status != RequestStatus.FINISHED_ABORTED:",
      finds="requests/standstill"),
    M("abort-keeps-running", "abort", "an aborted request stays in the running queue",
      FINISH, "self.running = remove_all(self.running, running_requests_to_remove)", "pass",
      finds="requests/queued-once"),
    M("abort-keeps-waiting", "abort", "an aborted request stays in the waiting queue",
      FINISH, "self.waiting.remove_requests(waiting_requests_to_remove)", "pass",
      finds="requests/queued-once requests/standstill"),
    M("abort-keeps-holding", "abort", "an aborted request that holds blocks stays in its queue",
      FINISH, "self.kv_holding_waiting.remove_requests(waiting_requests_to_remove)", "pass",
      finds="requests/queued-once"),
    M("abort-counts-a-lookup", "double count", "an abort counts the request's lookup once more",
      FINISH, "request.status = finished_status",
      "request.status = finished_status\n"
      "self.kv_cache_manager.record_prefix_cache_stats(request, request.num_computed_tokens)",
      finds="tokens/lookup-counted-once"),
    M("abort-of-all-but-one", "abort", "the first of several aborted requests goes on",
      FINISH, "for request in valid_requests:", "for request in valid_requests[1:]:",
      finds="requests/queued-once"),
    M("end-not-told", "abort", "the workers are not told that a request ended",
      END, "self.finished_req_ids.add(request_id)", "pass", finds="tokens/in-flight"),
    M("end-keeps-reservation", "leak", "blocks stay reserved for a prefill that has ended",
      END, "self._inflight_prefills.discard(request)", "pass"),
    M("end-ignores-the-connector", "connector",
      "a request's blocks are freed though the connector delays that",
      END, "delay_free_blocks |= connector_delay_free_blocks", "pass"),
    M("end-stays-running", "abort", "a request that stopped stays in the running queue",
      OUTPUT, "self.running = remove_all(self.running, stopped_running_reqs)", "pass",
      finds="requests/queued-once"),
    M("end-ignored-in-flight", "abort", "output of a request that ended is delivered",
      OUTPUT, "if request is None or request.is_finished():", "if request is None:"),
    M("stop-one-late", "off by one", "a request gets one token more than it may",
      "utils.check_stop", "request.num_output_tokens >= request.max_tokens",
      "request.num_output_tokens > request.max_tokens", finds="tokens/beyond-max-tokens"),
    M("stop-keeps-the-rest", "drafts", "tokens accepted past a stop are delivered",
      "Scheduler._update_request_with_output", "del new_token_ids[num_new:]", "pass"),
    M("deferred-never", "leak",
      "blocks whose free is deferred to the last step in flight stay one step longer",
      "Scheduler._drain_deferred_frees", "if fence > self.processed_step_seq:",
      "if fence >= self.processed_step_seq:", finds="blocks/leak"),
    M("deferred-too-early", "off by one", "blocks whose free is deferred are freed one step early",
      "Scheduler._drain_deferred_frees", "if fence > self.processed_step_seq:",
      "if fence > self.processed_step_seq + 1:", finds="blocks/in-flight"),
    # --- reset
    M("reset-keeps-output", "reset", "output in flight at a reset is delivered",
      "Scheduler.reset_prefix_cache", "drop_stale_output=True", "drop_stale_output=False",
      why="a release may deliver or drop this output; the events say which, and kvledger counts by it"),
    M("reset-spares-one", "reset", "a reset leaves one request running",
      "Scheduler.reset_prefix_cache", "while self.running:", "while len(self.running) > 1:"),
    # --- computed tokens
    M("computed-one-less", "off by one", "a prefill chunk counts one computed token too few",
      "Scheduler._update_after_schedule", "request.num_computed_tokens += num_scheduled_token",
      "request.num_computed_tokens += max(1, num_scheduled_token - 1)", finds="tokens/unexplained-drop"),
    M("computed-one-more", "off by one", "a prefill chunk counts one computed token too many",
      "Scheduler._update_after_schedule", "request.num_computed_tokens += num_scheduled_token",
      "request.num_computed_tokens += num_scheduled_token + (num_scheduled_token > 1)",
      finds="connector/handed-over requests/standstill tokens/balance"),
    M("in-flight-doubled", "double count", "tokens in flight are counted twice",
      "Scheduler._update_after_schedule", "request.num_in_flight_tokens += num_scheduled_token",
      "request.num_in_flight_tokens += 2 * num_scheduled_token", finds="tokens/in-flight"),
    M("in-flight-kept", "leak", "tokens stay in flight when their output comes",
      OUTPUT, "request.num_in_flight_tokens -= num_tokens_scheduled", "pass", finds="tokens/in-flight"),
    # --- drafts
    M("rejected-kept", "drafts", "rejected drafts stay in the computed count",
      OUTPUT, "request.num_computed_tokens -= num_rejected", "pass", finds="tokens/balance"),
    M("rejected-one-more", "off by one", "one token more than the rejected drafts is subtracted",
      OUTPUT, "request.num_computed_tokens -= num_rejected",
      "request.num_computed_tokens -= num_rejected + (num_rejected > 0)", finds="tokens/unexplained-drop"),
    M("rejected-placeholders-kept", "drafts", "rejected drafts keep their output placeholders",
      OUTPUT, "request.num_output_placeholders -= num_rejected", "pass", finds="tokens/in-flight"),
    M("drafts-without-slots", "drafts", "no slots are allocated for the lookahead of a drafter",
      SCHEDULE, "num_lookahead_tokens=self.num_lookahead_tokens,", "num_lookahead_tokens=0,"),
    M("drafts-cut-one-short", "off by one", "one draft less than scheduled is verified",
      SCHEDULE, "spec_token_ids[:num_scheduled_spec_tokens]",
      "spec_token_ids[: num_scheduled_spec_tokens - 1]"),
    M("drafts-padded-when-admitted", "drafts",
      "drafts of a request that is admitted do not count as placeholders",
      "AsyncScheduler._update_after_schedule", "self.num_sampled_tokens_per_step + cur_num_spec_tokens",
      "self.num_sampled_tokens_per_step"),
    M("async-caches-too-much", "off by one", "positions without output yet are cached",
      "AsyncScheduler._update_request_with_output",
      "request, request.num_computed_tokens - request.num_output_placeholders",
      "request, request.num_computed_tokens"),
    # --- queues
    M("skipped-are-lost", "starvation", "a waiting request that a step skips is in no queue",
      SCHEDULE, "self.waiting.prepend_requests(step_skipped_waiting)", "pass", finds="requests/queued-once"),
    M("holders-are-lost", "starvation", "a skipped request that holds blocks is in no queue",
      SCHEDULE, "self.kv_holding_waiting.prepend_requests(step_skipped_kv_holding)", "pass",
      finds="requests/queued-once"),
    M("last-step-never", "starvation", "an asynchronous request is not scheduled for its last token",
      SCHEDULE, "and request.num_computed_tokens + 2 - request.num_output_placeholders",
      "and request.num_computed_tokens + 3 - request.num_output_placeholders", finds="requests/standstill"),
    M("one-place-less", "off by one", "one request less than allowed runs",
      SCHEDULE, "if num_running >= self.max_num_active_reqs:",
      "if num_running >= self.max_num_active_reqs - 1:",
      why="a limit of the scheduler: requests wait longer, and every figure is right"),
    M("admits-after-preempting", "starvation", "a step that preempted also admits",
      SCHEDULE, "if not preempted_reqs and self._pause", "if self._pause",
      why="an order of admission; every figure is right"),
    M("budget-one-more", "off by one", "the budget of a step is one token too large",
      SCHEDULE, "token_budget = self.max_num_scheduled_tokens",
      "token_budget = self.max_num_scheduled_tokens + 1"),
    M("budget-not-spent", "double count", "an admitted request's tokens are not taken from the budget",
      SCHEDULE, "token_budget -= num_new_tokens", "pass", place=2),
    # --- sessions
    M("session-keeps-hashes", "sessions", "a session keeps the hashes of the output that it discards",
      "Scheduler._update_request_as_session", "del session.block_hashes[", "del session.block_hashes[100 + "),
    M("session-frontier", "sessions", "a session counts output placeholders as computed",
      STOPPED, "request.num_computed_tokens - request.num_output_placeholders",
      "request.num_computed_tokens", finds="tokens/turn-overcounted"),
    M("session-drops-no-output", "sessions", "output in flight at the end of a chunk is delivered",
      STOPPED, "request.num_stale_output_tokens = request.num_in_flight_tokens", "pass",
      finds="tokens/unexplained-drop"),
    M("session-counts-twice", "double count", "a session that waits for input is counted twice",
      STOPPED, "self.num_waiting_for_streaming_input += 1", "self.num_waiting_for_streaming_input += 2",
      why="a count of the scheduler that only delays admissions; every figure is right"),
    # --- references
    M("touch-twice", "double count", "a hit counts two references", TOUCH, "block.ref_cnt += 1",
      "block.ref_cnt += 2", finds="requests/standstill"),
    M("touch-never", "shared blocks", "a hit counts no reference",
      LOCAL, "self.block_pool.touch(new_computed_blocks)", "pass",
      finds="blocks/double-allocation blocks/double-free blocks/free-iff-unreferenced blocks/references"),
    M("touch-stays-free", "shared blocks", "a block that is hit stays in the free queue",
      TOUCH, "if block.ref_cnt == 0 and not block.is_null:", "if False:",
      finds="blocks/free-iff-unreferenced"),
    M("free-shared", "shared blocks", "a block is freed while one other request holds it",
      FREE, "if block.ref_cnt == 0 and not", "if block.ref_cnt <= 1 and not",
      finds="blocks/free-iff-unreferenced"),
    M("free-takes-all", "shared blocks", "freeing a block drops the references of all its holders",
      FREE, "block.ref_cnt -= 1", "block.ref_cnt = 0", finds="blocks/references"),
    M("free-never-counts", "leak", "freeing a block keeps its reference", FREE, "block.ref_cnt -= 1", "pass",
      finds="requests/standstill"),
    M("free-loses-a-block", "leak", "one of the cached blocks that are freed together goes nowhere",
      FREE, "self.free_block_queue.append_n(blocks_to_evict_last)",
      "self.free_block_queue.append_n(blocks_to_evict_last[1:])", finds="blocks/free-iff-unreferenced"),
    M("free-in-other-order", "eviction", "the head of a prompt is evicted before its tail",
      "SingleTypeKVCacheManager.free", "reversed(self.pop_blocks_for_free(request_id))",
      "self.pop_blocks_for_free(request_id)",
      why="an order of eviction; every figure is right, and fewer prompts hit"),
    M("tail-leaks", "leak", "the last block of a request is forgotten",
      "SingleTypeKVCacheManager.pop_blocks_for_free", "return req_blocks", "return req_blocks[:-1]",
      finds="requests/standstill"),
    M("queue-counts-one-more", "off by one", "the free queue counts a block that it has given away",
      "FreeKVCacheBlockQueue.popleft_n", "self.num_free_blocks -= n", "self.num_free_blocks -= n - (n > 1)",
      finds="blocks/free-iff-unreferenced"),
    M("queue-counts-one-less", "off by one", "the free queue counts a touched block twice",
      "FreeKVCacheBlockQueue.remove", "self.num_free_blocks -= 1", "self.num_free_blocks -= 2",
      finds="blocks/free-iff-unreferenced"),
    # --- hashes and contents
    M("new-keeps-its-hash", "shared blocks", "a block that is allocated anew keeps its hash",
      NEW, "self._maybe_evict_cached_block(block)", "pass",
      finds="blocks/double-allocation blocks/hash-content blocks/hash-map"),
    M("evicts-only-the-map", "shared blocks", "an evicted block leaves the cache map and keeps its hash",
      "BlockPool._remove_cached_block_hashes", "block.reset_hash()", "pass",
      finds="blocks/hash-content blocks/hash-map"),
    M("evicts-only-the-block", "shared blocks", "an evicted block loses its hash and stays in the cache map",
      "BlockPool._maybe_evict_cached_block", "evicted_hashes = self._remove_cached_block_hashes(block)",
      "evicted_hashes = []; block.reset_hash()", finds="blocks/double-allocation blocks/hash-map"),
    M("hash-of-the-block-before", "off by one", "a block is cached under the hash of the block before it",
      "BlockPool.cache_full_blocks", "block_hash = new_block_hashes[i]",
      "block_hash = new_block_hashes[max(0, i - 1)]", finds="blocks/hash-content"),
    M("caches-partial-blocks", "off by one", "a block that lacks its last token is cached",
      "SingleTypeKVCacheManager.cache_blocks", "num_full_blocks = num_tokens // self.block_size",
      "num_full_blocks = min((num_tokens + 1) // self.block_size, len(request.block_hashes))",
      finds="blocks/hash-content blocks/read-invalid"),
    M("caches-the-tail-early", "off by one", "a block is cached up to half a block early",
      "SingleTypeKVCacheManager.cache_blocks", "num_full_blocks = num_tokens // self.block_size",
      "num_full_blocks = min((num_tokens + self.block_size // 2) // self.block_size,"
      " len(request.block_hashes), len(self.req_to_blocks[request.request_id]))",
      finds="blocks/hash-content blocks/read-invalid"),
    M("salt-forgotten", "isolation", "block hashes leave out the cache salt",
      "kv_cache_utils.generate_block_hash_extra_keys", "mm_extra_keys + cache_salt_keys", "mm_extra_keys",
      finds="blocks/isolation"),
    M("adapter-forgotten", "isolation", "block hashes leave out the LoRA adapter",
      "kv_cache_utils.generate_block_hash_extra_keys", "_gen_lora_extra_hash_keys(request)", "[]",
      finds="blocks/isolation"),
    M("parent-forgotten", "isolation", "block hashes leave out the blocks before",
      "kv_cache_utils.hash_block_tokens", "(parent_block_hash, curr_block_token_ids_tuple, extra_keys)",
      "(NONE_HASH, curr_block_token_ids_tuple, extra_keys)", finds="blocks/isolation blocks/same-prefix"),
    M("session-keeps-its-hashes", "shared blocks", "the next chunk of a session keeps an old hash",
      "Scheduler._update_request_as_session",
      "del session.block_hashes[num_computed_tokens // self.hash_block_size :]", "pass",
      finds="blocks/same-prefix"),
    M("reset-in-use", "reset", "the cache is reset while requests hold blocks",
      "BlockPool.reset_prefix_cache", "if num_used_blocks != 1:", "if False:"),
    M("reset-keeps-hashes", "reset", "a reset empties the cache map and leaves the blocks their hashes",
      "BlockPool.reset_prefix_cache", "block.reset_hash()", "pass", finds="blocks/hash-map"),
    M("reset-keeps-the-map", "reset", "a reset leaves the cache map as it is",
      "BlockPool.reset_prefix_cache", "self.cached_block_hash_to_block = BlockHashToBlockMap()", "pass",
      finds="blocks/double-allocation blocks/hash-map"),
    M("reset-does-nothing", "reset", "a reset succeeds and resets nothing",
      "KVCacheManager.reset_prefix_cache", "not self.coordinator.reset_prefix_cache()", "False",
      finds="blocks/hash-content"),
    # --- hits
    M("hit-of-a-whole-prompt", "off by one", "a hit covers the last token of a prompt",
      "KVCacheManager.get_computed_blocks", "max_cache_hit_length = request.num_tokens - 1",
      "max_cache_hit_length = request.num_tokens"),
    M("hit-one-token-more", "off by one", "a hit counts one token more than its blocks have",
      "KVCacheManager.get_computed_blocks", "return blocks, num_new_computed_tokens,",
      "return blocks, num_new_computed_tokens + (num_new_computed_tokens > 0),",
      finds="tokens/lookup-counted-once"),
    M("hit-one-block-more", "off by one", "a hit counts one block more than it has",
      "KVCacheManager.get_computed_blocks", "return blocks, num_new_computed_tokens,",
      "return blocks, num_new_computed_tokens"
      " + 16 * (0 < num_new_computed_tokens < request.num_tokens - 17),", finds="blocks/read-invalid"),
    M("hit-one-block-less", "off by one", "a hit counts one block less than it has",
      "KVCacheManager.get_computed_blocks", "return blocks, num_new_computed_tokens,",
      "return blocks, max(0, num_new_computed_tokens - 16),", finds="blocks/write-shared"),
    M("hit-past-a-hole", "shared blocks", "a hit goes on behind the first block that is missing",
      "FullAttentionManager.find_longest_cache_hit", "            break", "            continue", place=1),
    M("hit-keeps-the-eagle-block", "drafts", "a hit keeps the block that a drafter needs to compute again",
      "FullAttentionManager.find_longest_cache_hit", "if drop_eagle_block and hit_length > 0:", "if False:",
      why="the events do not say which KV is the drafter's"),
    M("hit-cached-again", "shared blocks", "blocks that were hit are cached again",
      LOCAL, "self.num_cached_block[request_id] = len(req_blocks)", "self.num_cached_block[request_id] = 0"),
    M("hit-never-counts", "double count", "lookups of preempted requests count as first lookups",
      "KVCacheManager.record_prefix_cache_stats", "preempted=request.num_preemptions > 0", "preempted=False"),
    # --- slots
    M("one-slot-less", "off by one", "one slot less than the tokens need is allocated",
      "SingleTypeKVCacheManager.allocate_new_blocks",
      "num_required_blocks = cdiv(num_tokens, self.block_size)",
      "num_required_blocks = cdiv(num_tokens - 1, self.block_size)", finds="connector/handed-over"),
    M("one-block-more", "leak", "one block more than the tokens need is allocated",
      "SingleTypeKVCacheManager.allocate_new_blocks",
      "num_required_blocks = cdiv(num_tokens, self.block_size)",
      "num_required_blocks = cdiv(num_tokens, self.block_size) + 1"),
    M("pool-one-block-short", "off by one", "a step may need one block more than is free",
      SLOTS, "if required_blocks > available_blocks:", "if required_blocks > available_blocks + 1:"),
    M("needs-no-evictable", "double count", "hit blocks in the free queue are counted as free",
      NEEDED, "return num_new_blocks + num_evictable_blocks", "return num_new_blocks"),
    M("caches-drafts", "drafts", "blocks with drafts are cached before the drafts are accepted",
      SLOTS, "request.num_tokens,\n", "total_computed_tokens + num_new_tokens,\n"),
    # --- windows
    M("window-one-block-early", "windows", "a block leaves a window while it is read",
      "SlidingWindowManager.get_num_skipped_tokens", "num_computed_tokens - self.sliding_window + 1",
      "num_computed_tokens - self.sliding_window + 1 + self.block_size", finds="blocks/read-invalid"),
    M("window-one-token-early", "windows", "a block leaves a window one token early",
      "SlidingWindowManager.get_num_skipped_tokens", "num_computed_tokens - self.sliding_window + 1",
      "num_computed_tokens - self.sliding_window + 2", finds="blocks/read-invalid"),
    M("window-one-block-late", "windows", "a block leaves a window one block late",
      "SlidingWindowManager.get_num_skipped_tokens", "num_computed_tokens - self.sliding_window + 1",
      "num_computed_tokens - self.sliding_window + 1 - self.block_size",
      why="one block more is held, and every figure is right"),
    M("window-leaks", "windows", "a single block that leaves a window is not freed",
      "SingleTypeKVCacheManager._remove_blocks_in_range", "if freed:", "if len(freed) > 1:",
      finds="requests/standstill"),
    M("window-frees-twice", "windows", "a block that left a window stays in the table",
      "SingleTypeKVCacheManager._remove_blocks_in_range", "blocks[i] = self._null_block", "pass",
      finds="blocks/double-allocation blocks/double-free blocks/free-iff-unreferenced blocks/references"),
    M("window-hit-too-short", "windows", "a hit needs one block less than the window has",
      "SlidingWindowManager._contiguous_blocks_for_hit", "blocks = cdiv(window_size - 1, block_size)",
      "blocks = max(1, cdiv(window_size - 1, block_size) - 1)", finds="blocks/read-invalid"),
    # --- loads, promises and what a connector is told
    M("external-one-block-more", "double count", "one block more than the connector has counts as external",
      SCHEDULE, "num_external_computed_tokens = ext_tokens",
      "num_external_computed_tokens = ext_tokens + 16 * (0 < ext_tokens < request.num_tokens - 17"
      " - num_new_local_computed_tokens)", place=2),
    M("external-one-block-less", "off by one", "one block less than the connector has counts as external",
      SCHEDULE, "num_external_computed_tokens = ext_tokens",
      "num_external_computed_tokens = max(ext_tokens - 16, min(16, ext_tokens))", place=2,
      finds="blocks/hash-content"),
    M("external-counts-as-local", "double count", "external tokens are reported as local too",
      SCHEDULE, "num_local_cached_tokens=num_new_local_computed_tokens",
      "num_local_cached_tokens=num_computed_tokens", finds="tokens/set-once"),
    M("external-hits-doubled", "double count", "external lookups count the local hit as queried",
      SCHEDULE, "request.num_tokens - num_new_local_computed_tokens", "request.num_tokens",
      finds="tokens/lookup-counted-once"),
    M("connector-not-asked-again", "connector", "the connector is offered no local hit",
      SCHEDULE, "request, block_aligned_local", "request, 0", finds="tokens/lookup-counted-once"),
    M("connector-told-nothing", "connector", "the connector is told that it loads nothing",
      SCHEDULE, "num_external_computed_tokens,\n", "0,\n", place=4,
      finds="connector/handed-over tokens/balance tokens/lookup-counted-once tokens/set-once"),
    M("load-cached-at-once", "failed loads", "blocks that are still being loaded are cached",
      SCHEDULE, "delay_cache_blocks=load_kv_async", "delay_cache_blocks=False", finds="blocks/hash-content"),
    M("load-never-awaited", "failed loads", "a request runs before its load has finished",
      "Scheduler._handle_blocked_waiting_request", "if request_id not in self.finished_recving_kv_req_ids:",
      "if self.finished_recving_kv_req_ids.add(request_id):", finds="connector/promise-not-loaded"),
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
      "request.num_computed_tokens = (idx + 1) * self.block_size", finds="connector/failed-block-kept"),
    M("failed-block-before-dropped", "off by one", "the block before the first that failed is computed again",
      INVALID, "request.num_computed_tokens = idx * self.block_size",
      "request.num_computed_tokens = max(0, idx - 1) * self.block_size",
      why="one valid block more is computed again, which no figure forbids"),
    M("last-failed-block-counts", "failed loads", "the last failed block decides, not the first",
      INVALID, "if marked_invalid_block:", "if False:", finds="connector/failed-block-kept"),
    M("failed-owner-unmarked", "shared blocks", "each request that shares a failed block computes it again",
      INVALID, "marked_invalid_block_ids.add(block_id)", "pass",
      why="shared blocks are computed twice, which no figure forbids"),
    M("failed-output-kept", "failed loads", "the output above a failed load is delivered",
      FAILED, "return sync_failed_req_ids", "return set()", finds="blocks/hash-content"),
    M("failed-async-forgotten", "failed loads", "a failed asynchronous load is not marked",
      FAILED, "self.failed_recving_kv_req_ids |= async_failed_req_ids", "pass"),
    M("failed-whole-not-reset", "failed loads", "a load that failed whole keeps its computed count",
      "Scheduler._handle_failed_recving", "request.num_computed_tokens = 0", "pass",
      finds="connector/failed-block-kept"),
    M("failed-request-goes-on", "failed loads", "the policy to fail ends no request",
      "Scheduler.update_from_output", "if failed_kv_load_req_ids and not self.recompute_kv_load_failures:",
      "if False:", finds="tokens/in-flight"),
    M("sent-leaks", "leak", "blocks are forgotten when the connector has sent them",
      TRANSFERS, "self._free_blocks(self.requests[req_id])", "del self.requests[req_id]", place=2,
      finds="blocks/leak"),
    M("sent-never-freed", "leak", "blocks that the connector has sent are never freed",
      TRANSFERS, "self._free_blocks(self.requests[req_id])", "pass", place=2),
    M("received-after-abort-leaks", "leak", "blocks of a load that ends after the abort are never freed",
      TRANSFERS, "self._free_blocks(self.requests[req_id])", "pass", place=1),
    M("handed-over-too-much", "connector", "the connector is handed blocks beyond the computed tokens",
      "Scheduler._connector_finished", "num_computed_tokens=request.num_computed_tokens,",
      "num_computed_tokens=request.num_tokens + 32,", finds="connector/handed-over"),
    M("handed-over-too-little", "connector", "the connector is handed one block less than is computed",
      "Scheduler._connector_finished", "num_computed_tokens=request.num_computed_tokens,",
      "num_computed_tokens=max(0, request.num_computed_tokens - 16),", finds="connector/handed-over"),
    # --- merged fixes, reverted
    _fix("21357", "evicting one of several blocks with one hash drops the others from the cache map",
      "BlockHashToBlockMap.pop", "if len(blocks) > 0:", "if len(blocks) == 0:", finds="blocks/hash-map"),
    _fix("26813", "failed blocks stay cached, also under the policy to fail",
      "Scheduler._handle_invalid_blocks", "self.kv_cache_manager.evict_blocks(sync_blocks_to_evict)", "pass",
      finds="blocks/hash-content"),
    _fix("27756", "the workers get no tokens of a request that the step before left out",
      "Scheduler._make_cached_request_data", "if req_id not in self.prev_step_scheduled_req_ids:",
      "if idx >= num_running_reqs:", why="no event has the tokens that workers get"),
    _fix("28558", "a request that a more urgent one preempts keeps its drafts in the step",
      SCHEDULE, "scheduled_spec_decode_tokens.pop(preempted_req_id, None)", "pass"),
    _fix("29387", "a state that another request of the same step computes is hit",
      "MambaManager.get_num_blocks_to_allocate", "in self.cached_blocks_this_step", "in ()"),
    _fix("32255", "blocks of an aborted asynchronous load are freed while the load writes",
      "Scheduler.finish_requests", "request.request_id not in self.finished_recving_kv_req_ids", "False"),
    _fix("36752", "the figures of an admission after a preemption replace the first ones",
      SCHEDULE, "if request.prefill_stats and request.num_preemptions <= 0:", "if request.prefill_stats:",
      finds="tokens/set-once"),
    _fix("39450", "a hit of a window whose last block a drafter drops need not be aligned",
      "SlidingWindowManager.find_longest_cache_hit", "i if drop_eagle_block else i + 1", "i + 1"),
    _fix("40946", "an admission needs as many blocks of a window as the whole prompt has",
      "SingleTypeKVCacheManager.get_num_blocks_to_allocate", "if apply_admission_cap and", "if False and"),
    _fix("44409", "one group's external blocks are allocated before another group's hits are touched",
      "KVCacheCoordinator.allocate_new_computed_blocks",
      "        )\n    if num_external_computed_tokens > 0:\n"
      "        for i, manager in enumerate(self.single_type_managers):\n",
      "        )\n        if num_external_computed_tokens > 0:\n", finds="blocks/double-allocation"),
    _fix("44560", "asynchronous loads take blocks that other loads and prefills still need",
      SCHEDULE, "reserved_blocks=reserved_blocks", "reserved_blocks=0",
      why="an order of allocation; requests are preempted more often, and every figure is right"),
    _fix("45357", "blocks that a step in flight writes are freed at once",
      "Scheduler._request_blocks_can_be_freed", "return not self.defer_block_free or (",
      "return True or (", finds="blocks/in-flight"),
    _fix("46066", "output in flight at a reset counts against the placeholders of the next life",
      OUTPUT, "request, new_token_ids, is_stale=output_is_stale", "request, new_token_ids"),
    _fix("47728", "blocks leave the window of a step that is in flight",
      "KVCacheManager.allocate_slots", "max(0, total_computed_tokens - request.num_in_flight_tokens)",
      "total_computed_tokens", finds="blocks/read-invalid"),
    _fix("48245", "output in flight at a preemption is no longer marked as stale",
      PREEMPT, "request.num_stale_output_tokens = request.num_in_flight_tokens", "pass",
      finds="tokens/sampled-twice"),
    _fix("48245-rejections", "drafts of a step before a preemption are subtracted after it",
      OUTPUT, "if not output_is_stale:", "if True:"),
    _fix("49675", "requests whose blocks can't be freed yet are preempted",
      SCHEDULE, "if not self._request_blocks_can_be_freed(preempted_req):", "if False:",
      finds="requests/livelock"),
    _fix("50344", "a connector that can't fill them gets hits of groups that end at other positions",
      "Scheduler._get_local_prefix_cache_hit",
      "connector is not None and connector.supports_divergent_local_hybrid_hits", "connector is not None"),
    _fix("50388", "failed blocks of a model with several groups end the engine",
      "Scheduler._handle_invalid_blocks", "len(self.kv_cache_config.kv_cache_groups) > 1", "False"),
    _fix("57104", "an asynchronous load leaves no room for the drafts of its first step",
      SCHEDULE, "+ self._spec_decode_step_blocks", "+ 0"),
)  # fmt: skip

BY_NAME = {fault.name: fault for fault in PLANTED}
