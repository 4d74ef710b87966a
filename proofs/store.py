"""Serves sessions with a connector's store and without, and compares what `summary store` says with both.

Usage: make proof NAME=store ARGS="[--rounds N]"

A real vLLM engine on the CPU, with OffloadingConnector and a worker that copies between tensors. Sessions
come in turn, and their prompts outgrow the prefix cache, so that a session that comes again reads the store.
The same requests are served without a connector. What the store is said to have saved is compared with the
tokens, and the seconds of all steps, that the engine without it took more. Each run is a process of its own;
the runs alternate.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

BLOCK = 32
SESSIONS = 24
PROMPT = 12 * BLOCK
TURNS = 4
POOL_BLOCKS = 8 * 13
OFFLOADING = {
    "spec_name": "CopyingSpec",
    "spec_module_path": "kvledger.audit.conformance.cpu_offloading",
    "cpu_bytes_to_use": 1 << 30,
}


def serve(folder: Path, store: bool) -> None:
    """Serve all sessions in this process, which writes a journal in ``folder``."""
    from kvledger.audit.demo import model
    from kvledger.audit.demo.engine import settle_environment, tiny_engine

    settle_environment(in_process=True)
    os.environ.update(KVLEDGER_DIR=str(folder / "journal"), KVLEDGER_LEVEL="blocks")
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig

    model.LAYERS, model.HIDDEN, model.INTERMEDIATE = 8, 512, 2048  # so that a step computes for long
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=OFFLOADING
    )
    llm = tiny_engine(
        model.write_model(folder / "model", 0),
        num_gpu_blocks_override=POOL_BLOCKS,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        disable_log_stats=False,
        kv_transfer_config=transfer if store else None,
    )
    dice = random.Random(1)
    prompts = [[dice.randrange(2, 500) for _ in range(PROMPT)] for _ in range(SESSIONS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    for turn in range(TURNS):
        asked = [{"prompt_token_ids": [*prompt, *range(2, 10 + turn)]} for prompt in prompts]
        llm.generate(asked, sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()


def run(store: bool) -> dict[str, Any]:
    """One run in a process of its own: tokens computed, seconds of its steps, and the store's return."""
    from kvledger.audit.replay.journals import audit_paths
    from kvledger.audit.replay.observers import Steps
    from kvledger.exporters.reports import block_use as report

    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "proofs.store", "--serve", scratch, *(["--store"] if store else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        places = [Path(scratch) / "journal"]
        audit = audit_paths(places, (Steps,))
        (returned,) = report.store(places).engines or (None,)
        (engine,) = audit.engines
        totals = audit.totals
        return {
            "verdict": audit.verdict,
            "computed": totals.first_prompt + sum(totals.rework.values()),
            "seconds": engine.of(Steps).sums.busy_us / 1e6,
            "return": returned,
            "sentence": "" if returned is None else report.sentence(returned),
        }


def _known(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds:.2f}"


def main() -> int:
    """Run the proof, or one of its engines."""
    options = argparse.ArgumentParser(prog="make proof NAME=store")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--store", action="store_true", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.serve:
        serve(asked.serve, asked.store)
        return 0
    rounds = [(run(True), run(False)) for _ in range(asked.rounds)]
    print("| round | stored | read | saved, s | waited, s | without the store: tokens more | seconds more |")
    print("|---|---|---|---|---|---|---|")
    right = True
    for number, (with_store, without) in enumerate(rounds, 1):
        returned = with_store["return"]
        more = without["computed"] - with_store["computed"]
        loaded = sum(tier.tokens for tier in returned.tiers)
        right &= more == loaded and {"clean"} == {with_store["verdict"], without["verdict"]}
        print(
            f"| {number} | {returned.stored_tokens:,} | {returned.read_tokens:,} | "
            f"{_known(returned.saved_seconds)} | {returned.waited_seconds:.2f} | {more:,} "
            f"({loaded:,} were loaded) | {without['seconds'] - with_store['seconds']:.2f} |"
        )
    known = [with_store["return"].saved_seconds for with_store, _ in rounds]
    saved = median(each for each in known if each is not None)
    took = median(without["seconds"] - with_store["seconds"] for with_store, without in rounds)
    print(f"\nMedian: said to have saved {saved:.2f} s; without the store, steps took {took:.2f} s more.")
    print(rounds[0][0]["sentence"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
