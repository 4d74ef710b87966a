"""vLLM 0.18.1: the local and external tokens of a prompt are from different admissions.

A request's cached tokens are set once, at its first admission, and the external part of them again at each
later admission before the first output. After a preemption during prefill the two figures are of different
admissions, and the front end reports their difference as the local hit. In 0.18.1 and earlier the
difference can be negative, and the Prometheus counter raises ValueError; 0.19.1 clamps it to 0, and the
sources no longer sum to the prompt.

- Local, external and computed tokens of r2: [-1, 2, 66]. Expected: [0, 3, 64].
- Finding of kvledger: tokens/negative.
- Where: `Scheduler.schedule` (`vllm/v1/core/sched/scheduler.py`), which sets `num_cached_tokens` and
  `num_external_computed_tokens`, and `PromptTokenStats.update_from_output` (`vllm/v1/metrics/stats.py`).
- Releases of vLLM with the fault, as far as tried: 0.16.0 to 0.19.1, fixed in 0.20.0.
- Upstream: https://github.com/vllm-project/vllm/pull/36752,
  https://github.com/vllm-project/vllm/issues/36812, https://github.com/vllm-project/vllm/pull/37460.

    pytest test_negative_local_hit.py    fails where the fault is, passes where it is fixed
    python test_negative_local_hit.py    prints the engine's own figures and the right ones

Made by kvledger 0.1.0 from a journal. The prompts are made up: token families of the recorded
lengths, shared where the recorded prompts shared blocks. No model runs; its output is made up too.
"""

import inspect
import json
import os
import random
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="CRITICAL", VLLM_TARGET_DEVICE="cpu")

import torch
from vllm import config as vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import base as kv_connector
from vllm.sampling_params import SamplingParams
from vllm.v1 import kv_cache_interface as kv_cache
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

try:
    from vllm.utils.hashing import sha256
except ImportError:  # up to 0.10
    from vllm.utils import sha256

# --- the workload ---------------------------------------------------------------------------------------

ENGINE = {
    "num_blocks": 18, "block_size": 16, "enable_prefix_caching": True, "max_num_seqs": 16,
    "max_num_batched_tokens": 64, "max_model_len": 2048, "enable_chunked_prefill": True,
    "scheduler_reserve_full_isl": False, "kv_role": "kv_both",
}
REQUESTS = {  # prompt: [(family of made-up tokens, how many of its first), ...]
    "r1": {"prompt": [("r1", 193)], "max_tokens": 2},
    "r2": {"prompt": [("r2", 67)], "max_tokens": 1, "answers": [1, 2]},
}
# answers: what the KV connector answers at each admission, in tokens beyond the local hit; then 0.
# step: schedule, then deliver the oldest output.
SCRIPT = [
    ("add", "r1"),
    ("step", 2),
    ("add", "r2"),
    ("step", 4),
]

# --- the scheduler --------------------------------------------------------------------------------------

MODEL = {  # a configuration without weights
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 32000, "max_position_embeddings": 1 << 20, "torch_dtype": "float32",
}


def make(kind, **arguments):
    """Call `kind` with those of the arguments that this release of vLLM has."""
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in arguments.items() if name in known})


def tokens(family, count):
    """The first `count` tokens of a made-up family: a longer prompt continues a shorter one."""
    return random.Random(family).choices(range(3, 32000), k=count)


def build_scheduler():
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    model = make(
        vllm_config.ModelConfig, model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32",
        max_model_len=ENGINE["max_model_len"])
    scheduling = make(vllm_config.SchedulerConfig, is_encoder_decoder=False, async_scheduling=False, **ENGINE)
    config = vllm_config.VllmConfig(
        model_config=model, scheduler_config=scheduling, cache_config=make(vllm_config.CacheConfig, **ENGINE),
        device_config=vllm_config.DeviceConfig(device="cpu"),
        kv_transfer_config=make(vllm_config.KVTransferConfig, kv_connector="ScriptedConnector",
                                kv_connector_module_path=__name__, **ENGINE),
    )
    # vLLM chose these for the machine's platform; the scheduler alone runs on any.
    config.scheduler_config.async_scheduling = False
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.cache_config.num_gpu_blocks = ENGINE["num_blocks"]
    if getattr(config.cache_config, "kv_cache_layout", "") is None:  # since 0.30
        config.cache_config.kv_cache_layout = "LBHNC"
    layer = {"block_size": ENGINE["block_size"], "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32,
             "use_mla": False}
    groups = [
        kv_cache.KVCacheGroupSpec(["layer.0"], make(kv_cache.FullAttentionSpec, **layer)),
    ]
    init_none_hash(sha256)
    return make(
        Scheduler, vllm_config=config, log_stats=True, block_size=ENGINE["block_size"],
        kv_cache_config=kv_cache.KVCacheConfig(ENGINE["num_blocks"], [], groups),
        structured_output_manager=StructuredOutputManager(config))


# --- the driver -----------------------------------------------------------------------------------------


class Engine:
    """Carries out SCRIPT. Output is made up too: the n-th token of r1 is the n-th of the family "r1 out"."""

    def __init__(self):
        self.scheduler = build_scheduler()
        self.hasher = get_request_block_hasher(ENGINE["block_size"], sha256)
        self.requests, self.outputs, self.steps, self.in_flight, self.raised = {}, {}, [], [], ""

    def add(self, name):
        row, prompt = REQUESTS[name], REQUESTS[name]["prompt"]
        sampling = SamplingParams(max_tokens=row["max_tokens"], ignore_eos=True)
        parameters = {"sampling_params": sampling, "pooling_params": None}
        request = make(
            Request, request_id=name, prompt_token_ids=[token for part in prompt for token in tokens(*part)],
            eos_token_id=None, arrival_time=float(len(self.requests)), block_hasher=self.hasher,
            **parameters)
        self.requests.setdefault(name, request)
        self.scheduler.add_request(request)

    def schedule(self):
        if self.scheduler.has_requests():
            self.steps.append(self.scheduler.schedule())
            # A step that ends before the known sequence does is a prefill chunk, and samples nothing.
            samples = {name for name in self.steps[-1].num_scheduled_tokens
                       if (of := self.scheduler.requests[name]).num_computed_tokens >= of.num_tokens}
            self.in_flight.append((self.steps[-1], samples))

    def output(self):
        """Deliver the output of the oldest step in flight."""
        if not self.in_flight:
            return
        step, samples = self.in_flight.pop(0)
        names = list(step.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, logprobs=None,
            sampled_token_ids=[self.sample(name) if name in samples else [] for name in names],
            prompt_logprobs_dict={}, pooler_output=[])
        for of_client in self.scheduler.update_from_output(step, answer).values():
            for output in of_client.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def step(self, times=1, **options):
        for _ in range(times):
            self.schedule()
            self.output(**options)

    def sample(self, name, count=1):
        first = self.requests[name].num_output_tokens
        return tokens(f"{name} out", first + count)[first:]


class ScriptedConnector(kv_connector.KVConnectorBase_V1):
    """The scheduler side of a KV connector that gives the answers of REQUESTS. It moves no KV."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        known = inspect.signature(kv_connector.KVConnectorBase_V1.__init__).parameters
        super().__init__(vllm_config, role, *[kv_cache_config] * ("kv_cache_config" in known))
        self.answers = {name: list(row.get("answers", ())) for name, row in REQUESTS.items()}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        answer = next(iter(self.answers[request.request_id]), 0)
        return max(0, min(answer, request.num_tokens - num_computed_tokens - 1)), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        del self.answers[request.request_id][:1]  # a failed attempt gets the same answer again

    def build_connector_meta(self, scheduler_output):
        return kv_connector.KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        return False, None

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None  # there is no worker


# --- the figure -----------------------------------------------------------------------------------------


def reported(engine, name):
    """Local, external and computed tokens of the prompt, as vLLM's front end counts them."""
    outputs = engine.outputs[name]
    if hasattr(outputs[0], "prefill_stats"):  # a request that ended before it ran has none
        stats = next((output.prefill_stats for output in outputs if output.prefill_stats), None)
        names = ("num_local_cached_tokens", "num_external_cached_tokens", "num_computed_tokens")
        return [getattr(stats, name, 0) for name in names]
    from vllm.v1.metrics.stats import PromptTokenStats

    first, counted = outputs[0], PromptTokenStats()
    prompt = engine.requests[name].num_prompt_tokens
    counted.update_from_output(first.num_cached_tokens, first.num_external_computed_tokens, prompt)
    return [counted.local_cache_hit, counted.external_kv_transfer, counted.computed]


WHAT = "local, external and computed tokens of r2"
RIGHT = [0, 3, 64]  # any release must hold: none is negative, they sum to the prompt


def figure():
    """What the engine says after SCRIPT, and whether that is right."""
    engine = Engine()
    for call, *arguments in SCRIPT:
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        getattr(engine, call)(*arguments, **options)
    seen = reported(engine, "r2")
    return seen, seen == RIGHT or min(seen) >= 0 and sum(seen) == engine.requests["r2"].num_prompt_tokens


def test_negative_local_hit():
    seen, is_right = figure()
    assert is_right, f"{WHAT}: {seen}, right: {RIGHT}"


if __name__ == "__main__":
    seen, is_right = figure()
    print(f"{WHAT}\n  engine: {seen}\n  right:  {RIGHT}")
    raise SystemExit(0 if is_right else 1)
