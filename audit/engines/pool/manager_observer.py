"""Observes a KV cache manager without a scheduler, as tests build it: only its pools are observed.

There are no steps and no accounts. A request is emitted, with no length, when a pool is first called for
it; its blocks are known from the calls of the pool.
"""

from __future__ import annotations

import os
import time
from typing import Any

from ... import events as ev
from ...text import cut_id, failure
from ..step_log import Sink, StepLog
from .pool_watch import PoolWatch


class _Log(StepLog):
    """Emits a request when it is first seen."""

    def intern(self, request_id: str) -> int:
        first = request_id not in self.ids
        number = super().intern(request_id)
        if first:
            self.emit(ev.RequestAdded(self.now(), number, cut_id(request_id), prompt_tokens=0))
        return number


class ManagerObserver:
    """Observes one manager. ``start`` wraps its pools; ``stop`` reports all blocks and restores the pools."""

    NAME = "kv-cache-manager"

    def __init__(self, manager: Any, sink: Sink, *, version: str, stacks: bool = False) -> None:
        self.manager = manager
        """vLLM's KV cache manager."""
        self.log = _Log(sink)
        """Receives the events."""
        self.version = version
        """The release of vLLM."""
        self._stacks = stacks
        """Whether the Python stack of each call is recorded."""
        self._step = 0
        self.pools: PoolWatch | None = None
        """Observes the manager's pools; None before the start."""

    def start(self, boundary: Any = None) -> None:
        """Wrap the pools. Raises :class:`~kvledger.audit.hooks.EngineMismatch` with nothing wrapped."""
        self.pools = PoolWatch(
            None, self.manager, self.log, lambda: self._step, self._failed, stacks=self._stacks
        )
        now = self.log.now()
        started = ev.EngineStarted(
            now, time.time(), "vllm", self.version, self.NAME, "blocks", os.getpid(), {}
        )
        self.log.restart(started, ev.Snapshot(now, 0, [], 0))
        self.pools.begin_segment()

    def step(self) -> None:
        """The user of the manager begins another step: report every block."""
        assert self.pools is not None
        self.pools.emit_all_calls()
        self._step += 1
        self.pools.report_all()

    def stop(self, reason: str) -> None:
        """Report every block and restore the pools. Idempotent."""
        if self.pools is not None:
            self.pools.report_all()
            self.pools.remove()
            self.pools = None
            self.log.emit(ev.EngineStopped(self.log.now(), reason))

    def _failed(self, hook: str, error: Exception, removed: bool) -> None:
        self.log.emit(ev.HookFailed(self.log.now(), hook, failure(error), removed))
