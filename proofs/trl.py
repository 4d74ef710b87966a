"""Trains with TRL's GRPO beside a colocated engine, and names each step's tokens of older weights.

Usage: make proof NAME=trl ARGS="[--steps N]"

Trains twice, 50 steps each: as TRL is shipped, and with its reset of the prefix cache left out and a learning
rate of 1e-2. TRL compares the log-probabilities of each output token with those of its own model; a token is
wrong if they differ by more than 1e-4. Exits with 1 if the first run has a suspect token, or a wrong token of
the second is not suspect.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SAMPLES, PROMPT_TOKENS, OUTPUT_TOKENS = 2, 4, 140, 16
THRESHOLD = 1e-4
HEAD = """\
| run | updates | tokens | wrong | suspect | missed | false | unknown | older prompt tokens | mean ratio |
|---|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    """Train both ways, each in a process of its own with TRL, and print a row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--train", choices=("shipped", "no reset"))
    options = parser.parse_args()
    if options.train:
        train(options.steps, reset=options.train == "shipped")
        return 0
    import releases

    releases.build([releases.TRL])
    environ = releases.environ(releases.TRL)
    environ["PYTHONPATH"] = os.pathsep.join([environ["PYTHONPATH"], str(ROOT / "src"), str(ROOT)])
    print(HEAD)
    failed = False
    for run in ("shipped", "no reset"):
        command = [sys.executable, "-m", "proofs.trl", "--steps", str(options.steps), "--train", run]
        with tempfile.NamedTemporaryFile("w+") as log:
            done = subprocess.run(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
            lines = Path(log.name).read_text().splitlines()
        if done.returncode:
            sys.exit("\n".join([*lines[-30:], f"kvledger: the run {run!r} failed, see above"]))
        result = json.loads(lines[-1])
        print(row(run, result["steps"], result["updates"]), flush=True)
        print("".join(f"  {line}\n" for line in [*older_steps(result["steps"]), *result["findings"]]), end="")
        total = sums(result["steps"])
        failed |= total["missed"] > 0 or (run == "shipped" and total["suspect"] > 0)
    return int(failed)


def judged(differences: list[float], suspect: list[bool], unknown: list[bool]) -> dict[str, int]:
    """What both judges say of the outputs of one request."""
    wrong = [abs(difference) > THRESHOLD for difference in differences]
    both = list(zip(wrong, suspect, unknown, strict=True))
    return {
        "tokens": len(both),
        "wrong": sum(wrong),
        "suspect": sum(suspect),
        "missed": sum(bad and not old and not unsure for bad, old, unsure in both),
        "false": sum(old and not bad for bad, old, _ in both),
        "unknown": sum(unknown),
    }


def sums(steps: list[dict[str, Any]]) -> dict[str, int]:
    """The counts of all steps."""
    return {key: sum(step[key] for step in steps) for key in steps[0] if key != "ratio"}


def row(run: str, steps: list[dict[str, Any]], updates: int) -> str:
    """One line of the table. The ratio is that of the step with the least and with the most."""
    cells = [f"{value:,}" for value in sums(steps).values()]
    ratios = [step["ratio"] for step in steps]
    return f"| {run} | {updates} | " + " | ".join(cells) + f" | {min(ratios):.3f} to {max(ratios):.3f} |"


def older_steps(steps: list[dict[str, Any]]) -> list[str]:
    """A line for each step whose outputs read KV of older weights."""
    return [
        f"step {number}: {step['older']:,} prompt tokens and {step['suspect']:,} of {step['tokens']:,} "
        f"output tokens over older KV, {step['wrong']:,} wrong, ratio {step['ratio']:.3f}"
        for number, step in enumerate(steps)
        if step["suspect"]
    ]


def model_folder(folder: Path) -> Path:
    """A tiny model with a tokenizer of one word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from kvledger.audit.demo.model import VOCABULARY_TOKENS, write_model

    path = write_model(folder / "model", 0)
    words = Tokenizer(models.WordLevel({word(n): n for n in range(VOCABULARY_TOKENS)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": word(0), "eos_token": word(1), "pad_token": word(2), "unk_token": word(0)}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    return path


def word(token: int) -> str:
    """The text of a token; no word begins with another."""
    return f"w{token:03}"


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of outputs with an even number."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def train(steps: int, *, reset: bool) -> None:
    """Train, and print what each step had, as JSON."""
    from kvledger.audit.demo.engine import settle_environment

    settle_environment(in_process=True)
    import torch
    from datasets import Dataset
    from proofs.weights.subject import text
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation
    from vllm.model_executor.layers import utils

    import kvledger

    def keep_weight(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep_weight  # a packed weight can't be loaded into
    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32", block_size=32)
    folder = Path(tempfile.mkdtemp())
    path = model_folder(folder)
    prompts = [" ".join(map(word, text(seed, PROMPT_TOKENS))) for seed in range(PROMPTS)]
    config = GRPOConfig(
        output_dir=str(folder / "trained"),
        max_steps=steps,
        learning_rate=1e-6 if reset else 1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=OUTPUT_TOKENS,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=1,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(path),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
    )
    llm = trainer.vllm_generation.llm
    if not reset:
        llm.reset_prefix_cache = lambda *_, **__: True
    audit = kvledger.attach(llm, level="blocks")
    found = watch(trainer, audit)
    trainer.train()
    ratios = [
        log["sampling/importance_sampling_ratio/mean"] for log in trainer.state.log_history if "loss" in log
    ]
    for step, ratio in zip(found, ratios, strict=True):
        step["ratio"] = ratio
    findings = [f"{each.id}: {each.findings}" for each in audit.found]
    findings += [each.message for each in audit.violations[:1]]
    updates = audit.ledger.weights.version
    print("\n" + json.dumps({"steps": found, "updates": updates, "findings": findings}))


def watch(trainer: Any, audit: Any) -> list[dict[str, Any]]:
    """The counts of each step, while it trains."""
    llm, score = trainer.vllm_generation.llm, trainer._generate_and_score_completions
    generate, names = llm.generate, list[str]()
    steps: list[dict[str, Any]] = []

    def generating(*args: Any, **named: Any) -> Any:
        outputs = generate(*args, **named)
        names[:] = [output.request_id for output in outputs]
        return outputs

    def scoring(inputs: Any) -> Any:
        scored = score(inputs)
        differences = scored["old_per_token_logps"] - scored["sampling_per_token_logps"]
        lengths = scored["completion_mask"].sum(dim=1).tolist()
        counts = []
        for name, values, length in zip(names, differences.tolist(), lengths, strict=True):
            use = audit.weights(name)
            suspect, unknown = use.suspect_mask().tolist(), use.unknown_mask().tolist()
            counts.append(judged(values[:length], suspect[:length], unknown[:length]))
            now = use.output[0][2]
            counts[-1]["older"] = sum(end - start for start, end, _, oldest in use.prompt if oldest < now)
        steps.append({key: sum(each[key] for each in counts) for key in counts[0]})
        return scored

    llm.generate, trainer._generate_and_score_completions = generating, scoring
    return steps


if __name__ == "__main__":
    sys.exit(main())
