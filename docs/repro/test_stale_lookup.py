"""vLLM 0.9.1: an admission uses the hit count of an earlier, failed attempt.

The scheduler asks how many tokens of a waiting request are cached, and the tracker keeps the answer. If the
request can't be admitted, the answer stays. By the next attempt the cache has changed, but the old answer
is used: tokens count as cached that are not, and their blocks are read without having been computed.
Answers for requests that are ignored are never released.

- Lookups kept for requests that do not run: 1. Expected: 0.
- Finding of kvledger: tokens/stale-lookup.
- Where: `Scheduler._schedule_prefills` (`vllm/core/scheduler.py`) and
  `ComputedBlocksTracker.get_num_cached_tokens` (`vllm/core/block/prefix_caching_block.py`).
- Releases of vLLM with the fault, as far as tried: 0.9.0 to 0.9.1, fixed in 0.9.2.
- Upstream: https://github.com/vllm-project/vllm/pull/18957,
  https://github.com/vllm-project/vllm/issues/18955.
- Assumed: The 16 tokens that r3 hit in the cache came from a request that the journal does not show; r1
  caches them here.
- Assumed: The pool has 44 blocks instead of 64: the requests left out held the others.

    pytest test_stale_lookup.py    fails where the fault is, passes where it is fixed
    python test_stale_lookup.py    prints the engine's own figures and the right ones

Made by kvledger 0.1.0 from a journal. The prompts are made up: token families of the recorded
lengths, shared where the recorded prompts shared blocks. No model runs; its output is made up too.
"""

import os
import random

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL", VLLM_TARGET_DEVICE="cpu")
os.environ["VLLM_USE_V1"] = "0"

from vllm import SamplingParams
from vllm.config import CacheConfig, SchedulerConfig
from vllm.core.scheduler import Scheduler
from vllm.inputs import token_inputs
from vllm.sequence import Logprob, Sequence, SequenceGroup, SequenceStatus

# --- the workload ---------------------------------------------------------------------------------------

ENGINE = {
    "num_blocks": 44, "num_cpu_blocks": 64, "block_size": 16, "enable_prefix_caching": True,
    "max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": 2048,
    "enable_chunked_prefill": False, "preemption_mode": None, "policy": "fcfs",
}
REQUESTS = {  # prompt: [(family of made-up tokens, how many of its first), ...]
    "r1": {"prompt": [("r3", 16)], "max_tokens": 1},
    "r2": {"prompt": [("r2", 672)], "max_tokens": 34},
    "r3": {"prompt": [("r3", 17)], "max_tokens": 1},
}
SCRIPT = [
    ("add", "r1"),
    ("add", "r2"),
    ("step", 9),
    ("add", "r3"),
    ("step",),
]

# --- the driver -----------------------------------------------------------------------------------------


def tokens(family, count):
    """The first `count` tokens of a made-up family: a longer prompt continues a shorter one."""
    return random.Random(family).choices(range(3, 32000), k=count)


def build_scheduler():
    scheduling = SchedulerConfig(
        runner_type="generate",
        max_num_batched_tokens=ENGINE["max_num_batched_tokens"],
        max_num_seqs=ENGINE["max_num_seqs"],
        max_model_len=ENGINE["max_model_len"],
        enable_chunked_prefill=ENGINE["enable_chunked_prefill"],
        preemption_mode=ENGINE["preemption_mode"],
        policy=ENGINE["policy"],
    )
    cache = CacheConfig(
        block_size=ENGINE["block_size"], enable_prefix_caching=ENGINE["enable_prefix_caching"]
    )
    cache.num_gpu_blocks, cache.num_cpu_blocks = ENGINE["num_blocks"], ENGINE["num_cpu_blocks"]
    return Scheduler(scheduling, cache, None)


class Engine:
    """Carries out SCRIPT. Output is made up too: the n-th token of r1 is the n-th of the family "r1 out"."""

    def __init__(self):
        self.scheduler, self.requests = build_scheduler(), {}
        self.outputs, self.steps, self.raised = {}, [], ""

    def add(self, name):
        row, number = REQUESTS[name], len(self.requests) + 1
        prompt = [token for part in row["prompt"] for token in tokens(*part)]
        sampling = SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True)
        options = {}
        sequence = Sequence(number, token_inputs(prompt), ENGINE["block_size"], **options)
        self.requests[name] = SequenceGroup(
            name, [sequence], float(number), sampling_params=sampling,
            priority=row.get("priority", 0), **options)
        self.scheduler.add_seq_group(self.requests[name])

    def step(self, times=1):
        """One iteration of the engine, its output included."""
        for _ in range(times):
            if self.scheduler.has_unfinished_seqs():
                self.iterate()

    schedule = step

    def output(self):
        """The output of a step is part of the step."""

    def iterate(self):
        rows, scheduled, _ = self.scheduler.schedule()
        self.steps.append(scheduled)
        self.scheduler.get_and_reset_finished_requests_ids()
        for row, each in zip(rows, scheduled.scheduled_seq_groups):
            group, sequence = each.seq_group, each.seq_group.first_seq
            if group.is_finished():
                continue
            group.update_num_computed_tokens(row.token_chunk_size)
            if not row.do_sample:
                continue
            count = sequence.get_output_len() + 1
            token = tokens(f"{group.request_id} out", count)[-1]
            sequence.append_token_id(token, {token: Logprob(0.0)})
            if count >= group.sampling_params.max_tokens or sequence.get_len() > ENGINE["max_model_len"]:
                sequence.status = SequenceStatus.FINISHED_LENGTH_CAPPED
                self.scheduler.free_seq(sequence)
        if any(each.seq_group.is_finished() for each in scheduled.scheduled_seq_groups):
            self.scheduler.free_finished_seq_groups()


# --- the figure -----------------------------------------------------------------------------------------


def kept_lookups(engine, name):
    """Lookups of waiting or ended requests whose result the v0 scheduler keeps."""
    tracker = engine.scheduler.block_manager._computed_blocks_tracker
    running = {sequence.seq_id for group in engine.scheduler.running for sequence in group.seqs}
    return len(set(tracker._seq_id_to_num_tokens_computed) - running)


WHAT = "lookups kept for requests that do not run"
RIGHT = 0


def figure():
    """What the engine says after SCRIPT, and whether that is right."""
    engine = Engine()
    for call, *arguments in SCRIPT:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        getattr(engine, call)(*arguments, **options)
    seen = kept_lookups(engine, "r3")
    return seen, seen == RIGHT


def test_stale_lookup():
    seen, is_right = figure()
    assert is_right, f"{WHAT}: {seen}, right: {RIGHT}"


if __name__ == "__main__":
    seen, is_right = figure()
    print(f"{WHAT}\n  engine: {seen}\n  right:  {RIGHT}")
    raise SystemExit(0 if is_right else 1)
