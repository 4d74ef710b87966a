"""What the real engine puts out observed, against the same engine bare.

One engine with the demo's tiny model, in this process, generates the same batch again and again;
it is observed every other time, as the plugin would observe it. The interpreter has specialised its
code for a class as it was, so the first batch after a change is not timed, of neither. The smaller
the model, the larger our share: this is the worst case, a step of one or two milliseconds.
"""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.scheduler import Progress, observe
from benchmarks.stats import Estimate, estimate

from kvledger.audit.demo.engine import EXECUTOR
from kvledger.audit.demo.model import MAX_POSITIONS, VOCABULARY_TOKENS, write_model

REQUESTS = 32
PROMPT_TOKENS = 48
OUTPUT_TOKENS = 64


def measure(rounds: int, folder: Path, progress: Progress) -> Estimate:
    """Generated tokens per second, observed over bare, in ``rounds`` pairs of batches."""
    llm = _engine(folder)
    journals = folder / "journals"
    try:
        _settled_seconds(llm)
        gc.collect()
        gc.freeze()
        ratios = []
        for number in range(rounds):
            progress(f"engine: pair {number + 1} of {rounds}")
            if number % 2:
                bare, observed = _settled_seconds(llm), _observed_seconds(llm, journals)
            else:
                observed, bare = _observed_seconds(llm, journals), _settled_seconds(llm)
            ratios.append(bare / observed)
        return estimate(ratios)
    finally:
        gc.unfreeze()
        llm.llm_engine.engine_core.shutdown()


def _engine(folder: Path) -> Any:
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    # A class known by name only is inspected in a process of its own, a second import of vLLM.
    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    return LLM(
        model=str(write_model(folder / "model", 0)),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        distributed_executor_backend=EXECUTOR,
        disable_log_stats=False,
        block_size=32,
        num_gpu_blocks_override=4 * REQUESTS + 1,
        max_model_len=MAX_POSITIONS,
        max_num_seqs=REQUESTS,
    )


def _observed_seconds(llm: Any, folder: Path) -> float:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    observer, recorder = observe(scheduler, folder)
    try:
        return _settled_seconds(llm)
    finally:
        observer.stop("detached")
        recorder.close()


def _settled_seconds(llm: Any) -> float:
    """Of the second batch in a row."""
    _seconds(llm)
    return _seconds(llm)


def _seconds(llm: Any) -> float:
    """Wall seconds of one batch; every batch finds an empty prefix cache."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    gc.collect()
    dice = random.Random(0)
    vocabulary = range(2, VOCABULARY_TOKENS)
    prompts = [{"prompt_token_ids": dice.choices(vocabulary, k=PROMPT_TOKENS)} for _ in range(REQUESTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began
