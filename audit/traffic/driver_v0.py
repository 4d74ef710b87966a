"""Drives a real vLLM v0 scheduler (0.9.1, 0.9.2) through real steps, with generated model output.

The driver takes the place of vLLM's LLMEngine and keeps the engine's order. Synchronously it schedules a
step, then processes the step's output: counts, tokens, stops and finished requests. With the asynchronous
output processor (the default of v0) it processes a step's counts and tokens at once, and checks for stops
while the next step runs. A request that finishes then has one step too many in flight.

The driver does not observe the scheduler and keeps no token counts of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .driver import FIRST_TOKEN, tokens
from .script import Op

__all__ = ["Attach", "V0Driver", "V0Setup", "start", "tokens"]

Attach = Callable[[Any], object]


@dataclass(frozen=True)
class V0Setup:
    """The part of an engine's configuration that its scheduler uses."""

    blocks: int = 64
    cpu_blocks: int = 64
    block_size: int = 16
    max_running: int = 16
    max_batched_tokens: int = 2048
    max_model_len: int = 2048
    asynchronous: bool = False
    """The output processor runs one step behind."""
    prefix_caching: bool = True
    chunked_prefill: bool = False
    partial_prefills: int = 1
    preemption_mode: Literal["recompute", "swap"] | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_loras: int = 0
    """0: no LoRA."""
    pooling: bool = False


class _ExecutedStep:
    """A scheduled step whose requests were not checked for stops yet."""

    def __init__(self, metadata: list[Any], outputs: Any, asynchronous: bool) -> None:
        self.groups = [scheduled.seq_group for scheduled in outputs.scheduled_seq_groups]
        """The sequence groups of the step."""
        self.chunks = [row.token_chunk_size for row in metadata]
        """Tokens that it computed of each."""
        self.samples = [row.do_sample for row in metadata]
        """Whether it sampled a token of each."""
        self.asynchronous = asynchronous
        """Whether the output is processed in the next step."""
        self.skip: set[int] = set()
        """Places of the groups whose output was processed early."""


class V0Driver:
    """One scheduler, and the part of an engine around it."""

    def __init__(self, setup: V0Setup) -> None:
        self.setup = setup
        """How the engine is configured."""
        self.outputs: dict[str, list[int]] = {}
        """Output tokens by request id."""
        self.groups: dict[str, Any] = {}
        """vLLM's sequence groups, by request id."""
        self.steps: list[Any] = []
        """What the scheduler returned for each step, oldest first."""
        self._pending: deque[_ExecutedStep] = deque()
        """Executed steps whose output is not processed yet."""
        self._added = 0
        self.scheduler: Any = _build_scheduler(
            setup, self._process_pending_output_of if setup.asynchronous else None
        )
        """vLLM's v0 scheduler."""

    # Calls of clients.

    def add(
        self,
        request_id: str,
        prompt_tokens: int | list[int],
        max_tokens: int = 16,
        *,
        shares: tuple[str, int] | None = None,
        priority: int = 0,
        lora: int = 0,
        embeds: bool = False,
    ) -> Any:
        """Add a request; returns vLLM's SequenceGroup.

        A number of prompt tokens means generated tokens of this request; ``shares=("a", 64)`` takes the
        first 64 of them from the token family "a". ``lora`` is the number of a LoRA adapter; ``embeds``
        passes the prompt as embeddings.
        """
        from vllm.sequence import Sequence, SequenceGroup

        family, shared = shares or ("", 0)
        if isinstance(prompt_tokens, int):
            prompt = tokens(shared, family) + tokens(prompt_tokens - shared, f"own {request_id}")
        else:
            prompt = prompt_tokens
        self._added += 1
        adapter = _lora_request(lora)
        sequence = Sequence(self._added, _inputs(prompt, embeds), self.setup.block_size, lora_request=adapter)
        group = SequenceGroup(
            request_id,
            [sequence],
            float(self._added),
            **_parameters(self.setup.pooling, max_tokens),
            lora_request=adapter,
            priority=priority,
        )
        self.groups[request_id] = group
        self.outputs[request_id] = []
        self.scheduler.add_seq_group(group)
        return group

    def abort(self, request_id: str) -> None:
        """Abort a request, as when its client disconnects."""
        self.scheduler.abort_seq_group(request_id)

    # Calls of the engine.

    def step(self) -> None:
        """One iteration of the engine."""
        metadata, outputs, asynchronous = self.scheduler.schedule()
        self.steps.append(outputs)
        self.scheduler.get_and_reset_finished_requests_ids()
        if not asynchronous:
            self._catch_up()  # the last step may have been asynchronous
        if outputs.is_empty():
            self._catch_up()
            return
        executed = _ExecutedStep(metadata, outputs, asynchronous)
        if asynchronous:
            self._catch_up()  # while the model runs
        self._pending.append(executed)
        if not asynchronous:
            self._catch_up()
            return
        for group, chunk, samples in zip(executed.groups, executed.chunks, executed.samples, strict=True):
            if not group.is_finished():
                group.update_num_computed_tokens(chunk)
                if samples:
                    self._append(group)

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_seqs() and not self._pending:
                return
            self.step()
        raise RuntimeError(f"not done after {max_steps} steps")

    def carry_out(self, op: Op) -> None:
        """Do one operation of a script, or skip it. A schedule is a whole step, its output included."""
        if op.do == "add" and op.request not in self.groups:
            self.come(op.request)
        elif op.do == "schedule" and self.scheduler.has_unfinished_seqs():
            self.step()
        elif op.do == "abort" and op.request in self.groups:
            self.abort(op.request)
        elif op.do == "reset":
            self.scheduler.reset_prefix_cache()

    def come(self, name: str) -> None:
        """A script's request comes. A driver of scripts knows the requests."""
        raise NotImplementedError

    def _catch_up(self) -> None:
        while self._pending:
            self._process(self._pending.popleft())

    def _process(self, executed: _ExecutedStep) -> None:
        """Process a step's output by group: synchronously its counts and tokens first, then its stops."""
        any_finished = False
        for number, group in enumerate(executed.groups):
            if number in executed.skip or group.is_finished():
                continue
            any_finished |= self._process_group(executed, number)
        if any_finished:
            self.scheduler.free_finished_seq_groups()

    def _process_group(self, executed: _ExecutedStep, number: int) -> bool:
        group = executed.groups[number]
        if not executed.asynchronous:
            group.update_num_computed_tokens(executed.chunks[number])
        if executed.samples[number] or self.setup.pooling:
            if not (executed.asynchronous or self.setup.pooling):
                self._append(group)
            self._finish_if_stopped(group)
        return bool(group.is_finished())

    def _append(self, group: Any) -> None:
        from vllm.sequence import Logprob

        sequence = group.first_seq
        token = FIRST_TOKEN + (sequence.seq_id * 1009 + sequence.get_len() * 7) % 31_000
        sequence.append_token_id(token, {token: Logprob(0.0)})
        self.outputs[group.request_id].append(token)

    def _finish_if_stopped(self, group: Any) -> None:
        from vllm.sequence import SequenceStatus

        sequence = group.first_seq
        if self.setup.pooling:
            sequence.status = SequenceStatus.FINISHED_STOPPED
        elif (
            sequence.get_len() > self.setup.max_model_len
            or sequence.get_output_len() >= group.sampling_params.max_tokens
        ):
            sequence.status = SequenceStatus.FINISHED_LENGTH_CAPPED
            self.scheduler.free_seq(sequence)

    def _process_pending_output_of(self, request_id: str) -> None:
        """Check a request for a stop; the scheduler calls this back before it preempts the request."""
        for executed in list(self._pending)[:1]:
            for number, group in enumerate(executed.groups):
                if group.request_id == request_id:
                    self._process_group(executed, number)
                    executed.skip.add(number)

    # Questions.

    def blocks(self, request_id: str) -> list[int]:
        """The ids of the blocks that a request holds, in order."""
        sequence = self.groups[request_id].first_seq
        table = self.scheduler.block_manager.block_tables.get(sequence.seq_id)
        return list(table.physical_block_ids) if table is not None else []

    def kept_lookups(self) -> dict[int, int]:
        """The lookup results that the engine keeps: cached tokens by sequence id."""
        tracker = getattr(self.scheduler.block_manager, "_computed_blocks_tracker", None)
        return dict(getattr(tracker, "_seq_id_to_num_tokens_computed", {}))


def start(attach: Attach = id, /, **setup: Any) -> V0Driver:
    """A driver whose scheduler is passed to ``attach`` before its first request."""
    driver = V0Driver(V0Setup(**setup))
    attach(driver.scheduler)
    return driver


def _build_scheduler(setup: V0Setup, callback: Callable[..., None] | None) -> Any:
    os.environ.setdefault("VLLM_USE_V1", "0")
    from vllm.config import CacheConfig, LoRAConfig, SchedulerConfig
    from vllm.core.scheduler import Scheduler

    scheduling = SchedulerConfig(
        runner_type="pooling" if setup.pooling else "generate",
        max_num_batched_tokens=setup.max_batched_tokens,
        max_num_seqs=setup.max_running,
        max_model_len=setup.max_model_len,
        max_num_partial_prefills=setup.partial_prefills,
        max_long_partial_prefills=setup.partial_prefills,
        long_prefill_token_threshold=setup.block_size * 4 if setup.partial_prefills > 1 else 0,
        enable_chunked_prefill=setup.chunked_prefill,
        preemption_mode=setup.preemption_mode,
        policy=setup.policy,
    )
    cache = CacheConfig(block_size=setup.block_size, enable_prefix_caching=setup.prefix_caching)
    cache.num_gpu_blocks, cache.num_cpu_blocks = setup.blocks, setup.cpu_blocks
    loras = LoRAConfig(max_lora_rank=8, max_loras=setup.max_loras) if setup.max_loras else None
    return Scheduler(scheduling, cache, loras, output_proc_callback=callback)


def _lora_request(number: int) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"lora {number}", number, "nowhere") if number else None


def _inputs(prompt: list[int], embeds: bool) -> Any:
    import torch
    from vllm.inputs import token_inputs
    from vllm.inputs.data import embeds_inputs

    return embeds_inputs(torch.zeros(len(prompt), 4)) if embeds else token_inputs(prompt)


def _parameters(pooling: bool, max_tokens: int) -> dict[str, Any]:
    from vllm import PoolingParams, SamplingParams

    if pooling:
        return {"pooling_params": PoolingParams()}
    return {"sampling_params": SamplingParams(max_tokens=max_tokens, ignore_eos=True)}
