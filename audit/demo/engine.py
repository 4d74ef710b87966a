"""Runs the real vLLM engine through the demo's workload and writes the engine's own counters.

`python -m kvledger.audit.demo.engine --output RESULT.json`. Here: the environment, the engine, the
loop, and RESULT.json. Not here: any observation. kvledger's plugin is loaded as in any vLLM process, by
its entry point, when KVLEDGER_DIR is set. RESULT.json has the engine's counters, so that they can be
compared with the ledger.

Standard output has one JSON line per finished request, `{"done": 3, "of": 29}`, and nothing else.
Whatever vLLM and its C++ parts print goes to a log file. vLLM is imported after the environment is set.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from .. import temporary
from ..planted.fault import PlantedFault, planted
from . import workload
from .model import write_model

COUNTER_WORDS = ("prompt", "cache", "preempt", "external", "generation")
"""RESULT.json has every counter with one of these in its name."""

LATENCIES = (
    "vllm:time_to_first_token_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
)
"""Histograms of requests whose sums RESULT.json has."""

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The worker inside EngineCore. The CPU platform would replace the short name "uni" by a process."""


# --- Prepares a process for a repeatable engine run, before vLLM is imported.


def settle_environment(*, in_process: bool) -> None:
    """Set the environment variables that vLLM reads when it is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",  # one order of summation, so that digests are comparable
        TOKENIZERS_PARALLELISM="false",
    )


def share_bytecode(folder: Path) -> None:
    """Keep bytecode in `folder` if this process writes none, because EngineCore imports everything again.

    Compiling vLLM and its dependencies takes ten seconds per process.
    """
    torch = importlib.util.find_spec("torch")
    kept = torch and torch.origin and Path(importlib.util.cache_from_source(torch.origin)).exists()
    if sys.dont_write_bytecode and not kept:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Redirect this process's output, and its children's, to `log`; yields the original outputs."""
    with (
        os.fdopen(os.dup(1), "w") as stdout,
        os.fdopen(os.dup(2), "w") as stderr,
        log.open("wb") as sink,
    ):
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield stdout, stderr
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)


# --- The engine and its run.


def tiny_engine(model: Path, **settings: Any) -> Any:
    """A real engine on the CPU for a model of `model.py`, with these arguments of vLLM's LLM besides."""
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    # vLLM inspects a class that it knows only by name in another process, which imports vLLM again.
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    usual: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "seed": 0,
        "enforce_eager": True,
        "distributed_executor_backend": EXECUTOR,
        "enable_prefix_caching": True,
        "block_size": workload.BLOCK_TOKENS,
    }
    return LLM(model=str(model), **(usual | settings))


def start_engine(folder: Path, seed: int) -> Any:
    """Start a real engine on the CPU, with too few blocks and a connector that saves under `folder`."""
    from vllm.config import KVTransferConfig

    store = folder / "store"
    store.mkdir()
    return tiny_engine(
        write_model(folder / "model", seed),
        seed=seed,
        disable_log_stats=False,
        num_gpu_blocks_override=workload.BLOCKS,
        max_model_len=workload.SEQUENCE_TOKENS,
        max_num_seqs=workload.RUNNING_REQUESTS,
        enable_chunked_prefill=True,
        max_num_batched_tokens=workload.STEP_TOKENS,
        long_prefill_token_threshold=workload.CHUNK_TOKENS,
        scheduler_reserve_full_isl=False,  # True would prevent preemption during prefill
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(store)},
        ),
    )


def add_wave(engine: Any, wave: workload.Wave, seed: int) -> None:
    """Add all requests of a wave before the next step.

    An EngineCore process would start with the first request to arrive, and the schedule would depend on
    the machine's load. So its scheduler is paused meanwhile.
    """
    from vllm import SamplingParams

    core = engine.engine_core
    pausing = hasattr(core, "call_utility")
    if pausing:
        core.call_utility("pause_scheduler", "keep", False)
    for request in wave.requests:
        engine.add_request(
            request.id,
            {"prompt_token_ids": request.token_ids(seed)},
            SamplingParams(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True, detokenize=False
            ),
        )
    if pausing:
        core.call_utility("resume_scheduler")


def run_waves(llm: Any, waves: tuple[workload.Wave, ...], seed: int, out: TextIO) -> list[Any]:
    """Run the engine step by step through `waves`, and write progress to `out`."""
    finished: list[Any] = []
    expected, done = sum(len(wave.requests) for wave in waves), 0
    for wave in waves:
        if wave.reset:
            assert llm.reset_prefix_cache(), "a reset between waves finds every block free"
        add_wave(llm.llm_engine, wave, seed)
        to_abort = {request.aborted_after: request.id for request in wave.requests if request.aborted_after}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                ended = int(output.finished)
                if output.finished:
                    finished.append(output)
                if output.request_id in to_abort:
                    llm.llm_engine.abort_request([to_abort.pop(output.request_id)])
                    ended += 1
                if ended:
                    done += ended
                    print(json.dumps({"done": done, "of": expected}), file=out, flush=True)
    return finished


def summary(output: Any) -> dict[str, Any]:
    """One finished request for RESULT.json; its output only as a digest."""
    token_ids = list(output.outputs[0].token_ids)
    return {
        "id": output.request_id,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(token_ids),
        "digest": hashlib.sha256(json.dumps(token_ids).encode()).hexdigest(),
    }


def counters(llm: Any) -> dict[str, float]:
    """The engine's Prometheus counters by name and labels: `name{source="local_compute"}`."""
    from vllm.v1.metrics.reader import Counter

    values: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not isinstance(metric, Counter) or not any(word in metric.name for word in COUNTER_WORDS):
            continue
        labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
        shown = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
        values[f"{metric.name}{{{shown}}}" if shown else metric.name] = metric.value
    return values


def latencies(llm: Any) -> dict[str, dict[str, float]]:
    """Number and sum of seconds of the engine's histograms of requests, by name."""
    from vllm.v1.metrics.reader import Histogram

    return {
        metric.name: {"requests": metric.count, "seconds": metric.sum}
        for metric in llm.get_metrics()
        if isinstance(metric, Histogram) and metric.name in LATENCIES
    }


def refusals_of_counters() -> list[str]:
    """What the engine's own counters raise from now on when they refuse a figure.

    Upstream the error ended the server's step; here it is caught. Counters that come after it in the same
    iteration are not incremented, as upstream.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    refusals: list[str] = []
    original = PrometheusStatLogger.record

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except ValueError as refusal:
            refusals.append(str(refusal))

    PrometheusStatLogger.record = record
    return refusals


def run(seed: int, injection: PlantedFault | None, in_process: bool, out: TextIO) -> dict[str, Any]:
    """Run the engine from start to end; returns what goes into RESULT.json."""
    began_seconds = time.monotonic()
    refusals: list[str] = []
    waves = workload.LEADING_TO[injection.name] if injection else workload.DEFAULT_WAVES
    settle_environment(in_process=in_process)
    with temporary.folder("kvledger-demo-") as folder, contextlib.ExitStack() as fault:
        if not in_process:
            share_bytecode(Path(folder) / "bytecode")
        import vllm

        if injection:
            refusals = refusals_of_counters()
            fault.enter_context(planted(injection))
        llm = start_engine(Path(folder), seed)
        started_seconds = time.monotonic()
        try:
            finished = run_waves(llm, waves, seed, out)
            counter_values = counters(llm)
            latency_sums = latencies(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
    return {
        "engine": "vllm",
        "version": vllm.__version__,
        "injection": injection.name if injection else None,
        "seed": seed,
        "start_seconds": round(started_seconds - began_seconds, 3),
        "elapsed_seconds": round(time.monotonic() - began_seconds, 3),
        "requests": [summary(output) for output in finished],
        "counters": counter_values,
        "latencies": latency_sums,
        "refused_by_the_engines_counters": refusals,
    }


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, write RESULT.json; returns 0, or 1 with a traceback if the engine failed."""
    parser = argparse.ArgumentParser(prog="python -m kvledger.audit.demo.engine")
    parser.add_argument("--output", type=Path, metavar="RESULT.json")
    parser.add_argument("--inject", metavar="NAME", choices=["list", *workload.INJECTIONS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-process", action="store_true", help="run EngineCore in this process")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="file for what vLLM prints")
    options = parser.parse_args(arguments)
    if options.inject == "list":
        for listed in workload.INJECTIONS.values():
            print(f"{listed.name:20} {listed.says}")
        return 0
    if options.output is None:
        parser.error("--output is needed")
    injection = workload.INJECTIONS[options.inject] if options.inject else None
    in_process = options.in_process or injection is not None  # an injection patches this process
    with output_to(options.log) as (stdout, stderr):
        try:
            result = run(options.seed, injection, in_process, stdout)
        except Exception:
            traceback.print_exc(file=stderr)
            return 1
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
