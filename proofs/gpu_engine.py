"""Runs a real vLLM engine on a GPU at each level in turn, and prints the tables of docs/gpu.md.

    python proofs/gpu_engine.py [--large] [--rounds N] [--requests N]

Each run is a process of its own: the demo's workload, then a larger one twice, so that the second time most
prompts are cached. All runs must give equal outputs. With ``--large`` the model has the shape of Qwen3-8B and
vLLM's dummy weights, and the demo's workload is left out. At level content, a last request hits blocks of
which the proof has changed one layer, and the audit must name it. Needs vLLM 0.20 or later and a GPU; in any
other place the script says in one sentence what is missing. ``--device cpu`` runs it on a CPU.
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


def write_large_model(folder: Path) -> Path:
    """Write the configuration of a model of the shape of Qwen3-8B, without weights."""
    from kvledger.audit.demo.model import config

    folder.mkdir(parents=True)
    shape = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    words = {"max_position_embeddings": 40960, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config() | shape | words))
    return folder


def serve(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the workloads on one engine in this process; the outputs' digest, and tokens a second."""
    from vllm import LLM, SamplingParams

    from kvledger.audit.demo import workload
    from kvledger.audit.demo.engine import run_waves
    from kvledger.audit.demo.model import VOCABULARY_TOKENS, write_model

    if options.large:
        model = write_large_model(folder / "model")
        size: dict[str, Any] = {"load_format": "dummy", "max_model_len": 1024}
        size |= {"num_gpu_blocks_override": 6000, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    else:
        model = write_model(folder / "model", 0)
        size = {"num_gpu_blocks_override": 96, "max_model_len": 512}
        size |= {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    llm = LLM(model=str(model), skip_tokenizer_init=True, seed=0, block_size=32, **size)
    outputs = []
    if not options.large:
        with (folder / "progress.json").open("w") as progress:
            outputs += run_waves(llm, workload.DEFAULT_WAVES, 0, progress)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=256 if options.large else 64, ignore_eos=True, detokenize=False
    )
    larger = [{"prompt_token_ids": ids} for ids in prompts(options.requests, VOCABULARY_TOKENS)]
    llm.generate(larger[:8], sampling, use_tqdm=False)
    speeds = []
    for _ in range(2):
        began = time.perf_counter()
        generated = llm.generate(larger, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        speeds.append(sum(len(output.outputs[0].token_ids) for output in generated) / seconds)
        outputs += generated
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    if options.plant:
        change_a_layer(llm)
        llm.generate(larger[-1:], sampling, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return {"digest": digest, "tokens_a_second": speeds}


def change_a_layer(llm: Any) -> None:
    """Change the KV of the last layer in all blocks, as a kernel that writes to wrong places would."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.kv_caches[-1].add_(0.25)


def run(level: str, number: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run in a process of its own, and the verdict of its journal."""
    place = folder / f"{level}-{number}{'-planted' * options.plant}"
    place.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVLEDGER_")}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    if level != "off":
        environment |= {"KVLEDGER_DIR": str(place / "journal"), "KVLEDGER_LEVEL": level}
    command = [sys.executable, __file__, "--serve", str(place), "--requests", str(options.requests)]
    command += ["--device", options.device, *["--large"] * options.large, *["--plant"] * options.plant]
    began = time.monotonic()
    with (place / "log").open("wb") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        last = (place / "log").read_text(errors="replace").splitlines()[-40:]
        raise SystemExit("\n".join([*last, f"The run at level {level} failed."]))
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    result |= {"verdict": verdict(place / "journal") if level != "off" else "-"}
    print(f"{level} {time.monotonic() - began:.0f} s {json.dumps(result)}", file=sys.stderr, flush=True)
    return result


def verdict(journal: Path) -> str:
    """The first line that ``kvledger audit`` prints."""
    command = [sys.executable, "-m", "kvledger", "audit", str(journal)]
    path = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "no journal")


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The rows of docs/gpu.md."""
    bare = speeds(results["off"])
    rows = [
        "| level | tokens a second | of off | again, with prompts cached | of off | outputs | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    digests = {result["digest"] for runs in results.values() for result in runs}
    for level, runs in results.items():
        first, again = speeds(runs)
        equal = "equal" if len(digests) == 1 else ", ".join(sorted({result["digest"] for result in runs}))
        verdicts = "; ".join(sorted({result["verdict"] for result in runs}))
        rows.append(
            f"| {level} | {first:,.0f} | {first / bare[0]:.3f} | {again:,.0f} | {again / bare[1]:.3f} "
            f"| {equal} | {verdicts} |"
        )
    return rows


def speeds(runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Median tokens a second of the larger workload, the first time and again."""
    return (
        median(result["tokens_a_second"][0] for result in runs),
        median(result["tokens_a_second"][1] for result in runs),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table: 0; 1: outputs differ or the planted change is not found; 2: something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--large", action="store_true", help="a model of the shape of Qwen3-8B")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each level (default 3)")
    parser.add_argument("--requests", type=int, default=256, help="requests of the larger workload")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plant", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    lacking = missing(options.device)
    if lacking:
        print(lacking, file=sys.stderr)
        return 2
    if options.serve:
        (options.serve / "result.json").write_text(json.dumps(serve(options.serve, options)))
        return 0
    results: dict[str, list[dict[str, Any]]] = {level: [] for level in options.levels}
    found = True
    with tempfile.TemporaryDirectory(prefix="kvledger-gpu-") as folder:
        for number in range(options.rounds):
            for level in options.levels:
                results[level].append(run(level, number, options, Path(folder)))
        print("\n".join(table(results)), flush=True)
        if "content" in options.levels:
            options.plant = True
            planted = run("content", 0, options, Path(folder))["verdict"]
            print(f"\nA layer changed before the last request: {planted}")
            found = planted.startswith("violated")
    equal = len({run["digest"] for runs in results.values() for run in runs}) == 1
    return 0 if equal and found else 1


if __name__ == "__main__":
    sys.exit(main())
