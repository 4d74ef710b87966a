"""Runs one real engine on the CPU at level ``content`` and bare.

``python -m tests.engines.content_run NAME FILE`` runs the situation NAME.

FILE gets what was found, as JSON. Several engines in one process would share what vLLM patches, so there is
one process for each situation.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.content_models import model_folder, write_adapter

from kvledger.audit.demo.engine import tiny_engine

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

RESET_STEPS = 40
"""Steps between two resets of the prefix cache. Every other reset also preempts the running requests."""

ABORT_STEPS = 7
"""Steps between two aborts."""

MOST_STEPS = 5000
"""Steps after which a situation has failed to come to its end."""


@dataclass(frozen=True)
class Situation:
    """One engine and its requests. A CPU has no seeds of requests in vLLM 0.32, so samples differ."""

    says: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of the engine."""
    sampling: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen3"
    """One of ``content_models.ARCHITECTURES``."""
    disturbed_by: tuple[str, ...] = ()
    """``resets`` and ``aborts``, while requests run."""
    groups_left_out: int = 0
    """Groups of KV caches that level ``content`` does not check."""
    workers: int = 1


STORE = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "CopyingSpec",
        "spec_module_path": "kvledger.audit.conformance.cpu_offloading",
        "cpu_bytes_to_use": 1 << 30,
    },
}
"""A store in the memory of the engine's worker."""

DUMMY = {"load_format": "dummy"}

SITUATIONS = {
    "plain": Situation("too few blocks, so requests are preempted; prompts run in chunks"),
    "drafts": Situation("three n-gram drafts a step", {"speculative_config": NGRAM}),
    "samples": Situation("three samples a request", sampling={"n": 3, "temperature": 0.8}),
    "larger blocks": Situation("blocks of 64 tokens", {"block_size": 64, "num_gpu_blocks_override": 14}),
    "adapters": Situation(
        "every other request uses one of two LoRA adapters",
        {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
    ),
    "resets": Situation("the prefix cache is reset while requests run", disturbed_by=("resets",)),
    "aborts": Situation("requests are aborted while they run", disturbed_by=("aborts",)),
    "drafts, resets and aborts": Situation(
        "the three at once", {"speculative_config": NGRAM}, disturbed_by=("resets", "aborts")
    ),
    "sliding window": Situation(
        "a layer of full attention, and two with a window of 64 tokens",
        DUMMY | {"num_gpu_blocks_override": 40},
        model="sliding",
    ),
    "a window's loads": Situation(
        "the same three layers, and a store (OffloadingConnector) that gives back what the pool has lost",
        DUMMY | {"num_gpu_blocks_override": 40, "kv_transfer_config": STORE},
        model="sliding",
    ),
    "states": Situation(
        "a layer with attention and one with a convolution, whose states (`MambaSpec`) are checked too",
        DUMMY | {"num_gpu_blocks_override": 60},
        model="convolution",
    ),
    "two workers": Situation(
        "tensor parallelism: each worker seals its shard, and a hit block counts twice",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        workers=2,
    ),
}


def engine(folder: Path, *, model: str = "qwen3", **options: Any) -> Any:
    """A small engine with too few blocks, so that requests are preempted and prompts run in chunks."""
    few = {"num_gpu_blocks_override": 24, "scheduler_reserve_full_isl": False, "max_model_len": 256}
    few |= {"max_num_seqs": 6, "max_num_batched_tokens": 96}
    return tiny_engine(model_folder(model, folder), **(few | options))


def prompts(count: int = 40) -> list[list[int]]:
    """Prompts of four families, which share prefixes of one to four blocks."""
    choose = random.Random(1)
    families = [[choose.randrange(3, 500) for _ in range(160)] for _ in range(4)]
    return [
        choose.choice(families)[: choose.choice((32, 64, 96, 128))]
        + [choose.randrange(3, 500) for _ in range(choose.randrange(1, 60))]
        for _ in range(count)
    ]


def generate(
    llm: Any, some: list[list[int]], *, disturb: Callable[[Any, int], None] | None = None, **sampling: Any
) -> list[list[int]]:
    """The outputs for these prompts. ``disturb`` is called with the engine after each step."""
    from vllm import SamplingParams

    settings: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": 24,
        "ignore_eos": True,
        "detokenize": False,
    }
    params = SamplingParams(**(settings | sampling))
    if disturb is not None:
        return _step_by_step(llm.llm_engine, some, params, disturb)
    more: dict[str, Any] = {}
    if llm.llm_engine.vllm_config.lora_config is not None:
        more["lora_request"] = _adapters(llm, some)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in some], params, use_tqdm=False, **more)
    return [list(choice.token_ids) for output in outputs for choice in output.outputs]


def _adapters(llm: Any, some: list[list[int]]) -> list[Any]:
    """No adapter, the first or the second for each prompt."""
    from vllm.lora.request import LoRARequest

    folder = Path(llm.llm_engine.model_config.model).parent
    adapters = []
    for number in (1, 2):
        path = folder / f"adapter-{number}"
        if not path.exists():
            write_adapter(path, number)
        adapters.append(LoRARequest(path.name, number, str(path)))
    choices = [None, adapters[0], None, adapters[1]]
    return [choices[number % 4] for number in range(len(some))]


def _step_by_step(
    live: Any, some: list[list[int]], params: Any, disturb: Callable[[Any, int], None]
) -> list[list[int]]:
    """The outputs of an engine that is disturbed after its steps; those of aborted requests are cut off."""
    outputs: dict[str, list[int]] = {f"r{number}": [] for number in range(len(some))}
    for name, tokens in zip(outputs, some, strict=True):
        live.add_request(name, {"prompt_token_ids": tokens}, params)
    for step in range(1, MOST_STEPS):
        if not live.has_unfinished_requests():
            return list(outputs.values())
        for output in live.step():
            outputs[output.request_id] = list(output.outputs[0].token_ids)
        disturb(live, step)
    raise RuntimeError(f"after {MOST_STEPS} steps {live.get_num_unfinished_requests()} requests are not done")


def disturbance(kinds: tuple[str, ...], count: int) -> Callable[[Any, int], None] | None:
    """What happens between the steps of an engine with ``count`` requests."""
    if not kinds:
        return None

    def disturb(live: Any, step: int) -> None:
        if "resets" in kinds and step % RESET_STEPS == 0:
            live.reset_prefix_cache(reset_running_requests=step % (2 * RESET_STEPS) == 0)
        if "aborts" in kinds and step % ABORT_STEPS == 0:
            live.abort_request([f"r{step // ABORT_STEPS * 3 % count}"])

    return disturb


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


def lose_a_window() -> list[int]:
    """From now on the first block of each load that has one of the last group arrives as zeros.

    Returns the list to which these blocks are appended.
    """
    from kvledger.audit.conformance.cpu_offloading import CopyingWorker

    load, lost = CopyingWorker.submit_load, list[int]()

    def losing(worker: Any, job_id: int, source: Any, target: Any) -> bool:
        done = load(worker, job_id, source, target)
        if target.group_sizes[-1]:
            block = int(target.block_ids[len(target.block_ids) - target.group_sizes[-1]])
            lost.append(block)
            for cache in worker._caches:
                cache[block] = 0
        return done

    CopyingWorker.submit_load = losing  # type: ignore[assignment,method-assign]
    return lost


def result(audit: Any, ledger: Any = None) -> dict[str, Any]:
    """What one audit found. ``ledger``: that of the one engine, where the audit is of journals."""
    ledger = ledger or audit.ledger
    return {
        "verdict": audit.verdict,
        "findings": [
            (violation.id, violation.request, violation.figures, violation.story)
            for violation in audit.violations
        ],
        "counts": ledger.sums.contents,
        "transfers": ledger.sums.transfers,
        "excluded": ledger.contents.excluded,
        "workers": len(ledger.contents.workers),
        "requests": audit.totals.requests,
        "preemptions": audit.totals.preemptions,
    }


def waves(llm: Any, situation: Situation) -> list[list[list[int]]]:
    """The outputs of two waves of the same requests."""
    disturb = disturbance(situation.disturbed_by, len(prompts()))
    return [generate(llm, prompts(), disturb=disturb, **situation.sampling) for _ in range(2)]


def run(name: str) -> dict[str, Any]:
    """Two waves observed and two bare; then, after ``plain``, a request over a block with a flipped bit."""
    import kvledger

    situation = SITUATIONS[name]
    llm = engine(Path(tempfile.mkdtemp()), model=situation.model, **situation.engine)
    if "enable_lora" in situation.engine:  # outputs at the first use of an adapter differ from all later ones
        waves(llm, situation)
        llm.reset_prefix_cache()
    with kvledger.attach(llm, level="content") as audit:
        observed = waves(llm, situation)
    llm.reset_prefix_cache()
    bare = waves(llm, situation)
    sampled = "temperature" in situation.sampling
    found = result(audit) | {"equal": observed == bare or sampled}
    if name == "plain":
        llm.reset_prefix_cache()
        prompt = prompts()[0]
        with kvledger.attach(llm, level="content") as changed:
            generate(llm, [prompt], max_tokens=4)
            block = flip_bit(changed)
            generate(llm, [[*prompt, 5, 6, 7]], max_tokens=4)
        found["flipped"] = result(changed) | {"block": block}
    if name == "a window's loads":
        with kvledger.attach(llm, level="content") as losing:
            lost, prompt = lose_a_window(), [7] * 150  # which the store does not have yet
            for _ in range(2):
                generate(llm, [prompt], max_tokens=4)
                llm.reset_prefix_cache()
        found["lost"] = result(losing) | {"blocks": lost}
    return found


def run_in_workers(name: str) -> dict[str, Any]:
    """Two waves with a journal for each worker, and two bare, each by an engine in a process of its own."""
    from kvledger.audit.replay.journals import audit_paths

    folder = Path(tempfile.mkdtemp())
    outputs = []
    for each in ("observed", "bare"):
        file = folder / f"{each}.json"
        journal = {"KVLEDGER_DIR": str(folder / "journal"), "KVLEDGER_LEVEL": "content"}
        command = [sys.executable, "-m", "tests.engines.content_run", "--outputs", name, str(file)]
        subprocess.run(command, check=True, env=os.environ | (journal if each == "observed" else {}))
        outputs.append(json.loads(file.read_text()))
    audit = audit_paths([folder / "journal"])
    (observed,) = audit.engines
    return result(audit, observed.auditor.ledger) | {"equal": outputs[0] == outputs[1]}


def outputs_of(name: str) -> list[list[list[int]]]:
    """The outputs of an engine that is observed if ``KVLEDGER_DIR`` is set."""
    situation = SITUATIONS[name]
    llm = engine(Path(tempfile.mkdtemp()), model=situation.model, **situation.engine)
    return waves(llm, situation)


def main(arguments: list[str]) -> None:
    """Run the situation that the command line names."""
    from kvledger.audit.demo.engine import settle_environment

    *options, name, file = arguments
    settle_environment(in_process=True)
    if options == ["--outputs"]:
        found: Any = outputs_of(name)
    else:
        found = run(name) if SITUATIONS[name].workers == 1 else run_in_workers(name)
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
