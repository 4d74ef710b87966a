"""Traffic on real schedulers over planned time: what happens is known, so an incident can be planted.

The scheduler is vLLM's; the model's output is generated. Time is a plan's: a step takes as long as its work
says, and a request arrives when the plan says, so that ten minutes of traffic take seconds. The observer's
clocks are the plan's, and the journal is an ordinary one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from tests.scenarios.driving import Driver, engine_setup, lora

from kvledger.audit.engines import observer as observer_module
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.traffic.driver import Observation

BEGAN = 1_767_225_600.0
"""The beginning of 2026, from which the time of all plans counts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What clients send and how engines serve it. Times are seconds, lengths tokens."""

    setup: Mapping[str, Any] = field(default_factory=dict)
    """Of each engine, as :class:`EngineSetup` takes it."""
    rates: Mapping[str, float] = field(default_factory=lambda: {"acme": 4.0, "blue": 4.0, "cyan": 4.0})
    """Requests a second of each tenant."""
    prefixes: int = 6
    """How many prefixes the requests of a tenant share."""
    prefix: int = 128
    tail: int = 24
    output: int = 8
    tails: Mapping[str, int] = field(default_factory=dict)
    """The tail of tenants that have another."""
    stamped: Collection[str] = ()
    """Tenants whose prompts begin with their own time each, so that no two share a prefix."""
    fixed_step: float = 4e-3
    token_seconds: float = 1e-4
    engines: int = 1
    pinned: bool = True
    """Each tenant's requests go to one engine."""
    stored: int = 0
    """How many tokens of each prompt the connector's store holds."""
    load_steps: int = 1
    """Every how many steps loads end."""
    failing: float = 0.0
    """The share of loads that fail."""
    accepted: int | None = None
    """Drafts that each request accepts."""
    reset_every: float = 0.0
    urgent: float = 0.0
    """The share of requests that are urgent, under the policy ``priority``."""
    adapter: str = ""
    aborted: float = 0.0
    """The share of requests whose clients leave."""
    level: str = "tokens"
    version: str = ""
    """The release that the journal names; "" for the one that runs."""
    model: str = "small"
    dies: int = -1
    """The number of the engine that is killed at its next request; -1: none."""
    tamper: Any = None
    """Called with the driver every ten seconds."""


def arrivals(plan: Plan, seconds: float, dice: Random) -> list[tuple[float, str]]:
    """When which tenant sends a request."""
    found = []
    for tenant, rate in plan.rates.items():
        at = dice.expovariate(rate)
        while at < seconds:
            found.append((at, tenant))
            at += dice.expovariate(rate)
    return sorted(found)


def serve(folder: Path, name: str, *phases: tuple[Plan, float], began: float = 0.0, seed: int = 0) -> float:
    """Serve phases of so many seconds, and write a journal for each engine of the first plan.

    Returns when the last engine ended, in seconds of the plan.
    """
    first, dice = phases[0][0], Random(f"{name} {seed}")
    queues: list[Queue] = [[] for _ in range(first.engines)]
    begin = began
    for plan, seconds in phases:
        tenants = sorted(plan.rates)
        for at, tenant in arrivals(plan, seconds, dice):
            place = tenants.index(tenant) if plan.pinned else dice.randrange(first.engines)
            queues[place % first.engines].append((begin + at, tenant, plan))
        begin += seconds
    engines = [
        _Engine(first, began, place, Random(f"{name} {seed} {place}")) for place in range(first.engines)
    ]
    return max(
        engine.run(folder / f"{name}-{place}", queue)
        for place, (engine, queue) in enumerate(zip(engines, queues, strict=True))
    )


class Planned(Protocol):
    """An engine with a time of its own, in seconds."""

    now: float


def nanoseconds(engine: Planned) -> int:
    """The time of an engine, for its observer."""
    return round(engine.now * 1e9)


@contextmanager
def planned_clock(engine: Planned) -> Iterator[None]:
    """Let observers take the time of an engine."""
    planned = SimpleNamespace(
        monotonic_ns=lambda: nanoseconds(engine),
        monotonic=lambda: engine.now,
        time=lambda: BEGAN + engine.now,
        perf_counter_ns=time.perf_counter_ns,
    )
    with (
        patch.object(observer_module, "time", planned),
        patch("kvledger.audit.journal.recorder.time", planned),
        patch("kvledger.audit.journal.recorder.time", planned),
    ):
        yield


def write_journal(folder: Path, sink: MemoryRecorder) -> None:
    """Write what an observer recorded."""
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write(sink.take())
    writer.close()


Queue = list[tuple[float, str, Plan]]
"""When a request arrives, of which tenant, and the plan of that time."""


class _Engine:
    def __init__(self, plan: Plan, began: float, place: int, dice: Random) -> None:
        self.plan, self.now, self.place, self.dice = plan, began, place, dice
        self.sent = self.steps = 0
        self.failed: set[str] = set()

    def run(self, folder: Path, queue: Queue) -> float:
        """Serve the requests of the queue and write the journal."""
        with planned_clock(self):
            setup = engine_setup(**{"blocks": 400, "max_running": 8} | dict(self.plan.setup))
            driver = Driver(setup, record=False)
            driver.scheduler.vllm_config.model_config.served_model_name = self.plan.model
            plan = self.plan
            observation = Observation(plan.level, version=plan.version or "", clock=lambda: nanoseconds(self))
            observation(driver.scheduler)
            if self._serve(driver, queue):
                for observer in observation.observers:
                    observer.stop("shutdown")
        write_journal(folder, observation.sink)
        return self.now

    def _serve(self, driver: Driver, queue: Queue) -> bool:
        """Serve the queue; whether the engine lives."""
        waiting = deque(queue)
        reset = tamper = self.now
        while waiting or driver.scheduler.has_requests() or driver.in_flight:
            if not driver.scheduler.has_requests() and not driver.in_flight:
                self.now = max(self.now, waiting[0][0])
            while waiting and waiting[0][0] <= self.now:
                _, tenant, self.plan = waiting.popleft()
                self._add(driver, tenant)
            if self.plan.dies == self.place and driver.scheduler.has_requests():
                return False
            if not self.plan.reset_every:
                reset = self.now
            elif self.now - reset >= self.plan.reset_every:
                reset += self.plan.reset_every
                driver.reset_prefix_cache()
            if self.plan.tamper and self.now - tamper >= 10.0:
                tamper = self.now
                self.plan.tamper(driver)
            self._step(driver)
        return True

    def _add(self, driver: Driver, tenant: str) -> None:
        plan, number = self.plan, self.sent
        self.sent += 1
        name = f"{tenant}-{number}-{round(self.now * 1000)}"
        family = (
            f"{name} stamped" if tenant in plan.stamped else f"{tenant} {self.dice.randrange(plan.prefixes)}"
        )
        more: dict[str, Any] = {}
        if plan.adapter:
            more["of_request"] = lora(plan.adapter, 1 + sum(map(ord, plan.adapter)) % 100)
        if self.plan.setup.get("policy") == "priority":
            more["priority"] = 0 if self.dice.random() < plan.urgent else 5
        if plan.stored:
            driver.connector.store(name, plan.stored, asynchronous=True)
            if self.dice.random() < plan.failing:
                self.failed.add(name)
        tail = plan.tails.get(tenant, plan.tail)
        driver.add(name, plan.prefix + tail, plan.output, shares=(family, plan.prefix), **more)
        if self.dice.random() < plan.aborted:
            driver.abort(name)

    def _step(self, driver: Driver) -> None:
        self.steps += 1
        scheduled = driver.schedule() if driver.scheduler.has_requests() else None
        tokens = scheduled.total_num_scheduled_tokens if scheduled else 0
        self.now += self.plan.fixed_step * self.dice.uniform(0.97, 1.03) + self.plan.token_seconds * tokens
        transfers: dict[str, Any] = {}
        if self.plan.stored:
            loads = list(scheduled.kv_connector_metadata.loads) if scheduled else []
            failed = [load for load in loads if load.request_id in self.failed]
            transfers = {
                "invalid_blocks": [load.block_ids[0][-1] for load in failed if load.block_ids[0]],
                "finished_recving": () if self.steps % self.plan.load_steps else "all",
                "finished_sending": "all",
            }
        driver.output(accepted=self.plan.accepted, **transfers)
