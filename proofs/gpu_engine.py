"""Runs a real vLLM engine on a GPU at each level of observation in turn, and prints the table of docs/gpu.md.

    python proofs/gpu_engine.py [--model FOLDER] [--rounds N] [--requests N]

Each run is a process of its own: the demo's workload, then a larger one, on the demo's model or on the model
of ``--model``. All runs must give equal outputs. Needs vLLM 0.20 or later and a GPU; in any other
place the script says in one sentence what is missing. ``--device cpu`` runs it on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

LEVELS = ("off", "tokens", "blocks", "content")
OLDEST = (0, 20)


def missing(device: str) -> str | None:
    """One sentence about what this machine lacks; None if an engine can run."""
    place = importlib.util.find_spec("vllm")
    if place is None or place.origin is None:
        return "The script needs vLLM 0.20 or later, and vLLM is not installed here."
    version = str(runpy.run_path(str(Path(place.origin).parent / "_version.py")).get("__version__", ""))
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        return f"The script needs vLLM 0.20 or later, and vLLM {version} is installed here."
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "The script needs a GPU that torch can use, and there is none here."
    return None


def prompts(requests: int, vocabulary: int) -> list[list[int]]:
    """Token ids of the larger workload: prompts that share prefixes, in bursts that outgrow the cache."""
    dice = random.Random(1)
    prefixes = [[dice.randrange(2, vocabulary) for _ in range(128)] for _ in range(4)]
    own = [[dice.randrange(2, vocabulary) for _ in range(dice.randint(16, 192))] for _ in range(requests)]
    return [prefixes[number % 4] + tokens for number, tokens in enumerate(own)]


def serve(model: str, folder: Path, requests: int) -> dict[str, Any]:
    """Run both workloads on one engine in this process; the outputs' digest, and tokens a second."""
    from vllm import LLM, SamplingParams

    from kvledger.audit.demo import workload
    from kvledger.audit.demo.engine import run_waves
    from kvledger.audit.demo.model import VOCABULARY_TOKENS, write_model

    with (folder / "progress.json").open("w") as progress:
        llm = LLM(
            model=model or str(write_model(folder / "model", 0)),
            skip_tokenizer_init=True,
            seed=0,
            block_size=32,
            max_model_len=512,
            num_gpu_blocks_override=96,
            max_num_seqs=32,
            enable_chunked_prefill=True,
            max_num_batched_tokens=512,
        )
        outputs = run_waves(llm, workload.DEFAULT_WAVES, 0, progress)
        sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
        larger = [{"prompt_token_ids": ids} for ids in prompts(requests, VOCABULARY_TOKENS)]
        llm.generate(larger[:8], sampling, use_tqdm=False)
        began = time.perf_counter()
        outputs += llm.generate(larger, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    llm.llm_engine.engine_core.shutdown()
    return {"digest": digest, "tokens_a_second": sum(map(len, tokens[-len(larger) :])) / seconds}


def run(level: str, number: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run in a process of its own, and the verdict of its journal."""
    place = folder / f"{level}-{number}"
    place.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVLEDGER_")}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    if level != "off":
        environment |= {"KVLEDGER_DIR": str(place / "journal"), "KVLEDGER_LEVEL": level}
    command = [sys.executable, __file__, "--serve", str(place), "--requests", str(options.requests)]
    command += ["--model", options.model, "--device", options.device]
    with (place / "log").open("wb") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"The run at level {level} failed; {place / 'log'} says why.")
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    return result | {"verdict": verdict(place / "journal") if level != "off" else "-"}


def verdict(journal: Path) -> str:
    """The first line that ``kvledger audit`` prints."""
    command = [sys.executable, "-m", "kvledger", "audit", str(journal)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "no journal")


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The rows of docs/gpu.md."""
    bare = median(result["tokens_a_second"] for result in results["off"])
    rows = ["| level | tokens a second | of off | outputs | verdict |", "|---|---|---|---|---|"]
    digests = {result["digest"] for runs in results.values() for result in runs}
    for level, runs in results.items():
        speed = median(result["tokens_a_second"] for result in runs)
        equal = "equal" if len(digests) == 1 else ", ".join(sorted({result["digest"] for result in runs}))
        verdicts = "; ".join(sorted({result["verdict"] for result in runs}))
        rows.append(f"| {level} | {speed:,.0f} | {speed / bare:.3f} | {equal} | {verdicts} |")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table: 0; 1 if the outputs differ; 2 if something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="", help="a model folder; by default the demo's random model")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each level (default 3)")
    parser.add_argument("--requests", type=int, default=256, help="requests of the larger workload")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    lacking = missing(options.device)
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    if options.serve:
        result = serve(options.model, options.serve, options.requests)
        (options.serve / "result.json").write_text(json.dumps(result))
        return 0
    results: dict[str, list[dict[str, Any]]] = {level: [] for level in options.levels}
    with tempfile.TemporaryDirectory(prefix="kvledger-gpu-") as folder:
        for number in range(options.rounds):
            for level in options.levels:
                results[level].append(run(level, number, options, Path(folder)))
    print("\n".join(table(results)))
    return 0 if len({run["digest"] for runs in results.values() for run in runs}) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
