"""Compares predictions of `kvledger whatif` with real engines of half and of twice the size.

Usage: make proof NAME=whatif ARGS="[--blocks N] [--requests N] [--seed N] [--keep DIR]"

Runs the same conversations three times on the real vLLM engine with a tiny model on this CPU: with N blocks,
with half and with twice as many. The first journal predicts the hit rates of the other two runs. Exits with
1 if a prediction is off by more than two points.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from kvledger.audit.analysis.whatif import TRUSTED_POINTS, Options, WhatIf
from kvledger.audit.demo.engine import tiny_engine
from kvledger.audit.demo.model import VOCABULARY_TOKENS, write_model
from kvledger.audit.demo.process import output_to, settle_environment
from kvledger.exporters.reports.whatif import study

RUNNING = 4
SEQUENCE_TOKENS = 512
STEPS_BETWEEN_REQUESTS = 8
SYSTEM_PROMPTS = 10
CONVERSATIONS = 25

Prompt = tuple[list[int], int]
"""Token ids, and how many output tokens the request gets."""


def conversations(requests: int, seed: int) -> list[Prompt]:
    """Prompts of conversations that go on, stop, and share system prompts of uneven popularity."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY_TOKENS) for _ in range(count)]

    systems = [tokens(rng.randrange(32, 160)) for _ in range(SYSTEM_PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(SYSTEM_PROMPTS)]
    open_conversations: list[list[int]] = []
    prompts: list[Prompt] = []
    for _ in range(requests):
        if len(open_conversations) < CONVERSATIONS or rng.random() < 0.3:
            open_conversations.append(list(rng.choices(systems, weights)[0]))
        if len(open_conversations) > CONVERSATIONS:
            open_conversations.pop(rng.randrange(len(open_conversations)))
        history = rng.choice(open_conversations)
        history += tokens(rng.randrange(10, 60))
        output = rng.randrange(4, 24)
        if len(history) + output > SEQUENCE_TOKENS - 8:
            open_conversations.remove(history)
            del history[SEQUENCE_TOKENS - 40 :]
        prompts.append((list(history), output))
    return prompts


def run_engine(folder: Path, blocks: int, prompts: list[Prompt]) -> None:
    """Run the engine in this process; its journal goes to KVLEDGER_DIR."""
    settle_environment(in_process=True)
    from vllm import SamplingParams

    llm = tiny_engine(
        write_model(folder / f"model-{blocks}", 0),
        num_gpu_blocks_override=blocks + 1,  # one is the null block
        max_model_len=SEQUENCE_TOKENS,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=SEQUENCE_TOKENS,
    )
    engine = llm.llm_engine
    for number, (token_ids, output) in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), {"prompt_token_ids": token_ids}, sampling)
        for _ in range(STEPS_BETWEEN_REQUESTS):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    engine.engine_core.shutdown()


def recorded(folder: Path, blocks: int, arguments: argparse.Namespace) -> Path:
    """The journal of a run with this many blocks, in a process of its own."""
    journal = folder / f"blocks-{blocks}"
    environment = os.environ | {"KVLEDGER_DIR": str(journal), "KVLEDGER_LEVEL": "blocks"}
    command = [sys.executable, __file__, "--run", str(blocks), "--keep", str(folder)]
    command += ["--requests", str(arguments.requests), "--seed", str(arguments.seed)]
    subprocess.run(command, env=environment, check=True)
    return journal


def compare(folder: Path, arguments: argparse.Namespace) -> bool:
    """Print the table; whether each prediction is within the trusted range."""
    present = arguments.blocks
    sizes = [present // 2, present, 2 * present]
    journals = {size: recorded(folder, size, arguments) for size in sizes}
    [predicted] = study([journals[present]], Options(blocks=sizes)).engines
    by_size = {point.blocks: point.hit_share for point in predicted.curve}
    print(f"{predicted.engine}: {predicted.requests} requests, {predicted.prompt_tokens:,} prompt tokens")
    print("blocks    predicted   recorded   difference")
    worst = 0.0
    for size in sizes:
        share = measured(study([journals[size]], Options(blocks=[size])).engines[0])
        points = 100 * (by_size[size] - share)
        worst = max(worst, abs(points))
        mark = "  (the run that predicts)" if size == present else ""
        print(f"{size:6,} {100 * by_size[size]:10.2f} % {100 * share:8.2f} % {points:+11.2f}{mark}")
    return worst <= TRUSTED_POINTS


def measured(result: WhatIf) -> float:
    """The recorded hit rate of a run."""
    return result.calibration.recorded_hit_tokens / result.prompt_tokens


def main() -> int:
    """Run the engines and compare, or run one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=160)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the journals")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        with output_to(arguments.keep / f"engine-{arguments.run}.log"):
            run_engine(arguments.keep, arguments.run, conversations(arguments.requests, arguments.seed))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvledger-whatif-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return 0 if compare(folder, arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
