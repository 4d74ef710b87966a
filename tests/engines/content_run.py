"""Runs one real engine on the CPU at level ``content`` and bare.

``python -m tests.engines.content_run NAME FILE`` runs the situation NAME.

FILE gets what was found, as JSON. Several engines in one process would share what vLLM patches, so there is
one process for each situation.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

SITUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "drafts": ({"speculative_config": NGRAM}, {}),
    "samples": ({}, {"n": 3, "temperature": 0.8}),
    "larger blocks": ({"block_size": 64, "num_gpu_blocks_override": 14}, {}),
}
"""By name: arguments of the engine, and of the sampling. A CPU has no seeds of requests in vLLM 0.32."""


def engine(folder: Path, **options: Any) -> Any:
    """A small engine with too few blocks, so that requests are preempted and prompts run in chunks."""
    from vllm import LLM, ModelRegistry
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    from kvledger.audit.demo.model import write_model

    ModelRegistry.register_model("Qwen3ForCausalLM", Qwen3ForCausalLM)
    settings: dict[str, Any] = {
        "block_size": 32,
        "num_gpu_blocks_override": 24,
        "scheduler_reserve_full_isl": False,
    }
    return LLM(
        model=str(write_model(folder / "model", 0)),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        distributed_executor_backend=EXECUTOR,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=96,
        **(settings | options),
    )


def prompts(count: int = 40) -> list[list[int]]:
    """Prompts of four families, which share prefixes of one to four blocks."""
    choose = random.Random(1)
    families = [[choose.randrange(3, 500) for _ in range(160)] for _ in range(4)]
    return [
        choose.choice(families)[: choose.choice((32, 64, 96, 128))]
        + [choose.randrange(3, 500) for _ in range(choose.randrange(1, 60))]
        for _ in range(count)
    ]


def generate(llm: Any, some: list[list[int]], **sampling: Any) -> list[list[int]]:
    """The outputs for these prompts."""
    from vllm import SamplingParams

    settings: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 24,
        "ignore_eos": True,
        "detokenize": False,
    }
    params = SamplingParams(**(settings | sampling))
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in some], params, use_tqdm=False)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def flip_bit(audit: Any) -> int:
    """Flip one bit of a sealed block; returns the block."""
    import torch

    watch = audit._observer.content.watch
    block = next(block for block, step in enumerate(watch.seals.steps) if step > 0)
    layer = watch.layout.groups[0].layers[1]
    numbers = torch.empty(0, dtype=layer.dtype).set_(layer.untyped_storage()).view(torch.int32)
    at = (layer[block].storage_offset() * layer.element_size()) // 4
    numbers[at + 5] ^= 1 << 9
    return int(block)


def result(audit: Any) -> dict[str, Any]:
    """What one audit found."""
    return {
        "verdict": audit.verdict,
        "findings": [
            (violation.id, violation.request, violation.figures, violation.story)
            for violation in audit.violations
            if violation.severity == "violation"
        ],
        "counts": audit.ledger.contents.counts,
        "excluded": audit.ledger.contents.excluded,
        "preemptions": audit.totals.preemptions,
    }


def run(name: str) -> dict[str, Any]:
    """Two waves observed and two bare; then, after ``plain``, a request over a block with a flipped bit."""
    import kvledger

    options, sampling = SITUATIONS[name]
    llm = engine(Path(tempfile.mkdtemp()), **options)
    with kvledger.attach(llm, level="content") as audit:
        observed = [generate(llm, prompts(), **sampling) for _ in range(2)]
    llm.reset_prefix_cache()
    bare = [generate(llm, prompts(), **sampling) for _ in range(2)]
    found = result(audit) | {"equal": observed == bare or "temperature" in sampling}
    if name == "plain":
        llm.reset_prefix_cache()
        prompt = prompts()[0]
        with kvledger.attach(llm, level="content") as changed:
            generate(llm, [prompt], max_tokens=4)
            block = flip_bit(changed)
            generate(llm, [[*prompt, 5, 6, 7]], max_tokens=4)
        found["flipped"] = result(changed) | {"block": block}
    return found


def main() -> None:
    """Run the situation that the command line names."""
    from kvledger.audit.demo.process import settle_environment

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    settle_environment(in_process=True)
    Path(sys.argv[2]).write_text(json.dumps(run(sys.argv[1])))


if __name__ == "__main__":
    main()
