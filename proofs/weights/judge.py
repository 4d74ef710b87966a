"""Which output tokens are wrong: their log-probabilities differ from those of a fresh engine.

For each state a new engine is started with these weights. It caches no prefix, gets each prompt with the
outputs up to a token, and gives the log-probabilities of the outputs (``prompt_logprobs``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from .engine import TOP, Scores, Served, State, start
from .subject import Result

Name = TypeVar("Name")
THRESHOLD = 1e-4
"""Log-probabilities that differ by more are wrong. Two engines with float32 weights differ by 1e-6."""


def differs(one: Scores, other: Scores) -> bool:
    """Whether two engines disagree about any token that both name. Both name the sampled token."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys()) > THRESHOLD


def wrong_tokens(served: Mapping[Name, Served]) -> dict[Name, list[bool]]:
    """For each request, which of its output tokens are wrong."""
    wrong = {name: [False] * len(one.tokens) for name, one in served.items()}
    states = dict.fromkeys(state for one in served.values() for state in one.states)
    for state in states:
        names = [name for name, one in served.items() if state in one.states]
        for name, fresh in zip(names, _fresh(state, [served[name] for name in names]), strict=True):
            one = served[name]
            for index, scores in enumerate(fresh):
                if one.states[index] == state:
                    wrong[name][index] = differs(one.scores[index], scores)
    return wrong


def _fresh(state: State, some: Sequence[Served]) -> list[list[Scores]]:
    """What a fresh engine says about the outputs of requests, up to the last one of this state."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    options: dict[str, Any] = {"enable_prefix_caching": False, "num_gpu_blocks_override": 256}
    options |= {"max_num_batched_tokens": 2048, "max_num_seqs": 16}
    lora = None
    if state.adapter is not None:
        # Of several prompts with an adapter vLLM's CPU kernels give no log-probabilities.
        options |= {"enable_lora": True, "max_lora_rank": 8, "max_num_seqs": 1}
        lora = LoRARequest("fresh", 1, str(state.adapter))
    llm = start(state.weights, **options)
    params = SamplingParams(max_tokens=1, detokenize=False, prompt_logprobs=TOP)
    prompts = []
    for one in some:
        last = max(index for index, at in enumerate(one.states) if at == state)
        prompts.append({"prompt_token_ids": one.prompt + one.tokens[: last + 1]})
    found = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
    scores = [
        [{token: of.logprob for token, of in at.items()} for at in output.prompt_logprobs[len(one.prompt) :]]
        for one, output in zip(some, found, strict=True)
    ]
    llm.llm_engine.engine_core.shutdown()
    return scores


@dataclass
class Row:
    """One line of the table."""

    tokens: int = 0
    wrong: int = 0
    suspect: int = 0
    missed: int = 0
    """Wrong and not suspect."""
    false: int = 0
    """Suspect and not wrong."""
    equal: int = 0
    """Those of them whose older KV was made by weights that are equal to the present ones."""
    unknown: int = 0

    def cells(self) -> list[str]:
        """The figures in the order of the table's columns."""
        return [f"{getattr(self, each.name):,}" for each in fields(self)]

    def __bool__(self) -> bool:
        """Whether kvledger and the fresh engines agree; what kvledger does not know it does not claim."""
        return not self.missed and self.false == self.equal


HEAD = [each.name for each in fields(Row)]


def compare(
    result: Result, wrong: Mapping[str, Sequence[bool]], same: Callable[[Path, Path], bool]
) -> tuple[Row, list[str]]:
    """The row of one run, and where kvledger and the fresh engine disagree. ``same``: equal KV."""
    row, disagreements = Row(), []
    for name, flags in wrong.items():
        one, missed, false = result.served[name], [], []
        for index, is_wrong in enumerate(flags):
            suspect, unknown = result.suspect[name][index], result.unknown[name][index]
            row.tokens += 1
            row.wrong += is_wrong
            row.suspect += suspect
            row.unknown += unknown
            if is_wrong and not suspect and not unknown:
                row.missed += 1
                missed.append(index)
            elif suspect and not is_wrong:
                row.false += 1
                older = result.oldest[name][index]
                if older is not None and same(older, one.states[index].weights):
                    row.equal += 1
                else:
                    false.append(index)
        for kind, at in (("missed", missed), ("false", false)):
            if at:
                disagreements.append(f"{kind}: {name}, prompt of {len(one.prompt)}, outputs {at}")
    return row, disagreements
