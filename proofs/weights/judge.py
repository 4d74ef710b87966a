"""Which output tokens are wrong: their log-probabilities differ from those of a fresh engine.

For each state a new engine is started with these weights. It caches no prefix, gets each prompt with the
outputs up to a token, and gives the log-probabilities of the outputs (``prompt_logprobs``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .engine import TOP, Scores, Served, State, start
from .subject import Result

THRESHOLD = 1e-4
"""Log-probabilities that differ by more are wrong. Two engines with float32 weights differ by 1e-6."""


def differs(one: Scores, other: Scores) -> bool:
    """Whether two engines disagree about any token that both name. Both name the sampled token."""
    return max(abs(one[token] - other[token]) for token in one.keys() & other.keys()) > THRESHOLD


def wrong_tokens(served: Mapping[str, Served]) -> dict[str, list[bool]]:
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
    lora = None
    if state.adapter is not None:
        options |= {"enable_lora": True, "max_lora_rank": 8}
        lora = LoRARequest("fresh", 1, str(state.adapter))
    llm = start(state.weights, **(options | {"max_num_batched_tokens": 2048, "max_num_seqs": 16}))
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
    """One line of the table. Without `audit.weights` nothing is suspect and all is unknown."""

    tokens: int = 0
    wrong: int = 0
    suspect: int = 0
    missed: int = 0
    """Wrong and not suspect."""
    false: int = 0
    """Suspect and not wrong."""
    unknown: int = 0

    def count(self, wrong: Sequence[bool], suspect: Sequence[bool], unknown: Sequence[bool]) -> None:
        """Add the tokens of one request. A token that is not known is neither missed nor false."""
        for is_wrong, is_suspect, is_unknown in zip(wrong, suspect, unknown, strict=True):
            self.tokens += 1
            self.wrong += is_wrong
            self.suspect += is_suspect
            self.unknown += is_unknown
            self.missed += is_wrong and not is_suspect and not is_unknown
            self.false += is_suspect and not is_wrong

    def cells(self) -> list[str]:
        """The figures in the order of the table's columns."""
        return [f"{getattr(self, each.name):,}" for each in fields(self)]


HEAD = [each.name for each in fields(Row)]


def compare(result: Result, wrong: Mapping[str, Sequence[bool]]) -> tuple[Row, list[str]]:
    """The row of one run, and where kvledger and the fresh engine disagree."""
    row, disagreements = Row(), []
    for name, flags in wrong.items():
        suspect, unknown = result.suspect[name], result.unknown[name]
        row.count(flags, suspect, unknown)
        for kind in ("missed", "false"):
            at = [
                index
                for index, is_wrong in enumerate(flags)
                if is_wrong == (kind == "missed") and suspect[index] != is_wrong and not unknown[index]
            ]
            if at:
                disagreements.append(
                    f"{kind}: {name}, prompt of {len(result.served[name].prompt)}, outputs {at}"
                )
    return row, disagreements
