"""The engine under test, with kvledger attached, and what it served."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvledger

from .engine import TOP, WAYS, Served, State, model_of, start, weights_folder

ADAPTER = "adapter"


@dataclass
class Result:
    """What an engine served, and what kvledger says of each output token."""

    served: dict[str, Served]
    suspect: dict[str, list[bool]]
    unknown: dict[str, list[bool]]
    oldest: dict[str, list[Path | None]]
    """The oldest weights in the chain of what the token's step read."""
    findings: list[str]


class Subject:
    """An observed engine, driven step by step."""

    def __init__(self, folder: Path, level: str = "blocks", **options: Any) -> None:
        self.folder = folder
        self.weights = weights_folder(folder, 0)
        """The current weights."""
        self.adapter: Path | None = None
        """Where the adapter's current content comes from."""
        self.served: dict[str, Served] = {}
        """By the engine's id of the request or sample."""
        self.refused = 0
        """Resets of the prefix cache that returned False."""
        self.folders = {0: self.weights}
        """By kvledger's version. They only explain what kvledger calls suspect and is right."""
        self.llm = start(self.weights, **options)
        self.live = self.llm.llm_engine
        self.core = self.live.engine_core.engine_core
        self._prompts: dict[str, list[int]] = {}
        """By our id of a request."""
        self._of_step: dict[int, Path] = {}
        """The weights with which the step of a scheduler output ran."""
        self._watch()
        self.audit = kvledger.attach(self.llm, level=level)

    def _watch(self) -> None:
        """Record the state in which each token is sampled."""
        scheduler, executor = self.core.scheduler, self.core.model_executor
        execute, update = executor.execute_model, scheduler.update_from_output

        def execute_model(scheduler_output: Any, *rest: Any, **named: Any) -> Any:
            self._of_step[id(scheduler_output)] = self.weights
            return execute(scheduler_output, *rest, **named)

        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            weights = self._of_step.pop(id(scheduler_output))
            running = dict(scheduler.requests)
            outputs = update(scheduler_output, model_runner_output)
            for output in [one for of_client in outputs.values() for one in of_client.outputs]:
                request, found = running[output.request_id], output.new_logprobs
                name = output.request_id.rpartition("-")[0].rpartition("_")[2]
                served = self.served.setdefault(output.request_id, Served(self._prompts[name]))
                adapter = self.adapter if request.lora_request else None
                served.tokens += output.new_token_ids
                served.states += [State(weights, adapter)] * len(output.new_token_ids)
                for row, _ in enumerate(output.new_token_ids):
                    pairs = zip(found.logprob_token_ids[row], found.logprobs[row], strict=True)
                    served.scores.append({int(token): float(score) for token, score in pairs})
            return outputs

        executor.execute_model, scheduler.update_from_output = execute_model, update_from_output

    def add(
        self,
        prompt: list[int],
        tokens: int = 8,
        priority: int = 0,
        *,
        embedded: bool = False,
        **sampling: Any,
    ) -> None:
        """Add one request; ``embedded``: its prompt is given as embeddings."""
        from vllm import SamplingParams

        lora = sampling.pop("lora_request", None)
        settings = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        params = SamplingParams(**(settings | {"logprobs": TOP} | sampling))
        name = f"r{len(self._prompts) + 1}"
        self._prompts[name] = prompt
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if embedded:
            given = {"prompt_embeds": model_of(self.llm).get_parameter("model.embed_tokens.weight")[prompt]}
        self.live.add_request(name, given, params, lora_request=lora, priority=priority)

    def step(self, steps: int = 1) -> None:
        """Run some steps."""
        for _ in range(steps):
            self.live.step()

    def run(self) -> None:
        """Run until every request has ended."""
        while self.live.has_unfinished_requests():
            self.live.step()

    def serve(self, *prompts: list[int], **how: Any) -> None:
        """Add requests and run to their end."""
        for prompt in prompts:
            self.add(prompt, **how)
        self.run()

    def update(self, seed: int = 1, way: str = "reload_weights", only: Any = None) -> None:
        """Change the weights to those of a seed; with ``only`` just these tensors."""
        base = int(self.weights.name.split("-")[1])
        self.weights = weights_folder(self.folder, seed, base, only)
        WAYS[way](self.llm, str(self.weights))
        self.folders[self.audit.ledger.weights.version] = self.weights

    def reset(self, **how: bool) -> None:
        """Reset the prefix cache as a caller does."""
        self.refused += not self.llm.reset_prefix_cache(**how)

    def result(self) -> Result:
        """What was served and what kvledger says about it; the engine ends."""
        suspect, unknown, oldest = {}, {}, {}
        for name, one in self.served.items():
            use = self.audit.weights(name)
            assert use.output_tokens == len(one.tokens)
            suspect[name], unknown[name] = use.suspect_mask().tolist(), use.unknown_mask().tolist()
            oldest[name] = [
                self.folders.get(of) for start, end, _, of in use.output for _ in range(start, end)
            ]
        found = [each for each in self.audit.found if each.id.startswith("weights/")]
        findings = [f"{each.id} ({each.findings})" for each in found]
        self.live.engine_core.shutdown()
        return Result(self.served, suspect, unknown, oldest, findings)


def text(seed: int, tokens: int) -> list[int]:
    """A prompt that no other seed shares."""
    choose = random.Random(seed)
    return [choose.randrange(2, 512) for _ in range(tokens)]
