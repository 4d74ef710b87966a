"""A real engine under random traffic, into which a history can be driven.

`Crowd` adds requests of random length to a driver of the real scheduler, some with a shared prefix, and
aborts some of them. Preemptions come from a pool that is too small, as in production. `LoadingDriver` has
loads that take a few steps, and that fail where a history says so.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvledger.audit.traffic.driver import Driver
from kvledger.audit.traffic.engine_setup import EngineSetup

MAX_STEPS = 4000
"""A crowd that takes more steps for one request will never end it."""


@dataclass(frozen=True)
class Traffic:
    """What requests the crowd has. Lengths are tokens, shares are shares of all requests."""

    prompt: tuple[int, int] = (1, 250)
    output: tuple[int, int] = (1, 60)
    steps: tuple[int, int] = (0, 4)
    """Steps between two arrivals."""
    open_requests: int = 12
    """A request arrives only while fewer are open."""
    families: int = 4
    """Prefixes that requests share; 0: none."""
    aborted: float = 0.1
    external: float = 0.0
    """Requests with tokens in the external cache."""


class LoadingDriver(Driver):
    """A driver whose asynchronous loads take up to three outputs, and whose loads can fail."""

    def __init__(self, setup: EngineSetup, dice: random.Random) -> None:
        super().__init__(setup, seed=dice.getrandbits(32), record=False)
        self.fails: dict[str, int] = {}
        """By request id: the first external block that its next load will not fill."""
        self._dice = dice
        self._outputs = 0
        self._due: dict[str, tuple[int, Any]] = {}
        """Asynchronous loads by request id: the number of the output that ends each, and the load."""

    def output(self, *, accepted: Any = None, **_: Any) -> dict[int, Any]:
        if self.connector is None:
            return super().output(accepted=accepted)
        self._outputs += 1
        ended = []
        for load in self.in_flight[0].scheduled.kv_connector_metadata.loads:
            if load.asynchronous:
                self._due[load.request_id] = (self._outputs + self._dice.randint(0, 2), load)
            else:
                ended.append(load)
        loaded = [name for name, (due, _) in self._due.items() if due <= self._outputs]
        ended += [self._due.pop(name)[1] for name in loaded]
        failed = [block for load in ended for block in self._failed_blocks(load)]
        return super().output(
            accepted=accepted, invalid_blocks=failed, finished_recving=loaded, finished_sending="all"
        )

    def _failed_blocks(self, load: Any) -> list[int]:
        first = self.fails.pop(load.request_id, None)
        if first is None:
            return []
        calls = reversed(self.connector.script.calls)
        looked_up = (call for call in calls if hasattr(call, "answer") and call.request_id == load.request_id)
        local = next(looked_up).local_tokens
        size = self.setup.block_size
        return list(load.block_ids[0][local // size + first : (local + load.external_tokens) // size])


class Crowd:
    """Random requests on one driver. A history adds its own requests with `add`."""

    def __init__(self, driver: Any, dice: random.Random, traffic: Traffic, store: Any = None) -> None:
        self.driver = driver
        self.store = store
        """The table that answers LMCache's lookups, where LMCache is the connector."""
        self.added = 0
        """Requests added so far."""
        self.steps = 0
        self.after_step: Callable[[], object] = id  # type: ignore[assignment]
        self.dice = dice
        self._traffic = traffic
        self._open: list[str] = []
        self._loads = ""
        """The random request that last loaded asynchronously."""
        self._random: set[str] = set()
        """Requests that are not of a history."""

    # What a history calls.

    def new_id(self) -> str:
        """A request id as vLLM's front end makes it."""
        return f"chatcmpl-{self.dice.getrandbits(128):032x}-{self.dice.getrandbits(32):08x}"

    def add(self, prompt_tokens: int, max_tokens: int, *, request_id: str = "", **options: Any) -> str:
        """Add a request; returns its id."""
        request_id = request_id or self.new_id()
        self.driver.add(request_id, prompt_tokens, max_tokens, **options)
        self.added += 1
        self._open.append(request_id)
        return request_id

    def arrive(self) -> None:
        """A random request arrives, a few steps run, and some random request may be aborted."""
        dice, traffic = self.dice, self._traffic
        self.step_until(lambda: len(self._still_open()) < traffic.open_requests)
        length = dice.randint(*traffic.prompt)
        request_id = self.new_id()
        shared = dice.randint(0, length) if traffic.families else 0
        family = f"family {dice.randrange(traffic.families or 1)}"
        if dice.random() < traffic.external:
            self._store(request_id, dice.randint(0, 250), dice.random() < 0.5)
        self.add(length, dice.randint(*traffic.output), request_id=request_id, shares=(family, shared))
        self._random.add(request_id)
        for _ in range(dice.randint(*traffic.steps)):
            self.step()
        if dice.random() < traffic.aborted:
            self._abort_one()

    def _store(self, request_id: str, tokens: int, asynchronous: bool) -> None:
        """Let the external cache have some tokens.

        Loaded requests that wait for further blocks keep theirs, so several of them can block each other.
        """
        asynchronous &= not self._loads or not self.is_open(self._loads)
        if asynchronous:
            self._loads = request_id
        self.driver.connector.store(request_id, tokens, asynchronous=asynchronous)

    def _abort_one(self) -> None:
        candidates = [request_id for request_id in self._still_open() if request_id in self._random]
        if candidates:
            self.driver.abort(self.dice.choice(candidates))

    def step(self) -> None:
        self.driver.step()
        self.steps += 1
        self.after_step()

    def step_until(self, reached: Callable[[], bool], arrivals: bool = False) -> None:
        """Step until something is so; with ``arrivals``, other requests arrive meanwhile."""
        for _ in range(MAX_STEPS):
            if reached():
                return
            if arrivals:
                self.arrive()
            self.step()
        raise RuntimeError(f"not reached after {MAX_STEPS} steps")

    def finish(self, request_id: str, arrivals: bool = False) -> None:
        """Step until a request has ended."""
        self.step_until(lambda: not self.is_open(request_id), arrivals)

    def is_open(self, request_id: str) -> bool:
        groups = getattr(self.driver, "groups", None)  # a v0 driver keeps ended requests
        if groups is not None:
            return not groups[request_id].is_finished()
        return request_id in self.driver.scheduler.requests

    def is_running(self, request_id: str) -> bool:
        running = self.driver.scheduler.running
        return any(request.request_id == request_id for request in running)

    @property
    def waiting(self) -> int:
        return len(self.driver.scheduler.waiting)

    @property
    def free_blocks(self) -> int:
        scheduler = self.driver.scheduler
        manager = getattr(scheduler, "kv_cache_manager", None)
        if manager is None:
            return int(scheduler.block_manager.get_num_free_gpu_blocks())
        return int(manager.block_pool.get_num_free_blocks())

    def fill_pool(self, most_free: int, least_free: int) -> None:
        """Let requests arrive and run until nothing waits and only so many blocks are free."""
        for _ in range(MAX_STEPS):
            if self.waiting == 0 and least_free <= self.free_blocks <= most_free:
                return
            if self.waiting == 0 and self.free_blocks > most_free:
                self.arrive()
            else:
                self.step()
        raise RuntimeError(f"the pool was not filled after {MAX_STEPS} steps")

    def _still_open(self) -> list[str]:
        self._open = [request_id for request_id in self._open if self.is_open(request_id)]
        return self._open
