"""Runs the real vLLM engine through the demo's workload and writes what the engine itself says.

`python -m kvledger.audit.demo.engine --output RESULT.json`. Here: the environment, the engine, the
loop, and RESULT.json. Not here: any observation. kvledger's plugin comes in as it does in any vLLM
process, by its entry point, when KVLEDGER_DIR says so; what the engine counted stands in the result
so that the two can be compared.

Standard output carries one JSON line a finished request, `{"done": 3, "of": 29}`, and nothing else:
what vLLM and its C++ parts print goes to a log file. vLLM is imported late, after the environment.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from . import workload
from .injections import INJECTIONS, Injection
from .model import write_model
from .process import quiet, settle_environment, share_bytecode

WORDS = ("prompt", "cache", "preempt", "external", "generation")
"""A counter belongs in the result when its name has one of these."""

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The worker within EngineCore. By its name "uni" the CPU platform would turn it into a process."""


def start_engine(folder: Path, seed: int) -> Any:
    """A real engine on the CPU, with too few blocks and a connector that saves under `folder`."""
    from vllm import LLM, ModelRegistry
    from vllm.config import KVTransferConfig
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    # A class known by name only is inspected in a process of its own, a second import of vLLM.
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    store = folder / "store"
    store.mkdir()
    return LLM(
        model=str(write_model(folder / "model", seed)),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=seed,
        enforce_eager=True,
        distributed_executor_backend=EXECUTOR,
        disable_log_stats=False,
        enable_prefix_caching=True,
        block_size=workload.BLOCK_TOKENS,
        num_gpu_blocks_override=workload.BLOCKS,
        max_model_len=workload.SEQUENCE_TOKENS,
        max_num_seqs=workload.RUNNING_REQUESTS,
        enable_chunked_prefill=True,
        max_num_batched_tokens=workload.STEP_TOKENS,
        long_prefill_token_threshold=workload.CHUNK_TOKENS,
        scheduler_reserve_full_isl=False,  # or no request would be preempted in mid-prefill
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": str(store)},
        ),
    )


def add_wave(engine: Any, wave: workload.Wave, seed: int) -> None:
    """Adds a wave's requests in one go, so that the first step sees them all.

    A core in a process of its own would begin with the first to arrive, and the schedule would
    depend on the machine's load: it is paused meanwhile.
    """
    from vllm import SamplingParams

    core = engine.engine_core
    pausing = hasattr(core, "call_utility")
    if pausing:
        core.call_utility("pause_scheduler", "keep", False)
    for ask in wave.asks:
        engine.add_request(
            ask.id,
            {"prompt_token_ids": ask.token_ids(seed)},
            SamplingParams(temperature=0.0, max_tokens=ask.output_tokens, ignore_eos=True, detokenize=False),
        )
    if pausing:
        core.call_utility("resume_scheduler")


def run_waves(llm: Any, waves: tuple[workload.Wave, ...], seed: int, out: TextIO) -> list[Any]:
    """Drives the engine step by step through `waves`; says on `out` how far it has come."""
    finished: list[Any] = []
    expected, done = sum(len(wave.asks) for wave in waves), 0
    for wave in waves:
        if wave.reset:
            assert llm.reset_prefix_cache(), "a reset between waves finds every block free"
        add_wave(llm.llm_engine, wave, seed)
        leaving = {ask.given_up_at: ask.id for ask in wave.asks if ask.given_up_at}
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                ended = int(output.finished)
                if output.finished:
                    finished.append(output)
                if output.request_id in leaving:
                    llm.llm_engine.abort_request([leaving.pop(output.request_id)])
                    ended += 1
                if ended:
                    done += ended
                    print(json.dumps({"done": done, "of": expected}), file=out, flush=True)
    return finished


def told(output: Any) -> dict[str, Any]:
    """One finished request; its answer as a digest only."""
    token_ids = list(output.outputs[0].token_ids)
    return {
        "id": output.request_id,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(token_ids),
        "digest": hashlib.sha256(json.dumps(token_ids).encode()).hexdigest(),
    }


def counters(llm: Any) -> dict[str, float]:
    """The engine's own Prometheus counters, labels flattened: `name{source="local_compute"}`."""
    from vllm.v1.metrics.reader import Counter

    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not isinstance(metric, Counter) or not any(word in metric.name for word in WORDS):
            continue
        labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
        shown = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
        found[f"{metric.name}{{{shown}}}" if shown else metric.name] = metric.value
    return found


def run(seed: int, injection: Injection | None, in_process: bool, out: TextIO) -> dict[str, Any]:
    """The whole run, from the model to what goes into RESULT.json."""
    began_seconds = time.monotonic()
    refusals: list[str] = []
    waves = injection.waves if injection else workload.CROWDED
    settle_environment(in_process=in_process)
    with tempfile.TemporaryDirectory(prefix="kvledger-demo-") as folder:
        if not in_process:
            share_bytecode(Path(folder) / "bytecode")
        import vllm

        if injection:
            injection.apply(refusals)
        llm = start_engine(Path(folder), seed)
        started_seconds = time.monotonic()
        try:
            finished = run_waves(llm, waves, seed, out)
            counted = counters(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
    return {
        "engine": "vllm",
        "version": vllm.__version__,
        "injection": injection.name if injection else None,
        "seed": seed,
        "start_seconds": round(started_seconds - began_seconds, 3),
        "elapsed_seconds": round(time.monotonic() - began_seconds, 3),
        "requests": [told(output) for output in finished],
        "counters": counted,
        "refused_by_the_engines_counters": refusals,
    }


def main(arguments: list[str] | None = None) -> int:
    """Parses, settles the environment, runs, writes; 0, or 1 with the engine's last words."""
    parser = argparse.ArgumentParser(prog="python -m kvledger.audit.demo.engine")
    parser.add_argument("--output", type=Path, metavar="RESULT.json")
    parser.add_argument("--inject", metavar="NAME", choices=["list", *INJECTIONS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-process", action="store_true", help="no process for EngineCore")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what vLLM prints")
    asked = parser.parse_args(arguments)
    if asked.inject == "list":
        for listed in INJECTIONS.values():
            print(f"{listed.name:20} {listed.summary}")
        return 0
    if asked.output is None:
        parser.error("--output is needed")
    injection = INJECTIONS[asked.inject] if asked.inject else None
    in_process = asked.in_process or injection is not None  # an injection patches this process
    with quiet(asked.log) as (stdout, stderr):
        try:
            result = run(asked.seed, injection, in_process, stdout)
        except Exception:
            traceback.print_exc(file=stderr)
            return 1
    asked.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
