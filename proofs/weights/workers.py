"""An engine with two workers in processes of their own, observed by the plugin."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvledger.audit.replay.journals import audit_paths

from .engine import WAYS, start, weights_folder
from .scenarios import A, B

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def break_second(worker: Any) -> None:
    """Let the second worker's next ``reload_weights`` fail."""
    if worker.rank == 1:
        runner, reload = worker.model_runner, worker.model_runner.reload_weights

        def fails(*_: Any, **__: Any) -> None:
            runner.reload_weights = reload
            raise OSError("no such weights")

        runner.reload_weights = fails


def skip_second(worker: Any) -> None:
    """Let the second worker's ``reload_weights`` load nothing."""
    if worker.rank == 1:
        worker.model_runner.reload_weights = lambda *_, **__: None


def load_norms(worker: Any, folder: str) -> None:
    """Load by the model's own method what a CPU kernel does not keep in a packed copy."""
    from safetensors.torch import load_file

    tensors = load_file(f"{folder}/model.safetensors").items()
    worker.get_model().load_weights((name, each) for name, each in tensors if "norm" in name)


def all_load(llm: Any, folder: str) -> None:
    """Each worker loads."""
    WAYS["reload_weights"](llm, folder)


def by_callable(llm: Any, folder: str) -> None:
    """Each worker loads, in a function of the caller."""
    llm.collective_rpc(load_norms, args=(folder,))


def one_fails(llm: Any, folder: str) -> None:
    """The second worker's call raises, and the caller goes on."""
    llm.collective_rpc(break_second)
    try:
        all_load(llm, folder)
    except Exception:
        return


def one_fails_once(llm: Any, folder: str) -> None:
    """The caller repeats the call that failed."""
    one_fails(llm, folder)
    all_load(llm, folder)


def one_skips(llm: Any, folder: str) -> None:
    """The second worker's call returns, and it loads nothing."""
    llm.collective_rpc(skip_second)
    all_load(llm, folder)


def with_other_norms(path: Path) -> Path:
    """The same weights with other norms, which no worker splits: those that are written are 1."""
    from safetensors.torch import load_file, save_file

    file = str(path / "model.safetensors")
    tensors = {name: each * 1.5 if "norm" in name else each for name, each in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


class Case(NamedTuple):
    """How the caller changes the weights, the level, and whether the workers differ afterwards."""

    change: Callable[[Any, str], Any]
    level: str
    differ: bool


CASES = {
    "all load": Case(all_load, "content", False),
    "all load, in a function of the caller": Case(by_callable, "blocks", False),
    "one fails": Case(one_fails, "blocks", True),
    "one fails, and the call is repeated": Case(one_fails_once, "content", False),
    "one loads nothing": Case(one_skips, "content", True),
}


def serve(folder: Path, name: str) -> list[str]:
    """Run one case; how many changes its journals have of each kind, and the findings about weights."""
    change, level, _ = CASES[name]
    journals = folder / name.replace(" ", "-").replace(",", "")
    journals.mkdir()
    os.environ |= {"KVLEDGER_DIR": str(journals), "KVLEDGER_LEVEL": level}
    llm = start(weights_folder(folder, 0), **TWO)
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def ask(*prompts: list[int]) -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    ask(A)
    change(llm, str(with_other_norms(weights_folder(folder, 1))))
    llm.reset_prefix_cache()
    ask(A, B)
    llm.llm_engine.engine_core.shutdown()
    audit = audit_paths([journals])
    (engine,) = audit.engines
    changes = ", ".join(f"{n} {kind}" for kind, n in engine.auditor.ledger.sums.weights_changes.items())
    return [changes, *(each.message for each in audit.violations if each.id.startswith("weights/"))]
