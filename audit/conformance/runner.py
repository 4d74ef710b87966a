"""Generates the output that a model runner would return for a step.

The runner samples a token only where a step reaches the end of the known sequence; a prefill chunk
samples nothing. It accepts a prefix of the drafts and adds one token; of a diffusion model's canvas it
accepts all or nothing and adds none. It finishes only loads that a step's connector metadata ordered.
Output is deterministic for a seed; the stop token is sampled only where a request is to stop.

The lists are built without a Python call per request, because benchmarks measure the driver's share of
a step.

Doubt: the scheduler pads the drafts of a request that had none with -1, and a real runner should reject
these. This one accepts none of them unless `accepted` says so.
"""

import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from . import release
from .engine_setup import STOP_TOKEN, EngineSetup

FIRST_TOKEN = 3
_VOCABULARY = range(FIRST_TOKEN, 32_000)

Accepted = int | Mapping[str, int] | None
Names = Collection[str] | Literal["all"]


def tokens(count: int, family: str) -> list[int]:
    """The first `count` tokens of a family: a longer prompt continues a shorter one."""
    return random.Random(family).choices(_VOCABULARY, k=count)


@dataclass(frozen=True)
class ModelStep:
    """A scheduled step that the runner has not answered yet."""

    scheduled: Any
    """vLLM's SchedulerOutput."""
    unsampled: frozenset[str]
    """Requests for which this step is a prefill chunk, so nothing is sampled."""
    admitted: frozenset[str]
    """Requests that this step admits or resumes; their drafts are padding."""

    @classmethod
    def of(cls, scheduled: Any, requests: Mapping[str, Any]) -> "ModelStep":
        """Read a step; call this right after `schedule()`, before the requests change."""
        unsampled = frozenset(
            name
            for name in scheduled.num_scheduled_tokens
            if (request := requests[name]).num_computed_tokens < request.num_tokens
        )
        started = (new.req_id for new in scheduled.scheduled_new_reqs)
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        return cls(scheduled, unsampled, frozenset(chain(started, resumed)))


@dataclass(frozen=True)
class TransferReport:
    """What the worker side of a connector reports with a step's output."""

    invalid_blocks: Iterable[int] = ()
    finished_recving: Names = ()
    finished_sending: Names = ()
    failed_recving: Collection[str] = ()


class Runner:
    """Answers steps in place of a model."""

    def __init__(self, setup: EngineSetup, seed: int) -> None:
        import torch

        self.stop_at: dict[str, int] = {}
        """By request id: the number of the output token that is the stop token."""
        self.loading: set[str] = set()
        """Requests with an asynchronous load that was ordered and has not finished."""
        self._setup = setup
        self._random = random.Random(seed)
        self._answers = 0
        """How many tokens were sampled, from which the next one is made."""
        self._output = release.output_maker()
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
                count = self._accepted(name, len(drafts), step, accepted)
                new.extend(range(token + 1, token + 1 + count))
        if self.stop_at:
            self._stop(names, sampled, requests)
        return self._output(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def drafts(self, step: ModelStep) -> Any:
        """DraftTokenIds for the requests of a step; the engine asks for them after the step."""
        from vllm.v1.outputs import DraftTokenIds

        names = list(step.scheduled.num_scheduled_tokens)
        proposed = [FIRST_TOKEN] * (self._setup.drafts or self._setup.canvas)
        return DraftTokenIds(
            req_ids=names,
            draft_token_ids=[[] if name in step.unsampled else proposed[:] for name in names],
        )

    def transfer(self, step: ModelStep, report: TransferReport, held: set[str], answer: Any) -> None:
        """Put a report into `answer`. `held`: finished requests whose blocks are still being sent."""
        loads = getattr(step.scheduled.kv_connector_metadata, "loads", ())
        self.loading.update(load.request_id for load in loads if load.asynchronous)
        received = set(self.loading if report.finished_recving == "all" else report.finished_recving)
        received.update(report.failed_recving)
        unknown = received - self.loading
        assert not unknown, f"no step ordered a load of {sorted(unknown)}"
        self.loading -= received
        sent = set(held if report.finished_sending == "all" else report.finished_sending)
        held -= sent
        release.report_transfers(
            answer,
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=set(report.invalid_blocks),
            failed_recving=set(report.failed_recving),
        )

    def _accepted(self, name: str, drafted: int, step: ModelStep, accepted: Accepted) -> int:
        count = accepted if isinstance(accepted, int) else (accepted or {}).get(name)
        if count is None:
            count = 0 if name in step.admitted else self._random.randint(0, drafted)
        if self._setup.canvas:
            return drafted if count >= drafted else 0
        return min(count, drafted)

    def _stop(self, names: list[str], sampled: list[list[int]], requests: Mapping[str, Any]) -> None:
        for name, new in zip(names, sampled, strict=True):
            stop_at, request = self.stop_at.get(name), requests.get(name)
            if stop_at is not None and request is not None:
                place = stop_at - request.num_output_tokens - 1
                if 0 <= place < len(new):
                    new[place] = STOP_TOKEN
