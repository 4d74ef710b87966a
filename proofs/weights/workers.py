"""An engine with two workers in processes of their own, observed by the plugin."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.content_models import write_adapter

from kvledger.audit.replay.journals import audit_paths

from .engine import WAYS, start, weights_folder
from .scenarios import LORA, A, B
from .subject import ADAPTER

Load = Callable[[Any, str], Any]
"""Changes the weights of an engine to those in a folder."""

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def break_second(worker: Any, method: str) -> None:
    """Let the second worker's next call of a method of its model runner fail."""
    if worker.rank == 1:
        runner, call = worker.model_runner, getattr(worker.model_runner, method)

        def fails(*_: Any, **__: Any) -> None:
            setattr(runner, method, call)
            raise OSError("no such weights")

        setattr(runner, method, fails)


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


def one_fails(llm: Any, folder: str, load: Load = all_load, method: str = "reload_weights") -> None:
    """The second worker's call raises, and the caller goes on."""
    llm.collective_rpc(break_second, args=(method,))
    with suppress(Exception):
        load(llm, folder)


def one_fails_once(llm: Any, folder: str) -> None:
    """The caller repeats the call that failed."""
    one_fails(llm, folder)
    all_load(llm, folder)


def replace_adapter(llm: Any, folder: str) -> None:
    """Each worker loads other content in place of an adapter's."""
    llm.llm_engine.add_lora(adapter(Path(folder).parent, 2, in_place=True))


def one_keeps_the_adapter(llm: Any, folder: str) -> None:
    """The second worker's call raises, and the caller goes on."""
    one_fails(llm, folder, replace_adapter, "add_lora")


def adapter(folder: Path, seed: int, *, in_place: bool = False) -> Any:
    """The adapter's request, after its folder got the content of a seed."""
    from vllm.lora.request import LoRARequest

    shutil.rmtree(folder / ADAPTER, ignore_errors=True)
    write_adapter(folder / ADAPTER, seed)
    return LoRARequest(ADAPTER, 1, str(folder / ADAPTER), load_inplace=in_place)


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
    """How the caller changes the weights, the level, and whether the workers differ afterwards.

    ``lora``: all requests use an adapter.
    """

    change: Load
    level: str
    differ: bool
    lora: bool = False


CASES = {
    "all load": Case(all_load, "content", False),
    "all load, in a function of the caller": Case(by_callable, "blocks", False),
    "one fails": Case(one_fails, "blocks", True),
    "one fails, and the call is repeated": Case(one_fails_once, "content", False),
    "one loads nothing": Case(one_skips, "content", True),
    "all load an adapter in place": Case(replace_adapter, "blocks", False, lora=True),
    "one fails to load an adapter in place": Case(one_keeps_the_adapter, "blocks", True, lora=True),
}


def serve(folder: Path, name: str) -> list[str]:
    """Run one case; how many changes its journals have of each kind, and the findings about weights."""
    change, level, _, lora = CASES[name]
    journals = folder / name.replace(" ", "-").replace(",", "")
    journals.mkdir()
    os.environ |= {"KVLEDGER_DIR": str(journals), "KVLEDGER_LEVEL": level}
    llm = start(weights_folder(folder, 0), **TWO, **(LORA if lora else {}))
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    used = adapter(folder, 1) if lora else None

    def ask(*prompts: list[int]) -> None:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        llm.generate(given, params, use_tqdm=False, lora_request=used)

    ask(A)
    change(llm, str(with_other_norms(weights_folder(folder, 1))))
    llm.reset_prefix_cache()
    ask(A, B)
    llm.llm_engine.engine_core.shutdown()
    audit = audit_paths([journals])
    (engine,) = audit.engines
    changes = ", ".join(f"{n} {kind}" for kind, n in engine.auditor.ledger.sums.weights_changes.items())
    return [changes, *(each.message for each in audit.violations if each.id.startswith("weights/"))]
