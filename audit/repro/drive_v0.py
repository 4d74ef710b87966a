"""The engine of a workload for the v0 scheduler (0.9): a schedule is a whole step, its output included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..traffic.driver_v0 import V0Driver, V0Setup
from ..traffic.script import Op, Segment, Workload


class V0Engine:
    """One v0 scheduler under a script; also what a probe reads."""

    def __init__(self, workload: Workload, tokens_of: Callable[[tuple[Segment, ...]], list[int]]) -> None:
        self.workload = workload
        """What the engine is led through."""
        engine = {name: value for name, value in workload.engine.items() if name != "scheduler"}
        if any(request.lora for request in workload.requests.values()):
            engine.setdefault("max_loras", 1)
        self.driver = V0Driver(V0Setup(**engine))
        """Drives the scheduler."""
        self.scheduler: Any = self.driver.scheduler
        """vLLM's v0 scheduler."""
        self.requests: dict[str, Any] = {}
        """vLLM's sequence groups, by the names of the script."""
        self.outputs: dict[str, list[Any]] = {}
        """What the engine returned of each request: nothing here."""
        self.steps: list[Any] = []
        """What the scheduler returned for each step, oldest first."""
        self.in_flight = 0
        """Scheduled steps without an output."""
        self.raised = ""
        """The exception that ended the script; empty if none did."""
        self._tokens_of = tokens_of

    def carry_out(self, op: Op) -> None:
        """Do one operation of the script, or skip it."""
        name = op.request
        if op.do == "add" and name not in self.requests:
            request = self.workload.requests[name]
            self.requests[name] = self.driver.add(
                name,
                self._tokens_of(request.prompt),
                min(request.max_tokens, request.stop_at or request.max_tokens),
                priority=request.priority,
                lora=request.lora,
            )
        elif op.do == "schedule" and (self.scheduler.has_unfinished_seqs()):
            self.driver.step()
            self.steps.append(op)
        elif op.do == "abort" and name in self.requests:
            self.driver.abort(name)
        elif op.do == "reset":
            self.scheduler.reset_prefix_cache()
