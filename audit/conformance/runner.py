"""What a model runner would have returned for a step, made up.

A runner samples only where a step reaches the end of the sequence that it knows: a prefill chunk
samples nothing. Of the drafts it accepts a prefix and adds one token of its own; of a diffusion model's
canvas all or nothing, and adds none. It finishes only
transfers that a step's plan told it of. Figures are deterministic from the seed; the stop token is
sampled only where a request is to stop.

The lists are built without a Python call for each request, because benchmarks count the driver's
own share of a step.

Doubt: a real runner should reject every draft that the scheduler pads with -1 for a request that
had none; this one accepts none of these unless told to.
"""

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from . import release
from .host import STOP_TOKEN, EngineSetup

FIRST_TOKEN = 3
_VOCABULARY = range(FIRST_TOKEN, 32_000)

Accepted = int | Mapping[str, int] | None
Names = Collection[str] | Literal["all"]


def tokens(count: int, family: str) -> list[int]:
    """The first `count` tokens of a family: a longer prompt continues a shorter one."""
    return random.Random(family).choices(_VOCABULARY, k=count)


@dataclass(frozen=True)
class ModelStep:
    """A step on its way through the runner."""

    scheduled: Any
    """vLLM's SchedulerOutput."""
    unsampled: frozenset[str]
    """Requests for which this step is a prefill chunk that samples nothing."""
    admitted: frozenset[str]
    """Requests that this step starts or resumes: their drafts are padding."""

    @classmethod
    def of(cls, scheduled: Any, requests: Mapping[str, Any]) -> "ModelStep":
        """To be called at once after `schedule()`, before anything else is known."""
        unsampled = frozenset(
            name
            for name in scheduled.num_scheduled_tokens
            if (request := requests[name]).num_computed_tokens < request.num_tokens
        )
        started = (new.req_id for new in scheduled.scheduled_new_reqs)
        return cls(scheduled, unsampled, frozenset(chain(started, release.resumed(scheduled))))


@dataclass(frozen=True)
class TransferReport:
    """What the worker side of a connector reports with a step."""

    invalid_blocks: Iterable[int] = ()
    finished_recving: Names = ()
    finished_sending: Names = ()
    failed_recving: Collection[str] = ()


class Runner:
    """Answers steps; knows of the requests only how many tokens they have put out."""

    def __init__(self, setup: EngineSetup, seed: int) -> None:
        import torch

        self.stop_at: dict[str, int] = {}
        """Request to the number of its output token that is the stop token."""
        self.loading: set[str] = set()
        """Requests whose asynchronous load the runner was told of and has not finished."""
        self._setup = setup
        self._random = random.Random(seed)
        self._answers = 0
        self._output = release.output_maker()
        self._drafts = release.drafts_class()
        self._pooled: Any = torch.zeros(1)

    def answer(self, step: ModelStep, requests: Mapping[str, Any], accepted: Accepted) -> Any:
        """A ModelRunnerOutput."""
        names = list(step.scheduled.num_scheduled_tokens)
        index = dict(zip(names, range(len(names)), strict=True))
        if self._setup.pooling:
            pooled = [None if name in step.unsampled else self._pooled for name in names]
            return self._output(req_ids=names, req_id_to_index=index, pooler_output=pooled)
        self._answers += 1
        token = FIRST_TOKEN + self._answers * 7 % 31_000
        canvas = self._setup.canvas
        if step.unsampled or canvas:
            sampled = [[] if canvas or name in step.unsampled else [token] for name in names]
        else:
            sampled = [[token] for _ in names]
        for name, drafts in step.scheduled.scheduled_spec_decode_tokens.items():
            new = sampled[index[name]]
            if new or canvas:
                taken = self._accepted(name, len(drafts), step, accepted)
                new.extend(range(token + 1, token + 1 + taken))
        if self.stop_at:
            self._stop(names, sampled, requests)
        return self._output(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def drafts(self, step: ModelStep) -> Any:
        """DraftTokenIds for the requests of a step, as the engine asks for after it."""
        names = list(step.scheduled.num_scheduled_tokens)
        proposed = [FIRST_TOKEN] * (self._setup.drafts or self._setup.canvas)
        return self._drafts(
            req_ids=names,
            draft_token_ids=[[] if name in step.unsampled else proposed[:] for name in names],
        )

    def transfer(self, step: ModelStep, said: TransferReport, held: set[str], answer: Any) -> None:
        """Report with `answer`. `held`: finished requests that wait for their sending to end."""
        loads = getattr(step.scheduled.kv_connector_metadata, "loads", ())
        self.loading.update(load.request_id for load in loads if load.asynchronous)
        everything = said.finished_recving == "all"
        received = set(self.loading if everything else said.finished_recving)
        received.update(said.failed_recving)
        unknown = received - self.loading
        assert not unknown, f"the runner was not told to load {sorted(unknown)}"
        self.loading -= received
        sent = set(held if said.finished_sending == "all" else said.finished_sending)
        held -= sent
        release.report_transfers(
            answer,
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=set(said.invalid_blocks),
            failed_recving=set(said.failed_recving),
        )

    def _accepted(self, name: str, drafted: int, step: ModelStep, accepted: Accepted) -> int:
        said = accepted if isinstance(accepted, int) else (accepted or {}).get(name)
        if said is None:
            said = 0 if name in step.admitted else self._random.randint(0, drafted)
        if self._setup.canvas:
            return drafted if said >= drafted else 0
        return min(said, drafted)

    def _stop(self, names: list[str], sampled: list[list[int]], requests: Mapping[str, Any]) -> None:
        for name, new in zip(names, sampled, strict=True):
            stop_at, request = self.stop_at.get(name), requests.get(name)
            if stop_at is not None and request is not None:
                place = stop_at - request.num_output_tokens - 1
                if 0 <= place < len(new):
                    new[place] = STOP_TOKEN
