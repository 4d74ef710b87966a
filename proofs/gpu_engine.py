"""Runs a real vLLM engine on a GPU at each level in turn, and prints the tables of docs/gpu.md.

    python proofs/gpu_engine.py [--large] [--turns] [--rounds N] [--requests N]

Each run is a process of its own: the demo's workload, then a larger one twice, so that the second time most
prompts are cached. All runs must give equal outputs. With ``--large`` the model has the shape of Qwen3-8B and
vLLM's dummy weights, and the demo's workload is left out. With ``--turns`` one engine serves the larger
workload at all levels in turn: the plugin's functions begin to observe it before a turn, and end after it. At
level content, a last request hits blocks of which the proof has changed one layer, and the audit must name
it. Needs vLLM 0.20 or later and a GPU; in any other place the script says in one sentence what is missing.
``--device cpu`` runs it on a CPU.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

LEVELS = ("off", "tokens", "blocks", "content")
WARM_REQUESTS = 8
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


def serve(folder: Path, options: argparse.Namespace) -> None:
    """Run the workloads on one engine in this process, and report the results."""
    from vllm import LLM

    from kvledger.audit.demo import workload
    from kvledger.audit.demo.engine import run_waves
    from kvledger.audit.demo.model import write_model

    if options.large:
        model = write_large_model(folder / "model")
        size: dict[str, Any] = {"load_format": "dummy", "max_model_len": 1024}
        size |= {"num_gpu_blocks_override": 6000, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    else:
        model = write_model(folder / "model", 0)
        size = {"num_gpu_blocks_override": 96, "max_model_len": 512}
        size |= {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    llm = LLM(model=str(model), skip_tokenizer_init=True, seed=0, block_size=32, **size)
    work = Workload(llm, options)
    if options.turns:
        work.twice([])
        take_turns(work, folder / "journals", options)
    else:
        outputs = []
        if not options.large:
            with (folder / "progress.json").open("w") as progress:
                outputs = run_waves(llm, workload.DEFAULT_WAVES, 0, progress)
        work.generate(WARM_REQUESTS)
        result = work.twice(list(outputs))
        if options.plant:
            work.read_changed()
        report(os.environ.get("KVLEDGER_LEVEL", "off"), result)
    llm.llm_engine.engine_core.shutdown()


def report(level: str, result: dict[str, Any]) -> None:
    """Print the result of a run or a turn as a line of JSON, for :func:`run`."""
    print(json.dumps({"level": level, **result}), flush=True)


class Workload:
    """The larger workload, on one engine of this process."""

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        from vllm import SamplingParams

        from kvledger.audit.demo.model import VOCABULARY_TOKENS

        self.llm = llm
        self._prompts = [{"prompt_token_ids": ids} for ids in prompts(options.requests, VOCABULARY_TOKENS)]
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=256 if options.large else 64, ignore_eos=True, detokenize=False
        )

    def generate(self, requests: int | None = None) -> list[Any]:
        """The outputs of the first so many requests."""
        return list(self.llm.generate(self._prompts[:requests], self._sampling, use_tqdm=False))

    def twice(self, outputs: list[Any]) -> dict[str, Any]:
        """Serve all requests from an empty prefix cache, then again; the digest is of ``outputs`` too."""
        if not self.llm.reset_prefix_cache():
            raise SystemExit("The prefix cache could not be emptied.")
        speeds = []
        for _ in range(2):
            began = time.perf_counter()
            generated = self.generate()
            seconds = time.perf_counter() - began
            speeds.append(sum(len(output.outputs[0].token_ids) for output in generated) / seconds)
            outputs += generated
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        digest = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
        distinct = [len({tuple(ids) for ids in tokens}), len({token for ids in tokens for token in ids})]
        return {"digest": digest, "tokens_a_second": speeds, "distinct_outputs_and_tokens": distinct}

    def read_changed(self) -> None:
        """Change a layer of all blocks, and let a last request hit some of them."""
        change_a_layer(self.llm)
        self.llm.generate(self._prompts[-1:], self._sampling, use_tqdm=False)


def take_turns(work: Workload, journals: Path, options: argparse.Namespace) -> None:
    """Report each turn of each level; the order is reversed from round to round."""
    for number in range(options.rounds):
        for level in options.levels[:: 1 if number % 2 == 0 else -1]:
            journal = journals / f"{level}-{number}"
            with observed(work.llm, level, journal):
                result = work.twice([])
            report(level, result | {"journal": str(journal)})
    if "content" in options.levels:
        with observed(work.llm, "content", journals / "planted"):
            result = work.twice([])
            work.read_changed()
        report("planted", result | {"journal": str(journals / "planted")})


@contextmanager
def observed(llm: Any, level: str, journal: Path) -> Iterator[None]:
    """Observe a running engine as the plugin does, into journals of this turn."""
    if level == "off":
        yield
        return
    from kvledger.audit.engines.content.attached import worker_of
    from kvledger.audit.entry import content_plugin, plugin

    core = llm.llm_engine.engine_core.engine_core
    os.environ |= {"KVLEDGER_DIR": str(journal), "KVLEDGER_LEVEL": level}
    contents: Any = content_plugin.observe_contents(worker_of(core)) if level == "content" else None
    observer: Any = plugin.observe(core.scheduler)
    del os.environ["KVLEDGER_DIR"], os.environ["KVLEDGER_LEVEL"]
    if observer is None or (contents is None) == (level == "content"):
        raise SystemExit(f"kvledger can't observe this engine at level {level}.")
    yield
    if contents is not None:
        contents.stop("detached")
        contents._sink.close()
    observer.stop("detached")
    observer.log.sink.close()


def change_a_layer(llm: Any) -> None:
    """Change the KV of the last layer in all blocks, as a kernel that writes to wrong places would."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    runner.kv_caches[-1].add_(0.25)


def run(level: str, number: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One run in a process of its own: its result, or those of its turns, with the verdicts."""
    place = folder / f"{level}-{number}{'-planted' * options.plant}"
    place.mkdir(parents=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVLEDGER_")}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if options.device == "cpu":
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    if level in LEVELS[1:]:
        environment |= {"KVLEDGER_DIR": str(place / "journal"), "KVLEDGER_LEVEL": level}
    command = [sys.executable, __file__, "--serve", str(place), "--requests", str(options.requests)]
    command += ["--device", options.device, *["--large"] * options.large, *["--plant"] * options.plant]
    command += ["--rounds", str(options.rounds), "--levels", *options.levels, *["--turns"] * options.turns]
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with (place / "log").open("wb") as log, process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.startswith(b'{"level"'):
                results.append(json.loads(line))
                seconds = time.monotonic() - began
                print(f"{seconds:.0f} s {line.decode().strip()}", file=sys.stderr, flush=True)
    if process.returncode:
        last = (place / "log").read_text(errors="replace").splitlines()[-40:]
        raise SystemExit("\n".join([*last, f"The run at level {level} failed."]))
    journals = [place / "journal" if level in LEVELS else Path(result["journal"]) for result in results]
    with ThreadPoolExecutor() as pool:
        verdicts = list(pool.map(verdict, journals))
    for result, words in zip(results, verdicts, strict=True):
        result["verdict"] = words
    print(json.dumps(verdicts), file=sys.stderr, flush=True)
    return results


def verdict(journal: Path) -> str:
    """The first line that ``kvledger audit`` prints; "-" at level off."""
    if not journal.exists():
        return "-"
    command = [sys.executable, "-m", "kvledger", "audit", str(journal)]
    path = [str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "no journal")


def table(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The rows of docs/gpu.md: medians, and the least and the largest of several runs."""
    rows = [
        "| level | tokens a second | of off | again, with prompts cached | of off | outputs | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    digests = {result["digest"] for runs in results.values() for result in runs}
    for level, runs in results.items():
        cells = [level]
        for which in (0, 1):
            speeds = [result["tokens_a_second"][which] for result in runs]
            bare = [result["tokens_a_second"][which] for result in results["off"]]
            shares = [speed / off for speed, off in zip(speeds, bare, strict=True)]
            cells += [spread(speeds, ",.0f"), spread(shares, ".3f")]
        cells.append("equal" if len(digests) == 1 else ", ".join(sorted({run["digest"] for run in runs})))
        cells.append("; ".join(sorted({result["verdict"] for result in runs})))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def spread(figures: list[float], form: str) -> str:
    """The median, and the least and the largest figure."""
    words = f"{median(figures):{form}}"
    return words if len(figures) == 1 else f"{words} ({min(figures):{form}} to {max(figures):{form}})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table: 0; 1: outputs differ or the planted change is not found; 2: something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--large", action="store_true", help="a model of the shape of Qwen3-8B")
    parser.add_argument("--turns", action="store_true", help="one engine, observed at all levels in turn")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each level (default 3)")
    parser.add_argument("--folder", type=Path, help="a folder that keeps the logs and journals of the runs")
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
        serve(options.serve, options)
        return 0
    results: dict[str, list[dict[str, Any]]] = {level: [] for level in options.levels}
    planted: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvledger-gpu-") as temporary:
        folder = options.folder or Path(temporary)
        if options.turns:
            for result in run("turns", 0, options, folder):
                results.get(result["level"], planted).append(result)
        else:
            for number in range(options.rounds):
                for level in options.levels:
                    results[level] += run(level, number, options, folder)
        print("\n".join(table(results)), flush=True)
        if "content" in options.levels and not options.turns:
            options.plant = True
            planted = run("content", 0, options, folder)
        for result in planted:
            print(f"\nA layer changed before the last request: {result['verdict']}")
    found = all(result["verdict"].startswith("violated") for result in planted)
    equal = len({run["digest"] for runs in results.values() for run in runs}) == 1
    return 0 if equal and found else 1


if __name__ == "__main__":
    sys.exit(main())
