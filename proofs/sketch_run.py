"""Runs one real engine on the CPU that computes prompts several times, and measures how much the KV differs.

``python -m proofs.sketch_run NAME FILE`` runs the situation NAME. FILE gets, as JSON, the distance of
each block from its computation before, the last sketch of each block hash, and, for each fault, the distances
of blocks with that fault.
``proofs/content_sketches.py`` runs all situations and writes a table.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.content_models import write_adapter
from tests.engines.content_run import NGRAM, disturbance, engine, generate, prompts

from kvledger.audit.ledger import content_postings, ledger_state
from kvledger.audit.ledger.content_postings import distances

STEP_TOKENS = (96, 40, 160)
"""Most tokens of a step in the first, second and third wave: other batches and other chunks."""

BLOCKS_WITH_FAULTS = 12
"""Blocks of which copies get each fault."""

DEEP = {"LAYERS": 16, "HIDDEN": 256, "INTERMEDIATE": 512}
"""A model in which rounding adds up over more layers than in the demo's."""


@dataclass(frozen=True)
class Situation:
    """One engine whose prompts are computed several times."""

    says: str
    engine: dict[str, Any] = field(default_factory=dict)
    disturbed_by: tuple[str, ...] = ()
    deep: bool = False
    fault: str = ""
    """What is wrong with the computations of the second wave, which then is the last."""


BF16 = {"dtype": "bfloat16"}
ROOM = BF16 | {"num_gpu_blocks_override": 400}
"""So many blocks that each prompt is computed once in a wave."""

SITUATIONS = {
    "fp32": Situation("other batches and chunks in each wave; too few blocks, so requests are preempted"),
    "bf16": Situation("the same", BF16),
    "bf16, drafts": Situation("three n-gram drafts a step", BF16 | {"speculative_config": NGRAM}),
    "bf16, resets and aborts": Situation(
        "the prefix cache is reset and requests are aborted while requests run",
        BF16,
        disturbed_by=("resets", "aborts"),
    ),
    "fp32, deep": Situation("16 layers in place of 2", deep=True),
    "bf16, deep": Situation("16 layers in place of 2", BF16, deep=True),
    "one position": Situation("positions are one too high", ROOM, fault="positions + 1"),
    "32 positions": Situation("positions are 32 too high", ROOM, fault="positions + 32"),
    "other adapter": Situation(
        "another LoRA adapter under the name and path of the first",
        ROOM | {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2},
        fault="adapter",
    ),
}


@contextmanager
def measured() -> Iterator[list[list[float]]]:
    """The distances of all parts of each block that is computed again, also across resets."""
    found: list[list[float]] = []
    forget = ledger_state.SketchState.forget

    def noted(*arguments: Any) -> list[float]:
        found.append(distances(*arguments))
        return found[-1]

    setattr(content_postings, "distances", noted)  # noqa: B010
    setattr(ledger_state.SketchState, "forget", lambda _: None)  # noqa: B010
    try:
        yield found
    finally:
        setattr(content_postings, "distances", distances)  # noqa: B010
        setattr(ledger_state.SketchState, "forget", forget)  # noqa: B010


def waves(llm: Any, situation: Situation) -> None:
    """Waves of the same requests; nothing is cached when a wave begins."""
    core = llm.llm_engine.engine_core.engine_core
    for number, tokens in enumerate(STEP_TOKENS[: 2 if situation.fault else None]):
        core.scheduler.max_num_scheduled_tokens = tokens
        if number and situation.fault.startswith("positions"):
            shift_positions(core, int(situation.fault.split()[-1]))
        disturb = disturbance(situation.disturbed_by, len(prompts()))
        llm.reset_prefix_cache()
        if situation.fault == "adapter":
            with_adapter(llm, other=number > 0)
        else:
            generate(llm, prompts(), disturb=disturb)


def shift_positions(core: Any, by: int) -> None:
    """The model reads all positions as higher ones from now on."""
    model = core.model_executor.driver_worker.worker.model_runner.model
    forward: Callable[..., Any] = type(model).forward

    def shifted(self: Any, input_ids: Any, positions: Any, *arguments: Any, **more: Any) -> Any:
        return forward(self, input_ids, positions + by, *arguments, **more)

    if not getattr(model, "is_shifted", False):
        model.is_shifted = True
        model.forward = shifted.__get__(model)


def with_adapter(llm: Any, *, other: bool) -> None:
    """Generate with an adapter; ``other``: another one under its name and path."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    folder = Path(llm.llm_engine.model_config.model).parent / "adapter"
    if not folder.exists():
        write_adapter(folder, 1)
    if other:
        second = folder.with_name("second")
        if not second.exists():
            write_adapter(second, 2)
        for file in second.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    request = LoRARequest("adapter", 2 if other else 1, str(folder))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    llm.generate(
        [{"prompt_token_ids": tokens} for tokens in prompts()], params, use_tqdm=False, lora_request=request
    )


# --- faults of single blocks ----------------------------------------------------------------------------


def _exchange(layers: list[Any]) -> None:
    for layer in layers:
        layer.copy_(layer.roll(layer.shape[-1] // 2, dims=-1))


def _zero(layers: list[Any]) -> None:
    for layer in layers:
        layer.zero_()


def _zero_token(layers: list[Any]) -> None:
    layers[-1][..., 3, :] = 0


def _flip(bit_from_sign: int) -> Callable[[list[Any]], None]:
    """Flip a bit of one number: bit 1 from the sign is the highest of the exponent."""

    def flip(layers: list[Any]) -> None:
        import torch

        integers = {2: torch.int16, 4: torch.int32}[layers[-1].element_size()]
        numbers = layers[-1].view(integers)
        at = (0,) * (numbers.dim() - 1)
        width = layers[-1].element_size() * 8
        numbers[at][5] ^= 1 << (width - 1 - bit_from_sign)

    return flip


FAULTS: dict[str, Callable[[list[Any]], None]] = {
    "keys and values exchanged": _exchange,
    "keys and values of one layer exchanged": lambda layers: _exchange(layers[-1:]),
    "zeros": _zero,
    "zeros in one layer": lambda layers: _zero(layers[-1:]),
    "one token of one layer is zero": _zero_token,
    "highest exponent bit of one number flipped": _flip(1),
    "lowest exponent bit of one number flipped": _flip(8),
}


def with_faults(audit: Any) -> dict[str, list[float]]:
    """The largest distance of each of some sealed blocks from a copy with a fault."""
    import torch

    from kvledger.audit.engines.content.sketches import PROJECTIONS, Sketches

    watch = audit._observer.content.watch
    group = watch.layout.groups[0]
    sealed = [block for block, step in enumerate(watch.seals.steps) if step > 0][:BLOCKS_WITH_FAULTS]
    index = torch.tensor(sealed)
    whole = [layer.index_select(0, index).contiguous() for layer in group.layers]

    def sketches(layers: list[Any]) -> list[str]:
        rows = Sketches(layers, 1).read(range(len(sealed))).result()
        return [row.tobytes().hex() for row in rows]

    right, found = sketches(whole), {}
    for name, change in FAULTS.items():
        copies = [layer.clone() for layer in whole]
        for number in range(len(sealed)):
            change([layer[number] for layer in copies])
        pairs = zip(right, sketches(copies), strict=True)
        found[name] = [max(distances(one, other, PROJECTIONS)) for one, other in pairs]
    return found


def run(name: str) -> dict[str, Any]:
    """The waves of one situation."""
    import kvledger
    from kvledger.audit.demo import model

    situation = SITUATIONS[name]
    if situation.deep:
        for constant, value in DEEP.items():
            setattr(model, constant, value)
    llm = engine(Path(tempfile.mkdtemp()), **situation.engine)
    with measured() as found, kvledger.attach(llm, level="content") as audit:
        waves(llm, situation)
        faults = with_faults(audit) if name == "bf16, deep" else {}
    kept = {str(key[0]): computed[-1] for key, computed in audit.ledger.sketches.kept.items()}
    violations = [each.id for each in audit.violations]
    drifts = {each.id for each in audit.drifts}
    return {
        "distances": [max(parts) for parts in found],
        "faults": faults,
        "sketches": kept,
        "violations": violations,
        "drift": "content/recomputed" in drifts,
    }


def main(arguments: list[str]) -> None:
    """Run the situation that the command line names."""
    import os

    from kvledger.audit.demo.engine import settle_environment

    name, file = arguments
    settle_environment(in_process=True)
    os.environ |= {"KVLEDGER_CONTENT_SKETCH": "1", "KVLEDGER_CONTENT_KEY": "the key of all runs"}
    Path(file).write_text(json.dumps(run(name)))


if __name__ == "__main__":
    main(sys.argv[1:])
