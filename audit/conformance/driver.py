"""Drives a real vLLM scheduler through real steps, with generated model output.

The driver takes the place of vLLM's EngineCore: it calls `schedule()`, has the runner generate the
output, and keeps the engine's order. Outputs answer steps first in, first out; under async scheduling
one step is scheduled before the output of the last one is delivered.

The driver does not observe the scheduler and counts no tokens. Observers attach to its scheduler.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from . import release
from .engine_setup import EngineSetup, block_hasher, build_request, build_scheduler
from .runner import FIRST_TOKEN, Accepted, ModelStep, Runner, TransferReport, tokens

__all__ = ["Driver", "EngineSetup", "ModelStep", "tokens"]


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
        self._record = record
        self._depth = 2 if self.setup.asynchronous else 1
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
        release.preempt(self.scheduler, request, drop)

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
        outputs: dict[int, Any] = release.take_output(self.scheduler, step.scheduled, answer, drafts)
        if self._record:
            for of_client in outputs.values():
                for output in of_client.outputs:
                    self.delivered.setdefault(output.request_id, []).append(output)
        return outputs

    def step(self, **of_output: Any) -> dict[int, Any]:
        """One iteration of the engine; under async scheduling the first one only schedules."""
        if self.scheduler.has_requests():
            scheduled = self.schedule()
            room = len(self.in_flight) < self._depth
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

    # Questions.

    def blocks(self, request_id: str, group: int = 0) -> list[int]:
        """The ids of the blocks that a request holds, in order."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[group])

    def prefill_stats(self, request_id: str) -> Any:
        """vLLM's PrefillStats (since 0.20), delivered with a request's first output; None without them."""
        outputs = self.delivered.get(request_id, ())
        stats = (getattr(output, "prefill_stats", None) for output in outputs)
        return next((each for each in stats if each is not None), None)
