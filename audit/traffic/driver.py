"""Drives a real vLLM scheduler through real steps, with generated model output.

The driver takes the place of vLLM's EngineCore: it calls `schedule()`, has the runner generate the
output, and keeps the engine's order. Outputs answer steps first in, first out; under async scheduling
one step is scheduled before the output of the last one is delivered. It counts no tokens.

The runner samples a token only where a step reaches the end of the known sequence; a prefill chunk
samples nothing. It accepts a prefix of the drafts and adds one token; of a diffusion model's canvas it
accepts all or nothing and adds none. It finishes only loads that a step's connector metadata ordered.
Output is deterministic for a seed; the stop token is sampled only where a request is to stop. The lists are
built without a Python call per request, because benchmarks measure the driver's share of a step.

Doubt: the scheduler pads the drafts of a request that had none with -1, and a real runner should reject
these. This one accepts none of them unless `accepted` says so.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from ..events import Event
from ..journal.recorder import MemoryRecorder
from . import engine_setup
from .engine_setup import STOP_TOKEN, EngineSetup, block_hasher, build_request, build_scheduler
from .script import Op

__all__ = [
    "FIRST_TOKEN",
    "Accepted",
    "Driver",
    "EngineSetup",
    "ModelStep",
    "Runner",
    "TransferReport",
    "tokens",
]

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
    def of(cls, scheduled: Any, requests: Mapping[str, Any]) -> ModelStep:
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
        self.content: Callable[[str, Any, int], int] | None = None
        """The token of a request, by its name, at a place of its output from 0 on; None: any token."""
        self.proposed: Mapping[str, int] | None = None
        """How many drafts each request gets for the next step; None: as many as the engine is set up for."""
        self._setup = setup
        self._random = random.Random(seed)
        self._answers = 0
        """How many tokens were sampled, from which the next one is made."""
        self._output = engine_setup.output_maker()
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
        if self.content is not None:
            self._fill(names, sampled, requests, self.content)
        return self._output(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def drafts(self, step: ModelStep) -> Any:
        """DraftTokenIds for the requests of a step; the engine asks for them after the step."""
        from vllm.v1.outputs import DraftTokenIds

        names = list(step.scheduled.num_scheduled_tokens)
        drafts = [[FIRST_TOKEN] * (0 if name in step.unsampled else self._proposed(name)) for name in names]
        return DraftTokenIds(req_ids=names, draft_token_ids=drafts)

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
        engine_setup.report_transfers(
            answer,
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=set(report.invalid_blocks),
            failed_recving=set(report.failed_recving),
        )

    def _proposed(self, name: str) -> int:
        """How many drafts a request gets for the next step."""
        if self.proposed is not None:
            return self.proposed.get(name, 0)
        return self._setup.drafts or self._setup.canvas

    def _accepted(self, name: str, drafted: int, step: ModelStep, accepted: Accepted) -> int:
        count = accepted if isinstance(accepted, int) else (accepted or {}).get(name)
        if count is None:
            count = 0 if name in step.admitted else self._random.randint(0, drafted)
        if self._setup.canvas:
            return drafted if count >= drafted else 0
        return min(count, drafted)

    def _fill(self, names: list[str], sampled: list[list[int]], requests: Mapping[str, Any], of: Any) -> None:
        for name, new in zip(names, sampled, strict=True):
            request = requests.get(name)
            if request is not None:
                begin = request.num_output_tokens
                new[:] = [t if t == STOP_TOKEN else of(name, request, begin + n) for n, t in enumerate(new)]

    def _stop(self, names: list[str], sampled: list[list[int]], requests: Mapping[str, Any]) -> None:
        for name, new in zip(names, sampled, strict=True):
            stop_at, request = self.stop_at.get(name), requests.get(name)
            if stop_at is not None and request is not None:
                place = stop_at - request.num_output_tokens - 1
                if 0 <= place < len(new):
                    new[place] = STOP_TOKEN


class Driver:
    """One scheduler, and the part of an engine around it."""

    def __init__(self, setup: EngineSetup | None = None, *, seed: int = 0, record: bool = True) -> None:
        """With `record`, `delivered` keeps every EngineCoreOutput; benchmarks switch this off."""
        self.setup = setup or EngineSetup()
        """How the engine is configured."""
        self.scheduler: Any = build_scheduler(self.setup)
        """vLLM's scheduler."""
        self.runner = Runner(self.setup, seed)
        """Answers steps in place of a model."""
        self.in_flight: deque[ModelStep] = deque()
        """Scheduled steps whose output is not delivered yet."""
        self.delivered: dict[str, list[Any]] = {}
        """Outputs by request id."""
        self.depth = 2 if self.setup.asynchronous else 1
        """How many steps may be in flight."""
        self.recorded = False
        """Whether scripts are whole recordings: an output has the drafts that were proposed, and empty steps
        of which the script does not tell are answered unasked."""
        self._told: set[int] = set()
        """Empty steps in flight whose output has an operation in the script."""
        self._record = record
        self._hasher = block_hasher(self.scheduler)
        self._added = 0

    @property
    def connector(self) -> Any:
        """The scheduler side of the KV connector; None without one."""
        return self.scheduler.connector

    # Calls of clients.

    def add(
        self,
        request_id: str,
        prompt_tokens: int | Sequence[int],
        max_tokens: int = 16,
        *,
        stop_at: int | None = None,
        shares: tuple[str, int] | None = None,
        resumable: bool = False,
        priority: int = 0,
        transfer: Mapping[str, Any] | None = None,
        of_request: Mapping[str, Any] | None = None,
        prompt_logprobs: bool = False,
    ) -> Any:
        """Add a request, or a further chunk of a session; returns vLLM's Request.

        A number of prompt tokens means generated tokens of this request; `shares=("a", 64)` takes the
        first 64 of them from request "a", or from any token family of that name. With `stop_at` n, the
        n-th output token is the stop token. `transfer`: the `kv_transfer_params` that a router sends.
        `of_request`: further arguments of vLLM's Request, such as `cache_salt`.
        With `prompt_logprobs` the request may not read a cache.
        """
        prompt = self.prompt(request_id, prompt_tokens, shares)
        self._added += 1
        request = build_request(
            request_id,
            prompt,
            hasher=self._hasher,
            max_tokens=max_tokens,
            pooling=self.setup.pooling,
            resumable=resumable,
            priority=priority,
            arrival_seconds=float(self._added),
            transfer=transfer,
            of_request=of_request,
            prompt_logprobs=prompt_logprobs,
        )
        if stop_at is not None:
            self.runner.stop_at[request_id] = stop_at
        self.scheduler.add_request(request)
        return request

    def prompt(
        self, request_id: str, prompt_tokens: int | Sequence[int], shares: tuple[str, int] | None
    ) -> list[int]:
        """The tokens that `add` would give to a request."""
        if not isinstance(prompt_tokens, int):
            return list(prompt_tokens)
        family, shared = shares or ("", 0)
        own = f"{request_id} #{self._added}" if request_id in (*self.delivered, family) else ""
        return tokens(shared, family) + tokens(prompt_tokens - shared, own or request_id)

    def close(self, request_id: str) -> None:
        """End a session: no further chunk follows."""
        self.add(request_id, [FIRST_TOKEN])

    def abort(self, request_id: str) -> None:
        """Abort a request, as when its client disconnects."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, running: bool = False) -> bool:
        how = {"reset_running_requests": True} if running else {}
        return bool(self.scheduler.reset_prefix_cache(**how))

    def preempt(self, request_id: str, *, drop: bool | None = None) -> None:
        """Preempt a running request as `schedule()` does when blocks run out.

        `drop`: whether its output in flight is dropped; by default what the connector asks for.
        """
        request = self.scheduler.requests[request_id]
        engine_setup.preempt(self.scheduler, request, drop)

    # Calls of the engine.

    def schedule(self) -> Any:
        """Call `schedule()`; the step is in flight until `output` answers it."""
        scheduled = self.scheduler.schedule()
        self.in_flight.append(ModelStep.of(scheduled, self.scheduler.requests))
        return scheduled

    def output(self, *, accepted: Accepted = None, **transfers: Any) -> dict[int, Any]:
        """Deliver the oldest step's output; returns vLLM's EngineCoreOutputs by client.

        accepted: drafts that each request accepts, or by request id; random where not given.
        transfers: what the connector's worker side reports, the fields of `TransferReport`.
        """
        step = self.in_flight.popleft()
        answer = self.runner.answer(step, self.scheduler.requests, accepted)
        if self.connector is not None:
            held: set[str] = getattr(self.connector, "held", set())
            self.runner.transfer(step, TransferReport(**transfers), held, answer)
        drafting = (self.setup.drafts or self.setup.canvas) and not self.setup.asynchronous
        drafts = self.runner.drafts(step) if drafting and step.scheduled.num_scheduled_tokens else None
        outputs: dict[int, Any] = engine_setup.take_output(self.scheduler, step.scheduled, answer, drafts)
        if self._record:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    self.delivered.setdefault(output.request_id, []).append(output)
        return outputs

    def step(self, **of_output: Any) -> dict[int, Any]:
        """One iteration of the engine; under async scheduling the first one only schedules."""
        if self.scheduler.has_requests():
            scheduled = self.schedule()
            room = len(self.in_flight) < self.depth
            if room and (scheduled.num_scheduled_tokens or self.scheduler.has_requests()):
                return {}
        return self.output(**of_output) if self.in_flight else {}

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do; transfers finish as early as possible."""
        for _ in range(max_steps):
            if not self.in_flight and not self.scheduler.has_requests():
                return
            self.step(finished_recving="all", finished_sending="all")
        raise RuntimeError(f"not done after {max_steps} steps")

    def drain(self) -> None:
        """Deliver every output in flight without scheduling."""
        while self.in_flight:
            self.output()

    # A script.

    def carry_out(self, op: Op) -> None:
        """Do one operation of a script, or skip it where it makes no sense: see :class:`~.script.Op`."""
        name = op.request
        if op.do != "output":
            self._answer_empty()
        if op.do in ("chunk", "close", "abort") and name not in self.scheduler.requests:
            return
        match op.do:
            case "add":
                self.come(name)
            case "chunk":
                self.extend(name, op.count)
            case "close":
                self.close(name)
            case "abort":
                self.abort(name)
            case "reset":
                self.reset_prefix_cache(running=op.running)
            case "preempt":
                if any(running.request_id == name for running in self.scheduler.running):
                    self.preempt(name, drop=bool(op.running and self.in_flight) or None)
            case "schedule":
                self._schedule_any()
                if op.count and self.in_flight:
                    self._told.add(id(self.in_flight[-1]))
            case "output":
                self._answer_recorded(op)
            case "repeat":
                for left in reversed(range(op.count)):
                    self._answer_empty()
                    self._schedule_any()
                    self._answer_recorded(Op("output", at=op.at) if left else op)
            case "empty":
                for _ in range(op.count):
                    self._answer_empty()
                    self._schedule_any()

    def come(self, name: str) -> None:
        """A script's request comes, or its next chunk. A driver of scripts knows the requests."""
        raise NotImplementedError

    def extend(self, name: str, index: int) -> None:
        """A further chunk of a script's request comes, by its place among the chunks."""
        raise NotImplementedError

    def _schedule_any(self) -> None:
        if self.scheduler.has_requests():
            self.schedule()

    def _answer_recorded(self, op: Op) -> None:
        """Answer the oldest step of which the script tells."""
        of_empty = op.do == "output" and op.count
        while len(self.in_flight) > 1 and not of_empty and self._is_untold():
            self.output()
        if self.in_flight:
            arguments = self.reported(op)
            self._told.discard(id(self.in_flight[0]))
            if self.recorded:
                self.runner.proposed = op.proposed
            self.output(**arguments)

    def _answer_empty(self) -> None:
        """Answer empty steps of which the script does not tell, once as many as may be are in flight."""
        while len(self.in_flight) >= self.depth and self._is_untold():
            self.output()

    def _is_untold(self) -> bool:
        """Whether the oldest step has no tokens, and the script does not tell of its output."""
        step = self.in_flight[0]
        empty = self.recorded and not step.scheduled.total_num_scheduled_tokens
        return empty and id(step) not in self._told

    def reported(self, op: Op) -> dict[str, Any]:
        """What the oldest step's output reports by a script, for :meth:`output`: only what is under way."""
        step = self.in_flight[0]
        drafted = step.scheduled.scheduled_spec_decode_tokens
        arguments: dict[str, Any] = {"accepted": {name: op.accepted.get(name, 0) for name in drafted}}
        if self.connector is None:
            return arguments
        loads = getattr(step.scheduled.kv_connector_metadata, "loads", ())
        loading = self.runner.loading | {load.request_id for load in loads if load.asynchronous}
        held: set[str] = getattr(self.connector, "held", set())
        failed: list[int] = []
        for name, (first, end) in op.failed.items():
            if name in self.scheduler.requests:
                failed += self.blocks(name)[first:end]
        return arguments | {
            "invalid_blocks": failed,
            "finished_recving": sorted(loading.intersection(op.loaded)),
            "failed_recving": sorted(loading.intersection(op.failed_whole)),
            "finished_sending": sorted(held.intersection(op.sent)),
        }

    def expect(self, request_id: str, answers: Iterable[Any], *, hold: bool) -> None:
        """Have a connector of ``connector.py`` answer a request's lookups, and hold its blocks at its end."""
        if self.connector is not None and hasattr(self.connector, "answers"):
            self.connector.answers[request_id] = deque(
                tuple(answer) if isinstance(answer, list) else answer for answer in answers
            )
            if hold:
                self.connector.holds.add(request_id)

    # Questions.

    def blocks(self, request_id: str, group: int = 0) -> list[int]:
        """The ids of the blocks that a request holds, in order."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    def prefill_stats(self, request_id: str) -> Any:
        """vLLM's PrefillStats (since 0.20), delivered with a request's first output; None without them."""
        outputs = self.delivered.get(request_id, ())
        stats = (getattr(output, "prefill_stats", None) for output in outputs)
        return next((each for each in stats if each is not None), None)


# --- Observes schedulers in this process as kvledger observes those of engines; events stay in memory.


class Observation:
    """Call it with each scheduler, before its first request.

    ``level`` "": blocks, or tokens where a release's blocks are out of reach. ``clock``: nanoseconds.
    """

    def __init__(
        self,
        level: str = "tokens",
        *,
        clock: Callable[[], int] | None = None,
        sink: MemoryRecorder | None = None,
        version: str = "",
    ) -> None:
        self.level = level
        self.sink = sink or MemoryRecorder()
        """Keeps the events until they are taken."""
        self.schedulers: list[Any] = []
        """The observed schedulers, in order."""
        self.observers: list[Any] = []
        """The observer of each."""
        self._how: dict[str, Any] = {"version": version} | ({"clock": clock} if clock is not None else {})

    def __call__(self, scheduler: Any) -> None:
        from ..engines import blocks_out_of_reach, choose, host_version

        self.level = self.level or ("tokens" if blocks_out_of_reach(scheduler) else "blocks")
        how = {**self._how, "version": self._how["version"] or host_version(), "level": self.level}
        self.schedulers.append(scheduler)
        self.observers.append(choose(scheduler)(scheduler, self.sink, **how))
        self.observers[-1].start()

    def take(self) -> list[Event]:
        """The events since the last call."""
        return self.sink.take()

    def stop(self, reason: str = "exit") -> list[Event]:
        """End the observation; the events that were not taken yet."""
        for observer in self.observers:
            observer.stop(reason)
        return self.take()
